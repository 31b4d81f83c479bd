//! Access to the index writers of the event sources and to the fleet. The fleet controller
//! registers writers and publishes the fleet.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use warmroute_core::fleet::Fleet;

use warmroute_core::index::dump::RankDump;
use warmroute_core::index::{ApplyOutcome, KvEvent, RankWriter, ReconcileReport, SharedPosition};
use warmroute_core::worker::WorkerRank;
use warmroute_runtime::lifecycle::run_blocking;

/// Writer of one rank, alive as long as its event source runs.
#[derive(Debug)]
struct WriterEntry {
    writer: Mutex<Option<RankWriter>>,
    position: SharedPosition,
}

/// Registered index writers and the current fleet.
#[derive(Debug)]
pub struct RankWriters {
    writers: Mutex<BTreeMap<WorkerRank, Weak<WriterEntry>>>,
    fleet: watch::Sender<Arc<Fleet>>,
}

impl Default for RankWriters {
    fn default() -> Self {
        let fleet = watch::Sender::new(Arc::new(Fleet::empty()));
        Self {
            writers: Mutex::default(),
            fleet,
        }
    }
}

impl RankWriters {
    /// Publishes a new fleet.
    pub fn publish_fleet(&self, fleet: &Arc<Fleet>) {
        self.fleet.send_if_modified(|known| {
            let changed = known.generation() != fleet.generation();
            known.clone_from(fleet);
            changed
        });
    }

    /// Registers the writer of a rank. Dropping the returned guard removes it.
    pub fn register(&self, rank: WorkerRank, writer: RankWriter) -> RegisteredWriter {
        let entry = Arc::new(WriterEntry {
            writer: Mutex::new(Some(writer)),
            position: SharedPosition::default(),
        });
        let mut writers = self.writers.lock();
        writers.retain(|_, entry| entry.strong_count() > 0);
        writers.insert(rank, Arc::downgrade(&entry));
        RegisteredWriter(entry)
    }

    /// Subscribes to changes of the fleet.
    pub(super) fn subscribe_fleet(&self) -> watch::Receiver<Arc<Fleet>> {
        self.fleet.subscribe()
    }

    /// Returns the ranks that have a writer, sorted.
    pub fn ranks(&self) -> Vec<WorkerRank> {
        let writers = self.writers.lock();
        writers
            .iter()
            .filter(|(_, entry)| entry.strong_count() > 0)
            .map(|(rank, _)| *rank)
            .collect()
    }

    /// Copies the index of a rank with its event position. KV events of the rank wait in the
    /// meantime.
    pub fn dump_rank(&self, rank: WorkerRank) -> Option<RankDump> {
        let entry = self.writers.lock().get(&rank)?.upgrade()?;
        entry
            .position
            .snapshot(|| Some(entry.writer.lock().as_ref()?.snapshot(rank)))
    }

    /// Runs `read` on the writer of a rank; returns `None` if the rank has none. KV events of this
    /// rank wait in the meantime. The duration is proportional to the size of the rank: a copy in
    /// parts would mix old and new state.
    pub(super) fn read_writer<T>(
        &self,
        rank: WorkerRank,
        read: impl FnOnce(&RankWriter) -> T,
    ) -> Option<T> {
        let entry = self.writers.lock().get(&rank)?.upgrade()?;
        let writer = entry.writer.lock();
        writer.as_ref().map(read)
    }
}

/// Guard of a registered writer. Dropping it drops the writer, and with it the index of the rank.
#[derive(Debug)]
pub struct RegisteredWriter(Arc<WriterEntry>);

impl RegisteredWriter {
    /// Returns the position of the event source.
    pub fn position(&self) -> &SharedPosition {
        &self.0.position
    }

    /// Restores the rank from the dump of another process.
    pub fn restore(&self, dump: &RankDump) {
        let writer = || {
            self.lock_writer()
                .as_mut()
                .into_iter()
                .for_each(|writer| writer.restore(dump))
        };
        self.0.position.restore(dump, writer);
    }

    /// Applies one event.
    pub fn apply(&self, event: &KvEvent) -> ApplyOutcome {
        // The writer is `None` only after drop.
        self.lock_writer()
            .as_mut()
            .map_or(ApplyOutcome::Ok, |writer| writer.apply(event))
    }

    /// Records a permanent loss of events and returns the number of losses.
    pub fn mark_lossy(&self) -> u32 {
        self.lock_writer()
            .as_mut()
            .map_or(0, RankWriter::record_gap)
    }

    /// Removes blocks that later events prove to be stale.
    pub fn reconcile(&self) -> ReconcileReport {
        let mut writer = self.lock_writer();
        match writer.as_mut() {
            Some(writer) if writer.is_purge_due() => run_blocking(|| writer.reconcile()),
            Some(writer) => writer.reconcile(),
            None => ReconcileReport::default(),
        }
    }

    /// Locks the writer. Events arrive on runtime threads, which must not block while another
    /// thread reads the writer.
    fn lock_writer(&self) -> MutexGuard<'_, Option<RankWriter>> {
        let writer = &self.0.writer;
        writer
            .try_lock()
            .unwrap_or_else(|| run_blocking(|| writer.lock()))
    }
}

impl Drop for RegisteredWriter {
    fn drop(&mut self) {
        let writer = self.0.writer.lock().take();
        drop(writer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::index::PrefixIndex;
    use warmroute_core::worker::RankSlot;

    #[test]
    fn writer_is_registered_until_its_source_ends() {
        let writers = RankWriters::default();
        let index = PrefixIndex::new();
        let rank = WorkerRank::new(1, 0);
        let first = writers.register(rank, index.create_writer(RankSlot(0)));
        assert_eq!(
            (writers.ranks(), index.stats().slots.len()),
            (vec![rank], 1)
        );
        drop(first);
        assert_eq!((writers.ranks(), index.stats().slots.len()), (vec![], 0));
        assert!(writers.read_writer(rank, |_| ()).is_none());
        let first = writers.register(rank, index.create_writer(RankSlot(0)));
        let second = writers.register(rank, index.create_writer(RankSlot(3)));
        drop(first);
        assert_eq!(
            writers.read_writer(rank, RankWriter::slot),
            Some(RankSlot(3))
        );
        drop(second);
        assert_eq!(writers.ranks(), vec![]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn events_wait_while_writer_is_read() {
        let writers = Arc::new(RankWriters::default());
        let index = PrefixIndex::new();
        let rank = WorkerRank::new(1, 0);
        let registered = writers.register(rank, index.create_writer(RankSlot(0)));
        let ((begin_tx, begin_rx), (end_tx, end_rx)) =
            (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let reading = std::thread::spawn(move || {
            writers.read_writer(rank, |_| {
                begin_tx.send(()).unwrap();
                end_rx
                    .recv_timeout(std::time::Duration::from_secs(20))
                    .unwrap();
            })
        });
        begin_rx.recv().unwrap();
        let (started_tx, started_rx) = tokio::sync::oneshot::channel();
        let events = tokio::spawn(async move {
            started_tx.send(()).unwrap();
            registered.apply(&KvEvent::Cleared)
        });
        started_rx.await.unwrap();
        // The only thread of the runtime is waiting now, or will wait soon.
        tokio::spawn(async move { end_tx.send(()).unwrap() })
            .await
            .unwrap();
        assert_eq!(events.await.unwrap(), ApplyOutcome::Ok);
        assert_eq!(reading.join().unwrap(), Some(()));
    }
}
