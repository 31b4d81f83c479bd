//! Converts engine blocks to the block size of the index. The index compares all workers of a model
//! by blocks of one size, but engines choose their own sizes. If one size divides the other, only
//! partial blocks at the end of a prompt are lost. A larger engine block becomes several index
//! blocks with derived hashes, which needs no state. A smaller engine block is a part of an index
//! block. The index block is held if all its parts are held, which needs the state in
//! [`partial_blocks`].
//!
//! Decision 0036.

mod partial_blocks;
mod run;

use std::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64;

use super::media::MediaTokens;
use partial_blocks::PartialBlocks;
use warmroute_core::block::hash::local_hashes;
use warmroute_core::block::{EngineHash, StorageTier};
use warmroute_core::index::{ApplyOutcome, KvEvent, PurgedBlocks, StoredBlock};
use warmroute_core::worker::BlockSize;

pub(super) use run::{ResizedEvents, StoredRun};

/// Ratio of the engine's block size to the index's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SizeRatio {
    /// Equal sizes.
    Same,
    /// One engine block is this many index blocks.
    Split(NonZeroU32),
    /// This many engine blocks are one index block.
    Join(NonZeroU32),
}

impl SizeRatio {
    /// Returns `None` if neither size divides the other.
    pub(super) fn between(engine: BlockSize, ours: BlockSize) -> Option<Self> {
        let engine = engine.0.get();
        let ours = ours.0.get();
        // Bounds the number of hashes that an extreme block size can produce per block.
        if engine.max(ours) / engine.min(ours) > MAX_PARTS {
            return None;
        }
        match (
            NonZeroU32::new(engine / ours),
            NonZeroU32::new(ours / engine),
        ) {
            _ if engine == ours => Some(SizeRatio::Same),
            (Some(parts), _) if engine.is_multiple_of(ours) => Some(SizeRatio::Split(parts)),
            (_, Some(parts)) if ours.is_multiple_of(engine) => Some(SizeRatio::Join(parts)),
            _ => None,
        }
    }
}

/// Maximum number of blocks of one side in a block of the other.
const MAX_PARTS: u32 = 1024;

/// Converts the blocks of one worker rank to the block size of the index.
#[derive(Debug)]
pub(super) struct BlockResizer {
    index_size: BlockSize,
    media: MediaTokens,
    /// Tokens per block of the engine, by tier.
    tier_sizes: [Option<BlockSize>; StorageTier::ALL.len()],
    partial_blocks: Option<PartialBlocks>,
    /// Number of losses of events so far.
    losses: u32,
}

impl BlockResizer {
    pub(super) fn new(ours: BlockSize, media: MediaTokens) -> Self {
        Self {
            index_size: ours,
            media,
            tier_sizes: Default::default(),
            partial_blocks: None,
            losses: 0,
        }
    }

    /// Clears the state: the cache is empty.
    pub(super) fn clear(&mut self) {
        *self = Self {
            losses: self.losses,
            ..Self::new(self.index_size, self.media)
        };
    }

    /// Returns the engine's block sizes by tier. Returns `None` while there are partial blocks,
    /// which cannot be exported.
    pub(super) fn tier_sizes(&self) -> Option<[Option<u32>; StorageTier::ALL.len()]> {
        self.partial_blocks
            .is_none()
            .then(|| self.tier_sizes.map(|size| size.map(|size| size.0.get())))
    }

    /// Imports the block sizes of the reader that this one resumes from.
    pub(super) fn resume(&mut self, sizes: [Option<u32>; StorageTier::ALL.len()]) {
        self.tier_sizes = sizes.map(|size| BlockSize::new(size?));
    }

    /// Returns the engine's tokens per block on the device, if known.
    pub(super) fn device_block_size(&self) -> Option<BlockSize> {
        self.tier_sizes[StorageTier::Device as usize]
    }

    /// Returns the size ratio for a store in a tier, or `None` if the sizes are incompatible.
    /// Removals do not carry the size, so the first usable size of a tier is fixed until the cache
    /// is cleared.
    pub(super) fn size_ratio(&mut self, engine: BlockSize, tier: StorageTier) -> Option<SizeRatio> {
        let fit = SizeRatio::between(engine, self.index_size)?;
        let known = self.tier_sizes[tier as usize].get_or_insert(engine);
        if *known != engine {
            return None;
        }
        if matches!(fit, SizeRatio::Join(_)) {
            let partial_blocks = self
                .partial_blocks
                .get_or_insert_with(|| PartialBlocks::new(engine, self.index_size, self.losses));
            return (partial_blocks.engine_size() == engine).then_some(fit);
        }
        Some(fit)
    }

