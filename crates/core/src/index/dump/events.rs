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
struct EventHash {
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
        let event_hashes: Arc<[EventHash]> = self.event_hashes().into();
        let groups = (0..self.groups.len()).flat_map(move |group| self.group_events(group, replay));
        let further = {
            let event_hashes = event_hashes.clone();
            self.hashes
                .iter()
                .flat_map(move |row| self.further_stores(row, &event_hashes, replay))
        };
        let mut removals: Vec<KvEvent> = Vec::new();
        for hash in event_hashes.iter().filter(|hash| hash.is_placeholder) {
            match removals.last_mut() {
                Some(KvEvent::Removed { blocks, .. }) if blocks.len() < MAX_EVENT_BLOCKS => {
                    blocks.push(hash.engine)
                }
                _ => removals.push(KvEvent::Removed {
                    blocks: vec![hash.engine],
                    tier: hash.tier,
                }),
            }
        }
        let waiting = self
            .orphans
            .iter()
            .flat_map(move |row| orphan_events(row, replay));
        groups
            .chain(self.store_events(event_hashes))
            .chain(further)
            .chain(removals)
            .chain(waiting)
    }

    /// Chooses an engine hash for each block.
    fn event_hashes(&self) -> Vec<EventHash> {
        let mut event_hashes: Vec<Option<EventHash>> = vec![None; self.blocks.len()];
        for row in self.hashes.iter().rev() {
            let tier = row
                .copies
                .held()
                .next()
                .map_or(StorageTier::Device, |(tier, _)| tier);
            event_hashes[row.block as usize] = Some(EventHash {
                engine: row.engine,
                tier,
                is_placeholder: false,
            });
        }
        let used: HashSet<EngineHash> = if event_hashes.iter().all(Option::is_some) {
            HashSet::new()
        } else {
            let waiting = self.orphans.iter().flat_map(|row| [row.engine, row.parent]);
            let shares = self.shares.iter().map(|share| share.engine);
            self.hashes
                .iter()
                .map(|row| row.engine)
                .chain(waiting)
                .chain(shares)
                .collect()
        };
        let mut unused = (1..=u64::MAX)
            .rev()
            .map(EngineHash)
            .filter(|engine| !used.contains(engine));
        let mut placeholder = || EventHash {
            engine: unused.next().unwrap_or(EngineHash(0)),
            tier: StorageTier::Device,
            is_placeholder: true,
        };
        event_hashes
            .into_iter()
            .map(|hash| hash.unwrap_or_else(&mut placeholder))
            .collect()
    }

    /// Returns the events that store every block under its chosen hash, in each tier of that hash.
    fn store_events(&self, event_hashes: Arc<[EventHash]>) -> impl Iterator<Item = KvEvent> {
        let mut further_tiers = vec![[false; 4]; self.blocks.len()];
        for row in &self.hashes {
            let first = event_hashes[row.block as usize];
            for (tier, _) in row
                .copies
                .held()
                .filter(|(tier, _)| first.engine == row.engine && first.tier != *tier)
            {
                further_tiers[row.block as usize][tier as usize] = true;
            }
        }
        let further_tiers: Arc<[[bool; 4]]> = further_tiers.into();
        let first = self.store_runs(event_hashes.clone(), |block, _| Some(block.tier));
        let others = StorageTier::ALL.into_iter().flat_map(move |tier| {
            let further_tiers = further_tiers.clone();
            self.store_runs(event_hashes.clone(), move |_, at| {
                further_tiers[at][tier as usize].then_some(tier)
            })
        });
        first.chain(others)
    }

    /// Returns the events that store blocks in the tier that `tier_of` returns. One event contains
    /// consecutive blocks of the same tier.
    fn store_runs(
        &self,
        event_hashes: Arc<[EventHash]>,
        tier_of: impl Fn(EventHash, usize) -> Option<StorageTier>,
    ) -> impl Iterator<Item = KvEvent> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let tier_at = |at: usize| tier_of(*event_hashes.get(at)?, at);
            next = (next..event_hashes.len()).find(|at| tier_at(*at).is_some())?;
            let tier = tier_at(next)?;
            let parent = self.blocks[next]
                .parent
                .map(|parent| event_hashes[parent as usize].engine);
            let mut blocks = Vec::new();
            loop {
                blocks.push(StoredBlock {
                    engine: event_hashes[next].engine,
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

    /// Returns the events that store the further tiers and copies of an engine hash, whose block
    /// has a location by then.
    fn further_stores(
        &self,
        row: &HashRow,
        event_hashes: &[EventHash],
        replay: CopyReplay,
    ) -> Vec<KvEvent> {
        let block = self.blocks[row.block as usize];
        let already_stored = u32::from(event_hashes[row.block as usize].engine == row.engine);
        let parent = block
            .parent
            .map(|parent| event_hashes[parent as usize].engine);
        let blocks = [StoredBlock {
            engine: row.engine,
            local: block.local,
        }];
        let tiers = row
            .copies
            .held()
            .flat_map(|(tier, copies)| (already_stored..replay.times(copies)).map(move |_| tier));
        tiers
            .map(|tier| KvEvent::Stored {
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

/// Returns the events that store an engine hash whose parent is unknown.
fn orphan_events(row: &OrphanRow, replay: CopyReplay) -> Vec<KvEvent> {
    let block = StoredBlock {
        engine: row.engine,
        local: row.local,
    };
    let times = row
        .copies
        .held()
        .flat_map(|(tier, copies)| (0..replay.times(copies)).map(move |_| tier));
    times
        .map(|tier| KvEvent::Stored {
            parent: Some(row.parent),
            blocks: vec![block],
            tier,
        })
        .collect()
}
