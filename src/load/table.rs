//! The load table: a row per slot. What changes it says whether a load went down.

use std::time::Instant;

use super::prefill::{Prefills, Ticket};
use super::sequences::Sequences;
use super::tree::{Change, Leaf, Tree};
use super::weight::{Outputs, Weight};
use super::{Booking, Load, Part, RankLoad, Until};
use crate::worker::{Slot, WorkerRank};

/// All rows.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Option<Row>>,
    /// The prompts of all rows.
    prompts: Tree,
    terms: u64,
}

/// One open slot. What a decision reads of each of them comes first, in one line of the cache: there may be thousands.
#[derive(Debug)]
#[repr(C, align(64))]
struct Row {
    rank: WorkerRank,
    requests: u64,
    /// Of the blocks of all prompts, and of all answers.
    weight: u64,
    prefills: Prefills,
    /// Unlike every other term of every slot: tells a booking whether the row it was made in is still there.
    term: u64,
}

/// What a booking holds in a row.
#[derive(Debug)]
pub(super) struct Share {
    term: u64,
    prefill: Option<Ticket>,
    /// Where the prompts end that it holds.
    leaves: Vec<Leaf>,
    /// Whether the first token was seen: then there is nothing left to prefill, wherever the booking goes.
    begun: bool,
    outputs: Outputs,
}

impl Table {
    pub(super) fn open(&mut self, slot: Slot, rank: WorkerRank) -> bool {
        if self.rows.len() <= slot.at() {
            self.rows.resize_with(slot.at() + 1, || None);
        }
        let was_open = self.close(slot);
        self.terms += 1;
        self.rows[slot.at()] = Some(Row::new(rank, self.terms));
        was_open
    }

    pub(super) fn close(&mut self, slot: Slot) -> bool {
        let closed = self.rows.get_mut(slot.at()).and_then(Option::take);
        if closed.as_ref().is_some_and(|row| row.requests > 0) {
            self.prompts.forget(slot);
        }
        closed.is_some()
    }

    #[inline(always)]
    pub(super) fn load(&self, slot: Slot, rank: WorkerRank, now: Instant) -> Option<Load> {
        self.row(slot)
            .filter(|row| row.rank == rank)
            .map(|row| row.load(now))
    }

    /// How many of these blocks each slot holds, by slot, as far as anybody holds any.
    pub(super) fn held(&self, sequences: &Sequences) -> Vec<u32> {
        self.prompts.held(sequences.prompts())
    }

    /// A share for each, or nothing at all.
    pub(super) fn book(&mut self, bookings: &[Booking], now: Instant) -> Option<Vec<Share>> {
        let there = |booking: &Booking| {
            self.row(booking.slot)
                .is_some_and(|row| row.rank == booking.rank)
        };
        if !bookings.iter().all(there) {
            return None;
        }
        bookings
            .iter()
            .map(|booking| self.share(booking, now))
            .collect()
    }

    fn share(&mut self, booking: &Booking, now: Instant) -> Option<Share> {
        let row = self.rows.get_mut(booking.slot.at())?.as_mut()?;
        let prefill = row
            .prefills
            .begin(booking.prefill_tokens(), booking.prefill_time, now);
        let leaves = row.hold(&mut self.prompts, booking);
        Some(Share {
            term: row.term,
            prefill,
            leaves,
            begun: false,
            outputs: Outputs::default(),
        })
    }

    pub(super) fn counts(&self, part: &Part) -> bool {
        let held = part.share.as_ref().zip(self.row(part.booking.slot));
        held.is_some_and(|(share, row)| share.term == row.term)
    }

    pub(super) fn first_token(&mut self, part: &mut Part, now: Instant) -> bool {
        if part.booking.until == Until::FirstToken {
            return self.release(part, now);
        }
        let Some(share) = &mut part.share else {
            return false;
        };
        share.begun = true;
        row_of(&mut self.rows, &part.booking, share).is_some_and(|row| row.end_prefill(share, now))
    }

    pub(super) fn output_blocks(
        &mut self,
        part: &mut Part,
        count: usize,
        weight: Option<Weight>,
    ) -> bool {
        let Some(share) = part
            .share
            .as_mut()
            .filter(|_| part.booking.until == Until::End)
        else {
            return false;
        };
        let Some(row) = row_of(&mut self.rows, &part.booking, share) else {
            return false;
        };
        let before = row.blocks();
        row.weight -= share.outputs.weight();
        share.outputs.add(count, weight);
        row.weight += share.outputs.weight();
        if let Some(weight) = weight {
            row.take(self.prompts.fade(&share.leaves, part.booking.slot, weight));
        }
        row.blocks() < before
    }

