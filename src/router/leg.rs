//! The choice for one phase, and the two phases together: prefill first, then the decode under what the prefill worker
//! demands, unless the decode worker had better do all of it. Runs under the load's lock, so it only costs and compares.

use std::collections::HashMap;
use std::sync::Arc;

use rand::Rng;

use super::answer::RouteError;
use super::pools::{Pool, Pools};
use super::prepared::Prepared;
use super::question::{Decoders, Step};
use super::settings::RouterSettings;
use crate::admission::Gate;
use crate::block::SequenceHash;
use crate::disagg::{Bypass, Facts};
use crate::fleet::Member;
use crate::index::TierBlocks;
use crate::load::{Additional, Booking, LoadView, Sequences, Until};
use crate::schedule::{self, Candidate, Choice, Question, Unheard, Weights, preference};
use crate::worker::{ModelName, Role, Worker};

/// One phase, decided.
#[derive(Debug)]
pub(super) struct Leg<'f> {
    pub(super) pool: Arc<Pool<'f>>,
    pub(super) question: Question,
    pub(super) weights: Weights,
    /// Whose slot was still theirs, in the order of the candidates.
    pub(super) members: Vec<&'f Member>,
    pub(super) candidates: Vec<Candidate>,
    pub(super) cached: Cached,
    pub(super) choice: Choice,
    /// Bookings of other routers that were reckoned with, though no word of them has come.
    pub(super) unheard: u32,
}

/// Prompt tokens that the candidates have cached, as they would report them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cached {
    /// The most that one has.
    pub(super) best: u64,
    /// All together.
    pub(super) sum: u64,
}

/// The pool of one phase with the load of each member, in the same order.
struct Candidates<'f> {
    pool: Arc<Pool<'f>>,
    members: Vec<&'f Member>,
    candidates: Vec<Candidate>,
    cached: Cached,
}

impl<'f> Leg<'f> {
    pub(super) fn member(&self) -> &'f Member {
        self.members[self.choice.index]
    }

    /// Mean number of cached prompt tokens over all candidates.
    pub(super) fn chance_cached_tokens(&self) -> u64 {
        self.cached.sum / (self.members.len() as u64).max(1)
    }
}

/// Both phases, decided.
#[derive(Debug)]
pub(super) struct Legs<'f> {
    pub(super) decode: Leg<'f>,
    pub(super) prefill: Option<Leg<'f>>,
    /// Why there is no prefill leg although a prefill worker was at hand.
    pub(super) bypass: Option<Bypass>,
    /// The prefill leg that there would have been.
    pub(super) bypassed: Option<Leg<'f>>,
    /// What of it is carried out now.
    now: Now,
}

/// What of a decision is carried out now, and so is booked, tried and expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    /// All of it.
    Both,
    /// The prefill, which is elsewhere.
    Prefill,
    /// The decode of what was computed elsewhere.
    Decode,
}

/// Why nothing was decided.
#[derive(Debug)]
pub(super) enum Undecided {
    /// Everybody who would do is busy.
    Busy,
    /// Another request took the right to try a worker that was out; things stand differently now.
    Outrun,
    /// It cannot be.
    Refused(RouteError),
}

impl From<Undecided> for RouteError {
    /// Where nobody is ever busy and nothing is taken, only refusals are left.
    fn from(undecided: Undecided) -> Self {
        match undecided {
            Undecided::Refused(error) => error,
            Undecided::Busy | Undecided::Outrun => RouteError::NoCandidate,
        }
    }
}

/// What a decision needs.
pub(super) struct Decision<'a, 'f> {
    pub(super) prepared: &'a Prepared,
    pub(super) pools: &'a Pools<'f>,
    pub(super) settings: &'a RouterSettings,
    pub(super) gate: &'a Gate,
    /// What other routers may have sent of which we do not know.
    pub(super) unheard: Option<&'a UnheardOf>,
}

