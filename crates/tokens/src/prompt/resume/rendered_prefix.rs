//! Reuse of the rendered beginning of a conversation. The text before a checkpoint of the template
//! is neither rendered nor hashed again. The hashes of its resume points are cached under the hash
//! of the messages that it depends on, see
//! `docs/decisions/0050-identify-earlier-turns-by-hashes-of-bodies.md`.

use std::borrow::Cow;
use std::sync::Arc;

use super::ResumingTokenizer;
use super::boundary_tokens::ResumePoint;
use crate::openai::MessagePrefix;
use crate::prompt::direct::{CheckpointPosition, RenderCheckpoint};
use crate::prompt_cache::{CachedValue, SharedCachedValue};

/// Separates hashes of messages from other uses of the key.
const PREFIX_DOMAIN: &[u8] = b"rendered";

/// Maximum length of the text between the last resume point and a checkpoint, in bytes.
const MAX_TAIL_BYTES: usize = 4 << 10;

/// Resume points of a rendered conversation before a checkpoint, and the text after the last of
/// them.
#[derive(Debug)]
struct RenderedPrefix {
    checkpoint: RenderCheckpoint,
    /// Boundary tokens and hashes of the resume points.
    points: Box<[(usize, u128)]>,
    /// Text from the last boundary token to the checkpoint.
    tail: Box<str>,
}

/// A rendered prefix from the cache, with its tokens.
#[derive(Clone, Debug)]
pub(crate) struct CachedPrefix {
    rendered: Arc<RenderedPrefix>,
    /// Cache key of `rendered`.
    pub(super) key: u128,
    /// True if the fast path was disabled, so that the tokens are those of the library.
    pub(super) uses_library: bool,
    /// Tokens of the piece that ends at each resume point.
    pub(super) pieces: Vec<Arc<Vec<u32>>>,
}

/// A checkpoint in a text, and the messages on which the text before it depends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConversationCheckpoint {
    pub(crate) messages: MessagePrefix,
    pub(crate) position: CheckpointPosition,
}

/// A text to tokenize, with or without a cached prefix before it.
#[derive(Clone, Debug)]
pub(crate) struct ResumableText<'t> {
    text: Cow<'t, str>,
    prefix: Option<CachedPrefix>,
    checkpoints: Vec<ConversationCheckpoint>,
}

impl CachedValue for RenderedPrefix {
    fn memory_bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.points) + self.tail.len()
    }
}

impl CachedPrefix {
    /// Returns the checkpoint after which the text must be rendered.
    pub(crate) fn checkpoint(&self) -> RenderCheckpoint {
        self.rendered.checkpoint
    }
}

impl<'t> ResumableText<'t> {
    /// Creates a text. `checkpoints` identify the prefixes to store.
    pub(crate) fn new(text: Cow<'t, str>, checkpoints: Vec<ConversationCheckpoint>) -> Self {
        Self {
            text,
            prefix: None,
            checkpoints,
        }
    }

    /// Creates the text that follows a cached prefix. `checkpoints` identify the prefixes to store.
    pub(crate) fn after_prefix(
        prefix: CachedPrefix,
        text: &str,
        mut checkpoints: Vec<ConversationCheckpoint>,
    ) -> Self {
        let tail = &*prefix.rendered.tail;
        for checkpoint in &mut checkpoints {
            checkpoint.position.text_length += tail.len();
        }
        Self {
            text: Cow::Owned([tail, text].concat()),
            prefix: Some(prefix),
            checkpoints,
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the cached prefix. The text then begins with its last boundary token.
    pub(crate) fn prefix(&self) -> Option<&CachedPrefix> {
        self.prefix.as_ref()
    }
}

impl ResumingTokenizer {
    /// Returns the cached prefix of a conversation, if all of its tokens are cached.
    pub(crate) fn find_prefix(
        &self,
        messages: MessagePrefix,
        uses_library: bool,
    ) -> Option<CachedPrefix> {
        let key = self.prefix_key(messages, uses_library);
        let rendered: Arc<RenderedPrefix> = self.cache.find(key)?;
        let keys: Vec<u128> = rendered.points.iter().map(|(_, key)| *key).collect();
        let pieces = self.cache.find_leading(&keys);
        (pieces.len() == keys.len()).then_some(CachedPrefix {
            rendered,
            key,
            uses_library,
            pieces,
        })
    }

    /// Returns the resume points of a cached prefix and of the text after it. The text begins with
    /// the last boundary token. The positions of earlier points are not known and not needed.
    pub(super) fn points_after_prefix(
        &self,
        text: &str,
        prefix: &CachedPrefix,
    ) -> Vec<ResumePoint> {
        let known = &prefix.rendered.points;
        let Some((boundary, key)) = known.last().copied() else {
            return Vec::new();
        };
        let end = self.boundaries.get(boundary).content.len();
        let known = known.iter().map(|(boundary, key)| ResumePoint {
            end,
            boundary: *boundary,
            key: *key,
        });
        let mut new = self.boundaries.points_after(text, end);
        self.hash_points(&mut new, text, key, end);
        known.chain(new).collect()
    }

    /// Returns the cache entries for the text before each checkpoint.
    pub(super) fn new_prefix_entries(
        &self,
        input: &ResumableText<'_>,
        points: &[ResumePoint],
        uses_library: bool,
    ) -> Vec<(u128, SharedCachedValue)> {
        let entry = |checkpoint: &ConversationCheckpoint| {
            let rendered = self.rendered_prefix(&input.text, points, checkpoint.position)?;
            let key = self.prefix_key(checkpoint.messages, uses_library);
            Some((key, Arc::new(rendered) as SharedCachedValue))
        };
        input.checkpoints.iter().filter_map(entry).collect()
    }

    /// Returns the resume points before a checkpoint and the text after the last of them. Returns
    /// `None` without a resume point, or if that text is too long.
    fn rendered_prefix(
        &self,
        text: &str,
        points: &[ResumePoint],
        position: CheckpointPosition,
    ) -> Option<RenderedPrefix> {
        let checkpoint_at = position.text_length;
        let before = &points[..points.partition_point(|point| point.end <= checkpoint_at)];
        let last = before.last()?;
        let tail_start = last.end - self.boundaries.get(last.boundary).content.len();
        let tail = text.get(tail_start..checkpoint_at)?;
        (tail.len() <= MAX_TAIL_BYTES).then(|| RenderedPrefix {
            checkpoint: position.checkpoint,
            points: before
                .iter()
                .map(|point| (point.boundary, point.key))
                .collect(),
            tail: tail.into(),
        })
    }

    fn prefix_key(&self, messages: MessagePrefix, uses_library: bool) -> u128 {
        self.key.hash_parts(&[
            PREFIX_DOMAIN,
            &[uses_library.into()],
            &messages.key.to_le_bytes(),
        ])
    }
}
