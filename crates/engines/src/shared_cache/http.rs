//! HTTP client of a shared cache: one connection pool, one permit per lookup, and one timeout for
//! connecting, sending and reading.

use std::ops::Range;
use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode, Url};
use serde::{Deserialize, Serialize, Serializer};
use tokio::sync::Semaphore;
use warmroute_runtime::causes::join_causes;

use super::config::SharedCacheConfig;
use super::ranges::normalize_ranges;
use super::{
    SharedCache, SharedCacheError, SharedCacheFuture, SharedCacheQuery, SharedCacheResult,
};

/// Maximum number of blocks in a query, counted from the first. Building the query has no await
/// points, so the timeout cannot interrupt it.
const MAX_BLOCKS: usize = 1 << 16;

/// Maximum size of a response in bytes.
pub(super) const MAX_RESPONSE: usize = 64 << 10;

/// Maximum number of concurrent lookups. Further requests are routed without one.
pub(super) const MAX_CONCURRENCY: usize = 64;

/// HTTP client of a shared cache.
#[derive(Debug)]
pub struct HttpSharedCache {
    client: Client,
    url: Url,
    timeout: Duration,
    pub(super) permits: Semaphore,
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

impl HttpSharedCache {
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

    async fn lookup(&self, query: SharedCacheQuery<'_>) -> SharedCacheResult {
        if query.prompt.is_empty() {
            return Ok(Vec::new());
        }
        let _permit = self
            .permits
            .try_acquire()
            .map_err(|_| SharedCacheError::Busy)?;
        let answer = tokio::time::timeout(self.timeout, self.send_query(query)).await;
        let body = answer.map_err(|_| SharedCacheError::Timeout)??;
        parse_answer(&body, query.prompt.len())
    }

    async fn send_query(&self, query: SharedCacheQuery<'_>) -> Result<Vec<u8>, SharedCacheError> {
        let body = encode_query(query)?;
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        let response = request.send().await.map_err(connection_error)?;
        match response.status() {
            StatusCode::OK => self.read_body(response).await,
            status => Err(SharedCacheError::Status(status.as_u16())),
        }
    }

    async fn read_body(&self, mut response: Response) -> Result<Vec<u8>, SharedCacheError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(connection_error)? {
            if body.len() + chunk.len() > MAX_RESPONSE {
                return Err(SharedCacheError::TooLong);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

impl SharedCache for HttpSharedCache {
    fn query<'a>(&'a self, query: SharedCacheQuery<'a>) -> SharedCacheFuture<'a> {
        Box::pin(self.lookup(query))
    }
}

/// Encodes a query as JSON.
fn encode_query(query: SharedCacheQuery<'_>) -> Result<Vec<u8>, SharedCacheError> {
    let question = LookupRequest {
        model: query.model,
        block_size: query.prompt.block_size().0.get(),
        block_hashes: query
            .prompt
            .locals()
            .iter()
            .take(MAX_BLOCKS)
            .map(|hash| HexHash(hash.0))
            .collect(),
        sequence_hashes: query
            .prompt
            .sequences()
            .iter()
            .take(MAX_BLOCKS)
            .map(|hash| HexHash(hash.0))
            .collect(),
    };
    serde_json::to_vec(&question).map_err(|problem| SharedCacheError::Client(problem.to_string()))
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
