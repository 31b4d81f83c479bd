//! Reservations of external callers and replicas, keyed by request id. They arrive without a
//! connection whose end could release them, so each reservation expires after a period without
//! messages. A reservation belongs to one attempt at a request, so late messages about an earlier
//! attempt have no effect. Messages may also be repeated after a lost reply, so ended attempts are
//! remembered for a while and not booked again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::learning::CachedTokenSource;
use super::{LoadBooking, LoadTracker, Reservation};
use crate::worker::WorkerRank;

/// Minimum interval between the sweeps for idle reservations that [`BookingLedger::add`] runs.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);

/// Limits of a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerRules {
    /// A reservation is released after this time without a message.
    pub idle_timeout: Duration,
    /// Maximum number of reservations.
    pub max_bookings: usize,
    /// Maximum number of blocks over all reservations.
    pub max_blocks: usize,
    /// Maximum number of ended attempts that are remembered, each for at most `idle_timeout`. With
    /// 0, an ended attempt can be booked again at once.
    pub max_ended: usize,
}

impl Default for LedgerRules {
    fn default() -> Self {
        Self {
            idle_timeout: Duration::from_secs(300),
            max_bookings: 1 << 20,
            max_blocks: 1 << 25,
            max_ended: 0,
        }
    }
}

/// One attempt at a request. Each retry has a higher number; callers that never retry use 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestAttempt<'a> {
    /// Request id.
    pub request: &'a str,
    /// Number of the attempt.
    pub number: u64,
}

/// Outcome of a message to the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LedgerChange {
    /// The ledger changed.
    Applied,
    /// The attempt is unknown, or the message was already applied.
    Unchanged,
}

impl LedgerChange {
    fn from_applied(applied: bool) -> Self {
        if applied {
            LedgerChange::Applied
        } else {
            LedgerChange::Unchanged
        }
    }
}

/// Rejection of a booking. The ledger is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// Another attempt of the same request is booked.
    #[error("the request is booked already, as attempt {attempt}")]
    AlreadyBooked {
        /// Number of the booked attempt.
        attempt: u64,
    },
    /// The worker rank is not in the fleet.
    #[error("worker rank {rank} is not in the fleet")]
    NotServing {
        /// The requested worker rank.
        rank: WorkerRank,
    },
    /// The limit on reservations is reached.
    #[error("the limit of {limit} bookings is reached")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// The limit on blocks would be exceeded.
    #[error("all bookings together would hold more than {limit} blocks")]
    TooManyBlocks {
        /// The limit.
        limit: usize,
    },
}

/// Data of the caller that is stored beside a reservation.
pub trait BookingAttachment: Default {
    /// Handles the end of the reservation. Only its id is remembered from now on.
    fn on_booking_end(&mut self);
}

impl BookingAttachment for () {
    fn on_booking_end(&mut self) {}
}

/// State of an attempt.
#[derive(Debug)]
pub enum AttemptState<'a, B> {
    /// Booked.
    Booked(&'a Reservation, &'a mut B),
    /// Ended, but still remembered.
    Ended(&'a mut B),
}

/// Size of a ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Reservations.
    pub bookings: usize,
    /// Reservations that were released because they were idle, since the start.
    pub expired: u64,
}

/// Reservations by request id.
#[derive(Debug)]
pub struct BookingLedger<B = ()> {
    load: Arc<LoadTracker>,
    rules: LedgerRules,
    entries: HashMap<String, LedgerEntry<B>>,
    /// Ended entries in order of their end. An entry may have been replaced since.
    ended: VecDeque<(Instant, String)>,
    /// Number of ended entries.
    remembered: usize,
    /// Blocks over all reservations.
    blocks: usize,
    swept_at: Instant,
    expired: u64,
}

#[derive(Debug)]
struct LedgerEntry<B> {
    attempt: u64,
    /// `None` after the end.
    reservation: Option<Reservation>,
    /// Time of the last message about the attempt, or of its end.
    last_seen: Instant,
    attachment: B,
}

impl<B: BookingAttachment> BookingLedger<B> {
    /// Creates an empty ledger that uses the clock of the load tracker.
    pub fn new(load: Arc<LoadTracker>, rules: LedgerRules) -> Self {
        let swept_at = load.now();
        Self {
            load,
            rules,
            entries: HashMap::new(),
            ended: VecDeque::new(),
            remembered: 0,
            blocks: 0,
            swept_at,
            expired: 0,
        }
    }

    /// Books load for an attempt. Repeating the same booking only refreshes it. A later attempt
    /// replaces an earlier one.
    pub fn add(
        &mut self,
        attempt: RequestAttempt<'_>,
        bookings: Vec<LoadBooking>,
    ) -> Result<LedgerChange, LedgerError> {
        let blocks = bookings
            .iter()
            .map(|booking| booking.sequences.block_count())
            .sum();
        if self.is_duplicate(attempt, bookings.iter(), blocks)? {
            return Ok(LedgerChange::Unchanged);
        }
        let (reservation, ()) = self.load.book_with(|view| {
            let missing = bookings
                .iter()
                .find(|booking| view.load(booking.slot, booking.rank).is_none());
            missing.map_or(Ok(()), |booking| {
                Err(LedgerError::NotServing { rank: booking.rank })
            })?;
            Ok((bookings, ()))
        })?;
        self.insert(attempt, reservation);
        Ok(LedgerChange::Applied)
    }

