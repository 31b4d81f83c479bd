//! Reuse of the messages of earlier bodies. A turn of a conversation begins with the bytes of the
//! previous turn's messages, so these messages need not be parsed again
//! (`docs/decisions/0050-identify-earlier-turns-by-hashes-of-bodies.md`).
//!
//! The list of messages is divided into chunks of equal length. The messages that end in a chunk
//! are cached under a hash of the list up to the end of the chunk. The bytes of a list up to the
//! end of a message determine that message and its position, so a cached message equals a newly
//! parsed one. The cache stores the positions of plain texts, which the body of each turn repeats.
//! Only system messages are stored with their texts.
//!
//! Decision 0050.

use std::sync::Arc;

use bytes::Bytes;

use super::chat::ChatMessage;
use super::json_scan;
use super::message_text::MessageText;
use super::parsed_message::ParsedMessage;
use crate::prompt_cache::{CachedValue, HashKey, PromptCache, SharedCachedValue};

/// Length of a chunk in bytes.
pub(super) const CHUNK_BYTES: usize = 4 << 10;

/// Messages that end in one chunk of a list.
#[derive(Debug)]
struct ChunkMessages {
    messages: Box<[ParsedMessage]>,
    /// Upper bound on the number of JSON values that begin in the chunk.
    value_count: usize,
}

/// Leading messages of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessagePrefix {
    pub(crate) message_count: usize,
    /// Hash of the list up to the end of a chunk, of the rest of the body, and of the tenant.
    pub(crate) key: u128,
}

/// Prefixes of a conversation in the message cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct MessageReuse {
    /// Messages that were already cached.
    pub(crate) found: Option<MessagePrefix>,
    /// Messages in complete chunks, which the next turn can find.
    pub(crate) stored: Option<MessagePrefix>,
}

/// Cached messages at the beginning of a list, and the hashes of all its chunks.
pub(super) struct CachedMessages {
    /// Hashes of the list up to the end of each chunk.
    keys: Vec<u128>,
    /// Cached chunks.
    chunks: Vec<Arc<ChunkMessages>>,
}

/// The messages of a body, of which the first may have been cached.
pub(super) struct BodyMessages {
    cached: CachedMessages,
    /// The list of messages.
    list: Bytes,
    /// Messages after the cached ones.
    new_messages: Vec<ParsedMessage>,
}

/// Cache of the messages of earlier bodies.
pub struct MessageCache {
    prompt_cache: Arc<PromptCache>,
    key: HashKey,
}

impl CachedValue for ChunkMessages {
    fn memory_bytes(&self) -> usize {
        self.messages
            .iter()
            .map(|message| message.memory_bytes)
            .sum()
    }
}

impl CachedMessages {
    fn messages(&self) -> impl DoubleEndedIterator<Item = &ParsedMessage> {
        self.chunks.iter().flat_map(|chunk| &chunk.messages)
    }

    /// Returns the position after the last cached message, in bytes from the beginning of the list.
    pub(super) fn end(&self) -> usize {
        self.messages().next_back().map_or(0, |parsed| parsed.end)
    }

    /// Returns an upper bound on the number of JSON values in the cached chunks.
    pub(super) fn value_count(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.value_count).sum()
    }
}

impl MessageCache {
    /// Creates a cache whose entries are stored in `prompt_cache`.
    pub fn new(prompt_cache: Arc<PromptCache>) -> Self {
        Self {
            prompt_cache,
            key: HashKey::random(),
        }
    }

    /// Returns true if the limit of the cache is not 0.
    pub(super) fn is_enabled(&self) -> bool {
        self.prompt_cache.limit() > 0
    }

    /// Returns the cached messages at the beginning of a list. `bytes` is the body from the start
    /// of the list.
    pub(super) fn find(&self, bytes: &[u8], tenant: Option<&str>) -> CachedMessages {
        let mut key = self
            .key
            .hash_parts(&[tenant.unwrap_or_default().as_bytes()]);
        let mut keys = Vec::with_capacity(bytes.len() / CHUNK_BYTES);
        for chunk in bytes.chunks_exact(CHUNK_BYTES) {
            key = self.key.hash_parts(&[&key.to_le_bytes(), chunk]);
            keys.push(key);
        }
        let chunks = self.prompt_cache.find_leading(&keys);
        CachedMessages { keys, chunks }
    }

    /// Stores the new messages of a valid body. `rest` is the body with an empty list of messages.
    /// Returns the prefixes found and stored.
    pub(super) fn store(&self, body: &BodyMessages, rest: &str) -> MessageReuse {
        let BodyMessages {
            cached,
            list,
            new_messages,
        } = body;
        let cached_chunks = cached.chunks.len();
        let cached_count = cached.messages().count();
        let mut remaining = &new_messages[..];
        let mut pieces = Vec::new();
        let chunks = list.chunks_exact(CHUNK_BYTES).enumerate();
        for (at, chunk) in chunks.skip(cached_chunks) {
            let chunk_end = (at + 1) * CHUNK_BYTES;
            let count = remaining.partition_point(|parsed| parsed.end <= chunk_end);
            let (messages, later) = remaining.split_at(count);
            remaining = later;
            let messages = ChunkMessages {
                messages: messages.into(),
                value_count: json_scan::count_separators(chunk),
            };
            pieces.push((cached.keys[at], Arc::new(messages) as SharedCachedValue));
        }
        let stored_chunks = cached_chunks + pieces.len();
        let stored_count = cached_count + new_messages.len() - remaining.len();
        self.prompt_cache
            .store(&cached.keys[..cached_chunks], pieces);
        let prefix = |chunk_count: usize, message_count: usize| {
            let key = cached.keys.get(chunk_count.checked_sub(1)?)?;
            (message_count > 0).then(|| MessagePrefix {
                message_count,
                key: self.key.hash_parts(&[&key.to_le_bytes(), rest.as_bytes()]),
            })
        };
        MessageReuse {
            found: prefix(cached_chunks, cached_count),
            stored: prefix(stored_chunks, stored_count),
        }
    }
}

impl BodyMessages {
    pub(super) fn new(
        cached: CachedMessages,
        list: Bytes,
        new_messages: Vec<ParsedMessage>,
    ) -> Self {
        Self {
            cached,
            list,
            new_messages,
        }
    }

    /// Returns all messages.
    pub(super) fn messages(&self) -> Vec<Arc<ChatMessage>> {
        let text_at = |range| MessageText::from_quoted(self.list.slice(range));
        self.cached
            .messages()
            .chain(&self.new_messages)
            .map(|parsed| parsed.message(text_at))
            .collect()
    }
}

#[cfg(test)]
mod tests;
