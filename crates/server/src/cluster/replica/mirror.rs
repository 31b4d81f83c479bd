//! Mirror of the reservations of one peer. They are booked in the local load tracker, and dropping
//! the mirror releases them.
//!
//! Decision 0015.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use warmroute_core::load::{
    BookingId, LoadBooking, LoadTracker, Reservation, ReservationEvent, ReservationState,
};
use warmroute_core::router::RoutedPrompts;
use warmroute_core::sessions::{SessionStore, UpdateKind};
use warmroute_core::worker::{RankSlot, WorkerId, WorkerRank};

use super::ReplicaEvent;
use super::wire::{MAX_BLOCKS_PER_PEER, UNKNOWN_SLOT};
use crate::tracking_hash::TrackingKey;

/// Maximum number of reservations of all peers.
const MAX_RESERVATIONS: usize = 1 << 18;

/// Maximum number of blocks reserved by all peers. A block counts once per reservation.
pub(super) const MAX_BLOCKS_OF_ALL_PEERS: usize = if cfg!(test) { 3 << 17 } else { 1 << 24 };

/// State of this process that messages of peers change or read.
pub struct LocalView<'a> {
    /// Load tracker.
    pub load: &'a Arc<LoadTracker>,
    /// Returns the slot of a rank.
    pub slot: &'a dyn Fn(WorkerRank) -> Option<RankSlot>,
    /// Key of `routing.block_hash`, if configured.
    pub key: Option<&'a TrackingKey>,
    /// Session table, if sessions are configured.
    pub sessions: Option<&'a SessionStore>,
    /// Table of stored responses, if it is synchronized.
    pub stored_responses: Option<&'a SessionStore>,
    /// Called when a worker is overloaded.
    pub on_overloaded: &'a dyn Fn(WorkerId, Duration),
    /// Called for the first token of the exchange with this name.
    pub on_first_token: &'a dyn Fn(&str),
    /// Called for prompts routed to a rank whose cache is predicted.
    pub on_routed: &'a dyn Fn(RoutedPrompts),
    /// Called for each new booking, but not for bookings from a snapshot.
    pub on_booked: &'a dyn Fn(&LoadBooking),
}

/// Number of reservations and of their blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationTotals {
    pub(super) reservations: usize,
    pub(super) blocks: usize,
}

/// Reservations of a peer.
#[derive(Debug, Default)]
pub(super) struct ReservationMirror {
    bookings: BTreeMap<BookingId, MirroredReservation>,
    /// Number of reservations on workers that are unknown to this replica.
    waiting: usize,
    /// Number of blocks of all reservations.
    blocks: usize,
    /// Totals of all other peers.
    others: ReservationTotals,
    /// Number of reservations that were ignored because of a limit.
    ignored: u64,
}

#[derive(Debug)]
struct MirroredReservation {
    state: ReservationState,
    reservation: Option<Reservation>,
}

impl ReservationMirror {
    /// Applies an event of the peer.
    pub(super) fn apply(&mut self, event: ReplicaEvent, view: &LocalView<'_>) {
        match event {
            ReplicaEvent::Load(ReservationEvent::Booked { id, bookings })
                if !self.bookings.contains_key(&id) =>
            {
                self.insert(id, ReservationState::new(bookings), view);
            }
            ReplicaEvent::Load(ReservationEvent::Booked { .. }) => {}
            ReplicaEvent::Load(ReservationEvent::Released(id)) => self.remove(id),
            ReplicaEvent::Load(event) => self.update(event, view),
            ReplicaEvent::Session(update) => {
                if let Some(sessions) = view.sessions {
                    sessions.apply_update(update, UpdateKind::InUse);
                }
            }
            ReplicaEvent::StoredResponse(update) => {
                if let Some(responses) = view.stored_responses {
                    responses.apply_update(update, UpdateKind::InUse);
                }
            }
            ReplicaEvent::Overloaded(worker, time) => (view.on_overloaded)(worker, time),
            ReplicaEvent::FirstToken(name) => (view.on_first_token)(&name),
            ReplicaEvent::Routed(routed) => (view.on_routed)(routed),
        }
    }

    /// Replaces all reservations of the peer by those of a snapshot. Unchanged reservations are
    /// kept. New reservations are booked before old ones are released, so that the load is never
    /// underestimated.
    pub(super) fn replace(
        &mut self,
        all: Vec<(BookingId, ReservationState)>,
        view: &LocalView<'_>,
    ) {
        let mut previous = std::mem::take(self);
        self.ignored = previous.ignored;
        self.others = previous.others;
        for (id, state) in all {
            match previous.bookings.remove(&id) {
                Some(known) if known.state.is_equivalent(&state) && self.has_room_for(&known) => {
                    self.waiting += usize::from(known.reservation.is_none());
                    self.blocks += known.blocks();
                    self.bookings.insert(id, known);
                }
                known => {
                    self.insert(id, state, view);
                    drop(known);
                }
            }
        }
    }

