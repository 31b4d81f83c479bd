//! Bookings that are not held by a stream of ours: callers of the service and peers name them by request id, and we
//! cannot see when they go away. So a booking belongs to one attempt at a request, and a late word about an earlier
//! attempt changes nothing; and a booking of which nothing was heard for too long is released. A word may also come twice,
//! its answer having been lost. So what has ended is remembered for a while, and is not booked again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Booking, LoadTracker, Reservation};
use crate::worker::WorkerRank;

/// Adding looks for silent bookings itself, but not more often than this.
const SWEEP: Duration = Duration::from_secs(30);

/// What a ledger allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// A booking ends when nothing was heard of it for longer than this.
    pub silence: Duration,
    /// Most bookings at a time.
    pub most: usize,
    /// Most blocks that all bookings together hold.
    pub blocks: usize,
    /// How many that have ended are remembered, for no longer than `silence`. With 0, who ends may be booked again at once.
    pub ended: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(300),
            most: 1 << 20,
            blocks: 1 << 25,
            ended: 0,
        }
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
        if applied {
            Change::Applied
        } else {
            Change::None
        }
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
    /// The same for what they hold.
    #[error("all bookings together would hold more than {most} blocks")]
    Blocks {
        /// The bound.
        most: usize,
    },
}

/// What lies beside a booking, and goes with it.
pub trait Beside: Default {
    /// The booking has ended, and is only remembered.
    fn end(&mut self);
}

impl Beside for () {
    fn end(&mut self) {}
}

