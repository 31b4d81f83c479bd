//! Prefills of one rank without a first token. An engine computes them one after another, so only
//! the oldest prefill, the anchor, decays over time. If every prefill has an estimate, time beyond
//! the anchor's estimate counts against the next prefill.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::booking::LoadBooking;

/// A prefill is delayed after this multiple of the expected time to its first content, plus
/// [`DELAYED_MARGIN`]. The delay is a cost, so that decisions avoid the rank early. Only a much longer
/// wait is evidence of a failure: the request is then overdue, see [`crate::health`].
const DELAYED_FACTOR: u32 = 2;
const DELAYED_MARGIN: Duration = Duration::from_secs(1);

/// Prefills in order of arrival. `tokens` comes first because every decision reads it for every
/// rank.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct PrefillQueue {
    /// Sum over all entries, without decay.
    tokens: u64,
    /// Sum over all entries.
    pairs: f64,
    /// Earliest time at which the engine can have started the oldest entry.
    oldest_since: Option<Instant>,
    /// Time from which the oldest entry is delayed, unless the engine completes another one.
    delayed_since: Option<Instant>,
    /// Entries in order of arrival. Ended ones stay until they are at the front, or more than half of
    /// all: removing each at once would move all later ones.
    entries: VecDeque<PrefillEntry>,
    /// Number of entries that have not ended.
    active: usize,
    /// Earliest time at which the engine can have started a prefill that was queued then: the last
    /// observed first token, or the last release of the oldest prefill.
    engine_free_since: Option<Instant>,
    /// Time of the last prefill that was completed.
    completed_at: Option<Instant>,
    /// Time of the last begin or end of a prefill.
    changed_at: Option<Instant>,
    /// Start of the anchor's computation.
    anchor_since: Option<Instant>,
    /// Number of entries without an estimate.
    unestimated: usize,
    last_ticket: u64,
}

#[derive(Debug)]
struct PrefillEntry {
    ticket: PrefillTicket,
    has_ended: bool,
    tokens: u64,
    pairs: f64,
    booked_at: Instant,
    delayed_at: Option<Instant>,
    /// Estimated duration.
    time: Option<Duration>,
    /// Predicted time to first token, in seconds.
    first_token_seconds: f64,
    /// Whether the rank had no other request at the booking.
    was_idle: bool,
}

/// Times of a prefill that ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PrefillTimes {
    /// Time since the booking or since the previous first token, whichever is later.
    pub(super) elapsed: Duration,
    /// Time since the booking.
    pub(super) since_booking: Duration,
    /// Predicted time to first token, in seconds.
    pub(super) first_token_seconds: f64,
    /// Whether the rank had no other request at the booking.
    pub(super) was_idle: bool,
}

/// Cause of the end of a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefillEndCause {
    /// The first token was observed.
    FirstToken,
    /// The prefill was completed some time before, as when the response is one document.
    Unobserved,
    /// The request was released or moved before its first token.
    Released,
}

/// Id of one prefill on a rank; increases with arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrefillTicket(u64);

impl PrefillQueue {
    /// Adds the prefill of a booking, whose first token is predicted after `first_token_seconds`.
    /// `was_idle` is true if the rank has no other request. Returns `None` if there are no tokens to
    /// compute.
    pub(super) fn begin(
        &mut self,
        booking: &LoadBooking,
        first_token_seconds: f64,
        was_idle: bool,
        now: Instant,
    ) -> Option<PrefillTicket> {
        let tokens = booking.prefill_tokens();
        let pairs = booking.prefill_work().pairs;
        let time = booking.prefill_time;
        if tokens == 0 {
            return None;
        }
        if self.entries.is_empty() {
            self.anchor_since = Some(now);
        }
        self.active += 1;
        self.last_ticket += 1;
        let ticket = PrefillTicket(self.last_ticket);
        self.tokens += tokens;
        self.pairs += pairs;
        self.unestimated += usize::from(time.is_none());
        self.changed_at = Some(now);
        self.entries.push_back(PrefillEntry {
            ticket,
            has_ended: false,
            tokens,
            pairs,
            booked_at: now,
            delayed_at: booking.content_time.and_then(|time| {
                let limit = time
                    .saturating_mul(DELAYED_FACTOR)
                    .saturating_add(DELAYED_MARGIN);
                now.checked_add(limit)
            }),
            time,
            first_token_seconds,
            was_idle,
        });
        self.update_oldest();
        Some(ticket)
    }

