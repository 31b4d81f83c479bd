//! Placing as admission does it, and what a placed request holds: its reservation, the right to try a worker that was
//! out, and its lease on predicted blocks. All of it ends by drop.

use super::Router;
use std::time::Instant;

use super::answer::{Route, RouteError};
use super::leg::{Legs, Undecided};
use super::pools::Pools;
use super::prepared::Prepared;
use crate::admission::{Attempt, Gate, Placing};
use crate::block::BlockHashes;
use crate::fleet::Member;
use crate::health::{Condition, Probe};
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
    /// Who will have which of its prompts cached; whoever answers comes first. Empty where nothing is predicted.
    pub(super) expected: Vec<(Member, Vec<BlockHashes>)>,
    /// Its blocks, as far as they are predicted.
    pub leases: Vec<Lease>,
    /// Which of them grows with the answer.
    pub(super) answering: Option<usize>,
}

impl Booked {
    /// The answer fills one more block, on the worker rank that writes it.
    pub fn grow(&mut self) {
        if let Some(lease) = self.answering.and_then(|at| self.leases.get_mut(at)) {
            lease.grow(1);
        }
    }
}

impl Router {
    /// Takes the right to try chosen workers that were out. Only one request has it, or none would be spared.
    pub(super) fn probes(&self, legs: &Legs<'_>, pools: &Pools<'_>, now: Instant) -> Result<Vec<Probe>, Undecided> {
        let due = |member: &&Member| pools.standings.unwell.get(&member.rank.worker) == Some(&Condition::Due);
        let claim = |member: &Member| self.health.claim_probe(member.rank.worker, now).ok_or(Undecided::Outrun);
        legs.chosen().filter(due).map(claim).collect()
    }

    /// What will be cached where, once the request is sent.
    pub(super) fn expected(&self, prepared: &Prepared, legs: &Legs<'_>) -> Vec<(Member, Vec<BlockHashes>)> {
        let predicted = |member: &&Member| self.predictions.of(member).is_some();
        let blocks = prepared.request.prompt.blocks();
        legs.chosen().filter(predicted).map(|member| (member.clone(), blocks.to_vec())).collect()
    }

    /// The request is on its way: its prompts will be cached where it goes, as far as that is predicted.
    pub fn expect_booked(&self, booked: &mut Booked) {
        for (member, prompts) in booked.expected.drain(..) {
            let leases = prompts.iter().filter_map(|hashes| self.predictions.record(&member, hashes));
            let before = booked.leases.len();
            booked.leases.extend(leases);
            if member.rank == booked.route.to.rank && booked.leases.len() > before {
                booked.answering = Some(before);
            }
        }
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
        let attempt = Router::place(self, request, gate);
        let (Attempt::Busy, Some(bound)) = (&attempt, request.request.affinity) else { return attempt };
        // Soft affinity waits for nobody. If everybody is busy, it still holds at the next try.
        request.request.affinity = None;
        let attempt = Router::place(self, request, gate);
        if matches!(attempt, Attempt::Busy) {
            request.request.affinity = Some(bound);
        }
        attempt
    }

    fn refresh(&self, request: &mut Prepared) {
        self.look_up(request);
    }
}
