//! What each worker rank is busy with: blocks held by live requests and prefill not done yet. A booking is a value, the
//! `Reservation`, and ends when it is dropped, so that no path through the program can forget to release it. Costing and
//! booking happen under one lock: two requests at the same instant cannot both see the same idle worker.

use std::cell::Cell;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use crate::block::SequenceHash;
use crate::worker::{Slot, WorkerRank};

mod table;

use table::{Share, Table};

/// Most prefill tokens that one request counts for. Lengths may be guesses from what a client says of itself, and no guess
/// may make the sum over all live requests overflow.
const MOST_PREFILL: u64 = 1 << 40;

/// Load of one worker rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Distinct blocks held by live requests.
    pub active_blocks: u64,
    /// Prompt tokens of requests that have not shown their first token.
    pub active_prefill_tokens: u64,
    /// Live requests.
    pub active_requests: u64,
}

/// Load of one worker rank, with its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankLoad {
    /// Its slot.
    pub slot: Slot,
    /// Its name.
    pub rank: WorkerRank,
    /// Distinct blocks held by live requests.
    pub active_blocks: u64,
    /// Prompt tokens of requests that have not shown their first token.
    pub active_prefill_tokens: u64,
    /// Live requests.
    pub active_requests: u64,
}

/// What a request will occupy, and where.
#[derive(Clone, Debug)]
pub struct Booking {
    /// Where.
    pub slot: Slot,
    /// Who is meant. If the slot belongs to somebody else by then, nothing is booked.
    pub rank: WorkerRank,
    /// Complete blocks of the prompt.
    pub sequences: Arc<[SequenceHash]>,
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// How much of it is expected to be cached.
    pub cached_tokens: u64,
    /// Whether the rank does the prefill.
    pub track_prefill: bool,
}

impl Booking {
    /// Tokens that the rank will have to prefill.
    fn prefill_tokens(&self) -> u64 {
        let tokens = if self.track_prefill { self.prompt_tokens.saturating_sub(self.cached_tokens) } else { 0 };
        tokens.min(MOST_PREFILL)
    }
}

/// The load of all worker ranks.
#[derive(Debug, Default)]
pub struct LoadTracker {
    table: Mutex<Table>,
}

/// The load at one instant; nothing is booked or released while it is read.
pub struct LoadView<'a> {
    table: &'a Table,
    /// The last answer of `additional_blocks`, as a first guess for the next slot.
    near: Cell<usize>,
}

/// The booking of one request. Dropping it releases everything; when the rank is gone there is nothing to release.
#[derive(Debug)]
#[must_use = "dropping a reservation releases its load"]
pub struct Reservation {
    tracker: Arc<LoadTracker>,
    booking: Booking,
    share: Option<Share>,
}

impl LoadTracker {
    /// No rank, no load.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Begins to count for a rank. If the slot was open, what was booked there is forgotten.
    pub fn open(&self, slot: Slot, rank: WorkerRank) {
        self.table.lock().open(slot, rank);
    }

    /// Stops counting for a slot. Its bookings vanish; their later release does nothing, even when the slot is open again.
    pub fn close(&self, slot: Slot) {
        self.table.lock().close(slot);
    }

    /// Decides and books in one critical section; `decide` must be quick and must not come back here.
    pub fn book_with<E>(
        self: &Arc<Self>,
        decide: impl FnOnce(&LoadView<'_>) -> Result<Booking, E>,
    ) -> Result<Reservation, E> {
        let mut table = self.table.lock();
        let booking = decide(&LoadView { table: &table, near: Cell::new(0) })?;
        let share = table.book(&booking);
        drop(table);
        Ok(Reservation { tracker: self.clone(), booking, share })
    }

    /// The load of all open ranks, in slot order.
    pub fn snapshot(&self) -> Vec<RankLoad> {
        self.table.lock().snapshot()
    }
}

impl LoadView<'_> {
    /// Load of a rank; `None` if the slot is closed or belongs to another rank by now.
    pub fn load(&self, slot: Slot, rank: WorkerRank) -> Option<Load> {
        self.table.load(slot, rank)
    }

    /// Blocks of one prompt, in order, that are not already held by live requests on this slot. Where a request has several
    /// prompts, each is asked for by itself.
    pub fn additional_blocks(&self, slot: Slot, sequences: &[SequenceHash]) -> u64 {
        let matched = self.table.matched(slot, sequences, self.near.get());
        self.near.set(matched);
        (sequences.len() - matched) as u64
    }
}

impl Reservation {
    /// Where the request is booked.
    pub fn slot(&self) -> Slot {
        self.booking.slot
    }

    /// For whom.
    pub fn rank(&self) -> WorkerRank {
        self.booking.rank
    }

    /// The prefill is done; its share ends. Calling it again does nothing.
    pub fn first_token(&mut self) {
        if let Some(share) = &mut self.share {
            self.tracker.table.lock().end_prefill(self.booking.slot, share);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(share) = self.share.take() {
            self.tracker.table.lock().release(&self.booking, share);
        }
    }
}

#[cfg(test)]
mod tests;
