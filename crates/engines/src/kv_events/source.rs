//! Settings, callbacks and state of an event source.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use super::media::MediaTokens;
use warmroute_core::freshness::ResyncMode;
use warmroute_core::index::{ApplyOutcome, KvEvent, ReconcileReport, SharedPosition};
use warmroute_core::worker::{BlockSize, EventSource, WorkerRank};

/// Callbacks and state that receive the events of one worker rank.
pub struct RankSink {
    /// Applies one event to the index.
    pub apply: Box<dyn FnMut(&KvEvent) -> ApplyOutcome + Send>,
    /// Called when events were permanently lost and the index may be out of date for this rank.
    /// Returns the number of losses so far.
    pub record_loss: Box<dyn FnMut() -> u32 + Send>,
    /// Returns the state of the stale blocks, and evicts those that are presumed gone.
    pub reconcile: Box<dyn FnMut() -> ReconcileReport + Send>,
    /// Position of the rank in its event stream. If it is set at the start, the reader resumes from
    /// it.
    pub position: SharedPosition,
}

/// Settings of one event source.
#[derive(Clone, Debug)]
pub struct SourceSpec {
    /// Worker rank whose cache the events describe.
    pub rank: WorkerRank,
    /// Name of the worker in logs: its pod, or its endpoint.
    pub worker_name: String,
    /// Endpoint and topic of the events.
    pub source: EventSource,
    /// Identity of the engine process. State of another process is not reused.
    pub engine: String,
    /// Tokens per block of the index.
    pub block_size: BlockSize,
    /// Placeholder tokens of the model.
    pub media: MediaTokens,
    /// Policy for the blocks of the rank when batches are permanently lost.
    pub resync: SharedResync,
    /// Maximum message size in bytes.
    pub max_message: usize,
}

#[cfg(test)]
impl SourceSpec {
    pub(super) fn for_test(block_size: u32) -> Self {
        Self {
            engine: String::new(),
            worker_name: String::new(),
            rank: WorkerRank {
                worker: warmroute_core::worker::WorkerId(1),
                rank: warmroute_core::worker::DpRank(0),
            },
            source: EventSource {
                endpoint: String::new(),
                topic: String::new(),
                attach: warmroute_core::worker::SocketAttach::Connect,
                replay: None,
            },
            block_size: BlockSize::new(block_size).unwrap(),
            media: MediaTokens::default(),
            resync: SharedResync::default(),
            max_message: 1 << 20,
        }
    }
}

impl SourceSpec {
    /// Returns a digest of the engine's identity and of the settings that events are decoded with.
    /// A reader with another digest would produce other blocks from the same events.
    pub fn settings_digest(&self) -> u64 {
        let Self {
            engine,
            block_size,
            media: MediaTokens { image, video },
            ..
        } = self;
        xxh3_64(format!("{engine} {} {image:?} {video:?}", block_size.0).as_bytes())
    }
}

/// Policy for the blocks of a rank when batches are permanently lost. The configuration can change
/// it at any time.
#[derive(Clone, Debug, Default)]
pub struct SharedResync(Arc<AtomicBool>);

impl SharedResync {
    /// Sets the policy.
    pub fn set(&self, resync: ResyncMode) {
        self.0.store(resync == ResyncMode::Clear, Ordering::Relaxed);
    }

    /// Returns true if the blocks are to be cleared.
    pub fn is_clear(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
