//! Identity of a session.

use std::sync::Arc;

/// Identity of a session, as a request states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionName<'a> {
    /// Session id.
    pub id: &'a str,
    /// Session that started this one. All sessions with the same parent form a group and share a
    /// rank.
    pub parent: Option<&'a str>,
    /// Model of the request. Equal ids of different models are different sessions.
    pub model: Option<&'a str>,
    /// Tenant of the client, if `requests.clients.tenant_header` is set. A tenant cannot use or
    /// close the sessions of another.
    pub tenant: Option<&'a str>,
}

/// Key of a session. Groups and single sessions are distinct even if clients use equal ids, and so
/// are sessions of different models, which no worker could share, and of different tenants.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey {
    /// Model of the session.
    pub model: Option<Box<str>>,
    /// Tenant of the session, if `requests.clients.tenant_header` is set.
    pub tenant: Option<Arc<str>>,
    /// Whether the session is a group.
    pub group: bool,
    /// Session id, or the parent's id for a group.
    pub id: Box<str>,
}
