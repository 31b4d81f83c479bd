//! The index told as events, rank by rank. Each rank is copied as it is at one instant and then told from the copy, as fast
//! as the caller takes it; its own new events wait only while it is copied. A caller that takes nothing holds a copy, so
//! there are only a few at a time, and whoever takes nothing for too long is left.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::answer;
use super::fault::Fault;
use super::feed::Feed;
use super::pb;
use super::pb::dump_events_response::Kind;
use crate::fleet::Fleet;
use crate::worker::WorkerRank;

/// Messages made ahead of a caller that takes them slowly.
const AHEAD: usize = 64;

/// How long a caller may leave the messages made ahead where they are.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Dumps at a time.
pub(super) const MOST: usize = 4;

/// A dump in messages.
pub type DumpStream = ReceiverStream<Result<pb::DumpEventsResponse, Status>>;

/// Where dumps come from and what bounds them.
pub(super) struct Source {
    pub(super) feed: Arc<Feed>,
    pub(super) fleet: Arc<Fleet>,
    /// Held as long as the dump lasts.
    pub(super) permit: OwnedSemaphorePermit,
    pub(super) closing: CancellationToken,
}

/// Begins to tell of these ranks, or of all that there are.
pub(super) fn dump(source: Source, wanted: &BTreeSet<WorkerRank>) -> Result<DumpStream, Fault> {
    let known = source.feed.ranks();
    if let Some(unknown) = wanted
        .iter()
        .find(|rank| known.binary_search(rank).is_err())
    {
        return Err(Fault::NoEvents(*unknown));
    }
    let ranks = if wanted.is_empty() {
        known
    } else {
        wanted.iter().copied().collect()
    };
    let (send, receive) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        let Source {
            feed,
            fleet,
            permit,
            closing,
        } = source;
        // However it ends: without its last message a dump is known not to be whole.
        closing
            .run_until_cancelled(tell(&feed, &fleet, ranks, &send))
            .await;
        drop(permit);
    });
    Ok(ReceiverStream::new(receive))
}

/// Ends early where nobody listens any more.
async fn tell(
    feed: &Arc<Feed>,
    fleet: &Fleet,
    ranks: Vec<WorkerRank>,
    send: &mpsc::Sender<Result<pb::DumpEventsResponse, Status>>,
) -> Option<()> {
    let say = |kind| async {
        let message = Ok(pb::DumpEventsResponse { kind: Some(kind) });
        tokio::time::timeout(PATIENCE, send.send(message))
            .await
            .ok()?
            .ok()
    };
    let mut complete = pb::DumpComplete::default();
    for rank in ranks {
        let feed = feed.clone();
        // Copying a large rank takes long enough to be in others' way.
        let copy = move || feed.read(rank, |writer| writer.portrait(rank));
        // Whoever left meanwhile holds nothing any more.
        let Some(portrait) = tokio::task::spawn_blocking(copy).await.ok()? else {
            continue;
        };
        let worker = fleet.worker(rank.worker);
        say(Kind::Rank(pb::DumpedRank {
            worker: Some(answer::rank(rank)),
            model: worker
                .map(|worker| worker.model.as_str().to_owned())
                .unwrap_or_default(),
            block_size: worker.map_or(0, |worker| worker.block_size.0.get()),
        }))
        .await?;
        complete.ranks += 1;
        for event in portrait.events() {
            complete.events += 1;
            say(Kind::Event(event.into())).await?;
        }
    }
    say(Kind::Complete(complete)).await
}
