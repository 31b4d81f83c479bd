//! What becomes of a routed request, as far as later decisions depend on it: whether the worker answered, and how long its
//! prefill took.

use std::time::{Duration, Instant};

use dashmap::DashMap;

use super::Router;
use super::answer::{ComputedBy, Mode, Prefill};
use super::leg::Legs;
use super::placing::Booked;
use super::pools::{Pools, Standings};
use super::predictions::BookedPredictions;
use super::question::RouteRequest;
use crate::fleet::Member;
use crate::health::{Change, Outcome, Probe};
use crate::load::Booking;
use crate::load::duration::PrefillTimes;
use crate::trust::Trust;
use crate::worker::{ModelName, Role, WorkerId, WorkerRank};

/// What a request got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Who gave it.
    pub from: AnswerFrom,
}

/// Who gave an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFrom {
    /// The chosen worker, or nobody knows better.
    Chosen,
    /// Another worker, because the chosen one could not be reached.
    Other(WorkerId),
    /// The gateway, because no worker could be reached.
    Gateway,
}

/// How long prefills take, per model and role.
#[derive(Debug, Default)]
pub(super) struct Durations(DashMap<(ModelName, Role), PrefillTimes>);

impl Durations {
    /// Enters what each prefill is expected to take.
    pub(super) fn estimate(&self, legs: &Legs<'_>, bookings: &mut [Booking]) {
        for (member, booking) in legs.chosen().zip(bookings) {
            self.estimate_one(member, booking);
        }
    }

    /// Enters what one prefill is expected to take.
    pub(super) fn estimate_one(&self, member: &Member, booking: &mut Booking) {
        let worker = &member.worker;
        let tokens = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        let key = (worker.model.clone(), worker.role);
        booking.prefill_time = self.0.get(&key).and_then(|times| times.estimate(tokens));
    }
}

impl Router {
    /// Takes note of a request's answer; says what it changed about whom, for the log.
    pub fn answered(&self, booked: &mut Booked, answer: Answer) -> Vec<(WorkerId, Change)> {
        let now = self.load.now();
        let chosen = booked.chosen.worker;
        // Of a prefill that was over before, everything has been said.
        let prefill = booked
            .route
            .prefill()
            .filter(|_| !booked.took_over)
            .map(|prefill| prefill.to.rank.worker);
        // After a called prefill, `on_prompt_computed` expects the events already.
        if answer.from == AnswerFrom::Chosen
            && (200..300).contains(&answer.status)
            && !booked.took_over
        {
            self.expect_events(booked, now);
        }
        match answer.from {
            AnswerFrom::Chosen => self.settle_predictions(booked, answer.status),
            // The predictions move there first.
            AnswerFrom::Other(_) => {}
            AnswerFrom::Gateway => booked.predictions = BookedPredictions::default(),
        }
        let outcome = match Outcome::of_status(answer.status) {
            // An answer that proves nothing by success proves nothing by failure either.
            Outcome::Success | Outcome::Failure if !booked.route.is_inference() => {
                Outcome::Inconclusive
            }
            outcome => outcome,
        };
        // What fails after a remote prefill may have failed on either side.
        let said = Some(outcome).filter(|said| *said != Outcome::Failure || prefill.is_none());
        let (of_chosen, other) = match answer.from {
            AnswerFrom::Chosen => (said, None),
            AnswerFrom::Other(worker) => (Some(Outcome::Failure), said.map(|said| (worker, said))),
            AnswerFrom::Gateway => (Some(Outcome::Failure), None),
        };
        // Without its prefill there would be no such answer.
        let well = answer.from != AnswerFrom::Gateway && (200..300).contains(&answer.status);
        let of_prefill = prefill
            .filter(|_| well)
            .map(|worker| (worker, Outcome::Success));
        let verdicts = of_chosen
            .map(|outcome| (chosen, outcome))
            .into_iter()
            .chain(other)
            .chain(of_prefill);
        // Probes without a verdict are given back.
        let mut probes = std::mem::take(&mut booked.probes);
        verdicts
            .filter_map(|(worker, outcome)| self.verdict(worker, outcome, &mut probes, now))
            .collect()
    }

    /// Whoever computed the prompt of an answered request has stored blocks, unless it had all of them, and will say so.
    fn expect_events(&self, booked: &Booked, now: Instant) {
        let route = &booked.route;
        let ComputedBy { rank, overlap, .. } = route.computed_by();
        // An engine with larger blocks than ours stores whole ones of its own, of each prompt for itself.
        let engine = self
            .trust(rank)
            .engine_block_size
            .unwrap_or(route.block_size);
        let count = (engine.tokens() / route.block_size.tokens()).max(1);
        let whole: usize = booked
            .prompts
            .iter()
            .map(|hashes| hashes.len() / count * count)
            .sum();
        if route.mode == Mode::Exact && whole > overlap.total() as usize {
            self.sources.answered(rank, booked.placed, now);
        }
    }

