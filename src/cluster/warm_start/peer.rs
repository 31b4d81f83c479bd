//! Client of the warmroute process that index contents are copied from.

use std::io::{self, BufReader, Read as _};
use std::time::Duration;

use anyhow::anyhow;
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
use warmroute_core::worker::WorkerRank;

use super::config::WarmStartConfig;
use crate::api::pb;
use crate::api::pb::router_client::RouterClient;

/// Maximum number of concurrent copies. The peer allows four for all its clients.
const MAX_CONCURRENT_COPIES: usize = 2;

/// Maximum size of the copy of one rank.
const MAX_COPY_BYTES: u64 = 4 << 30;

/// Size of the read buffer.
const READ_BUFFER_BYTES: usize = 256 * 1024;

/// First and longest delay between attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// Timeouts of the connection and of each chunk.
const WAITS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// Error of a failed copy.
enum CopyError {
    /// The same request would fail again.
    Permanent(anyhow::Error),
    /// A later request, possibly to another process behind the name, may succeed.
    Retryable(anyhow::Error),
}

/// Client of the peer.
pub(super) struct PeerClient {
    endpoint: Endpoint,
    permits: Semaphore,
}

impl PeerClient {
    /// Creates the client without connecting.
    pub(super) fn new(from: &str, settings: &WarmStartConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(from.to_owned())?.connect_timeout(WAITS.0);
        if from.starts_with("https://") {
            endpoint = endpoint.tls_config(settings.files().read()?)?;
        }
        Ok(Self {
            endpoint,
            permits: Semaphore::new(MAX_CONCURRENT_COPIES),
        })
    }

    /// Copies a rank, with retries until `until`, or without limit. Returns `None` if the peer does
    /// not follow the rank.
    pub(super) async fn fetch_rank(
        &self,
        rank: WorkerRank,
        until: Option<Instant>,
    ) -> anyhow::Result<Option<RankDump>> {
        let mut pause = PAUSE.0;
        let mut last = anyhow!("other ranks are copied first");
        let attempts = async {
            loop {
                let problem = match self.try_fetch_rank(rank).await {
                    Ok(held) => return Ok(held),
                    Err(CopyError::Permanent(problem)) => return Err(problem),
                    Err(CopyError::Retryable(problem)) => problem,
                };
                debug!(%rank, problem = format!("{problem:#}"), "warm start: copy failed, retrying");
                last = problem;
                sleep(pause.mul_f64(rand::random_range(0.75..1.25))).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        };
        let Some(until) = until else {
            return attempts.await;
        };
        let answered = timeout_at(until, attempts).await;
        answered.unwrap_or_else(|_| Err(last.context("not in time")))
    }

    async fn try_fetch_rank(&self, rank: WorkerRank) -> Result<Option<RankDump>, CopyError> {
        let _turn = self
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
        let answer = timeout(WAITS.1, client.copy_rank(request)).await;
        let pieces = match answer.map_err(|_| CopyError::Retryable(anyhow!("no answer")))? {
            Ok(answer) => answer.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(classify_status(status)),
        };
        // Ends the blocking reader when this future is dropped.
        let left = CancellationToken::new();
        let _leaving = left.clone().drop_guard();
        let bytes = SyncIoBridge::new(StreamReader::new(Box::pin(chunk_bytes(pieces, left))));
        // The bytes are decoded as they arrive and are never all in memory.
        let read = move || {
            DumpReader::new(BufReader::with_capacity(
                READ_BUFFER_BYTES,
                bytes.take(MAX_COPY_BYTES),
            ))?
            .read_single()
        };
        let read = tokio::task::spawn_blocking(read)
            .await
            .map_err(|error| CopyError::Permanent(error.into()))?;
        let held = read.map_err(classify_dump_error)?;
        if held.rank() != rank {
            let error = anyhow!("the copy is of worker rank {}", held.rank());
            return Err(CopyError::Permanent(error));
        }
        Ok(Some(held))
    }
}

/// Returns the bytes of the chunks, with a timeout for each chunk.
fn chunk_bytes(
    pieces: Streaming<pb::CopyRankResponse>,
    left: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> {
    stream::try_unfold((pieces, left), async |(mut pieces, left)| {
        let piece = left
            .run_until_cancelled(timeout(WAITS.1, pieces.message()))
            .await;
        let piece = piece
            .ok_or(io::ErrorKind::Interrupted)??
            .map_err(io::Error::other)?;
        Ok(piece.map(|piece| (Bytes::from(piece.piece), (pieces, left))))
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
