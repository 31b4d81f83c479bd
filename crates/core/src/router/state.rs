//! The router: state that decisions read, its settings, and access to its parts, among them the
//! overload and health of the workers. Also the reservations that are held after a failed request.
//! Decision 0020 describes the remote index.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::cache_lookup::CacheLookup;
use super::event_sources::EventSources;
use super::last_block::{LastBlockEvidence, LastBlockReuse};
use super::phase_decider::InFlightEstimates;
use super::pools::{FleetAvailability, PhasePools};
use super::predictions::PredictorSet;
use super::recomputation::RecomputationEstimator;
use super::remote::RemoteAnswer;
use super::request::RouteRequest;
use super::settings::RouterSettings;
use super::worker_feedback::{RouterListener, WorkerFeedback};
use crate::block::BlockHashes;
use crate::fleet::{Fleet, FleetMember};
use crate::freshness::{SourceStatus, StaleReason};
use crate::health::{
    FailingPeerGroup, HealthSignal, HealthState, RankHealthReport, RequestOutcome,
};
use crate::index::{BlockLimits, Overlaps, PrefixIndex, TierBlocks};
use crate::load::{LoadTracker, Reservation};
use crate::parity::ParityRegistry;
use crate::worker::{ModelName, RankSlot, Worker, WorkerId, WorkerRank, WorkerRole};

/// State that decisions read, and the API of the router.
pub struct Router {
    pub(super) fleet: ArcSwap<Fleet>,
    pub(super) lookup: CacheLookup,
    pub(super) load: Arc<LoadTracker>,
    pub(super) feedback: WorkerFeedback,
    pub(super) held: HeldReservations,
    pub(super) recomputation: RecomputationEstimator,
    pub(super) parity: Arc<ParityRegistry>,
    pub(super) in_flight_estimates: ArcSwap<InFlightEstimates>,
    pub(super) settings: ArcSwap<RouterSettings>,
    pub(super) rng: Mutex<SmallRng>,
}

impl Router {
    /// Creates a router with an empty fleet. `seed` makes tie breaks repeatable.
    pub fn new(
        index: Arc<PrefixIndex>,
        load: Arc<LoadTracker>,
        settings: RouterSettings,
        seed: u64,
    ) -> Self {
        Self {
            fleet: ArcSwap::from_pointee(Fleet::empty()),
            lookup: CacheLookup::new(index),
            feedback: WorkerFeedback::new(&settings, load.engine_loads().clone()),
            held: HeldReservations::default(),
            recomputation: RecomputationEstimator::default(),
            load,
            parity: Arc::default(),
            in_flight_estimates: ArcSwap::default(),
            settings: ArcSwap::from_pointee(settings),
            rng: Mutex::new(SmallRng::seed_from_u64(seed)),
        }
    }

    /// Adds predictors, which assume that routed prompts are cached where they were sent.
    #[must_use]
    pub fn with_predictors(mut self, predictors: PredictorSet) -> Self {
        self.lookup.predictors = predictors;
        self
    }

    /// Reports the changes of the router to a listener.
    #[must_use]
    pub fn with_listener(mut self, listener: Arc<dyn RouterListener>) -> Self {
        self.feedback.listener = listener;
        self
    }

    /// Returns the current fleet.
    pub fn fleet(&self) -> Arc<Fleet> {
        self.fleet.load_full()
    }

    /// Replaces the fleet.
    pub fn set_fleet(&self, fleet: Arc<Fleet>) {
        self.feedback.set_fleet(&fleet, self.load.now());
        self.fleet.store(fleet);
        self.lookup.sources.update_windows(&self.fleet);
    }

    /// Replaces the workers of the fleet, and returns the added members. Workers that stay keep their
    /// load and their blocks. Calls must not run concurrently.
    pub fn set_workers(&self, workers: impl IntoIterator<Item = Worker>) -> Vec<FleetMember> {
        let before = self.fleet();
        let change = before.reconcile(workers.into_iter().collect());
        let moved = change.moved_ranks();
        let removed = change.removed.iter();
        let (moving, leaving): (Vec<_>, Vec<_>) =
            removed.partition(|member| moved.contains(&member.rank));
        // A rank that gets another slot takes its bookings to it.
        moving.iter().for_each(|member| self.load.leave(member));
        for member in &change.added {
            self.load.join(member);
            self.predictors().open_rank(member);
        }
        self.set_fleet(Arc::new(change.fleet));
        leaving.iter().for_each(|member| self.load.leave(member));
        for member in &change.removed {
            self.predictors().close_rank(member);
        }
        self.update_capacity(&before, &change.updated);
        change.added
    }

    /// Applies the new number of blocks of members that stay.
    pub fn update_capacity(&self, before: &Fleet, updated: &[FleetMember]) {
        let blocks = |member: &FleetMember| member.worker.capacity.total_kv_blocks;
        let is_resized = |member: &&FleetMember| {
            before
                .member(member.slot)
                .is_none_or(|old| blocks(old) != blocks(member))
        };
        for member in updated.iter().filter(is_resized) {
            self.predictors().resize_rank(member);
            self.set_block_limits(member);
        }
    }

