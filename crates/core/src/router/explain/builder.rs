//! Builds the explanation from a snapshot, after the load lock is released.

use super::explanation::{PhaseExplanation, RouteExplanation, WorkerExplanation};
use super::summary;
use crate::fleet::FleetMember;
use crate::load::ActiveLoad;
use crate::policy::{Constraints, ExclusionReason, PolicyInput, costs};
use crate::router::context::RoutingContext;
use crate::router::phase_plan::{PhaseChoice, PhasePlan};
use crate::router::pools::{FleetAvailability, exclusions, prefill_constraints};
use crate::router::route::{Mode, Route, RouteError};
use crate::worker::{BlockSize, WorkerRole};

/// State read at one instant.
pub(super) struct ExplainSnapshot<'f> {
    pub(super) members: Vec<&'f FleetMember>,
    pub(super) availability: FleetAvailability,
    /// Load of each member, and the prompt blocks that would be new to it; `None` if it has just
    /// left.
    pub(super) loads: Vec<Option<(ActiveLoad, u64)>>,
    /// Whether all candidates are busy.
    pub(super) is_busy: bool,
    pub(super) decided: Result<PhasePlan<'f>, RouteError>,
}

/// Builder of the explanation.
pub(super) struct ExplanationBuilder<'a, 'f> {
    pub(super) context: &'a RoutingContext,
    pub(super) snapshot: &'a ExplainSnapshot<'f>,
}

