//! Stored responses. An engine stores responses of the Responses API in its memory. A request that
//! refers to one must reach the worker rank that produced it. A second table of sessions stores the
//! rank of each response id.

use std::sync::Arc;
use std::time::Duration;

use warmroute_core::sessions::{SessionName, SessionRules, SessionStore};
use warmroute_core::worker::WorkerRank;

use super::dispatcher::Dispatcher;

/// Limits of the table of stored responses.
pub const RESPONSE_RULES: SessionRules = SessionRules {
    ttl: Duration::from_secs(24 * 3600),
    max_sessions: 65_536,
    max_sessions_per_tenant: 16_384,
};

/// Relation of a request to stored responses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseReference {
    /// Id of the stored response that the request continues, reads or deletes.
    pub id: Option<String>,
    /// Whether the engine may store the response to this request.
    pub may_store_response: bool,
    /// Tenant of the client, if `requests.clients.tenant_header` is set. A tenant cannot refer to
    /// the responses of another.
    pub tenant: Option<String>,
}

fn response_name<'a>(id: &'a str, tenant: Option<&'a str>) -> SessionName<'a> {
    SessionName {
        id,
        parent: None,
        // Requests that read or delete a response do not name its model.
        model: None,
        tenant,
    }
}

impl Dispatcher {
    /// Returns the table of stored responses.
    pub fn stored_responses(&self) -> &Arc<SessionStore> {
        &self.stored_responses
    }

    /// Returns the rank that stores the response that a request refers to, if it is known.
    pub fn find_stored(&self, reference: &ResponseReference) -> Option<WorkerRank> {
        let id = reference.id.as_deref()?;
        self.stored_responses
            .target(response_name(id, reference.tenant.as_deref()))
    }

    /// Records that a rank stores a response. The first rank of an id stays, so that an engine that
    /// lets clients choose ids cannot redirect the requests of another client.
    pub fn record_stored(&self, id: &str, tenant: Option<&str>, rank: WorkerRank) {
        self.stored_responses.bind(response_name(id, tenant), rank);
    }
}
