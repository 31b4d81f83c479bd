//! Load at one instant, as a decision reads it.

use std::time::{Duration, Instant};

use super::booking::{ActiveLoad, LoadBooking};
use super::latency::LatencyEstimate;
use super::sequences::PromptSequences;
use super::table::LoadTable;
use super::timing::RankTiming;
use crate::worker::{ModelName, RankSlot, WorkerRank};

/// Load at one instant, read under the lock: no booking changes while it exists.
#[derive(Clone, Copy)]
pub struct LoadView<'a> {
    table: &'a LoadTable,
    now: Instant,
}

impl<'a> LoadView<'a> {
    pub(super) fn new(table: &'a LoadTable, now: Instant) -> Self {
        Self { table, now }
    }

    /// Returns the instant at which the load is read.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Returns the load of a rank, or `None` if the slot is closed or belongs to another rank.
    #[inline]
    pub fn load(&self, slot: RankSlot, rank: WorkerRank) -> Option<ActiveLoad> {
        self.table.load(slot, rank, self.now)
    }

    /// Returns the booked work of a rank in the units of the latency model.
    #[inline]
    pub fn timing(&self, slot: RankSlot, rank: WorkerRank) -> Option<RankTiming> {
        self.table.timing(slot, rank, self.now)
    }

    /// Returns the estimated duration of a booking's prefill, or `None` before enough prefills were
    /// observed.
    pub fn prefill_time(&self, booking: &LoadBooking) -> Option<Duration> {
        let row = self.table.row(booking.slot)?;
        let model = self.table.latency.model(row.model);
        model.prefill_time(booking.prefill_work(), row.slowdown.prefill_factor)
    }

    /// Returns the predicted time to the first token of a booking that is about to be made, in
    /// seconds.
    pub(crate) fn first_token_seconds(&self, booking: &LoadBooking) -> f64 {
        let row = self.table.row(booking.slot);
        row.map_or(0.0, |row| {
            let model = self.table.latency.model(row.model);
            model.first_token_seconds(booking.prefill_work(), &row.timing(self.now))
        })
    }

    /// Returns the learned latency of a model.
    pub fn estimate(&self, model: &ModelName) -> LatencyEstimate {
        self.table.latency.estimate(model, self.now)
    }

    /// Counts, for every slot at once, the blocks of a request that running requests do not already
    /// hold.
    pub fn additional(&self, sequences: &PromptSequences) -> AdditionalBlocks {
        AdditionalBlocks {
            blocks: sequences.block_count() as u64,
            held: self.table.held_blocks(sequences),
        }
    }
}

/// Blocks of a request that each slot would have to add to those of its running requests.
#[derive(Clone, Debug, Default)]
pub struct AdditionalBlocks {
    blocks: u64,
    /// Blocks of the request that each slot already holds. Slots beyond the end hold none.
    held: Vec<u32>,
}

impl AdditionalBlocks {
    /// Returns the same number of blocks for every slot, for requests that share no blocks.
    pub fn uniform(blocks: u64) -> Self {
        Self {
            blocks,
            held: Vec::new(),
        }
    }

    /// Returns the number of additional blocks on a slot.
    #[inline]
    pub fn for_slot(&self, slot: RankSlot) -> u64 {
        self.blocks.saturating_sub(u64::from(self.held_by(slot)))
    }

    /// Returns the number of blocks that the running requests of a slot hold; 0 if the request shares
    /// none.
    #[inline]
    pub fn held_by(&self, slot: RankSlot) -> u32 {
        self.held.get(slot.index()).copied().unwrap_or(0)
    }
}
