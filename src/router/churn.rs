//! When worker ranks last changed their caches: what tells an eviction between a choice and its prefill from an index that
//! was wrong all along.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dashmap::DashMap;

use super::Router;
use crate::index::KvEvent;
use crate::worker::WorkerRank;

/// The last changes of each worker rank's cache.
#[derive(Debug)]
pub(super) struct Churns {
    base: Instant,
    ranks: DashMap<WorkerRank, Arc<Churn>>,
}

/// The last changes of one worker rank's cache, as its events told.
#[derive(Debug)]
pub struct Churn {
    base: Instant,
    /// In microseconds after the base; 0: never.
    stored: AtomicU64,
    removed: AtomicU64,
}

impl Churns {
    pub(super) fn new(base: Instant) -> Self {
        Self { base, ranks: DashMap::new() }
    }
}

impl Churn {
    /// An event came.
    pub fn note(&self, event: &KvEvent, now: Instant) {
        let last = match event {
            KvEvent::Removed { blocks, .. } if blocks.is_empty() => return,
            KvEvent::Stored { .. } | KvEvent::GroupStored { .. } => &self.stored,
            KvEvent::Removed { .. } | KvEvent::GroupRemoved { .. } | KvEvent::Cleared => &self.removed,
        };
        last.store(self.micros(now), Ordering::Relaxed);
    }

    /// Whether it stored blocks after a time.
    pub fn stored_since(&self, since: Instant) -> bool {
        self.stored.load(Ordering::Relaxed) > self.micros(since)
    }

    /// Whether it dropped blocks after a time.
    pub fn removed_since(&self, since: Instant) -> bool {
        self.removed.load(Ordering::Relaxed) > self.micros(since)
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.base).as_micros()).unwrap_or(u64::MAX)
    }
}

impl Router {
    /// Where the changes of a worker rank's cache are noted.
    pub fn note_churn(&self, rank: WorkerRank) -> Arc<Churn> {
        let base = self.churns.base;
        let new = || Arc::new(Churn { base, stored: AtomicU64::new(0), removed: AtomicU64::new(0) });
        self.churns.ranks.entry(rank).or_insert_with(new).clone()
    }

    /// The last changes of a worker rank's cache, where its events tell of them.
    pub fn churn(&self, rank: WorkerRank) -> Option<Arc<Churn>> {
        self.churns.ranks.get(&rank).map(|churn| churn.clone())
    }

    /// Forgets those who left.
    pub(super) fn retain_churns(&self, stays: impl Fn(WorkerRank) -> bool) {
        self.churns.ranks.retain(|rank, _| stays(*rank));
    }
}
