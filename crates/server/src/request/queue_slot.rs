//! Number of bodies that wait for an encoder thread.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A slot in a bounded queue. Released by drop.
pub(super) struct EncodeQueueSlot<'a>(&'a AtomicUsize);

impl<'a> EncodeQueueSlot<'a> {
    pub(super) fn try_acquire(queued: &'a AtomicUsize, limit: usize) -> Option<Self> {
        let before = queued.fetch_add(1, Ordering::Relaxed);
        let slot = Self(queued);
        (before < limit).then_some(slot)
    }
}

impl Drop for EncodeQueueSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
