//! Health of the worker ranks, judged by the outcomes of their requests. Envoy's `override_host`
//! sends a request to the named host regardless of its health, so warmroute must not choose a rank
//! that fails. A rank is at fault if it fails where the other ranks of its model deliver. It becomes
//! suspect, then ejected. After the ejection time, one request at a time probes it, and a delivered
//! answer readmits it. While no rank is avoided and none has failed recently, a check costs one
//! atomic load.

mod comparison;
mod delivery;
mod evidence;
mod model;
mod outcome;
mod peer_group;
mod rank;
mod reachability;
mod report;
mod waiting;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

pub use self::delivery::{DeliveryTransition, FailingPeerGroup};
pub use self::evidence::EvidenceSummary;
use self::model::{HealthModel, OutcomeReport};
pub use self::outcome::{FailureCounts, RequestOutcome};
pub use self::reachability::ReachabilityTable;
pub use self::report::{HealthChange, HealthSignal, HealthTransition, PeerGroup, RankHealthReport};
use crate::block::SequenceHash;
use crate::policy::WorkerAvailability;
use crate::worker::{WorkerId, WorkerRank};

/// Minimum time between two reports of output by one request.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(250);

/// The `routing.outlier_detection:` section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HealthRules {
    /// Failed requests in a row that eject a worker rank while other ranks of its model deliver.
    /// Failures are lost connections, 5xx, empty responses and responses that are overdue. A 4xx or
    /// a reported overload counts half. Lost connections need no comparison. 0: no ejection.
    pub consecutive_failures: u32,
}

impl Default for HealthRules {
    fn default() -> Self {
        Self {
            consecutive_failures: 3,
        }
    }
}

/// Health of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum HealthState {
    /// Accepts requests.
    Healthy,
    /// Avoided until the other ranks of the model show whether they deliver.
    Suspect,
    /// The ejection is over, and one request may probe the rank.
    ProbeDue,
    /// The probe has been due for five seconds. The next request that may use the rank probes it, even
    /// if another rank costs less.
    #[serde(rename = "probe_due")]
    #[strum(serialize = "probe_due")]
    ProbeForced,
    /// One request probes the rank.
    Probing,
    /// Ejected.
    Ejected,
}

impl HealthState {
    /// Returns the name in pages and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether the next request to the rank is its probe.
    pub fn is_probe_due(self) -> bool {
        matches!(self, HealthState::ProbeDue | HealthState::ProbeForced)
    }
}

impl From<HealthState> for WorkerAvailability {
    /// Converts the health. A rank whose probe is due is ready. The request that chooses it must
    /// claim the probe. If another request claimed it first, the decision is repeated.
    fn from(health: HealthState) -> Self {
        match health {
            HealthState::Healthy | HealthState::ProbeDue | HealthState::ProbeForced => {
                WorkerAvailability::Ready
            }
            HealthState::Suspect | HealthState::Probing | HealthState::Ejected => {
                WorkerAvailability::Unhealthy
            }
        }
    }
}

/// Health of all ranks.
#[derive(Debug, Default)]
pub struct HealthTracker {
    /// Whether a request may have to avoid a rank, readable without the lock.
    has_avoided: AtomicBool,
    model: Mutex<HealthModel>,
}

/// Request at a rank, from which its health is learned. Dropping it unreported leaves the health as
/// it is, and lets another request probe the rank.
#[derive(Debug)]
#[must_use = "dropping a tracked request reports nothing"]
pub struct TrackedRequest {
    health: Arc<HealthTracker>,
    rank: WorkerRank,
    ticket: u64,
    sent_at: Instant,
    /// Time of the last report of output.
    output_at: Option<Instant>,
    outcome: Option<RequestOutcome>,
}

impl HealthTracker {
    /// Creates a tracker without ranks.
    pub fn new(rules: HealthRules) -> Arc<Self> {
        let tracker = Self::default();
        tracker.with_model(|model| model.rules = rules);
        Arc::new(tracker)
    }

    /// Calls a function with the locked model. It must take no other lock, because decisions lock
    /// the model while they hold the load table, and must neither avoid nor readmit a rank.
    pub(crate) fn with_model<T>(&self, apply: impl FnOnce(&mut HealthModel) -> T) -> T {
        apply(&mut self.model.lock())
    }

    /// Replaces the set of ranks. A rank that joins is healthy. Reports about other ranks have no
    /// effect.
    pub fn set_members(
        &self,
        members: impl Iterator<Item = (WorkerRank, PeerGroup)>,
        now: Instant,
    ) {
        self.update(|model| model.set_members(members, now));
    }

