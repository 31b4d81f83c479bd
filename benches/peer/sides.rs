//! The index of both sides with the same interface: apply events, measure the cost, and answer a
//! query. Each side applies events on a separate thread, as both do in production. The time is the
//! CPU time of that thread from the first event to the end of the last one.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;

use dynamo_kv_router::indexer::WorkerTask;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, OverlapScores, SyncIndexer};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use warmroute_core::block::{BlockHashes, EngineHash, StorageTier};
use warmroute_core::index::{
    ApplyOutcome, KvEvent, Overlaps, PrefixIndex, RankWriter, StoredBlock,
};
use warmroute_core::worker::RankSlot;

use crate::workload::{CacheChange, WorkerEvent};
use warmroute_testbed::comparison::thread_cpu_nanos;

/// The peer's index: its compressed radix tree, and a thread that runs its event loop.
pub struct PeerIndex {
    pub tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl PeerIndex {
    pub fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, receiver) = flume::unbounded();
        let worker = tree.clone();
        let run = move || {
            worker
                .worker(receiver, None)
                .expect("the event loop ends after Terminate")
        };
        Self {
            tree,
            tasks,
            thread: Some(std::thread::spawn(run)),
        }
    }

    /// Applies events. Returns the CPU time of the thread in nanoseconds.
    pub fn apply(&self, events: Vec<RouterEvent>) -> f64 {
        let (gate, gate_rx) = mpsc::channel();
        let start = self.send_marker(Some(gate_rx));
        events
            .into_iter()
            .for_each(|event| self.send(WorkerTask::Event(event)));
        let end = self.send_marker(None);
        gate.send(()).expect("the thread waits for this");
        let start = start.cpu_time();
        end.cpu_time() - start
    }

    /// Sends a marker that the thread passes between two events. If there is a gate, the thread
    /// first waits at it. The waker of the peer's own acknowledgement reports the time, because the
    /// peer calls it on its thread.
    fn send_marker(&self, gate: Option<mpsc::Receiver<()>>) -> MarkerReport {
        let (report_tx, report_rx) = mpsc::channel();
        let (sender, mut acknowledged) = oneshot::channel();
        let waker = Waker::from(Arc::new(MarkerTask {
            report_tx,
            gate: Mutex::new(gate),
        }));
        let first = Pin::new(&mut acknowledged).poll(&mut Context::from_waker(&waker));
        assert!(matches!(first, Poll::Pending), "not acknowledged yet");
        self.send(WorkerTask::Flush(sender));
        MarkerReport {
            report_rx,
            _acknowledged: acknowledged,
        }
    }

    fn send(&self, task: WorkerTask) {
        assert!(self.tasks.send(task).is_ok(), "the peer thread is running");
    }
}

impl Drop for PeerIndex {
    fn drop(&mut self) {
        self.send(WorkerTask::Terminate);
        self.thread
            .take()
            .into_iter()
            .for_each(|thread| thread.join().expect("the peer thread does not panic"));
    }
}

/// Report of a marker. It owns the receiver of the acknowledgement, whose waker is the marker.
struct MarkerReport {
    report_rx: mpsc::Receiver<f64>,
    _acknowledged: oneshot::Receiver<()>,
}

impl MarkerReport {
    /// Returns the CPU time of the thread when it passed the marker.
    fn cpu_time(self) -> f64 {
        self.report_rx.recv().expect("the peer thread is running")
    }
}

struct MarkerTask {
    report_tx: mpsc::Sender<f64>,
    gate: Mutex<Option<mpsc::Receiver<()>>>,
}

impl Wake for MarkerTask {
    fn wake(self: Arc<Self>) {
        if let Some(gate) = self.gate.lock().take() {
            _ = gate.recv();
        }
        _ = self.report_tx.send(thread_cpu_nanos());
    }
}

/// warmroute's index, with the writers of its ranks.
pub struct OurIndex {
    pub index: Arc<PrefixIndex>,
    writers: Vec<RankWriter>,
}

