//! Members, outcomes and mean times of a peer group.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::evidence::PromptEnd;
use super::outcome::{FailureCounts, RequestOutcome};
use super::waiting::{ContentTimes, MeanTime};
use crate::worker::WorkerRank;

/// Share of failed requests that is assumed for the healthy ranks of a group without outcomes, and
/// the maximum for any group.
pub(super) const BASE_SHARE: f64 = 0.02;

/// Minimum of the share that is assumed for healthy ranks.
const MIN_BASE_SHARE: f64 = 0.002;

/// A failed probe is repeated after this number of requests of the group at the earliest, so that
/// probes are at most 2 % of the requests. The maximum ejection time limits it.
const MIN_PROBE_DISTANCE: u32 = 50;

/// Weighted number of failures in a row, on all ranks, after which a group delivers nothing.
const MIN_FAILURES: f64 = 3.0;

/// Minimum time without a delivery, since the first of these failures.
const MIN_FAILING_TIME: Duration = Duration::from_secs(2);

/// Members, outcomes and mean times of a peer group.
#[derive(Debug, Default)]
pub(super) struct PeerGroupRecord {
    pub(super) members: BTreeSet<WorkerRank>,
    /// Members with evidence against them.
    pub(super) with_evidence: BTreeSet<WorkerRank>,
    /// Prompts that failed on several members.
    pub(super) faulty_prompts: VecDeque<PromptEnd>,
    pub(super) history: OutcomeHistory,
    /// Time between two requests.
    pub(super) interval: MeanTime,
    pub(super) last_request: Option<Instant>,
    pub(super) content_times: ContentTimes,
    pub(super) service_time: MeanTime,
    /// Failures since the last delivery, if there are any.
    pub(super) gap: Option<DeliveryGap>,
    /// Time since which no rank delivers.
    pub(super) failing_since: Option<Instant>,
}

/// Outcomes of a group in its last requests, of which older ones count less.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OutcomeHistory {
    failed: f64,
    delivered: f64,
}

impl OutcomeHistory {
    /// Weight of the history after one further outcome.
    const RETENTION: f64 = 0.997;

    pub(super) fn add(&mut self, outcome: RequestOutcome) {
        self.failed = Self::RETENTION * self.failed + outcome.weight();
        let delivered = f64::from(u8::from(outcome == RequestOutcome::Delivered));
        self.delivered = Self::RETENTION * self.delivered + delivered;
    }

    /// Returns the share of failed requests that is assumed for healthy ranks. Half a failure is
    /// added, and so many deliveries that the share is [`BASE_SHARE`] without outcomes.
    pub(super) fn base_share(self) -> f64 {
        let failed = self.failed + 0.5;
        let share = failed / (self.failed + self.delivered + 0.5 / BASE_SHARE);
        share.clamp(MIN_BASE_SHARE, BASE_SHARE)
    }
}

/// Failures of a group since its last delivery.
#[derive(Debug)]
pub(super) struct DeliveryGap {
    pub(super) since: Instant,
    pub(super) failures: FailureCounts,
    pub(super) ranks: BTreeSet<WorkerRank>,
}

impl DeliveryGap {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            failures: FailureCounts::default(),
            ranks: BTreeSet::new(),
        }
    }

    pub(super) fn add(&mut self, rank: WorkerRank, outcome: RequestOutcome) {
        self.failures.add(outcome);
        self.ranks.insert(rank);
    }

    pub(super) fn is_long(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= MIN_FAILING_TIME
            && self.failures.weight() >= MIN_FAILURES
    }
}

impl PeerGroupRecord {
    /// Records that a request is sent to a member.
    pub(super) fn add_request(&mut self, now: Instant) {
        if let Some(previous) = self.last_request.replace(now) {
            self.interval.add(now.saturating_duration_since(previous));
        }
    }

    /// Returns the time in which the group is expected to receive [`MIN_PROBE_DISTANCE`] requests.
    pub(super) fn min_probe_period(&self) -> Duration {
        let interval = self.interval.get().unwrap_or_default();
        interval.saturating_mul(MIN_PROBE_DISTANCE)
    }
}
