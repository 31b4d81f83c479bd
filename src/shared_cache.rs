//! A cache outside the workers that all of them can load from: which blocks of a prompt does it hold? The answer is worth
//! a little and must cost less, so a lookup is bounded in time, in size and in number, and one that fails is no
//! information: the request is routed without it.
//!
//! The HTTP protocol: we `POST` to one URL, with `content-type: application/json`,
//! `{"model": "…", "block_size": 16, "block_hashes": ["…", …], "sequence_hashes": ["…", …]}`. A hash is 16 lowercase
//! hexadecimal digits; both lists are in the order of the prompt and of equal length, one entry per complete block. A block
//! hash knows one block (XXH3-64, salts included, see [`crate::block::hash`]), a sequence hash the block and all before it.
//! The answer has status 200 and the body `{"ranges": [[start, end], …]}`: half-open ranges of block numbers, from 0, that
//! the cache holds. They may come unsorted and overlap; those that reach beyond the prompt are cut, and a range that ends
//! before it starts makes the answer invalid. Other members of the object are ignored.

mod config;
mod http;
mod ranges;

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;

use thiserror::Error;

use crate::block::BlockHashes;

pub use config::SharedCacheConfig;
pub use http::HttpSharedCache;

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct SharedQuery<'a> {
    /// The model's name, as engines serve it.
    pub model: &'a str,
    /// The prompt.
    pub prompt: &'a BlockHashes,
}

/// The blocks that are held: sorted ranges that neither overlap nor touch, all within the prompt.
pub type SharedHits = Result<Vec<Range<u32>>, SharedCacheError>;

/// An answer on its way.
pub type Lookup<'a> = Pin<Box<dyn Future<Output = SharedHits> + Send + 'a>>;

/// A cache shared by all workers.
pub trait SharedCache: Send + Sync {
    /// The blocks of a prompt that it holds.
    fn hits<'a>(&'a self, query: SharedQuery<'a>) -> Lookup<'a>;
}

/// Why nothing is known about a prompt.
#[derive(Debug, Error)]
pub enum SharedCacheError {
    /// The client could not be made.
    #[error("the client could not be made: {0}")]
    Client(String),
    /// As many lookups are under way as are allowed.
    #[error("too many lookups under way")]
    Busy,
    /// No whole answer in time.
    #[error("no answer within the timeout")]
    Timeout,
    /// Nobody there, or the connection broke.
    #[error("the connection failed: {0}")]
    Connection(String),
    /// An answer with another status than 200.
    #[error("status {0}")]
    Status(u16),
    /// A longer answer than is allowed.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    /// An answer that cannot be read.
    #[error("the answer cannot be read: {0}")]
    Invalid(String),
}

impl SharedCacheError {
    /// The reason, as named in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            SharedCacheError::Client(_) => "client",
            SharedCacheError::Busy => "busy",
            SharedCacheError::Timeout => "timeout",
            SharedCacheError::Connection(_) => "connection",
            SharedCacheError::Status(_) => "status",
            SharedCacheError::TooLong(_) => "too_long",
            SharedCacheError::Invalid(_) => "invalid",
        }
    }
}

#[cfg(test)]
mod tests;
