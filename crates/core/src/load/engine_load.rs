//! Load that engines report about themselves: running and waiting requests, and KV usage. It shows
//! requests that this process did not book: traffic that bypasses warmroute, and bookings that were
//! lost in a restart.
//!
//! Reports are recorded about once a second under a mutex. Decisions read atomics.
//!
//! Decision 0049.

mod booking_drift;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use crate::worker::{RankSlot, WorkerRank};
use booking_drift::{BookingDrift, DriftSample};

/// Counters that an engine reports for one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoadReport {
    /// Requests in the batch.
    pub running: u64,
    /// Requests in the queue.
    pub waiting: u64,
    /// Share of KV blocks that requests hold, from 0 to 1; `None` if the engine does not report it.
    pub kv_usage: Option<f64>,
    /// Time at which the report was received.
    pub received_at: Instant,
}

impl EngineLoadReport {
    /// Returns the number of running and waiting requests.
    pub fn requests(&self) -> u64 {
        self.running.saturating_add(self.waiting)
    }
}

/// A report with the facts that its interpretation needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoadSample {
    /// The report.
    pub report: EngineLoadReport,
    /// Bookings of the rank when the report was requested.
    pub booked_before: u64,
    /// Time for which the report counts.
    pub valid_for: Duration,
    /// Maximum time that the engine reports outdated values; `None` if there is no bound, so that
    /// differences to the bookings mean nothing.
    pub max_lag: Option<Duration>,
}

/// Last valid report of one rank, for status pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankEngineLoad {
    /// Slot in the fleet.
    pub slot: RankSlot,
    /// Worker id and data-parallel rank.
    pub rank: WorkerRank,
    /// The report.
    pub report: EngineLoadReport,
    /// Reported requests minus bookings, when the report was received.
    pub drift: i64,
    /// Requests that are assumed in addition to the bookings.
    pub unbooked_requests: u64,
}

/// Reports of all slots.
#[derive(Debug)]
pub struct EngineLoadTable {
    epoch: Instant,
    /// Values that decisions read. The slots are contiguous, because there may be thousands.
    cells: ArcSwap<Vec<EngineLoadCell>>,
    rows: Mutex<Vec<Option<EngineLoadRow>>>,
}

/// Report of one slot as decisions read it. The values are independent of each other, so a decision
/// may see those of two successive reports.
#[derive(Debug, Default)]
struct EngineLoadCell {
    /// End of the validity in nanoseconds since the epoch; 0 if there is no report.
    valid_until: AtomicU64,
    unbooked: AtomicU64,
    /// Bits of the KV usage, NaN if unknown.
    kv_usage: AtomicU64,
}

/// Report of one open slot.
#[derive(Debug)]
struct EngineLoadRow {
    rank: WorkerRank,
    drift: BookingDrift,
    last: Option<RankEngineLoad>,
}

/// Reports at one instant, for all candidates of a decision.
pub struct EngineLoadView {
    cells: Guard<Arc<Vec<EngineLoadCell>>>,
    now: u64,
}

impl EngineLoadTable {
    /// Creates an empty table. No report may be older than `epoch`.
    pub(super) fn new(epoch: Instant) -> Self {
        Self {
            epoch,
            cells: ArcSwap::default(),
            rows: Mutex::default(),
        }
    }

    /// Opens a slot for a rank, without a report.
    pub(super) fn open(&self, slot: RankSlot, rank: WorkerRank) {
        let mut rows = self.rows.lock();
        if rows.len() <= slot.index() {
            rows.resize_with(slot.index() + 1, || None);
        }
        rows[slot.index()] = Some(EngineLoadRow {
            rank,
            drift: BookingDrift::default(),
            last: None,
        });
        let cells = self.cells.load();
        match cells.get(slot.index()) {
            Some(cell) => cell.clear(),
            // The mutex is held, so no report changes the old cells meanwhile.
            None => {
                let len = rows.len().next_power_of_two();
                let mut grown: Vec<_> = cells.iter().map(EngineLoadCell::copy).collect();
                grown.resize_with(len, EngineLoadCell::default);
                self.cells.store(Arc::new(grown));
            }
        }
    }

