//! The client: one pool of connections, a permit per lookup, and one deadline over connecting, asking and reading.

use std::ops::Range;
use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode, Url};
use serde::{Deserialize, Serialize, Serializer};
use tokio::sync::Semaphore;

use super::config::SharedCacheConfig;
use super::ranges::normalized;
use super::{Lookup, SharedCache, SharedCacheError, SharedHits, SharedQuery};

/// Most blocks of a prompt that are queried, from the first on: the query is built at once, and no timeout interrupts that.
const MOST_BLOCKS: usize = 1 << 16;

/// A shared cache that is asked over HTTP.
#[derive(Debug)]
pub struct HttpSharedCache {
    client: Client,
    url: Url,
    timeout: Duration,
    longest: usize,
    permits: Semaphore,
}

#[derive(Serialize)]
struct Question<'a> {
    model: &'a str,
    block_size: u32,
    block_hashes: Vec<Hex>,
    sequence_hashes: Vec<Hex>,
}

#[derive(Deserialize)]
struct Answer {
    ranges: Vec<(u64, u64)>,
}

/// A hash as text: JSON's numbers are not exact where many read them.
struct Hex(u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl HttpSharedCache {
    /// A client; connects with the first lookup.
    pub fn new(config: &SharedCacheConfig) -> Result<Self, SharedCacheError> {
        let client =
            |problem: &dyn std::fmt::Display| SharedCacheError::Client(problem.to_string());
        let url = Url::parse(&config.url).map_err(|problem| client(&problem))?;
        // A cache is an inner service: it is reached directly, and where it sends us instead we have no business.
        let builder = crate::tls::client()
            .redirect(Policy::none())
            .tcp_nodelay(true);
        let pool = builder.pool_max_idle_per_host(config.in_flight as usize);
        Ok(Self {
            client: pool.build().map_err(|problem| client(&problem))?,
            url,
            timeout: config.timeout.get(),
            longest: config.answer.bytes(),
            permits: Semaphore::new((config.in_flight as usize).min(Semaphore::MAX_PERMITS)),
        })
    }

    async fn ask(&self, query: SharedQuery<'_>) -> SharedHits {
        if query.prompt.is_empty() {
            return Ok(Vec::new());
        }
        let _permit = self
            .permits
            .try_acquire()
            .map_err(|_| SharedCacheError::Busy)?;
        let answer = tokio::time::timeout(self.timeout, self.exchange(query)).await;
        let body = answer.map_err(|_| SharedCacheError::Timeout)??;
        read(&body, query.prompt.len())
    }

    async fn exchange(&self, query: SharedQuery<'_>) -> Result<Vec<u8>, SharedCacheError> {
        let body = encode_query(query)?;
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        let response = request.send().await.map_err(broken)?;
        match response.status() {
            StatusCode::OK => self.body(response).await,
            status => Err(SharedCacheError::Status(status.as_u16())),
        }
    }

    async fn body(&self, mut response: Response) -> Result<Vec<u8>, SharedCacheError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(broken)? {
            if body.len() + chunk.len() > self.longest {
                return Err(SharedCacheError::TooLong(self.longest));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

impl SharedCache for HttpSharedCache {
    fn hits<'a>(&'a self, query: SharedQuery<'a>) -> Lookup<'a> {
        Box::pin(self.ask(query))
    }
}

/// The body of a query. The hashes are released before the query is sent.
fn encode_query(query: SharedQuery<'_>) -> Result<Vec<u8>, SharedCacheError> {
    let question = Question {
        model: query.model,
        block_size: query.prompt.block_size().0.get(),
        block_hashes: query
            .prompt
            .locals()
            .iter()
            .take(MOST_BLOCKS)
            .map(|hash| Hex(hash.0))
            .collect(),
        sequence_hashes: query
            .prompt
            .sequences()
            .iter()
            .take(MOST_BLOCKS)
            .map(|hash| Hex(hash.0))
            .collect(),
    };
    serde_json::to_vec(&question).map_err(|problem| SharedCacheError::Client(problem.to_string()))
}

fn read(body: &[u8], blocks: usize) -> Result<Vec<Range<u32>>, SharedCacheError> {
    let answer: Answer = serde_json::from_slice(body)
        .map_err(|problem| SharedCacheError::Invalid(problem.to_string()))?;
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    normalized(&answer.ranges, blocks).map_err(|(start, end)| {
        SharedCacheError::Invalid(format!("the range [{start}, {end}] ends before it starts"))
    })
}

/// With its causes: the outermost says only that sending failed.
#[expect(clippy::needless_pass_by_value, reason = "a function for map_err")]
fn broken(problem: reqwest::Error) -> SharedCacheError {
    let mut text = problem.to_string();
    let mut cause = std::error::Error::source(&problem);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    SharedCacheError::Connection(text)
}
