//! Puts into words what was seen at one instant, when nobody is kept waiting by it any more.

use super::{Explanation, Judged, PhaseExplained, Seen, sentence};
use crate::router::answer::{Mode, Route, RouteError};
use crate::router::leg::{Leg, Legs};
use crate::router::pools::{excluded, for_prefill};
use crate::router::prepared::Prepared;
use crate::schedule::{Constraints, Excluded, Question, costs};
use crate::worker::{BlockSize, Role};

/// Puts into words what was seen.
pub(super) struct Telling<'a, 'f> {
    pub(super) prepared: &'a Prepared,
    pub(super) seen: &'a Seen<'f>,
}

impl<'f> Telling<'_, 'f> {
    pub(super) fn routed(&self, legs: &Legs<'f>, route: Route) -> Explanation {
        let prefill = match (&legs.prefill, &legs.bypassed) {
            (Some(leg), _) => Some(self.phase(leg, true)),
            (None, Some(leg)) => Some(self.phase(leg, false)),
            // Prefill workers are there, and none of them could be chosen.
            (None, None) => self
                .has_prefill()
                .then(|| self.unchosen(&for_prefill(&self.prepared.request))),
        };
        let phases: Vec<_> = prefill
            .into_iter()
            .chain([self.phase(&legs.decode, true)])
            .collect();
        Explanation {
            model: self.prepared.request.model.clone(),
            requested_model: None,
            class: None,
            busy: self.seen.busy,
            mode: route.mode,
            reason: route.reason,
            prompt_tokens: route.prompt_tokens,
            prompt_blocks: route.prompt_blocks,
            block_size: Some(route.block_size),
            computed_by: Some(route.computed_by()),
            weights: self.prepared.weights,
            sentence: sentence::routed(
                &route,
                &phases,
                self.prepared.weights.router_temperature,
                self.seen.busy,
            ),
            phases,
            route: Some(route),
        }
    }

    fn phase(&self, leg: &Leg<'f>, taken: bool) -> PhaseExplained {
        let costs = costs(&leg.question, &leg.candidates, &leg.weights);
        let winner = leg.choice.index;
        let others = (0..costs.len()).filter(|at| *at != winner);
        let runner_up = others.min_by(|a, b| costs[*a].total.total_cmp(&costs[*b].total));
        let mut judged = self.judge(&leg.pool.constraints);
        let block_size = leg.question.block_size.tokens() as f64;
        for judged in &mut judged {
            match leg
                .members
                .iter()
                .position(|member| member.rank == judged.rank)
            {
                Some(at) => {
                    let candidate = &leg.candidates[at];
                    judged.overlap = candidate.overlap;
                    judged.load = candidate.load;
                    judged.prefill_tokens = (costs[at].prefill_blocks * block_size).round() as u64;
                    judged.decode_blocks = leg.question.decode_blocks(candidate);
                    judged.cost = Some(costs[at]);
                    judged.excluded = None;
                }
                None if judged.excluded.is_none() => {
                    judged.excluded = Some("workers that only decode go before it".to_owned());
                }
                None => {}
            }
        }
        PhaseExplained {
            role: leg.question.role,
            taken,
            winner: Some(leg.member().rank),
            runner_up: runner_up.map(|at| leg.members[at].rank),
            margin: runner_up.map(|at| costs[at].total - costs[winner].total),
            ties: leg.choice.ties,
            judged,
        }
    }

    /// The phases where it came to no choice.
    pub(super) fn unchosen_phases(&self, error: RouteError) -> Vec<PhaseExplained> {
        let request = &self.prepared.request;
        let apart = self.has_prefill() || error == RouteError::NoPrefill;
        let role = if apart {
            Role::Decode
        } else {
            Role::Aggregated
        };
        let prefill = apart.then(|| self.unchosen(&for_prefill(request)));
        prefill
            .into_iter()
            .chain([self.unchosen(&Constraints {
                role,
                ..request.constraints.clone()
            })])
            .collect()
    }

    /// A phase for which nobody was chosen.
    fn unchosen(&self, constraints: &Constraints) -> PhaseExplained {
        PhaseExplained {
            role: constraints.role,
            taken: false,
            winner: None,
            runner_up: None,
            margin: None,
            ties: 0,
            judged: self.judge(constraints),
        }
    }

    /// Everybody, without a cost.
    fn judge(&self, constraints: &Constraints) -> Vec<Judged> {
        let verdicts = excluded(&self.seen.members, constraints, &self.seen.standings);
        verdicts
            .into_iter()
            .enumerate()
            .map(|(at, verdict)| self.judged(at, verdict))
            .collect()
    }

    /// One member that is given no cost.
    fn judged(&self, at: usize, verdict: Option<Excluded<'_>>) -> Judged {
        let (member, load) = (self.seen.members[at], self.seen.loads[at]);
        let gone = || {
            load.is_none()
                .then(|| "it has just left the fleet".to_owned())
        };
        let (load, additional) = load.unwrap_or_default();
        let prompt_tokens = self.prepared.request.prompt.tokens();
        let required = Question::new(prompt_tokens, member.worker.block_size).required_blocks();
        let tail = required.saturating_sub(self.prepared.blocks.complete);
        Judged {
            rank: member.rank,
            endpoint: member.worker.endpoint,
            role: member.worker.role,
            overlap: self.prepared.overlap(member),
            source: self.prepared.standing(member),
            cached_tokens: self.prepared.cached_tokens(member, true),
            load,
            prefill_tokens: load.active_prefill_tokens + prompt_tokens,
            decode_blocks: load.active_blocks + additional + tail,
            cost: None,
            excluded: verdict.map(|why| why.to_string()).or_else(gone),
        }
    }

    fn has_prefill(&self) -> bool {
        let request = &self.prepared.request;
        request.has_prompt()
            && self
                .seen
                .members
                .iter()
                .any(|member| member.worker.role == Role::Prefill)
    }
}

pub(super) fn unrouted(
    prepared: &Prepared,
    error: RouteError,
    phases: Vec<PhaseExplained>,
    block_size: Option<BlockSize>,
) -> Explanation {
    let prompt = &prepared.request.prompt;
    Explanation {
        model: prepared.request.model.clone(),
        requested_model: None,
        class: None,
        busy: false,
        mode: Mode::Passthrough,
        reason: Some(error.reason()),
        prompt_tokens: prompt.tokens(),
        prompt_blocks: prompt
            .blocks()
            .iter()
            .map(|hashes| hashes.len() as u64)
            .sum(),
        block_size,
        computed_by: None,
        weights: prepared.weights,
        phases,
        sentence: sentence::unrouted(error, prepared.request.constraints.pool.as_deref()),
        route: None,
    }
}
