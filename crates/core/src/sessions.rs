//! Session affinity. Requests of one session go to the worker rank of its earlier requests, as long
//! as the session is used. The first request decides; concurrent requests of the same session wait
//! for that decision. All claims on a session are RAII guards: a [`SessionLease`] keeps the session
//! alive while a request runs, and a [`PendingBinding`] obliges its request to choose the rank. A
//! client that disconnects therefore cannot block a session. The clock is passed at construction,
//! because a drop cannot receive the time.

mod key;
mod replication;
mod rules;
mod store;
mod table;
mod tenants;
mod updates;

pub use key::{SessionKey, SessionName};
pub use rules::{SessionError, SessionRules};
pub use store::{
    BindingWait, PendingBinding, SessionEntry, SessionLease, SessionListener, SessionRecording,
    SessionStore,
};
pub use table::SessionCounts;
pub use updates::{BindingVersion, SessionBinding, SessionMove, SessionUpdate, UpdateKind};

#[cfg(test)]
mod tests;
