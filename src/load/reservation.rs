//! The booking of one request, as a value.

use std::sync::Arc;

use super::table::{Share, Table};
use super::weight::Weight;
use super::{Booking, BookingId, LoadTracker, LoadView, News};
use crate::worker::{Slot, WorkerRank};

/// All bookings of one request. Dropping it releases everything; where a rank is gone there is nothing to release.
#[derive(Debug)]
#[must_use = "dropping a reservation releases its load"]
pub struct Reservation {
    tracker: Arc<LoadTracker>,
    parts: Vec<Part>,
    /// Under which number it was told of, if it was.
    told: Option<BookingId>,
    begun: bool,
}

/// One booking, and what it holds. Nothing is held where the rank had gone, or once the booking has ended.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) booking: Booking,
    pub(super) share: Option<Share>,
}

impl Reservation {
    pub(super) fn new(
        tracker: Arc<LoadTracker>,
        bookings: Vec<Booking>,
        shares: Option<Vec<Share>>,
        told: Option<BookingId>,
    ) -> Self {
        let mut shares = shares.into_iter().flatten();
        let parts = bookings
            .into_iter()
            .map(|booking| Part {
                booking,
                share: shares.next(),
            })
            .collect();
        Self {
            tracker,
            parts,
            told,
            begun: false,
        }
    }

    /// For whom the first booking is.
    pub fn rank(&self) -> Option<WorkerRank> {
        self.parts.first().map(|part| part.booking.rank)
    }

    /// Where the bookings are, in their order.
    pub fn parts(&self) -> impl Iterator<Item = (Slot, WorkerRank)> {
        self.bookings().map(|booking| (booking.slot, booking.rank))
    }

    /// The bookings as they were made.
    pub fn bookings(&self) -> impl Iterator<Item = &Booking> {
        self.parts.iter().map(|part| &part.booking)
    }

    /// Whether anything of it still counts as load: it was booked, has not ended, and its rank has not gone.
    pub fn counts(&self) -> bool {
        self.counts_in(&self.tracker.table.lock())
    }

    /// The same by a table that is looked at already.
    pub(super) fn counts_in(&self, table: &Table) -> bool {
        self.parts.iter().any(|part| table.counts(part))
    }

    /// Whether something of it ended that it did not end itself: a rank has gone, or has come anew.
    pub fn is_cut(&self) -> bool {
        let table = self.tracker.table.lock();
        self.parts
            .iter()
            .any(|part| part.share.is_some() && !table.counts(part))
    }

    /// The prefill is done: its share ends, and so do bookings that last until then. Says whether that changed anything;
    /// a second call does not.
    pub fn first_token(&mut self) -> bool {
        let Self {
            tracker,
            parts,
            told,
            begun,
        } = self;
        let changed = tracker.change(|table, now| any(parts, |part| table.first_token(part, now)));
        if !std::mem::replace(begun, true) {
            told.iter()
                .for_each(|id| tracker.tell(News::FirstToken(*id)));
        }
        changed
    }

    /// The answer filled another block. If it is known how much of the answer is still to come, as a `fraction`, the blocks
    /// that only this request holds count for only so much from now on: they will soon be free.
    pub fn output_block(&mut self, fraction: Option<f64>) {
        self.output_blocks(1, fraction);
    }

    /// The same of several blocks at once.
    pub fn output_blocks(&mut self, count: usize, fraction: Option<f64>) {
        let weight = fraction.and_then(Weight::of);
        let Self {
            tracker,
            parts,
            told,
            ..
        } = self;
        if count == 0 {
            return;
        }
        tracker.change(|table, _| any(parts, |part| table.output_blocks(part, count, weight)));
        told.iter().for_each(|id| {
            tracker.tell(News::OutputBlocks {
                id: *id,
                count,
                fraction,
            })
        });
    }

    /// The first booking counts somewhere else from now on, as far as it had come: what it shall be there is decided and
    /// booked in one critical section with its release. `None` only releases it, and so does a rank that is not there.
    /// Whether it is booked afterwards. `decide` must be quick and must not come back here.
    pub fn relocate(
        &mut self,
        decide: impl FnOnce(&LoadView<'_>, &Booking) -> Option<Booking>,
    ) -> bool {
        let Self {
            tracker,
            parts,
            told,
            ..
        } = self;
        let Some(part) = parts.first_mut().filter(|part| part.share.is_some()) else {
            return false;
        };
        tracker.change(|table, now| {
            let to = decide(&LoadView::new(table, now), &part.booking);
            table.relocate(part, to, now)
        });
        let to = part.share.as_ref().map(|_| &part.booking);
        told.iter().for_each(|id| {
            tracker.tell(News::Moved {
                id: *id,
                to: to.cloned(),
            })
        });
        to.is_some()
    }

    /// Releases everything; says whether anything was still held.
    pub fn release(mut self) -> bool {
        self.give_back()
    }

    fn give_back(&mut self) -> bool {
        let Self {
            tracker,
            parts,
            told,
            ..
        } = self;
        told.take()
            .into_iter()
            .for_each(|id| tracker.tell(News::Released(id)));
        let holds = parts.iter().any(|part| part.share.is_some());
        holds && tracker.change(|table, now| any(parts, |part| table.release(part, now)))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Does it to all parts; whether it was so for any.
fn any(parts: &mut [Part], mut change: impl FnMut(&mut Part) -> bool) -> bool {
    parts
        .iter_mut()
        .fold(false, |changed, part| change(part) | changed)
}