    /// Returns the prefix index.
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.lookup.index
    }

    /// Returns the load tracker.
    pub fn load(&self) -> &Arc<LoadTracker> {
        &self.load
    }

    /// Returns the predictors of caches.
    pub fn predictors(&self) -> &PredictorSet {
        &self.lookup.predictors
    }

    /// Returns the current settings. A decision uses the settings of its preparation throughout.
    pub fn settings(&self) -> Arc<RouterSettings> {
        self.settings.load_full()
    }

    /// Replaces the settings. Prepared requests keep the previous ones.
    pub fn set_settings(&self, settings: RouterSettings) {
        self.feedback.set_settings(&settings);
        self.settings.store(Arc::new(settings));
        self.fleet()
            .members()
            .for_each(|member| self.set_block_limits(member));
    }

    /// Sets the index limits of a worker rank, by its capacity and the settings.
    pub fn set_block_limits(&self, member: &FleetMember) {
        if let Some(max) = self.settings().max_blocks_per_tier {
            let limits = BlockLimits::for_rank(member.worker.capacity.total_kv_blocks, max);
            self.lookup.index.set_limits(member.slot, limits);
        }
    }

    /// Sets the status of a worker rank's event source.
    pub fn set_source_status(&self, rank: WorkerRank, status: SourceStatus) {
        let is_detached = status.reason == Some(StaleReason::Detached);
        self.set_signal(rank.worker, HealthSignal::EventSource, is_detached);
        let before = self.source_status(rank).windows;
        self.lookup.sources.set(rank, status);
        if before != status.windows {
            self.lookup.sources.update_windows(&self.fleet);
        }
    }

    /// Returns the role of a worker rank, or `None` if its worker has left the fleet.
    pub fn role_of(&self, rank: WorkerRank) -> Option<WorkerRole> {
        self.fleet().worker(rank.worker).map(|worker| worker.role)
    }

    /// Returns the status of a worker rank's event source.
    pub fn source_status(&self, rank: WorkerRank) -> SourceStatus {
        self.lookup.sources.table().status(rank)
    }

    /// Returns the event sources.
    pub fn sources(&self) -> &EventSources {
        &self.lookup.sources
    }

    /// Sets the estimates of requests that other replicas have routed but not reported yet.
    pub fn set_in_flight_estimates(&self, estimates: InFlightEstimates) {
        let current = &self.in_flight_estimates;
        if !(estimates.is_empty() && current.load().is_empty()) {
            current.store(Arc::new(estimates));
        }
    }

    /// Returns the mean number of bookings of other replicas that are assumed but not reported yet.
    pub fn in_flight_bookings(&self) -> f64 {
        self.in_flight_estimates
            .load()
            .values()
            .map(|estimate| estimate.bookings)
            .sum()
    }

    /// Uses a remote index: the overlaps arrive with the requests.
    #[must_use]
    pub fn with_remote_index(mut self) -> Self {
        self.lookup.has_remote_index = true;
        self.lookup.predictors.covers_all_ranks = true;
        self
    }

    /// Returns whether a remote server holds the index.
    pub fn has_remote_index(&self) -> bool {
        self.lookup.has_remote_index
    }

    /// Queries the local index on behalf of a remote router, for the ranks that serve a model, or
    /// for all.
    pub fn query_index(&self, model: Option<&ModelName>, prompts: &[BlockHashes]) -> RemoteAnswer {
        let mut table = self.lookup.buffers.acquire();
        let answer = loop {
            let fleet = self.fleet.load_full();
            // Statuses are read before the index, as in a local decision.
            let ranks = self.lookup.rank_statuses(&fleet);
            let found = prompts.iter().map(|hashes| {
                self.lookup.index.query_overlaps(hashes, &mut table);
                overlaps_by_rank(&table, &fleet, model)
            });
            let prompts = found.collect();
            // If the fleet changed, the slots belong to other ranks.
            if self.fleet.load().generation() == fleet.generation() {
                break RemoteAnswer { ranks, prompts };
            }
        };
        self.lookup.buffers.release([table]);
        answer
    }

    /// Avoids a worker for this time, because another replica reported its overload status.
    pub fn mark_overloaded(&self, worker: WorkerId, time: Duration) {
        if self.fleet.load().worker(worker).is_some() {
            self.feedback
                .overload
                .mark_at_most(worker, self.load.now(), time);
        }
    }

    /// Returns the workers marked as overloaded, and the remaining time of each mark.
    pub fn overload_marks(&self) -> Vec<(WorkerId, Duration)> {
        self.feedback.overload.marks(self.load.now())
    }

    /// Returns whether overload is the only obstacle to serving a request on a rank.
    pub fn is_only_overloaded(&self, request: &RouteRequest, rank: WorkerRank) -> bool {
        let fleet = self.fleet.load();
        let availability = |_: &[&FleetMember]| FleetAvailability {
            unhealthy: self.unhealthy_ranks(),
            ..FleetAvailability::default()
        };
        let pools = PhasePools::find(&fleet, request, &self.settings(), availability);
        pools.is_ok_and(|pools| {
            pools
                .decode
                .members
                .iter()
                .any(|member| member.rank == rank)
        })
    }

    /// Records which part of a matched prefix a worker reused. Returns the states before and after
    /// it.
    pub fn record_last_block(
        &self,
        worker: WorkerId,
        evidence: LastBlockEvidence,
    ) -> (LastBlockReuse, LastBlockReuse) {
        self.feedback.last_blocks.record(worker, evidence)
    }

    /// Returns whether a worker computes the last matched block of each prompt again.
    pub fn recomputes_last_block(&self, worker: WorkerId) -> bool {
        let dropping = self.feedback.last_blocks.recomputing_workers();
        dropping.contains(&worker)
    }

    /// Records the result of a health check of an ejected worker. Returns whether the next request
    /// may probe it now.
    pub fn on_health_check(&self, worker: WorkerId, is_healthy: bool) -> bool {
        self.feedback
            .health
            .on_health_check(worker, is_healthy, self.load.now())
    }

    /// Records whether a signal indicates a failing worker. While a signal is set, one failed request
    /// suffices to eject a rank.
    pub fn set_signal(&self, worker: WorkerId, signal: HealthSignal, is_failing: bool) {
        let health = &self.feedback.health;
        health.with_model(|model| model.set_signal(worker, signal, is_failing));
    }

    /// Records whether a worker answered a query of this process. Any response is an answer.
    pub fn record_reachability(&self, worker: WorkerId, has_answered: bool) {
        if self.fleet.load().worker(worker).is_some() {
            let reachability = &self.feedback.reachability;
            reachability.record(worker, has_answered, self.load.now());
        }
    }

    /// Returns the workers that answer neither requests nor queries, and the time since the first
    /// failure.
    pub fn unreachable_workers(&self) -> BTreeMap<WorkerId, Duration> {
        self.feedback.reachability.unreachable(self.load.now())
    }

    /// Returns the peer groups in which no rank delivers.
    pub fn failing_groups(&self) -> Vec<FailingPeerGroup> {
        let unreachable = self.unreachable_workers();
        let now = self.load.now();
        let health = &self.feedback.health;
        health.with_model(|model| model.failing_groups(&unreachable, now))
    }

    /// Returns the workers with an ejected rank.
    pub fn ejected_workers(&self) -> Vec<WorkerId> {
        let mut ranks = self.unhealthy_ranks();
        ranks.retain(|_, health| *health != HealthState::Suspect);
        let mut workers: Vec<_> = ranks.into_keys().map(|rank| rank.worker).collect();
        workers.dedup();
        workers
    }

    /// Returns the ranks that are not healthy, with their health.
    pub fn unhealthy_ranks(&self) -> BTreeMap<WorkerRank, HealthState> {
        self.feedback.health.unhealthy_ranks(&[], self.load.now())
    }

    /// Returns the number of failed requests of each rank by kind.
    pub fn failed_requests(&self) -> Vec<(WorkerRank, RequestOutcome, u64)> {
        let health = &self.feedback.health;
        health.with_model(|model| model.failed_requests())
    }

    /// Returns the ranks that are not healthy or have failed recently, with the evidence.
    pub fn health_report(&self) -> Vec<RankHealthReport> {
        let now = self.load.now();
        self.feedback.health.with_model(|model| model.report(now))
    }
}

