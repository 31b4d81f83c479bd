//! Position of a rank that is shared by its event reader and by readers of its content.
//!
//! A copy of a rank's content needs the last event in it and the state of the event reader at that
//! event. Batches and positions therefore change under one lock.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::dump::RankDump;
use super::position::EventPosition;
use super::salts::SaltTable;

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