    /// Removes a prefill that has ended. Returns its times, or `None` if it ended before.
    pub(super) fn end(
        &mut self,
        ticket: PrefillTicket,
        cause: PrefillEndCause,
        now: Instant,
    ) -> Option<PrefillTimes> {
        let at = self
            .entries
            .binary_search_by_key(&ticket, |entry| entry.ticket)
            .ok()?;
        let elapsed = now.saturating_duration_since(self.start_of(&self.entries[at]));
        let entry = &mut self.entries[at];
        let completed = PrefillTimes {
            elapsed,
            since_booking: now.saturating_duration_since(entry.booked_at),
            first_token_seconds: entry.first_token_seconds,
            was_idle: entry.was_idle,
        };
        if std::mem::replace(&mut entry.has_ended, true) {
            return None;
        }
        let tokens = entry.tokens;
        let pairs = entry.pairs;
        let time = entry.time;
        let was_oldest = at == 0;
        self.active -= 1;
        self.remove_ended();
        self.changed_at = Some(now);
        let engine_is_free = match cause {
            PrefillEndCause::FirstToken => true,
            PrefillEndCause::Unobserved => false,
            PrefillEndCause::Released => was_oldest,
        };
        if cause != PrefillEndCause::Released {
            self.completed_at = Some(now);
        }
        if engine_is_free {
            self.engine_free_since = Some(now);
        }
        self.update_oldest();
        self.tokens -= tokens;
        // A sum of floats keeps rounding errors, which an empty queue removes.
        self.pairs = if self.entries.is_empty() {
            0.0
        } else {
            self.pairs - pairs
        };
        self.unestimated -= usize::from(time.is_none());
        if was_oldest {
            self.anchor_since = Some(now);
        } else if let (Some(since), Some(time)) = (self.anchor_since, time) {
            // The engine spent this prefill's time on it and not on the anchor.
            self.anchor_since = Some(
                since
                    .checked_add(time)
                    .map_or(now, |moved| moved.min(now))
                    .max(since),
            );
        }
        Some(completed)
    }

    /// Returns the earliest time at which the engine can have started a prefill, if it computes one
    /// after another.
    fn start_of(&self, entry: &PrefillEntry) -> Instant {
        self.engine_free_since
            .map_or(entry.booked_at, |since| since.max(entry.booked_at))
    }

    fn update_oldest(&mut self) {
        let oldest = self.entries.front();
        self.oldest_since = oldest.map(|entry| self.start_of(entry));
        self.delayed_since = oldest
            .and_then(|entry| entry.delayed_at)
            .map(|delayed| self.completed_at.map_or(delayed, |at| at.max(delayed)));
    }

    /// Returns the number of prefills.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.active
    }

    fn remove_ended(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.has_ended) {
            self.entries.pop_front();
        }
        if self.entries.len() > 2 * self.active {
            self.entries.retain(|entry| !entry.has_ended);
        }
    }

    /// Returns the attention pairs of all prefills.
    #[inline]
    pub(super) fn pairs(&self) -> f64 {
        self.pairs
    }

    /// Returns the tokens of all prefills, without decay.
    #[inline]
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the time since the engine can have started the oldest prefill.
    #[inline]
    pub(super) fn elapsed(&self, now: Instant) -> Duration {
        self.oldest_since
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Returns the delay of the oldest prefill, while the engine completed no other.
    #[inline]
    pub(super) fn delay(&self, now: Instant) -> Duration {
        self.delayed_since
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Returns whether no prefill was outstanding at any time since `since`.
    pub(super) fn is_idle_since(&self, since: Instant) -> bool {
        self.entries.is_empty() && self.changed_at.is_none_or(|changed| changed <= since)
    }

    /// Returns the tokens still to be computed. They do not decrease while the oldest prefill is
    /// delayed.
    #[inline]
    pub(super) fn remaining(&self, now: Instant) -> u64 {
        if self.tokens == 0 {
            return 0;
        }
        if !self.delay(now).is_zero() {
            return self.tokens;
        }
        let Some((anchor, since)) = self.entries.front().zip(self.anchor_since) else {
            return 0;
        };
        let Some(time) = anchor.time else {
            return self.tokens;
        };
        let done = tokens_done(anchor.tokens, now.saturating_duration_since(since), time);
        self.tokens.saturating_sub(if self.unestimated == 0 {
            done
        } else {
            done.min(anchor.tokens)
        })
    }
}

/// Returns the tokens computed after `elapsed`, if all `tokens` take `time`.
fn tokens_done(tokens: u64, elapsed: Duration, time: Duration) -> u64 {
    if time.is_zero() {
        return tokens;
    }
    let done = u128::from(tokens).saturating_mul(elapsed.as_nanos()) / time.as_nanos();
    u64::try_from(done).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{BookingEnd, PromptSequences};
    use crate::worker::{DpRank, RankSlot, WorkerId, WorkerRank};

    /// Begins a prefill at 0 s and another one at 0 s, ends the first at 2 s by `cause`, and the
    /// second at 3 s by its first token. Returns the seconds that the second one took.
    fn seconds_after(cause: PrefillEndCause) -> f64 {
        let booking = LoadBooking {
            slot: RankSlot(0),
            rank: WorkerRank {
                worker: WorkerId(1),
                rank: DpRank(0),
            },
            sequences: PromptSequences::empty(),
            prompt_tokens: 100,
            cached_tokens: 0,
            track_prefill: true,
            prefill_time: None,
            content_time: None,
            end: BookingEnd::RequestEnd,
        };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut queue = PrefillQueue::default();
        let first = queue.begin(&booking, 0.0, true, start).unwrap();
        let second = queue.begin(&booking, 0.0, true, start).unwrap();
        queue.end(first, cause, at(2)).unwrap();
        let completed = queue.end(second, PrefillEndCause::FirstToken, at(3));
        completed.unwrap().elapsed.as_secs_f64()
    }

    #[test]
    fn prefill_starts_after_the_previous_one() {
        assert_eq!(seconds_after(PrefillEndCause::FirstToken), 1.0);
        assert_eq!(seconds_after(PrefillEndCause::Released), 1.0);
        assert_eq!(seconds_after(PrefillEndCause::Unobserved), 3.0);
    }
}
