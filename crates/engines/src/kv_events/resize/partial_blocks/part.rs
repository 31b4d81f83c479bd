//! Parts of index blocks, and the index events that they cause.

use warmroute_core::block::{EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{KvEvent, StoredBlock};

/// One engine block.
#[derive(Debug)]
pub(super) struct BlockPart {
    pub(super) parent: Option<EngineHash>,
    /// Parts that follow this one.
    pub(super) children: Vec<EngineHash>,
    /// Position in the index block, from 0.
    pub(super) index: usize,
    pub(super) content: PartContent,
    pub(super) copies: [u32; StorageTier::ALL.len()],
    /// Number of losses when the copies were last counted, by tier.
    pub(super) counted_at: [u32; StorageTier::ALL.len()],
}

/// Content of a part.
#[derive(Debug)]
pub(super) enum PartContent {
    /// A part other than the last one. Its tokens are needed to hash the index block.
    Tokens {
        ids: Box<[u32]>,
        objects: Box<[u64]>,
    },
    /// The last part. It stores the index block.
    Whole(IndexBlock),
}

/// An index block.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexBlock {
    pub(super) local: LocalHash,
    /// Tiers in which the block was reported to the index.
    pub(super) reported: [bool; StorageTier::ALL.len()],
    /// Number of losses at the last report, by tier. After a further loss, the index counts its
    /// copies from one again.
    pub(super) confirmed_at: [u32; StorageTier::ALL.len()],
}

impl IndexBlock {
    pub(super) fn new(local: LocalHash) -> Self {
        Self {
            local,
            reported: [false; StorageTier::ALL.len()],
            confirmed_at: [0; StorageTier::ALL.len()],
        }
    }

    pub(super) fn is_reported(&self) -> bool {
        self.reported.contains(&true)
    }
}

impl BlockPart {
    pub(super) fn block(&self) -> Option<&IndexBlock> {
        match &self.content {
            PartContent::Whole(block) => Some(block),
            PartContent::Tokens { .. } => None,
        }
    }

    pub(super) fn block_mut(&mut self) -> Option<&mut IndexBlock> {
        match &mut self.content {
            PartContent::Whole(block) => Some(block),
            PartContent::Tokens { .. } => None,
        }
    }

    pub(super) fn has_copies(&self) -> bool {
        self.copies.iter().any(|copies| *copies > 0)
    }
}

/// Tokens and multimodal objects of a stored part.
#[derive(Clone, Copy)]
pub(super) struct PartInput<'a> {
    pub(super) ids: &'a [u32],
    pub(super) objects: &'a [u64],
}

/// Events for the index, in order.
#[derive(Debug, Default)]
pub(super) struct IndexEvents(pub(super) Vec<KvEvent>);

impl IndexEvents {
    pub(super) fn stored(
        &mut self,
        after: Option<EngineHash>,
        block: StoredBlock,
        tier: StorageTier,
    ) {
        if let Some(KvEvent::Stored {
            blocks, tier: last, ..
        }) = self.0.last_mut()
            && *last == tier
            && blocks.last().map(|block| block.engine) == after
        {
            return blocks.push(block);
        }
        self.0.push(KvEvent::Stored {
            parent: after,
            blocks: vec![block],
            tier,
        });
    }

    pub(super) fn removed(&mut self, block: EngineHash, tier: StorageTier) {
        if let Some(KvEvent::Removed { blocks, tier: last }) = self.0.last_mut()
            && *last == tier
        {
            return blocks.push(block);
        }
        self.0.push(KvEvent::Removed {
            blocks: vec![block],
            tier,
        });
    }
}
