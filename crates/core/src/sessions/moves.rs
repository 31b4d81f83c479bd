//! Session moves to report to the engines. They are recorded until they are taken.

use super::key::SessionKey;
use super::table::SessionTable;
use super::updates::{SessionBinding, SessionMove};
use crate::worker::WorkerRank;

impl SessionTable {
    pub(super) fn enable_moves(&mut self) {
        self.moves.get_or_insert_default();
    }

    pub(super) fn records_moves(&self) -> bool {
        self.moves.is_some()
    }

    pub(super) fn has_moves(&self) -> bool {
        self.moves.as_ref().is_some_and(|moves| !moves.is_empty())
    }

    pub(super) fn take_moves(&mut self) -> Vec<SessionMove> {
        self.moves.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Queues a move, unless the moves were not taken for so long that there are several per
    /// possible session.
    pub(super) fn push_move(
        &mut self,
        to_move: fn(SessionBinding) -> SessionMove,
        key: &SessionKey,
        target: WorkerRank,
    ) {
        let max = self.max_pending();
        let idle = self
            .sessions
            .get(key)
            .and_then(|session| session.engine_idle_timeout);
        let session_move = to_move(SessionBinding {
            id: key.id.to_string(),
            group: key.group,
            tenant: key.tenant.clone(),
            target,
            idle,
        });
        let Some(moves) = self.moves.as_mut().filter(|moves| moves.len() < max) else {
            return;
        };
        moves.push(session_move);
    }

    pub(super) fn max_pending(&self) -> usize {
        self.rules.max_sessions.saturating_mul(4)
    }
}
