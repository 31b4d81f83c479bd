//! The index told as events, rank by rank. Each rank is copied as it is at one instant and then told from the copy, as fast
//! as the caller takes it; its own new events wait only while it is copied.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
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

/// A dump in messages.
pub type DumpStream = ReceiverStream<Result<pb::DumpEventsResponse, Status>>;

/// Begins to tell of these ranks, or of all that there are.
pub(super) fn dump(feed: Arc<Feed>, fleet: Arc<Fleet>, wanted: Vec<WorkerRank>) -> Result<DumpStream, Fault> {
    let known = feed.ranks();
    if let Some(unknown) = wanted.iter().find(|rank| known.binary_search(rank).is_err()) {
        return Err(Fault::NoEvents(*unknown));
    }
    let ranks = if wanted.is_empty() { known } else { wanted };
    let (send, receive) = mpsc::channel(AHEAD);
    // Copying a large rank takes long enough to be in others' way.
    tokio::task::spawn_blocking(move || tell(&feed, &fleet, ranks, &send));
    Ok(ReceiverStream::new(receive))
}

/// Ends early where nobody listens any more.
fn tell(
    feed: &Feed,
    fleet: &Fleet,
    ranks: Vec<WorkerRank>,
    send: &mpsc::Sender<Result<pb::DumpEventsResponse, Status>>,
) -> Option<()> {
    let say = |kind| send.blocking_send(Ok(pb::DumpEventsResponse { kind: Some(kind) })).ok();
    let mut complete = pb::DumpComplete::default();
    for rank in ranks {
        // Whoever left meanwhile holds nothing any more.
        let Some(portrait) = feed.read(rank, |writer| writer.portrait(rank)) else { continue };
        let worker = fleet.worker(rank.worker);
        say(Kind::Rank(pb::DumpedRank {
            worker: Some(answer::rank(rank)),
            model: worker.map(|worker| worker.model.as_str().to_owned()).unwrap_or_default(),
            block_size: worker.map_or(0, |worker| worker.block_size.0.get()),
        }))?;
        complete.ranks += 1;
        for event in portrait.events() {
            complete.events += 1;
            say(Kind::Event(event.into()))?;
        }
    }
    say(Kind::Complete(complete))
}
