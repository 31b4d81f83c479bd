//! The index: sharded tries and the table of owners.

use std::collections::HashSet;
use std::hint;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};

use super::children::mix;
use super::ids::{BlockLocation, OwnerId};
use super::layers::BlockLayer;
use super::limits::BlockLimits;
use super::overlaps::Overlaps;
use super::owner_table::{DeviceBlockCounts, HybridSlots, OwnerTable};
use super::stats::{EventCursor, IndexStats};
use super::trie::BlockTrie;
use crate::block::{BlockHashes, LocalHash, StorageTier};
use crate::worker::RankSlot;

/// Number of tries in the index. It only has to be large compared with the number of busy threads.
pub(super) const SHARDS: usize = 64;

/// Number of lock attempts before a reader sleeps. They take about 20 us, in which a writer
/// finishes almost any event. Waking a thread takes longer, and costs the writer as much.
const SPIN_TRIES: usize = 1_000;

/// Cached prefixes of all worker ranks.
#[derive(Debug)]
pub struct PrefixIndex {
    pub(super) shards: Box<[RwLock<BlockTrie>]>,
    pub(super) owners: RwLock<OwnerTable>,
}

impl PrefixIndex {
    /// Creates an empty index.
    pub fn new() -> Arc<Self> {
        let shards = (0..SHARDS).map(|_| RwLock::default()).collect();
        Arc::new(Self {
            shards,
            owners: RwLock::default(),
        })
    }

    /// Limits the blocks that the writer of a slot may add. Blocks above the new limit are not
    /// removed.
    pub fn set_limits(&self, slot: RankSlot, limits: BlockLimits) {
        if let Some((_, shared)) = self.owners.read().find(slot) {
            shared.set_limits(limits);
        }
    }

    /// Looks up the cached blocks of a prompt on every slot. `into` is overwritten.
    pub fn query_overlaps(&self, hashes: &BlockHashes, into: &mut Overlaps) {
        into.clear();
        let Some(&first) = hashes.locals().first() else {
            return;
        };
        let trie = read_shard(&self.shards[shard_of(first)]);
        trie.visit_runs(hashes, |start, blocks, owners| {
            into.advance(start, blocks, owners)
        });
        // Under the lock of the trie: an owner id is reused only after it has left all tries.
        let owners = self.owners.read();
        let map = owners.owner_map();
        if map.has_rules() {
            // An engine computes at least the last token of a prompt.
            let max_blocks = hashes.tokens().saturating_sub(1) / hashes.block_size().tokens();
            let max_blocks = u32::try_from(max_blocks).unwrap_or(u32::MAX);
            into.limit_to_reusable(trie.matching_runs(hashes.locals()), map, max_blocks);
        }
        into.set_owner_map(map);
    }

    /// Returns the device blocks of each slot.
    pub fn device_block_counts(&self) -> DeviceBlockCounts {
        self.owners.read().device_block_counts()
    }

    /// Returns the slots whose cache currently has several groups.
    pub fn hybrid_slots(&self) -> HybridSlots {
        HybridSlots::new(self.owners.read().owner_map())
    }

    /// Returns the position in the event stream of a slot, or `None` if the slot has no writer.
    pub fn event_cursor(&self, slot: RankSlot) -> Option<EventCursor> {
        Some(self.owners.read().find(slot)?.1.event_cursor())
    }

    /// Counts the device blocks, and the cache groups' shares of them, that the engine may have
    /// evicted in lost events. Returns `None` if the slot has no writer, or if the writer holds the
    /// lock.
    pub fn stale_block_count(&self, slot: RankSlot) -> Option<u64> {
        let owners = self.owners.read();
        let stale_blocks = owners.find(slot)?.1.stale.try_lock()?;
        Some(stale_blocks.stale_count())
    }