impl OurIndex {
    pub fn new(ranks: u32) -> Self {
        let index = PrefixIndex::new();
        let writers = (0..ranks)
            .map(|slot| index.create_writer(RankSlot(slot)))
            .collect();
        Self { index, writers }
    }

    /// Applies events. Returns the CPU time of the applying thread in nanoseconds.
    pub fn apply(&mut self, events: Vec<(u32, KvEvent)>) -> f64 {
        let writers = &mut self.writers;
        let apply = || {
            let start = thread_cpu_nanos();
            for (rank, event) in events {
                let outcome = writers[rank as usize].apply(&event);
                assert_eq!(outcome, ApplyOutcome::Ok, "an event that the peer applies");
            }
            thread_cpu_nanos() - start
        };
        std::thread::scope(|scope| {
            scope
                .spawn(apply)
                .join()
                .expect("the writer does not panic")
        })
    }
}

/// Converts events to the peer's types.
pub fn peer_events(events: &[WorkerEvent]) -> Vec<RouterEvent> {
    let numbered = events.iter().enumerate();
    let event = |(number, event): (usize, &WorkerEvent)| {
        let data = match &event.change {
            CacheChange::Stored { parent, blocks } => KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(|parent| ExternalSequenceBlockHash(parent.0)),
                start_position: None,
                blocks: blocks
                    .iter()
                    .map(|(local, sequence)| stored(local.0, sequence.0))
                    .collect(),
            }),
            CacheChange::Removed(blocks) => KvCacheEventData::Removed(KvCacheRemoveData {
                block_hashes: blocks
                    .iter()
                    .map(|block| ExternalSequenceBlockHash(block.0))
                    .collect(),
            }),
        };
        RouterEvent::new(
            u64::from(event.rank),
            KvCacheEvent {
                event_id: number as u64,
                data,
                dp_rank: 0,
            },
        )
    };
    numbered.map(event).collect()
}

fn stored(local: u64, sequence: u64) -> KvCacheStoredBlockData {
    let block_hash = ExternalSequenceBlockHash(sequence);
    KvCacheStoredBlockData {
        block_hash,
        tokens_hash: LocalBlockHash(local),
        mm_extra_info: None,
    }
}

/// Converts events to warmroute's types.
pub fn our_events(events: &[WorkerEvent]) -> Vec<(u32, KvEvent)> {
    let event = |event: &WorkerEvent| {
        let change = match &event.change {
            CacheChange::Stored { parent, blocks } => KvEvent::Stored {
                parent: parent.map(|parent| EngineHash(parent.0)),
                blocks: blocks
                    .iter()
                    .map(|&(local, sequence)| StoredBlock {
                        engine: EngineHash(sequence.0),
                        local,
                    })
                    .collect(),
                tier: StorageTier::Device,
            },
            CacheChange::Removed(blocks) => KvEvent::Removed {
                blocks: blocks.iter().map(|block| EngineHash(block.0)).collect(),
                tier: StorageTier::Device,
            },
        };
        (event.rank, change)
    };
    events.iter().map(event).collect()
}

/// Converts a prompt to the peer's type.
pub fn peer_prompt(prompt: &BlockHashes) -> Vec<LocalBlockHash> {
    prompt
        .locals()
        .iter()
        .map(|local| LocalBlockHash(local.0))
        .collect()
}

/// Asserts that both sides found the same blocks on every rank.
pub fn assert_equal(context: &str, theirs: &OverlapScores, ours: &Overlaps) {
    assert_eq!(
        theirs.scores.len(),
        ours.iter().count(),
        "{context}: ranks that hold something"
    );
    for (worker, &blocks) in &theirs.scores {
        let mine = ours.get(RankSlot(worker.worker_id as u32));
        assert_eq!(
            blocks, mine.device,
            "{context}: leading blocks on rank {}",
            worker.worker_id
        );
    }
}
