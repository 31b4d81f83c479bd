//! The order inside a class. A request gets its place once, when it begins to wait: a place that changed while waiting
//! would have to be looked for again in every lane, and nobody could say any more who was first.

use std::cmp::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::turn::Turn;

/// Who goes first among requests of equal strict priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// First come, first served; a priority jump of j seconds counts as having come j seconds earlier.
    #[default]
    Fcfs,
    /// Last come, first served.
    Lcfs,
    /// Short uncached prompts first, weighted by the priority jump.
    Wspt,
}

impl Policy {
    /// More goes first. `arrived` counts from the start of the queue.
    pub(super) fn score(self, turn: &Turn, arrived: Duration) -> f64 {
        // Also makes a 0 of what is not a number.
        let jump = turn.priority_jump.max(0.0);
        match self {
            Self::Fcfs => jump - arrived.as_secs_f64(),
            Self::Lcfs => jump + arrived.as_secs_f64(),
            Self::Wspt => (1.0 + jump) / turn.cost() as f64,
        }
    }
}

/// Where a request stands among those of its class; the smallest goes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) strict_priority: i64,
    pub(super) score: f64,
    /// Counts all that ever waited, so that no two places are equal.
    pub(super) number: u64,
}

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_priority = other.strict_priority.cmp(&self.strict_priority);
        let by_score = other.score.total_cmp(&self.score);
        by_priority
            .then(by_score)
            .then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Place {}
