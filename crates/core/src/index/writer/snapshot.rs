//! Snapshot of a rank: copies its content out of the index and restores it. The engine hashes come
//! from the writer, and the prefixes from the tries.

use std::sync::Arc;

use super::{MappedBlock, RankWriter};
use crate::block::EngineHash;
use crate::index::children::U64HashMap;
use crate::index::dump::{
    BlockRow, CopyCounts, CopyReplay, GroupShare, HashRow, OrphanRow, RankDump,
};
use crate::index::ids::BlockId;
use crate::index::layers::LayerSet;
use crate::index::prefix_index::SHARDS;
use crate::index::salts::SaltTableDump;
use crate::index::trie::BlockTrie;
use crate::worker::WorkerRank;

/// Hashes looked up in a trie before its writers get the lock.
const BLOCKS_PER_LOCK: usize = 1024;

impl RankWriter {
    /// Copies the content of the rank.
    pub fn snapshot(&self, rank: WorkerRank) -> RankDump {
        let mut dump = RankDump {
            rank,
            position: None,
            blocks: Vec::new(),
            hashes: Vec::with_capacity(self.blocks.len()),
            orphans: self.orphan_rows().collect(),
            groups: Vec::new(),
            shares: Vec::new(),
            has_untracked_groups: false,
            unreported_evictions: self.unreported_evictions,
            has_evicted: self.shared.has_evicted(),
            salts: SaltTableDump::default(),
        };
        self.add_located_blocks(&mut dump);
        if let Some(groups) = &self.groups {
            dump.groups = groups
                .known()
                .iter()
                .map(|group| (group.id, group.need))
                .collect();
            dump.shares = groups.shares().collect();
            dump.has_untracked_groups = groups.has_untracked();
            dump.shares
                .sort_unstable_by_key(|share| (share.group, share.engine));
        }
        dump.hashes
            .sort_unstable_by_key(|row| (row.block, row.engine));
        dump.orphans.sort_unstable_by_key(|row| row.engine);
        dump
    }

    fn add_located_blocks(&self, dump: &mut RankDump) {
        let mut shards: [Vec<(EngineHash, MappedBlock)>; SHARDS] =
            std::array::from_fn(|_| Vec::new());
        for (engine, mapped) in self.blocks.iter() {
            shards[usize::from(mapped.location.shard)].push((engine, mapped));
        }
        for (shard, hashes) in shards.into_iter().enumerate() {
            let shard_trie = &self.index.shards[shard];
            // Sorting only places neighbours next to each other, so concurrent changes of runs do
            // no harm.
            let mut by_position = Vec::with_capacity(hashes.len());
            for batch in hashes.chunks(BLOCKS_PER_LOCK) {
                let trie = shard_trie.read();
                by_position.extend(batch.iter().map(|(engine, mapped)| {
                    (trie.position_of(mapped.location.block), *engine, *mapped)
                }));
            }
            drop(hashes);
            by_position.sort_unstable_by_key(|(position, ..)| *position);
            let mut rows: U64HashMap<u64, u32> = U64HashMap::default();
            for batch in by_position.chunks(BLOCKS_PER_LOCK) {
                let trie = shard_trie.read();
                for (_, engine, mapped) in batch {
                    let block =
                        row_of_block(&trie, mapped.location.block, &mut rows, &mut dump.blocks);
                    let copies = self.copy_counts(
                        *engine,
                        mapped.layers,
                        self.copy_epochs.stale_tiers(*engine, mapped.layers),
                    );
                    dump.hashes.push(HashRow {
                        engine: *engine,
                        block,
                        copies,
                    });
                }
            }
        }
    }

    fn orphan_rows(&self) -> impl Iterator<Item = OrphanRow> {
        self.orphans.iter().map(|(engine, orphan)| {
            let copies = self.copy_counts(
                engine,
                orphan.tiers,
                orphan.stale_tiers(self.copy_epochs.generation()),
            );
            OrphanRow {
                engine,
                parent: orphan.parent,
                local: orphan.local,
                copies,
            }
        })
    }

    fn copy_counts(
        &self,
        engine: EngineHash,
        layers: LayerSet,
        stale_layers: LayerSet,
    ) -> CopyCounts {
        let mut copies = CopyCounts {
            counts: Default::default(),
            stale: stale_layers.intersection(layers.tiers()),
        };
        for tier in layers.iter_tiers() {
            copies.counts[tier as usize] =
                1 + self.extra_copies.get(&(engine, tier)).copied().unwrap_or(0);
        }
        copies
    }