    /// Registers a request that is sent to a rank. `estimate` is the estimated time to its
    /// first content; without it, the request cannot become overdue. If `must_probe`, returns `None`
    /// unless the probe of the rank is due. Only one probe per rank exists at a time.
    pub fn start(
        self: &Arc<Self>,
        rank: WorkerRank,
        estimate: Option<Duration>,
        must_probe: bool,
        now: Instant,
    ) -> Option<TrackedRequest> {
        let ticket = self.model.lock().start(rank, estimate, must_probe, now)?;
        Some(TrackedRequest {
            health: self.clone(),
            rank,
            ticket,
            sent_at: now,
            output_at: None,
            outcome: None,
        })
    }

    /// Records the outcome of a request that is not tracked. `prompt` are the sequence hashes of its
    /// prompt, if known.
    pub fn report(
        &self,
        rank: WorkerRank,
        outcome: RequestOutcome,
        prompt: &[SequenceHash],
        now: Instant,
    ) -> Vec<HealthTransition> {
        let report = OutcomeReport {
            rank,
            outcome,
            prompt,
        };
        self.update(|model| model.record(report, now))
    }

    /// Detects overdue requests. Must be called several times per second.
    pub fn on_tick(&self, now: Instant) -> Vec<HealthTransition> {
        self.update(|model| model.on_tick(now))
    }

    /// Records the result of a health check of an ejected worker. Returns whether an ejection ended,
    /// so that the next request may probe the worker.
    pub fn on_health_check(&self, worker: WorkerId, is_healthy: bool, now: Instant) -> bool {
        self.update(|model| model.on_health_check(worker, is_healthy, now))
    }

    /// Returns the health of a rank.
    pub fn rank_health(&self, rank: WorkerRank, now: Instant) -> HealthState {
        if self.is_all_healthy() {
            return HealthState::Healthy;
        }
        self.model.lock().health(rank, now)
    }

    /// Returns all ranks that are not healthy for a request. A healthy rank on which this prompt
    /// failed in the last minute is suspect for it. `prompt` are the sequence hashes of its blocks.
    /// Takes no lock if no rank is avoided and none has failed recently.
    pub fn unhealthy_ranks(
        &self,
        prompt: &[SequenceHash],
        now: Instant,
    ) -> BTreeMap<WorkerRank, HealthState> {
        if self.is_all_healthy() {
            return BTreeMap::new();
        }
        self.model.lock().avoided_ranks(prompt, now)
    }

    fn is_all_healthy(&self) -> bool {
        !self.has_avoided.load(Ordering::Acquire)
    }

    fn update<T>(&self, change: impl FnOnce(&mut HealthModel) -> T) -> T {
        let mut model = self.model.lock();
        let changed = change(&mut model);
        self.has_avoided.store(!model.is_clear(), Ordering::Release);
        changed
    }
}

impl TrackedRequest {
    /// Returns the rank.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Returns whether the outcome was reported.
    pub fn is_reported(&self) -> bool {
        self.outcome.is_some()
    }

    /// Records that the response headers arrived.
    pub fn on_response(&self) {
        let mut model = self.health.model.lock();
        model.on_response(self.rank, self.ticket);
    }

    /// Records that the rank generated output for this request. The waiting requests of the rank are
    /// then not overdue. Takes the lock at most once per [`OUTPUT_INTERVAL`].
    pub fn on_output(&mut self, now: Instant) {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < OUTPUT_INTERVAL;
        if !self.output_at.is_some_and(is_recent) {
            self.output_at = Some(now);
            self.health.model.lock().on_progress(self.rank, now);
        }
    }

    /// Reports the outcome, once. `prompt` are the sequence hashes of the prompt, if known.
    pub fn report(
        &mut self,
        outcome: RequestOutcome,
        prompt: &[SequenceHash],
        now: Instant,
    ) -> Vec<HealthTransition> {
        if self.outcome.replace(outcome).is_some() {
            return Vec::new();
        }
        let report = OutcomeReport {
            rank: self.rank,
            outcome,
            prompt,
        };
        self.health
            .update(|model| model.finish(self.ticket, report, now))
    }

    /// Handles the end of the request. Its duration is learned if it was delivered. Otherwise
    /// returns the remaining time for which it stays booked.
    pub fn on_end(&self, now: Instant) -> Option<Duration> {
        let elapsed = now.saturating_duration_since(self.sent_at);
        let mut model = self.health.model.lock();
        match self.outcome? {
            RequestOutcome::Delivered => {
                model.record_service_time(self.rank, elapsed);
                None
            }
            outcome if outcome.is_application_failure() => {
                let hold_time = model.hold_time(self.rank)?;
                hold_time.checked_sub(elapsed)
            }
            _ => None,
        }
    }
}

impl Drop for TrackedRequest {
    fn drop(&mut self) {
        if self.outcome.is_none() {
            let mut model = self.health.model.lock();
            model.abandon(self.rank, self.ticket);
        }
    }
}

#[cfg(test)]
mod tests;
