//! The load table: a row per slot.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::{Booking, Load, RankLoad};
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
    load: Load,
    /// How many live requests hold a block.
    holders: HashMap<SequenceHash, u32, BuildHasherDefault<AsIs>>,
}

/// What a reservation holds in a row.
#[derive(Debug)]
pub(super) struct Share {
    term: u64,
    prefill_tokens: u64,
}

impl Table {
    pub(super) fn open(&mut self, slot: Slot, rank: WorkerRank) {
        if self.rows.len() <= slot.at() {
            self.rows.resize_with(slot.at() + 1, || None);
        }
        self.terms += 1;
        self.rows[slot.at()] = Some(Row { rank, term: self.terms, load: Load::default(), holders: HashMap::default() });
    }

    pub(super) fn close(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot.at()) {
            *row = None;
        }
    }

    pub(super) fn load(&self, slot: Slot, rank: WorkerRank) -> Option<Load> {
        let row = self.rows.get(slot.at())?.as_ref()?;
        (row.rank == rank).then_some(row.load)
    }

    /// Leading blocks of a prompt that are held on a slot. `near` is a guess, usually the answer for another slot: the
    /// prompts that workers have in common end at the same block, and then two look-ups do.
    pub(super) fn matched(&self, slot: Slot, sequences: &[SequenceHash], near: usize) -> usize {
        let Some(row) = self.rows.get(slot.at()).and_then(Option::as_ref) else { return 0 };
        let held = |sequence: &SequenceHash| row.holders.contains_key(sequence);
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

    pub(super) fn book(&mut self, booking: &Booking) -> Option<Share> {
        let row = self.rows.get_mut(booking.slot.at())?.as_mut().filter(|row| row.rank == booking.rank)?;
        for sequence in &*booking.sequences {
            *row.holders.entry(*sequence).or_insert(0) += 1;
        }
        row.load.active_blocks = row.holders.len() as u64;
        row.load.active_prefill_tokens += booking.prefill_tokens();
        row.load.active_requests += 1;
        Some(Share { term: row.term, prefill_tokens: booking.prefill_tokens() })
    }

    pub(super) fn end_prefill(&mut self, slot: Slot, share: &mut Share) {
        if let Some(row) = self.row_of(slot, share) {
            row.load.active_prefill_tokens -= share.prefill_tokens;
        }
        share.prefill_tokens = 0;
    }

    pub(super) fn release(&mut self, booking: &Booking, mut share: Share) {
        self.end_prefill(booking.slot, &mut share);
        let Some(row) = self.row_of(booking.slot, &share) else { return };
        for sequence in &*booking.sequences {
            if let Some(holders) = row.holders.get_mut(sequence) {
                *holders -= 1;
                if *holders == 0 {
                    row.holders.remove(sequence);
                }
            }
        }
        row.load.active_blocks = row.holders.len() as u64;
        row.load.active_requests -= 1;
    }

    pub(super) fn snapshot(&self) -> Vec<RankLoad> {
        let open = self.rows.iter().enumerate().filter_map(|(slot, row)| Some((slot, row.as_ref()?)));
        open.map(|(slot, row)| RankLoad {
            slot: Slot(slot as u32),
            rank: row.rank,
            active_blocks: row.load.active_blocks,
            active_prefill_tokens: row.load.active_prefill_tokens,
            active_requests: row.load.active_requests,
        })
        .collect()
    }

    fn row_of(&mut self, slot: Slot, share: &Share) -> Option<&mut Row> {
        self.rows.get_mut(slot.at())?.as_mut().filter(|row| row.term == share.term)
    }
}

/// The hasher of keys that are good hashes already.
#[derive(Debug, Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}
