//! State of the workers that follows from their responses: overload and health.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::last_block::LastBlockTable;
use super::pools::FleetAvailability;
use super::request::RouteRequest;
use super::settings::RouterSettings;
use crate::block::{BlockHashes, SequenceHash};
use crate::fleet::{Fleet, FleetMember};
use crate::health::{
    HealthState, HealthTracker, HealthTransition, PeerGroup, ReachabilityTable, RequestOutcome,
    TrackedRequest,
};
use crate::load::{EngineLoadTable, LoadView};
use crate::policy::{LatchMode, OverloadTracker, RankOccupancy};
use crate::worker::{WorkerId, WorkerRank, WorkerRole};

/// Receives changes of the router. The methods must be fast.
pub trait RouterListener: Send + Sync {
    /// Handles a worker that answered with an overload status and is avoided for this time.
    fn on_overloaded(&self, _worker: WorkerId, _time: Duration) {}

    /// Handles prompts that were accepted by a rank whose cache is predicted.
    fn on_routed(&self, _member: &FleetMember, _prompts: &[BlockHashes]) {}
}

/// Ignores all changes.
impl RouterListener for () {}

/// State of all workers.
pub(super) struct WorkerFeedback {
    pub(super) overload: OverloadTracker,
    pub(super) listener: Arc<dyn RouterListener>,
    pub(super) health: Arc<HealthTracker>,
    pub(super) reachability: ReachabilityTable,
    pub(super) last_blocks: LastBlockTable,
    engine_loads: Arc<EngineLoadTable>,
}

impl WorkerFeedback {
    pub(super) fn new(settings: &RouterSettings, engine_loads: Arc<EngineLoadTable>) -> Self {
        Self {
            overload: OverloadTracker::new(settings.overload),
            listener: Arc::new(()),
            health: HealthTracker::new(settings.health),
            reachability: ReachabilityTable::default(),
            last_blocks: LastBlockTable::default(),
            engine_loads,
        }
    }

    /// Removes the state of workers that have left the fleet, and adds that of new ones.
    pub(super) fn set_fleet(&self, fleet: &Fleet, now: Instant) {
        let is_known = |worker| fleet.worker(worker).is_some();
        self.overload.retain(is_known);
        self.reachability.retain(is_known);
        self.last_blocks.retain(is_known);
        let members = fleet.members().map(|member| {
            let group = PeerGroup {
                model: member.worker.model.clone(),
                is_prefill: member.worker.role == WorkerRole::Prefill,
            };
            (member.rank, group)
        });
        self.health.set_members(members, now);
    }

    /// Applies new settings.
    pub(super) fn set_settings(&self, settings: &RouterSettings) {
        self.overload.set_thresholds(settings.overload);
        let rules = settings.health;
        self.health.with_model(|model| model.rules = rules);
    }

    /// Returns the members that are restricted for a request, at the instant of a load view.
    pub(super) fn availability(
        &self,
        members: &[&FleetMember],
        request: &RouteRequest,
        view: &LoadView<'_>,
        latches: LatchMode,
    ) -> FleetAvailability {
        let engine_loads = self.engine_loads.view(view.now());
        let occupancy = |member: &FleetMember| RankOccupancy {
            load: view.load(member.slot, member.rank).unwrap_or_default(),
            reported_usage: engine_loads.kv_usage(member.slot),
        };
        FleetAvailability {
            overloaded: self
                .overload
                .overloaded_workers(members, view.now(), latches, occupancy),
            unhealthy: self.unhealthy_ranks(request, view.now()),
        }
    }

    /// Returns the members that are restricted for a request, if no threshold on load is set.
    pub(super) fn availability_without_load(
        &self,
        request: &RouteRequest,
        now: Instant,
    ) -> FleetAvailability {
        FleetAvailability {
            overloaded: self.overload.marked_workers(now),
            unhealthy: self.unhealthy_ranks(request, now),
        }
    }

    /// Returns the ranks that are unhealthy for a request. A rank on which its prompt failed is one
    /// of them, unless the request needs the state of its rank.
    fn unhealthy_ranks(
        &self,
        request: &RouteRequest,
        now: Instant,
    ) -> BTreeMap<WorkerRank, HealthState> {
        let constraints = &request.constraints;
        let needs_state = constraints
            .storing_rank
            .or(constraints.bound_rank)
            .is_some();
        let prompts = request.prompt.blocks();
        let prompt = if needs_state {
            &[]
        } else {
            first_prompt(prompts)
        };
        self.health.unhealthy_ranks(prompt, now)
    }

    /// Records the outcome of a request at a rank. `prompt` are the sequence hashes of its prompt,
    /// if known. Returns the health transitions.
    pub(super) fn record_outcome(
        &self,
        at: OutcomeTarget<'_>,
        outcome: RequestOutcome,
        prompt: &[SequenceHash],
        now: Instant,
    ) -> Vec<HealthTransition> {
        self.reachability
            .record_outcome(at.rank().worker, outcome, now);
        if outcome == RequestOutcome::Overloaded {
            let worker = at.rank().worker;
            let time = self.overload.mark(worker, now);
            self.listener.on_overloaded(worker, time);
        }
        match at {
            OutcomeTarget::Tracked(request) => request.report(outcome, prompt, now),
            OutcomeTarget::Rank(rank) => self.health.report(rank, outcome, prompt, now),
        }
    }
}

/// Returns the sequence hashes of the prompt by which health recognizes a request.
pub(super) fn first_prompt(prompts: &[BlockHashes]) -> &[SequenceHash] {
    prompts.first().map_or(&[], BlockHashes::sequences)
}

/// Request or rank that an outcome belongs to.
pub(super) enum OutcomeTarget<'a> {
    Tracked(&'a mut TrackedRequest),
    Rank(WorkerRank),
}

impl OutcomeTarget<'_> {
    fn rank(&self) -> WorkerRank {
        match self {
            OutcomeTarget::Tracked(request) => request.rank(),
            OutcomeTarget::Rank(rank) => *rank,
        }
    }
}
