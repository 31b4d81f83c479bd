//! Routes an active request again.

use std::sync::Arc;

use warmroute_core::policy::WorkerPin;
use warmroute_core::router::{Route, RouteError, RouteRequest};
use warmroute_core::worker::{DpRank, Worker, WorkerEndpoint};

use super::active_request::ActiveRequest;
use super::dispatcher::Dispatcher;

impl Dispatcher {
    /// Routes an active request again, for example after a failed prefill. It keeps its session,
    /// skips the queue, and releases its previous placement. If the gateway has already sent it to
    /// an endpoint, only the other worker is chosen again.
    pub fn reroute(
        &self,
        active: &mut ActiveRequest,
        request: RouteRequest,
        endpoint: Option<WorkerEndpoint>,
    ) -> Result<(), RouteError> {
        match endpoint {
            None => self.reroute_anywhere(active, request),
            Some(endpoint) => self.reroute_to(active, request, endpoint),
        }
    }

    fn reroute_anywhere(
        &self,
        active: &mut ActiveRequest,
        mut request: RouteRequest,
    ) -> Result<(), RouteError> {
        if let (Some(lease), Some(routing)) = (&active.session, &self.session_routing) {
            routing.affinity.bind(&mut request, lease.target());
        }
        self.replace_placement(active, request)?;
        let target = active.placement.route.to.rank;
        if let Some(lease) = active
            .session
            .as_mut()
            .filter(|lease| lease.target() != target)
            && !active.keeps_binding
        {
            lease.rebind(target);
        }
        Ok(())
    }

    fn reroute_to(
        &self,
        active: &mut ActiveRequest,
        mut request: RouteRequest,
        endpoint: WorkerEndpoint,
    ) -> Result<(), RouteError> {
        let fleet = self.router.fleet();
        let Route { to, model, .. } = &active.placement.route;
        let has_endpoint = |worker: &&Arc<Worker>| {
            worker.model == *model && worker.endpoint.canonical() == endpoint.canonical()
        };
        let worker = fleet
            .workers()
            .find(has_endpoint)
            .ok_or(RouteError::NoCandidate)?;
        // The request headers still name the rank of the first route.
        let header_rank = Some(to.rank.rank).filter(|rank| worker.ranks.contains(*rank));
        let rank = (worker.ranks.size.get() > 1)
            .then(|| header_rank.unwrap_or(DpRank(worker.ranks.start)));
        request.constraints.pin = Some(WorkerPin {
            worker: worker.id,
            rank,
        });
        request.constraints.bound_rank = None;
        request.affinity = None;
        self.replace_placement(active, request)?;
        let target = active.placement.route.to.rank;
        active.on_moved(&self.router, target);
        Ok(())
    }

    /// Routes a request without the queue, and replaces the placement of an active request.
    fn replace_placement(
        &self,
        active: &mut ActiveRequest,
        request: RouteRequest,
    ) -> Result<(), RouteError> {
        let router = self.queue.placer();
        let mut placed = router.place_unqueued(router.prepare(request))?;
        self.router.predict_placement(&mut placed.placement);
        active.placement = placed.placement;
        active.times = placed.times;
        Ok(())
    }
}
