//! Replays a dump as KV events.
//!
//! A block that is not held, but precedes one that is, has no engine hash. It is stored under an
//! unused hash and removed at the end, so that the blocks after it get their location.

use std::collections::HashSet;
use std::sync::Arc;

use super::rank_dump::{HashRow, OrphanRow, RankDump};
use crate::block::{EngineHash, StorageTier};
use crate::index::event::{KvEvent, StoredBlock};

/// Maximum number of blocks per event.
const MAX_EVENT_BLOCKS: usize = 512;

/// Engine hash by which events refer to a block, and the tier of the first store.
#[derive(Clone, Copy)]
struct EventName {
    engine: EngineHash,
    tier: StorageTier,
    /// Whether the hash is a placeholder.
    is_placeholder: bool,
}

/// Number of copies to replay.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::index) enum CopyReplay {
    /// All copies.
    All,
    /// One copy per tier.
    One,
}

impl CopyReplay {
    fn times(self, copies: u32) -> u32 {
        if self == CopyReplay::One { 1 } else { copies }
    }
}

impl RankDump {
    /// Returns the events that give an empty rank this content: parents before children, then
    /// further tiers, hashes and copies. Staleness is lost, because no event carries it.
    pub fn events(&self) -> impl Iterator<Item = KvEvent> {
        self.replay_events(CopyReplay::All)
    }

    pub(in crate::index) fn replay_events(
        &self,
        replay: CopyReplay,
    ) -> impl Iterator<Item = KvEvent> {
        let event_names: Arc<[EventName]> = self.event_names().into();
        let groups = (0..self.groups.len()).flat_map(move |group| self.group_events(group, replay));
        let singles = {
            let event_names = event_names.clone();
            self.hashes
                .iter()
                .flat_map(move |name| self.further_stores(name, &event_names, replay))
        };
        let mut gaps: Vec<KvEvent> = Vec::new();
        for name in event_names.iter().filter(|name| name.is_placeholder) {
            match gaps.last_mut() {
                Some(KvEvent::Removed { blocks, .. }) if blocks.len() < MAX_EVENT_BLOCKS => {
                    blocks.push(name.engine)
                }
                _ => gaps.push(KvEvent::Removed {
                    blocks: vec![name.engine],
                    tier: name.tier,
                }),
            }
        }
        let waiting = self
            .orphans
            .iter()
            .flat_map(move |name| orphan_events(name, replay));
        groups
            .chain(self.store_events(event_names))
            .chain(singles)
            .chain(gaps)
            .chain(waiting)
    }

