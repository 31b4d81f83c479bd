//! Queue of local changes, which the event loop of replica sync publishes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use warmroute_core::block::BlockHashes;
use warmroute_core::fleet::FleetMember;
use warmroute_core::load::ReservationEvent;
use warmroute_core::router::RoutedPrompts;
use warmroute_core::worker::WorkerId;

use super::{ReplicaEvent, ReplicaId};

/// Maximum number of queued predictions.
const MAX_WAITING: usize = 4096;

/// Sends local changes to the event loop without waiting.
#[derive(Clone, Debug)]
pub struct LocalEvents {
    replica: ReplicaId,
    events_tx: mpsc::UnboundedSender<ReplicaEvent>,
    pub(super) gate: Arc<PredictionGate>,
    pub(super) session_updates: Arc<Notify>,
}

/// Both ends of the queue of local changes. It is created before replica sync starts, because the
/// router needs the sending end.
#[derive(Debug)]
pub struct LocalEventChannel {
    /// Sending end, for the router.
    pub events: LocalEvents,
    /// Receiving end, for the event loop.
    pub(super) events_rx: mpsc::UnboundedReceiver<ReplicaEvent>,
}

impl Default for LocalEventChannel {
    /// Creates an empty queue and a random replica id.
    fn default() -> Self {
        let (events_tx, events_rx) = mpsc::unbounded_channel();
        let events = LocalEvents {
            replica: ReplicaId(rand::random()),
            events_tx,
            gate: Arc::default(),
            session_updates: Arc::default(),
        };
        Self { events, events_rx }
    }
}

impl LocalEvents {
    /// Returns the id of this replica.
    pub fn replica_id(&self) -> ReplicaId {
        self.replica
    }

    /// Records a change of a reservation.
    pub fn record_reservation(&self, event: ReservationEvent) {
        self.send(ReplicaEvent::Load(event));
    }

    /// Records that a worker is overloaded for this time.
    pub fn record_overload(&self, worker: WorkerId, time: Duration) {
        self.send(ReplicaEvent::Overloaded(worker, time));
    }

    /// Records prompts that were routed to a rank with a predicted cache. They are dropped if there
    /// are no peers or too many predictions are queued.
    pub fn record_routed(&self, member: &FleetMember, prompts: &[BlockHashes]) {
        if self.gate.try_admit() {
            self.send(ReplicaEvent::Routed(RoutedPrompts::new(member, prompts)));
        }
    }

    /// Notifies the event loop of updates in the session store.
    pub fn notify_session_updates(&self) {
        self.session_updates.notify_one();
    }

    /// Records the first token of an exchange that this replica does not serve.
    pub(super) fn record_first_token(&self, name: &str) {
        self.send(ReplicaEvent::FirstToken(name.to_owned()));
    }

    fn send(&self, event: ReplicaEvent) {
        // Without an event loop, the process is shutting down.
        self.events_tx.send(event).ok();
    }
}

/// Admission of predictions to the queue: none without peers, and otherwise a limited number. A
/// prediction is as large as its prompts and only a hint, so it may be dropped.
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
