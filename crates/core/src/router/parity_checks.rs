//! Parity checks on real requests: compares the predicted blocks of a few requests with the blocks
//! that their engines store. The prompt is watched from the decision on, so blocks that are evicted
//! before the check are seen as well, and cache turnover is no evidence of other tokens. A missing
//! block proves something only if the events report everything that the engine holds. A stored
//! block proves that the engine computes the same tokens, even if other events were lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::context::RoutingContext;
use super::placement::Placement;
use super::request::{DecodeCapability, PhaseSelection, RoutePrompt, RouteRequest};
use super::route::{PhaseAssignment, Route};
use super::state::Router;
use crate::freshness::{IndexFreshness, StaleReason};
use crate::parity::{
    BlockEvidence, EventCoverage, ParityChange, ParityCheck, ParityExpectation, ParityRegistry,
    PromptObservation, WatchedPrompt,
};
use crate::worker::{WorkerId, WorkerRank};

impl Router {
    /// Returns the parity state of all models.
    pub fn parity(&self) -> &Arc<ParityRegistry> {
        &self.parity
    }

    /// Returns the workers whose tokens differ from those that the request was hashed with.
    pub(super) fn mismatched_workers(&self, request: &RouteRequest) -> Arc<BTreeSet<WorkerId>> {
        if request.parity.is_from_own_tokens() {
            self.parity.differing_workers(request.model.as_ref())
        } else {
            Arc::default()
        }
    }

    /// Starts to watch the prompt of a booked request, if its parity check could prove something.
    pub(super) fn parity_check(
        &self,
        placement: &Placement,
        context: &RoutingContext,
    ) -> Option<ParityCheck> {
        let request = &context.request;
        let hashes = match (&request.parity, &request.prompt) {
            (ParityExpectation::Shadow(hashes), _) => &**hashes,
            (ParityExpectation::Prompt, RoutePrompt::Hashed(prompts)) => {
                prompts.first().filter(|_| prompts.len() == 1)?
            }
            _ => return None,
        };
        if hashes.is_empty() || !proves_computation(request, &placement.route) {
            return None;
        }
        let rank = placement.route.computed_by().rank;
        let coverage = self.event_coverage(rank)?;
        let slot = self.fleet.load().slot(rank)?;
        let model = self.parity.model_status(&placement.route.model)?;
        model.start_check(rank, || {
            let since = self.lookup.index.event_cursor(slot)?;
            let watch = self.lookup.index.watch(hashes, slot)?;
            let prompt = WatchedPrompt {
                watch,
                blocks: hashes.len(),
                block_size: hashes.block_size(),
                since,
            };
            // With partial coverage, an earlier incarnation of the engine may have stored the
            // blocks, which proves nothing about this one.
            let is_conclusive = coverage == EventCoverage::Complete
                || prompt.watch.max_held() < self.expected_blocks(&prompt, rank);
            is_conclusive.then_some(prompt)
        })
    }

    /// Handles a successful response: starts the parity check of the rank that computed the prompt.
    pub fn start_parity_check(&self, placement: &mut Placement) {
        if let Some(check) = placement.parity_check.take() {
            check.complete(placement.route.computed_by().rank);
        }
    }

    /// Returns the share of the cache that the events of a rank cover. Blocks stored before the
    /// subscription are not covered, so a missing event for them proves nothing.
    fn event_coverage(&self, rank: WorkerRank) -> Option<EventCoverage> {
        let status = self.source_status(rank);
        match status.freshness {
            IndexFreshness::Exact => Some(EventCoverage::Complete),
            IndexFreshness::Incomplete => Some(EventCoverage::Partial),
            // Also after a restart of the engine whose event numbers overtook the old ones.
            IndexFreshness::Stale if status.reason == Some(StaleReason::LostBatches) => {
                Some(EventCoverage::Partial)
            }
            IndexFreshness::CatchingUp | IndexFreshness::Stale | IndexFreshness::Absent => None,
        }
    }

    /// Returns the number of blocks of a prompt that its rank has to store. An engine with larger
    /// blocks stores only whole blocks of its own size.
    fn expected_blocks(&self, prompt: &WatchedPrompt, rank: WorkerRank) -> usize {
        let engine = self.source_status(rank).engine_block_size;
        let count = engine
            .map_or(1, |engine| engine.tokens() / prompt.block_size.tokens())
            .max(1);
        prompt.blocks / count * count
    }

    /// Evaluates a parity check after its request was answered. Returns `None` if it proves
    /// nothing.
    pub fn evaluate_parity_check(
        &self,
        check: ParityCheck,
    ) -> Option<(BlockEvidence, ParityChange)> {
        let rank = check.rank();
        let coverage = self.event_coverage(rank)?;
        let slot = self.fleet.load().slot(rank)?;
        let prompt = check.prompt();
        if !prompt.watch.is_current(&self.lookup.index, slot) {
            return None;
        }
        let held = prompt.watch.max_held();
        let expected = self.expected_blocks(prompt, rank);
        let observation = PromptObservation {
            held,
            expected,
            now: self.lookup.index.event_cursor(slot)?,
            coverage,
        };
        check.evaluate(observation)
    }
}

/// Returns whether a successful answer proves that the worker rank of [`Route::computed_by`]
/// computed the prompt.
fn proves_computation(request: &RouteRequest, route: &Route) -> bool {
    match (&route.phases, &request.phases) {
        (PhaseAssignment::Aggregated | PhaseAssignment::Local(_), _) => true,
        // The decode worker receives the blocks, and not every engine publishes events for those.
        (PhaseAssignment::Remote(_), PhaseSelection::Decode(_)) => false,
        // The prefill worker sent this response.
        (PhaseAssignment::Remote(_), PhaseSelection::PrefillFirst { .. }) => true,
        // A sidecar may have let the decode worker compute the prompt, if its role allows that.
        (PhaseAssignment::Remote(_), _) => {
            request.decode_capability == DecodeCapability::DecodeOnly
        }
    }
}