    /// Stores a reservation that was booked elsewhere. The reservation is dropped on error.
    pub fn adopt(
        &mut self,
        attempt: RequestAttempt<'_>,
        reservation: Reservation,
    ) -> Result<LedgerChange, LedgerError> {
        if self.is_duplicate(attempt, reservation.bookings(), blocks_of(&reservation))? {
            return Ok(LedgerChange::Unchanged);
        }
        self.insert(attempt, reservation);
        Ok(LedgerChange::Applied)
    }

    /// Checks that another attempt could be booked, before the caller does expensive work. Releases
    /// an earlier attempt at the same request, because the new one replaces it.
    pub fn ensure_capacity(&mut self, attempt: RequestAttempt<'_>) -> Result<(), LedgerError> {
        self.remove_stale(attempt);
        match self
            .entries
            .get(attempt.request)
            .map(|entry| (entry.attempt, entry.reservation.is_some()))
        {
            Some((other, true)) if other < attempt.number => self.end_booking(attempt.request),
            Some((other, true)) => return Err(LedgerError::AlreadyBooked { attempt: other }),
            _ => {}
        }
        self.check_capacity(0, 1)
    }

    /// Returns the reservation of an attempt, so that a repeated request gets the same answer.
    pub fn get(&self, attempt: RequestAttempt<'_>) -> Option<&Reservation> {
        let entry = self
            .entries
            .get(attempt.request)
            .filter(|entry| entry.attempt == attempt.number)?;
        entry
            .reservation
            .as_ref()
            .filter(|reservation| reservation.is_active())
    }

    /// Returns the state of an attempt and its attachment. An attempt followed by a later one that
    /// has ended counts as ended.
    pub fn attempt_state(&mut self, attempt: RequestAttempt<'_>) -> Option<AttemptState<'_, B>> {
        let now = self.load.now();
        let entry = self.entries.get_mut(attempt.request)?;
        let number = entry.attempt;
        match &mut entry.reservation {
            Some(reservation) => (number == attempt.number && reservation.is_active())
                .then_some(AttemptState::Booked(reservation, &mut entry.attachment)),
            None => {
                let idle = now.saturating_duration_since(entry.last_seen);
                let is_recent = idle <= self.rules.idle_timeout;
                (attempt.number <= number && is_recent)
                    .then_some(AttemptState::Ended(&mut entry.attachment))
            }
        }
    }

    /// Records the first token of an attempt.
    pub fn mark_prefill_completed(&mut self, attempt: RequestAttempt<'_>) -> LedgerChange {
        let Some(reservation) = self.touch_reservation(attempt) else {
            return LedgerChange::Unchanged;
        };
        let is_applied = reservation.on_first_token();
        reservation.learn_prefill(CachedTokenSource::Known);
        if is_applied && !reservation.is_active() {
            // The attempt was a prefill alone, which ends with the first token.
            self.end_booking(attempt.request);
        }
        LedgerChange::from_applied(is_applied)
    }

    /// Records one more output block; see [`Reservation::add_output_block`].
    pub fn add_output_block(
        &mut self,
        attempt: RequestAttempt<'_>,
        fraction: Option<f64>,
    ) -> LedgerChange {
        let reservation = self.touch_reservation(attempt);
        let applied = reservation.map(|reservation| reservation.add_output_block(fraction));
        LedgerChange::from_applied(applied.is_some())
    }

    /// Refreshes the idle timeout of an attempt.
    pub fn touch(&mut self, attempt: RequestAttempt<'_>) -> LedgerChange {
        LedgerChange::from_applied(self.touch_reservation(attempt).is_some())
    }

    /// Releases an attempt.
    pub fn free(&mut self, attempt: RequestAttempt<'_>) -> LedgerChange {
        let was_active = self.get(attempt).is_some();
        if self
            .entries
            .get(attempt.request)
            .is_some_and(|entry| entry.attempt == attempt.number && entry.reservation.is_some())
        {
            self.end_booking(attempt.request);
        }
        LedgerChange::from_applied(was_active)
    }

    /// Releases idle reservations and returns their number. Must be called periodically, with or
    /// without traffic.
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
            .is_some_and(|(at, _)| is_idle(*at, now, rules))
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
        let released = entries.extract_if(|_, entry| {
            entry.reservation.is_some() && is_idle(entry.last_seen, now, rules)
        });
        let released: Vec<_> = released
            .filter_map(|(_, entry)| entry.reservation)
            .collect();
        self.blocks -= released.iter().map(blocks_of).sum::<usize>();
        self.swept_at = now;
        self.expired += released.len() as u64;
        released.len()
    }

