//! Feedback of routed requests, as far as later decisions depend on it: the health of workers, the
//! duration of prefills, and the confirmation of predictions.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::placement::Placement;
use super::pools::{FleetAvailability, PhasePools};
use super::predictions::RequestPredictions;
use super::request::RouteRequest;
use super::route::{ComputingRank, Mode, PrefillRoute};
use super::state::Router;
use crate::fleet::FleetMember;
use crate::freshness::IndexFreshness;
use crate::health::{HealthChange, WorkerHealth, WorkerOutcome};
use crate::load::FirstTokenObservation;
use crate::worker::{WorkerId, WorkerRank};

/// Response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerResponse {
    /// HTTP status.
    pub status: u16,
    /// Sender of the response.
    pub origin: ResponseOrigin,
}

/// Sender of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseOrigin {
    /// The chosen worker, or unknown.
    Chosen,
    /// Another worker, because the chosen one could not be reached.
    Other(WorkerId),
    /// The gateway, because no worker could be reached.
    Gateway,
}

impl Router {
    /// Handles the response to a request. Returns the health transitions, for the log.
    pub fn on_response(
        &self,
        placement: &mut Placement,
        response: WorkerResponse,
    ) -> Vec<(WorkerId, HealthChange)> {
        let now = self.load.now();
        let chosen = placement.chosen.worker;
        // A prefill completed before this placement has been reported already.
        let prefill = placement
            .route
            .prefill()
            .filter(|_| !placement.has_completed_prefill)
            .map(|prefill| prefill.to.rank.worker);
        // After a sequential prefill, `on_prompt_computed` has expected the events already.
        let is_success = (200..300).contains(&response.status);
        if response.origin == ResponseOrigin::Chosen
            && is_success
            && !placement.has_completed_prefill
        {
            self.expect_events(placement, now);
        }
        match response.origin {
            ResponseOrigin::Chosen => self.resolve_predictions(placement, response.status),
            // `on_served_by` moves the predictions first.
            ResponseOrigin::Other(_) => {}
            ResponseOrigin::Gateway => placement.predictions = RequestPredictions::default(),
        }
        let outcome = match WorkerOutcome::from_status(response.status) {
            // A response without computation proves neither health nor failure.
            WorkerOutcome::Success | WorkerOutcome::Failure if !placement.route.is_inference() => {
                WorkerOutcome::Inconclusive
            }
            outcome => outcome,
        };
        // After a remote prefill, either of the two workers may have caused a failure.
        let is_conclusive = outcome != WorkerOutcome::Failure || prefill.is_none();
        let mut outcomes = Vec::new();
        match response.origin {
            ResponseOrigin::Chosen if is_conclusive => outcomes.push((chosen, outcome)),
            ResponseOrigin::Chosen => {}
            ResponseOrigin::Other(worker) => {
                outcomes.push((chosen, WorkerOutcome::Failure));
                if is_conclusive {
                    outcomes.push((worker, outcome));
                }
            }
            ResponseOrigin::Gateway => outcomes.push((chosen, WorkerOutcome::Failure)),
        }
        // A successful response proves that the prefill worker did its part.
        if let Some(worker) = prefill
            && response.origin != ResponseOrigin::Gateway
            && is_success
        {
            outcomes.push((worker, WorkerOutcome::Success));
        }
        // Probes that are not reported are returned when dropped.
        let mut probes = std::mem::take(&mut placement.probes);
        outcomes
            .into_iter()
            .filter_map(|(worker, outcome)| {
                self.feedback
                    .record_outcome(worker, outcome, &mut probes, now)
            })
            .collect()
    }

    /// Expects KV events: the rank that computed the prompt has stored blocks, unless it held all
    /// of them already.
    fn expect_events(&self, placement: &Placement, now: Instant) {
        let route = &placement.route;
        let ComputingRank { rank, overlap, .. } = route.computed_by();
        // An engine with larger blocks stores only whole blocks of its own, separately per prompt.
        let engine_block_size = self
            .source_status(rank)
            .engine_block_size
            .unwrap_or(route.block_size);
        let count = (engine_block_size.tokens() / route.block_size.tokens()).max(1);
        let stored: usize = placement
            .prompts
            .iter()
            .map(|hashes| hashes.len() / count * count)
            .sum();
        if route.mode == Mode::Exact && stored > overlap.total() as usize {
            self.lookup
                .sources
                .on_response(rank, placement.placed_at, now);
        }
    }

