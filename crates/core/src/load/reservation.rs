//! The reservation of one request: an RAII guard over its bookings.

use std::sync::Arc;
use std::time::Duration;

use super::booking::LoadBooking;
use super::events::{BookingId, ReservationEvent, ReservationState};
use super::latency::FirstTokenObservation;
use super::learning::{CachedTokenSource, CompleteOutput};
use super::prefill_queue::PrefillEndCause;
use super::table::{BookedShare, ReservationPart};
use super::tracker::LoadTracker;
use super::view::LoadView;
use super::weight::BlockWeight;
use crate::worker::{RankSlot, WorkerRank};

/// All bookings of one request. Dropping it releases them.
#[derive(Debug)]
#[must_use = "dropping a reservation releases its load"]
pub struct Reservation {
    tracker: Arc<LoadTracker>,
    parts: Vec<ReservationPart>,
    /// Id under which events about this reservation are published, if there is a listener.
    event_id: Option<BookingId>,
    has_first_token: bool,
    /// Answer tokens that were observed and are not in the table yet.
    pending_tokens: u64,
}

/// Number of answer tokens after which the table is updated. Smaller steps find more intervals
/// without a prefill, larger ones take the lock less often.
const TOKEN_BATCH: u64 = 4;

impl LoadTracker {
    /// Decides and books in one critical section. `decide` must be fast and must not call the
    /// tracker. Either all bookings are made, or none if one of the ranks is gone. Also returns the
    /// decision on which the bookings are based.
    pub fn book_with<T, E>(
        self: &Arc<Self>,
        decide: impl FnOnce(&LoadView<'_>) -> Result<(Vec<LoadBooking>, T), E>,
    ) -> Result<(Reservation, T), E> {
        let mut table = self.table.lock();
        let now = (self.clock)();
        let (bookings, decision) = decide(&LoadView::new(&table, now))?;
        let shares = table.book(&bookings, now);
        if shares.is_some() {
            table.on_routed(&bookings, now);
        }
        drop(table);
        let event_id = shares.as_ref().and_then(|_| self.notify_booked(&bookings));
        let reservation = Reservation::new(self.clone(), bookings, shares, event_id);
        Ok((reservation, decision))
    }

    /// Books the state of another replica's reservation. Returns `None` and books nothing if one of
    /// the ranks is not in the fleet.
    pub fn mirror(self: &Arc<Self>, state: &ReservationState) -> Option<Reservation> {
        let mut bookings = state.bookings.clone();
        if state.has_first_token {
            // The prefill is not booked: it would count as a new arrival and end at once.
            for booking in &mut bookings {
                booking.track_prefill = false;
            }
        }
        let mut table = self.table.lock();
        let now = (self.clock)();
        let shares = table.book(&bookings, now)?;
        drop(table);
        let mut mirrored = Reservation::new(self.clone(), bookings, Some(shares), None);
        if state.has_first_token {
            mirrored.on_first_token();
        }
        mirrored.add_output_blocks(state.discounted_blocks, state.fraction);
        mirrored.add_output_blocks(state.full_blocks, None);
        Some(mirrored)
    }
}

impl Reservation {
    fn new(
        tracker: Arc<LoadTracker>,
        bookings: Vec<LoadBooking>,
        shares: Option<Vec<BookedShare>>,
        event_id: Option<BookingId>,
    ) -> Self {
        let mut shares = shares.into_iter().flatten();
        let parts = bookings
            .into_iter()
            .map(|booking| ReservationPart {
                booking,
                share: shares.next(),
                completed_prefill: None,
                pending_prefill: None,
            })
            .collect();
        Self {
            tracker,
            parts,
            event_id,
            has_first_token: false,
            pending_tokens: 0,
        }
    }

    /// Returns whether the first token was handled.
    pub fn has_first_token(&self) -> bool {
        self.has_first_token
    }

    /// Returns the worker rank of the first booking.
    pub fn rank(&self) -> Option<WorkerRank> {
        self.parts.first().map(|part| part.booking.rank)
    }

    /// Returns slot and rank of each booking, in order.
    pub fn booked_slots(&self) -> impl Iterator<Item = (RankSlot, WorkerRank)> {
        self.bookings().map(|booking| (booking.slot, booking.rank))
    }

    /// Returns the bookings.
    pub fn bookings(&self) -> impl Iterator<Item = &LoadBooking> {
        self.parts.iter().map(|part| &part.booking)
    }

    /// Returns whether any booking still counts as load: it was made and has not ended.
    pub fn is_active(&self) -> bool {
        self.parts.iter().any(|part| part.share.is_some())
    }

    /// Handles the first token: ends the prefill share and the bookings that last until then.
    /// Returns whether load changed; repeated calls have no effect.
    pub fn on_first_token(&mut self) -> bool {
        self.end_prefill(PrefillEndCause::FirstToken)
    }

    /// Like [`Self::on_first_token`], for a response whose first token was not observed, such as a
    /// response that is one document. The prefill ended at an unknown earlier time.
    pub fn on_unobserved_first_token(&mut self) -> bool {
        self.end_prefill(PrefillEndCause::Unobserved)
    }

