//! What the caches probably hold, judged by our own decisions: for engines that send no KV events, and to bridge the time
//! until their events arrive. A decision stores the prompt on the rank it went to. What is held is kept in a prefix index
//! as if an engine had reported it, and per rank in runs that remember when they were last used: a prompt refreshes its
//! whole path, so a run is never younger than the one before it, and whatever leaves first lies at an end. A block
//! costs its place in the index and no more; the clocks and counters are per run.

mod chains;
mod lease;
mod policy;
mod rank;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLock;
use serde::Serialize;

use crate::block::BlockHashes;
use crate::index::{Overlaps, PrefixIndex};
use crate::worker::{Slot, WorkerRank};

pub use lease::Lease;
pub use policy::{EffectivePolicy, Policy, Ttl};
use rank::Rank;

/// Clock and policy, as all ranks use them.
struct Rules {
    policy: Policy,
    start: Instant,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
}

/// The caches as our decisions should have left them.
pub struct Predictor {
    index: Arc<PrefixIndex>,
    ranks: RwLock<Vec<Option<Arc<Rank>>>>,
    rules: Arc<Rules>,
}

/// The size of a predictor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PredictStats {
    /// Per open slot, in slot order.
    pub ranks: Vec<RankPrediction>,
    /// Blocks of all ranks.
    pub blocks: u64,
    /// Generated blocks of all ranks.
    pub generated: u64,
}

/// What one rank should hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPrediction {
    /// Its slot.
    pub slot: Slot,
    /// Its name.
    pub rank: WorkerRank,
    /// How its blocks leave.
    pub policy: EffectivePolicy,
    /// Prompt blocks.
    pub blocks: u64,
    /// Generated blocks, whose content we do not know.
    pub generated: u64,
    /// Runs the prompt blocks are kept in.
    pub runs: u64,
    /// Blocks that had to leave since the slot was opened, because there was no room.
    pub evicted: u64,
    /// Blocks whose time was over.
    pub expired: u64,
    /// Blocks that were not entered, because live requests held all that there is room for.
    pub refused: u64,
}

impl Predictor {
    /// A predictor that holds nothing.
    pub fn new(policy: Policy, clock: impl Fn() -> Instant + Send + Sync + 'static) -> Arc<Self> {
        let rules = Arc::new(Rules { policy, start: clock(), clock: Box::new(clock) });
        Arc::new(Self { index: PrefixIndex::new(), ranks: RwLock::default(), rules })
    }

    /// Begins to predict for a rank; `capacity` is its number of KV blocks, if known. If the slot was open, what was
    /// recorded there is forgotten. Says by which policy the blocks of this rank leave.
    pub fn open(&self, slot: Slot, rank: WorkerRank, capacity: Option<u64>) -> EffectivePolicy {
        self.close(slot);
        let policy = self.rules.policy.for_capacity(capacity);
        let opened = Arc::new(Rank::new(self.index.paths(slot), rank, policy, self.rules.clone()));
        let mut ranks = self.ranks.write();
        if ranks.len() <= slot.at() {
            ranks.resize(slot.at() + 1, None);
        }
        ranks[slot.at()] = Some(opened);
        policy
    }

    /// Forgets a slot. Leases of its blocks end without effect.
    pub fn close(&self, slot: Slot) {
        let closed = self.ranks.write().get_mut(slot.at()).and_then(Option::take);
        if let Some(rank) = closed {
            rank.close();
        }
    }

    /// A request with this prompt goes to a rank. Nothing is recorded if the slot belongs to somebody else by now.
    pub fn record(&self, slot: Slot, rank: WorkerRank, prompt: &BlockHashes) -> Lease {
        let found = self.ranks.read().get(slot.at()).cloned().flatten().filter(|found| found.name() == rank);
        match found {
            Some(found) => found.record(prompt),
            None => Lease::none(),
        }
    }

    /// Finds what each rank should have cached of a prompt, all on the device. `into` is overwritten.
    pub fn overlaps(&self, prompt: &BlockHashes, into: &mut Overlaps) {
        self.index.overlaps(prompt, into);
    }

    /// Takes out what has had its time. To be called every [`Ttl::STEP`] or so.
    pub fn expire(&self) {
        let ranks: Vec<Arc<Rank>> = self.ranks.read().iter().flatten().cloned().collect();
        for rank in ranks {
            rank.expire();
        }
    }

    /// Counts what is held.
    pub fn stats(&self) -> PredictStats {
        let mut stats = PredictStats::default();
        for (slot, rank) in self.ranks.read().iter().enumerate() {
            let Some(found) = rank.as_ref().and_then(|rank| rank.stats(Slot(slot as u32))) else { continue };
            stats.blocks += found.blocks;
            stats.generated += found.generated;
            stats.ranks.push(found);
        }
        stats
    }
}

#[cfg(test)]
mod tests;
