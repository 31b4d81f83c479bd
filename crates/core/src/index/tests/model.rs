//! Naive model of the index: per rank, a map from hash to prefix and copies, a map of orphans, and
//! the holdings of each cache group.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{EngineHash, LocalHash, StorageTier};
use crate::index::{ApplyOutcome, BlockCounts, GroupNeed, KvEvent, StoredBlock, TierBlocks};

#[derive(Clone, Debug, Default)]
pub(super) struct Name {
    pub(super) path: Vec<LocalHash>,
    copies: Copies,
}

#[derive(Clone, Debug)]
pub(super) struct Apart {
    pub(super) parent: EngineHash,
    pub(super) local: LocalHash,
    copies: Copies,
}

#[derive(Clone, Debug, Default)]
struct Copies {
    count: [u64; 4],
    stale_layers: [bool; 4],
}

impl Copies {
    /// Adds a copy. Returns whether it is the first one.
    fn add(&mut self, tier: StorageTier) -> bool {
        let tier = tier as usize;
        let first = self.count[tier] == 0;
        self.count[tier] = if self.stale_layers[tier] {
            1
        } else {
            self.count[tier] + 1
        };
        self.stale_layers[tier] = false;
        first
    }

    /// Removes a copy. Returns whether there was one.
    fn take(&mut self, tier: StorageTier) -> bool {
        let tier = tier as usize;
        if self.count[tier] == 0 {
            return false;
        }
        self.count[tier] -= 1;
        self.stale_layers[tier] &= self.count[tier] > 0;
        true
    }

    fn doubt(&mut self) {
        self.stale_layers = self.count.map(|count| count > 0);
    }

