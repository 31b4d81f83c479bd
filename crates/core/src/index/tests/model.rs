//! Naive model of the index: per rank, a map from hash to prefix and copies, a map of orphans, and
//! the holdings of each cache group.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{EngineHash, LocalHash, StorageTier};
use crate::index::{ApplyOutcome, BlockCounts, GroupNeed, KvEvent, StoredBlock, TierBlocks};

#[derive(Clone, Debug, Default)]
pub(super) struct ModelBlock {
    pub(super) path: Vec<LocalHash>,
    copies: ModelCopies,
}

#[derive(Clone, Debug)]
pub(super) struct ModelOrphan {
    pub(super) parent: EngineHash,
    pub(super) local: LocalHash,
    copies: ModelCopies,
}

#[derive(Clone, Debug, Default)]
struct ModelCopies {
    count: [u64; 4],
    stale: [bool; 4],
}

impl ModelCopies {
    /// Adds a copy. Returns whether it is the first one.
    fn add(&mut self, tier: StorageTier) -> bool {
        let tier = tier as usize;
        let first = self.count[tier] == 0;
        self.count[tier] = if self.stale[tier] {
            1
        } else {
            self.count[tier] + 1
        };
        self.stale[tier] = false;
        first
    }

    /// Removes a copy. Returns whether there was one.
    fn remove(&mut self, tier: StorageTier) -> bool {
        let tier = tier as usize;
        if self.count[tier] == 0 {
            return false;
        }
        self.count[tier] -= 1;
        self.stale[tier] &= self.count[tier] > 0;
        true
    }

    fn mark_stale(&mut self) {
        self.stale = self.count.map(|count| count > 0);
    }

