//! The choice for one phase, and the two phases together: prefill first, then the decode under what the prefill worker
//! demands, unless the decode worker had better do all of it. Runs under the load's lock, so it only costs and compares.

use std::sync::Arc;

use rand::Rng;

use super::answer::RouteError;
use super::pools::{Pool, Pools};
use super::prepared::Prepared;
use super::settings::RouterSettings;
use crate::admission::Gate;
use crate::block::SequenceHash;
use crate::disagg::{Bypass, Facts};
use crate::fleet::Member;
use crate::load::{Booking, LoadView, Until};
use crate::schedule::{self, Candidate, Choice, Question, Weights, preference};
use crate::worker::Role;

/// One phase, decided.
#[derive(Debug)]
pub(super) struct Leg<'f> {
    pub(super) pool: Pool<'f>,
    pub(super) question: Question,
    pub(super) weights: Weights,
    /// Whose slot was still theirs, in the order of the candidates.
    pub(super) members: Vec<&'f Member>,
    pub(super) candidates: Vec<Candidate>,
    pub(super) choice: Choice,
}

/// The pool of one phase with the load of each member, in the same order.
struct Candidates<'f> {
    pool: Pool<'f>,
    members: Vec<&'f Member>,
    candidates: Vec<Candidate>,
}

impl<'f> Leg<'f> {
    pub(super) fn member(&self) -> &'f Member {
        self.members[self.choice.index]
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
}

impl<'f> Decision<'_, 'f> {
    /// Decides both phases.
    pub(super) fn decide(&self, view: &LoadView<'_>, rng: &mut impl Rng) -> Result<Legs<'f>, Undecided> {
        let Some(pool) = &self.pools.prefill else {
            let decode = self.free(self.candidates(view, self.pools.decode.clone(), Phase::Both))?;
            let decode = self.leg(decode, Phase::Both, rng)?;
            return Ok(Legs { decode, prefill: None, bypass: None, bypassed: None });
        };
        let prefill = self.candidates(view, pool.clone(), Phase::Prefill);
        let busy = self.is_busy(&prefill);
        if busy && !self.may_bypass() {
            return Err(Undecided::Busy);
        }
        let prefill = self.leg(prefill, Phase::Prefill, rng)?;
        match self.after(&prefill) {
            Some(pool) => {
                let decode = self.leg(self.candidates(view, pool, Phase::Decode), Phase::Decode, rng)?;
                let bypass = self.bypass(view, &prefill, &decode);
                // Who keeps its prefill need not wait for a prefill worker.
                if busy && bypass.is_none() {
                    return Err(Undecided::Busy);
                }
                let (prefill, bypassed) = if bypass.is_none() { (Some(prefill), None) } else { (None, Some(prefill)) };
                Ok(Legs { decode, prefill, bypass, bypassed })
            }
            // Nobody stands where the prefill worker could hand over to.
            None if self.settings.disaggregation.enforce => Err(Undecided::Refused(RouteError::NoPrefill)),
            None => {
                let decode = self.free(self.candidates(view, self.pools.decode.clone(), Phase::Both))?;
                let decode = self.leg(decode, Phase::Both, rng)?;
                Ok(Legs { decode, prefill: None, bypass: Some(Bypass::OutOfReach), bypassed: Some(prefill) })
            }
        }
    }

    /// The decode pool under what the prefill worker demands.
    fn after(&self, prefill: &Leg<'f>) -> Option<Pool<'f>> {
        let pool = &self.pools.decode;
        let worker = &prefill.member().worker;
        if worker.kv_transfer.is_none() {
            return Some(pool.clone());
        }
        let mut constraints = pool.constraints.clone();
        constraints.follow(worker).ok()?;
        pool.narrowed(constraints)
    }

    fn tracks(&self, phase: Phase) -> bool {
        phase != Phase::Prefill && self.settings.tracking.active_blocks
    }

    fn candidates(&self, view: &LoadView<'_>, pool: Pool<'f>, phase: Phase) -> Candidates<'f> {
        let tracks = self.tracks(phase);
        let candidate = |member: &'f Member| {
            let load = view.load(member.slot, member.rank)?;
            let additional = || match phase != Phase::Decode && self.prepared.reuse {
                true => self.prepared.blocks.additional(view, member),
                // What comes by transfer is the request's own, and so is everything where nothing is taken to be shared.
                false => self.prepared.blocks.complete,
            };
            let candidate = Candidate {
                slot: member.slot,
                rank: member.rank,
                overlap: self.prepared.overlap(member),
                trust_credit: self.prepared.trust_credit(member),
                load,
                additional_blocks: if tracks { additional() } else { 0 },
                preference: preference(&pool.constraints, &member.worker),
            };
            Some((member, candidate))
        };
        let (members, candidates) = pool.members.iter().copied().filter_map(candidate).unzip();
        Candidates { pool, members, candidates }
    }

    fn is_busy(&self, seen: &Candidates<'_>) -> bool {
        let busy = |(member, candidate): (&&Member, &Candidate)| {
            let batch = member.worker.capacity.max_num_batched_tokens;
            self.gate.busy(candidate.load.active_prefill_tokens, batch)
        };
        !seen.members.is_empty() && seen.members.iter().zip(&seen.candidates).all(busy)
    }

    fn free(&self, seen: Candidates<'f>) -> Result<Candidates<'f>, Undecided> {
        if self.is_busy(&seen) { Err(Undecided::Busy) } else { Ok(seen) }
    }

    fn leg(&self, seen: Candidates<'f>, phase: Phase, rng: &mut impl Rng) -> Result<Leg<'f>, Undecided> {
        let Candidates { pool, members, candidates } = seen;
        let (question, weights) = (self.question(&pool, phase, self.tracks(phase)), self.weights(phase));
        let choice = schedule::choose(&question, &candidates, &weights, rng)
            .ok_or_else(|| Undecided::Refused(RouteError::NoCandidate.under(&pool.constraints)))?;
        Ok(Leg { pool, question, weights, members, candidates, choice })
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
            tracked_blocks: if tracks { self.prepared.blocks.complete } else { 0 },
            shared: request.shared.clone(),
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
        self.settings.disaggregation.conditional.is_some() && self.prepared.request.prefill_pin.is_none()
    }

    fn bypass(&self, view: &LoadView<'_>, prefill: &Leg<'f>, decode: &Leg<'f>) -> Option<Bypass> {
        let rule = self.settings.disaggregation.conditional.filter(|_| self.may_bypass())?;
        let (to, from) = (decode.member(), prefill.member());
        rule.bypass(&Facts {
            prompt_tokens: decode.question.prompt_tokens,
            decode_cached_tokens: self.prepared.cached_tokens(to, false),
            decode_blocks: decode.choice.potential_decode_blocks,
            decode_total_blocks: to.worker.capacity.total_kv_blocks,
            prefill_tokens: view.load(from.slot, from.rank).map_or(0, |load| load.active_prefill_tokens),
            prefill_capacity: from.worker.capacity.max_num_batched_tokens,
        })
    }
}

/// Which phases a leg is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Both,
    Prefill,
    Decode,
}

