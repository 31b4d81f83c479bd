//! What the service has to know of the running process and cannot find in the router: who writes the index, rank by rank,
//! and when the fleet changes. The keeper tells it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::fleet::Fleet;
use crate::index::dump::RankDump;
use crate::index::{KvEvent, Outcome, RankWriter, Settled, SharedPosition};
use crate::lifecycle::aside;
use crate::worker::WorkerRank;

/// A writer for as long as its event source runs.
#[derive(Debug)]
struct Seat {
    writer: Mutex<Option<RankWriter>>,
    position: SharedPosition,
}

/// The writers of the index, and the fleet.
#[derive(Debug)]
pub struct Feed {
    writers: Mutex<BTreeMap<WorkerRank, Weak<Seat>>>,
    fleet: watch::Sender<Arc<Fleet>>,
}

impl Default for Feed {
    fn default() -> Self {
        let fleet = watch::Sender::new(Arc::new(Fleet::empty()));
        Self {
            writers: Mutex::default(),
            fleet,
        }
    }
}

impl Feed {
    /// Another fleet is in its place.
    pub fn publish(&self, fleet: &Arc<Fleet>) {
        self.fleet.send_if_modified(|known| {
            let changed = known.generation() != fleet.generation();
            known.clone_from(fleet);
            changed
        });
    }

    /// A writer begins to follow its rank. It ends when what is returned is dropped.
    pub fn join(&self, rank: WorkerRank, writer: RankWriter) -> Joined {
        let seat = Arc::new(Seat {
            writer: Mutex::new(Some(writer)),
            position: SharedPosition::default(),
        });
        let mut writers = self.writers.lock();
        writers.retain(|_, seat| seat.strong_count() > 0);
        writers.insert(rank, Arc::downgrade(&seat));
        Joined(seat)
    }

    /// Tells of every change of the fleet.
    pub(super) fn fleets(&self) -> watch::Receiver<Arc<Fleet>> {
        self.fleet.subscribe()
    }

    /// The ranks that have a writer, in order.
    pub fn ranks(&self) -> Vec<WorkerRank> {
        let writers = self.writers.lock();
        writers
            .iter()
            .filter(|(_, seat)| seat.strong_count() > 0)
            .map(|(rank, _)| *rank)
            .collect()
    }

    /// What a rank holds, and up to which of its events. These wait meanwhile.
    pub fn copy(&self, rank: WorkerRank) -> Option<RankDump> {
        let seat = self.writers.lock().get(&rank)?.upgrade()?;
        seat.position
            .copy(|| Some(seat.writer.lock().as_ref()?.portrait(rank)))
    }

    /// Reads a writer; its events wait meanwhile, and nothing else does. That is in proportion to what the rank holds:
    /// a copy made in parts would mix what was with what is. `None` where the rank has none.
    pub(super) fn read<T>(
        &self,
        rank: WorkerRank,
        read: impl FnOnce(&RankWriter) -> T,
    ) -> Option<T> {
        let seat = self.writers.lock().get(&rank)?.upgrade()?;
        let writer = seat.writer.lock();
        writer.as_ref().map(read)
    }
}

/// A writer that can be read by others. Dropping it drops the writer, whoever reads it: then nothing of the rank is left.
#[derive(Debug)]
pub struct Joined(Arc<Seat>);

impl Joined {
    /// Where the source is.
    pub fn position(&self) -> &SharedPosition {
        &self.0.position
    }

    /// Begins with what another router knows of the rank.
    pub fn restore(&self, dump: &RankDump) {
        let writer = || {
            self.lock()
                .as_mut()
                .into_iter()
                .for_each(|writer| writer.restore(dump))
        };
        self.0.position.restore(dump, writer);
    }

    /// Applies one event.
    pub fn apply(&self, event: &KvEvent) -> Outcome {
        // Only drop takes the writer out.
        self.lock()
            .as_mut()
            .map_or(Outcome::Ok, |writer| writer.apply(event))
    }

    /// Events were lost for good; how often so far.
    pub fn doubt(&self) -> u32 {
        self.lock().as_mut().map_or(0, RankWriter::doubt)
    }

    /// Looks what has become of doubts.
    pub fn settle(&self) -> Settled {
        let mut writer = self.lock();
        match writer.as_mut() {
            Some(writer) if writer.is_due() => aside(|| writer.settle()),
            Some(writer) => writer.settle(),
            None => Settled::default(),
        }
    }

    /// The events come on threads that serve others, too, which must not wait for the end of a long reading.
    fn lock(&self) -> MutexGuard<'_, Option<RankWriter>> {
        let writer = &self.0.writer;
        writer.try_lock().unwrap_or_else(|| aside(|| writer.lock()))
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let writer = self.0.writer.lock().take();
        drop(writer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::PrefixIndex;
    use crate::worker::{DpRank, Slot, WorkerId};

    #[test]
    fn a_writer_is_known_until_its_source_ends_and_its_successor_after_it() {
        let (feed, index) = (Feed::default(), PrefixIndex::new());
        let rank = WorkerRank {
            worker: WorkerId(1),
            rank: DpRank(0),
        };
        let first = feed.join(rank, index.join(Slot(0)));
        assert_eq!((feed.ranks(), index.stats().slots.len()), (vec![rank], 1));
        drop(first);
        assert_eq!((feed.ranks(), index.stats().slots.len()), (vec![], 0));
        assert!(feed.read(rank, |_| ()).is_none());
        let first = feed.join(rank, index.join(Slot(0)));
        let second = feed.join(rank, index.join(Slot(3)));
        drop(first);
        assert_eq!(feed.read(rank, RankWriter::slot), Some(Slot(3)));
        drop(second);
        assert_eq!(feed.ranks(), vec![]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn while_a_writer_is_read_its_events_wait_and_others_are_served() {
        let (feed, index) = (Arc::new(Feed::default()), PrefixIndex::new());
        let rank = WorkerRank {
            worker: WorkerId(1),
            rank: DpRank(0),
        };
        let joined = feed.join(rank, index.join(Slot(0)));
        let ((begun, has_begun), (end, has_ended)) =
            (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let reading = std::thread::spawn(move || {
            feed.read(rank, |_| {
                begun.send(()).unwrap();
                has_ended
                    .recv_timeout(std::time::Duration::from_secs(20))
                    .unwrap();
            })
        });
        has_begun.recv().unwrap();
        let (tell, told) = tokio::sync::oneshot::channel();
        let events = tokio::spawn(async move {
            tell.send(()).unwrap();
            joined.apply(&KvEvent::Cleared)
        });
        told.await.unwrap();
        // The only thread of the runtime is waiting now, or will in a moment.
        tokio::spawn(async move { end.send(()).unwrap() })
            .await
            .unwrap();
        assert_eq!(events.await.unwrap(), Outcome::Ok);
        assert_eq!(reading.join().unwrap(), Some(()));
    }
}
