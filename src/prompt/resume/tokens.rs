//! Tokens that know from where others may go on, and so from where their blocks may.

use std::ops::Deref;
use std::sync::Arc;

use super::Secret;
use super::cache::{PromptCache, Value};
use crate::block::{
    BlockHashes, Content, LocalHash, MediaTokens, Salt, SequenceHash, Windows, placeholders,
};
use crate::worker::BlockSize;

/// Separates the names of blocks from those of texts.
const BLOCKS: &[u8] = b"blocks";

/// The tokens of one prompt.
#[derive(Clone, Debug)]
pub struct Tokens {
    ids: Vec<u32>,
    trail: Option<Trail>,
}

/// The points of a text, by name, with the tokens before each.
#[derive(Clone)]
pub(super) struct Trail {
    cache: Arc<PromptCache>,
    key: Secret,
    special: bool,
    points: Vec<(u128, usize)>,
}

impl std::fmt::Debug for Trail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trail")
            .field("points", &self.points.len())
            .finish_non_exhaustive()
    }
}

impl Trail {
    pub(super) fn new(
        cache: Arc<PromptCache>,
        key: Secret,
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

    /// The names of the points for the blocks of one kind.
    fn names(&self, seed: u64, block_size: BlockSize, windows: Windows) -> Vec<u128> {
        let flags = [u8::from(self.special), u8::from(windows == Windows::Eagle)];
        let kind = self.key.name(&[
            BLOCKS,
            &seed.to_le_bytes(),
            &block_size.0.get().to_le_bytes(),
            &flags,
        ]);
        self.points.iter().map(|(point, _)| point ^ kind).collect()
    }
}

impl Tokens {
    pub(super) fn new(ids: Vec<u32>, trail: Option<Trail>) -> Self {
        Self { ids, trail }
    }

    /// The tokens alone.
    pub fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    /// Leaves out all but the first.
    pub fn truncate(&mut self, length: usize) {
        self.ids.truncate(length);
        if let Some(trail) = &mut self.trail {
            trail.points.retain(|(_, tokens)| *tokens <= length);
        }
    }

    /// Other tokens that are the same before this place, as far as others may go on there as well.
    pub(in crate::prompt) fn carried_to(self, ids: Vec<u32>, place: usize) -> Self {
        let trail = self.trail.map(|mut trail| {
            trail.points.retain(|(_, tokens)| *tokens <= place);
            trail
        });
        Self { ids, trail }
    }

    /// The hashes of their blocks: the same as [`BlockHashes::of_content`] gives, of which those that were computed before
    /// are only copied.
    pub fn hashes(&self, salt: &Salt, block_size: BlockSize, windows: Windows) -> BlockHashes {
        let content = Content {
            windows,
            ..Content::plain(&self.ids, salt)
        };
        self.hashes_of(&content, block_size, MediaTokens::default())
    }

    /// The hashes of the blocks of a prompt of these tokens with objects in it: the same as [`placeholders::hashes`] gives.
    pub fn hashes_of(
        &self,
        content: &Content<'_>,
        block_size: BlockSize,
        media: MediaTokens,
    ) -> BlockHashes {
        let windows = content.windows;
        let Some(trail) = &self.trail else {
            return placeholders::hashes(content, block_size, media);
        };
        let names = trail.names(content.salt.seed(), block_size, windows);
        let found = trail.cache.walk(&names, Value::blocks);
        let known: Vec<(LocalHash, SequenceHash)> = found
            .iter()
            .flat_map(|piece| piece.iter().copied())
            .collect();
        let mut from = known.len();
        let hashes = placeholders::resumed(content, block_size, media, &known);
        let all = || {
            hashes
                .locals()
                .iter()
                .copied()
                .zip(hashes.sequences().iter().copied())
        };
        let made = names
            .iter()
            .zip(&trail.points)
            .skip(found.len())
            .map(|(name, (_, tokens))| {
                let upto = windows.blocks(*tokens, block_size);
                let piece: Arc<[_]> = all().skip(from).take(upto - from).collect();
                from = upto;
                (*name, Value::Blocks(piece))
            });
        let made = made.collect();
        trail.cache.keep(&names[..found.len()], made);
        hashes
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, trail: None }
    }
}

impl PartialEq for Tokens {
    fn eq(&self, other: &Self) -> bool {
        self.ids == other.ids
    }
}

impl Eq for Tokens {}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids
    }
}