/// What is known of an attempt.
#[derive(Debug)]
pub enum Known<'a, B> {
    /// It is booked, at that instant.
    Booked(&'a Reservation, Instant, &'a mut B),
    /// It was, and has ended.
    Ended(&'a mut B),
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
pub struct Ledger<B = ()> {
    load: Arc<LoadTracker>,
    rules: Rules,
    entries: HashMap<String, Entry<B>>,
    /// Which of the entries have ended, and when. Some of them may have been replaced.
    ended: VecDeque<(Instant, String)>,
    /// How many of the entries have ended.
    remembered: usize,
    /// How many blocks the others hold.
    blocks: usize,
    swept: Instant,
    expired: u64,
}

#[derive(Debug)]
struct Entry<B> {
    attempt: u64,
    /// `None` once it has ended.
    held: Option<Reservation>,
    booked: Instant,
    /// The last sign of life.
    heard: Instant,
    beside: B,
}

impl<B: Beside> Ledger<B> {
    /// An empty ledger; its time is that of the load.
    pub fn new(load: Arc<LoadTracker>, rules: Rules) -> Self {
        let swept = load.now();
        let (entries, ended) = (HashMap::new(), VecDeque::new());
        Self {
            load,
            rules,
            entries,
            ended,
            remembered: 0,
            blocks: 0,
            swept,
            expired: 0,
        }
    }

    /// Books. The same once more, an answer having been lost, is a sign of life and changes nothing. A later attempt takes
    /// the place of an earlier one.
    pub fn add(&mut self, attempt: Attempt<'_>, bookings: Vec<Booking>) -> Result<Change, Refused> {
        let blocks = bookings
            .iter()
            .map(|booking| booking.sequences.blocks())
            .sum();
        if self.is_known(attempt, bookings.iter(), blocks)? {
            return Ok(Change::None);
        }
        let reservation = self.load.book_with(|view| {
            let gone = bookings
                .iter()
                .find(|booking| view.load(booking.slot, booking.rank).is_none());
            gone.map_or(Ok(()), |booking| {
                Err(Refused::NotServing { rank: booking.rank })
            })?;
            Ok(bookings)
        })?;
        self.insert(attempt, reservation);
        Ok(Change::Applied)
    }

    /// Keeps what was booked elsewhere. If it is refused, the reservation is dropped.
    pub fn keep(
        &mut self,
        attempt: Attempt<'_>,
        reservation: Reservation,
    ) -> Result<Change, Refused> {
        if self.is_known(attempt, reservation.bookings(), blocks_of(&reservation))? {
            return Ok(Change::None);
        }
        self.insert(attempt, reservation);
        Ok(Change::Applied)
    }

    /// Whether another attempt could be booked, so that nobody waits for nothing. What an earlier attempt at the same
    /// request has booked is released: its place is wanted.
    pub fn make_room(&mut self, attempt: Attempt<'_>) -> Result<(), Refused> {
        self.tidy(attempt);
        match self
            .entries
            .get(attempt.request)
            .map(|entry| (entry.attempt, entry.held.is_some()))
        {
            Some((other, true)) if other < attempt.number => self.end(attempt.request),
            Some((other, true)) => return Err(Refused::Booked { attempt: other }),
            _ => {}
        }
        self.room(0, 1)
    }

    /// What an attempt has booked, so that who asks again is told the same.
    pub fn get(&self, attempt: Attempt<'_>) -> Option<&Reservation> {
        let entry = self
            .entries
            .get(attempt.request)
            .filter(|entry| entry.attempt == attempt.number)?;
        entry.held.as_ref().filter(|held| held.counts())
    }

    /// What is known of an attempt, and what lies beside it. One that was followed by a later one that has ended is known
    /// as that: whoever speaks of it is late.
    pub fn known(&mut self, attempt: Attempt<'_>) -> Option<Known<'_, B>> {
        let now = self.load.now();
        let entry = self.entries.get_mut(attempt.request)?;
        let Entry {
            attempt: number,
            held,
            booked,
            beside,
            ..
        } = entry;
        match held {
            Some(held) => (*number == attempt.number && held.counts())
                .then_some(Known::Booked(held, *booked, beside)),
            None => {
                let recent = now.saturating_duration_since(entry.heard) <= self.rules.silence;
                (attempt.number <= *number && recent).then_some(Known::Ended(beside))
            }
        }
    }

    /// Its first token came.
    pub fn mark_prefill_completed(&mut self, attempt: Attempt<'_>) -> Change {
        let Some(held) = self.hear(attempt) else {
            return Change::None;
        };
        let marked = held.first_token();
        if marked && !held.counts() && self.rules.ended > 0 {
            // A prefill worker has nothing more to do with it.
            self.end(attempt.request);
        }
        Change::of(marked)
    }

    /// Its answer filled another block; see [`Reservation::output_block`].
    pub fn output_block(&mut self, attempt: Attempt<'_>, fraction: Option<f64>) -> Change {
        let held = self.hear(attempt);
        Change::of(held.map(|held| held.output_block(fraction)).is_some())
    }

    /// It is still there.
    pub fn touch(&mut self, attempt: Attempt<'_>) -> Change {
        Change::of(self.hear(attempt).is_some())
    }

    /// It has ended.
    pub fn free(&mut self, attempt: Attempt<'_>) -> Change {
        let counted = self.get(attempt).is_some();
        if self
            .entries
            .get(attempt.request)
            .is_some_and(|entry| entry.attempt == attempt.number && entry.held.is_some())
        {
            self.end(attempt.request);
        }
        Change::of(counted)
    }

    /// Releases what was silent for too long, and forgets whose worker has gone. Says how many were silent. Whoever keeps
    /// a ledger calls this now and then, traffic or not.
    pub fn expire(&mut self) -> usize {
        let Self {
            load,
            rules,
            entries,
            ended,
            remembered,
            ..
        } = self;
        let now = load.now();
        while ended
            .front()
            .is_some_and(|(at, _)| is_silent(*at, now, rules))
        {
            let Some((at, request)) = ended.pop_front() else {
                break;
            };
            if entries
                .get(&request)
                .is_some_and(|entry| entry.ended_at(at))
            {
                entries.remove(&request);
                *remembered -= 1;
            }
        }
        let mut silent: Vec<_> = entries
            .extract_if(|_, entry| entry.held.is_some() && is_silent(entry.heard, now, rules))
            .filter_map(|(_, entry)| entry.held)
            .collect();
        let count = silent.len();
        let gone = load.gone(
            entries
                .iter()
                .filter_map(|(request, entry)| Some((request, entry.held.as_ref()?))),
        );
        let gone: Vec<String> = gone.into_iter().cloned().collect();
        silent.extend(
            gone.iter()
                .filter_map(|request| entries.remove(request)?.held),
        );
        self.blocks -= silent.iter().map(blocks_of).sum::<usize>();
        self.swept = now;
        self.expired += count as u64;
        count
    }

    /// How many.
    pub fn counts(&self) -> Counts {
        Counts {
            bookings: self.entries.len() - self.remembered,
            expired: self.expired,
        }
    }

    /// What an attempt holds whose bookings still count; that it is spoken of is a sign of life.
    fn hear(&mut self, attempt: Attempt<'_>) -> Option<&mut Reservation> {
        let entry = self
            .entries
            .get_mut(attempt.request)
            .filter(|entry| entry.attempt == attempt.number)?;
        let held = entry.held.as_mut().filter(|held| held.counts())?;
        entry.heard = self.load.now();
        Some(held)
    }

    /// Whether just this is booked already, or was. An earlier attempt, or the same elsewhere, is refused.
    fn is_known<'a>(
        &mut self,
        attempt: Attempt<'_>,
        bookings: impl Iterator<Item = &'a Booking>,
        blocks: usize,
    ) -> Result<bool, Refused> {
        self.tidy(attempt);
        let now = self.load.now();
        let Some(entry) = self.entries.get_mut(attempt.request) else {
            return self.room(blocks, 1).map(|()| false);
        };
        match &entry.held {
            None if attempt.number <= entry.attempt => Ok(true),
            None => self.room(blocks, 1).map(|()| false),
            Some(held) if entry.attempt == attempt.number && held.bookings().eq(bookings) => {
                entry.heard = now;
                Ok(true)
            }
            Some(_) if attempt.number <= entry.attempt => Err(Refused::Booked {
                attempt: entry.attempt,
            }),
            // Takes its place.
            Some(_) => self.room(blocks, 0).map(|()| false),
        }
    }

    /// Forgets what is over under the id of a request.
    fn tidy(&mut self, attempt: Attempt<'_>) {
        let now = self.load.now();
        if now.saturating_duration_since(self.swept) >= SWEEP {
            self.expire();
        }
        let Some(entry) = self.entries.get(attempt.request) else {
            return;
        };
        let silent = is_silent(entry.heard, now, &self.rules);
        if silent || entry.held.as_ref().is_some_and(|held| !held.counts()) {
            self.expired += u64::from(silent && entry.held.is_some());
            self.remove(attempt.request);
        }
    }

    /// Whether so much more may be booked.
    fn room(&self, blocks: usize, bookings: usize) -> Result<(), Refused> {
        let Rules {
            most,
            blocks: most_blocks,
            ..
        } = self.rules;
        if self.counts().bookings + bookings > most {
            return Err(Refused::Full { most });
        }
        match self.blocks.saturating_add(blocks) > most_blocks {
            true => Err(Refused::Blocks { most: most_blocks }),
            false => Ok(()),
        }
    }

    fn insert(&mut self, attempt: Attempt<'_>, reservation: Reservation) {
        self.remove(attempt.request);
        self.blocks += blocks_of(&reservation);
        let now = self.load.now();
        let (number, held) = (attempt.number, Some(reservation));
        let entry = Entry {
            attempt: number,
            held,
            booked: now,
            heard: now,
            beside: B::default(),
        };
        self.entries.insert(attempt.request.into(), entry);
    }

    fn remove(&mut self, request: &str) {
        match self.entries.remove(request).map(|entry| entry.held) {
            Some(Some(held)) => self.blocks -= blocks_of(&held),
            Some(None) => self.remembered -= 1,
            None => {}
        }
    }

    /// Releases what is booked, and remembers that it was.
    fn end(&mut self, request: &str) {
        if self.rules.ended == 0 {
            return self.remove(request);
        }
        let now = self.load.now();
        let Some(entry) = self.entries.get_mut(request) else {
            return;
        };
        let Some(held) = entry.held.take() else {
            return;
        };
        self.blocks -= blocks_of(&held);
        entry.heard = now;
        entry.beside.end();
        self.remembered += 1;
        self.ended.push_back((now, request.to_owned()));
        if self.ended.len() > self.rules.ended
            && let Some((at, oldest)) = self.ended.pop_front()
            && self
                .entries
                .get(&oldest)
                .is_some_and(|entry| entry.ended_at(at))
        {
            self.remove(&oldest);
        }
    }
}

impl<B> Entry<B> {
    fn ended_at(&self, at: Instant) -> bool {
        self.held.is_none() && self.heard == at
    }
}

fn blocks_of(reservation: &Reservation) -> usize {
    reservation
        .bookings()
        .map(|booking| booking.sequences.blocks())
        .sum()
}

fn is_silent(heard: Instant, now: Instant, rules: &Rules) -> bool {
    now.saturating_duration_since(heard) > rules.silence
}

#[cfg(test)]
mod tests;