    /// Confirms the leading blocks of a prompt that an engine reported as cached. `sent` is the
    /// cursor at which the request was sent. Has no effect if events were lost since.
    pub fn confirm_cached(
        &self,
        hashes: &BlockHashes,
        blocks: usize,
        slot: RankSlot,
        sent: EventCursor,
    ) {
        let Some(&first) = hashes.locals().first() else {
            return;
        };
        let shard = shard_of(first);
        let trie = self.shards[shard].read();
        let owners = self.owners.read();
        let Some((owner, shared)) = owners.find(slot) else {
            return;
        };
        // A purge holds the lock for long, and this report is then too late.
        let Some(mut stale_blocks) = shared
            .stale
            .try_lock()
            .filter(|stale_blocks| stale_blocks.has_stale())
        else {
            return;
        };
        if shared.event_cursor().gaps != sent.gaps {
            return;
        }
        let mut path = Vec::new();
        trie.trace_path(None, leading_locals(hashes, blocks), &mut path);
        let location = |block| BlockLocation::new(shard, block);
        for &block in &path {
            let fastest = trie
                .layers_of(block, owner)
                .fastest_from(StorageTier::Device);
            fastest
                .into_iter()
                .for_each(|tier| _ = stale_blocks.confirm(location(block), tier));
        }
        let rules = owners.rules(owner).map_or(&[][..], |rules| &rules.rules);
        for (number, rule) in rules.iter().enumerate() {
            let layer = BlockLayer::rule(number);
            for &block in rule.required_blocks(blocks).filter_map(|at| path.get(at)) {
                let layers = trie.layers_of(block, owner);
                if layers.has(StorageTier::Device) && layers.has(layer) {
                    stale_blocks.confirm(location(block), layer);
                }
            }
        }
        stale_blocks.close_confirmed();
    }

    /// Returns whether one of the leading blocks of a prompt was evicted from the device after
    /// `since` and stored again. Returns `None` if the log does not reach back that far.
    pub fn was_reinserted_since(
        &self,
        hashes: &BlockHashes,
        blocks: usize,
        slot: RankSlot,
        since: EventCursor,
    ) -> Option<bool> {
        let Some(&first) = hashes.locals().first() else {
            return Some(false);
        };
        let shard = shard_of(first);
        let trie = self.shards[shard].read();
        let mut path = Vec::new();
        trie.trace_path(None, leading_locals(hashes, blocks), &mut path);
        let path: HashSet<_> = path.into_iter().collect();
        let owners = self.owners.read();
        let log = owners.find(slot)?.1.reinsertions.lock();
        log.was_reinserted_since(since.stores, |location| {
            usize::from(location.shard) == shard && path.contains(&location.block)
        })
    }

    /// Counts the blocks in the index.
    pub fn stats(&self) -> IndexStats {
        let mut stats = IndexStats {
            slots: self.owners.read().stats(),
            ..IndexStats::default()
        };
        for slot in &stats.slots {
            stats.total.device += slot.counts.device;
            stats.total.host += slot.counts.host;
            stats.total.disk += slot.counts.disk;
            stats.total.external += slot.counts.external;
            stats.total.copies += slot.counts.copies;
            stats.total.waiting += slot.counts.waiting;
        }
        for shard in &self.shards {
            let trie = shard.read();
            stats.distinct_blocks += trie.blocks() as u64;
            stats.runs += trie.runs() as u64;
        }
        stats
    }

    /// Counts the leading blocks that an owner holds in any tier.
    pub(super) fn held_prefix(&self, locals: &[LocalHash], owner: OwnerId) -> usize {
        let Some(&first) = locals.first() else {
            return 0;
        };
        let trie = read_shard(&self.shards[shard_of(first)]);
        let runs = trie
            .matching_runs(locals)
            .take_while(|(_, owners)| !owners.layers(owner).tiers().is_empty());
        runs.last().map_or(0, |(depths, _)| depths.end as usize)
    }
}

fn read_shard(shard: &RwLock<BlockTrie>) -> RwLockReadGuard<'_, BlockTrie> {
    for _ in 0..SPIN_TRIES {
        if let Some(trie) = shard.try_read() {
            return trie;
        }
        hint::spin_loop();
    }
    shard.read()
}

fn leading_locals(hashes: &BlockHashes, blocks: usize) -> &[LocalHash] {
    let locals = hashes.locals();
    &locals[..blocks.min(locals.len())]
}

/// Returns the shard of all prompts that begin with this block.
pub(super) fn shard_of(first: LocalHash) -> usize {
    mix(first.0) as usize % SHARDS
}
