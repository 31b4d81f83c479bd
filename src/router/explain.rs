//! Why a request goes where it goes: every member of the fleet that serves the model, with what it has cached, what it is
//! busy with, every term of its cost, or the reason why it was not a candidate. It is made by the same steps as a real
//! decision, at one instant, and books nothing.

use serde::Serialize;

use super::answer::{Mode, Phases, Reason, Route, RouteError};
use super::leg::{Leg, Legs};
use super::pools::{Pools, Standings, excluded};
use super::prepared::Prepared;
use super::question::RouteRequest;
use super::{Router, pools};
use crate::fleet::Member;
use crate::index::TierBlocks;
use crate::load::Load;
use crate::schedule::{Constraints, Cost, costs};
use crate::worker::{Endpoint, Role, WorkerRank};

/// Why one request goes where it goes.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The step of the ladder, where there is a choice.
    pub mode: Mode,
    /// Why not a higher step, or why there is no choice.
    pub reason: Option<Reason>,
    /// Prompt tokens, or the estimate.
    pub prompt_tokens: u64,
    /// Complete blocks of the prompt.
    pub prompt_blocks: u64,
    /// The phases, prefill first.
    pub phases: Vec<PhaseExplained>,
    /// Why, in one sentence.
    pub sentence: String,
    /// The answer itself, where there is one.
    pub route: Option<Route>,
}

/// Why one worker rank does one phase.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseExplained {
    /// What the workers of the phase do.
    pub role: Role,
    /// Who was chosen.
    pub winner: Option<WorkerRank>,
    /// Who would have been chosen without the winner.
    pub runner_up: Option<WorkerRank>,
    /// By how much the runner-up costs more, in blocks.
    pub margin: Option<f64>,
    /// How many candidates cost exactly as much as the winner, itself included.
    pub ties: usize,
    /// Everybody who serves the model.
    pub judged: Vec<Judged>,
}

/// One worker rank under judgement.
#[derive(Clone, Debug, Serialize)]
pub struct Judged {
    /// Its name.
    pub rank: WorkerRank,
    /// Where it is reached.
    pub endpoint: Endpoint,
    /// What it does.
    pub role: Role,
    /// What it has cached, tier by tier.
    pub overlap: TierBlocks,
    /// Prompt tokens it would not compute.
    pub cached_tokens: u64,
    /// What it is busy with.
    pub load: Load,
    /// Prefill that would be outstanding on it, in tokens, what is cached not taken off.
    pub prefill_tokens: u64,
    /// Blocks it would hold for live requests.
    pub decode_blocks: u64,
    /// Its cost, term by term, where it was a candidate.
    pub cost: Option<Cost>,
    /// Why it was no candidate.
    pub excluded: Option<String>,
}

impl Router {
    /// Says why a request would go where it would go now.
    pub fn explain(&self, request: RouteRequest) -> Explanation {
        let prepared = self.prepare(request);
        let fleet = self.fleet.load();
        let members = match pools::serving(&fleet, prepared.request().model.as_ref()) {
            Ok(members) => members,
            Err(error) => return unrouted(&prepared, error, Vec::new()),
        };
        let standings = self.standings(&members);
        let found = Pools::find(&fleet, prepared.request(), self.settings(), |_| standings.clone());
        let decided = found.and_then(|pools| {
            let legs = self.decide_only(&prepared, &pools)?;
            Ok(self.explained(&prepared, &members, &standings, &legs))
        });
        decided.unwrap_or_else(|error| {
            let constraints = prepared.request().constraints.clone();
            let phase = self.unchosen(&prepared, &members, &standings, &constraints);
            unrouted(&prepared, error, vec![phase])
        })
    }

    fn explained(
        &self,
        prepared: &Prepared,
        members: &[&Member],
        standings: &Standings,
        legs: &Legs<'_>,
    ) -> Explanation {
        let route = self.describe(prepared, legs);
        let legs = legs.prefill.iter().chain([&legs.decode]);
        let phases: Vec<_> = legs.map(|leg| self.phase(prepared, members, standings, leg)).collect();
        Explanation {
            mode: route.mode,
            reason: route.reason,
            prompt_tokens: route.prompt_tokens,
            prompt_blocks: route.prompt_blocks,
            sentence: sentence(&route, &phases),
            phases,
            route: Some(route),
        }
    }

