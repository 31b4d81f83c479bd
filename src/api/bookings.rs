//! Everything that requests booked through the service hold. The ledger knows their reservations and decides how long they
//! last; what else belongs to a request (the right to try a worker, its hold on predicted blocks, its session) lies beside
//! it under the same name, and goes when the reservation goes.

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::info;

use super::fault::Fault;
use crate::entrance::Admitted;
use crate::health::{self, Probe};
use crate::load::ledger::{self, Attempt, Change, Known, Ledger, Rules};
use crate::load::{Booking, LoadTracker};
use crate::metrics::Metrics;
use crate::router::{Booked, BookedPredictions, Foreign, Route, Router};
use crate::sessions::Hold;
use crate::worker::{WorkerId, WorkerRank};

/// All bookings.
pub(super) struct Bookings {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

struct State {
    ledger: Ledger<Beside>,
}

/// What a request holds beside its reservation.
#[derive(Default)]
struct Beside {
    /// The answer it got, if it was routed here.
    route: Option<Arc<Route>>,
    added: Option<Added>,
    predictions: BookedPredictions,
    probes: Vec<Probe>,
    _session: Option<Hold>,
}

impl ledger::Beside for Beside {
    /// Only the answers stay, for who asks again.
    fn end(&mut self) {
        *self = Self {
            route: self.route.take(),
            added: self.added,
            ..Self::default()
        };
    }
}

/// Where a request is booked first of all, and what it counts for there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Added {
    pub(super) rank: WorkerRank,
    pub(super) prefill_tokens: u64,
    pub(super) prompt_blocks: u64,
}

impl Added {
    fn of(booking: &Booking) -> Self {
        let uncached = booking.prompt_tokens.saturating_sub(booking.cached_tokens);
        let prefill_tokens = if booking.track_prefill { uncached } else { 0 };
        Self {
            rank: booking.rank,
            prefill_tokens,
            prompt_blocks: booking.sequences.blocks() as u64,
        }
    }
}

/// What became of a booking.
#[derive(Clone, Debug)]
pub(super) enum Kept<T> {
    /// It was booked now.
    Now(T),
    /// The same attempt had booked before.
    Before(T),
}

impl Bookings {
    pub(super) fn new(load: Arc<LoadTracker>, rules: Rules, metrics: Arc<Metrics>) -> Self {
        Self {
            state: Mutex::new(State {
                ledger: Ledger::new(load, rules),
            }),
            metrics,
        }
    }

    /// The route that the attempt got before, if it is or was booked; refused where it could not be booked. An earlier
    /// attempt ends here, and not only when this one has had its turn.
    pub(super) fn again(&self, attempt: Attempt<'_>) -> Result<Option<Arc<Route>>, Fault> {
        self.change(|state| state.again(attempt))
    }

    /// Keeps what was booked for a request. Where the same attempt has been booked meanwhile, that stays, and this goes.
    pub(super) fn keep(
        &self,
        attempt: Attempt<'_>,
        admitted: Admitted,
    ) -> Result<Kept<Arc<Route>>, Fault> {
        let Admitted {
            booked:
                Booked {
                    route,
                    reservation,
                    probes,
                    predictions,
                    ..
                },
            session,
            ..
        } = admitted;
        let (route, added) = (
            Arc::new(route),
            reservation.bookings().next().map(Added::of),
        );
        self.change(|state| {
            if let Some(route) = state.again(attempt)? {
                return Ok(Kept::Before(route));
            }
            state.ledger.keep(attempt, reservation)?;
            state.beside(
                attempt,
                Beside {
                    route: Some(route.clone()),
                    added,
                    predictions,
                    probes,
                    _session: session,
                },
            );
            Ok(Kept::Now(route))
        })
    }

    /// Books what somebody else routed. The same once more finds what was booked before.
    pub(super) fn add(
        &self,
        attempt: Attempt<'_>,
        foreign: &Foreign,
        router: &Router,
    ) -> Result<Kept<Added>, Fault> {
        self.change(|state| {
            if let Some(Known::Booked(_, _, beside) | Known::Ended(beside)) =
                state.ledger.known(attempt)
                && let Some(added) = beside.added
            {
                if added.rank != foreign.booking.rank {
                    return Err(booked_elsewhere(attempt, added.rank));
                }
                state.ledger.touch(attempt);
                return Ok(Kept::Before(added));
            }
            state.ledger.add(attempt, vec![foreign.booking.clone()])?;
            let added = Added::of(&foreign.booking);
            let predictions = router.expect_cached(foreign);
            state.beside(
                attempt,
                Beside {
                    added: Some(added),
                    predictions,
                    ..Beside::default()
                },
            );
            Ok(Kept::Now(added))
        })
    }

