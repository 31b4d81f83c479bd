//! Which workers have too much to do to be given more: by thresholds on their load, and by their own word, when they
//! answered that they are. Nothing of it is on by default, and then nothing is looked at. A worker is overloaded only when
//! all its ranks are, because it chooses nothing among them: each rank is a candidate of its own.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::weights::within;
use crate::fleet::Member;
use crate::load::Load;
use crate::worker::{Capacity, WorkerId, WorkerRank};

/// Tokens that one step takes where a worker does not say: so many that no fraction of it is ever reached.
const UNKNOWN_STEP: u64 = 10_000_000;

/// What counts as too much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// Used share of a rank's KV blocks, from 0 to 1, as the engine reports it or as we count it.
    pub decode_blocks: Option<f64>,
    /// Prompt tokens a rank has still to prefill.
    pub prefill_tokens: Option<u64>,
    /// The same, in steps of the engine.
    pub prefill_tokens_fraction: Option<f64>,
    /// For how long a worker counts as overloaded that said so.
    pub mark: Duration,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            decode_blocks: None,
            prefill_tokens: None,
            prefill_tokens_fraction: None,
            mark: Duration::from_secs(1),
        }
    }
}

impl Thresholds {
    /// Refuses values outside their range: the name of the threshold and what is wrong with it.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let rules = [
            ("decode_blocks", self.decode_blocks, 1.0),
            (
                "prefill_tokens_fraction",
                self.prefill_tokens_fraction,
                f64::INFINITY,
            ),
        ];
        rules.into_iter().try_for_each(|(name, value, most)| {
            value.map_or(Ok(()), |value| within(name, value, most))
        })
    }

    /// Whether any threshold on the load is set.
    pub fn any(&self) -> bool {
        self.decode_blocks.is_some()
            || self.prefill_tokens.is_some()
            || self.prefill_tokens_fraction.is_some()
    }

    fn blocks_exceeded(
        &self,
        rank: WorkerRank,
        occupancy: Occupancy,
        capacity: Capacity,
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

    fn prefill_exceeded(&self, load: Load, capacity: Capacity) -> bool {
        let tokens = load.active_prefill_tokens;
        let step = capacity.max_num_batched_tokens.unwrap_or(UNKNOWN_STEP) as f64;
        self.prefill_tokens.is_some_and(|most| tokens > most)
            || self
                .prefill_tokens_fraction
                .is_some_and(|fraction| tokens as f64 > fraction * step)
    }
}

/// How full one rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Occupancy {
    /// What we count.
    pub load: Load,
    /// Used share of its KV blocks as the engine reports it, from 0 to 1, if it does.
    pub reported_usage: Option<f64>,
}

/// What is known of overload.
#[derive(Debug, Default)]
pub struct Overload {
    thresholds: RwLock<Thresholds>,
    /// How many marks there are, so that nobody has to look when there is none.
    marked: AtomicUsize,
    marks: Mutex<BTreeMap<WorkerId, Instant>>,
    /// Ranks whose blocks went over the threshold and have not been below it since.
    latched: Mutex<HashSet<WorkerRank>>,
}

/// The workers that are overloaded at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overloaded {
    /// In order, each once.
    workers: Vec<WorkerId>,
}

impl Overloaded {
    /// Whether a worker is.
    pub fn contains(&self, worker: WorkerId) -> bool {
        self.workers.binary_search(&worker).is_ok()
    }

    /// The workers in the order of their ids.
    pub fn workers(&self) -> &[WorkerId] {
        &self.workers
    }
}

