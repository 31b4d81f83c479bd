//! Prediction of cached blocks from routing decisions. It covers engines that send no KV events,
//! and the time until events arrive.
//!
//! A decision stores the prompt on the chosen rank. The blocks are stored in a prefix index, as if
//! an engine had reported them, and per rank in runs with the time of their last use. A prompt
//! refreshes its whole path, so a run is never older than the runs after it, and the first block to
//! evict is always at an end. Only runs have clocks and counters, so a block costs no more than its
//! entry in the index.
//!
//! A prompt is in flight until the status of the response is known. Prompts in flight have their
//! own index, so a request that the engine rejects neither leaves blocks nor evicts any.

mod eviction_age;
mod in_flight;
mod policy;
mod predicted_rank;
mod predicted_tree;
mod rules;
mod stats;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLock;

use crate::block::BlockHashes;
use crate::index::{Overlaps, PrefixIndex};
use crate::worker::{RankSlot, WorkerRank};

pub use eviction_age::EvictionAge;
use eviction_age::MeanEvictionAge;
pub use in_flight::InFlightPrompt;
use in_flight::InFlightState;
pub use policy::{EffectivePolicy, EvictionPolicy, TtlPolicy};
use predicted_rank::PredictedRank;
pub use predicted_rank::PredictionLease;
use rules::PredictorRules;
pub use stats::{PredictedUsage, RankPrediction};

/// Predicted caches of all ranks.
pub struct Predictor {
    index: Arc<PrefixIndex>,
    in_flight: Arc<PrefixIndex>,
    ranks: RwLock<Vec<Option<Arc<PredictedRank>>>>,
    rules: Arc<PredictorRules>,
}

impl Predictor {
    /// Creates a predictor without blocks.
    pub fn new(
        policy: EvictionPolicy,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::create(policy, false, clock)
    }

    /// Creates a predictor for ranks that publish events. A prediction covers the time until the
    /// events arrive, so it ends at a fixed time after the request was sent, regardless of when it
    /// is confirmed.
    pub fn beside_events(
        policy: EvictionPolicy,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::create(policy, true, clock)
    }

    fn create(
        policy: EvictionPolicy,
        beside_events: bool,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            index: PrefixIndex::new(),
            in_flight: PrefixIndex::new(),
            ranks: RwLock::default(),
            rules: Arc::new(PredictorRules {
                policy,
                beside_events,
                start: clock(),
                clock: Box::new(clock),
                eviction_age: MeanEvictionAge::default(),
            }),
        })
    }

    /// Starts predicting for a rank. `capacity` is the number of its KV blocks, if known. Earlier
    /// predictions of the slot are removed. Returns the eviction policy of the rank.
    pub fn open(&self, slot: RankSlot, rank: WorkerRank, capacity: Option<u64>) -> EffectivePolicy {
        self.close(slot);
        let policy = self.rules.policy.for_capacity(capacity);
        // An engine rejects a prompt that exceeds its cache.
        let max_in_flight = policy.max_blocks().min(capacity.unwrap_or(u64::MAX));
        let in_flight = InFlightState::new(self.in_flight.create_path_writer(slot), max_in_flight);
        let confirmed = self.index.create_path_writer(slot);
        let opened = PredictedRank::new(confirmed, rank, policy, self.rules.clone(), in_flight);
        let mut ranks = self.ranks.write();
        if ranks.len() <= slot.index() {
            ranks.resize(slot.index() + 1, None);
        }
        ranks[slot.index()] = Some(Arc::new(opened));
        policy
    }

    /// Removes all predictions of a slot. Leases of its blocks no longer have an effect.
    pub fn close(&self, slot: RankSlot) {
        let closed = self
            .ranks
            .write()
            .get_mut(slot.index())
            .and_then(Option::take);
        if let Some(rank) = closed {
            rank.close();
        }
    }

    /// Records a prompt that an engine accepted. Has no effect if the slot belongs to another rank
    /// by now.
    pub fn record(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        prompt: &BlockHashes,
    ) -> PredictionLease {
        self.find(slot, rank)
            .map_or_else(PredictionLease::none, |found| found.record(prompt))
    }

    /// Records a prompt that is being sent. It counts for concurrent requests until it is confirmed
    /// or dropped. Has no effect if the slot belongs to another rank by now.
    pub fn record_in_flight(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        prompt: &BlockHashes,
    ) -> InFlightPrompt {
        let found = self.find(slot, rank);
        found.map_or_else(InFlightPrompt::none, |found| found.record_in_flight(prompt))
    }

    fn find(&self, slot: RankSlot, rank: WorkerRank) -> Option<Arc<PredictedRank>> {
        let found = self.ranks.read().get(slot.index()).cloned().flatten();
        found.filter(|found| found.rank == rank)
    }

    /// Raises overlaps to the predicted blocks of a prompt, on the slots that `applies` accepts.
    /// `scratch` is overwritten.
    pub fn raise(
        &self,
        prompt: &BlockHashes,
        into: &mut Overlaps,
        scratch: &mut Overlaps,
        applies: impl Fn(RankSlot) -> bool,
    ) {
        for index in [&self.index, &self.in_flight] {
            index.query_overlaps(prompt, scratch);
            into.raise_where(scratch, &applies);
        }
    }

    /// Returns the mean age of recently evicted blocks.
    pub fn eviction_age(&self) -> EvictionAge {
        self.rules.eviction_age()
    }

    /// Returns how the blocks of a slot are used. Without a rank, no blocks are used.
    pub fn usage(&self, slot: RankSlot, age: EvictionAge) -> PredictedUsage {
        let ranks = self.ranks.read();
        let rank = ranks.get(slot.index()).and_then(Option::as_ref);
        rank.map_or(PredictedUsage::NONE, |rank| rank.usage(age))
    }

    /// Removes expired blocks. To be called about every [`TtlPolicy::STEP`].
    pub fn expire(&self) {
        let ranks: Vec<_> = self.ranks.read().iter().flatten().cloned().collect();
        for rank in ranks {
            rank.expire();
        }
    }

    /// Returns the predicted blocks of each open slot, in slot order.
    pub fn stats(&self) -> Vec<RankPrediction> {
        let ranks = self.ranks.read();
        let slots = (0..).map(RankSlot).zip(&*ranks);
        let stats = slots.filter_map(|(slot, rank)| rank.as_ref()?.stats(slot));
        stats.collect()
    }
}

#[cfg(test)]
mod tests;
