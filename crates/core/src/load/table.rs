//! The load table: one row per slot. Functions that change it return whether load decreased.

use std::time::{Duration, Instant};

use super::booking::{ActiveLoad, BookingEnd, LoadBooking, RankLoad};
use super::latency::{LatencyRegistry, ModelId, RankSlowdown, SlowdownFactors};
use super::prefill_queue::{PrefillEndCause, PrefillQueue, PrefillTicket, PrefillTimes};
use super::prompt_tree::{LeafId, PromptTree, WeightChange};
use super::rows::RankRows;
use super::sequences::PromptSequences;
use super::weight::{BlockWeight, OutputBlocks};
use crate::fleet::FleetMember;
use crate::worker::{RankSlot, WorkerRank};

/// Rows of all slots.
#[derive(Debug, Default)]
pub(super) struct LoadTable {
    pub(super) rows: RankRows,
    /// Learned latency of all models.
    pub(super) latency: LatencyRegistry,
    /// Prompts of the running requests of all rows.
    prompts: PromptTree,
    last_generation: u64,
    /// Number of bookings since the ranks were last compared.
    pub(super) uncompared_bookings: usize,
}

/// One open slot. The fields that every decision reads come first and share a cache line, because
/// there may be thousands of rows.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct RankRow {
    pub(super) rank: WorkerRank,
    pub(super) requests: u32,
    pub(super) model: ModelId,
    /// Weight of all prompt and output blocks.
    weight: u64,
    /// Prompt and answer tokens of all running requests.
    pub(super) context_tokens: u64,
    /// Factors of `slowdown` that decisions use.
    pub(super) factors: SlowdownFactors,
    pub(super) prefills: PrefillQueue,
    pub(super) slowdown: RankSlowdown,
    /// Unique over all slots and openings: names the row of a booking after it has moved.
    pub(super) generation: u64,
}

/// Load that one booking holds in a row.
#[derive(Debug)]
pub(super) struct BookedShare {
    pub(super) generation: u64,
    prefill: Option<PrefillTicket>,
    /// Ends of the held prompts in the tree.
    leaves: Vec<LeafId>,
    /// Whether the first token arrived. After that there is no prefill left, even if the booking
    /// moves.
    has_first_token: bool,
    outputs: OutputBlocks,
    pub(super) answer: AnswerProgress,
}

/// Answer tokens that were observed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AnswerProgress {
    /// Time of the first token.
    pub(super) started_at: Option<Instant>,
    /// Time of the last observed token.
    pub(super) last_at: Option<Instant>,
    /// Observed tokens after the first one.
    pub(super) tokens: u64,
}

/// One booking with the share that it holds. There is no share if the rank was gone, or after the
/// booking has ended.
#[derive(Debug)]
pub(super) struct ReservationPart {
    pub(super) booking: LoadBooking,
    pub(super) share: Option<BookedShare>,
    /// Completed prefill, until the first token is recorded.
    pub(super) completed_prefill: Option<PrefillTimes>,
    /// Time of the prefill, until the engine reports the number of cached tokens.
    pub(super) pending_prefill: Option<Duration>,
}

impl LoadTable {
    /// Opens the slot of a member. If the rank has departed from the same address and has bookings,
    /// it returns with them.
    pub(super) fn join(&mut self, member: &FleetMember) {
        let FleetMember { slot, rank, worker } = member;
        debug_assert!(self.rows.get(*slot).is_none(), "the slot is open");
        let model = self.latency.model_id(&worker.model);
        let slowdown = self.latency.take_departed_slowdown(*rank, model);
        // A row that returns has learned more than the copy of its departure.
        if let Some(previous) = self.rows.rejoin(member, model) {
            return self.prompts.move_slot(previous, *slot);
        }
        self.last_generation += 1;
        let row = RankRow {
            rank: *rank,
            generation: self.last_generation,
            requests: 0,
            prefills: PrefillQueue::default(),
            weight: 0,
            context_tokens: 0,
            factors: self.latency.model(model).decision_factors(&slowdown),
            slowdown,
            model,
        };
        self.rows.insert(*slot, row);
    }

    /// Closes the slot of a member. Its bookings stay until they end. Returns whether it was open.
    pub(super) fn leave(&mut self, member: &FleetMember) -> bool {
        let Some(row) = self.rows.remove(member.slot) else {
            return false;
        };
        self.store_slowdown(&row);
        if row.has_bookings() {
            let departed = self.rows.depart(row, member.worker.endpoint);
            self.prompts.move_slot(member.slot, departed);
        }
        true
    }

    fn store_slowdown(&mut self, row: &RankRow) {
        self.latency
            .store_departed_slowdown(row.rank, row.model, row.slowdown);
    }

