//! What routed prompts are taken to have left behind: in the caches of workers that say nothing, and, for a moment, in
//! those of workers whose events are still on their way. Where the index is kept elsewhere both are kept for everybody: who
//! says nothing is known only with its answer, and without one nobody does.

use std::sync::Arc;

use super::Router;
use super::placing::Booked;
use super::remote::Known;
use crate::block::{BlockHashes, LocalHash};
use crate::fleet::Member;
use crate::index::Overlaps;
use crate::predict::{EffectivePolicy, InFlightPrompt, Lease, Predictor, RankPrediction};
use crate::worker::{BlockSize, WorkerRank};

/// Both kinds of prediction, as far as they are wanted.
#[derive(Clone, Default)]
pub struct Predictions {
    /// For worker ranks without KV events.
    pub without_events: Option<Arc<Predictor>>,
    /// For the others, until the event comes.
    pub beside_events: Option<Arc<Predictor>>,
    /// Whether both are kept for every worker rank.
    pub everywhere: bool,
}

impl Predictions {
    /// Who predicts for a worker rank.
    fn of(&self, member: &Member) -> impl Iterator<Item = &Arc<Predictor>> {
        let is_silent = member.worker.event_source(member.rank.rank).is_none();
        let silent = self
            .without_events
            .iter()
            .filter(move |_| is_silent || self.everywhere);
        silent.chain(
            self.beside_events
                .iter()
                .filter(move |_| !is_silent || self.everywhere),
        )
    }

    /// Whether anybody predicts for a worker rank.
    pub(super) fn any_of(&self, member: &Member) -> bool {
        self.of(member).next().is_some()
    }

    /// Begins to predict for a worker rank.
    pub fn open(&self, member: &Member) {
        for predictor in self.of(member) {
            predictor.open(
                member.slot,
                member.rank,
                member.worker.capacity.total_kv_blocks,
            );
        }
    }

    /// A worker rank holds more or less than it did: what is believed to be left there begins anew, unless that leaves by
    /// time alone.
    pub fn refit(&self, member: &Member) {
        let by_time = |found: &RankPrediction| {
            found.rank == member.rank
                && matches!(
                    found.policy,
                    EffectivePolicy::Ttl {
                        fallback: false,
                        ..
                    }
                )
        };
        for predictor in self
            .of(member)
            .filter(|predictor| !predictor.stats().ranks.iter().any(by_time))
        {
            predictor.open(
                member.slot,
                member.rank,
                member.worker.capacity.total_kv_blocks,
            );
        }
    }

    /// Forgets a worker rank.
    pub fn close(&self, member: &Member) {
        self.of(member)
            .for_each(|predictor| predictor.close(member.slot));
    }

    /// Lets what is due expire.
    pub fn expire(&self) {
        self.all().for_each(|predictor| predictor.expire());
    }

    /// What is predicted, rank by rank.
    pub fn stats(&self) -> impl Iterator<Item = RankPrediction> {
        self.all().flat_map(|predictor| predictor.stats().ranks)
    }

    /// Raises what is known of a prompt to what is predicted.
    pub(super) fn raise(
        &self,
        hashes: &BlockHashes,
        (table, scratch): (&mut Overlaps, &mut Overlaps),
        known: Known<'_>,
    ) {
        if let Some(predictor) = &self.without_events {
            predictor.raise(hashes, table, scratch, |slot| known.is_silent(slot));
        }
        if let Some(predictor) = &self.beside_events {
            predictor.raise(hashes, table, scratch, |slot| known.is_telling(slot));
        }
    }

    /// Records prompts that this worker rank has accepted.
    fn record(&self, member: &Member, prompts: &[BlockHashes]) {
        for predictor in self.of(member) {
            prompts
                .iter()
                .for_each(|hashes| drop(predictor.record(member.slot, member.rank, hashes)));
        }
    }

    /// Records prompts that are sent to this worker rank: predictor by predictor, and for each in the order of the prompts.
    fn send(&self, member: &Member, prompts: &[BlockHashes]) -> Vec<InFlightPrompt> {
        let of_prompts = |predictor: &Arc<Predictor>| {
            let send = |hashes| predictor.send(member.slot, member.rank, hashes);
            prompts.iter().map(send).collect::<Vec<_>>()
        };
        self.of(member).flat_map(of_prompts).collect()
    }

    pub(super) fn any(&self) -> bool {
        self.all().next().is_some()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Predictor>> {
        self.without_events.iter().chain(&self.beside_events)
    }
}

/// The predicted cache of one request's prompts on one worker rank.
#[derive(Debug)]
pub struct PromptPrediction {
    member: Member,
    phase: PredictionPhase,
}

#[derive(Debug)]
enum PredictionPhase {
    /// The answer has not begun, so the engine may still refuse the request.
    InFlight(Vec<InFlightPrompt>),
    /// The engine has accepted the request. The first lease is the one that grows with the answer.
    Confirmed(Vec<Lease>),
}

impl PromptPrediction {
    /// Records further blocks of the answer.
    pub(super) fn grow(&mut self, blocks: u64) {
        if let PredictionPhase::Confirmed(leases) = &mut self.phase {
            leases
                .first_mut()
                .into_iter()
                .for_each(|lease| lease.grow(blocks));
        }
    }

