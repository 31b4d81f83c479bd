//! Feedback from a request after its decision: its responses, the duration of its prefill, and its
//! predictions. Later decisions use it.

use std::time::Instant;

use super::placement::Placement;
use super::predictions::RequestPredictions;
use super::reason::Reason;
use super::route::{ComputingRank, Mode, PrefillRoute, Route};
use super::state::Router;
use super::worker_feedback::{OutcomeTarget, first_prompt};
use crate::freshness::IndexFreshness;
use crate::health::{DeliveryTransition, HealthTransition, RequestOutcome, TrackedRequest};
use crate::load::{CachedTokenSource, FirstTokenObservation, SpeedTransition};
use crate::worker::{WorkerId, WorkerRank};

/// A prompt counts as uncached if no rank is expected to have more than its length divided by this
/// number cached.
const UNCACHED_DIVISOR: u64 = 8;

/// Response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerResponse {
    /// HTTP status.
    pub status: u16,
    /// Sender of the response.
    pub origin: ResponseOrigin,
}

/// Changes that the passage of time has revealed, for the log.
#[derive(Clone, Debug)]
pub struct TickChanges {
    /// Health of ranks.
    pub health: Vec<HealthTransition>,
    /// Models of which no rank delivers.
    pub deliveries: Vec<DeliveryTransition>,
    /// Slow ranks.
    pub speeds: Vec<SpeedTransition>,
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
    ) -> Vec<HealthTransition> {
        let now = self.load.now();
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
        let outcome = health_outcome(&placement.route, response.status);
        let mut changes = match response.origin {
            ResponseOrigin::Chosen => Vec::new(),
            ResponseOrigin::Other(_) | ResponseOrigin::Gateway => {
                self.record_for_rank(placement, placement.chosen, RequestOutcome::Unreachable)
            }
        };
        if let ResponseOrigin::Other(worker) = response.origin
            && let Some(rank) = self.serving_rank(worker, placement.chosen)
        {
            let tracked = self.feedback.health.start(rank, None, false, now);
            placement.tracked.extend(tracked);
        }
        match (response.origin, outcome) {
            (ResponseOrigin::Gateway, _) => {}
            // The headers of a stream precede the computation.
            (_, RequestOutcome::Delivered) => {
                placement
                    .tracked
                    .iter()
                    .for_each(TrackedRequest::on_response);
            }
            // After a remote prefill, either of the two workers may have caused a failure.
            (_, outcome) => changes.extend(self.report_outcome(placement, outcome)),
        }
        changes
    }

    /// Records the outcome of a request for all ranks that received it and have no outcome yet.
    /// Returns the health transitions, for the log.
    pub fn report_outcome(
        &self,
        placement: &mut Placement,
        outcome: RequestOutcome,
    ) -> Vec<HealthTransition> {
        let outcome = match outcome {
            // A response without computation proves neither health nor failure.
            RequestOutcome::Delivered | RequestOutcome::Empty
                if !placement.route.is_inference() =>
            {
                RequestOutcome::Inconclusive
            }
            outcome => outcome,
        };
        let mut tracked = std::mem::take(&mut placement.tracked);
        let prompt = first_prompt(&placement.prompts);
        let now = self.load.now();
        let changes = tracked
            .iter_mut()
            .filter(|request| !request.is_reported())
            .flat_map(|request| {
                let target = OutcomeTarget::Tracked(request);
                self.feedback.record_outcome(target, outcome, prompt, now)
            })
            .collect();
        placement.tracked = tracked;
        changes
    }

    /// Records output tokens after the first one as progress of their rank.
    pub fn on_output_tokens(&self, placement: &mut Placement, count: u64) {
        placement.reservation.add_output_tokens(count);
        let rank = placement.route.to.rank;
        let mut tracked = placement.tracked.iter_mut();
        if let Some(request) = tracked.find(|request| request.rank() == rank) {
            request.on_output(self.load.now());
        }
    }

    /// Records the observed end of a response as progress of its rank.
    pub fn on_completed_response(&self, placement: &Placement) {
        let rank = placement.route.to.rank;
        let now = self.load.now();
        let health = &self.feedback.health;
        health.with_model(|model| model.on_progress(rank, now));
    }

    /// Handles the end of a request. If it ended before its first token, its predicted blocks are
    /// removed. If there is also evidence against its rank, its load stays booked for the expected
    /// service time.
    pub fn finish(&self, mut placement: Placement) {
        let now = self.load.now();
        if !placement.reservation.has_first_token()
            && let Some(prediction) = placement.predictions.answering.take()
        {
            prediction.revoke(&placement.prompts);
        }
        let on_end = |request: &TrackedRequest| request.on_end(now);
        let hold_time = placement.tracked.iter().filter_map(on_end).max();
        if let Some(until) = hold_time.and_then(|time| now.checked_add(time))
            && !placement.reservation.has_first_token()
        {
            self.held.hold(placement.reservation, until);
        }
    }

    /// Handles the passage of time: overdue requests and held reservations. Must be called several
    /// times per second.
    pub fn on_tick(&self) -> TickChanges {
        let now = self.load.now();
        self.held.release_expired(now);
        let health = self.feedback.health.on_tick(now);
        let unreachable = self.unreachable_workers();
        let tracker = &self.feedback.health;
        TickChanges {
            health,
            deliveries: tracker.with_model(|model| model.update_deliveries(&unreachable, now)),
            speeds: self.load.update_speeds(),
        }
    }

    fn record_for_rank(
        &self,
        placement: &mut Placement,
        rank: WorkerRank,
        outcome: RequestOutcome,
    ) -> Vec<HealthTransition> {
        let mut tracked = placement.tracked.iter_mut();
        let target = match tracked.find(|request| request.rank() == rank) {
            Some(request) => OutcomeTarget::Tracked(request),
            None => OutcomeTarget::Rank(rank),
        };
        let prompt = first_prompt(&placement.prompts);
        let now = self.load.now();
        self.feedback.record_outcome(target, outcome, prompt, now)
    }

    /// Returns the rank of a worker that served a request in place of the chosen rank.
    fn serving_rank(&self, worker: WorkerId, chosen: WorkerRank) -> Option<WorkerRank> {
        let fleet = self.fleet.load();
        let ranks = || fleet.members().map(|member| member.rank);
        let of_worker = || ranks().filter(|rank| rank.worker == worker);
        let named = of_worker().find(|rank| rank.rank == chosen.rank);
        named.or_else(|| of_worker().next())
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

    /// Handles the response of the prefill worker. Revokes its predictions after a failure. Returns
    /// the health transitions, for the log.
    pub fn on_prefill_response(
        &self,
        placement: &mut Placement,
        outcome: RequestOutcome,
    ) -> Vec<HealthTransition> {
        let Some(rank) = placement.route.prefill().map(|prefill| prefill.to.rank) else {
            return Vec::new();
        };
        if outcome.is_failure()
            && outcome != RequestOutcome::Overloaded
            && let Some(prediction) = placement.predictions.prefilling.take()
        {
            prediction.revoke(&placement.prompts);
        }
        self.record_for_rank(placement, rank, outcome)
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
            placement
                .reservation
                .learn_prefill(CachedTokenSource::Known);
        }
    }

    /// Learns from the first token of a request. After a local prefill, returns the predicted and
    /// observed times to first token. A prefill is learned if the number of cached tokens is known:
    /// from exact events, or because no rank is expected to have more than an eighth of the prompt.
    /// Otherwise it is learned by [`Self::apply_reported_cached_tokens`], and a late first token corrects the predicted
    /// cache. After a sequential prefill, learns the KV transfer time and returns `None`. Nothing is
    /// learned if Envoy tried another worker first, because the time then includes that attempt.
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
        let route = &placement.route;
        let cached_tokens = route.computed_by().best_cached_tokens;
        let is_uncached = cached_tokens * UNCACHED_DIVISOR <= route.prompt_tokens;
        let cached = if route.mode == Mode::Exact || is_uncached {
            CachedTokenSource::Known
        } else {
            CachedTokenSource::Predicted
        };
        let first_token = placement.reservation.learn_prefill(cached)?;
        if cached == CachedTokenSource::Predicted && first_token.contradicts_cache() {
            placement.predictions.correct_cached_tokens(0);
        }
        Some(first_token)
    }

    /// Applies the number of cached tokens that the engine reports. Learns from a prefill for which
    /// the number was predicted, and corrects the predicted cache of the rank. Has no effect on a
    /// prefill that was already learned.
    pub fn apply_reported_cached_tokens(&self, placement: &mut Placement, cached: u64) {
        placement.reservation.apply_reported_cached_tokens(cached);
        if placement.reads_prefix_cache {
            placement.predictions.correct_cached_tokens(cached);
        }
    }

    /// Records that the request is being sent: its prompts count as cached on the predicted
    /// members.
    pub fn predict_placement(&self, placement: &mut Placement) {
        for member in placement.predicted_members.drain(..) {
            let prediction = self.lookup.predictors.predict(&member, &placement.prompts);
            if member.rank == placement.chosen {
                placement.predictions.answering = prediction;
            } else {
                placement.predictions.prefilling = prediction;
            }
        }
    }

    /// Confirms the predictions of a request, for a caller that does not report the response
    /// status.
    pub fn confirm_predictions(&self, placement: &mut Placement) {
        if let Some(prediction) = &mut placement.predictions.answering {
            prediction.confirm(&placement.prompts, &*self.feedback.listener);
        }
        self.confirm_prefill(placement);
    }

    /// Records that the prefill worker of a request has computed its prompts.
    pub fn confirm_prefill(&self, placement: &mut Placement) {
        if let Some(prediction) = &mut placement.predictions.prefilling {
            prediction.confirm(&placement.prompts, &*self.feedback.listener);
        }
    }

    /// Applies the response status. Success confirms the predictions; any other status removes
    /// them.
    pub fn resolve_predictions(&self, placement: &mut Placement, status: u16) {
        match status {
            200..300 => self.confirm_predictions(placement),
            _ => placement.predictions = RequestPredictions::default(),
        }
    }
}

/// Returns the outcome that a status indicates for the worker that sent it.
fn health_outcome(route: &Route, status: u16) -> RequestOutcome {
    match RequestOutcome::from_status(status) {
        // A response without computation proves neither health nor failure.
        RequestOutcome::ServerError | RequestOutcome::Rejected if !route.is_inference() => {
            RequestOutcome::Inconclusive
        }
        // Another engine may hold the state that the request names, or no engine has it any more.
        RequestOutcome::Rejected
            if matches!(
                route.reason,
                Some(Reason::EngineSideState | Reason::NotInference)
            ) =>
        {
            RequestOutcome::Inconclusive
        }
        outcome => outcome,
    }
}