fn overlaps_by_rank(
    table: &Overlaps,
    fleet: &Fleet,
    model: Option<&ModelName>,
) -> Vec<(WorkerRank, TierBlocks)> {
    let by_rank = |(slot, blocks): (RankSlot, TierBlocks)| {
        let member = fleet
            .member(slot)
            .filter(|member| model.is_none_or(|model| member.worker.model == *model))?;
        (blocks.total() > 0).then_some((member.rank, blocks))
    };
    let mut found: Vec<_> = table.iter().filter_map(by_rank).collect();
    found.sort_unstable_by_key(|(rank, _)| *rank);
    found
}

/// Maximum number of held reservations. Further ones are released at once.
const MAX_HELD: usize = 4096;

/// Reservations of requests that failed before their first token, with the time of their release.
/// They are held for the expected service time, so that a rank that fails at once does not appear
/// less loaded than its peers.
#[derive(Debug, Default)]
pub(super) struct HeldReservations(Mutex<Vec<(Instant, Reservation)>>);

impl HeldReservations {
    /// Holds a reservation until a time.
    pub(super) fn hold(&self, reservation: Reservation, until: Instant) {
        let mut held = self.0.lock();
        if held.len() < MAX_HELD {
            held.push((until, reservation));
        }
    }

    /// Releases the reservations whose time has passed.
    pub(super) fn release_expired(&self, now: Instant) {
        let expired: Vec<_> = self
            .0
            .lock()
            .extract_if(.., |(until, _)| *until <= now)
            .collect();
        drop(expired);
    }
}