    /// Records that events were permanently lost. `gaps` is the number of losses so far.
    pub(super) fn record_loss(&mut self, gaps: u32) {
        self.losses = gaps;
        self.partial_blocks
            .iter_mut()
            .for_each(|partial_blocks| partial_blocks.record_loss(gaps));
    }

    /// Discards blocks that the index presumes gone. Returns the engine blocks that are discarded
    /// with them, and further events for the index. If an engine block is several index blocks,
    /// these events remove the other ones.
    pub(super) fn discard_blocks(
        &mut self,
        evicted: &PurgedBlocks,
    ) -> (Vec<(EngineHash, StorageTier)>, Vec<KvEvent>) {
        let parts = self
            .partial_blocks
            .as_mut()
            .map(|partial_blocks| partial_blocks.discard_blocks(evicted))
            .unwrap_or_default();
        let others = StorageTier::ALL.into_iter().filter_map(|tier| {
            let Some(SizeRatio::Split(parts)) = self.tier_sizes[tier as usize]
                .and_then(|engine| SizeRatio::between(engine, self.index_size))
            else {
                return None;
            };
            let names = evicted.blocks.iter().filter(|(_, of)| *of == tier);
            let others = names.flat_map(|&(name, _)| {
                part_hashes(name, parts.get()).filter(move |part| *part != name)
            });
            Some(KvEvent::Removed {
                blocks: others.collect(),
                tier,
            })
        });
        (parts, others.collect())
    }

    /// Converts blocks that are at least as large as an index block.
    pub(super) fn split(&self, mut run: StoredRun<'_>, parts: NonZeroU32) -> KvEvent {
        let engine = BlockSize(self.index_size.0.saturating_mul(parts));
        let parts = parts.get();
        let size = self.index_size.tokens();
        let tokens = run.padded_tokens(engine, self.media);
        // Without pad tokens, an object could be in any of the parts.
        let first_ambiguous = if parts == 1 {
            None
        } else {
            run.objects.iter().position(|objects| !objects.is_empty())
        };
        let whole = first_ambiguous
            .unwrap_or(run.hashes.len())
            .min(run.hashes.len());
        let max_tokens = whole * parts as usize * size + usize::from(run.bigrams);
        let objects: &[Vec<u64>] = if parts == 1 { &run.objects } else { &[] };
        let hashes = local_hashes(
            &tokens[..tokens.len().min(max_tokens)],
            self.index_size,
            run.salt,
            run.windows(),
            objects,
        );
        let names = run.hashes[..whole]
            .iter()
            .flat_map(|&name| part_hashes(name, parts));
        let blocks = names
            .zip(hashes)
            .map(|(engine, local)| StoredBlock { engine, local })
            .collect();
        KvEvent::Stored {
            parent: run.parent,
            blocks,
            tier: run.tier,
        }
    }

    /// Converts blocks that are smaller than an index block.
    pub(super) fn join(&mut self, mut run: StoredRun<'_>) -> ResizedEvents {
        let Some(partial_blocks) = &mut self.partial_blocks else {
            return ResizedEvents {
                events: Vec::new(),
                outcome: ApplyOutcome::ParentNotFound,
            };
        };
        let tokens = run.padded_tokens(partial_blocks.engine_size(), self.media);
        partial_blocks.store(&run, &tokens)
    }

    /// Converts the removal of blocks from a tier.
    pub(super) fn remove(&mut self, names: &[EngineHash], tier: StorageTier) -> ResizedEvents {
        let fit = self.tier_sizes[tier as usize]
            .and_then(|engine| SizeRatio::between(engine, self.index_size));
        let blocks = match (fit, &mut self.partial_blocks) {
            (Some(SizeRatio::Join(_)), Some(partial_blocks)) => {
                return partial_blocks.remove(names, tier);
            }
            (Some(SizeRatio::Split(parts)), _) => names
                .iter()
                .flat_map(|&name| part_hashes(name, parts.get()))
                .collect(),
            _ => names.to_vec(),
        };
        ResizedEvents {
            events: vec![KvEvent::Removed { blocks, tier }],
            outcome: ApplyOutcome::Ok,
        }
    }
}

/// Returns the hashes of the index blocks in an engine block. The last one is the engine's hash, so
/// that children of the engine block are children of the last part.
fn part_hashes(name: EngineHash, parts: u32) -> impl Iterator<Item = EngineHash> {
    let derived = move |part: u32| {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&name.0.to_le_bytes());
        bytes[8..].copy_from_slice(&part.to_le_bytes());
        EngineHash(xxh3_64(&bytes))
    };
    (1..parts).map(derived).chain([name])
}

#[cfg(test)]
mod tests;
