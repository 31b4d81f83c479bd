//! Passive health of the workers. Envoy's `override_host` sends a request to the named host
//! regardless of its health, so warmroute must not choose a dead worker. A worker with several
//! consecutive failures is ejected for a while. After that, one request at a time probes it. A
//! failed probe doubles the next ejection. A health check that passes after a failed one ends the
//! ejection early. Any success resets the state. While all workers are healthy, a check costs one
//! atomic load.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use serde::Serialize;

use crate::policy::WorkerAvailability;
use crate::worker::WorkerId;

/// Maximum number of ejections of one worker that health checks end early before a request
/// succeeds. The endpoint of a crash-looping engine passes its health check now and then.
const MAX_EARLY_ENDS: u32 = 3;

/// Ejection rules, in the terms of Envoy's outlier detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthRules {
    /// Consecutive failures that eject a worker; 0 disables ejection.
    pub consecutive_failures: u32,
    /// Duration of the first ejection.
    pub base_ejection_time: Duration,
    /// Maximum duration, however often a probe failed.
    pub max_ejection_time: Duration,
}

impl Default for HealthRules {
    fn default() -> Self {
        Self {
            consecutive_failures: 3,
            base_ejection_time: Duration::from_secs(1),
            max_ejection_time: Duration::from_secs(60),
        }
    }
}

/// Outcome of a request, as far as it shows the health of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerOutcome {
    /// The worker computed a response.
    Success,
    /// The response says nothing about the worker's health: the request was invalid or needed no
    /// computation.
    Inconclusive,
    /// No response, or a server error of the worker.
    Failure,
    /// The worker reported overload, which says nothing about its health.
    Overloaded,
}

impl WorkerOutcome {
    /// Classifies a status that the worker sent. A 503 that Envoy generated for a failed connection
    /// is a [`WorkerOutcome::Failure`] instead.
    pub fn from_status(status: u16) -> Self {
        match status {
            429 | 503 | 529 => WorkerOutcome::Overloaded,
            500.. => WorkerOutcome::Failure,
            200..300 => WorkerOutcome::Success,
            _ => WorkerOutcome::Inconclusive,
        }
    }
}

/// Health of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerHealth {
    /// Accepts requests.
    Healthy,
    /// The ejection is over, and one request may probe the worker.
    ProbeDue,
    /// Ejected, or being probed.
    Ejected,
}

impl From<WorkerHealth> for WorkerAvailability {
    /// Converts the health. A worker whose probe is due is a candidate like any other. The request
    /// that chooses it must claim the probe. If another request claimed it first, the decision is
    /// repeated.
    fn from(health: WorkerHealth) -> Self {
        match health {
            WorkerHealth::Healthy | WorkerHealth::ProbeDue => WorkerAvailability::Ready,
            WorkerHealth::Ejected => WorkerAvailability::Unhealthy,
        }
    }
}

/// Health transition, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// The worker was ejected for this time.
    Ejected(Duration),
    /// A probe failed; the ejection lasts for this further time.
    EjectionExtended(Duration),
    /// The worker accepts requests again.
    Readmitted,
}

/// Health of all workers.
#[derive(Debug, Default)]
pub struct HealthTracker {
    rules: RwLock<HealthRules>,
    /// Number of entries in the table, readable without the lock.
    failing_workers: AtomicUsize,
    table: Mutex<FailureTable>,
}

/// Workers whose last request failed.
#[derive(Debug, Default)]
struct FailureTable {
    records: HashMap<WorkerId, FailureRecord>,
    next_ticket: u64,
}

#[derive(Debug, Default)]
struct FailureRecord {
    failures: u32,
    ejection: Option<WorkerEjection>,
}

#[derive(Debug)]
struct WorkerEjection {
    until: Instant,
    period: Duration,
    /// Ticket of the running probe.
    probe: Option<u64>,
    /// Whether the last health check failed.
    is_down: bool,
    /// Number of times a health check ended this ejection early.
    early_ends: u32,
}

