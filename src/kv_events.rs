//! KV events of the engines, from ZeroMQ messages (`warmroute_zmtp`) to index events. [`wire`] reads payloads, [`convert`] puts them into the
//! index's words, [`sequencer`] decides what a batch number means; all three are pure. `feed` ties them to one
//! worker rank's sink and its measures, and [`run`] is the only part that touches the network.

pub mod convert;
mod dealer;
mod feed;
mod groups;
pub mod listen;
pub mod media;
mod reblock;
mod replay;
pub mod sequencer;
mod subscriber;
pub mod wire;
mod witness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use crate::index::{KvEvent, Outcome, Settled, SharedPosition};
use crate::trust::Resync;
use crate::worker::{BlockSize, EventSource, WorkerRank};

pub use convert::{Converted, Filtered, Normalizer};
pub use media::MediaTokens;
pub use subscriber::run;
pub use witness::Witness;

/// Where the events of one worker rank go.
pub struct RankSink {
    /// Applies one event to the index.
    pub apply: Box<dyn FnMut(&KvEvent) -> Outcome + Send>,
    /// Told when events were lost for good, so that what the index holds of this rank may be out of date; says how often
    /// that was so.
    pub doubt: Box<dyn FnMut() -> u32 + Send>,
    /// Looks what has become of doubts.
    pub settle: Box<dyn FnMut() -> Settled + Send>,
    /// Where the rank is; what stands there at the beginning is gone on from.
    pub position: SharedPosition,
}

/// One event source to listen to.
#[derive(Clone, Debug)]
pub struct SourceSpec {
    /// Whose cache it tells of.
    pub rank: WorkerRank,
    /// Where it publishes.
    pub source: EventSource,
    /// Which engine it is: what is known of another one is of no use for it.
    pub engine: String,
    /// Tokens per block of its cache.
    pub block_size: BlockSize,
    /// Placeholder tokens of its model.
    pub media: MediaTokens,
    /// What becomes of its blocks when batches are lost for good.
    pub resync: SharedResync,
    /// Largest message in bytes that is received.
    pub max_message: usize,
}

impl SourceSpec {
    /// Whose events these are and by which settings they are read: who has others makes other blocks of them.
    pub fn reading(&self) -> u64 {
        let Self {
            engine,
            block_size,
            media: MediaTokens { image, video },
            ..
        } = self;
        xxh3_64(format!("{engine} {} {image:?} {video:?}", block_size.0).as_bytes())
    }
}

/// What becomes of the blocks of a rank when batches are lost for good, as it is set at that moment.
#[derive(Clone, Debug, Default)]
pub struct SharedResync(Arc<AtomicBool>);

impl SharedResync {
    /// Sets it.
    pub fn set(&self, resync: Resync) {
        self.0.store(resync == Resync::Clear, Ordering::Relaxed);
    }

    /// Whether they are forgotten.
    pub fn clears(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How far a source is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceState {
    /// Not attached to the engine.
    #[default]
    Connecting,
    /// Attached, and asking for what was missed.
    Replaying,
    /// Caught up as far as possible.
    Live,
}
