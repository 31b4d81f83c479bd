//! How far the index has come in the events of a rank. Whoever copies what the rank holds has to know which event was the
//! last one in it, and what that one and those before it have taught beside the blocks; so batches and positions change
//! under one lock.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::dump::RankDump;
use super::salts::Salts;
use crate::tier::Tier;

/// The newest batch of events that is in the index, and what is needed to go on behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// Its number.
    pub seq: u64,
    /// A digest of its payload, by which it is known again.
    pub digest: u64,
    /// Whose events these are and by which settings they are read; who has others makes other blocks of them.
    pub reading: u64,
    /// Whether its reader was attached a moment ago, so that at most what came since is missing.
    pub live: bool,
    /// What the events have taught.
    pub taught: Taught,
}

/// What later events lean on and the index does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taught {
    /// The cache group that names the blocks.
    pub main_group: Option<u32>,
    /// All cache groups that were explained, by number.
    pub groups: Vec<TaughtGroup>,
    /// Tokens per block of the engine, by tier.
    pub sizes: [Option<u32>; Tier::ALL.len()],
    /// The same on the device as it was told last, also where that cache was emptied since.
    pub engine: Option<u32>,
    /// Whether stores were dropped that the engine was right to tell of.
    pub dropped: bool,
}

/// What is known of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaughtGroup {
    /// Its number.
    pub id: u32,
    /// Its kind, as whoever reads events numbers kinds.
    pub kind: u8,
    /// Tokens of its window.
    pub window: Option<u32>,
}

/// Where a source is, and what is remembered of its blocks beside the index. `None` while nothing of it is in the index, or
/// what is in it cannot be gone on with by another reader.
#[derive(Clone, Debug, Default)]
pub struct SharedPosition {
    position: Arc<Mutex<Option<Position>>>,
    /// Changed while the position is held.
    salts: Arc<Mutex<Salts>>,
}

impl SharedPosition {
    /// Nothing of the source changes the index as long as this is held.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Option<Position>>> {
        self.position.try_lock()
    }

    /// The same, waiting for whoever holds it.
    pub fn lock(&self) -> MutexGuard<'_, Option<Position>> {
        self.position.lock()
    }

    /// The salts of its blocks.
    pub(crate) fn salts(&self) -> &Arc<Mutex<Salts>> {
        &self.salts
    }

    /// What a writer holds of the rank, and up to which of its events. These wait meanwhile.
    pub(crate) fn copy(&self, writer: impl FnOnce() -> Option<RankDump>) -> Option<RankDump> {
        let position = self.lock();
        let held = writer()?;
        Some(RankDump {
            position: position.clone(),
            salts: self.salts.lock().dump(),
            ..held
        })
    }

    /// Begins where a copy ends, once a writer holds what is in it.
    pub(crate) fn restore(&self, dump: &RankDump, writer: impl FnOnce()) {
        let mut position = self.lock();
        writer();
        *self.salts.lock() = Salts::restored(&dump.salts);
        *position = dump.position.clone();
    }
}
