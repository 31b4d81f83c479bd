//! Attribution of a response: reports its status to the router, and moves the load to the worker
//! that sent it.

use warmroute_core::health::RequestOutcome;
use warmroute_core::router::{
    RelocationOutcome, RemoteOverlaps, RequestPredictions, ResponseOrigin, WorkerResponse,
};
use warmroute_core::worker::WorkerEndpoint;
use warmroute_metrics::{Metrics, count_outcome};

use super::ExchangeGuard;
use super::started_response::StartedResponse;
use crate::dispatch::{Dispatcher, log_health_changes};
use crate::ext_proc::exchange::ServingWorker;
use crate::ext_proc::headers::{ResponseHead, ResponseSource};

impl ExchangeGuard {
    /// Handles the headers of the response: reports the status to the router, and moves the load to
    /// the worker that sent it.
    pub(in crate::ext_proc) fn on_response_headers(&mut self, head: ResponseHead) {
        self.response = Some(StartedResponse::new(head));
        self.count_response(head.status, head.source.name());
        let Some(active) = &mut self.active else {
            return;
        };
        match head.source {
            ResponseSource::Unknown | ResponseSource::Ambiguous => {
                self.on_response_origin(head, ResponseOrigin::Chosen);
            }
            ResponseSource::Envoy => self.on_response_origin(head, ResponseOrigin::Gateway),
            // A limit or an injected fault. The response contains no information about the worker.
            ResponseSource::EnvoyPolicy => {
                // Releases the probe, so that another request may probe the worker.
                active.placement.tracked.clear();
                active.placement.predictions = RequestPredictions::default();
            }
            ResponseSource::EnvoyTimeout => {
                self.report_outcome(RequestOutcome::NoResponse);
                if let Some(active) = &mut self.active {
                    active.placement.predictions = RequestPredictions::default();
                }
            }
            ResponseSource::Worker(address) => {
                let served = WorkerEndpoint(address);
                if active.placement.route.to.is_served_from(served) {
                    return self.on_response_origin(head, ResponseOrigin::Chosen);
                }
                let fleet = self.router.fleet();
                if let Some(worker) = fleet.workers().find(|worker| worker.owns(served)) {
                    return self.on_response_origin(head, ResponseOrigin::Other(worker.id));
                }
                // The endpoint may be another address of the chosen worker.
                active.placement.tracked.clear();
                self.router
                    .resolve_predictions(&mut active.placement, head.status);
                count_endpoint_mismatch(&self.metrics, "unknown_endpoint");
            }
        }
    }

    /// Records that the worker that serves the request stores its response.
    pub(in crate::ext_proc) fn on_response_stored(&self, dispatcher: &Dispatcher, id: &str) {
        if let Some(active) = &self.active {
            let rank = active.placement.route.to.rank;
            dispatcher.record_stored(id, active.tenant.as_deref(), rank);
        }
    }

    fn on_response_origin(&mut self, head: ResponseHead, origin: ResponseOrigin) {
        let Some(active) = &mut self.active else {
            return;
        };
        // The health is updated before the relocation, because it concerns the chosen worker.
        let changes = self.router.on_response(
            &mut active.placement,
            WorkerResponse {
                status: head.status,
                origin,
            },
        );
        if let ResponseSource::Worker(address) = head.source {
            let outcome = match active.on_served_by(&self.router, WorkerEndpoint(address)) {
                RelocationOutcome::Unchanged => None,
                RelocationOutcome::Moved(_) => Some("moved"),
                RelocationOutcome::Released => Some("released"),
            };
            if let Some(outcome) = outcome {
                if let Some(response) = &mut self.response {
                    response.is_served_elsewhere = true;
                }
                count_endpoint_mismatch(&self.metrics, outcome);
            }
        }
        if let ResponseOrigin::Other(_) = origin {
            self.router
                .resolve_predictions(&mut active.placement, head.status);
        }
        active.placement.remote_overlaps = RemoteOverlaps::NotQueried;
        log_health_changes(&self.router, changes);
    }

    /// Returns the worker that sent the response, if it is a known worker other than the chosen
    /// one.
    pub(in crate::ext_proc) fn other_serving_worker(
        &self,
        head: &ResponseHead,
    ) -> Option<ServingWorker> {
        let ResponseSource::Worker(address) = head.source else {
            return None;
        };
        let served = WorkerEndpoint(address);
        let route = &self.active.as_ref()?.placement.route;
        if route.to.is_served_from(served) {
            return None;
        }
        let fleet = self.router.fleet();
        let model_members = fleet
            .members()
            .filter(|member| member.worker.model == route.model);
        let mut members = model_members.filter(|member| member.worker.owns(served));
        let first = ServingWorker::from(members.next()?.rank);
        // Envoy reports the endpoint only, and several ranks may share it.
        Some(if members.next().is_none() {
            first
        } else {
            ServingWorker {
                rank: None,
                ..first
            }
        })
    }
}

fn count_endpoint_mismatch(metrics: &Metrics, outcome: &'static str) {
    count_outcome(&metrics.requests.served_endpoint_mismatches, outcome);
}