    /// Replaces the content of the rank with a dump. Readers see nothing of the rank until all of
    /// it is restored.
    pub fn restore(&mut self, dump: &RankDump) {
        self.clear();
        let empty_owner =
            std::mem::replace(&mut self.owner, self.index.owners.write().allocate_hidden());
        for event in dump.replay_events(CopyReplay::One) {
            self.apply(&event);
        }
        if dump.has_stale() || dump.unreported_evictions.is_some() {
            self.record_gap();
        }
        for row in &dump.hashes {
            self.restore_copies(row.engine, row.copies);
        }
        for row in &dump.orphans {
            self.restore_copies(row.engine, row.copies);
        }
        self.restore_groups(dump);
        self.unreported_evictions = dump.unreported_evictions;
        // The replay removes placeholders.
        self.shared.set_has_evicted(dump.has_evicted);
        self.shared.stale.lock().close_confirmed();
        let rules = self
            .groups
            .as_ref()
            .map(|groups| Arc::new(groups.rules().clone()));
        let mut owners = self.index.owners.write();
        owners.replace(empty_owner, self.owner, rules);
        owners.free(empty_owner);
    }

    fn restore_groups(&mut self, dump: &RankDump) {
        let max_hashes = usize::try_from(self.shared.limits().max_hashes()).unwrap_or(usize::MAX);
        let Some(groups) = &mut self.groups else {
            return;
        };
        for share in &dump.shares {
            let GroupShare { group, .. } = share;
            if let Some(at) = groups.find(dump.groups[*group as usize].0) {
                groups.restore_share(at, share, max_hashes);
            }
        }
        if dump.has_untracked_groups {
            groups.set_untracked();
        }
        let mut stale_blocks = self.shared.stale.lock();
        for (engine, mapped) in self.blocks.iter() {
            groups
                .counted_layers(engine)
                .iter()
                .for_each(|layer| _ = stale_blocks.confirm(mapped.location, layer));
        }
    }

    /// Restores the copies and the staleness of a hash. Tiers dropped because of a limit are
    /// skipped.
    fn restore_copies(&mut self, engine: EngineHash, copies: CopyCounts) {
        let held = match (self.blocks.get(engine), self.orphans.get_mut(engine)) {
            (Some(mapped), _) => mapped.layers,
            (None, Some(orphan)) => orphan.tiers,
            (None, None) => return,
        };
        for (tier, count) in copies
            .held()
            .filter(|(tier, count)| *count > 1 && held.has(*tier))
        {
            if self.extra_copies.len() as u64 >= self.shared.limits().max_hashes() {
                self.shared.record_over_limit(1);
                break;
            }
            self.extra_copies.insert((engine, tier), count - 1);
            self.shared.add_copies(i64::from(count - 1));
        }
        if let Some(mapped) = self.blocks.get(engine) {
            self.copy_epochs.set_counted_now(engine, copies.stale);
            let mut stale_blocks = self.shared.stale.lock();
            for tier in mapped.layers.tiers().difference(copies.stale).iter_tiers() {
                stale_blocks.confirm(mapped.location, tier);
            }
        } else if let Some(orphan) = self.orphans.get_mut(engine) {
            orphan.stale = copies.stale;
            orphan.generation = self.copy_epochs.generation();
        }
    }
}

/// Returns the row of a block. Adds the rows of all blocks before it first.
fn row_of_block(
    trie: &BlockTrie,
    block: BlockId,
    rows: &mut U64HashMap<u64, u32>,
    into: &mut Vec<BlockRow>,
) -> u32 {
    let mut path = Vec::new();
    let mut next = Some(block);
    let mut parent = None;
    while let Some(block) = next {
        parent = rows.get(&u64::from(block.0)).copied();
        if parent.is_some() {
            break;
        }
        let (before, local) = trie.origin(block);
        path.push((block, local));
        next = before;
    }
    for (block, local) in path.into_iter().rev() {
        let at = into.len() as u32;
        into.push(BlockRow { parent, local });
        rows.insert(u64::from(block.0), at);
        parent = Some(at);
    }
    parent.unwrap_or_default()
}