    /// Books reservations whose worker has become known.
    pub(super) fn book_waiting(&mut self, view: &LocalView<'_>) {
        if self.waiting == 0 {
            return;
        }
        for mirrored in self
            .bookings
            .values_mut()
            .filter(|mirrored| mirrored.reservation.is_none())
        {
            mirrored.reserve(view);
            self.waiting -= usize::from(mirrored.reservation.is_some());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bookings.len()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the number of reservations that were ignored because of a limit.
    pub(super) fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Returns the totals of the peer.
    pub(super) fn totals(&self) -> ReservationTotals {
        ReservationTotals {
            reservations: self.bookings.len(),
            blocks: self.blocks,
        }
    }

    /// Sets the totals of all other peers.
    pub(super) fn set_others(&mut self, others: ReservationTotals) {
        self.others = others;
    }

    /// Returns whether another reservation is within the limits.
    fn has_room_for(&self, mirrored: &MirroredReservation) -> bool {
        let reservations = self.bookings.len() + self.others.reservations;
        reservations < MAX_RESERVATIONS && self.blocks + mirrored.blocks() <= self.max_blocks()
    }

    /// Returns the maximum number of blocks of the peer.
    fn max_blocks(&self) -> usize {
        MAX_BLOCKS_PER_PEER.min(MAX_BLOCKS_OF_ALL_PEERS.saturating_sub(self.others.blocks))
    }

    fn insert(&mut self, id: BookingId, state: ReservationState, view: &LocalView<'_>) {
        let mut mirrored = MirroredReservation {
            state,
            reservation: None,
        };
        if !self.has_room_for(&mirrored) {
            self.ignored += 1;
            return;
        }
        self.blocks += mirrored.blocks();
        mirrored.reserve(view);
        self.waiting += usize::from(mirrored.reservation.is_none());
        self.bookings.insert(id, mirrored);
    }

    fn remove(&mut self, id: BookingId) {
        let Some(removed) = self.bookings.remove(&id) else {
            return;
        };
        self.blocks -= removed.blocks();
        self.waiting -= usize::from(removed.reservation.is_none());
    }

    fn update(&mut self, mut event: ReservationEvent, view: &LocalView<'_>) {
        let (ReservationEvent::FirstToken(id)
        | ReservationEvent::OutputBlocks { id, .. }
        | ReservationEvent::Moved { id, .. }) = event
        else {
            return;
        };
        let max_blocks = self.max_blocks();
        let Some(mirrored) = self.bookings.get_mut(&id) else {
            return;
        };
        if let ReservationEvent::Moved { to: Some(to), .. } = &mut event {
            locate(to, view);
        }
        let before = mirrored.blocks();
        mirrored.state.apply(&event);
        let after = mirrored.blocks();
        self.blocks = self.blocks - before + after;
        if after > before && self.blocks > max_blocks {
            self.ignored += 1;
            return self.remove(id);
        }
        let MirroredReservation {
            reservation: Some(reservation),
            ..
        } = mirrored
        else {
            return;
        };
        match event {
            ReservationEvent::FirstToken(_) => _ = reservation.on_first_token(),
            ReservationEvent::OutputBlocks {
                count, fraction, ..
            } => reservation.add_output_blocks(count, fraction),
            ReservationEvent::Moved { to, .. } => {
                let has_target = to.is_some();
                if !reservation.relocate(|_, _| to) && has_target {
                    // The target is not in the fleet yet.
                    mirrored.reservation = None;
                    self.waiting += 1;
                }
            }
            ReservationEvent::Booked { .. } | ReservationEvent::Released(_) => {}
        }
    }
}

impl MirroredReservation {
    fn blocks(&self) -> usize {
        self.state
            .bookings
            .iter()
            .map(|booking| booking.sequences.block_count())
            .sum()
    }

    fn reserve(&mut self, view: &LocalView<'_>) {
        self.state
            .bookings
            .iter_mut()
            .for_each(|booking| locate(booking, view));
        self.reservation = view.load.mirror(&self.state);
    }
}

fn locate(booking: &mut LoadBooking, view: &LocalView<'_>) {
    booking.slot = (view.slot)(booking.rank).unwrap_or(UNKNOWN_SLOT);
}
