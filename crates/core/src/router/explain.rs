//! Explanation of a routing decision: every member that serves the model, with its cached blocks,
//! its load and its cost term by term, or the reason why it was not a candidate. The explanation
//! runs the same steps as a real decision, on a snapshot of one instant. It books and records
//! nothing and consumes no randomness, so the next request draws the same numbers.

mod builder;
mod explanation;
mod summary;

use super::context::RoutingContext;
use super::phase_plan::DecideError;
use super::pools::{self, PhasePools};
use super::request::RouteRequest;
use super::route::RouteError;
use super::state::Router;
use crate::fleet::{FleetMember, WorkerKinds};
use crate::load::LoadView;
use crate::policy::LatchMode;
use crate::queue::{BusyThreshold, QueueClass};
use builder::{ExplainSnapshot, ExplanationBuilder, unrouted};
pub use explanation::{PhaseExplanation, RouteExplanation, WorkerExplanation};

impl Router {
    /// Explains how a request would be routed now, ignoring the queue.
    pub fn explain(&self, request: RouteRequest) -> RouteExplanation {
        self.explain_at(&mut self.prepare(request), &BusyThreshold::default())
    }

    /// Explains how a prepared request would be routed now, and whether it would be queued. A
    /// request without a class is never queued.
    pub fn explain_prepared(
        &self,
        mut context: RoutingContext,
        class: Option<&QueueClass>,
        threshold: BusyThreshold,
    ) -> RouteExplanation {
        let threshold = class.map(|_| threshold).unwrap_or_default();
        let explanation = self.explain_at(&mut context, &threshold);
        RouteExplanation {
            class: class.map(|class| class.name.clone()),
            ..explanation
        }
    }

    fn explain_at(
        &self,
        context: &mut RoutingContext,
        threshold: &BusyThreshold,
    ) -> RouteExplanation {
        let fleet = self.current_fleet(context);
        let members = match pools::serving(&fleet, &context.request) {
            Ok(members) => members,
            Err(error) => return unrouted(context, error, Vec::new(), None),
        };
        let read = |context: &RoutingContext| {
            self.load
                .read(|view| self.take_snapshot(view, context, members.clone(), threshold))
        };
        let mut snapshot = read(context);
        // Soft affinity does not wait for its rank, as in `place_or_drop_affinity`.
        if snapshot.is_busy && context.request.affinity.take().is_some() {
            snapshot = read(context);
        }
        let builder = ExplanationBuilder {
            context,
            snapshot: &snapshot,
        };
        match &snapshot.decided {
            Ok(plan) => {
                let route = self
                    .route_builder(context)
                    .build(plan, &snapshot.availability);
                builder.routed(plan, route)
            }
            Err(error) => {
                let first = snapshot.members.first();
                let block_size = first.map(|member| member.worker.block_size);
                let phases = builder.unchosen_phases(*error);
                unrouted(context, *error, phases, block_size)
            }
        }
    }

    /// Reads everything that must be consistent. Runs under the load lock, so nothing is formatted
    /// here.
    fn take_snapshot<'f>(
        &self,
        view: &LoadView<'_>,
        context: &RoutingContext,
        members: Vec<&'f FleetMember>,
        threshold: &BusyThreshold,
    ) -> ExplainSnapshot<'f> {
        let availability =
            self.feedback
                .availability(&members, &context.request, view, LatchMode::Preview);
        let additional = context.blocks.additional(view, true);
        let load = |member: &&FleetMember| {
            Some((
                view.load(member.slot, member.rank)?,
                additional.for_slot(member.slot),
            ))
        };
        let loads = members.iter().map(load).collect();
        let kinds = WorkerKinds::from_workers(members.iter().map(|member| &*member.worker));
        let pools = PhasePools::find_among(
            &members,
            kinds,
            &context.request,
            &context.settings,
            availability.clone(),
        );
        let decide = |threshold: &BusyThreshold| {
            let pools = pools
                .as_ref()
                .map_err(|error| DecideError::NoRoute(*error))?;
            self.decider(context, pools, threshold)
                .decide(view, &mut self.rng.lock().clone())
        };
        let decided = decide(threshold);
        let is_busy = matches!(decided, Err(DecideError::Busy));
        let decided = if is_busy {
            decide(&BusyThreshold::default())
        } else {
            decided
        };
        ExplainSnapshot {
            members,
            availability,
            loads,
            is_busy,
            decided: decided.map_err(RouteError::from),
        }
    }
}
