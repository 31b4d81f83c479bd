//! A dump as the events that lead to it. A block that is not held, but something behind it is, has no name of the
//! engine's; it is stored under a name nobody uses and removed again, so that the blocks behind it get their place.

use std::collections::HashSet;
use std::sync::Arc;

use super::content::{ApartName, PlacedName, RankDump};
use crate::block::EngineHash;
use crate::index::event::{KvEvent, StoredBlock};
use crate::tier::Tier;

/// Most blocks of one event.
const LONGEST: usize = 512;

/// The name by which the events speak of a block, and where it is stored first.
#[derive(Clone, Copy)]
struct Spoken {
    engine: EngineHash,
    tier: Tier,
    /// Whether the name is only made up.
    gap: bool,
}

/// How many copies to tell of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::index) enum Telling {
    /// All.
    Copies,
    /// One of each.
    Once,
}

impl Telling {
    fn times(self, copies: u32) -> u32 {
        if self == Telling::Once { 1 } else { copies }
    }
}

impl RankDump {
    /// The events that give an empty rank what this one holds: parents before children, then further tiers, names and
    /// copies. Only doubts are left out, since no event tells of them.
    pub fn events(&self) -> impl Iterator<Item = KvEvent> {
        self.tell(Telling::Copies)
    }

    pub(in crate::index) fn tell(&self, telling: Telling) -> impl Iterator<Item = KvEvent> {
        let spoken: Arc<[Spoken]> = self.spoken().into();
        let groups = (0..self.groups.len()).flat_map(move |group| self.shares_of(group, telling));
        let singles = {
            let spoken = spoken.clone();
            self.names
                .iter()
                .flat_map(move |name| self.singles(name, &spoken, telling))
        };
        let mut gaps: Vec<KvEvent> = Vec::new();
        for name in spoken.iter().filter(|name| name.gap) {
            match gaps.last_mut() {
                Some(KvEvent::Removed { blocks, .. }) if blocks.len() < LONGEST => {
                    blocks.push(name.engine)
                }
                _ => gaps.push(KvEvent::Removed {
                    blocks: vec![name.engine],
                    tier: name.tier,
                }),
            }
        }
        let waiting = self
            .waiting
            .iter()
            .flat_map(move |name| apart(name, telling));
        groups
            .chain(self.placed(spoken))
            .chain(singles)
            .chain(gaps)
            .chain(waiting)
    }

    /// What each block is called.
    fn spoken(&self) -> Vec<Spoken> {
        let mut spoken: Vec<Option<Spoken>> = vec![None; self.blocks.len()];
        for name in self.names.iter().rev() {
            let tier = name
                .copies
                .held()
                .next()
                .map_or(Tier::Device, |(tier, _)| tier);
            spoken[name.block as usize] = Some(Spoken {
                engine: name.engine,
                tier,
                gap: false,
            });
        }
        let used: HashSet<EngineHash> = if spoken.iter().all(Option::is_some) {
            HashSet::new()
        } else {
            let waiting = self
                .waiting
                .iter()
                .flat_map(|name| [name.engine, name.parent]);
            let shares = self.shares.iter().map(|share| share.engine);
            self.names
                .iter()
                .map(|name| name.engine)
                .chain(waiting)
                .chain(shares)
                .collect()
        };
        let mut unused = (1..=u64::MAX)
            .rev()
            .map(EngineHash)
            .filter(|engine| !used.contains(engine));
        let mut gap = || Spoken {
            engine: unused.next().unwrap_or(EngineHash(0)),
            tier: Tier::Device,
            gap: true,
        };
        spoken
            .into_iter()
            .map(|name| name.unwrap_or_else(&mut gap))
            .collect()
    }

    /// Stores every block under the name it is called by, in each tier of that name.
    fn placed(&self, spoken: Arc<[Spoken]>) -> impl Iterator<Item = KvEvent> {
        let mut also = vec![[false; 4]; self.blocks.len()];
        for name in &self.names {
            let first = spoken[name.block as usize];
            for (tier, _) in name
                .copies
                .held()
                .filter(|(tier, _)| first.engine == name.engine && first.tier != *tier)
            {
                also[name.block as usize][tier as usize] = true;
            }
        }
        let also: Arc<[[bool; 4]]> = also.into();
        let first = self.runs(spoken.clone(), |block, _| Some(block.tier));
        let more = Tier::ALL.into_iter().flat_map(move |tier| {
            let also = also.clone();
            self.runs(spoken.clone(), move |_, at| {
                also[at][tier as usize].then_some(tier)
            })
        });
        first.chain(more)
    }

    /// Stores blocks that follow one another and have the same tier by one event.
    fn runs(
        &self,
        spoken: Arc<[Spoken]>,
        tier_of: impl Fn(Spoken, usize) -> Option<Tier>,
    ) -> impl Iterator<Item = KvEvent> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let tier_at = |at: usize| tier_of(*spoken.get(at)?, at);
            next = (next..spoken.len()).find(|at| tier_at(*at).is_some())?;
            let tier = tier_at(next)?;
            let parent = self.blocks[next]
                .parent
                .map(|parent| spoken[parent as usize].engine);
            let mut blocks = Vec::new();
            loop {
                blocks.push(StoredBlock {
                    engine: spoken[next].engine,
                    local: self.blocks[next].local,
                });
                next += 1;
                let follows = self
                    .blocks
                    .get(next)
                    .is_some_and(|block| block.parent == Some(next as u32 - 1));
                if !follows || tier_at(next) != Some(tier) || blocks.len() == LONGEST {
                    return Some(KvEvent::Stored {
                        parent,
                        blocks,
                        tier,
                    });
                }
            }
        })
    }

    /// What is left to say of a name after its block got its place: the tiers of a further name, and further copies.
    fn singles(&self, name: &PlacedName, spoken: &[Spoken], telling: Telling) -> Vec<KvEvent> {
        let block = self.blocks[name.block as usize];
        let told = u32::from(spoken[name.block as usize].engine == name.engine);
        let parent = block.parent.map(|parent| spoken[parent as usize].engine);
        let blocks = [StoredBlock {
            engine: name.engine,
            local: block.local,
        }];
        let left = name
            .copies
            .held()
            .flat_map(|(tier, copies)| (told..telling.times(copies)).map(move |_| tier));
        left.map(|tier| KvEvent::Stored {
            parent,
            blocks: blocks.to_vec(),
            tier,
        })
        .collect()
    }

    fn shares_of(&self, group: usize, telling: Telling) -> Vec<KvEvent> {
        let (id, need) = self.groups[group];
        let held = self
            .shares
            .iter()
            .filter(|share| share.group as usize == group);
        let held = held.flat_map(|share| (0..telling.times(share.copies)).map(|_| share.engine));
        let held: Vec<EngineHash> = held.collect();
        let stored = |blocks: &[EngineHash]| KvEvent::GroupStored {
            group: id,
            need,
            blocks: blocks.to_vec(),
        };
        // One without blocks, for a group that has none.
        std::iter::once(stored(&[]))
            .chain(held.chunks(LONGEST).map(stored))
            .collect()
    }
}

/// Stores of a name without a place.
fn apart(name: &ApartName, telling: Telling) -> Vec<KvEvent> {
    let block = StoredBlock {
        engine: name.engine,
        local: name.local,
    };
    let times = name
        .copies
        .held()
        .flat_map(|(tier, copies)| (0..telling.times(copies)).map(move |_| tier));
    times
        .map(|tier| KvEvent::Stored {
            parent: Some(name.parent),
            blocks: vec![block],
            tier,
        })
        .collect()
}
