//! Changes of bindings: for the engines as moves, for other replicas as updates.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::key::SessionKey;
use super::rules::SessionRules;
use crate::worker::WorkerRank;

/// Binding of a session to a worker rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SessionBinding {
    /// Session id, or the parent's id for a group.
    pub id: String,
    /// Whether the session is a group.
    pub group: bool,
    /// Tenant of the session, if `requests.clients.tenant_header` is set.
    pub tenant: Option<Arc<str>>,
    /// Worker rank.
    pub target: WorkerRank,
    /// Idle time after which the engine may close the session, if the client set one.
    pub idle: Option<Duration>,
}

/// Change of a binding that the engine has to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionMove {
    /// The session was bound to the rank.
    Bound(SessionBinding),
    /// The session ended, or moved to another rank.
    Unbound(SessionBinding),
    /// The session stays on its rank, but another replica has bound it and will report its end.
    HandedOver(SessionBinding),
    /// The session was bound by a replica that has left, and this replica takes it over.
    TakenOver(SessionBinding),
}

/// Version of a binding, ordered like a Lamport timestamp: by counter, then by replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BindingVersion {
    /// Number of earlier bindings that its replica knew.
    pub version: u64,
    /// Id of the replica that made it.
    pub router: u64,
}

/// Occasion of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateKind {
    /// The session is in use now.
    InUse,
    /// Part of a snapshot of all sessions; the session may be idle.
    Snapshot,
}

/// Update about one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionUpdate {
    /// The session is bound and was used.
    Bound {
        /// Session.
        session: Arc<SessionKey>,
        /// Worker rank.
        target: WorkerRank,
        /// Version of the binding.
        version: BindingVersion,
    },
    /// The last request of the session has ended.
    Ended {
        /// Session.
        session: Arc<SessionKey>,
        /// Version of its last binding.
        version: BindingVersion,
    },
}

impl SessionUpdate {
    /// Returns the id of the replica that made the binding.
    pub fn router(&self) -> u64 {
        let (SessionUpdate::Bound { version, .. } | SessionUpdate::Ended { version, .. }) = self;
        version.router
    }
}

/// Changes that were not drained yet.
#[derive(Debug)]
pub(super) struct ChangeLog<T> {
    pub(super) pending: Vec<T>,
    /// Maximum number of changes; 0 if none are recorded.
    limit: usize,
}

impl<T> ChangeLog<T> {
    /// Creates a log. It drops changes beyond four per session of the maximum number.
    pub(super) fn new(is_recorded: bool, rules: &SessionRules) -> Self {
        Self {
            pending: Vec::new(),
            limit: usize::from(is_recorded) * rules.max_sessions.saturating_mul(4),
        }
    }

    pub(super) fn is_recorded(&self) -> bool {
        self.limit > 0
    }

    pub(super) fn push(&mut self, change: T) {
        if self.pending.len() < self.limit {
            self.pending.push(change);
        }
    }
}
