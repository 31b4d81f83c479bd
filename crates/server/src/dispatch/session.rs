//! Sessions of requests: their effect on routing, and their opening at engines.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::router::RouteRequest;
use warmroute_core::sessions::{PendingBinding, SessionLease, SessionName, SessionStore};
use warmroute_core::worker::{ModelName, WorkerRank};

/// Session of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestSession {
    /// Session id.
    pub id: String,
    /// Id of the session that started this one.
    pub parent: Option<String>,
    /// Tenant of the client, if `requests.clients.tenant_header` is set.
    pub tenant: Option<String>,
    /// Whether this is the last request of the session.
    pub is_last: bool,
    /// Time without a request after which the engine may close the session.
    pub idle_timeout: Option<Duration>,
}

impl RequestSession {
    /// Returns the name of the session in the store.
    pub(super) fn name<'a>(&'a self, model: Option<&'a ModelName>) -> SessionName<'a> {
        SessionName {
            id: &self.id,
            parent: self.parent.as_deref(),
            model: model.map(ModelName::as_str),
            tenant: self.tenant.as_deref(),
        }
    }
}

/// Affinity of a session to its worker rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionAffinity {
    /// While the rank is eligible, it is the only candidate.
    #[default]
    Hard,
    /// The rank is preferred. If another one is chosen, the session moves there.
    Soft,
}

impl SessionAffinity {
    /// Directs a request to the rank of its session.
    pub(super) fn bind(self, request: &mut RouteRequest, target: WorkerRank) {
        match self {
            SessionAffinity::Hard => request.constraints.bound_rank = Some(target),
            SessionAffinity::Soft => request.affinity = Some(target),
        }
    }
}

/// Session store, with its effect on routing.
pub struct SessionRouting {
    /// Session store.
    pub sessions: Arc<SessionStore>,
    /// Strictness of the affinity.
    pub affinity: SessionAffinity,
    /// Maximum time that a request waits for the first request of its session.
    pub max_wait: Duration,
}

pub(super) type OpenSession =
    Box<dyn Fn(WorkerRank, &RequestSession) -> BoxFuture<'static, ()> + Send + Sync>;

/// Opens sessions at engines before the first request of each session.
pub(super) struct SessionOpener {
    /// Maximum time that a request waits for the opening.
    pub(super) deadline: Duration,
    pub(super) open: OpenSession,
}

/// Role of a request in its session.
pub(super) enum SessionState {
    /// The request has no session.
    None,
    /// The session is bound to a rank.
    Bound(SessionLease),
    /// The request is the first of its session and binds it.
    First(PendingBinding),
}
