//! Builds the route of a decision, with the figures that explain it.

use super::cache_lookup::CacheLookup;
use super::context::RoutingContext;
use super::phase_plan::{PhaseChoice, PhasePlan};
use super::pools::FleetAvailability;
use super::ranking::CandidateRanking;
use super::reason::Reason;
use super::request::{PhaseSelection, RoutePrompt};
use super::route::{Mode, PhaseAssignment, PrefillRoute, RankEndpoint, Route};
use crate::fleet::FleetMember;

/// Inputs of a route that the plan does not contain.
pub(super) struct RouteBuilder<'a> {
    pub(super) context: &'a RoutingContext,
    pub(super) lookup: &'a CacheLookup,
}

impl RouteBuilder<'_> {
    /// Builds the route of a plan.
    pub(super) fn build(&self, plan: &PhasePlan<'_>, availability: &FleetAvailability) -> Route {
        let context = self.context;
        let decode = &plan.decode;
        let CandidateRanking { fallbacks, scores } =
            CandidateRanking::new(&context.settings, decode, availability);
        let member = decode.member();
        let phases = match (&plan.prefill, plan.local_prefill, &context.request.phases) {
            (Some(prefill), ..) => PhaseAssignment::Remote(Box::new(self.build_prefill(prefill))),
            (None, _, PhaseSelection::Decode(completed)) => {
                PhaseAssignment::Remote(Box::new(completed.prefill.clone()))
            }
            (None, Some(reason), _) => PhaseAssignment::Local(reason),
            (None, None, _) => PhaseAssignment::Aggregated,
        };
        // The decode worker's cache matters only if it computes the prompt.
        let (mode, reason) = match &phases {
            PhaseAssignment::Remote(prefill) => (prefill.mode, prefill.reason),
            PhaseAssignment::Aggregated | PhaseAssignment::Local(_) => {
                self.routing_mode(member, &decode.members)
            }
        };
        let prefill_in_flight = plan.prefill.as_ref().map_or(0, |phase| phase.in_flight);
        Route {
            to: RankEndpoint::of(member),
            computes: context.request.computes,
            fallbacks,
            scores,
            mode,
            reason,
            model: member.worker.model.clone(),
            block_size: decode.input.block_size,
            expected_output_tokens: context.request.expected_output_tokens,
            prompt_tokens: decode.input.prompt_tokens,
            prompt_blocks: context.request.prompt.block_count(),
            overlap: context.overlap(member),
            freshness: context.source_status(member).freshness,
            predicted_cached_tokens: context.cached_tokens(member, true),
            best_cached_tokens: decode.cached.best,
            chance_cached_tokens: decode.chance_cached_tokens(),
            reusable_tokens: context.reusable_tokens(),
            shared_beyond_device: shared_beyond_device(plan),
            candidates: decode.members.len(),
            in_flight: decode.in_flight + prefill_in_flight,
            choice: decode.choice.clone(),
            phases,
        }
    }

    fn build_prefill(&self, phase: &PhaseChoice<'_>) -> PrefillRoute {
        let context = self.context;
        let member = phase.member();
        let (mode, reason) = self.routing_mode(member, &phase.members);
        PrefillRoute {
            to: RankEndpoint::of(member),
            overlap: context.overlap(member),
            cached_tokens: context.cached_tokens(member, true),
            best_cached_tokens: phase.cached.best,
            chance_cached_tokens: phase.chance_cached_tokens(),
            mode,
            reason,
            freshness: context.source_status(member).freshness,
            choice: phase.choice.clone(),
        }
    }

    /// Returns the routing mode, by the knowledge of the prompt and of the candidates' caches.
    fn routing_mode(
        &self,
        chosen: &FleetMember,
        candidates: &[&FleetMember],
    ) -> (Mode, Option<Reason>) {
        let context = self.context;
        let holds_blocks = |member: &FleetMember| context.overlap(member).total() > 0;
        let is_known = |member: &&FleetMember| {
            let status = context.source_status(member);
            status.freshness.is_usable(holds_blocks(member))
        };
        let is_predicted = self.lookup.is_predicted(context, chosen);
        let prompt = &context.request.prompt;
        let reason = prompt.reason();
        match prompt {
            RoutePrompt::Estimated { .. } => (Mode::LoadOnly, reason),
            // Less than one block of the prompt is known.
            RoutePrompt::Truncated { known, .. } if known.is_empty() => (Mode::LoadOnly, reason),
            _ if context.has_token_mismatch(chosen) => {
                (Mode::LoadOnly, Some(Reason::ParityMismatch))
            }
            _ if self
                .lookup
                .is_index_unavailable(&context.request.remote_overlaps) =>
            {
                let mode = if is_predicted {
                    Mode::Approximate
                } else {
                    Mode::LoadOnly
                };
                (mode, Some(Reason::IndexUnreachable))
            }
            _ if is_predicted => (Mode::Approximate, reason),
            _ if !candidates.iter().any(is_known) => {
                (Mode::LoadOnly, Some(context.cold_reason(candidates)))
            }
            // The chosen worker has no usable events, so it was chosen by load.
            _ if context.is_source_unusable(chosen) => {
                (Mode::LoadOnly, Some(context.cold_reason(&[chosen])))
            }
            RoutePrompt::Truncated { .. } => (Mode::Partial, reason),
            RoutePrompt::Hashed(_) => (Mode::Exact, None),
        }
    }
}

/// Returns the blocks of the shared cache beyond those on the device of the worker that computes
/// the prompt.
fn shared_beyond_device(plan: &PhasePlan<'_>) -> u64 {
    let phase = plan.prefill.as_ref().unwrap_or(&plan.decode);
    let chosen = &phase.candidates[phase.choice.index];
    phase.input.shared_beyond(chosen.overlap.device)
}