impl<'f> ExplanationBuilder<'_, 'f> {
    pub(super) fn routed(&self, plan: &PhasePlan<'f>, route: Route) -> RouteExplanation {
        let prefill = match (&plan.prefill, &plan.unused_prefill) {
            (Some(phase), _) => Some(self.phase(phase, true)),
            (None, Some(phase)) => Some(self.phase(phase, false)),
            // Prefill workers exist, but none of them could be chosen.
            (None, None) => self
                .has_prefill()
                .then(|| self.unchosen_phase(&prefill_constraints(&self.context.request))),
        };
        let phases: Vec<_> = prefill
            .into_iter()
            .chain([self.phase(&plan.decode, true)])
            .collect();
        RouteExplanation {
            model: self.context.request.model.clone(),
            requested_model: None,
            class: None,
            busy: self.snapshot.is_busy,
            mode: route.mode,
            reason: route.reason,
            prompt_tokens: route.prompt_tokens,
            prompt_blocks: route.prompt_blocks,
            block_size: Some(route.block_size),
            computed_by: Some(route.computed_by()),
            policy: self.context.policy(),
            summary: summary::routed(
                &route,
                &phases,
                self.context.policy().weights.router_temperature,
                self.snapshot.is_busy,
            ),
            phases,
            route: Some(route),
        }
    }

    fn phase(&self, phase: &PhaseChoice<'f>, used: bool) -> PhaseExplanation {
        let costs = costs(&phase.input, &phase.candidates, &phase.policy);
        let winner = phase.choice.index;
        let others = (0..costs.len()).filter(|index| *index != winner);
        let runner_up = others.min_by(|a, b| costs[*a].total.total_cmp(&costs[*b].total));
        let needs_timing = phase.policy.routing.needs_timing()
            || self.context.settings.disaggregation.compares_costs();
        let mut workers = self.explain_workers(&phase.pool.constraints);
        for worker in &mut workers {
            let mut members = phase.members.iter();
            match members.position(|member| member.rank == worker.rank) {
                Some(index) => {
                    let candidate = &phase.candidates[index];
                    let cost = costs[index];
                    worker.overlap = candidate.overlap;
                    worker.load = candidate.load;
                    worker.running_blocks = candidate.running_blocks;
                    worker.timing = needs_timing.then_some(candidate.timing);
                    worker.prefill_tokens = phase.input.outstanding_tokens(candidate);
                    worker.decode_blocks = phase.input.decode_blocks(candidate);
                    worker.cost = Some(cost);
                    worker.excluded = None;
                }
                None if worker.excluded.is_none() => {
                    worker.excluded = Some("decode workers take precedence".to_owned());
                }
                None => {}
            }
        }
        PhaseExplanation {
            role: phase.input.role,
            used,
            winner: Some(phase.member().rank),
            runner_up: runner_up.map(|index| phase.members[index].rank),
            margin: runner_up.map(|index| costs[index].total - costs[winner].total),
            ties: phase.choice.ties,
            latency: needs_timing.then_some(phase.input.estimate),
            workers,
        }
    }

    /// Returns the phases if there is no choice.
    pub(super) fn unchosen_phases(&self, error: RouteError) -> Vec<PhaseExplanation> {
        let request = &self.context.request;
        let is_disaggregated = self.has_prefill() || error == RouteError::NoPrefill;
        let role = if is_disaggregated {
            WorkerRole::Decode
        } else {
            WorkerRole::Aggregated
        };
        let prefill = is_disaggregated.then(|| self.unchosen_phase(&prefill_constraints(request)));
        prefill
            .into_iter()
            .chain([self.unchosen_phase(&Constraints {
                role,
                ..request.constraints.clone()
            })])
            .collect()
    }

    /// Explains a phase without a choice.
    fn unchosen_phase(&self, constraints: &Constraints) -> PhaseExplanation {
        PhaseExplanation {
            role: constraints.role,
            used: false,
            winner: None,
            runner_up: None,
            margin: None,
            ties: 0,
            latency: None,
            workers: self.explain_workers(constraints),
        }
    }

    /// Explains all members, without costs.
    fn explain_workers(&self, constraints: &Constraints) -> Vec<WorkerExplanation> {
        let reasons = exclusions(
            &self.snapshot.members,
            constraints,
            &self.snapshot.availability,
        );
        reasons
            .into_iter()
            .enumerate()
            .map(|(index, reason)| self.explain_worker(index, reason))
            .collect()
    }

    /// Explains one member, without its cost.
    fn explain_worker(
        &self,
        index: usize,
        reason: Option<ExclusionReason<'_>>,
    ) -> WorkerExplanation {
        let member = self.snapshot.members[index];
        let load = self.snapshot.loads[index];
        let has_left = || {
            load.is_none()
                .then(|| "it has just left the fleet".to_owned())
        };
        let (load, additional) = load.unwrap_or_default();
        let prompt_tokens = self.context.request.prompt.tokens();
        let required = PolicyInput::new(prompt_tokens, member.worker.block_size).required_blocks();
        let tail = required.saturating_sub(self.context.blocks.complete);
        WorkerExplanation {
            rank: member.rank,
            endpoint: member.worker.endpoint,
            role: member.worker.role,
            overlap: self.context.overlap(member),
            source: self.context.source_status(member),
            running_blocks: 0,
            cached_tokens: self.context.cached_tokens(member, true),
            load,
            timing: None,
            prefill_tokens: load.active_prefill_tokens + prompt_tokens,
            decode_blocks: load.active_blocks + additional + tail,
            cost: None,
            excluded: reason.map(|reason| reason.to_string()).or_else(has_left),
        }
    }

    fn has_prefill(&self) -> bool {
        let request = &self.context.request;
        request.has_prompt()
            && self
                .snapshot
                .members
                .iter()
                .any(|member| member.worker.role == WorkerRole::Prefill)
    }
}

pub(super) fn unrouted(
    context: &RoutingContext,
    error: RouteError,
    phases: Vec<PhaseExplanation>,
    block_size: Option<BlockSize>,
) -> RouteExplanation {
    let prompt = &context.request.prompt;
    RouteExplanation {
        model: context.request.model.clone(),
        requested_model: None,
        class: None,
        busy: false,
        mode: Mode::Passthrough,
        reason: Some(error.reason()),
        prompt_tokens: prompt.tokens(),
        prompt_blocks: prompt.block_count(),
        block_size,
        computed_by: None,
        policy: context.policy(),
        phases,
        summary: summary::unrouted(error, context.request.constraints.pool.as_deref()),
        route: None,
    }
}
