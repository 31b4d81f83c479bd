//! The reservations of one peer, counted here as if they were ours. They end with the mirror.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::Told;
use super::wire::NOWHERE;
use crate::load::{Booking, BookingId, Live, LoadTracker, News, Reservation};
use crate::sessions::Sessions;
use crate::worker::{Slot, WorkerId, WorkerRank};

/// Most reservations of one peer.
const MOST: usize = 1 << 20;

/// What words of peers are about.
pub(super) struct World<'a> {
    pub(super) load: &'a Arc<LoadTracker>,
    pub(super) slot: &'a dyn Fn(WorkerRank) -> Option<Slot>,
    pub(super) sessions: Option<&'a Sessions>,
    pub(super) overloaded: &'a dyn Fn(WorkerId, Duration),
    pub(super) first_token: &'a dyn Fn(&str),
    /// Something was booked just now.
    pub(super) booked: &'a dyn Fn(&Booking),
}

/// What a peer has booked.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    bookings: BTreeMap<BookingId, Mirrored>,
    /// How many of them are on workers that we do not know, or not yet.
    waiting: usize,
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
            Told::Session(word) => world.sessions.into_iter().for_each(|sessions| sessions.take(word.clone())),
            Told::Overloaded(worker, left) => (world.overloaded)(worker, left),
            Told::FirstTokenOf(name) => (world.first_token)(&name),
        }
    }

    /// This is all that the peer has booked. What is the same stays as it is; the new is counted before the old goes, so
    /// that nobody sees less load than there is.
    pub(super) fn replace(&mut self, all: Vec<(BookingId, Live)>, world: &World<'_>) {
        let mut before = std::mem::take(self);
        for (id, live) in all {
            match before.bookings.remove(&id) {
                Some(known) if known.live.same(&live) => {
                    self.waiting += usize::from(known.held.is_none());
                    self.bookings.insert(id, known);
                }
                known => {
                    self.insert(id, live, world);
                    drop(known);
                }
            }
        }
    }

    /// Counts what is on workers that have come to be known.
    pub(super) fn settle(&mut self, world: &World<'_>) {
        if self.waiting == 0 {
            return;
        }
        for mirrored in self.bookings.values_mut().filter(|mirrored| mirrored.held.is_none()) {
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

    fn insert(&mut self, id: BookingId, live: Live, world: &World<'_>) {
        if self.bookings.len() >= MOST {
            return;
        }
        let mut mirrored = Mirrored { live, held: None };
        mirrored.hold(world);
        self.waiting += usize::from(mirrored.held.is_none());
        self.bookings.insert(id, mirrored);
    }

    fn remove(&mut self, id: BookingId) {
        let gone = self.bookings.remove(&id);
        self.waiting -= usize::from(gone.is_some_and(|gone| gone.held.is_none()));
    }

    fn change(&mut self, mut news: News, world: &World<'_>) {
        let (News::FirstToken(id) | News::OutputBlocks { id, .. } | News::Moved { id, .. }) = news else { return };
        let Some(Mirrored { live, held }) = self.bookings.get_mut(&id) else { return };
        if let News::Moved { to: Some(to), .. } = &mut news {
            locate(to, world);
        }
        live.apply(&news);
        let Some(held) = held else { return };
        match news {
            News::FirstToken(_) => _ = held.first_token(),
            News::OutputBlocks { count, fraction, .. } => held.output_blocks(count, fraction),
            News::Moved { to, .. } => _ = held.relocate(|_, _| to),
            News::Booked { .. } | News::Released(_) => {}
        }
    }
}

impl Mirrored {
    fn hold(&mut self, world: &World<'_>) {
        self.live.bookings.iter_mut().for_each(|booking| locate(booking, world));
        self.held = world.load.mirror(&self.live);
    }
}

fn locate(booking: &mut Booking, world: &World<'_>) {
    booking.slot = (world.slot)(booking.rank).unwrap_or(NOWHERE);
}
