//! How many bodies wait to be encoded.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A place in a bounded queue; given back by drop.
pub(super) struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    pub(super) fn take(queued: &'a AtomicUsize, most: usize) -> Option<Self> {
        let before = queued.fetch_add(1, Ordering::Relaxed);
        let place = Self(queued);
        (before < most).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