impl<'f> Decision<'_, 'f> {
    /// Decides both phases.
    pub(super) fn decide(
        &self,
        view: &LoadView<'_>,
        rng: &mut impl Rng,
    ) -> Result<Legs<'f>, Undecided> {
        let Some(pool) = &self.pools.prefill else {
            return self.alone(view, rng);
        };
        let prefill = self.candidates(view, pool.clone(), Phase::Prefill);
        let busy = self.is_busy(&prefill);
        if busy && !self.may_bypass() {
            return Err(Undecided::Busy);
        }
        let prefill = self.leg(prefill, Phase::Prefill, rng)?;
        match self.after(&prefill.member().worker) {
            Some(pool) => {
                let decode = self.leg(
                    self.candidates(view, pool, Phase::Decode),
                    Phase::Decode,
                    rng,
                )?;
                let bypass = self.bypass(view, &prefill, &decode);
                // Who keeps its prefill need not wait for a prefill worker.
                if busy && bypass.is_none() {
                    return Err(Undecided::Busy);
                }
                let (prefill, bypassed) = if bypass.is_none() {
                    (Some(prefill), None)
                } else {
                    (None, Some(prefill))
                };
                let first = prefill.is_some() && matches!(self.step(), Step::PrefillFirst { .. });
                let now = if first { Now::Prefill } else { Now::Both };
                Ok(Legs {
                    decode,
                    prefill,
                    bypass,
                    bypassed,
                    now,
                })
            }
            // Nobody stands where the prefill worker could hand over to.
            None if self.settings.disaggregation.enforce || self.only_decode() => {
                Err(Undecided::Refused(RouteError::NoPrefill))
            }
            None => {
                let legs = self.alone(view, rng)?;
                Ok(Legs {
                    bypass: Some(Bypass::OutOfReach),
                    bypassed: Some(prefill),
                    ..legs
                })
            }
        }
    }

    /// Decides where there is one worker to be found only.
    fn alone(&self, view: &LoadView<'_>, rng: &mut impl Rng) -> Result<Legs<'f>, Undecided> {
        let (phase, pool, now, bypass) = match self.step() {
            // It waits for nobody: what was computed for it is kept for a short time.
            Step::Decode(done) => {
                let pool = self
                    .after(&done.worker)
                    .ok_or(Undecided::Refused(RouteError::NoCandidate))?;
                (Phase::Decode, pool, Now::Decode, None)
            }
            Step::Together(bypass) => {
                let bypass = self.pools.has_prefills.then_some(*bypass);
                (Phase::Both, self.pools.decode.clone(), Now::Both, bypass)
            }
            Step::PrefillFirst { failed } | Step::Anew { failed } if !failed.is_empty() => (
                Phase::Both,
                self.pools.decode.clone(),
                Now::Both,
                Some(Bypass::PrefillFailed),
            ),
            Step::Both | Step::PrefillFirst { .. } | Step::Anew { .. } => {
                (Phase::Both, self.pools.decode.clone(), Now::Both, None)
            }
        };
        let seen = self.candidates(view, pool, phase);
        let seen = if now == Now::Decode {
            seen
        } else {
            self.free(seen)?
        };
        let decode = self.leg(seen, phase, rng)?;
        Ok(Legs {
            decode,
            prefill: None,
            bypass,
            bypassed: None,
            now,
        })
    }

    fn step(&self) -> &Step {
        &self.prepared.request.step
    }

    /// The decode pool under what the prefill worker demands.
    fn after(&self, worker: &Worker) -> Option<Arc<Pool<'f>>> {
        let pool = &self.pools.decode;
        if worker.kv_transfer.is_none() {
            return Some(pool.clone());
        }
        let mut constraints = pool.constraints.clone();
        constraints.follow(worker).ok()?;
        pool.narrowed(constraints).map(Arc::new)
    }

    fn tracks(&self, phase: Phase) -> bool {
        phase != Phase::Prefill && self.settings.tracking.active_blocks
    }

    fn candidates(&self, view: &LoadView<'_>, pool: Arc<Pool<'f>>, phase: Phase) -> Candidates<'f> {
        let most = pool.members.len();
        let (mut members, mut candidates) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let (additional, mut cached) = (self.additional(view, phase), Cached::default());
        for &member in &pool.members {
            // A slot that is somebody else's by now is left out.
            let Some(load) = view.load(member.slot, member.rank) else {
                continue;
            };
            members.push(member);
            let (overlap, trust_credit) = self.prepared.overlap_and_credit(member);
            if overlap != TierBlocks::default() {
                let tokens = self.prepared.cached_tokens(member, true);
                cached = Cached {
                    best: cached.best.max(tokens),
                    sum: cached.sum + tokens,
                };
            }
            candidates.push(Candidate {
                overlap,
                trust_credit,
                load,
                additional_blocks: additional.of(member.slot),
                preference: preference(&pool.constraints, &member.worker),
            });
        }
        Candidates {
            pool,
            members,
            candidates,
            cached,
        }
    }

    /// Blocks that whoever does the phase would have to add to those of its live requests. What comes by transfer is the
    /// request's own.
    fn additional(&self, view: &LoadView<'_>, phase: Phase) -> Additional {
        let is_shared = phase != Phase::Decode && self.prepared.reuse;
        let blocks = &self.prepared.blocks;
        if self.tracks(phase) {
            blocks.additional(view, is_shared)
        } else {
            Additional::default()
        }
    }

    fn is_busy(&self, seen: &Candidates<'_>) -> bool {
        let busy = |(member, candidate): (&&Member, &Candidate)| {
            let batch = member.worker.capacity.max_num_batched_tokens;
            self.gate.busy(candidate.load.active_prefill_tokens, batch)
        };
        !seen.members.is_empty() && seen.members.iter().zip(&seen.candidates).all(busy)
    }

    fn free(&self, seen: Candidates<'f>) -> Result<Candidates<'f>, Undecided> {
        if self.is_busy(&seen) {
            Err(Undecided::Busy)
        } else {
            Ok(seen)
        }
    }

    fn leg(
        &self,
        seen: Candidates<'f>,
        phase: Phase,
        rng: &mut impl Rng,
    ) -> Result<Leg<'f>, Undecided> {
        let Candidates {
            pool,
            members,
            mut candidates,
            cached,
        } = seen;
        let (question, weights) = (
            self.question(&pool, phase, self.tracks(phase)),
            self.weights(phase),
        );
        let unheard = self.unheard(&pool, phase);
        let unheard = unheard.map_or(0, |unheard| {
            unheard.place(&question, &mut candidates, &weights, rng)
        });
        let choice = schedule::choose(&question, &candidates, &weights, rng)
            .ok_or_else(|| Undecided::Refused(RouteError::NoCandidate.under(&pool.constraints)))?;
        Ok(Leg {
            pool,
            question,
            weights,
            members,
            candidates,
            cached,
            choice,
            unheard,
        })
    }

    /// What other routers may have sent there.
    fn unheard(&self, pool: &Pool<'_>, phase: Phase) -> Option<&Unheard> {
        let all = self.unheard.filter(|all| !all.is_empty())?;
        let until = if phase == Phase::Prefill {
            Until::FirstToken
        } else {
            Until::End
        };
        // A pool is never empty.
        all.get(&(pool.members[0].worker.model.clone(), until))
    }

    fn question(&self, pool: &Pool<'_>, phase: Phase, tracks: bool) -> Question {
        let request = &self.prepared.request;
        // A pool is never empty.
        let block_size = pool.members[0].worker.block_size;
        Question {
            track_prefill: phase != Phase::Decode && self.prepared.track_prefill,
            role: match phase {
                Phase::Both => Role::Aggregated,
                Phase::Prefill => Role::Prefill,
                Phase::Decode => Role::Decode,
            },
            tracked_blocks: if tracks {
                self.prepared.blocks.complete
            } else {
                0
            },
            shared: request.shared.ranges().to_vec(),
            ..Question::new(request.prompt.tokens(), block_size)
        }
    }

    fn weights(&self, phase: Phase) -> Weights {
        let mut weights = self.prepared.weights;
        // Where the decode worker never does a prefill, what it has cached is worth nothing to it.
        if phase == Phase::Decode && self.settings.disaggregation.conditional.is_none() {
            weights.overlap_score_credit = 0.0;
        }
        weights
    }

    fn may_bypass(&self) -> bool {
        // Who named the prefill worker wants it used.
        let wanted = self.settings.disaggregation.conditional.is_some()
            && self.prepared.request.prefill_pin.is_none();
        wanted && !self.only_decode()
    }

    /// Whether those who are there for decodes cannot prefill.
    fn only_decode(&self) -> bool {
        self.prepared.request.decoders == Decoders::OnlyDecode
    }

    fn bypass(&self, view: &LoadView<'_>, prefill: &Leg<'f>, decode: &Leg<'f>) -> Option<Bypass> {
        let rule = self
            .settings
            .disaggregation
            .conditional
            .filter(|_| self.may_bypass())?;
        let (to, from) = (decode.member(), prefill.member());
        rule.bypass(&Facts {
            prompt_tokens: decode.question.prompt_tokens,
            decode_cached_tokens: self.prepared.cached_tokens(to, false),
            decode_blocks: decode.choice.potential_decode_blocks,
            decode_total_blocks: to.worker.capacity.total_kv_blocks,
            prefill_tokens: view
                .load(from.slot, from.rank)
                .map_or(0, |load| load.active_prefill_tokens),
            prefill_capacity: from.worker.capacity.max_num_batched_tokens,
        })
    }
}