    /// The prefill worker of a request has answered, or failed; says what that changed, for the log. The right to try it, if
    /// the request has it, is used up, and where it failed nobody expects its blocks any longer.
    pub fn prefill_answered(
        &self,
        booked: &mut Booked,
        outcome: Outcome,
    ) -> Option<(WorkerId, Change)> {
        let worker = booked.route.prefill()?.to.rank.worker;
        if outcome == Outcome::Failure {
            let prediction = booked.predictions.prefilling.take();
            prediction
                .into_iter()
                .for_each(|prediction| _ = prediction.revoke(&booked.prompts));
        }
        let mut probes = std::mem::take(&mut booked.probes);
        let change = self.verdict(worker, outcome, &mut probes, self.load.now());
        booked.probes = probes;
        change
    }

    /// Handles the response of a called prefill worker that computed the prompt. From now on KV events of this worker are expected,
    /// and the self-test compares their tokens.
    pub fn on_prompt_computed(&self, booked: &mut Booked) {
        self.expect_events(booked, self.load.now());
        self.answered_well(booked);
    }

    /// The prefill of a request that is not yet on its way to whoever decodes was done in this time. Tells something only
    /// where it is known what was left to compute.
    pub fn prefill_done(&self, booked: &Booked, took: Duration) {
        let is_known = |prefill: &Prefill| {
            prefill.trust == Trust::Exact && matches!(prefill.mode, Mode::Exact | Mode::Partial)
        };
        let known = booked.route.prefill().is_some_and(is_known);
        let booking = booked
            .reservation
            .bookings()
            .find(|booking| booking.track_prefill);
        if let Some(booking) = booking.filter(|_| known) {
            self.prefill_took(booking, took);
        }
    }

    /// Takes note of what a worker made of a request, with the probe of it if that is among these; says what it changed.
    pub(super) fn verdict(
        &self,
        worker: WorkerId,
        outcome: Outcome,
        probes: &mut Vec<Probe>,
        now: Instant,
    ) -> Option<(WorkerId, Change)> {
        if outcome == Outcome::Overloaded {
            let time = self.overload.mark(worker, now);
            if let Some(hear) = self.hear_overloaded.get() {
                hear(worker, time);
            }
        }
        let change = match probes.iter().position(|probe| probe.worker() == worker) {
            Some(at) => probes.swap_remove(at).report(outcome, now),
            None => self.health.report(worker, outcome, now),
        };
        change.map(|change| (worker, change))
    }

    /// From now on `hear` is told who refused a request because it has too much to do, and for how long it is left alone; it
    /// must be quick. Who called first is the one who hears.
    pub fn on_overloaded(&self, hear: impl Fn(WorkerId, Duration) + Send + Sync + 'static) {
        self.hear_overloaded.set(Box::new(hear)).ok();
    }

    /// Another router was refused by a worker that has too much to do; it is left alone for so long.
    pub fn mark_overloaded(&self, worker: WorkerId, time: Duration) {
        if self.fleet.load().worker(worker).is_some() {
            self.overload.mark_no_longer(worker, self.load.now(), time);
        }
    }

    /// The workers that are left alone because they have too much to do, and for how long still.
    pub fn overload_marks(&self) -> Vec<(WorkerId, Duration)> {
        self.overload.marks(self.load.now())
    }

    /// Whether a worker rank could serve a request if it had not too much to do.
    pub fn only_overloaded(&self, request: &RouteRequest, rank: WorkerRank) -> bool {
        let fleet = self.fleet.load();
        let unwell = self.health.unwell(self.load.now());
        let standings = |_: &[&Member]| Standings {
            unwell,
            ..Standings::default()
        };
        let pools = Pools::find(&fleet, request, &self.settings(), standings);
        pools.is_ok_and(|pools| {
            pools
                .decode
                .members
                .iter()
                .any(|member| member.rank == rank)
        })
    }

    /// The prefill of a booked request took so long. Where another worker was tried before, that tells nothing of a prefill.
    pub fn prefilled(&self, booked: &Booked, took: Duration) {
        if booked.route.to.rank != booked.chosen {
            return;
        }
        let booking = booked
            .reservation
            .bookings()
            .find(|booking| booking.track_prefill);
        booking
            .into_iter()
            .for_each(|booking| self.prefill_took(booking, took));
    }

    /// The prefill of one booking took so long.
    pub fn prefill_took(&self, booking: &Booking, took: Duration) {
        let fleet = self.fleet.load();
        let Some(member) = fleet.member(booking.slot) else {
            return;
        };
        if member.rank != booking.rank {
            return;
        }
        let key = (member.worker.model.clone(), member.worker.role);
        let tokens = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        self.durations
            .0
            .entry(key)
            .or_default()
            .observe(tokens, took);
    }

    /// How far the estimates of prefill times are off, relative to the times, per model and role.
    pub fn prefill_time_errors(&self) -> Vec<(ModelName, Role, f64)> {
        let error =
            |entry: dashmap::mapref::multiple::RefMulti<'_, (ModelName, Role), PrefillTimes>| {
                let (model, role) = entry.key().clone();
                Some((model, role, entry.relative_error()?))
            };
        self.durations.0.iter().filter_map(error).collect()
    }

    /// Records the result of a health check of an ejected worker. Returns whether the next request may probe it now.
    pub fn health_checked(&self, worker: WorkerId, is_healthy: bool) -> bool {
        self.health.checked(worker, is_healthy, self.load.now())
    }

    /// The workers that rest because they failed.
    pub fn out(&self) -> Vec<WorkerId> {
        self.health.unwell(self.load.now()).into_keys().collect()
    }
}