    #[inline(always)]
    pub(super) fn load(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        now: Instant,
    ) -> Option<ActiveLoad> {
        let row = self.row(slot).filter(|row| row.rank == rank)?;
        let mut load = row.load(now);
        if load.active_prefill_tokens > 0 {
            let delayed = self.delayed_tokens(row, now);
            load.active_prefill_tokens = load.active_prefill_tokens.saturating_add(delayed);
        }
        Some(load)
    }

    /// Returns the tokens that the rank would have computed in the time for which its oldest request
    /// is delayed.
    fn delayed_tokens(&self, row: &RankRow, now: Instant) -> u64 {
        let delay = row.prefills.delay(now).as_secs_f64();
        if delay == 0.0 {
            return 0;
        }
        let model = self.latency.model(row.model);
        (delay / model.prefill_token_seconds()) as u64
    }

    /// Returns, per slot, the number of these blocks that it holds. Slots beyond the end hold none.
    pub(super) fn held_blocks(&self, sequences: &PromptSequences) -> Vec<u32> {
        self.prompts.held_blocks(sequences.prompts())
    }

    /// Books a share for each booking, or nothing if one of the ranks is gone.
    pub(super) fn book(
        &mut self,
        bookings: &[LoadBooking],
        now: Instant,
    ) -> Option<Vec<BookedShare>> {
        let is_present = |booking: &LoadBooking| {
            self.row(booking.slot)
                .is_some_and(|row| row.rank == booking.rank)
        };
        if !bookings.iter().all(is_present) {
            return None;
        }
        let shares = bookings
            .iter()
            .map(|booking| self.book_share(booking, now))
            .collect();
        self.uncompared_bookings += 1;
        if self.uncompared_bookings >= self.rows.slots() {
            self.compare_ranks();
        }
        shares
    }

    /// Records requests that were routed by a decision, for the trials of ranks that were slow.
    pub(super) fn on_routed(&mut self, bookings: &[LoadBooking], now: Instant) {
        for booking in bookings {
            if let Some(row) = self.rows.get_mut(booking.slot) {
                let model = self.latency.model_mut(row.model);
                model.on_routed(&mut row.slowdown, now);
            }
        }
    }

    fn book_share(&mut self, booking: &LoadBooking, now: Instant) -> Option<BookedShare> {
        let row = self.rows.get_mut(booking.slot)?;
        let prefill = row.begin_prefill(&self.latency, booking, now);
        if booking.track_prefill {
            row.learn(&mut self.latency, |model, slowdown| {
                model.on_booked(booking.prefill_work(), slowdown, now);
            });
        }
        let leaves = row.hold_prompts(&mut self.prompts, booking);
        Some(BookedShare {
            generation: row.generation,
            prefill,
            leaves,
            has_first_token: false,
            outputs: OutputBlocks::default(),
            answer: AnswerProgress::default(),
        })
    }

    pub(super) fn on_first_token(
        &mut self,
        part: &mut ReservationPart,
        cause: PrefillEndCause,
        now: Instant,
    ) -> bool {
        let Some(share) = &mut part.share else {
            return false;
        };
        if !share.has_first_token {
            share.has_first_token = true;
            share.answer.started_at = Some(now);
            share.answer.last_at = Some(now);
        }
        let row = self.rows.find(&part.booking, share);
        let completed = row.and_then(|(_, row)| row.end_prefill(share, cause, now));
        part.completed_prefill = completed.or(part.completed_prefill);
        if part.booking.end == BookingEnd::FirstToken {
            self.release(part, now)
        } else {
            completed.is_some()
        }
    }

    pub(super) fn add_output_blocks(
        &mut self,
        part: &mut ReservationPart,
        count: usize,
        weight: Option<BlockWeight>,
    ) -> bool {
        let Some(share) = part
            .share
            .as_mut()
            .filter(|_| part.booking.end == BookingEnd::RequestEnd)
        else {
            return false;
        };
        let Some((slot, row)) = self.rows.find(&part.booking, share) else {
            return false;
        };
        let before = row.blocks();
        row.weight -= share.outputs.weight();
        share.outputs.add(count, weight);
        row.weight += share.outputs.weight();
        if let Some(weight) = weight {
            let change = self.prompts.discount(&share.leaves, slot, weight);
            row.apply_change(change);
        }
        row.blocks() < before
    }

    pub(super) fn release(&mut self, part: &mut ReservationPart, now: Instant) -> bool {
        let Some(mut share) = part.share.take() else {
            return false;
        };
        self.release_share(&part.booking, &mut share, now)
    }

