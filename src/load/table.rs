//! The load table: a row per slot. What changes it says whether a load went down.

use std::time::Instant;

use super::blocks::{Blocks, Outputs, Weight};
use super::prefill::{Prefills, Ticket};
use super::{Booking, Load, Part, RankLoad, Until};
use crate::block::SequenceHash;
use crate::worker::{Slot, WorkerRank};

/// All rows.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Option<Row>>,
    terms: u64,
}

/// One open slot.
#[derive(Debug)]
struct Row {
    rank: WorkerRank,
    /// Unlike every other term of every slot: tells a booking whether the row it was made in is still there.
    term: u64,
    requests: u64,
    prefills: Prefills,
    prompts: Blocks,
    /// Of the blocks of all answers.
    outputs: u128,
}

/// What a booking holds in a row.
#[derive(Debug)]
pub(super) struct Share {
    term: u64,
    prefill: Option<Ticket>,
    /// Whether the first token was seen: then there is nothing left to prefill, wherever the booking goes.
    begun: bool,
    outputs: Outputs,
}

impl Table {
    pub(super) fn open(&mut self, slot: Slot, rank: WorkerRank) -> bool {
        if self.rows.len() <= slot.at() {
            self.rows.resize_with(slot.at() + 1, || None);
        }
        self.terms += 1;
        self.rows[slot.at()].replace(Row::new(rank, self.terms)).is_some()
    }

    pub(super) fn close(&mut self, slot: Slot) -> bool {
        self.rows.get_mut(slot.at()).and_then(Option::take).is_some()
    }

    #[inline(always)]
    pub(super) fn load(&self, slot: Slot, rank: WorkerRank, now: Instant) -> Option<Load> {
        self.row(slot).filter(|row| row.rank == rank).map(|row| row.load(now))
    }

    /// Whether no block of a prompt is held on a slot.
    #[inline]
    pub(super) fn is_idle(&self, slot: Slot) -> bool {
        self.row(slot).is_none_or(|row| row.prompts.is_empty())
    }

    /// Leading blocks of a prompt that are held on a slot. `near` is a guess, usually the answer for another slot: the
    /// prompts that workers have in common end at the same block, and then two look-ups do.
    pub(super) fn matched(&self, slot: Slot, sequences: &[SequenceHash], near: usize) -> usize {
        let Some(row) = self.row(slot) else { return 0 };
        let held = |sequence: &SequenceHash| row.prompts.holds(sequence);
        let (before, after) = sequences.split_at(near.min(sequences.len()));
        // A sequence hash names all blocks before it, so who holds one holds those as well: the end can be searched for.
        if before.last().is_some_and(|last| !held(last)) {
            before.partition_point(held)
        } else if after.first().is_some_and(held) {
            before.len() + after.partition_point(held)
        } else {
            before.len()
        }
    }

    /// A share for each, or nothing at all.
    pub(super) fn book(&mut self, bookings: &[Booking], now: Instant) -> Option<Vec<Share>> {
        let there = |booking: &Booking| self.row(booking.slot).is_some_and(|row| row.rank == booking.rank);
        if !bookings.iter().all(there) {
            return None;
        }
        let row = |booking: &Booking| Some(self.rows.get_mut(booking.slot.at())?.as_mut()?.book(booking, now));
        bookings.iter().map(row).collect()
    }

    pub(super) fn counts(&self, part: &Part) -> bool {
        let held = part.share.as_ref().zip(self.row(part.booking.slot));
        held.is_some_and(|(share, row)| share.term == row.term)
    }

    pub(super) fn first_token(&mut self, part: &mut Part, now: Instant) -> bool {
        if part.booking.until == Until::FirstToken {
            return self.release(part, now);
        }
        let Some(share) = &mut part.share else { return false };
        share.begun = true;
        self.row_of(&part.booking, share).is_some_and(|row| row.end_prefill(share, now))
    }

    pub(super) fn output_block(&mut self, part: &mut Part, weight: Option<Weight>) -> bool {
        let Some(share) = part.share.as_mut().filter(|_| part.booking.until == Until::End) else { return false };
        let Some(row) = self.row_of(&part.booking, share) else { return false };
        let before = row.blocks();
        row.outputs -= share.outputs.weight();
        share.outputs.add(weight);
        row.outputs += share.outputs.weight();
        if let Some(weight) = weight {
            row.prompts.fade(&part.booking.sequences, weight);
        }
        row.blocks() < before
    }

