//! Steps of a decision: [`Router::prepare`] looks up everything that does not depend on load, and
//! [`Router::place`] chooses and books.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{PromptBlocks, PromptOverlaps, RoutingContext};
use super::phase_decider::PhaseDecider;
use super::phase_plan::{DecideError, PhasePlan};
use super::placement::Placement;
use super::pools::{FleetAvailability, PhasePools};
use super::predictions::RequestPredictions;
use super::request::{CompletedPrefill, PhaseSelection, RoutePrompt, RouteRequest};
use super::route::{Route, RouteError};
use super::route_builder::RouteBuilder;
use super::state::Router;
use crate::block::tracking::random_sequences;
use crate::fleet::{Fleet, FleetMember};
use crate::health::TrackedRequest;
use crate::index::Overlaps;
use crate::policy::LatchMode;
use crate::queue::{BusyThreshold, PlaceOutcome};

impl Router {
    /// Routes and books a request at once, without the queue.
    pub fn route(&self, request: RouteRequest) -> Result<Placement, RouteError> {
        let mut context = self.prepare(request);
        match self.place(&mut context, &BusyThreshold::default()) {
            PlaceOutcome::Placed(mut placement) => {
                self.predict_placement(&mut placement);
                Ok(placement)
            }
            PlaceOutcome::Refused(error) => Err(error),
            // Unreachable: without a threshold no worker is busy.
            PlaceOutcome::Busy => Err(RouteError::NoCandidate),
        }
    }

    /// Looks up everything about a request that does not depend on load.
    pub fn prepare(&self, request: RouteRequest) -> RoutingContext {
        let overrides = &request.overrides;
        let settings = self.settings();
        let mut context = RoutingContext {
            generation: 0,
            overlaps: Vec::new(),
            blocks: PromptBlocks::from_request(&request),
            assume_kv_reuse: request.reads_prefix_cache
                && overrides
                    .assume_kv_reuse
                    .unwrap_or(settings.tracking.assume_kv_reuse),
            track_prefill: overrides
                .track_prefill_tokens
                .unwrap_or(settings.tracking.prefill_tokens),
            settings,
            freshness: self.lookup.sources.table(),
            mismatched_workers: Arc::default(),
            recomputing_workers: Arc::default(),
            buffers: self.lookup.buffers.clone(),
            request,
        };
        self.refresh_overlaps(&mut context);
        context
    }

    /// Looks up the cached prefixes again.
    pub fn refresh_overlaps(&self, context: &mut RoutingContext) {
        context.release_overlaps();
        let fleet = self.fleet.load();
        context.generation = fleet.generation();
        let prompt = &context.request.prompt;
        let remote = &context.request.remote_overlaps;
        context.freshness = self.lookup.freshness_table(remote);
        context.mismatched_workers = self.mismatched_workers(&context.request);
        context.recomputing_workers = self.feedback.last_blocks.recomputing_workers();
        for (index, hashes) in prompt.blocks().iter().enumerate() {
            // A truncated prompt continues, so its last known token is not the last of the prompt.
            let tokens = if let RoutePrompt::Truncated { .. } = prompt {
                prompt.tokens() as usize
            } else {
                hashes.tokens()
            };
            let table = if context.request.reads_prefix_cache {
                self.lookup.find_overlaps(index, hashes, remote, &fleet)
            } else {
                Overlaps::new()
            };
            context.overlaps.push(PromptOverlaps {
                tokens,
                ..PromptOverlaps::new(table, hashes)
            });
        }
    }

    /// Returns the maximum of cached prompt tokens over all workers that may compute the prompts.
    pub fn best_cached_tokens(&self, context: &RoutingContext) -> u64 {
        context.best_cached_tokens(&self.fleet.load())
    }

