//! Decides the prefill and the decode phase: prefill first, then decode under the demands of the
//! prefill worker, unless the decode worker should run both. Runs under the load lock, so it only
//! computes and compares costs.
//!
//! Decision 0045.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::Guard;
use rand::Rng;

use super::cache_lookup::CachedBlockCounts;
use super::context::RoutingContext;
use super::phase_plan::{BookedPhases, CachedTokenStats, DecideError, PhaseChoice, PhasePlan};
use super::pools::{CandidatePool, PhasePools};
use super::request::{DecodeCapability, PhaseSelection};
use super::route::RouteError;
use crate::fleet::FleetMember;
use crate::index::TierBlocks;
use crate::load::{
    AdditionalBlocks, BookingEnd, EngineLoadView, LatencyEstimate, LoadView, RankTiming,
};
use crate::policy::{
    Candidate, ConditionalPrefillConfig, ConditionalPrefillInputs, InFlightEstimate,
    LocalPrefillReason, PhaseCosts, PolicyInput, PolicySettings, choose, taint_preference,
};
use crate::queue::BusyThreshold;
use crate::worker::{ModelName, Worker, WorkerRole};

/// Estimates of requests that other replicas have not reported yet, by model and end of the
/// booking.
pub type InFlightEstimates = HashMap<(ModelName, BookingEnd), InFlightEstimate>;

/// Inputs of a decision.
pub(super) struct PhaseDecider<'a, 'f> {
    pub(super) context: &'a RoutingContext,
    pub(super) pools: &'a PhasePools<'f>,
    pub(super) threshold: BusyThreshold,
    /// Estimated load of requests that other replicas have not reported yet.
    pub(super) in_flight: Option<Guard<Arc<InFlightEstimates>>>,
    /// Load that the engines report.
    pub(super) engine_loads: EngineLoadView,
    pub(super) cached_blocks: CachedBlockCounts<'a>,
    /// Share of evicted prompt tokens that are computed again, estimated for the model.
    pub(super) recomputed_share: f64,
}

/// Phases that one choice covers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PhaseScope {
    Both,
    Prefill,
    Decode,
}

/// Pool of one phase, with the load of each member in the same order.
pub(super) struct CandidateSet<'f> {
    pool: Arc<CandidatePool<'f>>,
    pub(super) policy: PolicySettings,
    estimate: LatencyEstimate,
    pub(super) members: Vec<&'f FleetMember>,
    pub(super) candidates: Vec<Candidate>,
    cached: CachedTokenStats,
}

