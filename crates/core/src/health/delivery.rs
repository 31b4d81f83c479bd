//! Models of which no rank delivers. No rank is at fault then, so none changes its health.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::model::HealthModel;
use super::outcome::RequestOutcome;
use super::report::HealthPool;
use crate::worker::{WorkerId, WorkerRank};

/// Weighted number of failures in a row, on all ranks, after which a pool delivers nothing.
const MIN_FAILURES: f64 = 3.0;

/// Minimum time without a delivery, since the first of these failures.
const MIN_FAILING_TIME: Duration = Duration::from_secs(2);

/// If this number of ranks has failed in a row, the other ranks of a large pool count as failing.
const MAX_FAILED_RANKS: usize = 8;

/// Number of failures by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct FailureCounts(BTreeMap<RequestOutcome, u32>);

impl FailureCounts {
    /// Counts a failure.
    pub(super) fn add(&mut self, outcome: RequestOutcome) {
        *self.0.entry(outcome).or_default() += 1;
    }

    /// Returns the most frequent failure.
    pub fn most_frequent(&self) -> Option<RequestOutcome> {
        let by_count = |(_, count): &(&RequestOutcome, &u32)| **count;
        Some(*self.0.iter().max_by_key(by_count)?.0)
    }

    fn weight(&self) -> f64 {
        let kinds = self.0.iter();
        kinds
            .map(|(kind, count)| kind.weight() * f64::from(*count))
            .sum()
    }
}

#[cfg(test)]
impl From<[(RequestOutcome, u32); 1]> for FailureCounts {
    fn from(counts: [(RequestOutcome, u32); 1]) -> Self {
        Self(counts.into())
    }
}

impl fmt::Display for FailureCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (kind, count)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { " " };
            write!(f, "{separator}{}={count}", kind.as_str())?;
        }
        Ok(())
    }
}

/// Failures of a pool since its last delivery.
#[derive(Debug)]
pub(super) struct DeliveryGap {
    since: Instant,
    failures: FailureCounts,
    ranks: BTreeSet<WorkerRank>,
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

    fn is_long(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= MIN_FAILING_TIME
            && self.failures.weight() >= MIN_FAILURES
    }
}

/// Pool of which no rank delivers.
#[derive(Clone, Debug, PartialEq)]
pub struct FailingPool {
    /// Model and phase.
    pub pool: HealthPool,
    /// Number of its ranks.
    pub ranks: usize,
    /// Number of ranks that answer neither requests nor queries.
    pub unreachable: usize,
    /// Failures since the last delivery, by kind.
    pub failures: FailureCounts,
}

/// Change of the deliveries of a pool.
#[derive(Clone, Debug, PartialEq)]
pub enum DeliveryTransition {
    /// No rank of the pool delivers.
    Stopped(FailingPool),
    /// The pool delivers again, after this time.
    Resumed(HealthPool, Duration),
}

impl HealthModel {
    /// Counts the outcome of a request at a rank.
    pub(super) fn count(&mut self, rank: WorkerRank, outcome: RequestOutcome, now: Instant) {
        let Some(record) = self.ranks.get_mut(&rank) else {
            return;
        };
        let Some(pool) = self.pools.get_mut(&record.pool) else {
            return;
        };
        if outcome == RequestOutcome::Delivered {
            pool.gap = None;
        } else if outcome.is_failure() {
            *record.failures.entry(outcome).or_default() += 1;
            pool.gap
                .get_or_insert_with(|| DeliveryGap::new(now))
                .add(rank, outcome);
        }
    }

    /// Updates which pools deliver. Returns the changes since the last call.
    pub(super) fn update_deliveries(
        &mut self,
        unreachable: &BTreeMap<WorkerId, Duration>,
        now: Instant,
    ) -> Vec<DeliveryTransition> {
        let failing = self.failing_pools(unreachable, now);
        let mut changes = Vec::new();
        for (name, pool) in &mut self.pools {
            let found = failing.iter().find(|failing| failing.pool == *name);
            match (pool.failing_since, found) {
                (None, Some(found)) => {
                    pool.failing_since = Some(now);
                    changes.push(DeliveryTransition::Stopped(found.clone()));
                }
                (Some(since), None) => {
                    pool.failing_since = None;
                    let elapsed = now.saturating_duration_since(since);
                    changes.push(DeliveryTransition::Resumed(name.clone(), elapsed));
                }
                _ => {}
            }
        }
        changes
    }

    /// Returns the pools of which no rank delivers. A pool that failed requests stays failing until
    /// one is delivered. `unreachable` are the workers that answer neither requests nor queries.
    pub(super) fn failing_pools(
        &self,
        unreachable: &BTreeMap<WorkerId, Duration>,
        now: Instant,
    ) -> Vec<FailingPool> {
        let is_unreachable = |rank: &&WorkerRank| unreachable.contains_key(&rank.worker);
        let pools = self.pools.iter().filter_map(|(name, pool)| {
            let members = &pool.members;
            let silent = members.iter().filter(is_unreachable).count();
            let gap = pool.gap.as_ref();
            let has_failed = |gap: &DeliveryGap| {
                let fails = |rank| {
                    gap.ranks.contains(rank) || self.avoided.contains(rank) || is_unreachable(&rank)
                };
                gap.is_long(now)
                    && (gap.ranks.len() >= MAX_FAILED_RANKS || members.iter().all(fails))
            };
            let was_failing = gap.is_some() && pool.failing_since.is_some();
            let is_failing = silent == members.len() || was_failing || gap.is_some_and(has_failed);
            is_failing.then(|| FailingPool {
                pool: name.clone(),
                ranks: members.len(),
                unreachable: silent,
                failures: gap.map(|gap| gap.failures.clone()).unwrap_or_default(),
            })
        });
        pools.collect()
    }
}
