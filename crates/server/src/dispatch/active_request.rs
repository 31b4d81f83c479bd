//! A routed request with everything that it holds until it ends.

use warmroute_core::router::{Placement, RelocationOutcome, Router};
use warmroute_core::sessions::SessionLease;
use warmroute_core::worker::{WorkerEndpoint, WorkerRank};

use super::timed_router::RoutingTimes;

/// Routed request, with everything it holds until it ends.
#[derive(Debug)]
pub struct ActiveRequest {
    /// Route, reservation and probes.
    pub placement: Placement,
    /// Time that the router needed.
    pub times: RoutingTimes,
    /// Tenant of the client, if `requests.clients.tenant_header` is set.
    pub tenant: Option<String>,
    /// Lease on the session.
    pub session: Option<SessionLease>,
    /// Whether the session stays bound to its rank if another rank serves this request.
    pub keeps_binding: bool,
}

impl ActiveRequest {
    /// Creates a request outside of any session.
    pub fn new(placement: Placement) -> Self {
        Self {
            placement,
            times: RoutingTimes::default(),
            tenant: None,
            session: None,
            keeps_binding: false,
        }
    }

    /// Handles the endpoint that served the request: moves the booking, and possibly the session,
    /// to it.
    pub fn on_served_by(&mut self, router: &Router, endpoint: WorkerEndpoint) -> RelocationOutcome {
        let outcome = router.on_served_by(&mut self.placement, endpoint);
        if let RelocationOutcome::Moved(target) = outcome {
            self.on_moved(router, target);
        }
        outcome
    }

    /// Rebinds the session after another rank than the chosen one served the request.
    pub(super) fn on_moved(&mut self, router: &Router, to: WorkerRank) {
        let Some(lease) = &mut self.session else {
            return;
        };
        // A session with hard affinity has its cache on the bound rank, and one failed connection
        // is weak evidence, so it returns there. If the worker is dead, passive health ejects it
        // after a few such requests, and the session moves. A session that was not served before
        // has no cache and moves at once.
        if lease.target() != to && !(self.keeps_binding && router.is_usable(lease.target())) {
            lease.rebind(to);
        }
    }
}
