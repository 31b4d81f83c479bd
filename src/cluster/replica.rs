//! Synchronization of several routers that share the same workers.
//!
//! Each replica decides alone and immediately. Over NATS, replicas publish the changes of their
//! reservations, session bindings and overload marks, so that each one knows the bookings of the
//! others. Batches are numbered; a replica that missed some, or is new, requests a snapshot. The
//! reservations of a replica that times out are dropped. Without NATS each replica works alone. No
//! request waits for any of this.

pub mod config;

mod arrival_rates;
mod local_events;
mod mirror;
mod nats;
mod outbox;
mod peers;
mod prediction_gate;
mod session_failover;
mod sync;
mod wire;

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use warmroute_core::load::ReservationEvent;
use warmroute_core::router::RoutedPrompts;
use warmroute_core::sessions::SessionUpdate;
use warmroute_core::worker::WorkerId;

pub use local_events::{LocalEventChannel, LocalEvents};
pub use mirror::LocalView;
pub use outbox::ReplicaOutbox;
pub use peers::{PeerAction, PeerChange, PeerTable, PeerUpdate};
pub use proto::{Batch, SnapshotPart};
pub use sync::{ReplicaSync, ReplicaSyncParts};

/// Generated messages.
mod proto {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    include!(concat!(env!("OUT_DIR"), "/warmroute.replica.v1.rs"));
}

/// Random id of a process among its peers.
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

/// Event that replicas publish to each other.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplicaEvent {
    /// Change of a reservation.
    Load(ReservationEvent),
    /// Change of a session binding.
    Session(SessionUpdate),
    /// A worker is overloaded for this time.
    Overloaded(WorkerId, Duration),
    /// Prompts routed to a worker rank whose cache is predicted.
    Routed(RoutedPrompts),
    /// First token of the exchange of this name, which another replica may wait for.
    FirstToken(String),
}

#[cfg(test)]
mod tests;
