//! What the index must say, by the simplest means: per rank a map from name to whole prefix and copies, a map of the names
//! that wait for a parent, and what each cache group holds.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{EngineHash, LocalHash};
use crate::index::{BlockCounts, GroupNeed, KvEvent, Outcome, StoredBlock, TierBlocks};
use crate::tier::Tier;

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
    doubted: [bool; 4],
}

impl Copies {
    /// One more; whether it is the first.
    fn add(&mut self, tier: Tier) -> bool {
        let tier = tier as usize;
        let first = self.count[tier] == 0;
        self.count[tier] = if self.doubted[tier] {
            1
        } else {
            self.count[tier] + 1
        };
        self.doubted[tier] = false;
        first
    }

    /// One less; false if there is none.
    fn take(&mut self, tier: Tier) -> bool {
        let tier = tier as usize;
        if self.count[tier] == 0 {
            return false;
        }
        self.count[tier] -= 1;
        self.doubted[tier] &= self.count[tier] > 0;
        true
    }

    fn doubt(&mut self) {
        self.doubted = self.count.map(|count| count > 0);
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
    pub(super) fn apply(&mut self, event: &KvEvent) -> Outcome {
        match event {
            KvEvent::Cleared => {
                *self = Rank::default();
                Outcome::Ok
            }
            KvEvent::Removed { blocks, tier } => {
                let all = blocks
                    .iter()
                    .filter(|engine| !self.remove(**engine, *tier))
                    .count()
                    == 0;
                if all {
                    Outcome::Ok
                } else {
                    Outcome::BlockNotFound
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
                    None if *tier == Tier::Device => Outcome::ParentNotFound,
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
                    return Outcome::BlockNotFound;
                };
                let mut outcome = Outcome::Ok;
                for engine in blocks {
                    if !group
                        .shares
                        .get_mut(engine)
                        .is_some_and(|share| share.take(Tier::Device))
                    {
                        outcome = Outcome::BlockNotFound;
                    }
                    group.shares.retain(|_, share| share.any());
                }
                outcome
            }
        }
    }

    fn remove(&mut self, engine: EngineHash, tier: Tier) -> bool {
        let found = match (self.names.get_mut(&engine), self.waiting.get_mut(&engine)) {
            (Some(name), _) => name.copies.take(tier),
            (None, Some(apart)) => apart.copies.take(tier),
            (None, None) => false,
        };
        self.names.retain(|_, name| name.copies.any());
        self.waiting.retain(|_, apart| apart.copies.any());
        found
    }

    fn store(&mut self, mut path: Vec<LocalHash>, blocks: &[StoredBlock], tier: Tier) -> Outcome {
        let mut outcome = if blocks.is_empty() {
            Outcome::Ok
        } else {
            Outcome::DuplicateStore
        };
        for block in blocks {
            path.push(block.local);
            if let Some(apart) = self
                .waiting
                .remove(&block.engine)
                .filter(|apart| apart.local == block.local)
            {
                self.names.insert(
                    block.engine,
                    Name {
                        path: path.clone(),
                        copies: apart.copies,
                    },
                );
                outcome = Outcome::Ok;
            }
            let name = self.names.entry(block.engine).or_default();
            if name.path != path {
                *name = Name {
                    path: path.clone(),
                    ..Name::default()
                };
            }
            if name.copies.add(tier) {
                outcome = Outcome::Ok;
            }
        }
        while let Some(child) = self
            .waiting
            .iter()
            .find(|(_, apart)| self.names.contains_key(&apart.parent))
        {
            let (engine, apart) = (*child.0, child.1.clone());
            let mut path = self.names[&apart.parent].path.clone();
            path.push(apart.local);
            self.waiting.remove(&engine);
            self.names.insert(
                engine,
                Name {
                    path,
                    copies: apart.copies,
                },
            );
        }
        outcome
    }

    fn store_apart(
        &mut self,
        mut parent: EngineHash,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> Outcome {
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
                    Outcome::ParentAwaited
                };
            }
            self.names.remove(&block.engine);
            let apart = Apart {
                parent,
                local: block.local,
                copies: Copies::default(),
            };
            let waiting = self
                .waiting
                .entry(block.engine)
                .or_insert_with(|| apart.clone());
            if (waiting.parent, waiting.local) != (apart.parent, apart.local) {
                *waiting = apart;
            }
            waiting.copies.add(tier);
            parent = block.engine;
        }
        if blocks.is_empty() {
            Outcome::Ok
        } else {
            Outcome::ParentAwaited
        }
    }

    fn store_group(&mut self, id: u32, need: GroupNeed, blocks: &[EngineHash]) -> Outcome {
        let group = self.groups.entry(id).or_insert(Group {
            need,
            shares: BTreeMap::new(),
        });
        group.need = need;
        let added = blocks
            .iter()
            .filter(|engine| group.shares.entry(**engine).or_default().add(Tier::Device))
            .count();
        // The classes are given out in the order in which groups were first heard of; which one is too much cannot be told
        // from the outcome alone, so scripts stay below the limit.
        if added > 0 || blocks.is_empty() {
            Outcome::Ok
        } else {
            Outcome::DuplicateStore
        }
    }

    pub(super) fn doubt(&mut self) {
        self.names.values_mut().for_each(|name| name.copies.doubt());
        self.waiting
            .values_mut()
            .for_each(|apart| apart.copies.doubt());
        self.groups
            .values_mut()
            .flat_map(|group| group.shares.values_mut())
            .for_each(Copies::doubt);
    }

    /// These are gone; only what is doubted may be.
    pub(super) fn forget(&mut self, names: &[(EngineHash, Tier)]) {
        for (engine, tier) in names {
            let placed = self.names.get_mut(engine).map(|name| &mut name.copies);
            let copies = placed
                .or_else(|| self.waiting.get_mut(engine).map(|apart| &mut apart.copies))
                .unwrap();
            assert!(
                copies.doubted[*tier as usize],
                "{engine:?} was counted since"
            );
            (copies.count[*tier as usize], copies.doubted[*tier as usize]) = (0, false);
        }
        self.names.retain(|_, name| name.copies.any());
        self.waiting.retain(|_, apart| apart.copies.any());
    }

    /// Of what the groups hold only this is left.
    pub(super) fn keep_shares(&mut self, is_left: impl Fn(u32, EngineHash) -> bool) {
        for (id, group) in &mut self.groups {
            group.shares.retain(|engine, _| is_left(*id, *engine));
        }
    }

    pub(super) fn overlap(&self, prompt: &[LocalHash]) -> TierBlocks {
        let holds = |blocks: usize, tier: Tier| {
            self.names
                .values()
                .any(|name| name.path == prompt[..blocks] && name.copies.count[tier as usize] > 0)
        };
        let mut reached = 0;
        let mut counts = [0u32; 4];
        for tier in Tier::ALL {
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

    /// Whether all groups hold what they need of a prefix.
    fn serves(&self, prefix: &[LocalHash]) -> bool {
        self.groups.values().all(|group| {
            let GroupNeed::Last { blocks, stride } = group.need else {
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
                .filter(|apart| apart.copies.count[tier] > 0)
                .count();
            (held.collect::<BTreeSet<_>>().len() + waiting) as u64
        };
        let copies = self
            .names
            .values()
            .map(|name| &name.copies)
            .chain(self.waiting.values().map(|apart| &apart.copies));
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