    fn phase(&self, prepared: &Prepared, members: &[&Member], standings: &Standings, leg: &Leg<'_>) -> PhaseExplained {
        let costs = costs(&leg.question, &leg.candidates, &leg.weights);
        let winner = leg.choice.index;
        let others = (0..costs.len()).filter(|at| *at != winner);
        let runner_up = others.min_by(|a, b| costs[*a].total.total_cmp(&costs[*b].total));
        let verdicts = excluded(members, &leg.pool.constraints, standings);
        let judged = members.iter().zip(verdicts).map(|(member, verdict)| {
            let at = leg.members.iter().position(|candidate| candidate.rank == member.rank);
            let mut judged = self.judge(prepared, member);
            match (at, verdict) {
                (Some(at), _) => {
                    judged.load = leg.candidates[at].load;
                    judged.decode_blocks = judged.load.active_blocks + leg.candidates[at].additional_blocks;
                    judged.cost = Some(costs[at]);
                }
                (None, Some(why)) => judged.excluded = Some(why.to_string()),
                (None, None) => judged.excluded = Some("others were preferred for this phase".to_owned()),
            }
            judged
        });
        PhaseExplained {
            role: leg.question.role,
            winner: Some(leg.member().rank),
            runner_up: runner_up.map(|at| leg.members[at].rank),
            margin: runner_up.map(|at| costs[at].total - costs[winner].total),
            ties: leg.choice.ties,
            judged: judged.collect(),
        }
    }

    /// A phase for which nobody could be chosen.
    fn unchosen(
        &self,
        prepared: &Prepared,
        members: &[&Member],
        standings: &Standings,
        constraints: &Constraints,
    ) -> PhaseExplained {
        let verdicts = excluded(members, constraints, standings);
        let judged = members.iter().zip(verdicts).map(|(member, verdict)| Judged {
            excluded: verdict.map(|why| why.to_string()),
            ..self.judge(prepared, member)
        });
        let role = constraints.role;
        PhaseExplained { role, winner: None, runner_up: None, margin: None, ties: 0, judged: judged.collect() }
    }

    fn judge(&self, prepared: &Prepared, member: &Member) -> Judged {
        let load = self.load.look(|view| view.load(member.slot, member.rank)).unwrap_or_default();
        Judged {
            rank: member.rank,
            endpoint: member.worker.endpoint,
            role: member.worker.role,
            overlap: prepared.overlap(member),
            cached_tokens: prepared.cached_tokens(member, true),
            load,
            prefill_tokens: load.active_prefill_tokens + prepared.request().prompt.tokens(),
            decode_blocks: load.active_blocks,
            cost: None,
            excluded: None,
        }
    }
}

fn unrouted(prepared: &Prepared, error: RouteError, phases: Vec<PhaseExplained>) -> Explanation {
    let prompt = &prepared.request().prompt;
    Explanation {
        mode: Mode::Passthrough,
        reason: Some(error.reason()),
        prompt_tokens: prompt.tokens(),
        prompt_blocks: prompt.blocks().iter().map(|hashes| hashes.len() as u64).sum(),
        phases,
        sentence: format!("Nobody was chosen: {error}."),
        route: None,
    }
}

/// Why, in one sentence.
fn sentence(route: &Route, phases: &[PhaseExplained]) -> String {
    let blocks = route.prompt_blocks;
    let held = route.overlap.total();
    let mut text = match &route.phases {
        Phases::Remote(prefill) => {
            format!("Worker rank {} does the prefill and {} the decode: ", prefill.to.rank, route.to.rank)
        }
        Phases::Kept(_) | Phases::Aggregated => format!("Worker rank {} serves the request: ", route.to.rank),
    };
    let Some(phase) = phases.last() else { return text };
    match (phase.ties, phase.margin, phase.runner_up) {
        (_, None, _) => text.push_str("it is the only candidate"),
        (2.., ..) => text.push_str(&format!(
            "drawn among {} candidates of the same cost {:.3}",
            phase.ties, route.choice.cost.total
        )),
        (_, Some(margin), Some(second)) => {
            text.push_str(&format!("it costs {:.3}, {margin:.3} less than {second}", route.choice.cost.total));
        }
        (_, Some(_), None) => {}
    }
    match route.reason {
        Some(reason) => text.push_str(&format!("; caches were not compared ({})", reason.as_str())),
        None => text.push_str(&format!("; it holds {held} of {blocks} blocks")),
    }
    if let Phases::Kept(bypass) = &route.phases {
        text.push_str(&format!("; no remote prefill ({})", bypass.as_str()));
    }
    text.push('.');
    text
}
