//! The prefills of one rank that have not shown a first token. A rank computes them one after another, so it is the
//! oldest, the anchor, whose tokens shrink as time goes by; where every prefill has an estimate, what takes longer than
//! the anchor's is taken to be the work of the next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Prefills in the order of their arrival. Whether there are any is what is read first, and of every rank.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Prefills {
    /// Of all of them, at the beginning.
    tokens: u64,
    entries: VecDeque<Entry>,
    /// Since when the anchor, the first of them, is being computed.
    since: Option<Instant>,
    /// How many have no estimate.
    unestimated: usize,
    tickets: u64,
}

#[derive(Debug)]
struct Entry {
    ticket: Ticket,
    tokens: u64,
    /// How long it is expected to take.
    time: Option<Duration>,
}

/// Names one prefill of a rank; later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

impl Prefills {
    /// Begins one; where there is nothing to compute, there is none.
    pub(super) fn begin(
        &mut self,
        tokens: u64,
        time: Option<Duration>,
        now: Instant,
    ) -> Option<Ticket> {
        if tokens == 0 {
            return None;
        }
        if self.entries.is_empty() {
            self.since = Some(now);
        }
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.tokens += tokens;
        self.unestimated += usize::from(time.is_none());
        self.entries.push_back(Entry {
            ticket,
            tokens,
            time,
        });
        Some(ticket)
    }

    /// Ends one.
    pub(super) fn end(&mut self, ticket: Ticket, now: Instant) {
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
            self.since = Some(now);
        } else if let (Some(since), Some(time)) = (self.since, ended.time) {
            // The time that this one took was not spent on the anchor.
            self.since = Some(
                since
                    .checked_add(time)
                    .map_or(now, |moved| moved.min(now))
                    .max(since),
            );
        }
    }

    /// Tokens that are still to be computed.
    #[inline]
    pub(super) fn remaining(&self, now: Instant) -> u64 {
        if self.tokens == 0 {
            return 0;
        }
        let Some((anchor, since)) = self.entries.front().zip(self.since) else {
            return 0;
        };
        let Some(time) = anchor.time else {
            return self.tokens;
        };
        let done = done(anchor.tokens, now.saturating_duration_since(since), time);
        self.tokens.saturating_sub(if self.unestimated == 0 {
            done
        } else {
            done.min(anchor.tokens)
        })
    }
}

/// How much is done of what takes so long.
fn done(tokens: u64, elapsed: Duration, time: Duration) -> u64 {
    if time.is_zero() {
        return tokens;
    }
    let done = u128::from(tokens).saturating_mul(elapsed.as_nanos()) / time.as_nanos();
    u64::try_from(done).unwrap_or(u64::MAX)
}