    /// Returns the size of the ledger.
    pub fn counts(&self) -> LedgerCounts {
        LedgerCounts {
            bookings: self.entries.len() - self.remembered,
            expired: self.expired,
        }
    }

    /// Returns the active reservation of an attempt and refreshes its idle timeout.
    fn touch_reservation(&mut self, attempt: RequestAttempt<'_>) -> Option<&mut Reservation> {
        let entry = self
            .entries
            .get_mut(attempt.request)
            .filter(|entry| entry.attempt == attempt.number)?;
        let reservation = entry
            .reservation
            .as_mut()
            .filter(|reservation| reservation.is_active())?;
        entry.last_seen = self.load.now();
        Some(reservation)
    }

    /// Returns whether exactly this attempt is or was booked. Fails for an earlier attempt, for the
    /// same attempt with other bookings, and at a limit.
    fn is_duplicate<'a>(
        &mut self,
        attempt: RequestAttempt<'_>,
        bookings: impl Iterator<Item = &'a LoadBooking>,
        blocks: usize,
    ) -> Result<bool, LedgerError> {
        self.remove_stale(attempt);
        let now = self.load.now();
        let Some(entry) = self.entries.get_mut(attempt.request) else {
            return self.check_capacity(blocks, 1).map(|()| false);
        };
        match &entry.reservation {
            None if attempt.number <= entry.attempt => Ok(true),
            None => self.check_capacity(blocks, 1).map(|()| false),
            Some(reservation)
                if entry.attempt == attempt.number && reservation.bookings().eq(bookings) =>
            {
                entry.last_seen = now;
                Ok(true)
            }
            Some(_) if attempt.number <= entry.attempt => Err(LedgerError::AlreadyBooked {
                attempt: entry.attempt,
            }),
            // A later attempt replaces the reservation, so the number of reservations stays.
            Some(_) => self.check_capacity(blocks, 0).map(|()| false),
        }
    }

    /// Removes the entry of a request if it is idle or was never booked.
    fn remove_stale(&mut self, attempt: RequestAttempt<'_>) {
        let now = self.load.now();
        if now.saturating_duration_since(self.swept_at) >= SWEEP_INTERVAL {
            self.expire();
        }
        let Some(entry) = self.entries.get(attempt.request) else {
            return;
        };
        let is_idle = is_idle(entry.last_seen, now, &self.rules);
        let reservation = entry.reservation.as_ref();
        if is_idle || reservation.is_some_and(|reservation| !reservation.is_active()) {
            self.expired += u64::from(is_idle && entry.reservation.is_some());
            self.remove(attempt.request);
        }
    }

    /// Checks that this many more blocks and reservations fit.
    fn check_capacity(&self, blocks: usize, bookings: usize) -> Result<(), LedgerError> {
        let limit = self.rules.max_bookings;
        if self.counts().bookings + bookings > limit {
            return Err(LedgerError::Full { limit });
        }
        let limit = self.rules.max_blocks;
        if self.blocks.saturating_add(blocks) > limit {
            return Err(LedgerError::TooManyBlocks { limit });
        }
        Ok(())
    }

    fn insert(&mut self, attempt: RequestAttempt<'_>, reservation: Reservation) {
        self.remove(attempt.request);
        self.blocks += blocks_of(&reservation);
        let now = self.load.now();
        let entry = LedgerEntry {
            attempt: attempt.number,
            reservation: Some(reservation),
            last_seen: now,
            attachment: B::default(),
        };
        self.entries.insert(attempt.request.into(), entry);
    }

    fn remove(&mut self, request: &str) {
        match self.entries.remove(request).map(|entry| entry.reservation) {
            Some(Some(reservation)) => self.blocks -= blocks_of(&reservation),
            Some(None) => self.remembered -= 1,
            None => {}
        }
    }

    /// Releases the reservation of a request and remembers that the attempt has ended.
    fn end_booking(&mut self, request: &str) {
        if self.rules.max_ended == 0 {
            return self.remove(request);
        }
        let now = self.load.now();
        let Some(entry) = self.entries.get_mut(request) else {
            return;
        };
        let Some(reservation) = entry.reservation.take() else {
            return;
        };
        self.blocks -= blocks_of(&reservation);
        entry.last_seen = now;
        entry.attachment.on_booking_end();
        self.remembered += 1;
        self.ended.push_back((now, request.to_owned()));
        if self.ended.len() > self.rules.max_ended
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

impl<B> LedgerEntry<B> {
    fn ended_at(&self, at: Instant) -> bool {
        self.reservation.is_none() && self.last_seen == at
    }
}

fn blocks_of(reservation: &Reservation) -> usize {
    reservation
        .bookings()
        .map(|booking| booking.sequences.block_count())
        .sum()
}

fn is_idle(last_seen: Instant, now: Instant, rules: &LedgerRules) -> bool {
    now.saturating_duration_since(last_seen) > rules.idle_timeout
}

#[cfg(test)]
mod tests;
