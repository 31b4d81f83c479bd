//! Why a request goes where it goes: every member of the fleet that serves the model, with what it has cached, what it is
//! busy with, every term of its cost, or the reason why it was not a candidate. It is made by the same steps as a real
//! decision. What changes from one moment to the next is read at one instant, and nothing is booked, recorded or used up
//! by it: not even a draw, so that the next request draws what was drawn here.

mod sentence;
mod telling;

use std::sync::Arc;

use serde::Serialize;

use super::answer::{ComputedBy, Mode, Route, RouteError};
use super::leg::{Decision, Legs, Undecided};
use super::pools::{Pools, Standings};
use super::prepared::Prepared;
use super::question::RouteRequest;
use super::reason::Reason;
use super::{Router, occupancy, pools};
use crate::admission::{Class, Gate};
use crate::fleet::{Kinds, Member};
use crate::index::TierBlocks;
use crate::load::{Load, LoadView};
use crate::schedule::{Cost, Weights};
use crate::trust::Standing;
use crate::worker::{BlockSize, Endpoint, ModelName, Role, WorkerRank};
use telling::{Telling, unrouted};

/// Why one request goes where it goes.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The model that is asked for; none where any worker will do.
    pub model: Option<ModelName>,
    /// The model that the client requested, if a rewrite replaced it by `model`.
    pub requested_model: Option<String>,
    /// The class that it would wait in, where there is a queue.
    pub class: Option<Arc<str>>,
    /// Whether it would have to wait, because everybody it could go to is busy for that class. The choice is then the one
    /// without waiting.
    pub busy: bool,
    /// The step of the ladder.
    pub mode: Mode,
    /// Why not a higher step, or why there is no choice.
    pub reason: Option<Reason>,
    /// Prompt tokens, or the estimate.
    pub prompt_tokens: u64,
    /// Complete blocks of the prompt.
    pub prompt_blocks: u64,
    /// Tokens per block, where somebody serves the model.
    pub block_size: Option<BlockSize>,
    /// The worker rank that computes the prompt, with the prediction for its cache; none if no worker is chosen.
    pub computed_by: Option<ComputedBy>,
    /// The weights for this request. A decode choice may leave out the credit.
    pub weights: Weights,
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
    /// Whether it comes to this phase: where a prefill is not worth sending elsewhere, its choice is shown all the same.
    pub taken: bool,
    /// Who was chosen.
    pub winner: Option<WorkerRank>,
    /// The cheapest of the others.
    pub runner_up: Option<WorkerRank>,
    /// By how much the runner-up costs more, in blocks; less than nothing where a temperature drew a dearer one.
    pub margin: Option<f64>,
    /// How many candidates cost exactly as much as the winner, itself included; 1 where a temperature is set.
    pub ties: usize,
    /// Everybody who serves the model, in the order of the slots.
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
    /// How far its event source can be believed, and why not further.
    pub source: Standing,
    /// Prompt tokens that its engine would report as cached.
    pub cached_tokens: u64,
    /// What it is busy with, without this request.
    pub load: Load,
    /// Prefill that would be outstanding on it, in tokens, what is cached not taken off; none in a phase without prefill.
    pub prefill_tokens: u64,
    /// Blocks it would hold for live requests, this one included.
    pub decode_blocks: u64,
    /// Its cost, term by term, where it was a candidate.
    pub cost: Option<Cost>,
    /// Why it was no candidate; none where it was one, or would have been.
    pub excluded: Option<String>,
}

/// What was seen at one instant.
struct Seen<'f> {
    members: Vec<&'f Member>,
    standings: Standings,
    /// The load of each member, and the blocks of the prompt that would be new to it; none where it has just left.
    loads: Vec<Option<(Load, u64)>>,
    /// Whether everybody who would do is busy.
    busy: bool,
    decided: Result<Legs<'f>, RouteError>,
}

impl Router {
    /// Says why a request would go where it would go now, if nobody had to wait.
    pub fn explain(&self, request: RouteRequest) -> Explanation {
        self.explain_prepared(self.prepare(request), None)
    }

    /// Says why a request would go where it would go now, and whether it would have to wait in its class.
    pub fn explain_prepared(&self, mut prepared: Prepared, class: Option<&Class>) -> Explanation {
        let gate = class.map(|class| class.gate).unwrap_or_default();
        let explanation = self.explain_at(&mut prepared, &gate);
        Explanation {
            class: class.map(|class| class.name.clone()),
            ..explanation
        }
    }

    fn explain_at(&self, prepared: &mut Prepared, gate: &Gate) -> Explanation {
        let fleet = self.fleet_of(prepared);
        let members = match pools::serving(&fleet, &prepared.request) {
            Ok(members) => members,
            Err(error) => return unrouted(prepared, error, Vec::new(), None),
        };
        let mut seen = self
            .load
            .look(|view| self.see(view, prepared, members.clone(), gate));
        // Soft affinity waits for nobody, here as in placing.
        if seen.busy && prepared.request.affinity.take().is_some() {
            seen = self
                .load
                .look(|view| self.see(view, prepared, members, gate));
        }
        let telling = Telling {
            prepared,
            seen: &seen,
        };
        match &seen.decided {
            Ok(legs) => telling.routed(legs, self.describe(prepared, legs, &seen.standings)),
            Err(error) => {
                let block_size = seen.members.first().map(|member| member.worker.block_size);
                unrouted(
                    prepared,
                    *error,
                    telling.unchosen_phases(*error),
                    block_size,
                )
            }
        }
    }

    /// Everything that has to be of one instant. Nobody books meanwhile, so nothing is put into words here.
    fn see<'f>(
        &self,
        view: &LoadView<'_>,
        prepared: &Prepared,
        members: Vec<&'f Member>,
        gate: &Gate,
    ) -> Seen<'f> {
        let standings = Standings {
            overloaded: self
                .overload
                .peek(&members, view.now(), |member| occupancy(view, member)),
            unwell: self.health.unwell(view.now()),
        };
        let additional = prepared.blocks.additional(view, true);
        let load = |member: &&Member| {
            Some((
                view.load(member.slot, member.rank)?,
                additional.of(member.slot),
            ))
        };
        let loads = members.iter().map(load).collect();
        let kinds = Kinds::of(members.iter().map(|member| &*member.worker));
        let pools = Pools::among(
            (&members, kinds),
            &prepared.request,
            &prepared.settings,
            standings.clone(),
        );
        let decide = |gate: &Gate| {
            let pools = pools.as_ref().map_err(|error| Undecided::Refused(*error))?;
            let decision = Decision {
                prepared,
                pools,
                settings: &prepared.settings,
                gate,
                unheard: None,
            };
            decision.decide(view, &mut self.random.lock().clone())
        };
        let decided = decide(gate);
        let busy = matches!(decided, Err(Undecided::Busy));
        let decided = if busy {
            decide(&Gate::default())
        } else {
            decided
        };
        Seen {
            members,
            standings,
            loads,
            busy,
            decided: decided.map_err(RouteError::from),
        }
    }
}
