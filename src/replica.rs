//! Several routers of the same workers. Each decides alone and at once, by what it knows; so that it knows what the others
//! have booked, all tell each other over NATS what becomes of their bookings, which session is bound where, and who has too
//! much to do. Words are numbered: who missed some, or is new, asks for all of it again. A replica that falls silent loses
//! its bookings, and without NATS each one goes on alone. Nothing of this is waited for by a request.

pub mod config;

mod gate;
mod heir;
mod link;
mod mirror;
mod own;
mod peers;
mod rates;
mod run;
mod wire;

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::load::News;
use crate::router::Routed;
use crate::sessions::Word;
use crate::worker::WorkerId;

pub use mirror::World;
pub use own::Own;
pub use peers::{Noted, Outcome, Peers, Wish};
pub use proto::{Batch, SnapshotPart};
pub use run::Replica;

/// The messages.
mod proto {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    include!(concat!(env!("OUT_DIR"), "/warmroute.replica.v1.rs"));
}

/// Random number of a process among its peers.
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

/// Something that replicas tell each other.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    /// Of a booking.
    Load(News),
    /// Of a session.
    Session(Word),
    /// A worker has too much to do.
    Overloaded(WorkerId, Duration),
    /// Prompts go to a worker rank whose cache is predicted.
    Routed(Routed),
    /// The first token of an exchange of this name was seen, where nobody waits for it.
    FirstTokenOf(String),
}

#[cfg(test)]
mod tests;
