//! Bookings made through the gRPC service. The ledger holds the reservations and decides when they
//! expire. Everything else that belongs to a request (health probes, predictions, the session) is
//! stored beside the reservation and dropped with it.

use std::sync::Arc;

use parking_lot::Mutex;
use warmroute_core::health::TrackedRequest;
use warmroute_core::load::ledger::{
    self, AttemptState, BookingLedger, LedgerChange, LedgerRules, RequestAttempt,
};
use warmroute_core::load::{LoadBooking, LoadTracker};
use warmroute_core::router::{ExternalBooking, Placement, RequestPredictions, Route, Router};
use warmroute_core::sessions::SessionLease;
use warmroute_core::worker::WorkerRank;
use warmroute_metrics::Metrics;

use super::error::ApiError;
use crate::dispatch::{ActiveRequest, log_health_changes};
use crate::proto::router::BookingOutcome;

/// Table of all bookings.
pub(super) struct BookingTable {
    ledger: Mutex<ExtrasLedger>,
    metrics: Arc<Metrics>,
}

type ExtrasLedger = BookingLedger<BookingExtras>;

/// Guards and results of a request beside its reservation.
#[derive(Default)]
struct BookingExtras {
    /// The returned route, if the service routed the request.
    route: Option<Arc<Route>>,
    summary: Option<BookingSummary>,
    predictions: RequestPredictions,
    tracked: Vec<TrackedRequest>,
    _session: Option<SessionLease>,
}

impl ledger::BookingAttachment for BookingExtras {
    /// Drops the guards and retains the results for repeated calls.
    fn on_booking_end(&mut self) {
        *self = Self {
            route: self.route.take(),
            summary: self.summary,
            ..Self::default()
        };
    }
}

/// First booking of a request: the rank and its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BookingSummary {
    pub(super) rank: WorkerRank,
    pub(super) prefill_tokens: u64,
    pub(super) prompt_blocks: u64,
}

impl BookingSummary {
    fn new(booking: &LoadBooking) -> Self {
        let uncached = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        let prefill_tokens = if booking.track_prefill { uncached } else { 0 };
        Self {
            rank: booking.rank,
            prefill_tokens,
            prompt_blocks: booking.sequences.block_count() as u64,
        }
    }
}

impl BookingTable {
    pub(super) fn new(load: Arc<LoadTracker>, rules: LedgerRules, metrics: Arc<Metrics>) -> Self {
        Self {
            ledger: Mutex::new(BookingLedger::new(load, rules)),
            metrics,
        }
    }

    /// Returns the route of an earlier call of the same attempt, or an error if the attempt cannot
    /// be booked. Earlier attempts end here, before this attempt waits in the queue.
    pub(super) fn find_route(
        &self,
        attempt: RequestAttempt<'_>,
    ) -> Result<Option<Arc<Route>>, ApiError> {
        self.update(|ledger| find_route(ledger, attempt))
    }

    /// Stores the booking of a routed request. If the same attempt was booked in the meantime, that
    /// booking stays and this one is dropped.
    pub(super) fn store(
        &self,
        attempt: RequestAttempt<'_>,
        active: ActiveRequest,
    ) -> Result<(Arc<Route>, BookingOutcome), ApiError> {
        let ActiveRequest {
            placement:
                Placement {
                    route,
                    reservation,
                    tracked,
                    predictions,
                    ..
                },
            session,
            ..
        } = active;
        let route = Arc::new(route);
        let summary = reservation.bookings().next().map(BookingSummary::new);
        self.update(|ledger| {
            if let Some(route) = find_route(ledger, attempt)? {
                return Ok((route, BookingOutcome::AlreadyBooked));
            }
            ledger.adopt(attempt, reservation)?;
            set_extras(
                ledger,
                attempt,
                BookingExtras {
                    route: Some(route.clone()),
                    summary,
                    predictions,
                    tracked,
                    _session: session,
                },
            );
            Ok((route, BookingOutcome::Booked))
        })
    }

    /// Books a request that the caller routed. A repeated call returns the existing booking.
    pub(super) fn add_external(
        &self,
        attempt: RequestAttempt<'_>,
        external: &ExternalBooking,
        router: &Router,
    ) -> Result<(BookingSummary, BookingOutcome), ApiError> {
        self.update(|ledger| {
            if let Some(AttemptState::Booked(_, extras) | AttemptState::Ended(extras)) =
                ledger.attempt_state(attempt)
                && let Some(summary) = extras.summary
            {
                if summary.rank != external.booking.rank {
                    return Err(rank_mismatch_error(attempt, summary.rank));
                }
                ledger.touch(attempt);
                return Ok((summary, BookingOutcome::AlreadyBooked));
            }
            ledger.add(attempt, vec![external.booking.clone()])?;
            let summary = BookingSummary::new(&external.booking);
            let predictions = router.predict_external(external);
            set_extras(
                ledger,
                attempt,
                BookingExtras {
                    summary: Some(summary),
                    predictions,
                    ..BookingExtras::default()
                },
            );
            Ok((summary, BookingOutcome::Booked))
        })
    }

