//! When Envoy sent a request to somebody else than it was told, because the chosen worker could not be reached: the load is
//! there now, and so is the cache. Everything that was booked or expected at the chosen worker rank moves in one step.

use super::placing::Booked;
use super::prepared::{Counting, Looked};
use super::{Router, destination, prepared};
use crate::fleet::{Fleet, Member};
use crate::health::Condition;
use crate::load::Booking;
use crate::worker::{Endpoint, WorkerRank};

/// What became of a booking once it was known who served the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// It is where it was.
    Unchanged,
    /// It is there now.
    To(WorkerRank),
    /// It was released: nobody whom we know serves the request.
    Away,
}

impl Router {
    /// Takes note of the endpoint that served a request. If it is another than the chosen one's, what was booked and
    /// expected there moves; a remote prefill stays where it was. Once is enough, a second word changes nothing. What is
    /// to be said of anybody's health is said by [`Router::answered`].
    pub fn served(&self, booked: &mut Booked, by: Endpoint) -> Moved {
        let by = by.canonical();
        if booked.route.to.endpoint.canonical() == by || booked.away == Some(by) {
            return Moved::Unchanged;
        }
        let fleet = self.fleet.load_full();
        let mut there: Vec<&Member> = fleet
            .members()
            .filter(|member| member.worker.endpoint.canonical() == by)
            .collect();
        if there
            .iter()
            .any(|member| member.worker.model == booked.route.model)
        {
            there.retain(|member| member.worker.model == booked.route.model);
        }
        let moved = self.relocate(booked, &there, &fleet);
        self.expect_at(booked, moved);
        match moved {
            Some(member) => {
                booked.route.to = destination(member);
                booked.away = None;
                Moved::To(member.rank)
            }
            None => {
                booked.away = Some(by);
                Moved::Away
            }
        }
    }

    /// Moves the booking to one of these; none where nobody is there any more.
    fn relocate<'f>(
        &self,
        booked: &mut Booked,
        there: &[&'f Member],
        fleet: &Fleet,
    ) -> Option<&'f Member> {
        let remote = booked.remote.clone();
        let looked =
            |(nth, hashes)| Looked::new(self.cached_where((nth, hashes), &remote, fleet), hashes);
        let prompts = booked
            .prompts
            .iter()
            .enumerate()
            .filter(|_| !there.is_empty());
        let looked: Vec<Looked> = prompts.map(looked).collect();
        let to = booked.route.to;
        // The request still names the rank that it was to go to.
        let named = to.several_ranks.then_some(to.rank.rank);
        let by_durations = self.settings().tracking.prefill_durations;
        let trust = self.trusted(&remote);
        let counting = |member: &Member| Counting {
            engine: trust.standing(member.rank).engine_block_size,
            as_reported: false,
        };
        let differing = booked.differing.clone();
        let mut found = None;
        let is_booked = booked.reservation.relocate(|view, before| {
            let loaded =
                |member: &&'f Member| Some((view.load(member.slot, member.rank)?, *member));
            let (_, member) = there
                .iter()
                .filter_map(loaded)
                .min_by_key(|(load, member)| {
                    (
                        Some(member.rank.rank) != named,
                        load.active_requests,
                        load.active_blocks,
                        member.rank,
                    )
                })?;
            found = Some(member);
            let cached_tokens = match differing.contains(&member.rank.worker) {
                true => 0,
                false => prepared::cached_tokens(&looked, member.slot, counting(member)),
            };
            let (slot, rank) = (member.slot, member.rank);
            let mut booking = Booking {
                slot,
                rank,
                cached_tokens,
                prefill_time: None,
                ..before.clone()
            };
            if by_durations {
                self.durations.estimate_one(member, &mut booking);
            }
            Some(booking)
        });
        self.scratch
            .give(looked.into_iter().map(|looked| looked.table));
        found.filter(|_| is_booked)
    }

    /// The prompts are not cached where they were to go, but where they went, as far as that is predicted.
    fn expect_at(&self, booked: &mut Booked, moved: Option<&Member>) {
        self.expect_booked(booked);
        let before = booked.predictions.answering.take();
        let generated = before.map_or(0, |prediction| prediction.revoke(&booked.prompts));
        let Some(member) =
            moved.filter(|member| member.worker.block_size == booked.route.block_size)
        else {
            return;
        };
        booked.predictions.answering = self.expect(member, &booked.prompts);
        booked
            .predictions
            .answering
            .iter_mut()
            .for_each(|prediction| prediction.grow(generated));
    }

    /// Whether a worker rank takes requests as far as we know: it is there, does not drain and is not out.
    pub fn is_usable(&self, rank: WorkerRank) -> bool {
        let fleet = self.fleet.load();
        let member = fleet.slot(rank).and_then(|slot| fleet.member(slot));
        let well = || self.health.standing(rank.worker, self.load.now()) != Condition::Out;
        member.is_some_and(|member| !member.worker.draining && well())
    }
}