    /// The first token came: the workers answer, and the prefill took so long.
    pub(super) fn mark_prefill_completed(
        &self,
        attempt: Attempt<'_>,
        router: &Router,
    ) -> Result<Change, Fault> {
        self.change(|state| {
            let (held, since, probes) = match state.ledger.known(attempt) {
                Some(Known::Booked(held, since, beside)) => {
                    (held, since, std::mem::take(&mut beside.probes))
                }
                Some(Known::Ended(_)) => return Ok(Change::None),
                None => return Err(not_booked(attempt)),
            };
            let workers: Vec<_> = held.parts().map(|(_, rank)| rank.worker).collect();
            let prefill = held
                .bookings()
                .find(|booking| booking.track_prefill)
                .cloned();
            let change = state.ledger.mark_prefill_completed(attempt);
            if change == Change::Applied {
                let took = router.load().now().saturating_duration_since(since);
                prefill
                    .iter()
                    .for_each(|booking| router.prefill_took(booking, took));
            }
            if change == Change::Applied || !probes.is_empty() {
                tell(router.heard(&workers, probes, 200), 200);
            }
            Ok(change)
        })
    }

    pub(super) fn output_block(
        &self,
        attempt: Attempt<'_>,
        fraction: Option<f64>,
    ) -> Result<(), Fault> {
        self.change(|state| {
            match state.ledger.known(attempt) {
                Some(Known::Booked(_, _, beside)) => beside.predictions.grow(),
                Some(Known::Ended(_)) | None => return Err(not_booked(attempt)),
            }
            state.ledger.output_block(attempt, fraction);
            Ok(())
        })
    }

    /// The request has ended, perhaps with a status of the worker that answers.
    pub(super) fn free(
        &self,
        attempt: Attempt<'_>,
        status: Option<u16>,
        router: &Router,
    ) -> Change {
        self.change(|state| {
            if let Some(Known::Booked(held, _, beside)) = state.ledger.known(attempt)
                && let (Some(rank), Some(status)) = (held.rank(), status)
            {
                tell(
                    router.heard(&[rank.worker], std::mem::take(&mut beside.probes), status),
                    status,
                );
            }
            state.ledger.free(attempt)
        })
    }

    /// Ends what was silent for too long; says how many.
    pub(super) fn expire(&self) -> usize {
        self.change(|state| state.ledger.expire())
    }

    /// Changes something. The ledger may drop reservations on any occasion, so it is counted afterwards.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let expired = state.ledger.counts().expired;
        let changed = change(&mut state);
        let counts = state.ledger.counts();
        self.metrics.api_bookings.set(counts.bookings as i64);
        self.metrics
            .api_bookings_expired
            .inc_by(counts.expired - expired);
        changed
    }
}

impl State {
    fn again(&mut self, attempt: Attempt<'_>) -> Result<Option<Arc<Route>>, Fault> {
        let beside = match self.ledger.known(attempt) {
            Some(Known::Booked(_, _, beside) | Known::Ended(beside)) => beside,
            None => {
                self.ledger.make_room(attempt)?;
                return Ok(None);
            }
        };
        match (beside.route.clone(), beside.added) {
            (Some(route), _) => {
                self.ledger.touch(attempt);
                Ok(Some(route))
            }
            // Booked by `AddRequest`: there is no answer to give again.
            (None, Some(added)) => Err(booked_elsewhere(attempt, added.rank)),
            (None, None) => Ok(None),
        }
    }

    fn beside(&mut self, attempt: Attempt<'_>, new: Beside) {
        if let Some(Known::Booked(_, _, beside)) = self.ledger.known(attempt) {
            *beside = new;
        }
    }
}

fn tell(changes: Vec<(WorkerId, health::Change)>, status: u16) {
    for (worker, change) in changes {
        info!(%worker, status, ?change, "the health of a worker changed");
    }
}

fn not_booked(attempt: Attempt<'_>) -> Fault {
    Fault::NotBooked {
        request: attempt.request.to_owned(),
        number: attempt.number,
    }
}

fn booked_elsewhere(attempt: Attempt<'_>, rank: WorkerRank) -> Fault {
    Fault::BookedElsewhere {
        request: attempt.request.to_owned(),
        number: attempt.number,
        rank,
    }
}

#[cfg(test)]
mod tests;