impl WorkerEjection {
    fn health(&self, now: Instant) -> WorkerHealth {
        if self.probe.is_none() && self.until <= now {
            WorkerHealth::ProbeDue
        } else {
            WorkerHealth::Ejected
        }
    }
}

/// Permission to send one request to an ejected worker. Dropping it unreported lets another request
/// probe.
#[derive(Debug)]
#[must_use = "dropping a probe returns it"]
pub struct HealthProbe {
    health: Arc<HealthTracker>,
    worker: WorkerId,
    ticket: u64,
}

impl HealthTracker {
    /// Creates a tracker in which every worker is healthy.
    pub fn new(rules: HealthRules) -> Arc<Self> {
        Arc::new(Self {
            rules: RwLock::new(rules),
            ..Self::default()
        })
    }

    /// Replaces the rules. Running ejections keep their end.
    pub fn set_rules(&self, rules: HealthRules) {
        *self.rules.write() = rules;
    }

    /// Records the outcome of a request that was not a probe.
    pub fn report(
        &self,
        worker: WorkerId,
        outcome: WorkerOutcome,
        now: Instant,
    ) -> Option<HealthChange> {
        match outcome {
            WorkerOutcome::Success => self.record_success(worker),
            WorkerOutcome::Failure => self.record_failure(worker, now),
            WorkerOutcome::Overloaded | WorkerOutcome::Inconclusive => None,
        }
    }

    /// Records the result of a health check of an ejected worker. The first passed check after a
    /// failed one ends the ejection, and the next request may probe the worker. If no check has
    /// failed, a passed check has no effect, because requests fail although the endpoint answers.
    /// Returns whether the ejection ended.
    pub fn on_health_check(&self, worker: WorkerId, is_healthy: bool, now: Instant) -> bool {
        let base_time = self.rules.read().base_ejection_time;
        let mut table = self.table.lock();
        let Some(ejection) = table
            .records
            .get_mut(&worker)
            .and_then(|record| record.ejection.as_mut())
        else {
            return false;
        };
        let has_ended = is_healthy && ejection.is_down && ejection.early_ends < MAX_EARLY_ENDS;
        if has_ended {
            ejection.until = ejection.until.min(now);
            if ejection.early_ends == 0 {
                ejection.period = ejection.period.min(base_time);
            }
            ejection.early_ends += 1;
        }
        ejection.is_down = !is_healthy;
        has_ended
    }

    /// Returns the health of a worker.
    pub fn worker_health(&self, worker: WorkerId, now: Instant) -> WorkerHealth {
        if self.is_all_healthy() {
            return WorkerHealth::Healthy;
        }
        let table = self.table.lock();
        let ejection = table
            .records
            .get(&worker)
            .and_then(|record| record.ejection.as_ref());
        ejection.map_or(WorkerHealth::Healthy, |ejection| ejection.health(now))
    }

    /// Returns all workers that are not healthy. Takes no lock if there are none.
    pub fn unhealthy_workers(&self, now: Instant) -> BTreeMap<WorkerId, WorkerHealth> {
        if self.is_all_healthy() {
            return BTreeMap::new();
        }
        let table = self.table.lock();
        let ejections = table
            .records
            .iter()
            .filter_map(|(worker, record)| Some((*worker, record.ejection.as_ref()?)));
        ejections
            .map(|(worker, ejection)| (worker, ejection.health(now)))
            .collect()
    }

    /// Claims the probe of a worker that is [`WorkerHealth::ProbeDue`]. Only one probe per worker
    /// exists at a time.
    pub fn claim_probe(self: &Arc<Self>, worker: WorkerId, now: Instant) -> Option<HealthProbe> {
        let mut table = self.table.lock();
        let ticket = table.next_ticket;
        let ejection = table.records.get_mut(&worker)?.ejection.as_mut()?;
        if ejection.health(now) != WorkerHealth::ProbeDue {
            return None;
        }
        ejection.probe = Some(ticket);
        table.next_ticket += 1;
        Some(HealthProbe {
            health: self.clone(),
            worker,
            ticket,
        })
    }

