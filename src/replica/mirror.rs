//! The reservations of one peer, counted here as if they were ours. They end with the mirror.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::Told;
use super::wire::NOWHERE;
use crate::block::tracking::Key;
use crate::load::{Booking, BookingId, Live, LoadTracker, News, Reservation};
use crate::router::Routed;
use crate::sessions::{Sessions, Use};
use crate::worker::{Slot, WorkerId, WorkerRank};

/// Most reservations of all peers together.
const MOST_RESERVATIONS: usize = 1 << 18;

/// Most blocks of the reservations of one peer, each counted as often as it is reserved.
pub(super) const MOST_BLOCKS: usize = if cfg!(test) { 1 << 18 } else { 1 << 22 };

/// Most blocks of the reservations of all peers together, counted in the same way.
pub(super) const MOST_BLOCKS_OF_ALL_PEERS: usize = if cfg!(test) { 3 << 17 } else { 1 << 24 };

/// The state of this process that messages of peers change.
pub struct World<'a> {
    /// The load table.
    pub load: &'a Arc<LoadTracker>,
    /// Generation of the fleet; slots may differ between generations.
    pub generation: u64,
    /// The slot of a rank of the fleet.
    pub slot: &'a dyn Fn(WorkerRank) -> Option<Slot>,
    /// The key of `tracking_hash`, where there is one.
    pub key: Option<&'a Key>,
    /// The session table, where sessions are configured.
    pub sessions: Option<&'a Sessions>,
    /// Marks a worker as overloaded.
    pub overloaded: &'a dyn Fn(WorkerId, Duration),
    /// Reports the first token of the exchange of that name.
    pub first_token: &'a dyn Fn(&str),
    /// Reports prompts routed to a rank whose cache is predicted.
    pub routed: &'a dyn Fn(Routed),
    /// Reports a booking made just now.
    pub booked: &'a dyn Fn(&Booking),
}

/// Number of reservations and of their blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationTotals {
    pub(super) reservations: usize,
    pub(super) blocks: usize,
}

/// What a peer has booked.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    bookings: BTreeMap<BookingId, Mirrored>,
    /// How many of them are on workers that we do not know, or not yet.
    waiting: usize,
    /// Blocks of all of them.
    blocks: usize,
    /// Reservations of all other peers.
    others: ReservationTotals,
    /// Reservations that were not counted, because they or their blocks exceed a limit.
    refused: u64,
    /// By which fleet they are counted.
    generation: u64,
}

#[derive(Debug)]
struct Mirrored {
    live: Live,
    held: Option<Reservation>,
}

impl Mirror {
    /// Something happened at the peer.
    pub(super) fn apply(&mut self, told: Told, world: &World<'_>) {
        match told {
            Told::Load(News::Booked { id, bookings }) if !self.bookings.contains_key(&id) => {
                self.insert(id, Live::new(bookings), world);
            }
            Told::Load(News::Booked { .. }) => {}
            Told::Load(News::Released(id)) => self.remove(id),
            Told::Load(news) => self.change(news, world),
            Told::Session(word) => {
                if let Some(sessions) = world.sessions {
                    sessions.take(word, Use::Now);
                }
            }
            Told::Overloaded(worker, left) => (world.overloaded)(worker, left),
            Told::FirstTokenOf(name) => (world.first_token)(&name),
            Told::Routed(routed) => (world.routed)(routed),
        }
    }

    /// This is all that the peer has booked. What is the same stays as it is; the new is counted before the old goes, so
    /// that nobody sees less load than there is.
    pub(super) fn replace(&mut self, all: Vec<(BookingId, Live)>, world: &World<'_>) {
        let mut before = std::mem::take(self);
        self.generation = world.generation;
        self.refused = before.refused;
        self.others = before.others;
        for (id, live) in all {
            match before.bookings.remove(&id) {
                Some(known)
                    if known.live.same(&live) && !known.is_cut() && self.has_room_for(&known) =>
                {
                    self.waiting += usize::from(known.held.is_none());
                    self.blocks += known.blocks();
                    self.bookings.insert(id, known);
                }
                known => {
                    self.insert(id, live, world);
                    drop(known);
                }
            }
        }
    }