    /// Removes the blocks that were recorded for the request alone; returns how many blocks the answer had filled.
    pub(super) fn revoke(self, prompts: &[BlockHashes]) -> u64 {
        match self.phase {
            PredictionPhase::InFlight(_) => 0,
            PredictionPhase::Confirmed(leases) => leases
                .into_iter()
                .zip(prompts.iter().cycle())
                .map(|(lease, hashes)| lease.revoke(hashes))
                .sum(),
        }
    }
}

/// The predicted cache of one request's prompts, on each worker rank that computes them.
#[derive(Debug, Default)]
pub struct BookedPredictions {
    /// On the worker rank that answers.
    pub(super) answering: Option<Box<PromptPrediction>>,
    /// On the worker rank that prefills, where that is another one.
    pub(super) prefilling: Option<Box<PromptPrediction>>,
}

impl BookedPredictions {
    /// Records one more block of the answer, on the worker rank that generates it.
    pub fn grow(&mut self) {
        self.answering
            .iter_mut()
            .for_each(|prediction| prediction.grow(1));
    }
}

/// Prompts that go to a worker rank of which something is predicted, for other routers that are to predict the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Where they go.
    pub rank: WorkerRank,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// The complete blocks of each.
    pub prompts: Vec<Vec<LocalHash>>,
}

pub(super) type HearRouted = Box<dyn Fn(&Member, &[BlockHashes]) + Send + Sync>;

impl Routed {
    /// These prompts go there.
    pub fn of(member: &Member, prompts: &[BlockHashes]) -> Self {
        let prompts = prompts
            .iter()
            .map(|hashes| hashes.locals().to_vec())
            .collect();
        Self {
            rank: member.rank,
            block_size: member.worker.block_size,
            prompts,
        }
    }
}

impl Router {
    /// Registers the listener for confirmed predictions; it must be quick. Only the first registration takes effect.
    pub fn on_routed(&self, hear: impl Fn(&Member, &[BlockHashes]) + Send + Sync + 'static) {
        self.hear_routed.set(Box::new(hear)).ok();
    }

    /// Records prompts that are sent to this worker rank, as far as its cache is predicted.
    pub(super) fn expect(
        &self,
        member: &Member,
        prompts: &[BlockHashes],
    ) -> Option<Box<PromptPrediction>> {
        let in_flight = self.predictions.send(member, prompts);
        let phase = PredictionPhase::InFlight(in_flight);
        self.predictions.any_of(member).then(|| {
            Box::new(PromptPrediction {
                member: member.clone(),
                phase,
            })
        })
    }

    /// Records that the engine accepted the request: its prompts count as cached there, and other routers are notified.
    pub(super) fn confirm(&self, prediction: &mut PromptPrediction, prompts: &[BlockHashes]) {
        let PredictionPhase::InFlight(in_flight) = &mut prediction.phase else {
            return;
        };
        let in_flight = std::mem::take(in_flight);
        let leases = in_flight
            .into_iter()
            .zip(prompts.iter().cycle())
            .map(|(prompt, hashes)| prompt.confirm(hashes));
        prediction.phase = PredictionPhase::Confirmed(leases.collect());
        let is_predicted = || prompts.iter().any(|hashes| !hashes.is_empty());
        if let Some(hear) = self.hear_routed.get().filter(|_| is_predicted()) {
            hear(&prediction.member, prompts);
        }
    }

    /// Confirms the predictions of a request, for a caller that does not report the status of the answer.
    pub fn confirm_predictions(&self, booked: &mut Booked) {
        let Booked {
            predictions,
            prompts,
            ..
        } = booked;
        let both = predictions
            .answering
            .iter_mut()
            .chain(&mut predictions.prefilling);
        both.for_each(|prediction| self.confirm(prediction, prompts));
    }

    /// Applies the status of the answer. Success confirms the predictions; any other status removes them.
    pub fn settle_predictions(&self, booked: &mut Booked, status: u16) {
        match status {
            200..300 => self.confirm_predictions(booked),
            _ => booked.predictions = BookedPredictions::default(),
        }
    }

    /// Records that the prefill worker of a request has computed its prompts.
    pub fn confirm_prefill(&self, booked: &mut Booked) {
        let Booked {
            predictions,
            prompts,
            ..
        } = booked;
        predictions
            .prefilling
            .iter_mut()
            .for_each(|prediction| self.confirm(prediction, prompts));
    }

    /// Another router has routed prompts. What their requests hold is not known here: their blocks may leave before others
    /// that nobody uses any more, though not before older ones.
    pub fn routed_elsewhere(&self, routed: Routed) {
        let fleet = self.fleet();
        let member = fleet.slot(routed.rank).and_then(|slot| fleet.member(slot));
        let Some(member) = member.filter(|member| member.worker.block_size == routed.block_size)
        else {
            return;
        };
        let hashes = |locals: Vec<LocalHash>| {
            let tokens = locals.len().saturating_mul(routed.block_size.tokens());
            BlockHashes::chain(tokens, routed.block_size, locals)
        };
        let prompts: Vec<BlockHashes> = routed.prompts.into_iter().map(hashes).collect();
        self.predictions.record(member, &prompts);
    }
}
