//! API for callers that route themselves: estimates for every worker rank, and bookings of requests
//! that were routed elsewhere. They use the same computations as a decision of this router.

use std::sync::Arc;

use super::context::RoutingContext;
use super::pools::{CandidatePool, FleetAvailability, PhasePools, serving};
use super::predictions::RequestPredictions;
use super::request::RouteRequest;
use super::route::RouteError;
use super::state::Router;
use super::worker_feedback::OutcomeTarget;
use crate::block::tracking::random_sequences;
use crate::fleet::FleetMember;
use crate::health::{HealthTransition, RequestOutcome, TrackedRequest};
use crate::index::TierBlocks;
use crate::load::{ActiveLoad, BookingEnd, LoadBooking, PromptSequences};
use crate::policy::{Candidate, Cost, PolicyInput, costs};
use crate::queue::BusyThreshold;
use crate::worker::{WorkerRank, WorkerRole};

/// Estimate for one worker rank and one prompt.
#[derive(Clone, Debug)]
pub struct WorkerEstimate {
    /// Worker rank.
    pub rank: WorkerRank,
    /// Cached blocks of the prompt, per tier.
    pub overlap: TierBlocks,
    /// Blocks of the shared cache beyond those on the rank's device.
    pub shared_beyond_device: u64,
    /// Cached blocks, lower tiers weighted.
    pub effective_blocks: f64,
    /// Cached prompt tokens, without the last token.
    pub cached_tokens: u64,
    /// Current load, without this request.
    pub load: ActiveLoad,
    /// Outstanding prefill tokens, with this request.
    pub potential_prefill_tokens: u64,
    /// Active blocks, with this request.
    pub potential_decode_blocks: u64,
    /// Cost if all these ranks were candidates.
    pub cost: Cost,
}

/// Options of an external booking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExternalRouteOptions {
    /// Whether another worker runs the prefill.
    pub has_remote_prefill: bool,
    /// Cached prompt tokens, if the caller knows them.
    pub cached_tokens: Option<u64>,
}

/// Prepared booking of a request that was routed externally.
#[derive(Debug)]
pub struct ExternalBooking {
    /// Load of the request.
    pub booking: LoadBooking,
    context: RoutingContext,
    member: FleetMember,
}

impl Router {
    /// Estimates every rank that serves the model, sorted by worker and rank.
    pub fn estimate_all(&self, request: RouteRequest) -> Result<Vec<WorkerEstimate>, RouteError> {
        let mut context = self.prepare(request);
        let fleet = self.current_fleet(&mut context);
        let mut members = serving(&fleet, &context.request)?;
        members.sort_by_key(|member| member.rank);
        let pools = PhasePools {
            decode: Arc::new(CandidatePool {
                constraints: context.request.constraints.clone(),
                members,
            }),
            prefill: None,
            has_prefill_workers: false,
            availability: FleetAvailability::default(),
        };
        let decider = self.decider(&context, &pools, &BusyThreshold::default());
        let (input, set) = self.load.read(|view| decider.candidates_for_both(view));
        let costs = costs(&input, &set.candidates, &set.policy);
        let estimates = set.members.iter().zip(&set.candidates).zip(costs);
        Ok(estimates
            .map(|((member, candidate), cost)| {
                worker_estimate(&context, &input, member, candidate, cost)
            })
            .collect())
    }

    /// Prepares the booking of a request that was routed to `rank` externally. Returns `None` if
    /// the rank does not serve the model.
    pub fn prepare_external(
        &self,
        request: RouteRequest,
        rank: WorkerRank,
        options: ExternalRouteOptions,
    ) -> Option<ExternalBooking> {
        let mut context = self.prepare(request);
        let fleet = self.current_fleet(&mut context);
        let slot = fleet.slot(rank)?;
        if context
            .request
            .model
            .as_ref()
            .is_some_and(|model| !fleet.slots_serving(model).contains(&slot))
        {
            return None;
        }
        let member = fleet.member(slot)?.clone();
        let is_prefill_worker = member.worker.role == WorkerRole::Prefill;
        let blocks = &context.blocks;
        let sequences = if is_prefill_worker || !context.settings.tracking.active_blocks {
            PromptSequences::empty()
        } else if context.assume_kv_reuse {
            blocks.sequences.clone()
        } else {
            random_sequences(blocks.complete as usize, &mut *self.rng.lock()).into()
        };
        let mut booking = LoadBooking {
            slot: member.slot,
            rank: member.rank,
            sequences,
            prompt_tokens: context.request.prompt.tokens(),
            cached_tokens: options
                .cached_tokens
                .unwrap_or_else(|| context.cached_tokens(&member, false)),
            track_prefill: context.track_prefill && !options.has_remote_prefill,
            prefill_time: None,
            content_time: None,
            end: if is_prefill_worker {
                BookingEnd::FirstToken
            } else {
                BookingEnd::RequestEnd
            },
        };
        if context.settings.tracking.prefill_decay {
            booking.prefill_time = self.load.read(|view| view.prefill_time(&booking));
        }
        Some(ExternalBooking {
            booking,
            context,
            member,
        })
    }

    /// Predicts that the prompts of an external booking are cached on its rank.
    pub fn predict_external(&self, external: &ExternalBooking) -> RequestPredictions {
        let blocks = external.context.request.prompt.blocks();
        let mut answering = self.lookup.predictors.predict(&external.member, blocks);
        if let Some(prediction) = &mut answering {
            prediction.confirm(blocks, &*self.feedback.listener);
        }
        RequestPredictions {
            answering,
            prefilling: None,
        }
    }

    /// Records the status with which these ranks answered an externally routed request. Returns the
    /// health transitions, for the log.
    pub fn report_status(
        &self,
        ranks: &[WorkerRank],
        tracked: &mut [TrackedRequest],
        status: u16,
    ) -> Vec<HealthTransition> {
        let now = self.load.now();
        let outcome = RequestOutcome::from_status(status);
        let record = |rank: &WorkerRank| {
            let request = tracked.iter_mut().find(|request| request.rank() == *rank);
            let target = request.map_or(OutcomeTarget::Rank(*rank), OutcomeTarget::Tracked);
            self.feedback.record_outcome(target, outcome, &[], now)
        };
        ranks.iter().flat_map(record).collect()
    }
}

fn worker_estimate(
    context: &RoutingContext,
    input: &PolicyInput,
    member: &FleetMember,
    candidate: &Candidate,
    cost: Cost,
) -> WorkerEstimate {
    let Candidate { overlap, load, .. } = *candidate;
    let weights = context.policy_of(&member.worker.model).weights;
    let cached_tokens = context.cached_tokens(member, false);
    let computed_tokens = if input.track_prefill {
        input.prompt_tokens.saturating_sub(cached_tokens)
    } else {
        0
    };
    WorkerEstimate {
        rank: member.rank,
        overlap,
        shared_beyond_device: input.shared_beyond(overlap.device),
        effective_blocks: overlap
            .weighted_total(weights.host_cache_hit_weight, weights.disk_cache_hit_weight),
        cached_tokens: context.cached_tokens(member, true),
        load,
        potential_prefill_tokens: load.active_prefill_tokens.saturating_add(computed_tokens),
        potential_decode_blocks: load.active_blocks + candidate.additional_blocks,
        cost,
    }
}