    /// Closes a slot and removes its report.
    pub(super) fn close(&self, slot: RankSlot) {
        let mut rows = self.rows.lock();
        if let Some(row) = rows.get_mut(slot.index()) {
            *row = None;
        }
        if let Some(cell) = self.cells.load().get(slot.index()) {
            cell.clear();
        }
    }

    /// Records a report. `booked` is the number of bookings now. Returns false if the slot does not
    /// belong to the rank any more.
    pub(super) fn record(
        &self,
        slot: RankSlot,
        rank: WorkerRank,
        sample: &EngineLoadSample,
        booked: u64,
    ) -> bool {
        let mut rows = self.rows.lock();
        let row = rows.get_mut(slot.index()).and_then(Option::as_mut);
        let Some(row) = row.filter(|row| row.rank == rank) else {
            return false;
        };
        let requests = sample.report.requests();
        row.drift.record(DriftSample {
            received_at: sample.report.received_at,
            // A request that was booked or released meanwhile is no drift.
            drift: difference(requests, booked.max(sample.booked_before)),
            valid_for: sample.valid_for,
            max_lag: sample.max_lag,
        });
        let unbooked_requests = row.drift.unbooked_requests();
        row.last = Some(RankEngineLoad {
            slot,
            rank,
            report: sample.report,
            drift: difference(requests, booked),
            unbooked_requests,
        });
        if let Some(cell) = self.cells.load().get(slot.index()) {
            let usage = sample.report.kv_usage.unwrap_or(f64::NAN);
            cell.unbooked.store(unbooked_requests, Ordering::Relaxed);
            cell.kv_usage.store(usage.to_bits(), Ordering::Relaxed);
            let end = sample.report.received_at + sample.valid_for;
            cell.valid_until.store(self.nanos(end), Ordering::Release);
        }
        true
    }

    /// Returns the reports at one instant.
    pub fn view(&self, now: Instant) -> EngineLoadView {
        EngineLoadView {
            cells: self.cells.load(),
            now: self.nanos(now),
        }
    }

    /// Returns the valid reports, in slot order.
    pub fn snapshot(&self, now: Instant) -> Vec<RankEngineLoad> {
        let rows = self.rows.lock();
        let view = self.view(now);
        rows.iter()
            .flatten()
            .filter_map(|row| row.last)
            .filter(|load| view.cell(load.slot).is_some())
            .collect()
    }

    fn nanos(&self, at: Instant) -> u64 {
        let nanos = at.saturating_duration_since(self.epoch).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }
}

impl EngineLoadCell {
    fn copy(&self) -> Self {
        let copied = |value: &AtomicU64| AtomicU64::new(value.load(Ordering::Relaxed));
        Self {
            valid_until: copied(&self.valid_until),
            unbooked: copied(&self.unbooked),
            kv_usage: copied(&self.kv_usage),
        }
    }

    fn clear(&self) {
        self.valid_until.store(0, Ordering::Release);
    }
}

impl EngineLoadView {
    /// Returns the number of requests to assume in addition to the bookings of a slot. It is 0
    /// without a valid report. The caller checks that the slot belongs to its rank, as
    /// [`LoadView::load`](super::LoadView::load) does.
    #[inline]
    pub fn unbooked_requests(&self, slot: RankSlot) -> u64 {
        self.cell(slot)
            .map_or(0, |cell| cell.unbooked.load(Ordering::Relaxed))
    }

    /// Returns the share of used KV blocks that the engine of a slot reports, or `None` without a
    /// valid report.
    #[inline]
    pub fn kv_usage(&self, slot: RankSlot) -> Option<f64> {
        let bits = self.cell(slot)?.kv_usage.load(Ordering::Relaxed);
        Some(f64::from_bits(bits)).filter(|usage| !usage.is_nan())
    }

    #[inline]
    fn cell(&self, slot: RankSlot) -> Option<&EngineLoadCell> {
        self.cells
            .get(slot.index())
            .filter(|cell| cell.valid_until.load(Ordering::Acquire) > self.now)
    }
}

fn difference(reported: u64, booked: u64) -> i64 {
    let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    signed(reported).saturating_sub(signed(booked))
}

#[cfg(test)]
mod tests;
