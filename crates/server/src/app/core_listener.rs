//! Connects the core with the components that react to its changes.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use warmroute_core::block::BlockHashes;
use warmroute_core::fleet::FleetMember;
use warmroute_core::load::{LoadListener, ReservationEvent};
use warmroute_core::router::RouterListener;
use warmroute_core::sessions::{SessionListener, SessionRecording};
use warmroute_core::worker::WorkerId;

use crate::cluster::replica::LocalEvents;
use crate::config::Config;
use crate::dispatch::TimedRouter;
use crate::dispatch::queue::AdmissionQueue;

/// Forwards the changes of load, router and sessions to queue, replica sync and engine sessions.
#[derive(Default)]
pub(super) struct CoreListener {
    /// Set after construction, because the queue places requests through the router.
    queue: OnceLock<Weak<AdmissionQueue<TimedRouter>>>,
    replica_events: Option<LocalEvents>,
    /// True if engine sessions follow the moves of sessions.
    has_engine_sessions: bool,
    session_moves: Arc<Notify>,
}

impl CoreListener {
    /// Creates the listener of a server. Offline commands use the default listener.
    pub(super) fn for_server(config: &Config, replica_events: Option<LocalEvents>) -> Self {
        let sessions = config.sessions.as_ref();
        Self {
            replica_events,
            has_engine_sessions: sessions.is_some_and(|sessions| sessions.engine.is_some()),
            ..Self::default()
        }
    }

    /// Sets the queue that is woken when capacity is freed.
    pub(super) fn set_queue(&self, queue: &Arc<AdmissionQueue<TimedRouter>>) {
        // The composition root sets it once, so this cannot fail.
        self.queue.set(Arc::downgrade(queue)).ok();
    }

    /// Returns which changes the session store records.
    pub(super) fn session_recording(&self) -> SessionRecording {
        let replica = self.replica_events.as_ref();
        SessionRecording {
            moves: self.has_engine_sessions,
            updates_by: replica.map(|events| events.replica_id().0),
        }
    }

    /// Returns the notification of session moves.
    pub(super) fn session_moves(&self) -> &Arc<Notify> {
        &self.session_moves
    }
}

impl LoadListener for CoreListener {
    fn on_capacity_freed(&self) {
        if let Some(queue) = self.queue.get().and_then(Weak::upgrade) {
            queue.wake();
        }
    }

    fn wants_reservation_events(&self) -> bool {
        self.replica_events.is_some()
    }

    fn on_reservation_event(&self, event: ReservationEvent) {
        if let Some(events) = &self.replica_events {
            events.record_reservation(event);
        }
    }
}

impl RouterListener for CoreListener {
    fn on_overloaded(&self, worker: WorkerId, time: Duration) {
        if let Some(events) = &self.replica_events {
            events.record_overload(worker, time);
        }
    }

    fn on_routed(&self, member: &FleetMember, prompts: &[BlockHashes]) {
        if let Some(events) = &self.replica_events {
            events.record_routed(member, prompts);
        }
    }
}

impl SessionListener for CoreListener {
    fn on_moves(&self) {
        self.session_moves.notify_one();
    }

    fn on_updates(&self) {
        if let Some(events) = &self.replica_events {
            events.notify_session_updates();
        }
    }
}