    /// Counts what is on workers that have come to be known, or stand elsewhere than before.
    pub(super) fn settle(&mut self, world: &World<'_>) {
        if std::mem::replace(&mut self.generation, world.generation) != world.generation {
            for mirrored in self
                .bookings
                .values_mut()
                .filter(|mirrored| mirrored.is_cut())
            {
                mirrored.held = None;
                self.waiting += 1;
            }
        }
        if self.waiting == 0 {
            return;
        }
        for mirrored in self
            .bookings
            .values_mut()
            .filter(|mirrored| mirrored.held.is_none())
        {
            mirrored.hold(world);
            self.waiting -= usize::from(mirrored.held.is_some());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bookings.len()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Reservations of the peer that were not counted.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Reservations of the peer.
    pub(super) fn totals(&self) -> ReservationTotals {
        ReservationTotals {
            reservations: self.bookings.len(),
            blocks: self.blocks,
        }
    }

    /// Sets the reservations of all other peers.
    pub(super) fn set_others(&mut self, others: ReservationTotals) {
        self.others = others;
    }

    /// Whether a further reservation keeps the limits.
    fn has_room_for(&self, mirrored: &Mirrored) -> bool {
        let reservations = self.bookings.len() + self.others.reservations;
        reservations < MOST_RESERVATIONS && self.blocks + mirrored.blocks() <= self.most_blocks()
    }

    /// Most blocks that the reservations of the peer may have.
    fn most_blocks(&self) -> usize {
        MOST_BLOCKS.min(MOST_BLOCKS_OF_ALL_PEERS.saturating_sub(self.others.blocks))
    }

    fn insert(&mut self, id: BookingId, live: Live, world: &World<'_>) {
        let mut mirrored = Mirrored { live, held: None };
        if !self.has_room_for(&mirrored) {
            self.refused += 1;
            return;
        }
        self.blocks += mirrored.blocks();
        mirrored.hold(world);
        self.waiting += usize::from(mirrored.held.is_none());
        self.bookings.insert(id, mirrored);
    }

    fn remove(&mut self, id: BookingId) {
        let Some(gone) = self.bookings.remove(&id) else {
            return;
        };
        self.blocks -= gone.blocks();
        self.waiting -= usize::from(gone.held.is_none());
    }

    fn change(&mut self, mut news: News, world: &World<'_>) {
        let (News::FirstToken(id) | News::OutputBlocks { id, .. } | News::Moved { id, .. }) = news
        else {
            return;
        };
        let most_blocks = self.most_blocks();
        let Some(mirrored) = self.bookings.get_mut(&id) else {
            return;
        };
        if let News::Moved { to: Some(to), .. } = &mut news {
            locate(to, world);
        }
        let before = mirrored.blocks();
        mirrored.live.apply(&news);
        let after = mirrored.blocks();
        self.blocks = self.blocks - before + after;
        if after > before && self.blocks > most_blocks {
            self.refused += 1;
            return self.remove(id);
        }
        let Mirrored {
            held: Some(reservation),
            ..
        } = mirrored
        else {
            return;
        };
        match news {
            News::FirstToken(_) => _ = reservation.first_token(),
            News::OutputBlocks {
                count, fraction, ..
            } => reservation.output_blocks(count, fraction),
            News::Moved { to, .. } => {
                let goes_on = to.is_some();
                if !reservation.relocate(|_, _| to) && goes_on {
                    // Not known here, or not yet.
                    mirrored.held = None;
                    self.waiting += 1;
                }
            }
            News::Booked { .. } | News::Released(_) => {}
        }
    }
}

impl Mirrored {
    fn blocks(&self) -> usize {
        self.live
            .bookings
            .iter()
            .map(|booking| booking.sequences.blocks())
            .sum()
    }

    fn is_cut(&self) -> bool {
        self.held.as_ref().is_some_and(Reservation::is_cut)
    }

    fn hold(&mut self, world: &World<'_>) {
        self.live
            .bookings
            .iter_mut()
            .for_each(|booking| locate(booking, world));
        self.held = world.load.mirror(&self.live);
    }
}

fn locate(booking: &mut Booking, world: &World<'_>) {
    booking.slot = (world.slot)(booking.rank).unwrap_or(NOWHERE);
}
