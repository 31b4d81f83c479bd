//! Placing as admission does it, and what a placed request holds: its reservation, the right to try a worker that was
//! out, and its lease on predicted blocks. All of it ends by drop.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::Router;
use super::answer::{Route, RouteError};
use super::leg::{Legs, Undecided};
use super::pools::Pools;
use super::predictions::BookedPredictions;
use super::prepared::Prepared;
use super::question::Prefilled;
use super::remote::Remote;
use crate::admission::{Attempt, Gate, Placing};
use crate::block::BlockHashes;
use crate::fleet::Member;
use crate::health::{Condition, Probe};
use crate::load::Reservation;
use crate::parity::Sighting;
use crate::worker::{Endpoint, WorkerId, WorkerRank};

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
    pub predictions: BookedPredictions,
    /// The duty to look for its blocks when it was answered.
    pub(super) sighting: Option<Sighting>,
    /// Its prompts, as far as they are known, until it is known who serves it.
    pub(super) prompts: Vec<BlockHashes>,
    /// What was said of them by whoever keeps the index.
    pub(super) remote: Remote,
    /// Who will have them cached; whoever answers comes first. Empty where nothing is predicted.
    pub(super) expected: Vec<Member>,
    /// When it was placed.
    pub(super) placed: Instant,
    /// Who was chosen to answer, whoever did.
    pub(super) chosen: WorkerRank,
    /// Who made other tokens of its prompts than we do when it was placed.
    pub(super) differing: Arc<BTreeSet<WorkerId>>,
    /// Whether its prefill was over when it was placed.
    pub(super) took_over: bool,
    /// Who answered, where that is nobody whom we know.
    pub(super) away: Option<Endpoint>,
}

impl Booked {
    /// Its prompts, as far as they are known.
    pub fn prompts(&self) -> &[BlockHashes] {
        &self.prompts
    }

    /// Gives its prompts away, as far as they are known; it is over.
    pub fn take_prompts(&mut self) -> Vec<BlockHashes> {
        std::mem::take(&mut self.prompts)
    }

    /// It is known who serves it: what was said of its prompts elsewhere is not needed any longer.
    pub fn forget_remote(&mut self) {
        self.remote = Remote::NotAsked;
    }

    /// The answer fills one more block, on the worker rank that writes it.
    pub fn grow(&mut self) {
        self.predictions.grow();
    }
}

impl Router {
    /// The prefill of a request, once it is done, as whoever takes over has to know it; none where one worker does both
    /// phases, or whoever did it has left.
    pub fn prefilled_by(&self, route: &Route) -> Option<Prefilled> {
        let prefill = route.prefill()?.clone();
        let worker = self.fleet().worker(prefill.to.rank.worker)?.clone();
        Some(Prefilled { prefill, worker })
    }

    /// Handles a successful response: starts the self-test of the worker rank that computed the prompt.
    pub fn answered_well(&self, booked: &mut Booked) {
        if let Some(sighting) = booked.sighting.take() {
            sighting.answered(booked.route.computed_by().rank);
        }
    }

    /// Takes the right to try chosen workers that were out. Only one request has it, or none would be spared.
    pub(super) fn probes(
        &self,
        legs: &Legs<'_>,
        pools: &Pools<'_>,
        now: Instant,
    ) -> Result<Vec<Probe>, Undecided> {
        let due = |member: &&Member| {
            pools.standings.unwell.get(&member.rank.worker) == Some(&Condition::Due)
        };
        let claim = |member: &Member| {
            self.health
                .claim_probe(member.rank.worker, now)
                .ok_or(Undecided::Outrun)
        };
        legs.chosen().filter(due).map(claim).collect()
    }

    /// What will be cached where, once the request is sent.
    pub(super) fn expected(&self, legs: &Legs<'_>) -> Vec<Member> {
        legs.chosen()
            .filter(|member| self.predictions.any_of(member))
            .cloned()
            .collect()
    }

    /// Records that the request was sent: its prompts count as cached on its workers whose caches are predicted.
    pub fn expect_booked(&self, booked: &mut Booked) {
        for member in booked.expected.drain(..) {
            let prediction = self.expect(&member, &booked.prompts);
            match member.rank == booked.chosen {
                true => booked.predictions.answering = prediction,
                false => booked.predictions.prefilling = prediction,
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
        let (Attempt::Busy, Some(bound)) = (&attempt, request.request.affinity) else {
            return attempt;
        };
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
