//! Overloaded workers: by thresholds on their load, or because they answered with an overload
//! status. All thresholds are off by default and then cost nothing. A worker is overloaded only if
//! all its ranks are, because each rank is a candidate of its own.
//!
//! Decision 0039.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::weights::check_range;
use crate::fleet::FleetMember;
use crate::load::ActiveLoad;
use crate::queue::BusyThreshold;
use crate::worker::{WorkerCapacity, WorkerId, WorkerRank};

/// Thresholds above which a rank is overloaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverloadThresholds {
    /// Used share of the rank's KV blocks, 0 to 1. The higher of the engine's and warmroute's
    /// figure counts.
    pub decode_blocks: Option<f64>,
    /// Outstanding prefill of the rank.
    pub prefill: BusyThreshold,
    /// Time for which a worker counts as overloaded after it answered with an overload status.
    pub mark_duration: Duration,
}

impl Default for OverloadThresholds {
    fn default() -> Self {
        Self {
            decode_blocks: None,
            prefill: BusyThreshold::default(),
            mark_duration: Duration::from_secs(1),
        }
    }
}

impl OverloadThresholds {
    /// Checks the ranges. Returns the name of the invalid threshold and the problem.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let rules = [
            ("decode_blocks_threshold", self.decode_blocks, 1.0),
            (
                "prefill_tokens_threshold_frac",
                self.prefill.prefill_fraction,
                f64::INFINITY,
            ),
        ];
        rules.into_iter().try_for_each(|(name, value, most)| {
            value.map_or(Ok(()), |value| check_range(name, value, most))
        })
    }

    /// Returns whether any threshold on load is set.
    pub fn has_load_thresholds(&self) -> bool {
        self.decode_blocks.is_some() || !self.prefill.is_unset()
    }

    fn blocks_exceeded(
        &self,
        rank: WorkerRank,
        occupancy: RankOccupancy,
        capacity: WorkerCapacity,
        latched: &mut HashSet<WorkerRank>,
    ) -> bool {
        let Some(threshold) = self.decode_blocks else {
            return false;
        };
        let total = capacity.total_kv_blocks.filter(|total| *total > 0);
        let counted = total.map(|total| occupancy.load.active_blocks as f64 / total as f64);
        let reported = occupancy.reported_usage.filter(|usage| !usage.is_nan());
        let highest = counted.into_iter().chain(reported).reduce(f64::max);
        match highest {
            Some(usage) if usage > threshold => {
                latched.insert(rank);
                true
            }
            Some(usage) if usage == threshold => latched.contains(&rank),
            _ => {
                if !latched.is_empty() {
                    latched.remove(&rank);
                }
                false
            }
        }
    }
}

/// Occupancy of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankOccupancy {
    /// Load that warmroute counts.
    pub load: ActiveLoad,
    /// Used share of KV blocks that the engine reports, 0 to 1.
    pub reported_usage: Option<f64>,
}

/// Overload state of all workers.
#[derive(Debug, Default)]
pub struct OverloadTracker {
    thresholds: RwLock<OverloadThresholds>,
    /// Number of marks, readable without the lock.
    mark_count: AtomicUsize,
    marks: Mutex<BTreeMap<WorkerId, Instant>>,
    /// Ranks whose block usage exceeded the threshold and has not been below it since (hysteresis).
    latched: Mutex<HashSet<WorkerRank>>,
}

/// Effect of a query on the latches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatchMode {
    /// The latches follow the occupancy.
    Update,
    /// The latches stay, so later results do not change.
    Preview,
}

/// Workers that are overloaded at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverloadedWorkers {
    /// Sorted and distinct.
    workers: Vec<WorkerId>,
}

impl OverloadedWorkers {
    /// Returns whether a worker is overloaded.
    pub fn contains(&self, worker: WorkerId) -> bool {
        self.workers.binary_search(&worker).is_ok()
    }

    /// Returns the workers, sorted by id.
    pub fn workers(&self) -> &[WorkerId] {
        &self.workers
    }
}

impl OverloadTracker {
    /// Creates a tracker without overloaded workers.
    pub fn new(thresholds: OverloadThresholds) -> Self {
        Self {
            thresholds: RwLock::new(thresholds),
            ..Self::default()
        }
    }

    /// Replaces the thresholds. Latched ranks are evaluated again.
    pub fn set_thresholds(&self, thresholds: OverloadThresholds) {
        let mut latched = self.latched.lock();
        if std::mem::replace(&mut *self.thresholds.write(), thresholds) != thresholds {
            latched.clear();
        }
    }