    fn any(&self) -> bool {
        self.count.iter().any(|count| *count > 0)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rank {
    pub(super) blocks: BTreeMap<EngineHash, ModelBlock>,
    pub(super) orphans: BTreeMap<EngineHash, ModelOrphan>,
    groups: BTreeMap<u32, Group>,
}

#[derive(Clone, Debug)]
struct Group {
    need: GroupNeed,
    shares: BTreeMap<EngineHash, ModelCopies>,
}

impl Rank {
    pub(super) fn apply(&mut self, event: &KvEvent) -> ApplyOutcome {
        match event {
            KvEvent::Cleared => {
                *self = Rank::default();
                ApplyOutcome::Ok
            }
            KvEvent::Removed { blocks, tier } => {
                let all = blocks
                    .iter()
                    .filter(|engine| !self.remove(**engine, *tier))
                    .count()
                    == 0;
                if all {
                    ApplyOutcome::Ok
                } else {
                    ApplyOutcome::BlockNotFound
                }
            }
            KvEvent::Stored {
                parent,
                blocks,
                tier,
            } => match parent {
                None => self.store(Vec::new(), blocks, *tier),
                Some(parent) => match self.blocks.get(parent) {
                    Some(block) => self.store(block.path.clone(), blocks, *tier),
                    None if *tier == StorageTier::Device => ApplyOutcome::ParentNotFound,
                    None => self.store_orphans(*parent, blocks, *tier),
                },
            },
            KvEvent::GroupStored {
                group,
                need,
                blocks,
            } => self.store_group(*group, *need, blocks),
            KvEvent::GroupRemoved { group, blocks } => {
                let Some(group) = self.groups.get_mut(group) else {
                    return ApplyOutcome::BlockNotFound;
                };
                let mut outcome = ApplyOutcome::Ok;
                for engine in blocks {
                    if !group
                        .shares
                        .get_mut(engine)
                        .is_some_and(|share| share.remove(StorageTier::Device))
                    {
                        outcome = ApplyOutcome::BlockNotFound;
                    }
                    group.shares.retain(|_, share| share.any());
                }
                outcome
            }
        }
    }

    fn remove(&mut self, engine: EngineHash, tier: StorageTier) -> bool {
        let found = match (self.blocks.get_mut(&engine), self.orphans.get_mut(&engine)) {
            (Some(block), _) => block.copies.remove(tier),
            (None, Some(orphan)) => orphan.copies.remove(tier),
            (None, None) => false,
        };
        self.blocks.retain(|_, block| block.copies.any());
        self.orphans.retain(|_, orphan| orphan.copies.any());
        found
    }

    fn store(
        &mut self,
        mut path: Vec<LocalHash>,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        let mut outcome = if blocks.is_empty() {
            ApplyOutcome::Ok
        } else {
            ApplyOutcome::DuplicateStore
        };
        for block in blocks {
            path.push(block.local);
            if let Some(orphan) = self
                .orphans
                .remove(&block.engine)
                .filter(|orphan| orphan.local == block.local)
            {
                self.blocks.insert(
                    block.engine,
                    ModelBlock {
                        path: path.clone(),
                        copies: orphan.copies,
                    },
                );
                outcome = ApplyOutcome::Ok;
            }
            let entry = self.blocks.entry(block.engine).or_default();
            if entry.path != path {
                *entry = ModelBlock {
                    path: path.clone(),
                    ..ModelBlock::default()
                };
            }
            if entry.copies.add(tier) {
                outcome = ApplyOutcome::Ok;
            }
        }
        while let Some(child) = self
            .orphans
            .iter()
            .find(|(_, orphan)| self.blocks.contains_key(&orphan.parent))
        {
            let engine = *child.0;
            let orphan = child.1.clone();
            let mut path = self.blocks[&orphan.parent].path.clone();
            path.push(orphan.local);
            self.orphans.remove(&engine);
            self.blocks.insert(
                engine,
                ModelBlock {
                    path,
                    copies: orphan.copies,
                },
            );
        }
        outcome
    }

    fn store_orphans(
        &mut self,
        mut parent: EngineHash,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        for (at, block) in blocks.iter().enumerate() {
            let known = self
                .blocks
                .get(&block.engine)
                .filter(|held| held.path.last() == Some(&block.local));
            if let Some(held) = known {
                let before = held.path[..held.path.len() - 1].to_vec();
                let outcome = self.store(before, &blocks[at..], tier);
                return if at == 0 {
                    outcome
                } else {
                    ApplyOutcome::ParentAwaited
                };
            }
            self.blocks.remove(&block.engine);
            let orphan = ModelOrphan {
                parent,
                local: block.local,
                copies: ModelCopies::default(),
            };
            let waiting = self
                .orphans
                .entry(block.engine)
                .or_insert_with(|| orphan.clone());
            if (waiting.parent, waiting.local) != (orphan.parent, orphan.local) {
                *waiting = orphan;
            }
            waiting.copies.add(tier);
            parent = block.engine;
        }
        if blocks.is_empty() {
            ApplyOutcome::Ok
        } else {
            ApplyOutcome::ParentAwaited
        }
    }

    fn store_group(&mut self, id: u32, need: GroupNeed, blocks: &[EngineHash]) -> ApplyOutcome {
        let group = self.groups.entry(id).or_insert(Group {
            need,
            shares: BTreeMap::new(),
        });
        group.need = need;
        let added = blocks
            .iter()
            .filter(|engine| {
                group
                    .shares
                    .entry(**engine)
                    .or_default()
                    .add(StorageTier::Device)
            })
            .count();
        // Rules are assigned in the order in which groups are announced. The outcome does not show
        // which one exceeds the limit, so scripts stay below it.
        if added > 0 || blocks.is_empty() {
            ApplyOutcome::Ok
        } else {
            ApplyOutcome::DuplicateStore
        }
    }

    pub(super) fn mark_stale(&mut self) {
        self.blocks
            .values_mut()
            .for_each(|block| block.copies.mark_stale());
        self.orphans
            .values_mut()
            .for_each(|orphan| orphan.copies.mark_stale());
        self.groups
            .values_mut()
            .flat_map(|group| group.shares.values_mut())
            .for_each(ModelCopies::mark_stale);
    }

    /// Removes blocks that were purged. Only stale blocks may be purged.
    pub(super) fn remove_purged(&mut self, purged: &[(EngineHash, StorageTier)]) {
        for (engine, tier) in purged {
            let located = self.blocks.get_mut(engine).map(|block| &mut block.copies);
            let copies = located
                .or_else(|| {
                    self.orphans
                        .get_mut(engine)
                        .map(|orphan| &mut orphan.copies)
                })
                .unwrap();
            assert!(
                copies.stale[*tier as usize],
                "{engine:?} was counted since the gap"
            );
            copies.count[*tier as usize] = 0;
            copies.stale[*tier as usize] = false;
        }
        self.blocks.retain(|_, block| block.copies.any());
        self.orphans.retain(|_, orphan| orphan.copies.any());
    }

    /// Removes the shares of groups that `is_held` rejects.
    pub(super) fn retain_shares(&mut self, is_held: impl Fn(u32, EngineHash) -> bool) {
        for (id, group) in &mut self.groups {
            group.shares.retain(|engine, _| is_held(*id, *engine));
        }
    }

    pub(super) fn overlap(&self, prompt: &[LocalHash]) -> TierBlocks {
        let holds = |blocks: usize, tier: StorageTier| {
            self.blocks.values().any(|block| {
                block.path == prompt[..blocks] && block.copies.count[tier as usize] > 0
            })
        };
        let mut reached = 0;
        let mut counts = [0u32; 4];
        for tier in StorageTier::ALL {
            while reached < prompt.len() && holds(reached + 1, tier) {
                reached += 1;
                counts[tier as usize] += 1;
            }
        }
        let max_blocks = counts[0].min(prompt.len().saturating_sub(1) as u32);
        let reusable = (1..=max_blocks)
            .rev()
            .find(|blocks| self.serves(&prompt[..*blocks as usize]))
            .unwrap_or(0);
        if !self.groups.is_empty() && reusable < counts[0] {
            return TierBlocks {
                device: reusable,
                ..TierBlocks::default()
            };
        }
        TierBlocks {
            device: counts[0],
            host: counts[1],
            disk: counts[2],
            external: counts[3],
        }
    }

    /// Returns whether all groups hold the required blocks of a prefix.
    fn serves(&self, prefix: &[LocalHash]) -> bool {
        self.groups.values().all(|group| {
            let GroupNeed::Trailing { blocks, stride } = group.need else {
                return false;
            };
            let with_same_need = || {
                self.groups
                    .values()
                    .filter(|other| other.need == group.need)
            };
            let stride = stride.get() as usize;
            let all = prefix.len() / stride;
            let required = all.saturating_sub(blocks as usize)..all;
            prefix.len().is_multiple_of(stride)
                && required.into_iter().all(|block| {
                    let of_block = self
                        .blocks
                        .iter()
                        .filter(|(_, held)| held.path == prefix[..(block + 1) * stride]);
                    of_block.into_iter().any(|(engine, _)| {
                        with_same_need().all(|other| other.shares.contains_key(engine))
                    })
                })
        })
    }

    pub(super) fn counts(&self) -> BlockCounts {
        let held = |tier: usize| {
            let held = self
                .blocks
                .values()
                .filter(|block| block.copies.count[tier] > 0)
                .map(|block| &block.path);
            let waiting = self
                .orphans
                .values()
                .filter(|orphan| orphan.copies.count[tier] > 0)
                .count();
            (held.collect::<BTreeSet<_>>().len() + waiting) as u64
        };
        let copies = self
            .blocks
            .values()
            .map(|block| &block.copies)
            .chain(self.orphans.values().map(|orphan| &orphan.copies));
        BlockCounts {
            device: held(0),
            host: held(1),
            disk: held(2),
            external: held(3),
            copies: copies.flat_map(|copies| copies.count).sum(),
            waiting: self.orphans.len() as u64,
        }
    }
}
