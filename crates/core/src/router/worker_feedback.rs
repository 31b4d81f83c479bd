//! State of the workers that follows from their responses: overload and health.

use std::sync::Arc;
use std::time::Instant;

use super::listener::RouterListener;
use super::pools::FleetAvailability;
use super::settings::RouterSettings;
use crate::fleet::{Fleet, FleetMember};
use crate::health::{HealthChange, HealthProbe, HealthTracker, WorkerOutcome};
use crate::load::{EngineLoadTable, LoadView};
use crate::policy::{LatchMode, OverloadTracker, RankOccupancy};
use crate::worker::WorkerId;

/// State of all workers.
pub(super) struct WorkerFeedback {
    pub(super) overload: OverloadTracker,
    pub(super) listener: Arc<dyn RouterListener>,
    pub(super) health: Arc<HealthTracker>,
    engine_loads: Arc<EngineLoadTable>,
}

impl WorkerFeedback {
    pub(super) fn new(settings: &RouterSettings, engine_loads: Arc<EngineLoadTable>) -> Self {
        Self {
            overload: OverloadTracker::new(settings.overload),
            listener: Arc::new(()),
            health: HealthTracker::new(settings.health),
            engine_loads,
        }
    }

    /// Removes the state of workers that have left the fleet.
    pub(super) fn retain(&self, fleet: &Fleet) {
        self.overload
            .retain(|worker| fleet.worker(worker).is_some());
        self.health.retain(|worker| fleet.worker(worker).is_some());
    }

    /// Applies new settings.
    pub(super) fn set_settings(&self, settings: &RouterSettings) {
        self.overload.set_thresholds(settings.overload);
        self.health.set_rules(settings.health);
    }

    /// Returns the restricted members at the instant of a load view.
    pub(super) fn availability(
        &self,
        members: &[&FleetMember],
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
            unhealthy: self.health.unhealthy_workers(view.now()),
        }
    }

    /// Returns the restricted members if no threshold on load is set.
    pub(super) fn availability_without_load(&self, now: Instant) -> FleetAvailability {
        FleetAvailability {
            overloaded: self.overload.marked_workers(now),
            unhealthy: self.health.unhealthy_workers(now),
        }
    }

    /// Records the outcome of a request at a worker, through its probe if there is one. Returns the
    /// health transition.
    pub(super) fn record_outcome(
        &self,
        worker: WorkerId,
        outcome: WorkerOutcome,
        probes: &mut Vec<HealthProbe>,
        now: Instant,
    ) -> Option<(WorkerId, HealthChange)> {
        if outcome == WorkerOutcome::Overloaded {
            let time = self.overload.mark(worker, now);
            self.listener.on_overloaded(worker, time);
        }
        let change = match probes.iter().position(|probe| probe.worker() == worker) {
            Some(at) => probes.swap_remove(at).report(outcome, now),
            None => self.health.report(worker, outcome, now),
        };
        change.map(|change| (worker, change))
    }
}