    /// Chooses the engine hash of each block.
    fn event_names(&self) -> Vec<EventName> {
        let mut event_names: Vec<Option<EventName>> = vec![None; self.blocks.len()];
        for name in self.hashes.iter().rev() {
            let tier = name
                .copies
                .held()
                .next()
                .map_or(StorageTier::Device, |(tier, _)| tier);
            event_names[name.block as usize] = Some(EventName {
                engine: name.engine,
                tier,
                is_placeholder: false,
            });
        }
        let used: HashSet<EngineHash> = if event_names.iter().all(Option::is_some) {
            HashSet::new()
        } else {
            let waiting = self
                .orphans
                .iter()
                .flat_map(|name| [name.engine, name.parent]);
            let shares = self.shares.iter().map(|share| share.engine);
            self.hashes
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
        let mut gap = || EventName {
            engine: unused.next().unwrap_or(EngineHash(0)),
            tier: StorageTier::Device,
            is_placeholder: true,
        };
        event_names
            .into_iter()
            .map(|name| name.unwrap_or_else(&mut gap))
            .collect()
    }

    /// Stores every block under its chosen hash, in each tier of that hash.
    fn store_events(&self, event_names: Arc<[EventName]>) -> impl Iterator<Item = KvEvent> {
        let mut also = vec![[false; 4]; self.blocks.len()];
        for name in &self.hashes {
            let first = event_names[name.block as usize];
            for (tier, _) in name
                .copies
                .held()
                .filter(|(tier, _)| first.engine == name.engine && first.tier != *tier)
            {
                also[name.block as usize][tier as usize] = true;
            }
        }
        let also: Arc<[[bool; 4]]> = also.into();
        let first = self.store_runs(event_names.clone(), |block, _| Some(block.tier));
        let more = StorageTier::ALL.into_iter().flat_map(move |tier| {
            let also = also.clone();
            self.store_runs(event_names.clone(), move |_, at| {
                also[at][tier as usize].then_some(tier)
            })
        });
        first.chain(more)
    }

    /// Stores consecutive blocks of the same tier in one event.
    fn store_runs(
        &self,
        event_names: Arc<[EventName]>,
        tier_of: impl Fn(EventName, usize) -> Option<StorageTier>,
    ) -> impl Iterator<Item = KvEvent> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let tier_at = |at: usize| tier_of(*event_names.get(at)?, at);
            next = (next..event_names.len()).find(|at| tier_at(*at).is_some())?;
            let tier = tier_at(next)?;
            let parent = self.blocks[next]
                .parent
                .map(|parent| event_names[parent as usize].engine);
            let mut blocks = Vec::new();
            loop {
                blocks.push(StoredBlock {
                    engine: event_names[next].engine,
                    local: self.blocks[next].local,
                });
                next += 1;
                let follows = self
                    .blocks
                    .get(next)
                    .is_some_and(|block| block.parent == Some(next as u32 - 1));
                if !follows || tier_at(next) != Some(tier) || blocks.len() == MAX_EVENT_BLOCKS {
                    return Some(KvEvent::Stored {
                        parent,
                        blocks,
                        tier,
                    });
                }
            }
        })
    }

    /// Stores the further tiers and copies of an engine hash after its block has a location.
    fn further_stores(
        &self,
        name: &HashRow,
        event_names: &[EventName],
        replay: CopyReplay,
    ) -> Vec<KvEvent> {
        let block = self.blocks[name.block as usize];
        let told = u32::from(event_names[name.block as usize].engine == name.engine);
        let parent = block
            .parent
            .map(|parent| event_names[parent as usize].engine);
        let blocks = [StoredBlock {
            engine: name.engine,
            local: block.local,
        }];
        let left = name
            .copies
            .held()
            .flat_map(|(tier, copies)| (told..replay.times(copies)).map(move |_| tier));
        left.map(|tier| KvEvent::Stored {
            parent,
            blocks: blocks.to_vec(),
            tier,
        })
        .collect()
    }

    fn group_events(&self, group: usize, replay: CopyReplay) -> Vec<KvEvent> {
        let (id, need) = self.groups[group];
        let held = self
            .shares
            .iter()
            .filter(|share| share.group as usize == group);
        let held = held.flat_map(|share| (0..replay.times(share.copies)).map(|_| share.engine));
        let held: Vec<EngineHash> = held.collect();
        let stored = |blocks: &[EngineHash]| KvEvent::GroupStored {
            group: id,
            need,
            blocks: blocks.to_vec(),
        };
        // One event without blocks announces a group that holds none.
        std::iter::once(stored(&[]))
            .chain(held.chunks(MAX_EVENT_BLOCKS).map(stored))
            .collect()
    }
}

/// Stores an engine hash whose parent is unknown.
fn orphan_events(name: &OrphanRow, replay: CopyReplay) -> Vec<KvEvent> {
    let block = StoredBlock {
        engine: name.engine,
        local: name.local,
    };
    let times = name
        .copies
        .held()
        .flat_map(|(tier, copies)| (0..replay.times(copies)).map(move |_| tier));
    times
        .map(|tier| KvEvent::Stored {
            parent: Some(name.parent),
            blocks: vec![block],
            tier,
        })
        .collect()
}
