//! Failover of engine sessions: when the replica that bound a session is gone, one of the others
//! closes the session when it ends. A replica that shuts down leaves its sessions to the remaining
//! peers.

use std::time::Instant;

use tracing::debug;

use super::ReplicaId;
use super::sync::ReplicaSync;

impl ReplicaSync {
    /// Returns whether there are peers that do not drain and can take over the sessions of this
    /// replica.
    pub fn has_remaining_peers(&self) -> bool {
        self.is_connected() && self.state.lock().peers.remaining() > 0
    }

    /// Marks this replica as draining. Returns true once, when the peers have to be notified.
    pub(super) fn start_draining(&self) -> bool {
        self.readiness.is_draining() && self.state.lock().outbox.set_draining()
    }

    /// Adopts the sessions bound by replicas that are gone. After a reconnect, this waits for a
    /// full lease, until silent peers have been detected.
    pub(super) fn adopt_sessions(&self) {
        let Some(sessions) = self.dispatcher.sessions() else {
            return;
        };
        if !self
            .connected_since
            .lock()
            .is_some_and(|since| since.elapsed() >= self.settings.lease.get())
        {
            return;
        }
        let peers = &mut self.state.lock().peers;
        if peers.should_adopt_sessions(Instant::now()) {
            let sessions = sessions.take_over_orphans(|by| peers.contains(ReplicaId(by)));
            debug!(sessions, "sessions of departed replicas adopted");
        }
    }
}
