//! What the service has to know of the running process and cannot find in the router: who writes the index, rank by rank,
//! and when the fleet changes. The keeper tells it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::fleet::Fleet;
use crate::index::{KvEvent, Outcome, RankWriter};
use crate::worker::WorkerRank;

/// A writer for as long as its event source runs.
type Seat = Mutex<Option<RankWriter>>;

/// The writers of the index, and the fleet.
#[derive(Debug)]
pub struct Feed {
    writers: Mutex<BTreeMap<WorkerRank, Weak<Seat>>>,
    fleet: watch::Sender<Arc<Fleet>>,
}

impl Default for Feed {
    fn default() -> Self {
        let fleet = watch::Sender::new(Arc::new(Fleet::empty()));
        Self { writers: Mutex::default(), fleet }
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
        let seat = Arc::new(Mutex::new(Some(writer)));
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
    pub(super) fn ranks(&self) -> Vec<WorkerRank> {
        let writers = self.writers.lock();
        writers.iter().filter(|(_, seat)| seat.strong_count() > 0).map(|(rank, _)| *rank).collect()
    }

    /// Reads a writer; its events wait meanwhile. `None` where the rank has none.
    pub(super) fn read<T>(&self, rank: WorkerRank, read: impl FnOnce(&RankWriter) -> T) -> Option<T> {
        let seat = self.writers.lock().get(&rank)?.upgrade()?;
        let writer = seat.lock();
        writer.as_ref().map(read)
    }
}

/// A writer that can be read by others. Dropping it drops the writer, whoever reads it: then nothing of the rank is left.
#[derive(Debug)]
pub struct Joined(Arc<Seat>);

impl Joined {
    /// Applies one event.
    pub fn apply(&self, event: &KvEvent) -> Outcome {
        // Only drop takes the writer out.
        self.0.lock().as_mut().map_or(Outcome::Ok, |writer| writer.apply(event))
    }

    /// Events were lost for good.
    pub fn doubt(&self) {
        if let Some(writer) = self.0.lock().as_mut() {
            writer.doubt();
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let writer = self.0.lock().take();
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
        let rank = WorkerRank { worker: WorkerId(1), rank: DpRank(0) };
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
}