    /// Chooses and books, unless all candidates are busy by `threshold`.
    pub fn place(
        &self,
        context: &mut RoutingContext,
        threshold: &BusyThreshold,
    ) -> PlaceOutcome<Placement, RouteError> {
        let mut fleet = self.current_fleet(context);
        loop {
            let placed = self
                .find_pools(&fleet, context)
                .and_then(|pools| self.book(context, &pools, threshold));
            match placed {
                Err(DecideError::ProbeTaken) => {}
                Err(DecideError::Busy) => return PlaceOutcome::Busy,
                // The fleet changed during the decision, so candidates may have joined.
                Err(DecideError::NoRoute(
                    RouteError::NoCandidate | RouteError::NoFleet | RouteError::Unsatisfied,
                )) if self.fleet.load().generation() != fleet.generation() => {
                    fleet = self.current_fleet(context);
                }
                Err(DecideError::NoRoute(error)) => return PlaceOutcome::Refused(error),
                Ok(mut placement) => {
                    placement.parity_check = self.parity_check(&placement, context);
                    placement.prompts = context.take_prompts();
                    return PlaceOutcome::Placed(placement);
                }
            }
        }
    }

    /// Chooses and books in one critical section.
    fn book(
        &self,
        context: &RoutingContext,
        pools: &PhasePools<'_>,
        threshold: &BusyThreshold,
    ) -> Result<Placement, DecideError> {
        let decider = PhaseDecider {
            in_flight: Some(self.in_flight_estimates.load()),
            ..self.decider(context, pools, threshold)
        };
        let (reservation, (plan, tracked)) = self.load.book_with(|view| {
            let mut rng = self.rng.lock();
            let plan = decider.decide(view, &mut *rng)?;
            let mut bookings = plan.bookings(context, |count| random_sequences(count, &mut *rng));
            if context.settings.tracking.prefill_decay {
                for booking in &mut bookings {
                    booking.prefill_time = view.prefill_time(booking);
                }
            }
            let expected = context.content_time(&plan, &bookings, view);
            for booking in &mut bookings {
                booking.content_time = view.prefill_time(booking).and(expected);
            }
            let tracked = self.track(&plan, pools, expected, view.now())?;
            Ok((bookings, (plan, tracked)))
        })?;
        let route = self
            .route_builder(context)
            .build(&plan, &pools.availability);
        self.record_recomputation(context, &plan, &route);
        let predicted_members = plan
            .booked_members()
            .filter(|member| self.lookup.predictors.covers(member))
            .cloned()
            .collect();
        Ok(Placement {
            chosen: plan.decode.member().rank,
            placed_at: self.load.now(),
            mismatched_workers: context.mismatched_workers.clone(),
            predicted_members,
            route,
            reservation,
            tracked,
            parity_check: None,
            prompts: Vec::new(),
            remote_overlaps: context.request.remote_overlaps.clone(),
            predictions: RequestPredictions::default(),
            reads_prefix_cache: context.request.reads_prefix_cache,
            has_completed_prefill: matches!(context.request.phases, PhaseSelection::Decode(_)),
            unknown_endpoint: None,
        })
    }

    /// Adds the prompt to the estimate of recomputed tokens. Skips requests that only decode, that
    /// read no cache, or that have several prompts.
    fn record_recomputation(&self, context: &RoutingContext, plan: &PhasePlan<'_>, route: &Route) {
        if let RoutePrompt::Hashed(prompts) = &context.request.prompt
            && let [prompt] = prompts.as_slice()
            && context.track_prefill
            && context.request.reads_prefix_cache
            && !matches!(context.request.phases, PhaseSelection::Decode(_))
        {
            let prefill = plan.prefill.as_ref().unwrap_or(&plan.decode);
            let block = prompt.block_size().tokens() as u64;
            let free = prefill.candidates[prefill.choice.index].free_blocks;
            let model = &prefill.member().worker.model;
            let computing = route.computed_by();
            let kept = computing
                .cached_tokens
                .saturating_add(free.saturating_mul(block));
            let evicted = (prompt.tokens() as u64).saturating_sub(kept);
            // Tokens that are still cached on another rank do not count as recomputed.
            let cached = computing.best_cached_tokens;
            self.recomputation.record(model, prompt, cached, evicted);
        }
    }

    /// Chooses without booking.
    pub fn preview(&self, request: RouteRequest) -> Result<Route, RouteError> {
        let mut context = self.prepare(request);
        let fleet = self.current_fleet(&mut context);
        let pools = self
            .find_pools(&fleet, &context)
            .map_err(RouteError::from)?;
        let decider = self.decider(&context, &pools, &BusyThreshold::default());
        let plan = self
            .load
            .read(|view| decider.decide(view, &mut *self.rng.lock()))
            .map_err(RouteError::from)?;
        Ok(self
            .route_builder(&context)
            .build(&plan, &pools.availability))
    }