    /// Records the first token: the prefill ends, its duration is learned, and the workers count
    /// as healthy.
    pub(super) fn mark_prefill_completed(
        &self,
        attempt: RequestAttempt<'_>,
        router: &Router,
    ) -> Result<LedgerChange, ApiError> {
        self.update(|ledger| {
            let (reservation, mut tracked) = match ledger.attempt_state(attempt) {
                Some(AttemptState::Booked(reservation, extras)) => {
                    (reservation, std::mem::take(&mut extras.tracked))
                }
                Some(AttemptState::Ended(_)) => return Ok(LedgerChange::Unchanged),
                None => return Err(not_booked_error(attempt)),
            };
            let ranks: Vec<_> = reservation.booked_slots().map(|(_, rank)| rank).collect();
            let change = ledger.mark_prefill_completed(attempt);
            if change == LedgerChange::Applied || !tracked.is_empty() {
                report_status(router, &ranks, &mut tracked, 200);
            }
            Ok(change)
        })
    }

    pub(super) fn add_output_block(
        &self,
        attempt: RequestAttempt<'_>,
        fraction: Option<f64>,
    ) -> Result<(), ApiError> {
        self.update(|ledger| {
            match ledger.attempt_state(attempt) {
                Some(AttemptState::Booked(_, extras)) => extras.predictions.add_output_block(),
                Some(AttemptState::Ended(_)) | None => return Err(not_booked_error(attempt)),
            }
            ledger.add_output_block(attempt, fraction);
            Ok(())
        })
    }

    /// Releases the booking and records the worker's HTTP status, if given.
    pub(super) fn free(
        &self,
        attempt: RequestAttempt<'_>,
        status: Option<u16>,
        router: &Router,
    ) -> LedgerChange {
        self.update(|ledger| {
            if let Some(AttemptState::Booked(reservation, extras)) = ledger.attempt_state(attempt)
                && let (Some(rank), Some(status)) = (reservation.rank(), status)
            {
                let mut tracked = std::mem::take(&mut extras.tracked);
                report_status(router, &[rank], &mut tracked, status);
            }
            ledger.free(attempt)
        })
    }

    /// Releases expired bookings and returns their number.
    pub(super) fn expire(&self) -> usize {
        self.update(|ledger| ledger.expire())
    }

    /// Runs a change under the lock. The ledger may drop reservations in any call, so the metrics
    /// are updated afterwards.
    fn update<T>(&self, change: impl FnOnce(&mut ExtrasLedger) -> T) -> T {
        let mut ledger = self.ledger.lock();
        let expired = ledger.counts().expired;
        let changed = change(&mut ledger);
        let counts = ledger.counts();
        self.metrics.api.bookings.set(counts.bookings as i64);
        self.metrics
            .api
            .expired_bookings
            .inc_by(counts.expired - expired);
        changed
    }
}

fn find_route(
    ledger: &mut ExtrasLedger,
    attempt: RequestAttempt<'_>,
) -> Result<Option<Arc<Route>>, ApiError> {
    let extras = match ledger.attempt_state(attempt) {
        Some(AttemptState::Booked(_, extras) | AttemptState::Ended(extras)) => extras,
        None => {
            ledger.ensure_capacity(attempt)?;
            return Ok(None);
        }
    };
    match (extras.route.clone(), extras.summary) {
        (Some(route), _) => {
            ledger.touch(attempt);
            Ok(Some(route))
        }
        // Booked by `AddRequest`: there is no route to return.
        (None, Some(summary)) => Err(rank_mismatch_error(attempt, summary.rank)),
        (None, None) => Ok(None),
    }
}

fn set_extras(ledger: &mut ExtrasLedger, attempt: RequestAttempt<'_>, new: BookingExtras) {
    if let Some(AttemptState::Booked(_, extras)) = ledger.attempt_state(attempt) {
        *extras = new;
    }
}

/// Reports the HTTP status of a response to the health of its ranks, and logs the changes.
fn report_status(
    router: &Router,
    ranks: &[WorkerRank],
    tracked: &mut [TrackedRequest],
    status: u16,
) {
    log_health_changes(router, router.report_status(ranks, tracked, status));
}

fn not_booked_error(attempt: RequestAttempt<'_>) -> ApiError {
    ApiError::NotBooked {
        request: attempt.request.to_owned(),
        number: attempt.number,
    }
}

fn rank_mismatch_error(attempt: RequestAttempt<'_>, rank: WorkerRank) -> ApiError {
    ApiError::RankMismatch {
        request: attempt.request.to_owned(),
        number: attempt.number,
        rank,
    }
}

#[cfg(test)]
mod tests;
