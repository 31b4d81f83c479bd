//! Everything that requests booked through the service hold. The ledger knows their reservations and decides how long they
//! last; what else belongs to a request (the right to try a worker, its hold on predicted blocks, its session) lies beside
//! it under the same name, and goes when the reservation goes.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::fault::Fault;
use crate::entrance::Admitted;
use crate::health::Probe;
use crate::load::ledger::{Attempt, Change, Ledger, Refused, Rules};
use crate::load::{Booking, LoadTracker};
use crate::metrics::Metrics;
use crate::predict::Lease;
use crate::router::{Booked, Foreign, Route, Router};
use crate::sessions::Hold;
use crate::worker::WorkerRank;

/// All bookings.
pub(super) struct Bookings {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

struct State {
    ledger: Ledger,
    /// By request, as in the ledger.
    beside: HashMap<String, Beside>,
}

/// What a request holds beside its reservation.
struct Beside {
    attempt: u64,
    /// The answer it got, if it was routed here.
    route: Option<Arc<Route>>,
    leases: Vec<Lease>,
    _probes: Vec<Probe>,
    _session: Option<Hold>,
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
        Self { state: Mutex::new(State { ledger: Ledger::new(load, rules), beside: HashMap::new() }), metrics }
    }

    /// The route that the attempt got before, if it is booked; refused where another attempt is.
    pub(super) fn again(&self, attempt: Attempt<'_>) -> Result<Option<Arc<Route>>, Fault> {
        self.change(|state| state.again(attempt))
    }

    /// Keeps what was booked for a request. Where the same attempt has been booked meanwhile, that stays, and this goes.
    pub(super) fn keep(&self, attempt: Attempt<'_>, admitted: Admitted) -> Result<Kept<Arc<Route>>, Fault> {
        let Admitted { booked: Booked { route, reservation, probes, leases, .. }, session } = admitted;
        let route = Arc::new(route);
        let beside =
            Beside { attempt: attempt.number, route: Some(route.clone()), leases, _probes: probes, _session: session };
        self.change(|state| {
            if let Some(route) = state.again(attempt)? {
                return Ok(Kept::Before(route));
            }
            state.ledger.keep(attempt, reservation)?;
            state.beside.insert(attempt.request.to_owned(), beside);
            Ok(Kept::Now(route))
        })
    }

    /// Books what somebody else routed. The same once more finds what was booked before.
    pub(super) fn add(&self, attempt: Attempt<'_>, foreign: &Foreign, router: &Router) -> Result<Kept<Booking>, Fault> {
        self.change(|state| {
            let booked = state.ledger.get(attempt).and_then(|reservation| reservation.bookings().next().cloned());
            if let Some(booked) = booked {
                if booked.rank != foreign.booking.rank {
                    return Err(booked_elsewhere(attempt, booked.rank));
                }
                state.ledger.touch(attempt);
                return Ok(Kept::Before(booked));
            }
            state.ledger.add(attempt, vec![foreign.booking.clone()])?;
            let beside = Beside {
                attempt: attempt.number,
                route: None,
                leases: router.expect_cached(foreign),
                _probes: Vec::new(),
                _session: None,
            };
            state.beside.insert(attempt.request.to_owned(), beside);
            Ok(Kept::Now(foreign.booking.clone()))
        })
    }

    pub(super) fn mark_prefill_completed(&self, attempt: Attempt<'_>) -> Result<Change, Fault> {
        self.change(|state| {
            state.booked(attempt)?;
            Ok(state.ledger.mark_prefill_completed(attempt))
        })
    }

    pub(super) fn output_block(&self, attempt: Attempt<'_>, fraction: Option<f64>) -> Result<(), Fault> {
        self.change(|state| {
            state.booked(attempt)?;
            state.ledger.output_block(attempt, fraction);
            let beside = state.beside.get_mut(attempt.request).filter(|beside| beside.attempt == attempt.number);
            beside.into_iter().flat_map(|beside| &mut beside.leases).for_each(|lease| lease.grow(1));
            Ok(())
        })
    }

    pub(super) fn free(&self, attempt: Attempt<'_>) -> Change {
        self.change(|state| {
            let own = state.beside.get(attempt.request).is_some_and(|beside| beside.attempt == attempt.number);
            if own {
                // So that nobody has to be looked for.
                state.beside.remove(attempt.request);
            }
            state.ledger.free(attempt)
        })
    }

    /// Ends what was silent for too long; says how many.
    pub(super) fn expire(&self) -> usize {
        self.change(|state| state.ledger.expire())
    }

    /// Changes something. The ledger may drop reservations on any occasion, and what belonged to them goes with them.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let expired = state.ledger.counts().expired;
        let changed = change(&mut state);
        let State { ledger, beside } = &mut *state;
        let counts = ledger.counts();
        self.metrics.api_bookings.set(counts.bookings as i64);
        self.metrics.api_bookings_expired.inc_by(counts.expired - expired);
        if beside.len() > counts.bookings {
            beside.retain(|request, beside| ledger.get(Attempt { request, number: beside.attempt }).is_some());
        }
        changed
    }
}

impl State {
    fn again(&mut self, attempt: Attempt<'_>) -> Result<Option<Arc<Route>>, Fault> {
        let beside = self.beside.get(attempt.request);
        if let Some(other) = beside.map(|beside| beside.attempt).filter(|other| *other != attempt.number)
            && self.ledger.get(Attempt { number: other, ..attempt }).is_some()
        {
            // Known before it has waited for its turn, and not only then.
            return Err(Refused::Booked { attempt: other }.into());
        }
        let Some(reservation) = self.ledger.get(attempt) else { return Ok(None) };
        match (beside.and_then(|beside| beside.route.clone()), reservation.rank()) {
            (Some(route), _) => {
                self.ledger.touch(attempt);
                Ok(Some(route))
            }
            // Booked by `AddRequest`: there is no answer to give again.
            (None, Some(rank)) => Err(booked_elsewhere(attempt, rank)),
            (None, None) => Ok(None),
        }
    }

    fn booked(&self, attempt: Attempt<'_>) -> Result<(), Fault> {
        let not_booked = || Fault::NotBooked { request: attempt.request.to_owned(), number: attempt.number };
        self.ledger.get(attempt).map(drop).ok_or_else(not_booked)
    }
}

fn booked_elsewhere(attempt: Attempt<'_>, rank: WorkerRank) -> Fault {
    Fault::BookedElsewhere { request: attempt.request.to_owned(), number: attempt.number, rank }
}

#[cfg(test)]
mod tests;
