//! The index of both sides behind the same questions: apply these events and say what it cost, answer this query. Each
//! side's events are applied by a thread of its own, as both do when they serve, and the time is that thread's CPU from
//! the first event to the end of the last.

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
use warmroute::block::{BlockHashes, EngineHash};
use warmroute::index::{KvEvent, Outcome, Overlaps, PrefixIndex, RankWriter, StoredBlock};
use warmroute::tier::Tier;
use warmroute::worker::Slot;

use crate::duel::thread_cpu;
use crate::workload::{Change, Event};

/// The peer: its compressed radix tree, and a thread that runs its own loop over events.
pub struct Peer {
    pub tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    pub fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, receiver) = flume::unbounded();
        let worker = tree.clone();
        let run = move || {
            worker
                .worker(receiver, None)
                .expect("its loop ends when it is told to")
        };
        Self {
            tree,
            tasks,
            thread: Some(std::thread::spawn(run)),
        }
    }

    /// Applies events; nanoseconds of its thread.
    pub fn apply(&self, events: Vec<RouterEvent>) -> f64 {
        let (gate, closed) = mpsc::channel();
        let start = self.mark(Some(closed));
        events
            .into_iter()
            .for_each(|event| self.send(WorkerTask::Event(event)));
        let end = self.mark(None);
        gate.send(()).expect("the thread waits for this");
        let start = start.passed();
        end.passed() - start
    }

    /// Sends a mark that its thread passes between two events, after it has waited at a gate if there is one. What tells
    /// us is the waker of its own acknowledgement, which it calls on its thread.
    fn mark(&self, gate: Option<mpsc::Receiver<()>>) -> Passed {
        let (passed, told) = mpsc::channel();
        let (sender, mut acknowledged) = oneshot::channel();
        let waker = Waker::from(Arc::new(Mark {
            passed,
            gate: Mutex::new(gate),
        }));
        let first = Pin::new(&mut acknowledged).poll(&mut Context::from_waker(&waker));
        assert!(matches!(first, Poll::Pending), "nobody has answered yet");
        self.send(WorkerTask::Flush(sender));
        Passed {
            told,
            _acknowledged: acknowledged,
        }
    }

    fn send(&self, task: WorkerTask) {
        assert!(self.tasks.send(task).is_ok(), "its thread lives");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.send(WorkerTask::Terminate);
        self.thread
            .take()
            .into_iter()
            .for_each(|thread| thread.join().expect("its thread ends well"));
    }
}

/// What a mark says; it needs the receiver that it is the waker of.
struct Passed {
    told: mpsc::Receiver<f64>,
    _acknowledged: oneshot::Receiver<()>,
}

impl Passed {
    /// The CPU that the thread had used when it passed.
    fn passed(self) -> f64 {
        self.told.recv().expect("its thread lives")
    }
}

struct Mark {
    passed: mpsc::Sender<f64>,
    gate: Mutex<Option<mpsc::Receiver<()>>>,
}

impl Wake for Mark {
    fn wake(self: Arc<Self>) {
        if let Some(gate) = self.gate.lock().take() {
            _ = gate.recv();
        }
        _ = self.passed.send(thread_cpu());
    }
}

/// Our side: an index and the writers of its ranks.
pub struct Ours {
    pub index: Arc<PrefixIndex>,
    writers: Vec<RankWriter>,
}

impl Ours {
    pub fn new(ranks: u32) -> Self {
        let index = PrefixIndex::new();
        let writers = (0..ranks).map(|slot| index.join(Slot(slot))).collect();
        Self { index, writers }
    }

    /// Applies events; nanoseconds of the thread that does.
    pub fn apply(&mut self, events: Vec<(u32, KvEvent)>) -> f64 {
        let writers = &mut self.writers;
        let apply = || {
            let start = thread_cpu();
            for (rank, event) in events {
                let outcome = writers[rank as usize].apply(&event);
                assert_eq!(outcome, Outcome::Ok, "an event that the peer applies");
            }
            thread_cpu() - start
        };
        std::thread::scope(|scope| {
            scope
                .spawn(apply)
                .join()
                .expect("our writer does not panic")
        })
    }
}

/// Events as the peer reads them.
pub fn peer_events(events: &[Event]) -> Vec<RouterEvent> {
    let numbered = events.iter().enumerate();
    let event = |(number, event): (usize, &Event)| {
        let data = match &event.change {
            Change::Stored { parent, blocks } => KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(|parent| ExternalSequenceBlockHash(parent.0)),
                start_position: None,
                blocks: blocks
                    .iter()
                    .map(|(local, sequence)| stored(local.0, sequence.0))
                    .collect(),
            }),
            Change::Removed(blocks) => KvCacheEventData::Removed(KvCacheRemoveData {
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

/// Events as we read them.
pub fn our_events(events: &[Event]) -> Vec<(u32, KvEvent)> {
    let event = |event: &Event| {
        let change = match &event.change {
            Change::Stored { parent, blocks } => KvEvent::Stored {
                parent: parent.map(|parent| EngineHash(parent.0)),
                blocks: blocks
                    .iter()
                    .map(|&(local, sequence)| StoredBlock {
                        engine: EngineHash(sequence.0),
                        local,
                    })
                    .collect(),
                tier: Tier::Device,
            },
            Change::Removed(blocks) => KvEvent::Removed {
                blocks: blocks.iter().map(|block| EngineHash(block.0)).collect(),
                tier: Tier::Device,
            },
        };
        (event.rank, change)
    };
    events.iter().map(event).collect()
}

/// A prompt as the peer asks for it.
pub fn peer_prompt(prompt: &BlockHashes) -> Vec<LocalBlockHash> {
    prompt
        .locals()
        .iter()
        .map(|local| LocalBlockHash(local.0))
        .collect()
}

/// Both sides must have found the same, on every rank.
pub fn assert_equal(what: &str, theirs: &OverlapScores, ours: &Overlaps) {
    assert_eq!(
        theirs.scores.len(),
        ours.iter().count(),
        "{what}: ranks that hold something"
    );
    for (worker, &blocks) in &theirs.scores {
        let mine = ours.get(Slot(worker.worker_id as u32));
        assert_eq!(
            blocks, mine.device,
            "{what}: leading blocks on rank {}",
            worker.worker_id
        );
    }
}