/// What other routers may have sent, of which no word has come: for workers of a model, for a prefill alone or for more.
pub type UnheardOf = HashMap<(ModelName, Until), Unheard>;

/// Which phases a leg is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Both,
    Prefill,
    Decode,
}

impl<'f> Legs<'f> {
    /// Who gets the request now; the worker that answers comes first.
    pub(super) fn chosen(&self) -> impl Iterator<Item = &'f Member> {
        let decode = Some(&self.decode).filter(|_| self.now != Now::Prefill);
        [decode, self.prefill.as_ref()]
            .into_iter()
            .flatten()
            .map(Leg::member)
    }

    /// Whether the worker that answers computes the prompt as well.
    fn is_together(&self) -> bool {
        self.prefill.is_none() && self.now != Now::Decode
    }

    /// What is to be booked, in the order of those who get the request now. `unshared` makes names that no other request uses.
    pub(super) fn bookings(
        &self,
        prepared: &Prepared,
        settings: &RouterSettings,
        unshared: impl FnOnce(usize) -> Arc<[SequenceHash]>,
    ) -> Vec<Booking> {
        let blocks = &prepared.blocks;
        let decode = || {
            let sequences = match (
                settings.tracking.active_blocks,
                self.is_together() && prepared.reuse,
            ) {
                (false, _) => Sequences::none(),
                (true, true) => blocks.sequences.clone(),
                (true, false) => unshared(blocks.complete as usize).into(),
            };
            self.booking(&self.decode, prepared, sequences, self.is_together())
        };
        let decode = (self.now != Now::Prefill).then(decode);
        let prefill = self
            .prefill
            .as_ref()
            .map(|leg| self.booking(leg, prepared, Sequences::none(), true));
        let prefill = prefill.map(|booking| Booking {
            until: Until::FirstToken,
            ..booking
        });
        decode.into_iter().chain(prefill).collect()
    }

    fn booking(
        &self,
        leg: &Leg<'_>,
        prepared: &Prepared,
        sequences: Sequences,
        prefills: bool,
    ) -> Booking {
        let member = leg.member();
        Booking {
            slot: member.slot,
            rank: member.rank,
            sequences,
            prompt_tokens: leg.question.prompt_tokens,
            cached_tokens: prepared.cached_tokens(member, false),
            track_prefill: prefills && prepared.track_prefill,
            prefill_time: None,
            until: Until::End,
        }
    }
}
