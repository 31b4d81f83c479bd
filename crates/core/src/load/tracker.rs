//! Tracker of the load of all worker ranks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::booking::{LoadBooking, RankLoad};
use super::engine_load::{EngineLoadSample, EngineLoadTable};
use super::events::{BookingId, LoadListener, ReservationEvent};
use super::table::LoadTable;
use super::view::LoadView;
use crate::fleet::FleetMember;
use crate::worker::{RankSlot, WorkerRank};

/// Load of all worker ranks.
pub struct LoadTracker {
    pub(super) clock: Box<dyn Fn() -> Instant + Send + Sync>,
    pub(super) table: Mutex<LoadTable>,
    engine_loads: Arc<EngineLoadTable>,
    listener: Arc<dyn LoadListener>,
    pub(super) next_id: AtomicU64,
}

impl LoadTracker {
    /// Creates an empty tracker. `clock` drives the decay of estimated prefills and must not call
    /// the tracker.
    pub fn new(clock: impl Fn() -> Instant + Send + Sync + 'static) -> Arc<Self> {
        Self::with_listener(clock, Arc::new(()))
    }

    /// Creates an empty tracker that reports its changes.
    pub fn with_listener(
        clock: impl Fn() -> Instant + Send + Sync + 'static,
        listener: Arc<dyn LoadListener>,
    ) -> Arc<Self> {
        let engine_loads = Arc::new(EngineLoadTable::new(clock()));
        Arc::new(Self {
            clock: Box::new(clock),
            table: Mutex::default(),
            engine_loads,
            listener,
            next_id: AtomicU64::new(0),
        })
    }

    /// Opens the slot of a member that joins the fleet. If the same rank has left before and requests
    /// run on it at the same address, it returns with their bookings.
    pub fn join(&self, member: &FleetMember) {
        self.engine_loads.open(member.slot, member.rank);
        self.table.lock().join(member);
    }

    /// Closes the slot of a member that has left the fleet. Its bookings stay until they end, and
    /// return with it.
    pub fn leave(&self, member: &FleetMember) {
        self.engine_loads.close(member.slot);
        self.change(|table, _| table.leave(member));
    }

    /// Returns the load that the engines report.
    pub fn engine_loads(&self) -> &Arc<EngineLoadTable> {
        &self.engine_loads
    }

    /// Records the counters that an engine reports for a rank. Returns false if the slot does not
    /// belong to the rank any more.
    pub fn record_engine_load(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        sample: &EngineLoadSample,
    ) -> bool {
        let booked = self.active_requests(slot, rank);
        self.engine_loads.record(slot, rank, sample, booked)
    }

    /// Returns the number of bookings of a rank.
    pub fn active_requests(&self, slot: RankSlot, rank: WorkerRank) -> u64 {
        let load = self.read(|view| view.load(slot, rank));
        load.map_or(0, |load| load.active_requests)
    }

    /// Reads the load at one instant. `read` must be fast and must not call the tracker.
    pub fn read<T>(&self, read: impl FnOnce(&LoadView<'_>) -> T) -> T {
        let table = self.table.lock();
        read(&LoadView::new(&table, (self.clock)()))
    }

    /// Returns the load of all open ranks, in slot order.
    pub fn snapshot(&self) -> Vec<RankLoad> {
        let table = self.table.lock();
        table.snapshot((self.clock)())
    }

    /// Returns the current time of the injected clock.
    pub fn now(&self) -> Instant {
        (self.clock)()
    }

    /// Applies `change` to the table. If it reports that load decreased, notifies the
    /// listener and returns true.
    pub(super) fn change(&self, change: impl FnOnce(&mut LoadTable, Instant) -> bool) -> bool {
        let mut table = self.table.lock();
        let is_freed = change(&mut table, (self.clock)());
        drop(table);
        if is_freed {
            self.listener.on_capacity_freed();
        }
        is_freed
    }

    /// Publishes a new reservation. Returns its id, or `None` if no events are published.
    pub(super) fn notify_booked(&self, bookings: &[LoadBooking]) -> Option<BookingId> {
        if !self.listener.wants_reservation_events() {
            return None;
        }
        let id = BookingId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.listener
            .on_reservation_event(ReservationEvent::Booked {
                id,
                bookings: bookings.to_vec(),
            });
        Some(id)
    }

    pub(super) fn notify(&self, event: ReservationEvent) {
        self.listener.on_reservation_event(event);
    }
}

impl fmt::Debug for LoadTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadTracker")
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
