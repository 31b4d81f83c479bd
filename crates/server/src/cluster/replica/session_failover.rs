//! Failover of engine sessions. If the replica that bound a session has departed, another replica
//! takes over the session and closes it at its end. A replica that shuts down leaves its sessions
//! to the remaining peers.

use std::time::Instant;

use tracing::debug;

use super::ReplicaId;
use super::sync::ReplicaSync;

impl ReplicaSync {
    /// Returns whether any connected peer is not draining and can take over the sessions of this
    /// replica.
    pub fn has_remaining_peers(&self) -> bool {
        self.is_connected() && self.state.lock().peers.remaining() > 0
    }

    /// Marks this replica as draining during shutdown. Returns true once, when the caller has to
    /// notify the peers.
    pub(super) fn start_draining(&self) -> bool {
        self.readiness.is_draining() && self.state.lock().outbox.set_draining()
    }

    /// Adopts the sessions of departed replicas. After a reconnect, sessions are adopted only after
    /// a full lease, because the timeouts of peers are not detected earlier.
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
            let sessions = sessions.take_over_orphans(|router| peers.contains(ReplicaId(router)));
            debug!(sessions, "sessions of departed replicas adopted");
        }
    }
}