    /// Releases a part and books it on another rank, with the progress so far. If that rank is
    /// gone, it is only released.
    pub(super) fn relocate(
        &mut self,
        part: &mut ReservationPart,
        to: Option<LoadBooking>,
        now: Instant,
    ) -> bool {
        let Some(mut share) = part.share.take() else {
            return false;
        };
        let is_freed = self.release_share(&part.booking, &mut share, now);
        if let Some(booking) = to
            && let Some(row) = self.rows.get_mut(booking.slot)
            && row.rank == booking.rank
        {
            if !share.has_first_token {
                share.prefill = row.begin_prefill(&self.latency, &booking, now);
            }
            part.share = Some(row.adopt_share(&mut self.prompts, &booking, share));
            part.booking = booking;
        }
        is_freed
    }

    /// Removes a share from its row. The share still records the generated output.
    fn release_share(
        &mut self,
        booking: &LoadBooking,
        share: &mut BookedShare,
        now: Instant,
    ) -> bool {
        let Some((slot, row)) = self.rows.find(booking, share) else {
            return false;
        };
        row.end_prefill(share, PrefillEndCause::Released, now);
        row.context_tokens -= booking.context_tokens() + share.answer.tokens;
        for leaf in share.leaves.drain(..) {
            row.apply_change(self.prompts.remove(leaf, slot));
        }
        row.weight -= share.outputs.weight();
        row.requests -= 1;
        if let Some(row) = self.rows.remove_idle(slot) {
            self.store_slowdown(&row);
        }
        true
    }

    pub(super) fn snapshot(&self, now: Instant) -> Vec<RankLoad> {
        let loads = self.open_rows().map(|(slot, row)| {
            let load = row.load(now);
            RankLoad {
                slot,
                rank: row.rank,
                active_blocks: load.active_blocks,
                active_prefill_tokens: load.active_prefill_tokens,
                active_requests: load.active_requests,
            }
        });
        loads.collect()
    }

    /// Returns the rows of all ranks, in slot order.
    pub(super) fn open_rows(&self) -> impl Iterator<Item = (RankSlot, &RankRow)> {
        self.rows.iter()
    }

    pub(super) fn row(&self, slot: RankSlot) -> Option<&RankRow> {
        self.rows.get(slot)
    }
}

impl RankRow {
    /// Returns whether requests are booked on the rank.
    pub(super) fn has_bookings(&self) -> bool {
        self.requests > 0
    }

    fn blocks(&self) -> u64 {
        BlockWeight::blocks(self.weight)
    }

    /// Returns the load of the rank. Inlined, because returning the struct through memory would
    /// stall every candidate of a decision.
    #[inline(always)]
    fn load(&self, now: Instant) -> ActiveLoad {
        ActiveLoad {
            active_blocks: self.blocks(),
            active_prefill_tokens: self.prefills.remaining(now),
            active_requests: self.requests.into(),
        }
    }

    /// Begins the prefill of a booking. Returns `None` if there are no tokens to compute.
    fn begin_prefill(
        &mut self,
        latency: &LatencyRegistry,
        booking: &LoadBooking,
        now: Instant,
    ) -> Option<PrefillTicket> {
        let model = latency.model(self.model);
        let first_token_seconds =
            model.first_token_seconds(booking.prefill_work(), &self.timing(now));
        self.prefills
            .begin(booking, first_token_seconds, self.requests == 0, now)
    }

    /// Books a share that was released from another row, and whose prefill has begun in this one.
    fn adopt_share(
        &mut self,
        prompts: &mut PromptTree,
        booking: &LoadBooking,
        from: BookedShare,
    ) -> BookedShare {
        let leaves = self.hold_prompts(prompts, booking);
        self.context_tokens += from.answer.tokens;
        self.weight += from.outputs.weight();
        if let Some(weight) = from.outputs.discount_weight() {
            self.apply_change(prompts.discount(&leaves, booking.slot, weight));
        }
        BookedShare {
            generation: self.generation,
            leaves,
            ..from
        }
    }

    fn hold_prompts(&mut self, prompts: &mut PromptTree, booking: &LoadBooking) -> Vec<LeafId> {
        self.requests += 1;
        self.context_tokens += booking.context_tokens();
        let hold = |prompt| {
            let (leaf, change) = prompts.add(prompt, booking.slot);
            self.apply_change(change);
            leaf
        };
        booking
            .sequences
            .prompts()
            .iter()
            .filter_map(hold)
            .collect()
    }

    fn apply_change(&mut self, change: WeightChange) {
        self.weight = self.weight + change.added - change.removed;
    }

    /// Ends the prefill of a share. Returns its times, or `None` if it had none.
    fn end_prefill(
        &mut self,
        share: &mut BookedShare,
        cause: PrefillEndCause,
        now: Instant,
    ) -> Option<PrefillTimes> {
        let ticket = share.prefill.take()?;
        self.prefills.end(ticket, cause, now)
    }
}
