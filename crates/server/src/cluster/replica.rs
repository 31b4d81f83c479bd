//! Synchronization of several routers that share the same workers.
//!
//! Each replica routes requests independently and never waits for other replicas. Over NATS,
//! replicas publish the changes of their reservations, session bindings and overload marks, so that
//! each one knows the bookings of the others. Batches of changes are numbered. A replica that has
//! just started or has missed a batch requests a snapshot. If a replica times out, its reservations
//! are dropped. While NATS is unavailable, each replica considers only its own bookings.
//!
//! Decision 0056.

pub mod config;

mod arrival_rates;
mod local_events;
mod mirror;
mod nats;
mod outbox;
mod peers;
mod sync;
mod wire;

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use warmroute_core::load::ReservationEvent;
use warmroute_core::router::RoutedPrompts;
use warmroute_core::sessions::SessionUpdate;
use warmroute_core::worker::WorkerId;

pub use crate::proto::replica::{Batch, SnapshotPart};
pub use local_events::{LocalEventChannel, LocalEvents};
pub use mirror::LocalView;
pub use outbox::ReplicaOutbox;
pub use peers::{PeerAction, PeerChange, PeerTable, PeerUpdate};
pub use sync::{ReplicaSync, ReplicaSyncParts};

/// Random id that identifies a process among the replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u64);

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for ReplicaId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Event that a replica publishes to its peers.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplicaEvent {
    /// Change of a reservation.
    Load(ReservationEvent),
    /// Change of a session binding.
    Session(SessionUpdate),
    /// Change of the binding of a stored response.
    StoredResponse(SessionUpdate),
    /// Worker that is overloaded, and for how long.
    Overloaded(WorkerId, Duration),
    /// Prompts routed to a worker rank whose cache is predicted.
    Routed(RoutedPrompts),
    /// First token of the exchange with this name. Another replica may wait for it.
    FirstToken(String),
}

#[cfg(test)]
mod tests;