    /// Marks a worker that answered with an overload status. Returns the time for which it is
    /// avoided.
    pub fn mark(&self, worker: WorkerId, now: Instant) -> Duration {
        let time = self.thresholds.read().mark_duration;
        self.mark_for(worker, now, time);
        time
    }

    /// Marks a worker for `time`, but for no longer than the configured time.
    pub fn mark_at_most(&self, worker: WorkerId, now: Instant, time: Duration) {
        let max_time = self.thresholds.read().mark_duration;
        self.mark_for(worker, now, time.min(max_time));
    }

    fn mark_for(&self, worker: WorkerId, now: Instant, time: Duration) {
        let Some(end) = now.checked_add(time) else {
            return;
        };
        let mut marks = self.marks.lock();
        let mark = marks.entry(worker).or_insert(end);
        *mark = end.max(*mark);
        self.mark_count.store(marks.len(), Ordering::Release);
    }

    /// Returns the marked workers and the remaining time of each mark.
    pub fn marks(&self, now: Instant) -> Vec<(WorkerId, Duration)> {
        let marks = self.marks.lock();
        let remaining = |(worker, end): (&WorkerId, &Instant)| {
            Some((*worker, end.checked_duration_since(now)?))
        };
        marks.iter().filter_map(remaining).collect()
    }

    /// Removes workers that are not known any more.
    pub fn retain(&self, known: impl Fn(WorkerId) -> bool) {
        let mut marks = self.marks.lock();
        marks.retain(|worker, _| known(*worker));
        self.mark_count.store(marks.len(), Ordering::Release);
        drop(marks);
        self.latched.lock().retain(|rank| known(rank.worker));
    }

    /// Returns the members that are overloaded now. `members` must contain all ranks of each
    /// worker. `occupancy` must be fast and must not call the tracker; without thresholds it is not
    /// called.
    pub fn overloaded_workers(
        &self,
        members: &[&FleetMember],
        now: Instant,
        latches: LatchMode,
        occupancy: impl Fn(&FleetMember) -> RankOccupancy,
    ) -> OverloadedWorkers {
        let thresholds = *self.thresholds.read();
        let mut full = Vec::new();
        if thresholds.has_load_thresholds() {
            let mut latched = self.latched.lock();
            let over = |latched| workers_over_thresholds(&thresholds, members, occupancy, latched);
            full = match latches {
                LatchMode::Update => over(&mut latched),
                LatchMode::Preview => over(&mut latched.clone()),
            };
        }
        self.add_marked(full, now)
    }

    /// Returns the workers that are marked now, regardless of the thresholds.
    pub fn marked_workers(&self, now: Instant) -> OverloadedWorkers {
        self.add_marked(Vec::new(), now)
    }

    /// Adds the marked workers to those over a threshold.
    fn add_marked(&self, mut workers: Vec<WorkerId>, now: Instant) -> OverloadedWorkers {
        if self.mark_count.load(Ordering::Acquire) > 0 {
            let mut marks = self.marks.lock();
            marks.retain(|_, end| *end > now);
            self.mark_count.store(marks.len(), Ordering::Release);
            workers.extend(marks.keys());
            workers.sort_unstable();
            workers.dedup();
        }
        OverloadedWorkers { workers }
    }
}

/// Returns the workers of which all ranks are over a threshold, sorted by id.
fn workers_over_thresholds(
    thresholds: &OverloadThresholds,
    members: &[&FleetMember],
    occupancy: impl Fn(&FleetMember) -> RankOccupancy,
    latched: &mut HashSet<WorkerRank>,
) -> Vec<WorkerId> {
    let mut full: Vec<&FleetMember> = members
        .iter()
        .copied()
        .filter(|member| {
            let occupancy = occupancy(member);
            let capacity = member.worker.capacity;
            // Both are evaluated, because the latch must see every value.
            let blocks = thresholds.blocks_exceeded(member.rank, occupancy, capacity, latched);
            let tokens = occupancy.load.active_prefill_tokens;
            let batch = capacity.max_num_batched_tokens;
            blocks | thresholds.prefill.is_exceeded(tokens, batch)
        })
        .collect();
    full.sort_unstable_by_key(|member| member.rank);
    full.chunk_by(|a, b| a.rank.worker == b.rank.worker)
        .filter(|ranks| ranks.len() >= ranks[0].worker.ranks.size.get() as usize)
        .map(|ranks| ranks[0].rank.worker)
        .collect()
}

#[cfg(test)]
mod tests;
