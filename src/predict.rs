//! What the caches probably hold, judged by our own decisions: for engines that send no KV events, and to bridge the time
//! until their events arrive. A decision stores the prompt on the rank it went to. What is held is kept in a prefix index
//! as if an engine had reported it, and per rank in runs that remember when they were last used: a prompt refreshes its
//! whole path, so a run is never younger than the one before it, and whatever leaves first lies at an end. A block
//! costs its place in the index and no more; the clocks and counters are per run.
//!
//! A prompt is in flight until the status of the answer is known. Prompts in flight lie in an index of their own, so a request
//! that the engine refuses neither leaves blocks nor evicts any.

mod chains;
mod in_flight;
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

pub use in_flight::InFlightPrompt;
use in_flight::InFlightPrompts;
pub use lease::Lease;
pub use policy::{EffectivePolicy, Policy, Ttl};
use rank::Rank;

/// Clock and policy, as all ranks use them.
struct Rules {
    policy: Policy,
    /// Whether ranks publish events that tell what becomes of the blocks later.
    beside_events: bool,
    start: Instant,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
}

/// The caches as our decisions should have left them.
pub struct Predictor {
    index: Arc<PrefixIndex>,
    in_flight: Arc<PrefixIndex>,
    ranks: RwLock<Vec<Option<PredictedRank>>>,
    rules: Arc<Rules>,
}

/// The predicted cache of one rank.
#[derive(Clone)]
struct PredictedRank {
    confirmed: Arc<Rank>,
    in_flight: Arc<InFlightPrompts>,
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
    /// Blocks of prompts in flight, over all ranks.
    pub in_flight: u64,
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
    /// Blocks that were not recorded, because live requests held all the room, or the prompt was longer than the room.
    pub refused: u64,
    /// Blocks of prompts in flight, in addition to those above.
    pub in_flight: u64,
}

impl PredictedRank {
    /// Removes expired blocks, if the policy has a time to live.
    fn expire(&self) {
        if !self.confirmed.leases() {
            self.in_flight.expire();
            self.confirmed.expire();
        }
    }

    fn stats(&self, slot: Slot) -> Option<RankPrediction> {
        let mut stats = self.confirmed.stats(slot)?;
        let in_flight = self.in_flight.stats();
        stats.in_flight = in_flight.blocks;
        stats.refused += in_flight.refused_blocks;
        Some(stats)
    }
}

impl Predictor {
    /// A predictor that holds nothing.
    pub fn new(policy: Policy, clock: impl Fn() -> Instant + Send + Sync + 'static) -> Arc<Self> {
        Self::of(Rules {
            policy,
            beside_events: false,
            start: clock(),
            clock: Box::new(clock),
        })
    }

    /// A predictor for ranks that publish events: a prediction stands in for events until they come, so it ends a fixed time
    /// after the request was sent, whenever it is confirmed.
    pub fn beside_events(
        policy: Policy,
        clock: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::of(Rules {
            policy,
            beside_events: true,
            start: clock(),
            clock: Box::new(clock),
        })
    }

    fn of(rules: Rules) -> Arc<Self> {
        let rules = Arc::new(rules);
        Arc::new(Self {
            index: PrefixIndex::new(),
            in_flight: PrefixIndex::new(),
            ranks: RwLock::default(),
            rules,
        })
    }

    /// Begins to predict for a rank; `capacity` is its number of KV blocks, if known. If the slot was open, what was
    /// recorded there is forgotten. Says by which policy the blocks of this rank leave.
    pub fn open(&self, slot: Slot, rank: WorkerRank, capacity: Option<u64>) -> EffectivePolicy {
        self.close(slot);
        let policy = self.rules.policy.for_capacity(capacity);
        // An engine refuses a prompt that does not fit its cache.
        let most_in_flight = policy.most_blocks().min(capacity.unwrap_or(u64::MAX));
        let in_flight = InFlightPrompts::new(
            self.in_flight.paths(slot),
            most_in_flight,
            self.rules.clone(),
        );
        let confirmed = Rank::new(self.index.paths(slot), rank, policy, self.rules.clone());
        let opened = PredictedRank {
            confirmed: Arc::new(confirmed),
            in_flight: Arc::new(in_flight),
        };
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
            rank.confirmed.close();
            rank.in_flight.close();
        }
    }

    /// Records a prompt that an engine accepted. Nothing is recorded if the slot has another owner by now.
    pub fn record(&self, slot: Slot, rank: WorkerRank, prompt: &BlockHashes) -> Lease {
        self.find(slot, rank)
            .map_or_else(Lease::none, |found| found.confirmed.record(prompt))
    }

    /// Records a prompt that is sent now; it counts for concurrent requests until it is confirmed or dropped. Nothing is
    /// recorded if the slot has another owner by now.
    pub fn send(&self, slot: Slot, rank: WorkerRank, prompt: &BlockHashes) -> InFlightPrompt {
        let found = self.find(slot, rank);
        found.map_or_else(InFlightPrompt::none, |found| {
            found.in_flight.record(prompt, found.confirmed)
        })
    }

    fn find(&self, slot: Slot, rank: WorkerRank) -> Option<PredictedRank> {
        let found = self.ranks.read().get(slot.at()).cloned().flatten();
        found.filter(|found| found.confirmed.name() == rank)
    }

    /// Finds what each rank should have cached of a prompt, all on the device. `into` is overwritten.
    pub fn overlaps(&self, prompt: &BlockHashes, into: &mut Overlaps) {
        self.index.overlaps(prompt, into);
        let mut in_flight = Overlaps::new();
        self.in_flight.overlaps(prompt, &mut in_flight);
        into.raise_where(&in_flight, |_| true);
    }

    /// Raises overlaps to what the ranks that `applies` names should have cached of a prompt. `scratch` is overwritten.
    pub fn raise(
        &self,
        prompt: &BlockHashes,
        into: &mut Overlaps,
        scratch: &mut Overlaps,
        applies: impl Fn(Slot) -> bool,
    ) {
        for index in [&self.index, &self.in_flight] {
            index.overlaps(prompt, scratch);
            into.raise_where(scratch, &applies);
        }
    }

    /// Takes out what has had its time. To be called every [`Ttl::STEP`] or so.
    pub fn expire(&self) {
        let ranks: Vec<PredictedRank> = self.ranks.read().iter().flatten().cloned().collect();
        for rank in ranks {
            rank.expire();
        }
    }

    /// Counts what is held.
    pub fn stats(&self) -> PredictStats {
        let mut stats = PredictStats::default();
        for (slot, rank) in self.ranks.read().iter().enumerate() {
            let Some(found) = rank.as_ref().and_then(|rank| rank.stats(Slot(slot as u32))) else {
                continue;
            };
            stats.in_flight += found.in_flight;
            stats.blocks += found.blocks;
            stats.generated += found.generated;
            stats.ranks.push(found);
        }
        stats
    }
}

#[cfg(test)]
mod tests;
