//! What other routers booked on the same workers. They tell it as it happens, at best effort, so a message may be late,
//! repeated or about something we never heard of; whatever does not fit what we know is ignored.

use super::{Attempt, Beside, Change, Ledger};
use crate::load::Booking;
use crate::worker::WorkerRank;

/// How we stand to the other routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peers {
    /// Our own number; what it says comes back to us and is ignored.
    pub own: u64,
    /// Whether bookings of peers count. If not, they can still report the first token of a request of ours.
    pub mirror: bool,
}

/// What a peer tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerEvent {
    /// Which router says so.
    pub router: u64,
    /// Of which request.
    pub request: String,
    /// Of which attempt at it.
    pub attempt: u64,
    /// What happened.
    pub change: PeerChange,
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerChange {
    /// It was booked.
    Add(Booking),
    /// Its first token came, on this worker rank.
    PrefillCompleted(WorkerRank),
    /// It ended, on this worker rank.
    Free(WorkerRank),
}

impl<B: Beside> Ledger<B> {
    /// Does what a peer did.
    pub fn follow(&mut self, peers: &Peers, event: PeerEvent) -> Change {
        let PeerEvent { router, request, attempt, change } = event;
        if router == peers.own {
            return Change::None;
        }
        let attempt = Attempt { request: &request, number: attempt };
        match change {
            PeerChange::PrefillCompleted(rank) if self.is_on(attempt, rank) => self.mark_prefill_completed(attempt),
            PeerChange::Free(rank) if peers.mirror && self.is_on(attempt, rank) => self.free(attempt),
            PeerChange::Add(booking) if peers.mirror => self.add(attempt, vec![booking]).unwrap_or(Change::None),
            _ => Change::None,
        }
    }

    /// Whether a live booking of the attempt is on that rank.
    fn is_on(&self, attempt: Attempt<'_>, rank: WorkerRank) -> bool {
        self.get(attempt).is_some_and(|reservation| reservation.parts().any(|(_, booked)| booked == rank))
    }
}
