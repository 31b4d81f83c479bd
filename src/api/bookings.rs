//! Everything that requests booked through the service hold. The ledger knows their reservations and decides how long they
//! last; what else belongs to a request (the right to try a worker, its hold on predicted blocks, its session) lies beside
//! it under the same name, and goes when the reservation goes.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::fault::Fault;
use crate::entrance::Admitted;
use crate::health::Probe;
use crate::load::ledger::{Attempt, Change, Counts, Ledger, Refused, Rules};
use crate::load::{Booking, LoadTracker};
use crate::predict::Lease;
use crate::router::{Booked, Foreign, Route, Router};
use crate::sessions::Hold;
use crate::worker::WorkerRank;

/// All bookings.
pub(super) struct Bookings {
    state: Mutex<State>,
}

struct State {
    ledger: Ledger,
    /// By request, as in the ledger. What is here and not there any longer is dropped at the next occasion.
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
    pub(super) fn new(load: Arc<LoadTracker>, rules: Rules) -> Self {
        Self { state: Mutex::new(State { ledger: Ledger::new(load, rules), beside: HashMap::new() }) }
    }

    /// The route that the attempt got before, if it is booked; refused where another attempt is.
    pub(super) fn again(&self, attempt: Attempt<'_>) -> Result<Option<Arc<Route>>, Fault> {
        self.state.lock().again(attempt)
    }

    /// Keeps what was booked for a request. Where the same attempt has been booked meanwhile, that stays, and this goes.
    pub(super) fn keep(&self, attempt: Attempt<'_>, admitted: Admitted) -> Result<Kept<Arc<Route>>, Fault> {
        let Admitted { booked: Booked { route, reservation, probes, leases }, session } = admitted;
        let route = Arc::new(route);
        let beside =
            Beside { attempt: attempt.number, route: Some(route.clone()), leases, _probes: probes, _session: session };
        let mut state = self.state.lock();
        if let Some(route) = state.again(attempt)? {
            return Ok(Kept::Before(route));
        }
        state.ledger.keep(attempt, reservation)?;
        let replaced = state.beside.insert(attempt.request.to_owned(), beside);
        drop(state);
        drop(replaced);
        Ok(Kept::Now(route))
    }

    /// Books what somebody else routed. The same once more finds what was booked before.
    pub(super) fn add(&self, attempt: Attempt<'_>, foreign: &Foreign, router: &Router) -> Result<Kept<Booking>, Fault> {
        let mut state = self.state.lock();
        if let Some(booked) = state.ledger.get(attempt).and_then(|reservation| reservation.bookings().next().cloned()) {
            if booked.rank != foreign.booking.rank {
                return Err(booked_elsewhere(attempt, booked.rank));
            }
            state.ledger.touch(attempt);
            return Ok(Kept::Before(booked));
        }
        state.ledger.add(attempt, vec![foreign.booking.clone()])?;
        let leases = router.expect_cached(foreign);
        let beside = Beside { attempt: attempt.number, route: None, leases, _probes: Vec::new(), _session: None };
        let replaced = state.beside.insert(attempt.request.to_owned(), beside);
        drop(state);
        drop(replaced);
        Ok(Kept::Now(foreign.booking.clone()))
    }

    pub(super) fn mark_prefill_completed(&self, attempt: Attempt<'_>) -> Result<Change, Fault> {
        let mut state = self.state.lock();
        state.booked(attempt)?;
        Ok(state.ledger.mark_prefill_completed(attempt))
    }

    pub(super) fn output_block(&self, attempt: Attempt<'_>, fraction: Option<f64>) -> Result<(), Fault> {
        let mut state = self.state.lock();
        state.booked(attempt)?;
        state.ledger.output_block(attempt, fraction);
        let beside = state.beside.get_mut(attempt.request).filter(|beside| beside.attempt == attempt.number);
        beside.into_iter().flat_map(|beside| &mut beside.leases).for_each(|lease| lease.grow(1));
        Ok(())
    }

    pub(super) fn free(&self, attempt: Attempt<'_>) -> Change {
        let mut state = self.state.lock();
        let change = state.ledger.free(attempt);
        let own = state.beside.get(attempt.request).is_some_and(|beside| beside.attempt == attempt.number);
        let freed = own.then(|| state.beside.remove(attempt.request));
        drop(state);
        drop(freed);
        change
    }

    /// Ends what was silent for too long; says how many.
    pub(super) fn expire(&self) -> usize {
        let mut state = self.state.lock();
        let silent = state.ledger.expire();
        let State { ledger, beside } = &mut *state;
        let ended = |request: &str, attempt| ledger.get(Attempt { request, number: attempt }).is_none();
        let gone: Vec<_> = beside.extract_if(|request, beside| ended(request, beside.attempt)).collect();
        drop(state);
        drop(gone);
        silent
    }

    /// Reservations, and what lies beside them.
    pub(super) fn counts(&self) -> (Counts, usize) {
        let state = self.state.lock();
        (state.ledger.counts(), state.beside.len())
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
