//! Runs of engine blocks, and the index events that replace their events.

use std::borrow::Cow;

use crate::kv_events::media::{self, MediaTokens};
use warmroute_core::block::hash::{BlockWindows, local_hashes};
use warmroute_core::block::{CacheSalt, EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{ApplyOutcome, KvEvent};
use warmroute_core::worker::BlockSize;

/// A run of stored engine blocks with their content.
#[derive(Clone, Debug)]
pub(in crate::kv_events) struct StoredRun<'a> {
    pub(in crate::kv_events) parent: Option<EngineHash>,
    pub(in crate::kv_events) hashes: &'a [EngineHash],
    /// Token ids. With bigrams, there is one more than the blocks hold.
    pub(in crate::kv_events) tokens: &'a [u32],
    pub(in crate::kv_events) bigrams: bool,
    pub(in crate::kv_events) salt: &'a CacheSalt,
    /// Multimodal objects of each engine block.
    pub(in crate::kv_events) objects: Vec<Vec<u64>>,
    pub(in crate::kv_events) tier: StorageTier,
}

impl<'a> StoredRun<'a> {
    pub(in crate::kv_events) fn windows(&self) -> BlockWindows {
        BlockWindows::new(self.bigrams)
    }

    /// Returns the tokens of the blocks, with placeholder tokens replaced by pad tokens. Objects
    /// that pad tokens represent are removed from `objects`.
    pub(super) fn padded_tokens(&mut self, size: BlockSize, media: MediaTokens) -> Cow<'a, [u32]> {
        let wanted = self.hashes.len() * size.tokens() + usize::from(self.bigrams);
        let tokens = &self.tokens[..self.tokens.len().min(wanted)];
        let padded = if self.bigrams || self.objects.is_empty() {
            None
        } else {
            media::substitute_pads(tokens, &mut self.objects, size, media)
        };
        padded.map_or(Cow::Borrowed(tokens), Cow::Owned)
    }
}

/// Index events that replace an engine event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::kv_events) struct ResizedEvents {
    pub(in crate::kv_events) events: Vec<KvEvent>,
    /// Outcome of the engine event if there is no index event.
    pub(in crate::kv_events) outcome: ApplyOutcome,
}

/// Returns the local hash of one index block.
pub(super) fn local_hash(
    tokens: &[u32],
    ours: BlockSize,
    run: &StoredRun<'_>,
    objects: Vec<u64>,
) -> Option<LocalHash> {
    let objects = if objects.is_empty() {
        Vec::new()
    } else {
        vec![objects]
    };
    local_hashes(tokens, ours, run.salt, run.windows(), &objects)
        .first()
        .copied()
}
