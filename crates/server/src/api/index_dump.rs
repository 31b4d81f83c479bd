//! Dump of the index as KV events, rank by rank. Each rank is copied at one instant and streamed
//! from the copy as fast as the caller reads. KV events of the rank wait only while it is copied. A
//! slow caller holds a copy, so the number of dumps is limited and a stalled caller is
//! disconnected.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use warmroute_core::fleet::Fleet;
use warmroute_core::worker::WorkerRank;

use super::error::ApiError;
use super::response;
use super::writers::RankWriters;
use crate::proto::router as pb;
use crate::proto::router::dump_events_response::Kind;

/// Number of messages buffered for a slow caller.
const CHANNEL_CAPACITY: usize = 64;

/// Timeout for a caller to read the next message.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of concurrent dumps.
pub(super) const MAX_DUMPS: usize = 4;

/// Stream of the messages of a dump.
pub type DumpStream = ReceiverStream<Result<pb::DumpEventsResponse, Status>>;

/// Inputs of a dump.
pub(super) struct DumpSource {
    pub(super) writers: Arc<RankWriters>,
    pub(super) fleet: Arc<Fleet>,
    /// Concurrency permit, held until the dump ends.
    pub(super) permit: OwnedSemaphorePermit,
    pub(super) shutdown: CancellationToken,
}

/// Starts to stream the given ranks, or all ranks if `wanted` is empty.
pub(super) fn start_dump(
    source: DumpSource,
    wanted: &BTreeSet<WorkerRank>,
) -> Result<DumpStream, ApiError> {
    let known = source.writers.ranks();
    if let Some(unknown) = wanted
        .iter()
        .find(|rank| known.binary_search(rank).is_err())
    {
        return Err(ApiError::NoEventSource(*unknown));
    }
    let ranks = if wanted.is_empty() {
        known
    } else {
        wanted.iter().copied().collect()
    };
    let (message_tx, message_rx) = mpsc::channel(CHANNEL_CAPACITY);
    tokio::spawn(async move {
        let DumpSource {
            writers,
            fleet,
            permit,
            shutdown,
        } = source;
        // A dump without `complete` is recognizably truncated.
        shutdown
            .run_until_cancelled(send_dump(&writers, &fleet, ranks, &message_tx))
            .await;
        drop(permit);
    });
    Ok(ReceiverStream::new(message_rx))
}

/// Sends the dump. Returns `None` if the caller disconnects or stalls.
async fn send_dump(
    writers: &Arc<RankWriters>,
    fleet: &Fleet,
    ranks: Vec<WorkerRank>,
    message_tx: &mpsc::Sender<Result<pb::DumpEventsResponse, Status>>,
) -> Option<()> {
    let emit = |kind| async {
        let message = Ok(pb::DumpEventsResponse { kind: Some(kind) });
        tokio::time::timeout(SEND_TIMEOUT, message_tx.send(message))
            .await
            .ok()?
            .ok()
    };
    let mut complete = pb::DumpComplete::default();
    for rank in ranks {
        let writers = writers.clone();
        // Copying a large rank would block the async runtime.
        let copy = move || writers.read_writer(rank, |writer| writer.snapshot(rank));
        // A rank that was removed in the meantime holds no blocks.
        let Some(snapshot) = tokio::task::spawn_blocking(copy).await.ok()? else {
            continue;
        };
        let worker = fleet.worker(rank.worker);
        emit(Kind::Rank(pb::DumpedRank {
            worker: Some(response::rank_to_proto(rank)),
            model: worker
                .map(|worker| worker.model.as_str().to_owned())
                .unwrap_or_default(),
            block_size: worker.map_or(0, |worker| worker.block_size.0.get()),
        }))
        .await?;
        complete.ranks += 1;
        for event in snapshot.events() {
            complete.events += 1;
            emit(Kind::Event(event.into())).await?;
        }
    }
    emit(Kind::Complete(complete)).await
}
