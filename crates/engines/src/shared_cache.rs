//! Lookup in a cache outside the workers that all workers can load from. A lookup is best effort,
//! so its duration, response size and number are limited. If it fails, the request is routed
//! without its result.
//!
//! The HTTP protocol is a `POST` to one URL with `content-type: application/json` and the body
//! `{"model": "…", "block_size": 16, "block_hashes": ["…", …], "sequence_hashes": ["…", …]}`. A
//! hash is 16 lowercase hexadecimal digits. Both lists are in the order of the prompt, with one
//! entry per complete block. A block hash covers one block (XXH3-64, salts included, see
//! [`warmroute_core::block::hash`]). A sequence hash covers the block and all blocks before it.
//!
//! The response has status 200 and the body `{"ranges": [[start, end], …]}`: half-open ranges of
//! block numbers, from 0, that the cache holds. They may be unsorted and overlap. Ranges beyond the
//! prompt are truncated. A range that ends before it starts makes the response invalid. Other
//! members of the object are ignored.

mod config;
mod http;
mod ranges;

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;

use thiserror::Error;

use warmroute_core::block::BlockHashes;

pub use config::SharedCacheConfig;
pub use http::HttpSharedCache;
use http::MAX_RESPONSE;

/// A query for one prompt.
#[derive(Clone, Copy, Debug)]
pub struct SharedCacheQuery<'a> {
    /// Model name, as engines serve it.
    pub model: &'a str,
    /// Block hashes of the prompt.
    pub prompt: &'a BlockHashes,
}

/// Blocks that the cache holds: sorted, disjoint and non-adjacent ranges within the prompt.
pub type SharedCacheResult = Result<Vec<Range<u32>>, SharedCacheError>;

/// A pending lookup.
pub type SharedCacheFuture<'a> = Pin<Box<dyn Future<Output = SharedCacheResult> + Send + 'a>>;

/// A cache shared by all workers.
pub trait SharedCache: Send + Sync {
    /// Looks up the blocks of a prompt that the cache holds.
    fn query<'a>(&'a self, query: SharedCacheQuery<'a>) -> SharedCacheFuture<'a>;
}

/// Reason why a lookup failed.
#[derive(Debug, Error)]
pub enum SharedCacheError {
    /// The client could not be created.
    #[error("the client could not be created: {0}")]
    Client(String),
    /// Too many concurrent lookups.
    #[error("too many concurrent lookups")]
    Busy,
    /// No complete response within the timeout.
    #[error("no response within the timeout")]
    Timeout,
    /// The connection could not be established, or it broke.
    #[error("the connection failed: {0}")]
    Connection(String),
    /// A status other than 200.
    #[error("status {0}")]
    Status(u16),
    /// The response exceeds the limit.
    #[error("the response is longer than {MAX_RESPONSE} bytes")]
    TooLong,
    /// The response is malformed.
    #[error("the response is invalid: {0}")]
    Invalid(String),
}

impl SharedCacheError {
    /// Returns the reason label in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            SharedCacheError::Client(_) => "client",
            SharedCacheError::Busy => "busy",
            SharedCacheError::Timeout => "timeout",
            SharedCacheError::Connection(_) => "connection",
            SharedCacheError::Status(_) => "status",
            SharedCacheError::TooLong => "too_long",
            SharedCacheError::Invalid(_) => "invalid",
        }
    }
}

#[cfg(test)]
mod tests;
