//! Order within a class. The position of a request is computed once, when it is queued. A position
//! that changed over time would have to be searched again in every lane.

use std::cmp::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metadata::QueueMetadata;

/// Order of requests with equal strict priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum QueuePolicy {
    /// First come, first served. A priority jump of j seconds counts as an arrival j seconds
    /// earlier.
    #[default]
    Fcfs,
    /// Last come, first served.
    Lcfs,
    /// Weighted shortest processing time: short uncached prompts first, weighted by the priority
    /// jump.
    Wspt,
}

impl QueuePolicy {
    /// Returns the score of a request; higher goes first. `arrival` counts from the start of the
    /// queue.
    pub(super) fn score(self, metadata: &QueueMetadata, arrival: Duration) -> f64 {
        // `max` also turns NaN into 0.
        let jump = metadata.priority_jump.max(0.0);
        match self {
            Self::Fcfs => jump - arrival.as_secs_f64(),
            Self::Lcfs => jump + arrival.as_secs_f64(),
            Self::Wspt => (1.0 + jump) / metadata.cost() as f64,
        }
    }
}

/// Position of a request within its class; the smallest goes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuePosition {
    pub(super) strict_priority: i64,
    pub(super) score: f64,
    /// Sequence number over all queued requests, so no two positions are equal.
    pub(super) number: u64,
}

impl Ord for QueuePosition {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_priority = other.strict_priority.cmp(&self.strict_priority);
        let by_score = other.score.total_cmp(&self.score);
        by_priority
            .then(by_score)
            .then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for QueuePosition {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for QueuePosition {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for QueuePosition {}
