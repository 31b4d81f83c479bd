//! Requests that Envoy sent to another endpoint than the chosen one, because that could not be
//! reached. Load and predictions of the chosen rank move to the serving rank in one step.

use super::context::{PromptOverlaps, TokenCounting, cached_tokens};
use super::placement::Placement;
use super::route::RankEndpoint;
use super::state::Router;
use crate::fleet::{Fleet, FleetMember};
use crate::load::{ActiveLoad, LoadBooking, LoadView};
use crate::policy::WorkerAvailability;
use crate::worker::{DpRank, WorkerEndpoint, WorkerRank};

/// Effect of the serving endpoint on a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelocationOutcome {
    /// The chosen worker served the request.
    Unchanged,
    /// The booking moved to this rank.
    Moved(WorkerRank),
    /// The booking was released, because no known worker serves the request.
    Released,
}

impl Router {
    /// Handles the endpoint that served a request. If it is not the chosen one, load and
    /// predictions move there; a remote prefill stays. Repeated calls have no effect. Health is
    /// reported by [`Router::on_response`] instead.
    pub fn on_served_by(&self, placement: &mut Placement, by: WorkerEndpoint) -> RelocationOutcome {
        let by = by.canonical();
        if placement.route.to.is_served_from(by) || placement.unknown_endpoint == Some(by) {
            return RelocationOutcome::Unchanged;
        }
        let fleet = self.fleet.load_full();
        let mut serving: Vec<&FleetMember> = fleet
            .members()
            .filter(|member| member.worker.owns(by))
            .collect();
        let has_model = |member: &&FleetMember| member.worker.model == placement.route.model;
        if serving.iter().any(has_model) {
            serving.retain(has_model);
        }
        let moved = self.relocate(placement, &serving, &fleet);
        self.move_predictions(placement, moved);
        match moved {
            Some(member) => {
                placement.route.to = RankEndpoint::of(member);
                placement.unknown_endpoint = None;
                RelocationOutcome::Moved(member.rank)
            }
            None => {
                placement.unknown_endpoint = Some(by);
                RelocationOutcome::Released
            }
        }
    }

    /// Moves the booking to one of the serving members. Returns `None` if all of them have left.
    fn relocate<'f>(
        &self,
        placement: &mut Placement,
        serving: &[&'f FleetMember],
        fleet: &Fleet,
    ) -> Option<&'f FleetMember> {
        let remote = placement.remote_overlaps.clone();
        let overlaps: Vec<PromptOverlaps> = placement
            .prompts
            .iter()
            .enumerate()
            .filter(|_| !serving.is_empty())
            .map(|(index, hashes)| {
                let table = self.lookup.find_overlaps(index, hashes, &remote, fleet);
                PromptOverlaps::new(table, hashes)
            })
            .collect();
        let to = placement.route.to;
        // The request headers still name the rank of the first choice.
        let named = to.several_ranks.then_some(to.rank.rank);
        let estimates_prefills = self.settings().tracking.prefill_decay;
        let freshness = self.lookup.freshness_table(&remote);
        let recomputing_workers = self.feedback.last_blocks.recomputing_workers();
        let counting = |member: &FleetMember| TokenCounting {
            engine_block_size: freshness.status(member.rank).engine_block_size,
            excludes_last_token: false,
            recomputes_last_block: recomputing_workers.contains(&member.rank.worker),
        };
        let mismatched_workers = placement.mismatched_workers.clone();
        let is_booked = placement.reservation.relocate(|view, before| {
            let member = least_loaded(view, serving, named)?;
            let has_mismatch = mismatched_workers.contains(&member.rank.worker);
            let cached = if has_mismatch {
                0
            } else {
                cached_tokens(&overlaps, member.slot, counting(member))
            };
            let mut booking = LoadBooking {
                slot: member.slot,
                rank: member.rank,
                cached_tokens: cached,
                prefill_time: None,
                ..before.clone()
            };
            if estimates_prefills {
                booking.prefill_time = view.prefill_time(&booking);
            }
            Some(booking)
        });
        self.lookup
            .buffers
            .release(overlaps.into_iter().map(|prompt| prompt.table));
        let booked = placement.reservation.rank().filter(|_| is_booked)?;
        serving.iter().copied().find(|member| member.rank == booked)
    }

    /// Moves the predictions from the chosen rank to the serving one.
    fn move_predictions(&self, placement: &mut Placement, moved: Option<&FleetMember>) {
        self.predict_placement(placement);
        let before = placement.predictions.answering.take();
        let generated = before.map_or(0, |prediction| prediction.revoke(&placement.prompts));
        let Some(member) =
            moved.filter(|member| member.worker.block_size == placement.route.block_size)
        else {
            return;
        };
        let mut prediction = self.lookup.predictors.predict(member, &placement.prompts);
        if let Some(prediction) = &mut prediction {
            prediction.add_output_blocks(generated);
        }
        placement.predictions.answering = prediction;
    }

    /// Returns whether a rank is in the fleet, not draining and not ejected.
    pub fn is_usable(&self, rank: WorkerRank) -> bool {
        let fleet = self.fleet.load();
        let member = fleet.slot(rank).and_then(|slot| fleet.member(slot));
        let availability = || {
            let health = &self.feedback.health;
            WorkerAvailability::from(health.rank_health(rank, self.load.now()))
        };
        member.is_some_and(|member| {
            !member.worker.draining && availability() == WorkerAvailability::Ready
        })
    }
}

/// Returns the member with the rank that the headers name, or else the least loaded one.
fn least_loaded<'f>(
    view: &LoadView<'_>,
    members: &[&'f FleetMember],
    named: Option<DpRank>,
) -> Option<&'f FleetMember> {
    let with_load =
        |member: &&'f FleetMember| Some((view.load(member.slot, member.rank)?, *member));
    let preference = |(load, member): &(ActiveLoad, &FleetMember)| {
        (
            Some(member.rank.rank) != named,
            load.active_requests,
            load.active_blocks,
            member.rank,
        )
    };
    let (_, member) = members
        .iter()
        .filter_map(with_load)
        .min_by_key(preference)?;
    Some(member)
}