    pub(super) fn release(&mut self, part: &mut Part, now: Instant) -> bool {
        let Some(mut share) = part.share.take() else {
            return false;
        };
        self.leave(&part.booking, &mut share, now)
    }

    /// Releases a part and books it anew elsewhere, as far as it had come. Where nobody is there, it is only released.
    pub(super) fn relocate(&mut self, part: &mut Part, to: Option<Booking>, now: Instant) -> bool {
        let Some(mut share) = part.share.take() else {
            return false;
        };
        let relieved = self.leave(&part.booking, &mut share, now);
        if let Some(booking) = to
            && let Some(row) = self
                .rows
                .get_mut(booking.slot.at())
                .and_then(Option::as_mut)
            && row.rank == booking.rank
        {
            part.share = Some(row.take_over(&mut self.prompts, &booking, share, now));
            part.booking = booking;
        }
        relieved
    }

    /// Takes what a share holds out of its row. What was generated stays written in the share.
    fn leave(&mut self, booking: &Booking, share: &mut Share, now: Instant) -> bool {
        let Some(row) = row_of(&mut self.rows, booking, share) else {
            return false;
        };
        row.end_prefill(share, now);
        for leaf in share.leaves.drain(..) {
            row.take(self.prompts.remove(leaf, booking.slot));
        }
        row.weight -= share.outputs.weight();
        row.requests -= 1;
        true
    }

    pub(super) fn snapshot(&self, now: Instant) -> Vec<RankLoad> {
        let open = self
            .rows
            .iter()
            .enumerate()
            .filter_map(|(slot, row)| Some((slot, row.as_ref()?)));
        open.map(|(slot, row)| {
            let Load {
                active_blocks,
                active_prefill_tokens,
                active_requests,
            } = row.load(now);
            let slot = Slot(slot as u32);
            RankLoad {
                slot,
                rank: row.rank,
                active_blocks,
                active_prefill_tokens,
                active_requests,
            }
        })
        .collect()
    }

    fn row(&self, slot: Slot) -> Option<&Row> {
        self.rows.get(slot.at())?.as_ref()
    }
}

/// The row that a booking was made in, if it is still there.
fn row_of<'r>(
    rows: &'r mut [Option<Row>],
    booking: &Booking,
    share: &Share,
) -> Option<&'r mut Row> {
    rows.get_mut(booking.slot.at())?
        .as_mut()
        .filter(|row| row.term == share.term)
}

impl Row {
    fn new(rank: WorkerRank, term: u64) -> Self {
        Self {
            rank,
            term,
            requests: 0,
            prefills: Prefills::default(),
            weight: 0,
        }
    }

    fn blocks(&self) -> u64 {
        Weight::blocks(self.weight)
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

    /// Books what another row has just let go of.
    fn take_over(
        &mut self,
        prompts: &mut Tree,
        booking: &Booking,
        from: Share,
        now: Instant,
    ) -> Share {
        let prefill = match from.begun {
            true => None,
            false => self
                .prefills
                .begin(booking.prefill_tokens(), booking.prefill_time, now),
        };
        let leaves = self.hold(prompts, booking);
        self.weight += from.outputs.weight();
        if let Some(weight) = from.outputs.weight_of_each() {
            self.take(prompts.fade(&leaves, booking.slot, weight));
        }
        Share {
            term: self.term,
            prefill,
            leaves,
            ..from
        }
    }

    fn hold(&mut self, prompts: &mut Tree, booking: &Booking) -> Vec<Leaf> {
        self.requests += 1;
        let hold = |prompt| {
            let (leaf, change) = prompts.add(prompt, booking.slot);
            self.take(change);
            leaf
        };
        booking
            .sequences
            .prompts()
            .iter()
            .filter_map(hold)
            .collect()
    }

    fn take(&mut self, change: Change) {
        self.weight = self.weight + change.more - change.less;
    }

    fn end_prefill(&mut self, share: &mut Share, now: Instant) -> bool {
        let ticket = share.prefill.take();
        ticket
            .into_iter()
            .for_each(|ticket| self.prefills.end(ticket, now));
        ticket.is_some()
    }
}
