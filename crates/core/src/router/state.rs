//! The router: state that decisions read, its settings, and access to its parts.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::cache_lookup::CacheLookup;
use super::event_sources::EventSources;
use super::held::HeldReservations;
use super::listener::RouterListener;
use super::phase_decider::InFlightEstimates;
use super::predictions::PredictorSet;
use super::recomputation::RecomputationEstimator;
use super::settings::RouterSettings;
use super::worker_feedback::WorkerFeedback;
use crate::fleet::{Fleet, FleetMember};
use crate::freshness::{SourceStatus, StaleReason};
use crate::health::HealthSignal;
use crate::index::{BlockLimits, PrefixIndex};
use crate::load::LoadTracker;
use crate::parity::ParityRegistry;
use crate::worker::{WorkerRank, WorkerRole};

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
}
