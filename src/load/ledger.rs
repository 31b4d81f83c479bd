//! Bookings that are not held by a stream of ours: callers of the service and peers name them by request id, and we
//! cannot see when they go away. So a booking belongs to one attempt at a request, and a late word about an earlier
//! attempt changes nothing; and a booking of which nothing was heard for too long is released.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Booking, LoadTracker, Reservation};
use crate::worker::WorkerRank;

mod peer;

pub use peer::{PeerChange, PeerEvent, Peers};

/// Adding looks for silent bookings itself, but not more often than this.
const SWEEP: Duration = Duration::from_secs(30);

/// What a ledger allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// A booking ends when nothing was heard of it for longer than this.
    pub silence: Duration,
    /// Most bookings at a time.
    pub most: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self { silence: Duration::from_secs(300), most: 1 << 20 }
    }
}

/// One attempt at a request. A retry has another number; who never retries uses 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempt<'a> {
    /// The request.
    pub request: &'a str,
    /// Which attempt.
    pub number: u64,
}

/// Whether anything changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// It did.
    Applied,
    /// Nothing of that name, or it was so already.
    None,
}

impl Change {
    fn of(applied: bool) -> Self {
        if applied { Change::Applied } else { Change::None }
    }
}

/// Why a booking was not taken. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The id is in use.
    #[error("the request is booked already, as attempt {attempt}")]
    Booked {
        /// By which attempt.
        attempt: u64,
    },
    /// Only the fleet says who serves.
    #[error("worker rank {rank} does not serve")]
    NotServing {
        /// Who was meant.
        rank: WorkerRank,
    },
    /// A bound on what others can make us remember.
    #[error("there are {most} bookings already")]
    Full {
        /// The bound.
        most: usize,
    },
}

/// How much is in a ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bookings; one whose worker has gone stays among them until the next sweep.
    pub bookings: usize,
    /// Bookings that ended because of their silence, since the beginning.
    pub expired: u64,
}

/// Bookings by request id.
#[derive(Debug)]
pub struct Ledger {
    load: Arc<LoadTracker>,
    rules: Rules,
    entries: HashMap<String, Entry>,
    swept: Instant,
    expired: u64,
}

#[derive(Debug)]
struct Entry {
    attempt: u64,
    reservation: Reservation,
    /// The last sign of life.
    heard: Instant,
}

impl Ledger {
    /// An empty ledger; its time is that of the load.
    pub fn new(load: Arc<LoadTracker>, rules: Rules) -> Self {
        let swept = load.now();
        Self { load, rules, entries: HashMap::new(), swept, expired: 0 }
    }

    /// Books. The same once more, an answer having been lost, is a sign of life and changes nothing.
    pub fn add(&mut self, attempt: Attempt<'_>, bookings: Vec<Booking>) -> Result<Change, Refused> {
        if self.is_known(attempt, bookings.iter())? {
            return Ok(Change::None);
        }
        let reservation = self.load.book_with(|view| {
            let gone = bookings.iter().find(|booking| view.load(booking.slot, booking.rank).is_none());
            gone.map_or(Ok(()), |booking| Err(Refused::NotServing { rank: booking.rank }))?;
            Ok(bookings)
        })?;
        self.insert(attempt, reservation);
        Ok(Change::Applied)
    }

    /// Keeps what was booked elsewhere. If it is refused, the reservation is dropped.
    pub fn keep(&mut self, attempt: Attempt<'_>, reservation: Reservation) -> Result<Change, Refused> {
        if self.is_known(attempt, reservation.bookings())? {
            return Ok(Change::None);
        }
        self.insert(attempt, reservation);
        Ok(Change::Applied)
    }

    /// What an attempt has booked, so that who asks again is told the same.
    pub fn get(&self, attempt: Attempt<'_>) -> Option<&Reservation> {
        let entry = self.entries.get(attempt.request).filter(|entry| entry.attempt == attempt.number)?;
        entry.reservation.counts().then_some(&entry.reservation)
    }

    /// Its first token came.
    pub fn mark_prefill_completed(&mut self, attempt: Attempt<'_>) -> Change {
        Change::of(self.hear(attempt).is_some_and(|entry| entry.reservation.first_token()))
    }

    /// Its answer filled another block; see [`Reservation::output_block`].
    pub fn output_block(&mut self, attempt: Attempt<'_>, fraction: Option<f64>) -> Change {
        let entry = self.hear(attempt);
        Change::of(entry.map(|entry| entry.reservation.output_block(fraction)).is_some())
    }

    /// It is still there.
    pub fn touch(&mut self, attempt: Attempt<'_>) -> Change {
        Change::of(self.hear(attempt).is_some())
    }

    /// It has ended.
    pub fn free(&mut self, attempt: Attempt<'_>) -> Change {
        if self.entries.get(attempt.request).is_none_or(|entry| entry.attempt != attempt.number) {
            return Change::None;
        }
        Change::of(self.entries.remove(attempt.request).is_some_and(|entry| entry.reservation.release()))
    }

    /// Releases what was silent for too long, and forgets whose worker has gone. Says how many were silent. Whoever keeps
    /// a ledger calls this now and then, traffic or not.
    pub fn expire(&mut self) -> usize {
        let Self { load, rules, entries, .. } = self;
        let now = load.now();
        let before = entries.len();
        entries.retain(|_, entry| !entry.is_silent(now, rules));
        let silent = before - entries.len();
        entries.retain(|_, entry| entry.reservation.counts());
        self.swept = now;
        self.expired += silent as u64;
        silent
    }

    /// How many.
    pub fn counts(&self) -> Counts {
        Counts { bookings: self.entries.len(), expired: self.expired }
    }

    /// The entry of an attempt whose bookings still count; that it is spoken of is a sign of life.
    fn hear(&mut self, attempt: Attempt<'_>) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(attempt.request).filter(|entry| entry.attempt == attempt.number)?;
        entry.heard = self.load.now();
        entry.reservation.counts().then_some(entry)
    }

    /// Whether just this is booked already. Anything else under the id of a live request is refused.
    fn is_known<'a>(
        &mut self,
        attempt: Attempt<'_>,
        bookings: impl Iterator<Item = &'a Booking>,
    ) -> Result<bool, Refused> {
        let now = self.load.now();
        if now.saturating_duration_since(self.swept) >= SWEEP {
            self.expire();
        }
        let ended = self.entries.get(attempt.request).map(|entry| (entry.is_silent(now, &self.rules), entry));
        if let Some((silent, _)) = ended.filter(|(silent, entry)| *silent || !entry.reservation.counts()) {
            self.entries.remove(attempt.request);
            self.expired += u64::from(silent);
        }
        let most = self.rules.most;
        let full = self.entries.len() >= most;
        match self.entries.get_mut(attempt.request) {
            Some(entry) if entry.attempt == attempt.number && entry.reservation.bookings().eq(bookings) => {
                entry.heard = now;
                Ok(true)
            }
            Some(entry) => Err(Refused::Booked { attempt: entry.attempt }),
            None if full => Err(Refused::Full { most }),
            None => Ok(false),
        }
    }

    fn insert(&mut self, attempt: Attempt<'_>, reservation: Reservation) {
        let entry = Entry { attempt: attempt.number, reservation, heard: self.load.now() };
        self.entries.insert(attempt.request.into(), entry);
    }
}

impl Entry {
    fn is_silent(&self, now: Instant, rules: &Rules) -> bool {
        now.saturating_duration_since(self.heard) > rules.silence
    }
}

#[cfg(test)]
mod tests;