    pub(super) fn decider<'a, 'f>(
        &'a self,
        context: &'a RoutingContext,
        pools: &'a PhasePools<'f>,
        threshold: &BusyThreshold,
    ) -> PhaseDecider<'a, 'f> {
        PhaseDecider {
            context,
            pools,
            threshold: *threshold,
            in_flight: None,
            engine_loads: self.load.engine_loads().view(self.load.now()),
            cached_blocks: self.lookup.cached_block_counts(),
            recomputed_share: self.recomputation.recomputed_share(pools.decode.model()),
        }
    }

    /// Returns the current fleet, after refreshing the overlaps if they belong to an older one.
    pub(super) fn current_fleet(&self, context: &mut RoutingContext) -> Arc<Fleet> {
        loop {
            let fleet = self.fleet.load_full();
            if context.generation == fleet.generation() {
                return fleet;
            }
            self.refresh_overlaps(context);
        }
    }

    fn find_pools<'f>(
        &self,
        fleet: &'f Fleet,
        context: &RoutingContext,
    ) -> Result<PhasePools<'f>, DecideError> {
        let settings = &context.settings;
        let availability = |members: &[&FleetMember]| self.availability(members, context);
        PhasePools::find(fleet, &context.request, settings, availability)
            .map_err(DecideError::NoRoute)
    }

    pub(super) fn route_builder<'a>(&'a self, context: &'a RoutingContext) -> RouteBuilder<'a> {
        RouteBuilder {
            context,
            lookup: &self.lookup,
        }
    }

    pub(super) fn availability(
        &self,
        members: &[&FleetMember],
        context: &RoutingContext,
    ) -> FleetAvailability {
        let feedback = &self.feedback;
        let request = &context.request;
        if context.settings.overload.has_load_thresholds() {
            self.load
                .read(|view| feedback.availability(members, request, view, LatchMode::Update))
        } else {
            feedback.availability_without_load(request, self.load.now())
        }
    }

    /// Tracks the request at the chosen ranks. It is the probe of a rank whose probe is due. Only
    /// one request may probe a rank at a time.
    pub(super) fn track(
        &self,
        plan: &PhasePlan<'_>,
        pools: &PhasePools<'_>,
        expected: Option<Duration>,
        now: Instant,
    ) -> Result<Vec<TrackedRequest>, DecideError> {
        let track = |member: &FleetMember| {
            let health = pools.availability.unhealthy.get(&member.rank);
            let must_probe = health.is_some_and(|health| health.is_probe_due());
            self.feedback
                .health
                .start(member.rank, expected, must_probe, now)
                .ok_or(DecideError::ProbeTaken)
        };
        plan.booked_members().map(track).collect()
    }

    /// Returns the completed prefill of a route, as input for the decode decision. `None` if one
    /// worker runs both phases, or the prefill worker has left.
    pub fn completed_prefill(&self, route: &Route) -> Option<CompletedPrefill> {
        let prefill = route.prefill()?.clone();
        let worker = self.fleet().worker(prefill.to.rank.worker)?.clone();
        Some(CompletedPrefill { prefill, worker })
    }

    /// Returns the number of workers in the fleet.
    pub fn workers(&self) -> usize {
        self.fleet.load().workers().count()
    }

    /// Places a request like [`Router::place`]. If all candidates are busy, the request is tried
    /// again without its soft affinity, which does not wait for its rank.
    pub fn place_or_drop_affinity(
        &self,
        context: &mut RoutingContext,
        threshold: &BusyThreshold,
    ) -> PlaceOutcome<Placement, RouteError> {
        let outcome = self.place(context, threshold);
        let (PlaceOutcome::Busy, Some(bound)) = (&outcome, context.request.affinity) else {
            return outcome;
        };
        context.request.affinity = None;
        let outcome = self.place(context, threshold);
        if matches!(outcome, PlaceOutcome::Busy) {
            // The affinity applies again at the next attempt.
            context.request.affinity = Some(bound);
        }
        outcome
    }
}
