//! Position of the index in the event stream of a rank, shared by the event reader of the rank and
//! by readers of its content.
//!
//! A copy of a rank's content needs the last event in it and the state of the event reader at that
//! event. Batches and positions therefore change under one lock. Decision 0016.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::dump::RankDump;
use super::salts::SaltTable;
use crate::block::{BlockWindows, StorageTier};

/// Newest batch of events in the index, and the state needed to continue after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventPosition {
    /// Sequence number of the batch.
    pub seq: u64,
    /// Digest of its payload, to recognize the batch.
    pub digest: u64,
    /// Digest of the event source and the settings of its reader. Another reader would compute
    /// other blocks from the same events.
    pub reader_digest: u64,
    /// Whether the reader was attached when the position was taken, so that only later events can
    /// be missing.
    pub is_live: bool,
    /// State of the reader.
    pub reader_state: ReaderState,
}

/// State that later events depend on and the index does not contain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderState {
    /// Cache group whose engine hashes identify the blocks.
    pub main_group: Option<u32>,
    /// All known cache groups, by number.
    pub groups: Vec<ReaderGroup>,
    /// Tokens per engine block, by tier.
    pub block_sizes: [Option<u32>; StorageTier::ALL.len()],
    /// Latest tokens per engine block on the device. Unlike `block_sizes`, it survives a cleared
    /// cache.
    pub engine_block_size: Option<u32>,
    /// Tokens that the hash of each block covers in the last store on the device.
    pub windows: Option<BlockWindows>,
    /// Whether valid stores were dropped.
    pub has_dropped_stores: bool,
}

/// Known cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderGroup {
    /// Number of the group, assigned by the engine.
    pub id: u32,
    /// Kind of the group, as encoded by the event reader.
    pub kind: u8,
    /// Tokens of the sliding window.
    pub window: Option<u32>,
}

/// Position of a source, and its block salts. The position is `None` while the index contains
/// nothing of the source, or nothing that another reader could continue from.
#[derive(Clone, Debug, Default)]
pub struct SharedPosition {
    position: Arc<Mutex<Option<EventPosition>>>,
    /// Changed only while the position is locked.
    salts: Arc<Mutex<SaltTable>>,
}

impl SharedPosition {
    /// Locks the position if it is free. The source does not change the index while it is locked.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Option<EventPosition>>> {
        self.position.try_lock()
    }

    /// Locks the position.
    pub fn lock(&self) -> MutexGuard<'_, Option<EventPosition>> {
        self.position.lock()
    }

    /// Returns the salts of the blocks.
    pub fn salts(&self) -> &Arc<Mutex<SaltTable>> {
        &self.salts
    }

    /// Copies the content of the rank and the position it belongs to. Events wait until the copy is
    /// complete.
    pub fn snapshot(&self, writer: impl FnOnce() -> Option<RankDump>) -> Option<RankDump> {
        let position = self.lock();
        let held = writer()?;
        Some(RankDump {
            position: position.clone(),
            salts: self.salts.lock().dump(),
            ..held
        })
    }

    /// Restores a copy and the position it belongs to. `writer` loads the content.
    pub fn restore(&self, dump: &RankDump, writer: impl FnOnce()) {
        let mut position = self.lock();
        writer();
        *self.salts.lock() = SaltTable::from_dump(&dump.salts);
        *position = dump.position.clone();
    }
}