impl<'f> PhaseDecider<'_, 'f> {
    /// Decides both phases.
    pub(super) fn decide(
        &self,
        view: &LoadView<'_>,
        rng: &mut impl Rng,
    ) -> Result<PhasePlan<'f>, DecideError> {
        let Some(pool) = &self.pools.prefill else {
            return self.decide_single(view, rng);
        };
        let prefill = self.candidates(view, pool.clone(), PhaseScope::Prefill);
        let is_busy = self.is_busy(&prefill);
        if is_busy && !self.allows_local_prefill() {
            return Err(DecideError::Busy);
        }
        let prefill = self.choose(prefill, PhaseScope::Prefill, rng)?;
        let Some(pool) = self.decode_pool_for(&prefill.member().worker) else {
            // No decode worker is in reach of the prefill worker.
            if self.context.settings.disaggregation.enforce || self.is_decode_only() {
                return Err(DecideError::NoRoute(RouteError::NoPrefill));
            }
            let plan = self.decide_single(view, rng)?;
            return Ok(PhasePlan {
                local_prefill: Some(LocalPrefillReason::TopologyMismatch),
                unused_prefill: Some(prefill),
                ..plan
            });
        };
        let decode = self.candidates(view, pool, PhaseScope::Decode);
        let decode = self.choose(decode, PhaseScope::Decode, rng)?;
        let local = self.choose_local(view, rng);
        let costs = local.as_ref().map(|local| PhaseCosts {
            local: local.seconds_cost(),
            remote: prefill.seconds_cost() + decode.seconds_cost(),
        });
        let decode_if_local = local.as_ref().unwrap_or(&decode);
        if let Some(reason) = self.local_prefill_reason(view, &prefill, decode_if_local, costs) {
            return Ok(PhasePlan {
                decode: local.unwrap_or(decode),
                prefill: None,
                local_prefill: Some(reason),
                unused_prefill: Some(prefill),
                booked: BookedPhases::Both,
            });
        }
        // Only a local prefill may ignore that the prefill workers are busy.
        if is_busy {
            return Err(DecideError::Busy);
        }
        let is_prefill_first = matches!(self.selection(), PhaseSelection::PrefillFirst { .. });
        Ok(PhasePlan {
            decode,
            prefill: Some(prefill),
            local_prefill: None,
            unused_prefill: None,
            booked: if is_prefill_first {
                BookedPhases::Prefill
            } else {
                BookedPhases::Both
            },
        })
    }

    /// Chooses the decode worker of a local prefill, if its cost decides between a local and a remote
    /// prefill. It may differ from the one that decodes after a remote prefill.
    fn choose_local(&self, view: &LoadView<'_>, rng: &mut impl Rng) -> Option<PhaseChoice<'f>> {
        if !self.compares_costs() || !self.allows_local_prefill() {
            return None;
        }
        let candidates = self.candidates(view, self.pools.decode.clone(), PhaseScope::Both);
        self.choose(candidates, PhaseScope::Both, rng).ok()
    }

    fn compares_costs(&self) -> bool {
        self.context.settings.disaggregation.compares_costs() && self.pools.prefill.is_some()
    }

    fn conditional_prefill(&self) -> Option<&ConditionalPrefillConfig> {
        self.context.settings.disaggregation.conditional.as_ref()
    }

    /// Decides for a single worker: for both phases, or for the decode after a completed prefill.
    fn decide_single(
        &self,
        view: &LoadView<'_>,
        rng: &mut impl Rng,
    ) -> Result<PhasePlan<'f>, DecideError> {
        let local_prefill = match self.selection() {
            PhaseSelection::Decode(completed) => {
                return self.decide_decode(&completed.worker, view, rng);
            }
            PhaseSelection::Local(reason) => self.pools.has_prefill_workers.then_some(*reason),
            PhaseSelection::PrefillFirst { failed } | PhaseSelection::Retry { failed } => {
                (!failed.is_empty()).then_some(LocalPrefillReason::PrefillFailed)
            }
            PhaseSelection::Both => None,
        };
        let candidates = self.candidates(view, self.pools.decode.clone(), PhaseScope::Both);
        if self.is_busy(&candidates) {
            return Err(DecideError::Busy);
        }
        Ok(PhasePlan {
            decode: self.choose(candidates, PhaseScope::Both, rng)?,
            prefill: None,
            local_prefill,
            unused_prefill: None,
            booked: BookedPhases::Both,
        })
    }

    /// Decides the decode after a prefill on `worker`. Never waits, because the prefill worker
    /// holds the KV blocks only for a short time.
    fn decide_decode(
        &self,
        worker: &Worker,
        view: &LoadView<'_>,
        rng: &mut impl Rng,
    ) -> Result<PhasePlan<'f>, DecideError> {
        let pool = self
            .decode_pool_for(worker)
            .ok_or(DecideError::NoRoute(RouteError::NoCandidate))?;
        let candidates = self.candidates(view, pool, PhaseScope::Decode);
        Ok(PhasePlan {
            decode: self.choose(candidates, PhaseScope::Decode, rng)?,
            prefill: None,
            local_prefill: None,
            unused_prefill: None,
            booked: BookedPhases::Decode,
        })
    }

    fn selection(&self) -> &PhaseSelection {
        &self.context.request.phases
    }

    /// Returns the decode pool under the demands of a prefill worker.
    fn decode_pool_for(&self, worker: &Worker) -> Option<Arc<CandidatePool<'f>>> {
        let pool = &self.pools.decode;
        if worker.kv_transfer.is_none() {
            return Some(pool.clone());
        }
        let mut constraints = pool.constraints.clone();
        constraints.add_transfer_demands(worker).ok()?;
        pool.narrowed(constraints).map(Arc::new)
    }

    fn tracks_blocks(&self, phase: PhaseScope) -> bool {
        phase != PhaseScope::Prefill && self.context.settings.tracking.active_blocks
    }

    /// Returns the decode pool as candidates for both phases, with the input of the policy.
    pub(super) fn candidates_for_both(
        &self,
        view: &LoadView<'_>,
    ) -> (PolicyInput, CandidateSet<'f>) {
        let set = self.candidates(view, self.pools.decode.clone(), PhaseScope::Both);
        let input = self.policy_input(&set.pool, PhaseScope::Both, set.estimate);
        (input, set)
    }

    fn candidates(
        &self,
        view: &LoadView<'_>,
        pool: Arc<CandidatePool<'f>>,
        phase: PhaseScope,
    ) -> CandidateSet<'f> {
        let count = pool.members.len();
        let mut members = Vec::with_capacity(count);
        let mut candidates = Vec::with_capacity(count);
        let additional = self.additional_blocks(view, phase);
        let policy = self.policy(&pool, phase);
        let needs_timing = policy.routing.needs_timing() || self.compares_costs();
        let mut cached = CachedTokenStats::default();
        for &member in &pool.members {
            // Members whose slot was reassigned are skipped.
            let Some(mut load) = view.load(member.slot, member.rank) else {
                continue;
            };
            load.active_requests += self.engine_loads.unbooked_requests(member.slot);
            members.push(member);
            let (overlap, freshness_credit) = self.context.overlap_and_credit(member);
            if overlap != TierBlocks::default() {
                let tokens = self.context.cached_tokens(member, true);
                cached = CachedTokenStats {
                    best: cached.best.max(tokens),
                    sum: cached.sum + tokens,
                };
            }
            let timing = if needs_timing {
                view.timing(member.slot, member.rank).unwrap_or_default()
            } else {
                RankTiming::default()
            };
            let cache = self.cached_blocks.of_rank(member, load, needs_timing);
            candidates.push(Candidate {
                overlap,
                freshness_credit,
                running_blocks: additional.held_by(member.slot),
                load,
                timing,
                total_blocks: cache.total,
                free_blocks: cache.free,
                eviction_value: cache.eviction_value,
                additional_blocks: additional.for_slot(member.slot),
                taint_preference: taint_preference(&pool.constraints, &member.worker),
            });
        }
        CandidateSet {
            estimate: view.estimate(pool.model()),
            policy,
            pool,
            members,
            candidates,
            cached,
        }
    }

    /// Returns the blocks that each rank would have to add to those of its running requests. Blocks
    /// that arrive by KV transfer are not shared.
    fn additional_blocks(&self, view: &LoadView<'_>, phase: PhaseScope) -> AdditionalBlocks {
        let is_shared = phase != PhaseScope::Decode && self.context.assume_kv_reuse;
        let blocks = &self.context.blocks;
        if self.tracks_blocks(phase) {
            blocks.additional(view, is_shared)
        } else {
            AdditionalBlocks::default()
        }
    }

    fn is_busy(&self, set: &CandidateSet<'_>) -> bool {
        let is_busy = |(member, candidate): (&&FleetMember, &Candidate)| {
            let batch = member.worker.capacity.max_num_batched_tokens;
            self.threshold
                .is_exceeded(candidate.load.active_prefill_tokens, batch)
        };
        !set.members.is_empty() && set.members.iter().zip(&set.candidates).all(is_busy)
    }

    /// Restricts the candidates to one whose probe is forced, if there is one.
    fn restrict_to_forced_probe(&self, mut set: CandidateSet<'f>) -> CandidateSet<'f> {
        let availability = &self.pools.availability;
        let mut members = set.members.iter();
        if let Some(at) = members.position(|member| availability.is_probe_forced(member)) {
            set.members = vec![set.members[at]];
            set.candidates = vec![set.candidates.swap_remove(at)];
        }
        set
    }

    fn choose(
        &self,
        set: CandidateSet<'f>,
        phase: PhaseScope,
        rng: &mut impl Rng,
    ) -> Result<PhaseChoice<'f>, DecideError> {
        let CandidateSet {
            pool,
            policy,
            estimate,
            members,
            mut candidates,
            cached,
        } = self.restrict_to_forced_probe(set);
        let input = self.policy_input(&pool, phase, estimate);
        let estimate = self.in_flight_estimate(&pool, phase);
        let in_flight = estimate.map_or(0, |estimate| {
            estimate.add_to_loads(&input, &mut candidates, &policy, rng)
        });
        let choice = choose(&input, &candidates, &policy, rng).ok_or_else(|| {
            DecideError::NoRoute(RouteError::NoCandidate.for_gateway(&pool.constraints))
        })?;
        Ok(PhaseChoice {
            pool,
            input,
            policy,
            members,
            candidates,
            cached,
            choice,
            in_flight,
        })
    }

    /// Returns the estimate of unreported requests for a pool and phase.
    fn in_flight_estimate(
        &self,
        pool: &CandidatePool<'_>,
        phase: PhaseScope,
    ) -> Option<&InFlightEstimate> {
        let estimates = self.in_flight.as_ref();
        let estimates = estimates.filter(|estimates| !estimates.is_empty())?;
        let end = if phase == PhaseScope::Prefill {
            BookingEnd::FirstToken
        } else {
            BookingEnd::RequestEnd
        };
        estimates.get(&(pool.model().clone(), end))
    }

    fn policy_input(
        &self,
        pool: &CandidatePool<'_>,
        phase: PhaseScope,
        estimate: LatencyEstimate,
    ) -> PolicyInput {
        let request = &self.context.request;
        // A pool is never empty.
        let block_size = pool.members[0].worker.block_size;
        PolicyInput {
            track_prefill: phase != PhaseScope::Decode && self.context.track_prefill,
            role: match phase {
                PhaseScope::Both => WorkerRole::Aggregated,
                PhaseScope::Prefill => WorkerRole::Prefill,
                PhaseScope::Decode => WorkerRole::Decode,
            },
            tracked_blocks: if self.tracks_blocks(phase) {
                self.context.blocks.complete
            } else {
                0
            },
            shared: request.shared.ranges().to_vec(),
            output_tokens: request.output_tokens(&estimate),
            estimate,
            prefill_ranks: self.prefill_ranks(),
            recomputed_share: self.recomputed_share,
            ..PolicyInput::new(request.prompt.tokens(), block_size)
        }
    }

    /// Returns the number of ranks that may compute prefills, if decode workers may compute them
    /// too.
    fn prefill_ranks(&self) -> Option<usize> {
        let prefill = self.pools.prefill.as_ref()?;
        self.compares_costs()
            .then(|| prefill.members.len() + self.pools.decode.members.len())
    }

    fn policy(&self, pool: &CandidatePool<'_>, phase: PhaseScope) -> PolicySettings {
        let mut policy = self.context.policy_of(pool.model());
        // If the decode worker never runs a prefill, its cached blocks are of no use.
        if phase == PhaseScope::Decode && self.conditional_prefill().is_none() {
            policy.weights.overlap_score_credit = 0.0;
        }
        policy
    }

    fn allows_local_prefill(&self) -> bool {
        // A request that names its prefill worker must use it.
        let is_enabled =
            self.conditional_prefill().is_some() && self.context.request.prefill_pin.is_none();
        is_enabled && !self.is_decode_only()
    }

    /// Returns whether decode workers cannot compute prompts.
    fn is_decode_only(&self) -> bool {
        self.context.request.decode_capability == DecodeCapability::DecodeOnly
    }

    fn local_prefill_reason(
        &self,
        view: &LoadView<'_>,
        prefill: &PhaseChoice<'f>,
        decode: &PhaseChoice<'f>,
        costs: Option<PhaseCosts>,
    ) -> Option<LocalPrefillReason> {
        let rule = self
            .conditional_prefill()
            .filter(|_| self.allows_local_prefill())?;
        let decode_member = decode.member();
        let prefill_member = prefill.member();
        let prefill_load = view.load(prefill_member.slot, prefill_member.rank);
        let capacity = decode_member.worker.capacity;
        rule.local_prefill_reason(&ConditionalPrefillInputs {
            prompt_tokens: decode.input.prompt_tokens,
            decode_cached_tokens: self.context.cached_tokens(decode_member, false),
            decode_blocks: decode.choice.potential_decode_blocks,
            decode_total_blocks: capacity.total_kv_blocks,
            prefill_tokens: prefill_load.map_or(0, |load| load.active_prefill_tokens),
            prefill_capacity: prefill_member.worker.capacity.max_num_batched_tokens,
            costs,
        })
    }
}
