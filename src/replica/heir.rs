//! What becomes of sessions that the engines keep when the replica that has bound them is gone: another one sees to their
//! ends. Who leaves in order leaves what is in use to others, if there are any that stay.

use std::time::Instant;

use tracing::debug;

use super::ReplicaId;
use super::run::Replica;

impl Replica {
    /// Whether others are there that stay, and see to what we leave behind.
    pub fn has_heirs(&self) -> bool {
        self.is_connected() && self.state.lock().peers.heirs() > 0
    }

    /// Whether we have just begun to leave, which others are to know before we are gone.
    pub(super) fn begins_to_drain(&self) -> bool {
        self.readiness.is_draining() && self.state.lock().own.drain()
    }

    /// Sees to the sessions that were bound by those who are gone. Who was cut off itself has to have heard others again
    /// for as long as makes one silent.
    pub(super) fn inherit(&self) {
        let Some(sessions) = self.entrance.sessions() else {
            return;
        };
        if !self
            .connected
            .lock()
            .is_some_and(|since| since.elapsed() >= self.settings.lease.get())
        {
            return;
        }
        let peers = &mut self.state.lock().peers;
        if peers.inherit(Instant::now()) {
            let sessions = sessions.inherit(|by| peers.knows(ReplicaId(by)));
            debug!(
                sessions,
                "the sessions of those who are gone are seen to here"
            );
        }
    }
}
