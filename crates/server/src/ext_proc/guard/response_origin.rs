//! Attribution of a response: reports its status to the router, and moves the load to the worker
//! that sent it.

use warmroute_core::health::RequestOutcome;
use warmroute_core::router::{
    RelocationOutcome, RequestPredictions, ResponseOrigin, WorkerResponse,
};
use warmroute_core::worker::WorkerEndpoint;
use warmroute_metrics::{Metrics, OutcomeLabel};

use super::ExchangeGuard;
use super::started_response::StartedResponse;
use crate::dispatch::{Dispatcher, log_health_changes};
use crate::ext_proc::exchange::ServingWorker;
use crate::ext_proc::headers::{ResponseHead, ResponseSource};

/// Result of attributing a response to its source.
enum ResponseAttribution {
    /// A worker, or Envoy for an unreachable worker. The router updates the health of workers.
    Origin(ResponseOrigin),
    /// Envoy, because of a limit or an injected fault. The response contains no information about
    /// the worker.
    EnvoyPolicy,
    /// Envoy, because the worker did not respond in time.
    EnvoyTimeout,
    /// An unknown endpoint, which may be another address of the chosen worker.
    UnknownEndpoint,
}

impl ExchangeGuard {
    /// Handles the headers of the response: reports the status to the router, and moves the load to
    /// the worker that sent it.
    pub(in crate::ext_proc) fn on_response_headers(&mut self, head: ResponseHead) {
        self.response = Some(StartedResponse::new(head));
        self.count_response(head.status, head.source.name());
        match self.attribute_response(head.source) {
            None => {}
            Some(ResponseAttribution::Origin(origin)) => self.on_response_origin(head, origin),
            Some(ResponseAttribution::EnvoyPolicy) => {
                // Releases the probe, so that another request may probe the worker.
                if let Some(active) = &mut self.active {
                    active.placement.tracked.clear();
                    active.placement.predictions = RequestPredictions::default();
                }
            }
            Some(ResponseAttribution::EnvoyTimeout) => {
                self.report_outcome(RequestOutcome::NoResponse);
                if let Some(active) = &mut self.active {
                    active.placement.predictions = RequestPredictions::default();
                }
            }
            Some(ResponseAttribution::UnknownEndpoint) => {
                if let Some(active) = &mut self.active {
                    active.placement.tracked.clear();
                    self.router
                        .resolve_predictions(&mut active.placement, head.status);
                }
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

    /// Returns the sender of a response; `None` for a request that was not dispatched.
    fn attribute_response(&self, source: ResponseSource) -> Option<ResponseAttribution> {
        let route = &self.active.as_ref()?.placement.route;
        let origin = match source {
            ResponseSource::Unknown | ResponseSource::Ambiguous => ResponseOrigin::Chosen,
            ResponseSource::Envoy => ResponseOrigin::Gateway,
            ResponseSource::EnvoyPolicy => return Some(ResponseAttribution::EnvoyPolicy),
            ResponseSource::EnvoyTimeout => return Some(ResponseAttribution::EnvoyTimeout),
            ResponseSource::Worker(address) => {
                let served = WorkerEndpoint(address);
                if route.to.is_served_from(served) {
                    return Some(ResponseAttribution::Origin(ResponseOrigin::Chosen));
                }
                let fleet = self.router.fleet();
                match fleet.workers().find(|worker| worker.owns(served)) {
                    Some(worker) => ResponseOrigin::Other(worker.id),
                    None => return Some(ResponseAttribution::UnknownEndpoint),
                }
            }
        };
        Some(ResponseAttribution::Origin(origin))
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
        active.placement.clear_remote_overlaps();
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
    metrics
        .requests
        .served_endpoint_mismatches
        .get_or_create(&OutcomeLabel { outcome })
        .inc();
}
