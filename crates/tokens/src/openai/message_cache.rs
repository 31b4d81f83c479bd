//! Reuse of the messages of earlier bodies. A turn of a conversation begins with the bytes of the
//! previous turn's messages, so these messages need not be parsed again
//! (`docs/decisions/0050-identify-earlier-turns-by-hashes-of-bodies.md`).
//!
//! The list of messages is divided into chunks of equal length. The messages that end in a chunk
//! are cached under a hash of the list up to the end of the chunk. The bytes of a list up to the
//! end of a message determine that message and its position, so a cached message equals a newly
//! parsed one.

use std::sync::Arc;

use super::ChatMessage;
use super::json_scan;
use crate::prompt_cache::{CachedPiece, HashKey, PromptCache};

/// Length of a chunk in bytes.
pub(super) const CHUNK_BYTES: usize = 4 << 10;

/// Maximum memory of a JSON value in a message, without its text: a field of an object of its own.
const VALUE_BYTES: usize = 448;

/// Messages that end in one chunk of a list.
#[derive(Debug)]
pub(crate) struct ChunkMessages {
    messages: Box<[ParsedMessage]>,
    /// Upper bound on the number of JSON values that begin in the chunk.
    value_count: usize,
}

/// A message and its position in a list.
#[derive(Clone, Debug)]
pub(super) struct ParsedMessage {
    pub(super) message: Arc<ChatMessage>,
    /// Position directly after the message, in bytes from the beginning of the list. White space
    /// is excluded, so that the bytes up to the end of a chunk determine its messages.
    pub(super) end: usize,
    /// Estimated memory of the message in bytes.
    memory_bytes: usize,
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
    /// Number of cached chunks.
    chunk_count: usize,
    pub(super) messages: Vec<Arc<ChatMessage>>,
    /// Position after the last cached message, in bytes from the beginning of the list.
    pub(super) end: usize,
    /// Upper bound on the number of JSON values in the cached chunks.
    pub(super) value_count: usize,
}

/// The messages of a body, of which the first may have been cached.
pub(super) struct BodyMessages<'b> {
    cached: CachedMessages,
    /// The list of messages.
    list: &'b [u8],
    /// Messages after the cached ones.
    new_messages: Vec<ParsedMessage>,
}

/// Cache of the messages of earlier bodies.
pub struct MessageCache {
    prompt_cache: Arc<PromptCache>,
    key: HashKey,
}

impl ChunkMessages {
    /// Returns the estimated memory in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.messages
            .iter()
            .map(|message| message.memory_bytes)
            .sum()
    }
}

impl ParsedMessage {
    /// Creates a message of `length` bytes that ends at `end`. `value_count` is the number of its
    /// JSON values, or 0 if it has only a role and a text.
    pub(super) fn new(message: ChatMessage, end: usize, length: usize, value_count: usize) -> Self {
        Self {
            message: Arc::new(message),
            end,
            memory_bytes: size_of::<ChatMessage>()
                + size_of::<Self>()
                + length
                + value_count * VALUE_BYTES,
        }
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
        let chunks = bytes.chunks_exact(CHUNK_BYTES).map(|chunk| {
            key = self.key.hash_parts(&[&key.to_le_bytes(), chunk]);
            key
        });
        let keys: Vec<u128> = chunks.collect();
        let found = self
            .prompt_cache
            .find_leading(&keys, CachedPiece::chunk_messages);
        let messages = || found.iter().flat_map(|chunk| &chunk.messages);
        CachedMessages {
            chunk_count: found.len(),
            messages: messages().map(|parsed| parsed.message.clone()).collect(),
            end: messages().last().map_or(0, |parsed| parsed.end),
            value_count: found.iter().map(|chunk| chunk.value_count).sum(),
            keys,
        }
    }

    /// Stores the new messages of a valid body. `rest` is the body with an empty list of messages.
    /// Returns the prefixes found and stored.
    pub(super) fn store(&self, body: &BodyMessages<'_>, rest: &str) -> MessageReuse {
        let BodyMessages {
            cached,
            list,
            new_messages,
        } = body;
        let mut remaining = &new_messages[..];
        let chunks = list.chunks_exact(CHUNK_BYTES).enumerate();
        let pieces = chunks.skip(cached.chunk_count).map(|(at, chunk)| {
            let chunk_end = (at + 1) * CHUNK_BYTES;
            let count = remaining.partition_point(|parsed| parsed.end <= chunk_end);
            let (messages, later) = remaining.split_at(count);
            remaining = later;
            let messages = ChunkMessages {
                messages: messages.into(),
                value_count: json_scan::count_separators(chunk),
            };
            (cached.keys[at], CachedPiece::Messages(Arc::new(messages)))
        });
        let pieces: Vec<_> = pieces.collect();
        let stored_chunks = cached.chunk_count + pieces.len();
        let stored_count = cached.messages.len() + new_messages.len() - remaining.len();
        self.prompt_cache
            .store(&cached.keys[..cached.chunk_count], pieces);
        let prefix = |chunk_count: usize, message_count: usize| {
            let key = cached.keys.get(chunk_count.checked_sub(1)?)?;
            (message_count > 0).then(|| MessagePrefix {
                message_count,
                key: self.key.hash_parts(&[&key.to_le_bytes(), rest.as_bytes()]),
            })
        };
        MessageReuse {
            found: prefix(cached.chunk_count, cached.messages.len()),
            stored: prefix(stored_chunks, stored_count),
        }
    }
}

impl<'b> BodyMessages<'b> {
    pub(super) fn new(
        cached: CachedMessages,
        list: &'b [u8],
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
        let new_messages = self.new_messages.iter().map(|parsed| &parsed.message);
        self.cached
            .messages
            .iter()
            .chain(new_messages)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests;
