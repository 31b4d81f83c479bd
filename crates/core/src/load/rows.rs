//! Rows of worker ranks: one per slot of the fleet, and those of ranks that have left the fleet while
//! requests run on them. Such a row keeps its bookings until they end. If the rank returns at the
//! same address, its row returns with it.

use std::collections::HashMap;

use super::booking::LoadBooking;
use super::latency::ModelId;
use super::table::{BookedShare, RankRow};
use crate::fleet::FleetMember;
use crate::worker::{RankSlot, WorkerEndpoint};

/// First slot of departed ranks. No fleet has as many slots.
const FIRST_DEPARTED: u32 = 1 << 31;

/// Returns whether a slot belongs to a departed rank.
pub(super) fn is_departed(slot: RankSlot) -> bool {
    slot.0 >= FIRST_DEPARTED
}

/// Rows of all ranks.
#[derive(Debug, Default)]
pub(super) struct RankRows {
    open: Vec<Option<RankRow>>,
    pub(super) departed: HashMap<RankSlot, DepartedRow>,
    /// Slots of the rows that have left their first slot, by generation.
    pub(super) moved: HashMap<u64, RankSlot>,
    last_departed: u32,
}

#[derive(Debug)]
pub(super) struct DepartedRow {
    endpoint: WorkerEndpoint,
    row: RankRow,
}

impl RankRows {
    /// Returns the length of a table indexed by slot.
    pub(super) fn slots(&self) -> usize {
        self.open.len()
    }

    /// Returns the row of a slot of the fleet.
    #[inline(always)]
    pub(super) fn get(&self, slot: RankSlot) -> Option<&RankRow> {
        self.open.get(slot.index())?.as_ref()
    }

    /// Returns the row of a slot of the fleet.
    pub(super) fn get_mut(&mut self, slot: RankSlot) -> Option<&mut RankRow> {
        self.open.get_mut(slot.index())?.as_mut()
    }

    /// Returns the rows of the fleet, in slot order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (RankSlot, &RankRow)> {
        let rows = self.open.iter().enumerate();
        rows.filter_map(|(slot, row)| Some((RankSlot(slot as u32), row.as_ref()?)))
    }

    /// Returns the rows of the fleet, in slot order.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut RankRow> {
        self.open.iter_mut().flatten()
    }

    /// Adds a row to an empty slot.
    pub(super) fn insert(&mut self, slot: RankSlot, row: RankRow) {
        if self.open.len() <= slot.index() {
            self.open.resize_with(slot.index() + 1, || None);
        }
        self.open[slot.index()] = Some(row);
    }

    /// Removes the row of a slot of the fleet.
    pub(super) fn remove(&mut self, slot: RankSlot) -> Option<RankRow> {
        let row = self.open.get_mut(slot.index())?.take()?;
        self.moved.remove(&row.generation);
        Some(row)
    }

    /// Removes a row from the fleet and keeps its bookings. Returns its new slot.
    pub(super) fn depart(&mut self, row: RankRow, endpoint: WorkerEndpoint) -> RankSlot {
        self.last_departed = (self.last_departed + 1) % (FIRST_DEPARTED - 1);
        let slot = RankSlot(FIRST_DEPARTED + self.last_departed);
        self.moved.insert(row.generation, slot);
        self.departed.insert(slot, DepartedRow { endpoint, row });
        slot
    }

    /// Returns the row of a rank to the fleet, if the rank has departed from this address. Returns
    /// its previous slot.
    pub(super) fn rejoin(&mut self, member: &FleetMember, model: ModelId) -> Option<RankSlot> {
        let is_same = |DepartedRow { endpoint, row }: &DepartedRow| {
            *endpoint == member.worker.endpoint && row.rank == member.rank && row.model == model
        };
        let mut departed = self.departed.iter();
        let previous = *departed.find(|(_, departed)| is_same(departed))?.0;
        let DepartedRow { row, .. } = self.departed.remove(&previous)?;
        self.moved.insert(row.generation, member.slot);
        self.insert(member.slot, row);
        Some(previous)
    }

    /// Removes the row of a departed rank without bookings.
    pub(super) fn remove_idle(&mut self, slot: RankSlot) -> Option<RankRow> {
        if self.departed.get(&slot)?.row.has_bookings() {
            return None;
        }
        let DepartedRow { row, .. } = self.departed.remove(&slot)?;
        self.moved.remove(&row.generation);
        Some(row)
    }

    /// Returns the row that a share was booked in, with its current slot.
    pub(super) fn find(
        &mut self,
        booking: &LoadBooking,
        share: &BookedShare,
    ) -> Option<(RankSlot, &mut RankRow)> {
        let slot = match self.get(booking.slot) {
            Some(row) if row.generation == share.generation => booking.slot,
            _ => *self.moved.get(&share.generation)?,
        };
        let row = if is_departed(slot) {
            &mut self.departed.get_mut(&slot)?.row
        } else {
            self.get_mut(slot)?
        };
        Some((slot, row))
    }
}
