//! Client of the warmroute process (peer) from which index contents are copied.

use std::io::{self, BufReader};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::io::{StreamReader, SyncIoBridge};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tonic::{Code, Status, Streaming};
use tracing::debug;
use warmroute_core::index::dump::{DumpError, DumpReader, RankDump, VERSION};
use warmroute_core::load::LatencySnapshot;
use warmroute_core::worker::WorkerRank;

use super::config::WarmStartConfig;
use crate::proto::router as pb;
use crate::proto::router::router_client::RouterClient;

/// Maximum number of concurrent copies. The peer allows four in total for all clients.
const MAX_CONCURRENT_COPIES: usize = 2;

/// Maximum size in bytes of the learned latency: about 300 bytes for each rank.
const MAX_LATENCY_BYTES: usize = 64 << 20;

/// Size of the read buffer.
const READ_BUFFER_BYTES: usize = 256 * 1024;

/// Initial and maximum delay between attempts.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// Timeouts of the connection and of each chunk.
const TIMEOUTS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// Error of a failed copy.
enum CopyError {
    /// A retry of the request would fail again.
    Permanent(anyhow::Error),
    /// A retry may succeed, possibly with another process that the name resolves to.
    Retryable(anyhow::Error),
}

/// Client of the peer.
pub(super) struct PeerClient {
    endpoint: Endpoint,
    permits: Semaphore,
}

impl PeerClient {
    /// Creates the client without connecting.
    pub(super) fn new(url: &str, settings: &WarmStartConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(url.to_owned())?.connect_timeout(TIMEOUTS.0);
        if url.starts_with("https://") {
            endpoint = endpoint.tls_config(settings.files().read()?)?;
        }
        Ok(Self {
            endpoint,
            permits: Semaphore::new(MAX_CONCURRENT_COPIES),
        })
    }

    /// Copies a rank. Retries until `deadline`, or without limit if it is `None`. Returns `None` if
    /// the peer receives no events of the rank.
    pub(super) async fn fetch_rank(
        &self,
        rank: WorkerRank,
        deadline: Option<Instant>,
    ) -> anyhow::Result<Option<RankDump>> {
        retry(deadline, || self.try_fetch_rank(rank))
            .await
            .with_context(|| format!("worker rank {rank}"))
    }

    /// Copies the learned latency. Retries like [`Self::fetch_rank`].
    pub(super) async fn fetch_latency(
        &self,
        deadline: Option<Instant>,
    ) -> anyhow::Result<LatencySnapshot> {
        retry(deadline, || self.try_fetch_latency()).await
    }

    async fn try_fetch_latency(&self) -> Result<LatencySnapshot, CopyError> {
        let mut client = RouterClient::new(self.endpoint.connect_lazy())
            .max_decoding_message_size(MAX_LATENCY_BYTES);
        let copy = timeout(TIMEOUTS.1, client.copy_latency(pb::CopyLatencyRequest {})).await;
        let copy = copy
            .map_err(|_| CopyError::Retryable(anyhow!("no response")))?
            .map_err(classify_status)?;
        serde_json::from_slice(&copy.into_inner().snapshot)
            .map_err(|error| CopyError::Permanent(error.into()))
    }

    async fn try_fetch_rank(&self, rank: WorkerRank) -> Result<Option<RankDump>, CopyError> {
        let _permit = self
            .permits
            .acquire()
            .await
            .map_err(|closed| CopyError::Permanent(closed.into()))?;
        // The name may resolve to several processes, not all of which are ready, so each attempt
        // opens a new connection.
        let mut client = RouterClient::new(self.endpoint.connect_lazy());
        let worker = pb::WorkerRank {
            worker_id: rank.worker.0,
            dp_rank: rank.rank.0,
        };
        let request = pb::CopyRankRequest {
            worker: Some(worker),
            format: VERSION.into(),
        };
        let answer = timeout(TIMEOUTS.1, client.copy_rank(request)).await;
        let chunks = match answer.map_err(|_| CopyError::Retryable(anyhow!("no response")))? {
            Ok(answer) => answer.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(classify_status(status)),
        };
        // If this future is dropped, the guard ends the blocking reader.
        let cancelled = CancellationToken::new();
        let _cancel_guard = cancelled.clone().drop_guard();
        let bytes = SyncIoBridge::new(StreamReader::new(Box::pin(chunk_bytes(chunks, cancelled))));
        let read = move || {
            DumpReader::new(BufReader::with_capacity(READ_BUFFER_BYTES, bytes))?.read_single()
        };
        let read = tokio::task::spawn_blocking(read)
            .await
            .map_err(|error| CopyError::Permanent(error.into()))?;
        let copy = read.map_err(classify_dump_error)?;
        if copy.rank() != rank {
            let error = anyhow!("the copy is of worker rank {}", copy.rank());
            return Err(CopyError::Permanent(error));
        }
        Ok(Some(copy))
    }
}

/// Repeats an attempt until `deadline`, or without limit if it is `None`.
async fn retry<T, F>(deadline: Option<Instant>, attempt: impl Fn() -> F) -> anyhow::Result<T>
where
    F: Future<Output = Result<T, CopyError>>,
{
    let mut delay = RETRY_DELAYS.0;
    let mut last_error = anyhow!("waiting for other copies");
    let attempts = async {
        loop {
            let problem = match attempt().await {
                Ok(copy) => return Ok(copy),
                Err(CopyError::Permanent(problem)) => return Err(problem),
                Err(CopyError::Retryable(problem)) => problem,
            };
            debug!(
                problem = format!("{problem:#}"),
                "warm start: copy failed; retrying"
            );
            last_error = problem;
            sleep(delay.mul_f64(rand::random_range(0.75..1.25))).await;
            delay = (delay * 2).min(RETRY_DELAYS.1);
        }
    };
    let Some(deadline) = deadline else {
        return attempts.await;
    };
    let result = timeout_at(deadline, attempts).await;
    result.unwrap_or_else(|_| Err(last_error.context("timed out")))
}

/// Returns the bytes of the chunks, with a timeout for each chunk.
fn chunk_bytes(
    chunks: Streaming<pb::CopyRankResponse>,
    cancelled: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> {
    stream::try_unfold((chunks, cancelled), async |(mut chunks, cancelled)| {
        let chunk = cancelled
            .run_until_cancelled(timeout(TIMEOUTS.1, chunks.message()))
            .await;
        let chunk = chunk
            .ok_or(io::ErrorKind::Interrupted)??
            .map_err(io::Error::other)?;
        Ok(chunk.map(|chunk| (Bytes::from(chunk.chunk), (chunks, cancelled))))
    })
}

fn classify_status(status: Status) -> CopyError {
    match status.code() {
        Code::FailedPrecondition
        | Code::InvalidArgument
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::Unimplemented => CopyError::Permanent(status.into()),
        _ => CopyError::Retryable(status.into()),
    }
}

fn classify_dump_error(error: DumpError) -> CopyError {
    match error {
        DumpError::Magic | DumpError::Version(_) | DumpError::Malformed(_) => {
            CopyError::Permanent(error.into())
        }
        DumpError::Io(_) | DumpError::Checksum | DumpError::Truncated => {
            CopyError::Retryable(error.into())
        }
    }
}
