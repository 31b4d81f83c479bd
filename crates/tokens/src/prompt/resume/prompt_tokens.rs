//! Tokens of a prompt with their resume points. Block hashes are cached at the same points.

use std::ops::Deref;
use std::sync::Arc;

use super::HashKey;
use super::cache::{CachedPiece, PromptCache};
use warmroute_core::block::{
    BlockHashes, BlockWindows, CacheSalt, LocalHash, MediaTokens, PromptContent, SequenceHash,
    placeholders,
};
use warmroute_core::worker::BlockSize;

/// Separates block hashes from text hashes.
const BLOCKS_DOMAIN: &[u8] = b"blocks";

/// Tokens of one prompt.
#[derive(Clone, Debug)]
pub struct PromptTokens {
    ids: Vec<u32>,
    trail: Option<PromptTrail>,
}

/// Resume points of a text, each with its hash and the number of tokens before it.
#[derive(Clone)]
pub(super) struct PromptTrail {
    cache: Arc<PromptCache>,
    key: HashKey,
    special: bool,
    points: Vec<(u128, usize)>,
}

impl std::fmt::Debug for PromptTrail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptTrail")
            .field("points", &self.points.len())
            .finish_non_exhaustive()
    }
}

impl PromptTrail {
    pub(super) fn new(
        cache: Arc<PromptCache>,
        key: HashKey,
        special: bool,
        points: Vec<(u128, usize)>,
    ) -> Self {
        Self {
            cache,
            key,
            special,
            points,
        }
    }

    /// Returns the cache keys of the blocks at the resume points.
    fn block_keys(&self, seed: u64, block_size: BlockSize, windows: BlockWindows) -> Vec<u128> {
        let flags = [
            u8::from(self.special),
            u8::from(windows == BlockWindows::Eagle),
        ];
        let kind = self.key.hash_parts(&[
            BLOCKS_DOMAIN,
            &seed.to_le_bytes(),
            &block_size.0.get().to_le_bytes(),
            &flags,
        ]);
        self.points.iter().map(|(point, _)| point ^ kind).collect()
    }
}

impl PromptTokens {
    pub(super) fn new(ids: Vec<u32>, trail: Option<PromptTrail>) -> Self {
        Self { ids, trail }
    }

    /// Returns the token ids.
    pub fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    /// Keeps only the first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        self.ids.truncate(length);
        if let Some(trail) = &mut self.trail {
            trail.points.retain(|(_, tokens)| *tokens <= length);
        }
    }

    /// Replaces the token ids with `ids`. The ids before `place` must be equal, so the resume
    /// points up to there remain valid.
    pub(in crate::prompt) fn with_ids(self, ids: Vec<u32>, place: usize) -> Self {
        let trail = self.trail.map(|mut trail| {
            trail.points.retain(|(_, tokens)| *tokens <= place);
            trail
        });
        Self { ids, trail }
    }

    /// Returns the block hashes. The result equals that of [`BlockHashes::from_content`]. Cached
    /// hashes are copied instead of computed.
    pub fn block_hashes(
        &self,
        salt: &CacheSalt,
        block_size: BlockSize,
        windows: BlockWindows,
    ) -> BlockHashes {
        let content = PromptContent {
            windows,
            ..PromptContent::text(&self.ids, salt)
        };
        self.content_hashes(&content, block_size, MediaTokens::default())
    }

    /// Returns the block hashes of a prompt with media objects. The result equals
    /// [`prompt_hashes`](warmroute_core::block::placeholders::prompt_hashes).
    pub fn content_hashes(
        &self,
        content: &PromptContent<'_>,
        block_size: BlockSize,
        media: MediaTokens,
    ) -> BlockHashes {
        let windows = content.windows;
        let Some(trail) = &self.trail else {
            return placeholders::prompt_hashes(content, block_size, media);
        };
        let keys = trail.block_keys(content.salt.seed(), block_size, windows);
        let found = trail.cache.find_leading(&keys, CachedPiece::blocks);
        let known: Vec<(LocalHash, SequenceHash)> = found
            .iter()
            .flat_map(|piece| piece.iter().copied())
            .collect();
        let mut from = known.len();
        let hashes = placeholders::resume_hashes(content, block_size, media, &known);
        let all = || {
            hashes
                .locals()
                .iter()
                .copied()
                .zip(hashes.sequences().iter().copied())
        };
        let new_pieces =
            keys.iter()
                .zip(&trail.points)
                .skip(found.len())
                .map(|(key, (_, tokens))| {
                    let end = windows.blocks(*tokens, block_size);
                    let piece: Arc<[_]> = all().skip(from).take(end - from).collect();
                    from = end;
                    (*key, CachedPiece::Blocks(piece))
                });
        let new_pieces = new_pieces.collect();
        trail.cache.store(&keys[..found.len()], new_pieces);
        hashes
    }
}

impl From<Vec<u32>> for PromptTokens {
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, trail: None }
    }
}

impl PartialEq for PromptTokens {
    fn eq(&self, other: &Self) -> bool {
        self.ids == other.ids
    }
}

impl Eq for PromptTokens {}

impl Deref for PromptTokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids
    }
}
