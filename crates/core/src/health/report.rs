//! Health of a rank and its changes, as logs and pages show them.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Serialize;

use super::HealthState;
use super::evidence::EvidenceSummary;
use crate::worker::{ModelName, WorkerRank};

/// Key of a peer group: the ranks of one model and phase, whose outcomes are compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerGroup {
    /// Model of the ranks.
    pub model: ModelName,
    /// Whether the ranks only run prefills.
    pub is_prefill: bool,
}

impl PeerGroup {
    /// Returns the name of the phase in logs and on pages.
    pub fn phase(&self) -> &'static str {
        if self.is_prefill { "prefill" } else { "decode" }
    }
}

/// Signal other than requests that a worker may be failing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthSignal {
    /// Scrapes of the load gauges fail.
    LoadScrape,
    /// The event source is detached.
    EventSource,
    /// The engine does not list the model any more.
    ModelList,
}

/// Change of the health of one rank, with its evidence.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthTransition {
    /// Rank.
    pub rank: WorkerRank,
    /// Change.
    pub change: HealthChange,
    /// Evidence for the change.
    pub evidence: EvidenceSummary,
}

/// Change of the health of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// The rank is avoided until its peers show whether they deliver.
    Suspected,
    /// The suspicion was withdrawn.
    Cleared,
    /// The rank was ejected for this time.
    Ejected(Duration),
    /// A probe failed; the ejection lasts for this further time.
    EjectionExtended(Duration),
    /// The rank accepts requests again.
    Readmitted,
}

/// Health of one rank, for pages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankHealthReport {
    /// Rank.
    #[serde(skip)]
    pub rank: WorkerRank,
    /// Health.
    pub health: HealthState,
    /// Seconds since the health changed.
    pub age_seconds: u64,
    /// Seconds until the next probe is due.
    pub next_probe_seconds: Option<u64>,
    /// Evidence.
    pub evidence: EvidenceSummary,
    /// Signals that the worker may be failing.
    pub signals: BTreeSet<HealthSignal>,
}