    /// Removes a worker. If it rejoins under the same id, it is healthy.
    pub fn remove(&self, worker: WorkerId) {
        self.retain(|known| known != worker);
    }

    /// Removes all workers but the known ones. Late reports about removed workers create entries
    /// again, so call this on every change of the fleet.
    pub fn retain(&self, known: impl Fn(WorkerId) -> bool) {
        let mut table = self.table.lock();
        table.records.retain(|worker, _| known(*worker));
        self.update_count(&table);
    }

    fn is_all_healthy(&self) -> bool {
        self.failing_workers.load(Ordering::Acquire) == 0
    }

    fn update_count(&self, table: &FailureTable) {
        self.failing_workers
            .store(table.records.len(), Ordering::Release);
    }

    fn record_success(&self, worker: WorkerId) -> Option<HealthChange> {
        if self.is_all_healthy() {
            return None;
        }
        let mut table = self.table.lock();
        let record = table.records.remove(&worker)?;
        self.update_count(&table);
        record.ejection.map(|_| HealthChange::Readmitted)
    }

    fn record_failure(&self, worker: WorkerId, now: Instant) -> Option<HealthChange> {
        let rules = *self.rules.read();
        if rules.consecutive_failures == 0 {
            return None;
        }
        let mut table = self.table.lock();
        let record = table.records.entry(worker).or_default();
        record.failures = record.failures.saturating_add(1);
        // Requests in flight at the ejection fail with it. Only a failed probe extends the
        // ejection.
        let must_eject = record.ejection.is_none() && record.failures >= rules.consecutive_failures;
        let change = must_eject.then(|| {
            let period = rules.base_ejection_time.min(rules.max_ejection_time);
            record.ejection = Some(WorkerEjection {
                until: add_saturating(now, period),
                period,
                probe: None,
                is_down: false,
                early_ends: 0,
            });
            HealthChange::Ejected(period)
        });
        self.update_count(&table);
        change
    }
}

impl HealthProbe {
    /// Returns the probed worker.
    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// Reports the outcome of the probe. An outcome that says nothing about health returns the
    /// probe.
    pub fn report(self, outcome: WorkerOutcome, now: Instant) -> Option<HealthChange> {
        match outcome {
            WorkerOutcome::Success if self.is_current() => self.health.record_success(self.worker),
            WorkerOutcome::Failure => self.fail(now),
            _ => None,
        }
    }

    fn fail(&self, now: Instant) -> Option<HealthChange> {
        let max_time = self.health.rules.read().max_ejection_time;
        self.finish(|ejection| {
            ejection.period = ejection.period.saturating_mul(2).min(max_time);
            ejection.until = add_saturating(now, ejection.period);
            HealthChange::EjectionExtended(ejection.period)
        })
    }

    fn is_current(&self) -> bool {
        let table = self.health.table.lock();
        let ejection = table
            .records
            .get(&self.worker)
            .and_then(|record| record.ejection.as_ref());
        ejection.is_some_and(|ejection| ejection.probe == Some(self.ticket))
    }

    /// Ends the probe, unless it is obsolete: the worker may have been removed and ejected again
    /// since.
    fn finish<T>(&self, update: impl FnOnce(&mut WorkerEjection) -> T) -> Option<T> {
        let mut table = self.health.table.lock();
        let ejection = table.records.get_mut(&self.worker)?.ejection.as_mut()?;
        if ejection.probe != Some(self.ticket) {
            return None;
        }
        ejection.probe = None;
        Some(update(ejection))
    }
}

impl Drop for HealthProbe {
    fn drop(&mut self) {
        self.finish(|_| ());
    }
}

/// Adds a period. If the sum exceeds the range of the clock, the period ends at once.
fn add_saturating(now: Instant, period: Duration) -> Instant {
    now.checked_add(period).unwrap_or(now)
}

#[cfg(test)]
mod tests;
