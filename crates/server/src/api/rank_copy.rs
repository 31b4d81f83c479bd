//! Copy of one rank's index for the warm start of another process. The rank is copied at one
//! instant and serialized as fast as the caller reads. A caller that reads nothing for too long is
//! disconnected.

use std::io::{BufWriter, Error, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use warmroute_core::index::dump;
use warmroute_core::worker::WorkerRank;

use super::error::ApiError;
use super::index_dump::SEND_TIMEOUT;
use super::writers::RankWriters;
use crate::proto::router as pb;

/// Size of a chunk in bytes.
const CHUNK_BYTES: usize = 256 * 1024;

/// Maximum duration of a copy. Without it, a slow caller could hold a copy indefinitely.
const MAX_COPY_DURATION: Duration = Duration::from_secs(600);

/// Number of chunks buffered for a slow caller.
const CHANNEL_CAPACITY: usize = 4;

/// Stream of the chunks of a copy.
pub(super) type CopyStream = ReceiverStream<Result<pb::CopyRankResponse, Status>>;

/// Starts to stream the copy of a rank. The permit is held until the stream ends.
pub(super) fn start_copy(
    writers: &Arc<RankWriters>,
    rank: WorkerRank,
    permit: OwnedSemaphorePermit,
    shutdown: CancellationToken,
) -> Result<CopyStream, ApiError> {
    if writers.ranks().binary_search(&rank).is_err() {
        return Err(ApiError::NoEventSource(rank));
    }
    let (chunk_tx, chunk_rx) = mpsc::channel(CHANNEL_CAPACITY);
    let writers = writers.clone();
    let handle = Handle::current();
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        // A truncated copy lacks the end marker, so the reader detects it.
        let _ended = write_copy(
            &writers,
            rank,
            ChunkWriter {
                chunk_tx,
                shutdown,
                handle,
                deadline: Instant::now() + MAX_COPY_DURATION,
            },
        );
    });
    Ok(ReceiverStream::new(chunk_rx))
}

fn write_copy(writers: &RankWriters, rank: WorkerRank, chunks: ChunkWriter) -> std::io::Result<()> {
    let Some(rank_dump) = writers.dump_rank(rank) else {
        return Ok(());
    };
    let mut out = BufWriter::with_capacity(CHUNK_BYTES, chunks);
    dump::write_header(&mut out)?;
    rank_dump.write(&mut out)?;
    dump::write_end(&mut out, 1)?;
    out.flush()
}

/// Blocking writer that sends chunks to the caller.
struct ChunkWriter {
    chunk_tx: mpsc::Sender<Result<pb::CopyRankResponse, Status>>,
    shutdown: CancellationToken,
    handle: Handle,
    deadline: Instant,
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let chunk = bytes[..bytes.len().min(CHUNK_BYTES)].to_vec();
        let length = chunk.len();
        let deadline = self.deadline.min(Instant::now() + SEND_TIMEOUT);
        let sent = timeout_at(
            deadline,
            self.chunk_tx.send(Ok(pb::CopyRankResponse { chunk })),
        );
        let result = self
            .handle
            .block_on(self.shutdown.run_until_cancelled(sent));
        result
            .and_then(|sent| sent.ok()?.ok())
            .map(|()| length)
            .ok_or(Error::from(ErrorKind::BrokenPipe))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
