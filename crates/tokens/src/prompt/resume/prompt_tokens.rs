//! Tokens of a prompt with their resume points. Block hashes are cached at the same points.

use std::ops::Deref;
use std::sync::Arc;

use crate::prompt_cache::{HashKey, PromptCache, SharedCachedValue};
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
    resume_points: Option<ResumePoints>,
}

/// Resume points of a text, each with its hash and the number of tokens before it.
#[derive(Clone)]
pub(super) struct ResumePoints {
    cache: Arc<PromptCache>,
    key: HashKey,
    is_framed: bool,
    points: Vec<(u128, usize)>,
}

impl std::fmt::Debug for ResumePoints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResumePoints")
            .field("points", &self.points.len())
            .finish_non_exhaustive()
    }
}

impl ResumePoints {
    pub(super) fn new(
        cache: Arc<PromptCache>,
        key: HashKey,
        is_framed: bool,
        points: Vec<(u128, usize)>,
    ) -> Self {
        Self {
            cache,
            key,
            is_framed,
            points,
        }
    }

    /// Returns the cache keys of the blocks at the resume points.
    fn block_keys(&self, seed: u64, block_size: BlockSize, windows: BlockWindows) -> Vec<u128> {
        let flags = [
            u8::from(self.is_framed),
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
    pub(super) fn new(ids: Vec<u32>, resume_points: Option<ResumePoints>) -> Self {
        Self { ids, resume_points }
    }

    /// Returns the token ids.
    pub fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    /// Keeps only the first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        self.ids.truncate(length);
        if let Some(resume_points) = &mut self.resume_points {
            resume_points.points.retain(|(_, tokens)| *tokens <= length);
        }
    }

    /// Replaces the token ids with `ids`. The first `unchanged` ids must be equal, so the resume
    /// points up to there remain valid.
    pub(crate) fn with_ids(self, ids: Vec<u32>, unchanged: usize) -> Self {
        let resume_points = self.resume_points.map(|mut resume_points| {
            resume_points
                .points
                .retain(|(_, tokens)| *tokens <= unchanged);
            resume_points
        });
        Self { ids, resume_points }
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
        let Some(resume_points) = &self.resume_points else {
            return placeholders::prompt_hashes(content, block_size, media);
        };
        let keys = resume_points.block_keys(content.salt.seed(), block_size, windows);
        let found: Vec<Arc<Vec<(LocalHash, SequenceHash)>>> =
            resume_points.cache.find_leading(&keys);
        let known: Vec<_> = found
            .iter()
            .flat_map(|piece| piece.iter().copied())
            .collect();
        let mut from = known.len();
        let hashes = placeholders::resume_hashes(content, block_size, media, &known);
        let all = hashes.locals().iter().zip(hashes.sequences());
        let mut new_pieces = Vec::new();
        let points = keys.iter().zip(&resume_points.points);
        for (key, (_, tokens)) in points.skip(found.len()) {
            let end = windows.blocks(*tokens, block_size);
            let piece = all.clone().skip(from).take(end - from);
            let piece: Vec<_> = piece.map(|(local, sequence)| (*local, *sequence)).collect();
            new_pieces.push((*key, Arc::new(piece) as SharedCachedValue));
            from = end;
        }
        resume_points.cache.store(&keys[..found.len()], new_pieces);
        hashes
    }
}

impl From<Vec<u32>> for PromptTokens {
    fn from(ids: Vec<u32>) -> Self {
        Self {
            ids,
            resume_points: None,
        }
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
