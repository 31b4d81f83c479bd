//! Decisions for the prefill and the decode phase, and the bookings that follow from them.

use std::sync::Arc;

use super::context::RoutingContext;
use super::pools::CandidatePool;
use super::route::RouteError;
use crate::block::SequenceHash;
use crate::fleet::FleetMember;
use crate::load::{BookingEnd, LoadBooking, PromptSequences};
use crate::policy::{
    Candidate, Choice, LocalPrefillReason, PolicyInput, PolicySettings, seconds_cost,
};

/// Decision for one phase.
#[derive(Debug)]
pub(super) struct PhaseChoice<'f> {
    pub(super) pool: Arc<CandidatePool<'f>>,
    pub(super) input: PolicyInput,
    pub(super) policy: PolicySettings,
    /// Members whose slot was not reassigned, in the order of the candidates.
    pub(super) members: Vec<&'f FleetMember>,
    pub(super) candidates: Vec<Candidate>,
    pub(super) cached: CachedTokenStats,
    pub(super) choice: Choice,
    /// Estimated bookings of other replicas that were added to the loads.
    pub(super) in_flight: u32,
}

/// Cached prompt tokens over the candidates, without the last token.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CachedTokenStats {
    /// Maximum of one candidate.
    pub(super) best: u64,
    /// Sum over all candidates.
    pub(super) sum: u64,
}

impl<'f> PhaseChoice<'f> {
    pub(super) fn member(&self) -> &'f FleetMember {
        self.members[self.choice.index]
    }

    /// Returns the cost of the chosen rank in seconds.
    pub(super) fn seconds_cost(&self) -> f64 {
        seconds_cost(
            &self.input,
            &self.candidates,
            &self.policy,
            self.choice.index,
        )
    }

    /// Returns the mean of the cached prompt tokens over all candidates.
    pub(super) fn chance_cached_tokens(&self) -> u64 {
        self.cached.sum / (self.members.len() as u64).max(1)
    }
}

/// Decision for both phases.
#[derive(Debug)]
pub(super) struct PhasePlan<'f> {
    pub(super) decode: PhaseChoice<'f>,
    pub(super) prefill: Option<PhaseChoice<'f>>,
    /// Reason why the decode worker runs the prefill although prefill workers exist.
    pub(super) local_prefill: Option<LocalPrefillReason>,
    /// Decision for the prefill phase that was not used.
    pub(super) unused_prefill: Option<PhaseChoice<'f>>,
    /// Phases that are booked now.
    pub(super) booked: BookedPhases,
}

/// Phases of a decision that are carried out now: booked, probed and predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BookedPhases {
    /// All phases of the plan.
    Both,
    /// Only the prefill, on a remote worker.
    Prefill,
    /// Only the decode after a completed prefill.
    Decode,
}

/// Reason why there is no decision.
#[derive(Debug)]
pub(super) enum DecideError {
    /// All candidates are busy.
    Busy,
    /// Another request claimed the probe of an ejected worker, so availability has changed.
    ProbeTaken,
    /// There is no route.
    NoRoute(RouteError),
}

impl From<DecideError> for RouteError {
    /// Converts the error of a decision without a threshold and without probes, where only
    /// `NoRoute` occurs.
    fn from(error: DecideError) -> Self {
        match error {
            DecideError::NoRoute(error) => error,
            DecideError::Busy | DecideError::ProbeTaken => RouteError::NoCandidate,
        }
    }
}

impl<'f> PhasePlan<'f> {
    /// Returns the members that receive the request now, the one that answers first.
    pub(super) fn booked_members(&self) -> impl Iterator<Item = &'f FleetMember> {
        let decode = Some(&self.decode).filter(|_| self.booked != BookedPhases::Prefill);
        [decode, self.prefill.as_ref()]
            .into_iter()
            .flatten()
            .map(PhaseChoice::member)
    }

    /// Returns whether the worker that answers also computes the prompt.
    fn is_single_worker(&self) -> bool {
        self.prefill.is_none() && self.booked != BookedPhases::Decode
    }

    /// Returns the bookings for [`PhasePlan::booked_members`], in the same order. `unshared`
    /// creates block hashes that no other request uses.
    pub(super) fn bookings(
        &self,
        context: &RoutingContext,
        unshared: impl FnOnce(usize) -> Arc<[SequenceHash]>,
    ) -> Vec<LoadBooking> {
        let blocks = &context.blocks;
        let is_single = self.is_single_worker();
        let decode = || {
            let sequences = if !context.settings.tracking.active_blocks {
                PromptSequences::empty()
            } else if is_single && context.assume_kv_reuse {
                blocks.sequences.clone()
            } else {
                unshared(blocks.complete as usize).into()
            };
            self.booking(&self.decode, context, sequences, is_single)
        };
        let decode = (self.booked != BookedPhases::Prefill).then(decode);
        let prefill = self
            .prefill
            .as_ref()
            .map(|phase| self.booking(phase, context, PromptSequences::empty(), true));
        let prefill = prefill.map(|booking| LoadBooking {
            end: BookingEnd::FirstToken,
            ..booking
        });
        decode.into_iter().chain(prefill).collect()
    }

    fn booking(
        &self,
        phase: &PhaseChoice<'_>,
        context: &RoutingContext,
        sequences: PromptSequences,
        computes_prompt: bool,
    ) -> LoadBooking {
        let member = phase.member();
        let running_blocks = phase.candidates[phase.choice.index].running_blocks;
        let running_tokens = u64::from(running_blocks) * phase.input.block_size.tokens() as u64;
        LoadBooking {
            slot: member.slot,
            rank: member.rank,
            sequences,
            prompt_tokens: phase.input.prompt_tokens,
            cached_tokens: context.cached_tokens(member, false).max(running_tokens),
            track_prefill: computes_prompt && context.track_prefill,
            prefill_time: None,
            content_time: None,
            end: BookingEnd::RequestEnd,
        }
    }
}
