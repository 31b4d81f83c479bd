//! Limit on published predictions. Without peers, none are published. With peers, the number of
//! queued predictions is limited.
//!
//! A prediction is as large as its prompts and only a hint, so it may be dropped. Bookings are
//! always published.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of queued predictions.
const MAX_WAITING: usize = 4096;

/// Admission of predictions to the publish queue.
#[derive(Debug, Default)]
pub(super) struct PredictionGate {
    peers: AtomicUsize,
    waiting: AtomicUsize,
}

impl PredictionGate {
    /// Sets the number of peers.
    pub(super) fn set_peers(&self, peers: usize) {
        self.peers.store(peers, Ordering::Relaxed);
    }

    /// Reserves a slot in the queue. Returns false if there are no peers or the queue is full.
    pub(super) fn try_admit(&self) -> bool {
        let increment = |waiting: usize| (waiting < MAX_WAITING).then_some(waiting + 1);
        self.peers.load(Ordering::Relaxed) > 0
            && self
                .waiting
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment)
                .is_ok()
    }

    /// Releases a slot of the queue.
    pub(super) fn release(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_needs_peers_and_is_bounded() {
        let gate = PredictionGate::default();
        assert!(!gate.try_admit());
        gate.set_peers(2);
        assert!((0..MAX_WAITING).all(|_| gate.try_admit()));
        assert!(!gate.try_admit());
        gate.release();
        assert_eq!((gate.try_admit(), gate.try_admit()), (true, false));
    }
}
