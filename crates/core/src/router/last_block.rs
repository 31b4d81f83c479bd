//! Whether engines reuse the last matched block of a prompt. vLLM up to 0.32 with EAGLE or MTP
//! speculative decoding recomputes it. No API of the engine shows this, so it is learned per worker
//! from the cached tokens of responses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::worker::WorkerId;

/// Consecutive responses without the last matched block that prove that the engine recomputes it.
const RESPONSES_TO_LEARN: u8 = 3;

/// Use of the last matched block by an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastBlockReuse {
    /// The engine reuses it.
    Reused {
        /// Consecutive responses that lacked exactly this block.
        missing: u8,
    },
    /// The engine recomputes it.
    Recomputed,
}

/// Evidence of one response with at least one cached block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastBlockEvidence {
    /// The engine reused all matched blocks.
    Reused,
    /// It reused all matched blocks except the last one.
    Recomputed,
}

impl Default for LastBlockReuse {
    /// Returns the state before any evidence. It counts as one missing block, so two responses suffice
    /// instead of three.
    fn default() -> Self {
        Self::Reused { missing: 1 }
    }
}

impl LastBlockReuse {
    /// Returns whether a missing last block is more likely recomputed by the engine than an error of
    /// the index.
    pub fn is_likely_recomputed(self) -> bool {
        match self {
            Self::Reused { missing } => missing > 1,
            Self::Recomputed => true,
        }
    }

    fn update(self, evidence: LastBlockEvidence) -> Self {
        match (self, evidence) {
            // An engine that recomputes the last block never reuses all blocks.
            (_, LastBlockEvidence::Reused) => Self::Reused { missing: 0 },
            (Self::Reused { missing }, LastBlockEvidence::Recomputed)
                if missing + 1 < RESPONSES_TO_LEARN =>
            {
                Self::Reused {
                    missing: missing + 1,
                }
            }
            (_, LastBlockEvidence::Recomputed) => Self::Recomputed,
        }
    }
}

/// Learned state of all workers.
#[derive(Debug, Default)]
pub(super) struct LastBlockTable {
    workers: Mutex<BTreeMap<WorkerId, LastBlockReuse>>,
    recomputing: ArcSwap<BTreeSet<WorkerId>>,
}

impl LastBlockTable {
    /// Returns the workers that recompute the last matched block.
    pub(super) fn recomputing_workers(&self) -> Arc<BTreeSet<WorkerId>> {
        self.recomputing.load_full()
    }

    /// Adds the evidence of a response. Returns the states before and after it.
    pub(super) fn record(
        &self,
        worker: WorkerId,
        evidence: LastBlockEvidence,
    ) -> (LastBlockReuse, LastBlockReuse) {
        let mut workers = self.workers.lock();
        let state = workers.entry(worker).or_default();
        let before = *state;
        *state = before.update(evidence);
        let after = *state;
        self.publish(&workers);
        (before, after)
    }

    /// Removes all other workers.
    pub(super) fn retain(&self, keep: impl Fn(WorkerId) -> bool) {
        let mut workers = self.workers.lock();
        workers.retain(|worker, _| keep(*worker));
        self.publish(&workers);
    }

    fn publish(&self, workers: &BTreeMap<WorkerId, LastBlockReuse>) {
        let recomputing = |(worker, state): (&WorkerId, &LastBlockReuse)| {
            (*state == LastBlockReuse::Recomputed).then_some(*worker)
        };
        let known = self.recomputing.load();
        if !workers
            .iter()
            .filter_map(recomputing)
            .eq(known.iter().copied())
        {
            let workers = workers.iter().filter_map(recomputing).collect();
            self.recomputing.store(Arc::new(workers));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(1);

    fn learn(table: &LastBlockTable, evidence: &[LastBlockEvidence]) -> bool {
        for evidence in evidence {
            table.record(WORKER, *evidence);
        }
        table.recomputing_workers().contains(&WORKER)
    }

    #[test]
    fn repeated_recomputation_is_learned() {
        use LastBlockEvidence::{Recomputed, Reused};
        let table = LastBlockTable::default();
        assert!(!learn(&table, &[Recomputed]));
        assert!(learn(&table, &[Recomputed]));
        assert!(!learn(&table, &[Reused]), "the engine was replaced");
        assert!(!learn(&table, &[Recomputed, Recomputed]));
        assert!(!learn(&table, &[Reused, Recomputed]));
        assert!(learn(&table, &[Recomputed, Recomputed]));
        table.retain(|worker| worker != WORKER);
        assert!(!learn(&table, &[]));
    }

    #[test]
    fn single_missing_block_is_index_error() {
        let proven = LastBlockReuse::default().update(LastBlockEvidence::Reused);
        let dropped = |state: LastBlockReuse| state.update(LastBlockEvidence::Recomputed);
        assert!(!dropped(proven).is_likely_recomputed());
        assert!(dropped(dropped(proven)).is_likely_recomputed());
        assert!(dropped(LastBlockReuse::default()).is_likely_recomputed());
    }
}
