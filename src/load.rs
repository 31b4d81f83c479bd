//! What each worker rank is busy with: blocks held by live requests and prefill not done yet. A booking is a value, the
//! `Reservation`, and ends when it is dropped, so that no path through the program can forget to release it. Costing and
//! booking happen under one lock: two requests at the same instant cannot both see the same idle worker.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use serde::Serialize;

use crate::worker::{Slot, WorkerRank};

pub mod duration;
pub mod ledger;

mod news;
mod prefill;
mod reservation;
mod sequences;
mod table;
mod tree;
mod weight;

pub use news::{BookingId, Live, News};
pub use reservation::Reservation;
pub use sequences::Sequences;

use reservation::Part;
use table::Table;

/// Most prefill tokens that one request counts for. Lengths may be guesses from what a client says of itself, and no guess
/// may make the sum over all live requests overflow.
const MOST_PREFILL: u64 = 1 << 40;

/// Load of one worker rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Distinct blocks held by live requests: those of their prompts, and those of their answers if these are counted.
    pub active_blocks: u64,
    /// Prompt tokens that are still to be computed, of requests that have not shown their first token.
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
    /// Prompt tokens that are still to be computed.
    pub active_prefill_tokens: u64,
    /// Live requests.
    pub active_requests: u64,
}

/// When a booking ends, if it is not dropped before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Until {
    /// With the request.
    #[default]
    End,
    /// With the first token: from then on a prefill worker has nothing to do with the request.
    FirstToken,
}

/// What a request will occupy, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Booking {
    /// Where.
    pub slot: Slot,
    /// Who is meant. If the slot belongs to somebody else by then, nothing is booked.
    pub rank: WorkerRank,
    /// Complete blocks of its prompts.
    pub sequences: Sequences,
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// How much of it is expected to be cached.
    pub cached_tokens: u64,
    /// Whether the rank does the prefill.
    pub track_prefill: bool,
    /// How long the prefill is expected to take. Its tokens then shrink as time goes by.
    pub prefill_time: Option<Duration>,
    /// When it ends.
    pub until: Until,
}

impl Booking {
    /// Tokens that the rank will have to prefill.
    fn prefill_tokens(&self) -> u64 {
        let tokens = if self.track_prefill {
            self.prompt_tokens.saturating_sub(self.cached_tokens)
        } else {
            0
        };
        tokens.min(MOST_PREFILL)
    }
}

/// The load of all worker ranks.
pub struct LoadTracker {
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    table: Mutex<Table>,
    waiting: RwLock<Arc<[Hear]>>,
    news: OnceLock<news::Tell>,
    numbers: AtomicU64,
}

type Hear = Arc<dyn Fn() + Send + Sync>;

/// The load at one instant; nothing is booked or released while it is read.
#[derive(Clone, Copy)]
pub struct LoadView<'a> {
    table: &'a Table,
    now: Instant,
}

/// Which blocks of a request would have to be added to those of the live requests, by slot.
#[derive(Clone, Debug, Default)]
pub struct Additional {
    blocks: u64,
    /// How many of them a slot holds; beyond the last nobody holds any.
    held: Vec<u32>,
}

impl LoadTracker {
    /// No rank, no load. The clock says what is left of the prefills; it must not come back here.
    pub fn new(clock: impl Fn() -> Instant + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            clock: Box::new(clock),
            table: Mutex::default(),
            waiting: RwLock::new(Arc::new([])),
            news: OnceLock::new(),
            numbers: AtomicU64::new(0),
        })
    }

    /// Begins to count for a rank. If the slot was open, what was booked there is forgotten.
    pub fn open(&self, slot: Slot, rank: WorkerRank) {
        self.change(|table, _| table.open(slot, rank));
    }

    /// Stops counting for a slot. Its bookings vanish; their later release does nothing, even when the slot is open again.
    pub fn close(&self, slot: Slot) {
        self.change(|table, _| table.close(slot));
    }

    /// Calls `hear` whenever a load went down because a prefill or a request ended, or a slot closed. A prefill that only
    /// shrinks with time says nothing: who waits for that looks again by himself. No lock of ours is held meanwhile.
    pub fn on_relief(&self, hear: impl Fn() + Send + Sync + 'static) {
        let mut waiting = self.waiting.write();
        let known = waiting.iter().cloned();
        *waiting = known.chain([Arc::new(hear) as Hear]).collect();
    }

    /// Decides and books in one critical section; `decide` must be quick and must not come back here. All bookings of a
    /// request are made or, if any of their ranks has gone, none.
    pub fn book_with<E>(
        self: &Arc<Self>,
        decide: impl FnOnce(&LoadView<'_>) -> Result<Vec<Booking>, E>,
    ) -> Result<Reservation, E> {
        let mut table = self.table.lock();
        let now = (self.clock)();
        let bookings = decide(&LoadView::new(&table, now))?;
        let shares = table.book(&bookings, now);
        drop(table);
        let told = shares.as_ref().and_then(|_| self.tell_booked(&bookings));
        Ok(Reservation::new(self.clone(), bookings, shares, told))
    }

    /// Reads the load at one instant; `read` must be quick and must not come back here.
    pub fn look<T>(&self, read: impl FnOnce(&LoadView<'_>) -> T) -> T {
        let table = self.table.lock();
        read(&LoadView::new(&table, (self.clock)()))
    }

    /// The load of all open ranks, in slot order.
    pub fn snapshot(&self) -> Vec<RankLoad> {
        let table = self.table.lock();
        table.snapshot((self.clock)())
    }

    /// Of these reservations those of which nothing counts any more, by one look.
    fn gone<'a, K>(&self, held: impl Iterator<Item = (K, &'a Reservation)>) -> Vec<K> {
        let table = self.table.lock();
        held.filter(|(_, reservation)| !reservation.counts_in(&table))
            .map(|(key, _)| key)
            .collect()
    }

    /// What the clock says.
    pub fn now(&self) -> Instant {
        (self.clock)()
    }

    /// Changes the table, and tells those who wait if a load went down; so says `change`, and so does this.
    fn change(&self, change: impl FnOnce(&mut Table, Instant) -> bool) -> bool {
        let mut table = self.table.lock();
        let relieved = change(&mut table, (self.clock)());
        drop(table);
        if relieved {
            let waiting = self.waiting.read().clone();
            waiting.iter().for_each(|hear| hear());
        }
        relieved
    }
}

impl fmt::Debug for LoadTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadTracker")
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

impl<'a> LoadView<'a> {
    fn new(table: &'a Table, now: Instant) -> Self {
        Self { table, now }
    }

    /// The instant at which the load is read.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Load of a rank; `None` if the slot is closed or belongs to another rank by now.
    #[inline]
    pub fn load(&self, slot: Slot, rank: WorkerRank) -> Option<Load> {
        self.table.load(slot, rank, self.now)
    }

    /// What of the blocks of a request is not already held by live requests, on all slots at once.
    pub fn additional(&self, sequences: &Sequences) -> Additional {
        Additional {
            blocks: sequences.blocks() as u64,
            held: self.table.held(sequences),
        }
    }
}

impl Additional {
    /// So many on every slot, because nobody shares them.
    pub fn everywhere(blocks: u64) -> Self {
        Self {
            blocks,
            held: Vec::new(),
        }
    }

    /// How many blocks on this slot.
    #[inline]
    pub fn of(&self, slot: Slot) -> u64 {
        let held = self.held.get(slot.at()).map_or(0, |held| u64::from(*held));
        self.blocks.saturating_sub(held)
    }
}

#[cfg(test)]
mod tests;
