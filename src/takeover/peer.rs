//! Another warmroute that is asked for what it knows.

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

use super::config::TakeoverConfig;
use crate::api::pb;
use crate::api::pb::router_client::RouterClient;
use crate::index::dump::{DumpError, RankDump, Reader, VERSION};
use crate::worker::WorkerRank;

/// Copies at a time; whoever is asked allows four, to all that ask.
const AT_ONCE: usize = 2;

/// Most bytes of the copy of one rank.
const MOST_BYTES: u64 = 4 << 30;

/// Bytes read ahead.
const AHEAD: usize = 256 * 1024;

/// The first wait before it is tried again, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// Longest wait for a connection, and for each piece.
const WAITS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// Why there is no copy.
enum Failure {
    /// It will be so the next time.
    ForGood(anyhow::Error),
    /// Another one, or the same a little later, may do better.
    ForNow(anyhow::Error),
}

/// The way to it.
pub(super) struct Peer {
    endpoint: Endpoint,
    turns: Semaphore,
}

impl Peer {
    /// Nothing is asked yet.
    pub(super) fn new(from: &str, settings: &TakeoverConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(from.to_owned())?.connect_timeout(WAITS.0);
        if from.starts_with("https://") {
            endpoint = endpoint.tls_config(settings.files().read()?)?;
        }
        Ok(Self {
            endpoint,
            turns: Semaphore::new(AT_ONCE),
        })
    }

    /// What it knows of a rank; `None` where it listens to no such rank. Asks until then, or for ever.
    pub(super) async fn ask(
        &self,
        rank: WorkerRank,
        until: Option<Instant>,
    ) -> anyhow::Result<Option<RankDump>> {
        let mut pause = PAUSE.0;
        let mut last = anyhow!("others are asked for before it");
        let asked = async {
            loop {
                let problem = match self.try_copy(rank).await {
                    Ok(held) => return Ok(held),
                    Err(Failure::ForGood(problem)) => return Err(problem),
                    Err(Failure::ForNow(problem)) => problem,
                };
                debug!(%rank, problem = format!("{problem:#}"), "no copy yet");
                last = problem;
                sleep(pause.mul_f64(rand::random_range(0.75..1.25))).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        };
        let Some(until) = until else {
            return asked.await;
        };
        let answered = timeout_at(until, asked).await;
        answered.unwrap_or_else(|_| Err(last.context("not in time")))
    }

    async fn try_copy(&self, rank: WorkerRank) -> Result<Option<RankDump>, Failure> {
        let _turn = self
            .turns
            .acquire()
            .await
            .map_err(|closed| Failure::ForGood(closed.into()))?;
        // A name may stand for several, of which not all can tell: each time another connection.
        let mut client = RouterClient::new(self.endpoint.connect_lazy());
        let worker = pb::WorkerRank {
            worker_id: rank.worker.0,
            dp_rank: rank.rank.0,
        };
        let asked = pb::CopyRankRequest {
            worker: Some(worker),
            format: VERSION.into(),
        };
        let answer = timeout(WAITS.1, client.copy_rank(asked)).await;
        let pieces = match answer.map_err(|_| Failure::ForNow(anyhow!("no answer")))? {
            Ok(answer) => answer.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(of_status(status)),
        };
        // However this ends, nobody goes on reading.
        let left = CancellationToken::new();
        let _leaving = left.clone().drop_guard();
        let bytes = SyncIoBridge::new(StreamReader::new(Box::pin(bytes_of(pieces, left))));
        // Never all of the bytes are here: they become rows as they come.
        let read =
            move || Reader::new(BufReader::with_capacity(AHEAD, bytes.take(MOST_BYTES)))?.single();
        let read = tokio::task::spawn_blocking(read)
            .await
            .map_err(|error| Failure::ForGood(error.into()))?;
        let held = read.map_err(of_dump)?;
        match held.rank() == rank {
            true => Ok(Some(held)),
            false => Err(Failure::ForGood(anyhow!(
                "the copy is of worker rank {}",
                held.rank()
            ))),
        }
    }
}

/// The bytes of the pieces, each of which has to come in time.
fn bytes_of(
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

fn of_status(status: Status) -> Failure {
    match status.code() {
        Code::FailedPrecondition
        | Code::InvalidArgument
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::Unimplemented => Failure::ForGood(status.into()),
        _ => Failure::ForNow(status.into()),
    }
}

fn of_dump(error: DumpError) -> Failure {
    match error {
        DumpError::Magic | DumpError::Version(_) | DumpError::Malformed(_) => {
            Failure::ForGood(error.into())
        }
        DumpError::Io(_) | DumpError::Checksum | DumpError::Truncated => {
            Failure::ForNow(error.into())
        }
    }
}
