//! What one rank holds, as bytes for another of us that starts. It is looked at in one instant, and then written down only as
//! fast as the caller takes it; a caller that takes nothing for too long is left.

use std::io::{BufWriter, Error, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::dump::PATIENCE;
use super::fault::Fault;
use super::feed::Feed;
use super::pb;
use crate::index::dump;
use crate::worker::WorkerRank;

/// Bytes of one piece.
const PIECE: usize = 256 * 1024;

/// How long a copy may take. A caller that takes little now and then would hold it as long as he likes.
const LONGEST: Duration = Duration::from_secs(600);

/// Pieces made ahead of a caller that takes them slowly.
const AHEAD: usize = 4;

/// A copy in messages.
pub(super) type CopyStream = ReceiverStream<Result<pb::CopyRankResponse, Status>>;

/// Begins to tell what a rank holds. The permit is held as long as that lasts.
pub(super) fn copy(
    feed: &Arc<Feed>,
    rank: WorkerRank,
    permit: OwnedSemaphorePermit,
    closing: CancellationToken,
) -> Result<CopyStream, Fault> {
    if feed.ranks().binary_search(&rank).is_err() {
        return Err(Fault::NoEvents(rank));
    }
    let (send, receive) = mpsc::channel(AHEAD);
    let (feed, handle) = (feed.clone(), Handle::current());
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        // A copy that ends early has no end of its own, by which whoever reads it knows.
        let _ended = tell(
            &feed,
            rank,
            Pieces {
                send,
                closing,
                handle,
                until: Instant::now() + LONGEST,
            },
        );
    });
    Ok(ReceiverStream::new(receive))
}

fn tell(feed: &Feed, rank: WorkerRank, pieces: Pieces) -> std::io::Result<()> {
    let Some(held) = feed.copy(rank) else {
        return Ok(());
    };
    let mut out = BufWriter::with_capacity(PIECE, pieces);
    dump::begin(&mut out)?;
    held.write(&mut out)?;
    dump::end(&mut out, 1)?;
    out.flush()
}

/// Bytes on their way to the caller.
struct Pieces {
    send: mpsc::Sender<Result<pb::CopyRankResponse, Status>>,
    closing: CancellationToken,
    handle: Handle,
    until: Instant,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let piece = bytes[..bytes.len().min(PIECE)].to_vec();
        let length = piece.len();
        let until = self.until.min(Instant::now() + PATIENCE);
        let said = timeout_at(until, self.send.send(Ok(pb::CopyRankResponse { piece })));
        let taken = self.handle.block_on(self.closing.run_until_cancelled(said));
        taken
            .and_then(|said| said.ok()?.ok())
            .map(|()| length)
            .ok_or(Error::from(ErrorKind::BrokenPipe))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
