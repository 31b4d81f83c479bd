//! Joins small engine blocks to index blocks. Each index block consists of consecutive engine
//! blocks of a chain, its parts. Its hash is the hash of its last part, and a tier holds it if the
//! tier holds all parts. Parts are stored and removed separately, and several chains may share
//! them. A part therefore keeps its content while children may follow. Copies of parts are counted
//! here; the index sees one copy of each index block.

mod part;

use hashbrown::HashMap;

use part::{BlockPart, IndexBlock, IndexEvents, PartContent, PartInput};

use super::run::{ResizedEvents, StoredRun, local_hash};
use warmroute_core::block::{EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{ApplyOutcome, PurgedBlocks, StoredBlock};
use warmroute_core::worker::BlockSize;

/// Maximum number of parts per rank. Further parts are dropped.
const MAX_PARTS_PER_RANK: usize = if cfg!(test) { 1 << 12 } else { 1 << 21 };
const TIERS: usize = StorageTier::ALL.len();

/// All parts of one worker rank.
#[derive(Debug)]
pub(super) struct PartialBlocks {
    engine_size: BlockSize,
    index_size: BlockSize,
    parts: HashMap<EngineHash, BlockPart>,
    /// Number of losses of events so far.
    losses: u32,
}

impl PartialBlocks {
    pub(super) fn new(engine: BlockSize, index_size: BlockSize, gaps: u32) -> Self {
        Self {
            engine_size: engine,
            index_size,
            parts: HashMap::new(),
            losses: gaps,
        }
    }

    pub(super) fn engine_size(&self) -> BlockSize {
        self.engine_size
    }

    fn parts_per_block(&self) -> usize {
        self.index_size.tokens() / self.engine_size.tokens()
    }

    /// Stores a run with the given tokens.
    pub(super) fn store(&mut self, run: &StoredRun<'_>, tokens: &[u32]) -> ResizedEvents {
        let mut events = IndexEvents::default();
        let size = self.engine_size.tokens();
        let mut outcome = ApplyOutcome::DuplicateStore;
        let mut parent = run.parent;
        if parent.is_some_and(|parent| !self.parts.contains_key(&parent)) {
            return ResizedEvents {
                events: Vec::new(),
                outcome: ApplyOutcome::ParentNotFound,
            };
        }
        for (at, &hash) in run.hashes.iter().enumerate() {
            let end = (at + 1) * size + usize::from(run.bigrams);
            let Some(ids) = tokens.get(at * size..end) else {
                break;
            };
            let objects = run.objects.get(at).map_or(&[][..], Vec::as_slice);
            if self
                .parts
                .get(&hash)
                .is_some_and(|part| part.parent != parent)
            {
                self.purge(hash, &mut events);
            }
            if !self.parts.contains_key(&hash)
                && !self.insert(hash, parent, run, PartInput { ids, objects })
            {
                outcome = ApplyOutcome::TooManyWaiting;
                break;
            }
            if self.add_copy(hash, run.tier, &mut events) && outcome == ApplyOutcome::DuplicateStore
            {
                outcome = ApplyOutcome::Ok;
            }
            parent = Some(hash);
        }
        if run.hashes.is_empty() {
            outcome = ApplyOutcome::Ok;
        }
        ResizedEvents {
            events: events.0,
            outcome,
        }
    }

    /// Adds a part without copies. Returns false if there are too many parts.
    fn insert(
        &mut self,
        hash: EngineHash,
        parent: Option<EngineHash>,
        run: &StoredRun<'_>,
        input: PartInput<'_>,
    ) -> bool {
        if self.parts.len() >= MAX_PARTS_PER_RANK {
            return false;
        }
        let index = match parent.and_then(|parent| self.parts.get(&parent)) {
            Some(parent) => (parent.index + 1) % self.parts_per_block(),
            None => 0,
        };
        let content = if index + 1 == self.parts_per_block() {
            let Some(local) = self.block_hash(parent, run, input) else {
                return false;
            };
            PartContent::Whole(IndexBlock::new(local))
        } else {
            PartContent::Tokens {
                ids: input.ids.into(),
                objects: input.objects.into(),
            }
        };
        if let Some(parent) = parent.and_then(|parent| self.parts.get_mut(&parent)) {
            parent.children.push(hash);
        }
        let part = BlockPart {
            parent,
            children: vec![],
            index,
            content,
            copies: [0; TIERS],
            counted_at: [0; TIERS],
        };
        self.parts.insert(hash, part);
        true
    }

    /// Returns the local hash of the index block that a part completes.
    fn block_hash(
        &self,
        parent: Option<EngineHash>,
        run: &StoredRun<'_>,
        input: PartInput<'_>,
    ) -> Option<LocalHash> {
        // The parts are collected from the last to the first.
        let mut parts = vec![input];
        let mut next = parent;
        while parts.len() < self.parts_per_block() {
            let part = self.parts.get(&next?)?;
            let PartContent::Tokens { ids, objects } = &part.content else {
                return None;
            };
            // Bigrams overlap: the last token of one part is the first of the next.
            parts.push(PartInput {
                ids: &ids[..self.engine_size.tokens()],
                objects,
            });
            next = part.parent;
        }
        let tokens: Vec<u32> = parts
            .iter()
            .rev()
            .flat_map(|part| part.ids.iter().copied())
            .collect();
        let mut all: Vec<u64> = Vec::new();
        for part in parts.iter().rev() {
            // An object that continues in the next part is counted once.
            let continues = all.last().is_some() && all.last() == part.objects.first();
            all.extend(&part.objects[usize::from(continues)..]);
        }
        local_hash(&tokens, self.index_size, run, all)
    }

    /// Counts one more copy of a part. Returns true if it is the first one in this tier.
    fn add_copy(&mut self, hash: EngineHash, tier: StorageTier, events: &mut IndexEvents) -> bool {
        let Some(part) = self.parts.get_mut(&hash) else {
            return false;
        };
        let copies = &mut part.copies[tier as usize];
        let counted = &mut part.counted_at[tier as usize];
        let first = *copies == 0;
        let confirmed = std::mem::replace(counted, self.losses) != self.losses;
        *copies = if first || confirmed {
            1
        } else {
            copies.saturating_add(1)
        };
        if first || confirmed {
            self.report_from(hash, events);
        }
        first
    }

    /// Reports the complete index blocks that contain a part, and those that follow.
    fn report_from(&mut self, hash: EngineHash, events: &mut IndexEvents) {
        let mut open = vec![hash];
        while let Some(hash) = open.pop() {
            let Some(part) = self.parts.get(&hash) else {
                continue;
            };
            if part.block().is_none() {
                open.extend(part.children.iter().rev());
                continue;
            }
            let was_reported = part.block().is_some_and(IndexBlock::is_reported);
            for tier in StorageTier::ALL {
                self.report(hash, tier, events);
            }
            let Some(part) = self.parts.get(&hash) else {
                continue;
            };
            if !was_reported && part.block().is_some_and(IndexBlock::is_reported) {
                open.extend(part.children.iter().rev());
            }
        }
    }

    /// Reports one index block in one tier, if it is new there and its parent is reported.
    fn report(&mut self, hash: EngineHash, tier: StorageTier, events: &mut IndexEvents) {
        let Some((before, held, unconfirmed)) = self.block_status(hash, tier) else {
            return;
        };
        if !held || before.is_some_and(|before| !self.is_reported(before)) {
            return;
        }
        let Some(block) = self.parts.get_mut(&hash).and_then(BlockPart::block_mut) else {
            return;
        };
        let is_reported = &mut block.reported[tier as usize];
        let counted = &mut block.confirmed_at[tier as usize];
        // After a loss, a repeated store confirms the block in the index.
        let is_confirmed = *counted != self.losses && !unconfirmed;
        if *is_reported && !is_confirmed {
            return;
        }
        *is_reported = true;
        *counted = self.losses;
        let block = StoredBlock {
            engine: hash,
            local: block.local,
        };
        events.stored(before, block, tier);
    }

    fn is_reported(&self, hash: EngineHash) -> bool {
        self.parts
            .get(&hash)
            .and_then(BlockPart::block)
            .is_some_and(IndexBlock::is_reported)
    }

    /// Returns the state of the index block that ends with a part: its parent, whether the tier
    /// holds all parts, and whether any part is unconfirmed since the last loss. On the device,
    /// storing the last part confirms the parts before it.
    fn block_status(
        &self,
        hash: EngineHash,
        tier: StorageTier,
    ) -> Option<(Option<EngineHash>, bool, bool)> {
        let mut held = true;
        let mut unconfirmed = false;
        let mut next = Some(hash);
        for at in 0..self.parts_per_block() {
            let part = self.parts.get(&next?)?;
            held &= part.copies[tier as usize] > 0;
            unconfirmed |= part.counted_at[tier as usize] != self.losses
                && (at == 0 || tier != StorageTier::Device);
            next = part.parent;
        }
        Some((next, held, unconfirmed))
    }

    /// Removes one copy of each part from a tier.
    pub(super) fn remove(&mut self, hashes: &[EngineHash], tier: StorageTier) -> ResizedEvents {
        let mut events = IndexEvents::default();
        let mut outcome = ApplyOutcome::Ok;
        for &hash in hashes {
            let part = self
                .parts
                .get_mut(&hash)
                .filter(|part| part.copies[tier as usize] > 0);
            let Some(part) = part else {
                outcome = ApplyOutcome::BlockNotFound;
                continue;
            };
            part.copies[tier as usize] -= 1;
            if part.copies[tier as usize] == 0 {
                self.retract_from(hash, tier, &mut events);
                self.prune(hash);
            }
        }
        ResizedEvents {
            events: events.0,
            outcome,
        }
    }

    /// Retracts the index blocks that contain a part.
    fn retract_from(&mut self, hash: EngineHash, tier: StorageTier, events: &mut IndexEvents) {
        let mut open = vec![hash];
        while let Some(hash) = open.pop() {
            let Some(part) = self.parts.get_mut(&hash) else {
                continue;
            };
            match &mut part.content {
                PartContent::Tokens { .. } => open.extend(part.children.iter().rev()),
                PartContent::Whole(block) if block.reported[tier as usize] => {
                    block.reported[tier as usize] = false;
                    events.removed(hash, tier);
                }
                PartContent::Whole(_) => {}
            }
        }
    }

    /// Removes a part without copies and children, and its ancestors that were retained only for
    /// it.
    fn prune(&mut self, hash: EngineHash) {
        let mut next = Some(hash);
        while let Some(hash) = next {
            let Some(part) = self.parts.get(&hash) else {
                return;
            };
            if part.has_copies() || !part.children.is_empty() {
                return;
            }
            next = part.parent;
            self.parts.remove(&hash);
            if let Some(parent) = next.and_then(|parent| self.parts.get_mut(&parent)) {
                parent.children.retain(|child| *child != hash);
            }
        }
    }

    /// Removes a part whose hash was reused for another block, with all its descendants.
    fn purge(&mut self, hash: EngineHash, events: &mut IndexEvents) {
        let before = self.parts.get(&hash).and_then(|part| part.parent);
        if let Some(parent) = before.and_then(|parent| self.parts.get_mut(&parent)) {
            parent.children.retain(|child| *child != hash);
        }
        let mut open = vec![hash];
        while let Some(hash) = open.pop() {
            let Some(part) = self.parts.remove(&hash) else {
                continue;
            };
            if let Some(block) = part.block() {
                for tier in StorageTier::ALL
                    .into_iter()
                    .filter(|tier| block.reported[*tier as usize])
                {
                    events.removed(hash, tier);
                }
            }
            open.extend(part.children);
        }
        if let Some(before) = before {
            self.prune(before);
        }
    }

    /// Records that events were permanently lost. When a part is stored after a loss, its copies
    /// are counted from one again, as in the index.
    pub(super) fn record_loss(&mut self, gaps: u32) {
        self.losses = gaps;
    }

    /// Discards parts of blocks that the index presumes gone, unless they were stored since or
    /// belong to other blocks. The index does not know parts that never completed a block. Such
    /// parts at the end of a chain are discarded by their own age. Returns the discarded parts.
    pub(super) fn discard_blocks(
        &mut self,
        evicted: &PurgedBlocks,
    ) -> Vec<(EngineHash, StorageTier)> {
        for (hash, tier) in &evicted.blocks {
            let Some(part) = self.parts.get_mut(hash) else {
                continue;
            };
            if part.counted_at[*tier as usize] < evicted.before_gap[*tier as usize] {
                part.copies[*tier as usize] = 0;
            }
            if let Some(block) = part.block_mut() {
                block.reported[*tier as usize] = false;
            }
        }
        let named = evicted.blocks.iter().map(|(hash, _)| *hash);
        let is_end = |part: &BlockPart| part.children.is_empty() && part.block().is_none();
        let ends = self
            .parts
            .iter()
            .filter(|(_, part)| is_end(part))
            .map(|(hash, _)| *hash);
        let mut open: Vec<EngineHash> = named.chain(ends).collect();
        let mut discarded = Vec::new();
        while let Some(hash) = open.pop() {
            let Some(part) = self
                .parts
                .get_mut(&hash)
                .filter(|part| part.children.is_empty())
            else {
                continue;
            };
            if part.block().is_none() {
                for tier in StorageTier::ALL.into_iter().filter(|tier| {
                    part.counted_at[*tier as usize] < evicted.before_gap[*tier as usize]
                }) {
                    if std::mem::take(&mut part.copies[tier as usize]) > 0 {
                        discarded.push((hash, tier));
                    }
                }
            }
            if part.has_copies() {
                continue;
            }
            let before = part.parent;
            self.parts.remove(&hash);
            if let Some(parent) = before.and_then(|parent| self.parts.get_mut(&parent)) {
                parent.children.retain(|child| *child != hash);
            }
            open.extend(before);
        }
        discarded
    }

    #[cfg(test)]
    pub(super) fn holds(&self, hash: EngineHash, tier: StorageTier) -> bool {
        self.parts
            .get(&hash)
            .is_some_and(|part| part.copies[tier as usize] > 0)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }
}