    fn any(&self) -> bool {
        self.count.iter().any(|count| *count > 0)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rank {
    pub(super) names: BTreeMap<EngineHash, Name>,
    pub(super) waiting: BTreeMap<EngineHash, Apart>,
    groups: BTreeMap<u32, Group>,
}

#[derive(Clone, Debug)]
struct Group {
    need: GroupNeed,
    shares: BTreeMap<EngineHash, Copies>,
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
                Some(parent) => match self.names.get(parent) {
                    Some(name) => self.store(name.path.clone(), blocks, *tier),
                    None if *tier == StorageTier::Device => ApplyOutcome::ParentNotFound,
                    None => self.store_apart(*parent, blocks, *tier),
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
                        .is_some_and(|share| share.take(StorageTier::Device))
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
        let found = match (self.names.get_mut(&engine), self.waiting.get_mut(&engine)) {
            (Some(name), _) => name.copies.take(tier),
            (None, Some(orphan)) => orphan.copies.take(tier),
            (None, None) => false,
        };
        self.names.retain(|_, name| name.copies.any());
        self.waiting.retain(|_, orphan| orphan.copies.any());
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
                .waiting
                .remove(&block.engine)
                .filter(|orphan| orphan.local == block.local)
            {
                self.names.insert(
                    block.engine,
                    Name {
                        path: path.clone(),
                        copies: orphan.copies,
                    },
                );
                outcome = ApplyOutcome::Ok;
            }
            let name = self.names.entry(block.engine).or_default();
            if name.path != path {
                *name = Name {
                    path: path.clone(),
                    ..Name::default()
                };
            }
            if name.copies.add(tier) {
                outcome = ApplyOutcome::Ok;
            }
        }
        while let Some(child) = self
            .waiting
            .iter()
            .find(|(_, orphan)| self.names.contains_key(&orphan.parent))
        {
            let engine = *child.0;
            let orphan = child.1.clone();
            let mut path = self.names[&orphan.parent].path.clone();
            path.push(orphan.local);
            self.waiting.remove(&engine);
            self.names.insert(
                engine,
                Name {
                    path,
                    copies: orphan.copies,
                },
            );
        }
        outcome
    }

    fn store_apart(
        &mut self,
        mut parent: EngineHash,
        blocks: &[StoredBlock],
        tier: StorageTier,
    ) -> ApplyOutcome {
        for (at, block) in blocks.iter().enumerate() {
            let known = self
                .names
                .get(&block.engine)
                .filter(|name| name.path.last() == Some(&block.local));
            if let Some(name) = known {
                let before = name.path[..name.path.len() - 1].to_vec();
                let outcome = self.store(before, &blocks[at..], tier);
                return if at == 0 {
                    outcome
                } else {
                    ApplyOutcome::ParentAwaited
                };
            }
            self.names.remove(&block.engine);
            let orphan = Apart {
                parent,
                local: block.local,
                copies: Copies::default(),
            };
            let waiting = self
                .waiting
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

    pub(super) fn doubt(&mut self) {
        self.names.values_mut().for_each(|name| name.copies.doubt());
        self.waiting
            .values_mut()
            .for_each(|orphan| orphan.copies.doubt());
        self.groups
            .values_mut()
            .flat_map(|group| group.shares.values_mut())
            .for_each(Copies::doubt);
    }

    /// Removes blocks that were purged. Only stale blocks may be purged.
    pub(super) fn forget(&mut self, names: &[(EngineHash, StorageTier)]) {
        for (engine, tier) in names {
            let placed = self.names.get_mut(engine).map(|name| &mut name.copies);
            let copies = placed
                .or_else(|| {
                    self.waiting
                        .get_mut(engine)
                        .map(|orphan| &mut orphan.copies)
                })
                .unwrap();
            assert!(
                copies.stale_layers[*tier as usize],
                "{engine:?} was counted since"
            );
            copies.count[*tier as usize] = 0;
            copies.stale_layers[*tier as usize] = false;
        }
        self.names.retain(|_, name| name.copies.any());
        self.waiting.retain(|_, orphan| orphan.copies.any());
    }

    /// Keeps only these shares of the groups.
    pub(super) fn keep_shares(&mut self, is_left: impl Fn(u32, EngineHash) -> bool) {
        for (id, group) in &mut self.groups {
            group.shares.retain(|engine, _| is_left(*id, *engine));
        }
    }

    pub(super) fn overlap(&self, prompt: &[LocalHash]) -> TierBlocks {
        let holds = |blocks: usize, tier: StorageTier| {
            self.names
                .values()
                .any(|name| name.path == prompt[..blocks] && name.copies.count[tier as usize] > 0)
        };
        let mut reached = 0;
        let mut counts = [0u32; 4];
        for tier in StorageTier::ALL {
            while reached < prompt.len() && holds(reached + 1, tier) {
                reached += 1;
                counts[tier as usize] += 1;
            }
        }
        let most = counts[0].min(prompt.len().saturating_sub(1) as u32);
        let reusable = (1..=most)
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
            let alike = || {
                self.groups
                    .values()
                    .filter(|other| other.need == group.need)
            };
            let stride = stride.get() as usize;
            let all = prefix.len() / stride;
            let wanted = all.saturating_sub(blocks as usize)..all;
            prefix.len().is_multiple_of(stride)
                && wanted.into_iter().all(|block| {
                    let of_block = self
                        .names
                        .iter()
                        .filter(|(_, name)| name.path == prefix[..(block + 1) * stride]);
                    of_block
                        .into_iter()
                        .any(|(engine, _)| alike().all(|other| other.shares.contains_key(engine)))
                })
        })
    }

    pub(super) fn counts(&self) -> BlockCounts {
        let held = |tier: usize| {
            let held = self
                .names
                .values()
                .filter(|name| name.copies.count[tier] > 0)
                .map(|name| &name.path);
            let waiting = self
                .waiting
                .values()
                .filter(|orphan| orphan.copies.count[tier] > 0)
                .count();
            (held.collect::<BTreeSet<_>>().len() + waiting) as u64
        };
        let copies = self
            .names
            .values()
            .map(|name| &name.copies)
            .chain(self.waiting.values().map(|orphan| &orphan.copies));
        BlockCounts {
            device: held(0),
            host: held(1),
            disk: held(2),
            external: held(3),
            copies: copies.flat_map(|copies| copies.count).sum(),
            waiting: self.waiting.len() as u64,
        }
    }
}