impl Overload {
    /// Nobody is overloaded yet.
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds: RwLock::new(thresholds),
            ..Self::default()
        }
    }

    /// Judges by other thresholds from now on. Who went over the old one is looked at anew.
    pub fn set_thresholds(&self, thresholds: Thresholds) {
        let mut latched = self.latched.lock();
        if std::mem::replace(&mut *self.thresholds.write(), thresholds) != thresholds {
            latched.clear();
        }
    }

    /// A worker refused a request because it has too much to do; it is left alone for a while. Says for how long.
    pub fn mark(&self, worker: WorkerId, now: Instant) -> Duration {
        let time = self.thresholds.read().mark;
        self.mark_for(worker, now, time);
        time
    }

    /// The same for a given time, if that is not longer.
    pub fn mark_no_longer(&self, worker: WorkerId, now: Instant, time: Duration) {
        let most = self.thresholds.read().mark;
        self.mark_for(worker, now, time.min(most));
    }

    fn mark_for(&self, worker: WorkerId, now: Instant, time: Duration) {
        let Some(end) = now.checked_add(time) else {
            return;
        };
        let mut marks = self.marks.lock();
        let mark = marks.entry(worker).or_insert(end);
        *mark = end.max(*mark);
        self.marked.store(marks.len(), Ordering::Release);
    }

    /// The workers that are left alone, and for how long still.
    pub fn marks(&self, now: Instant) -> Vec<(WorkerId, Duration)> {
        let marks = self.marks.lock();
        let left = |(worker, end): (&WorkerId, &Instant)| {
            Some((*worker, end.checked_duration_since(now)?))
        };
        marks.iter().filter_map(left).collect()
    }

    /// Forgets the workers that left.
    pub fn retain(&self, known: impl Fn(WorkerId) -> bool) {
        let mut marks = self.marks.lock();
        marks.retain(|worker, _| known(*worker));
        self.marked.store(marks.len(), Ordering::Release);
        drop(marks);
        self.latched.lock().retain(|rank| known(rank.worker));
    }

    /// Who of the members is overloaded now. All ranks of each worker must be among them. `occupancy` must be quick and
    /// must not come back here; without thresholds it is not asked.
    pub fn overloaded(
        &self,
        members: &[&Member],
        now: Instant,
        occupancy: impl Fn(&Member) -> Occupancy,
    ) -> Overloaded {
        let thresholds = *self.thresholds.read();
        let full = match thresholds.any() {
            true => over_thresholds(&thresholds, members, occupancy, &mut self.latched.lock()),
            false => Vec::new(),
        };
        self.marked_or(full, now)
    }

    /// The same without taking note of what is seen: who only looks must not change later verdicts.
    pub fn peek(
        &self,
        members: &[&Member],
        now: Instant,
        occupancy: impl Fn(&Member) -> Occupancy,
    ) -> Overloaded {
        let thresholds = *self.thresholds.read();
        let full = match thresholds.any() {
            true => over_thresholds(
                &thresholds,
                members,
                occupancy,
                &mut self.latched.lock().clone(),
            ),
            false => Vec::new(),
        };
        self.marked_or(full, now)
    }

    /// The workers that are full, and those that said so.
    fn marked_or(&self, mut workers: Vec<WorkerId>, now: Instant) -> Overloaded {
        if self.marked.load(Ordering::Acquire) > 0 {
            let mut marks = self.marks.lock();
            marks.retain(|_, end| *end > now);
            self.marked.store(marks.len(), Ordering::Release);
            workers.extend(marks.keys());
            workers.sort_unstable();
            workers.dedup();
        }
        Overloaded { workers }
    }
}

/// In the order of their ids, each once.
fn over_thresholds(
    thresholds: &Thresholds,
    members: &[&Member],
    occupancy: impl Fn(&Member) -> Occupancy,
    latched: &mut HashSet<WorkerRank>,
) -> Vec<WorkerId> {
    let mut full: Vec<&Member> = members
        .iter()
        .copied()
        .filter(|member| {
            let occupancy = occupancy(member);
            let capacity = member.worker.capacity;
            // Both are looked at, because the latch must see every value.
            let blocks = thresholds.blocks_exceeded(member.rank, occupancy, capacity, latched);
            blocks | thresholds.prefill_exceeded(occupancy.load, capacity)
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
