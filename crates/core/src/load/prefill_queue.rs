//! Prefills of one rank without a first token. An engine computes them one after another, so only
//! the oldest prefill, the anchor, decays over time. If every prefill has an estimate, time beyond
//! the anchor's estimate counts against the next prefill.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Prefills in order of arrival. `tokens` comes first because every decision reads it for every
/// rank.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct PrefillQueue {
    /// Sum over all entries, without decay.
    tokens: u64,
    entries: VecDeque<PrefillEntry>,
    /// Start of the anchor's computation.
    anchor_since: Option<Instant>,
    /// Number of entries without an estimate.
    unestimated: usize,
    last_ticket: u64,
}

#[derive(Debug)]
struct PrefillEntry {
    ticket: PrefillTicket,
    tokens: u64,
    /// Estimated duration.
    time: Option<Duration>,
}

/// Id of one prefill on a rank; increases with arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrefillTicket(u64);

impl PrefillQueue {
    /// Adds a prefill. Returns `None` if there are no tokens to compute.
    pub(super) fn begin(
        &mut self,
        tokens: u64,
        time: Option<Duration>,
        now: Instant,
    ) -> Option<PrefillTicket> {
        if tokens == 0 {
            return None;
        }
        if self.entries.is_empty() {
            self.anchor_since = Some(now);
        }
        self.last_ticket += 1;
        let ticket = PrefillTicket(self.last_ticket);
        self.tokens += tokens;
        self.unestimated += usize::from(time.is_none());
        self.entries.push_back(PrefillEntry {
            ticket,
            tokens,
            time,
        });
        Some(ticket)
    }

    /// Removes a prefill that has ended.
    pub(super) fn end(&mut self, ticket: PrefillTicket, now: Instant) {
        let Ok(at) = self
            .entries
            .binary_search_by_key(&ticket, |entry| entry.ticket)
        else {
            return;
        };
        let Some(ended) = self.entries.remove(at) else {
            return;
        };
        self.tokens -= ended.tokens;
        self.unestimated -= usize::from(ended.time.is_none());
        if at == 0 {
            self.anchor_since = Some(now);
        } else if let (Some(since), Some(time)) = (self.anchor_since, ended.time) {
            // The engine spent this prefill's time on it and not on the anchor.
            self.anchor_since = Some(
                since
                    .checked_add(time)
                    .map_or(now, |moved| moved.min(now))
                    .max(since),
            );
        }
    }

    /// Returns the tokens still to be computed.
    #[inline]
    pub(super) fn remaining(&self, now: Instant) -> u64 {
        if self.tokens == 0 {
            return 0;
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
