//! Which predictions are told: none where nobody hears them, and no more than can be told soon. They are hints, and are as long as
//! their prompts; bookings are told whatever happens.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Most predictions that wait to be told.
const MOST_WAITING: usize = 4096;

/// Lets predictions through.
#[derive(Debug, Default)]
pub(super) struct Gate {
    peers: AtomicUsize,
    waiting: AtomicUsize,
}

impl Gate {
    /// So many hear us.
    pub(super) fn heard_by(&self, peers: usize) {
        self.peers.store(peers, Ordering::Relaxed);
    }

    /// Whether one more may wait to be told.
    pub(super) fn admits(&self) -> bool {
        let one_more = |waiting: usize| (waiting < MOST_WAITING).then_some(waiting + 1);
        self.peers.load(Ordering::Relaxed) > 0
            && self
                .waiting
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
                .is_ok()
    }

    /// One that was admitted waits no longer.
    pub(super) fn taken(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_waits_where_nobody_hears_it_and_never_too_much() {
        let gate = Gate::default();
        assert!(!gate.admits());
        gate.heard_by(2);
        assert!((0..MOST_WAITING).all(|_| gate.admits()));
        assert!(!gate.admits());
        gate.taken();
        assert_eq!((gate.admits(), gate.admits()), (true, false));
    }
}