    /// Handles the response of the prefill worker. Reports its probe, if the request holds one, and
    /// revokes its predictions after a failure. Returns the health transition, for the log.
    pub fn on_prefill_response(
        &self,
        placement: &mut Placement,
        outcome: WorkerOutcome,
    ) -> Option<(WorkerId, HealthChange)> {
        let worker = placement.route.prefill()?.to.rank.worker;
        if outcome == WorkerOutcome::Failure {
            let prediction = placement.predictions.prefilling.take();
            prediction
                .into_iter()
                .for_each(|prediction| _ = prediction.revoke(&placement.prompts));
        }
        let mut probes = std::mem::take(&mut placement.probes);
        let change = self
            .feedback
            .record_outcome(worker, outcome, &mut probes, self.load.now());
        placement.probes = probes;
        change
    }

    /// Handles the response of a prefill worker that computed the prompt in a sequential prefill:
    /// expects its KV events and starts the parity check of its tokens.
    pub fn on_prompt_computed(&self, placement: &mut Placement) {
        self.expect_events(placement, self.load.now());
        self.start_parity_check(placement);
    }

    /// Ends the booking of a completed remote prefill. Learns from its duration if the number of
    /// computed tokens is known exactly.
    pub fn complete_remote_prefill(&self, placement: &mut Placement) {
        placement.reservation.on_first_token();
        let is_known = |prefill: &PrefillRoute| {
            prefill.freshness == IndexFreshness::Exact
                && matches!(prefill.mode, Mode::Exact | Mode::Partial)
        };
        if placement.route.prefill().is_some_and(is_known) {
            placement.reservation.learn_prefill();
        }
    }

    /// Avoids a worker for this time, because another replica reported its overload status.
    pub fn mark_overloaded(&self, worker: WorkerId, time: Duration) {
        if self.fleet.load().worker(worker).is_some() {
            self.feedback
                .overload
                .mark_at_most(worker, self.load.now(), time);
        }
    }

    /// Returns the workers marked as overloaded, and the remaining time of each mark.
    pub fn overload_marks(&self) -> Vec<(WorkerId, Duration)> {
        self.feedback.overload.marks(self.load.now())
    }

    /// Returns whether overload is the only obstacle to serving a request on a rank.
    pub fn is_only_overloaded(&self, request: &RouteRequest, rank: WorkerRank) -> bool {
        let fleet = self.fleet.load();
        let unhealthy = self.feedback.health.unhealthy_workers(self.load.now());
        let availability = |_: &[&FleetMember]| FleetAvailability {
            unhealthy,
            ..FleetAvailability::default()
        };
        let pools = PhasePools::find(&fleet, request, &self.settings(), availability);
        pools.is_ok_and(|pools| {
            pools
                .decode
                .members
                .iter()
                .any(|member| member.rank == rank)
        })
    }

    /// Learns from the first token of a request. After a local prefill, returns the predicted and
    /// observed times to first token. After a sequential prefill, learns the KV transfer time and
    /// returns `None`. Nothing is learned if Envoy tried another worker first, because the time
    /// then includes that attempt.
    pub fn learn_first_token(&self, placement: &mut Placement) -> Option<FirstTokenObservation> {
        if placement.route.to.rank != placement.chosen {
            return None;
        }
        if placement.has_completed_prefill {
            let now = self.load.now();
            let elapsed = now.saturating_duration_since(placement.placed_at);
            placement.reservation.learn_transfer(elapsed);
            return None;
        }
        // The time to the first token includes the KV transfer if another worker runs the prefill.
        if placement.route.prefill().is_some() {
            return None;
        }
        placement.reservation.learn_prefill()
    }

    /// Records the result of a health check of an ejected worker. Returns whether the next request
    /// may probe it now.
    pub fn on_health_check(&self, worker: WorkerId, is_healthy: bool) -> bool {
        self.feedback
            .health
            .on_health_check(worker, is_healthy, self.load.now())
    }

    /// Returns the ejected workers.
    pub fn ejected_workers(&self) -> Vec<WorkerId> {
        self.unhealthy_workers().into_keys().collect()
    }

    /// Returns the workers that are not healthy, with their health.
    pub fn unhealthy_workers(&self) -> BTreeMap<WorkerId, WorkerHealth> {
        self.feedback.health.unhealthy_workers(self.load.now())
    }
}