    fn end_prefill(&mut self, cause: PrefillEndCause) -> bool {
        let parts = &mut self.parts;
        let changed = self
            .tracker
            .change(|table, now| update_all(parts, |part| table.on_first_token(part, cause, now)));
        if !std::mem::replace(&mut self.has_first_token, true) {
            self.notify(ReservationEvent::FirstToken);
        }
        changed
    }

    /// Records the prefill that ended with the first token. Called only if the chosen worker
    /// answered. Learns from it if the number of cached tokens is known, otherwise when the
    /// engine reports it. Returns the predicted and observed times to first token, once.
    pub fn learn_prefill(&mut self, cached: CachedTokenSource) -> Option<FirstTokenObservation> {
        let mut table = self.tracker.table.lock();
        let now = self.tracker.now();
        let parts = self.parts.iter_mut();
        parts
            .map(|part| table.learn_prefill(part, cached, now))
            .fold(None, Option::or)
    }

    /// Learns from a prefill with a predicted number of cached tokens. `cached` is the number that
    /// the engine reports.
    pub(crate) fn apply_reported_cached_tokens(&mut self, cached: u64) {
        let parts = &mut self.parts;
        self.tracker.change(|table, now| {
            for part in parts.iter_mut() {
                table.apply_reported_cached_tokens(part, cached, now);
            }
            false
        });
    }

    /// Learns from the first token after a KV transfer, which arrived `elapsed` after the booking.
    pub(crate) fn learn_transfer(&mut self, elapsed: Duration) {
        if let Some(part) = self.parts.first() {
            self.tracker.change(|table, _| {
                table.learn_transfer(part, elapsed);
                false
            });
        }
    }

    /// Handles observed answer tokens after the first one.
    pub fn add_output_tokens(&mut self, count: u64) {
        self.pending_tokens += count;
        if self.pending_tokens >= TOKEN_BATCH {
            self.flush_output_tokens();
        }
    }

    fn flush_output_tokens(&mut self) {
        let count = std::mem::take(&mut self.pending_tokens);
        if let Some(part) = self.parts.first_mut().filter(|_| count > 0) {
            self.tracker.change(|table, now| {
                table.add_output_tokens(part, count, now);
                false
            });
        }
    }

    /// Learns from the complete answer.
    pub fn learn_output(&mut self, output: CompleteOutput) {
        self.flush_output_tokens();
        if let Some(part) = self.parts.first_mut() {
            self.tracker.change(|table, now| {
                table.learn_output(part, output, now);
                false
            });
        }
    }

    /// Adds one output block. `fraction` is the share of the answer that is still to come, if
    /// known. Blocks that only this request holds then count for that fraction, because they will
    /// be freed soon.
    pub fn add_output_block(&mut self, fraction: Option<f64>) {
        self.add_output_blocks(1, fraction);
    }

    /// Adds several output blocks; see [`Reservation::add_output_block`].
    pub fn add_output_blocks(&mut self, count: usize, fraction: Option<f64>) {
        if count == 0 {
            return;
        }
        let weight = fraction.and_then(BlockWeight::from_fraction);
        let parts = &mut self.parts;
        self.tracker.change(|table, _| {
            update_all(parts, |part| table.add_output_blocks(part, count, weight))
        });
        self.notify(|id| ReservationEvent::OutputBlocks {
            id,
            count,
            fraction,
        });
    }

    /// Moves the first booking to the rank that `decide` returns, with the prefill and output
    /// recorded so far. Release, decision and booking are one critical section. `None` from
    /// `decide`, or a rank that is gone, only releases the booking. Returns whether it is booked
    /// afterwards. `decide` must be fast and must not call the tracker.
    pub fn relocate(
        &mut self,
        decide: impl FnOnce(&LoadView<'_>, &LoadBooking) -> Option<LoadBooking>,
    ) -> bool {
        let booked = self.parts.first_mut();
        let Some(part) = booked.filter(|part| part.share.is_some()) else {
            return false;
        };
        self.tracker.change(|table, now| {
            let to = decide(&LoadView::new(table, now), &part.booking);
            table.relocate(part, to, now)
        });
        let to = part.share.as_ref().map(|_| part.booking.clone());
        let is_booked = to.is_some();
        self.notify(|id| ReservationEvent::Moved { id, to });
        is_booked
    }

    /// Releases everything. Returns whether anything was still held.
    pub fn release(mut self) -> bool {
        self.release_all()
    }

    fn release_all(&mut self) -> bool {
        self.notify(ReservationEvent::Released);
        self.event_id = None;
        let is_held = self.is_active();
        let parts = &mut self.parts;
        is_held
            && self
                .tracker
                .change(|table, now| update_all(parts, |part| table.release(part, now)))
    }

    fn notify(&self, event: impl FnOnce(BookingId) -> ReservationEvent) {
        if let Some(id) = self.event_id {
            self.tracker.notify(event(id));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// Applies `change` to every part. Returns whether it changed any of them.
fn update_all(
    parts: &mut [ReservationPart],
    mut change: impl FnMut(&mut ReservationPart) -> bool,
) -> bool {
    parts
        .iter_mut()
        .fold(false, |changed, part| change(part) | changed)
}