impl<'f> Legs<'f> {
    /// Who was chosen; the worker that answers comes first.
    pub(super) fn chosen(&self) -> impl Iterator<Item = &'f Member> {
        [Some(&self.decode), self.prefill.as_ref()].into_iter().flatten().map(Leg::member)
    }

    /// What is to be booked; the worker that answers comes first. `unshared` makes names that no other request uses.
    pub(super) fn bookings(
        &self,
        prepared: &Prepared,
        settings: &RouterSettings,
        unshared: impl FnOnce(usize) -> Arc<[SequenceHash]>,
    ) -> Vec<Booking> {
        let blocks = &prepared.blocks;
        let sequences = match (settings.tracking.active_blocks, self.prefill.is_none() && prepared.reuse) {
            (false, _) => Arc::new([]),
            (true, true) => blocks.sequences.clone(),
            (true, false) => unshared(blocks.complete as usize),
        };
        let decode = self.booking(&self.decode, prepared, sequences, self.prefill.is_none());
        let prefill = self.prefill.as_ref().map(|leg| self.booking(leg, prepared, Arc::new([]), true));
        let prefill = prefill.map(|booking| Booking { until: Until::FirstToken, ..booking });
        [decode].into_iter().chain(prefill).collect()
    }

    fn booking(&self, leg: &Leg<'_>, prepared: &Prepared, sequences: Arc<[SequenceHash]>, prefills: bool) -> Booking {
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
