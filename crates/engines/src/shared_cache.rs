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

use std::ops::Range;
use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use reqwest::redirect::Policy;
use reqwest::{Client, StatusCode, Url};
use serde::{Deserialize, Serialize, Serializer};
use strum::IntoStaticStr;
use thiserror::Error;
use tokio::sync::Semaphore;
use warmroute_core::block::BlockHashes;
use warmroute_runtime::causes::join_causes;

pub use config::SharedCacheConfig;

use crate::engine_client::read_limited;

/// Maximum number of blocks in a query, counted from the first. Building the query has no await
/// points, so the timeout cannot interrupt it.
const MAX_BLOCKS: usize = 1 << 16;

/// Maximum size of a response in bytes.
const MAX_RESPONSE: usize = 64 << 10;

/// Maximum number of concurrent lookups. Further requests are routed without one.
const MAX_CONCURRENCY: usize = 64;

/// Blocks that the cache holds: sorted, disjoint and non-adjacent ranges within the prompt.
pub type SharedCacheResult = Result<Vec<Range<u32>>, SharedCacheError>;

/// Reason why a lookup failed.
#[derive(Debug, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
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
        self.into()
    }
}

/// HTTP client of a cache shared by all workers: one connection pool, one permit per lookup, and
/// one timeout for connecting, sending and reading.
#[derive(Debug)]
pub struct SharedCacheClient {
    client: Client,
    url: Url,
    timeout: Duration,
    permits: Semaphore,
}

#[derive(Serialize)]
struct LookupRequest<'a> {
    model: &'a str,
    block_size: u32,
    block_hashes: Vec<HexHash>,
    sequence_hashes: Vec<HexHash>,
}

#[derive(Deserialize)]
struct LookupResponse {
    ranges: Vec<(u64, u64)>,
}

/// A hash as hexadecimal text, because many JSON parsers cannot represent 64-bit numbers exactly.
struct HexHash(u64);

impl Serialize for HexHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl SharedCacheClient {
    /// Creates a client. It connects on the first lookup.
    pub fn new(config: &SharedCacheConfig) -> Result<Self, SharedCacheError> {
        let client =
            |problem: &dyn std::fmt::Display| SharedCacheError::Client(problem.to_string());
        let url = Url::parse(&config.url).map_err(|problem| client(&problem))?;
        // The cache is an internal service. It is called directly, and redirects are not followed.
        let builder = warmroute_runtime::tls::http_client_builder()
            .redirect(Policy::none())
            .tcp_nodelay(true);
        let pool = builder.pool_max_idle_per_host(MAX_CONCURRENCY);
        Ok(Self {
            client: pool.build().map_err(|problem| client(&problem))?,
            url,
            timeout: config.timeout.get(),
            permits: Semaphore::new(MAX_CONCURRENCY),
        })
    }

    /// Looks up the blocks of a prompt that the cache holds. `model` is named as engines serve it.
    /// The prompt has at least one block.
    pub async fn query(&self, model: &str, prompt: &BlockHashes) -> SharedCacheResult {
        let _permit = self
            .permits
            .try_acquire()
            .map_err(|_| SharedCacheError::Busy)?;
        let answer = tokio::time::timeout(self.timeout, self.send_query(model, prompt)).await;
        let body = answer.map_err(|_| SharedCacheError::Timeout)??;
        parse_answer(&body, prompt.len())
    }

    async fn send_query(
        &self,
        model: &str,
        prompt: &BlockHashes,
    ) -> Result<Vec<u8>, SharedCacheError> {
        let body = encode_query(model, prompt)?;
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        let response = request.send().await.map_err(connection_error)?;
        if response.status() != StatusCode::OK {
            return Err(SharedCacheError::Status(response.status().as_u16()));
        }
        let body = read_limited(response, MAX_RESPONSE).await;
        body.map_err(connection_error)?
            .ok_or(SharedCacheError::TooLong)
    }
}

/// Encodes a query as JSON.
fn encode_query(model: &str, prompt: &BlockHashes) -> Result<Vec<u8>, SharedCacheError> {
    let locals = prompt.locals().iter().take(MAX_BLOCKS);
    let sequences = prompt.sequences().iter().take(MAX_BLOCKS);
    let query = LookupRequest {
        model,
        block_size: prompt.block_size().0.get(),
        block_hashes: locals.map(|hash| HexHash(hash.0)).collect(),
        sequence_hashes: sequences.map(|hash| HexHash(hash.0)).collect(),
    };
    serde_json::to_vec(&query).map_err(|problem| SharedCacheError::Client(problem.to_string()))
}

fn parse_answer(body: &[u8], blocks: usize) -> Result<Vec<Range<u32>>, SharedCacheError> {
    let answer: LookupResponse = serde_json::from_slice(body)
        .map_err(|problem| SharedCacheError::Invalid(problem.to_string()))?;
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    normalize_ranges(&answer.ranges, blocks).map_err(|(start, end)| {
        SharedCacheError::Invalid(format!("the range [{start}, {end}] ends before it starts"))
    })
}

#[expect(clippy::needless_pass_by_value, reason = "a function for map_err")]
fn connection_error(problem: reqwest::Error) -> SharedCacheError {
    SharedCacheError::Connection(join_causes(&problem))
}

/// Sorts ranges, truncates them at the end of the prompt, and merges overlapping and adjacent ones.
/// Returns the first range that ends before it starts as the error.
fn normalize_ranges(ranges: &[(u64, u64)], blocks: u32) -> Result<Vec<Range<u32>>, (u64, u64)> {
    if let Some(&reversed) = ranges.iter().find(|(start, end)| start > end) {
        return Err(reversed);
    }
    let cut = |block: u64| u32::try_from(block).unwrap_or(u32::MAX).min(blocks);
    let mut sorted: Vec<Range<u32>> = ranges
        .iter()
        .map(|&(start, end)| cut(start)..cut(end))
        .collect();
    sorted.retain(|range| !range.is_empty());
    sorted.sort_unstable_by_key(|range| range.start);
    sorted.dedup_by(|next, last| {
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    Ok(sorted)
}

#[cfg(test)]
mod tests;