    pub(super) fn release(&mut self, part: &mut Part, now: Instant) -> bool {
        let Some(mut share) = part.share.take() else { return false };
        self.leave(&part.booking, &mut share, now)
    }

    /// Releases a part and books it anew elsewhere, as far as it had come. Where nobody is there, it is only released.
    pub(super) fn relocate(&mut self, part: &mut Part, to: Option<Booking>, now: Instant) -> bool {
        let Some(mut share) = part.share.take() else { return false };
        let relieved = self.leave(&part.booking, &mut share, now);
        if let Some(booking) = to
            && let Some(row) = self.rows.get_mut(booking.slot.at()).and_then(Option::as_mut)
            && row.rank == booking.rank
        {
            part.share = Some(row.take_over(&booking, share, now));
            part.booking = booking;
        }
        relieved
    }

    /// Takes what a share holds out of its row. What was generated stays written in the share.
    fn leave(&mut self, booking: &Booking, share: &mut Share, now: Instant) -> bool {
        let Some(row) = self.row_of(booking, share) else { return false };
        row.end_prefill(share, now);
        row.prompts.remove(&booking.sequences);
        row.outputs -= share.outputs.weight();
        row.requests -= 1;
        true
    }

    pub(super) fn snapshot(&self, now: Instant) -> Vec<RankLoad> {
        let open = self.rows.iter().enumerate().filter_map(|(slot, row)| Some((slot, row.as_ref()?)));
        open.map(|(slot, row)| {
            let Load { active_blocks, active_prefill_tokens, active_requests } = row.load(now);
            let slot = Slot(slot as u32);
            RankLoad { slot, rank: row.rank, active_blocks, active_prefill_tokens, active_requests }
        })
        .collect()
    }

    fn row(&self, slot: Slot) -> Option<&Row> {
        self.rows.get(slot.at())?.as_ref()
    }

    /// The row that a booking was made in, if it is still there.
    fn row_of(&mut self, booking: &Booking, share: &Share) -> Option<&mut Row> {
        self.rows.get_mut(booking.slot.at())?.as_mut().filter(|row| row.term == share.term)
    }
}

impl Row {
    fn new(rank: WorkerRank, term: u64) -> Self {
        Self { rank, term, requests: 0, prefills: Prefills::default(), prompts: Blocks::default(), outputs: 0 }
    }

    fn blocks(&self) -> u64 {
        Weight::blocks(self.prompts.weight() + self.outputs)
    }

    /// Inlined, because a result that is handed over in memory is waited for, by each candidate of a decision.
    #[inline(always)]
    fn load(&self, now: Instant) -> Load {
        Load {
            active_blocks: self.blocks(),
            active_prefill_tokens: self.prefills.remaining(now),
            active_requests: self.requests,
        }
    }

    fn book(&mut self, booking: &Booking, now: Instant) -> Share {
        let prefill = self.prefills.begin(booking.prefill_tokens(), booking.prefill_time, now);
        self.hold(booking);
        Share { term: self.term, prefill, begun: false, outputs: Outputs::default() }
    }

    /// Books what another row has just let go of.
    fn take_over(&mut self, booking: &Booking, from: Share, now: Instant) -> Share {
        let prefill = match from.begun {
            true => None,
            false => self.prefills.begin(booking.prefill_tokens(), booking.prefill_time, now),
        };
        self.hold(booking);
        self.outputs += from.outputs.weight();
        if let Some(weight) = from.outputs.weight_of_each() {
            self.prompts.fade(&booking.sequences, weight);
        }
        Share { term: self.term, prefill, ..from }
    }

    fn hold(&mut self, booking: &Booking) {
        self.prompts.add(&booking.sequences);
        self.requests += 1;
    }

    fn end_prefill(&mut self, share: &mut Share, now: Instant) -> bool {
        let ticket = share.prefill.take();
        ticket.into_iter().for_each(|ticket| self.prefills.end(ticket, now));
        ticket.is_some()
    }
}
