//! Router as the placer of the queue. It measures its own steps, because the core has no clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warmroute_core::queue::{BusyThreshold, PlaceOutcome, Placer};
use warmroute_core::router::{Placement, RouteError, RouteRequest, Router, RoutingContext};

/// Time that the router needed for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutingTimes {
    /// Time of the last overlap lookup.
    pub index: Duration,
    /// Time of decision and booking.
    pub choose: Duration,
}

/// Prepared request, with the time of its overlap lookup.
#[derive(Debug)]
pub struct TimedContext {
    pub(super) context: RoutingContext,
    index_time: Duration,
}

/// Placed request, with the time that the router needed.
#[derive(Debug)]
pub struct TimedPlacement {
    pub(super) placement: Placement,
    pub(super) times: RoutingTimes,
}

/// Router that measures its steps.
pub struct TimedRouter(Arc<Router>);

impl TimedRouter {
    /// Creates a placer that measures the steps of `router`.
    pub fn new(router: Arc<Router>) -> Arc<Self> {
        Arc::new(Self(router))
    }

    /// Looks up everything about a request that does not depend on load.
    pub(super) fn prepare(&self, request: RouteRequest) -> TimedContext {
        let started = Instant::now();
        let context = self.0.prepare(request);
        TimedContext {
            context,
            index_time: started.elapsed(),
        }
    }

    /// Places a request without the queue.
    pub(super) fn place_unqueued(
        &self,
        mut request: TimedContext,
    ) -> Result<TimedPlacement, RouteError> {
        match self.place(&mut request, &BusyThreshold::default()) {
            PlaceOutcome::Placed(placed) => Ok(placed),
            PlaceOutcome::Refused(error) => Err(error),
            // Unreachable: without a threshold no worker is busy.
            PlaceOutcome::Busy => Err(RouteError::NoCandidate),
        }
    }
}

impl Placer for TimedRouter {
    type Request = TimedContext;
    type Placed = TimedPlacement;
    type Error = RouteError;

    fn workers(&self) -> usize {
        self.0.workers()
    }

    fn place(
        &self,
        request: &mut TimedContext,
        threshold: &BusyThreshold,
    ) -> PlaceOutcome<TimedPlacement, RouteError> {
        let started = Instant::now();
        let placed = self
            .0
            .place_or_drop_affinity(&mut request.context, threshold);
        placed.map_placed(|placement| TimedPlacement {
            placement,
            times: RoutingTimes {
                index: request.index_time,
                choose: started.elapsed(),
            },
        })
    }

    fn refresh(&self, request: &mut TimedContext) {
        let started = Instant::now();
        self.0.refresh_overlaps(&mut request.context);
        request.index_time = started.elapsed();
    }
}
