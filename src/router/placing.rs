//! Placing as admission does it, and what a placed request holds: its reservation, the right to try a worker that was
//! out, and its lease on predicted blocks. All of it ends by drop.

use super::Router;
use super::answer::{Route, RouteError};
use super::leg::Legs;
use super::prepared::Prepared;
use crate::admission::{Attempt, Gate, Placing};
use crate::health::Probe;
use crate::load::Reservation;
use crate::predict::Lease;

/// A routed request and everything it holds.
#[derive(Debug)]
pub struct Booked {
    /// Where to, and why.
    pub route: Route,
    /// Its share of the load.
    pub reservation: Reservation,
    /// Whether the request is the one that tries a worker that was out.
    pub probes: Vec<Probe>,
    /// Its blocks, as far as they are predicted.
    pub leases: Vec<Lease>,
}

impl Router {
    pub(super) fn booked(
        &self,
        prepared: &Prepared,
        legs: &Legs<'_>,
        route: Route,
        reservation: Reservation,
    ) -> Booked {
        let now = self.load.now();
        let chosen = || [Some(&legs.decode), legs.prefill.as_ref()].into_iter().flatten().map(|leg| leg.member());
        let probes = chosen().filter_map(|member| self.health.claim_probe(member.rank.worker, now)).collect();
        let blocks = prepared.request.prompt.blocks();
        let lease = |member| blocks.iter().filter_map(move |hashes| self.predictions.record(member, hashes));
        let leases = chosen().flat_map(lease).collect();
        Booked { route, reservation, probes, leases }
    }
}

impl Placing for Router {
    type Request = Prepared;
    type Placed = Booked;
    type Refusal = RouteError;

    fn workers(&self) -> usize {
        self.fleet.load().workers().count()
    }

    fn place(&self, request: &mut Prepared, gate: &Gate) -> Attempt<Booked, RouteError> {
        match Router::place(self, request, gate) {
            // Soft affinity waits for nobody.
            Attempt::Busy if request.request.affinity.take().is_some() => Router::place(self, request, gate),
            attempt => attempt,
        }
    }

    fn refresh(&self, request: &mut Prepared) {
        self.look_up(request);
    }
}
