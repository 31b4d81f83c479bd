//! Session, queue and router in one step.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::timeout;
use tracing::debug;
use warmroute_core::policy::WorkerPin;
use warmroute_core::queue::AdmissionError;
use warmroute_core::router::{
    Placement, Route, RouteError, RouteExplanation, RouteRequest, Router,
};
use warmroute_core::sessions::{SessionEntry, SessionName, SessionStore};
use warmroute_core::worker::{DpRank, ModelName, Worker, WorkerEndpoint, WorkerRank};

use super::active_request::ActiveRequest;
use super::queue::{AdmissionQueue, EnterOutcome};
use super::queue_metadata::queue_metadata;
use super::session::{
    RequestSession, SessionAffinity, SessionOpener, SessionRouting, SessionState,
};
use super::timed_router::{TimedContext, TimedPlacement, TimedRouter};

/// Reason why a request was not routed.
pub type DispatchError = AdmissionError<RouteError>;

/// Session, queue and router in one step.
pub struct Dispatcher {
    pub(super) router: Arc<Router>,
    pub(super) queue: Arc<AdmissionQueue<TimedRouter>>,
    pub(super) session_routing: Option<SessionRouting>,
    /// Ranks of stored responses.
    pub(super) stored_responses: Arc<SessionStore>,
    queue_deadline: Duration,
    session_opener: OnceLock<SessionOpener>,
}

impl Dispatcher {
    /// Creates a dispatcher. `stored_responses` is the table of stored responses, and
    /// `queue_deadline` the maximum time in the queue.
    pub fn new(
        router: Arc<Router>,
        queue: Arc<AdmissionQueue<TimedRouter>>,
        session_routing: Option<SessionRouting>,
        stored_responses: Arc<SessionStore>,
        queue_deadline: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            router,
            queue,
            session_routing,
            stored_responses,
            queue_deadline,
            session_opener: OnceLock::new(),
        })
    }

    /// Returns the router.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Registers the function that opens sessions at worker ranks. A request of a session waits for
    /// it, at most for `deadline`. Only the first registration takes effect.
    pub fn on_session_open(
        &self,
        deadline: Duration,
        open: impl Fn(WorkerRank, &RequestSession) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) {
        self.session_opener
            .set(SessionOpener {
                deadline,
                open: Box::new(open),
            })
            .ok();
    }

    /// Returns the queue.
    pub fn queue(&self) -> &Arc<AdmissionQueue<TimedRouter>> {
        &self.queue
    }

    /// Returns the session store.
    pub fn sessions(&self) -> Option<&Arc<SessionStore>> {
        let routing = self.session_routing.as_ref();
        routing.map(|routing| &routing.sessions)
    }

    /// Routes without booking, without entering the session and without queueing.
    pub fn preview(
        &self,
        mut request: RouteRequest,
        session: Option<&RequestSession>,
    ) -> Result<Route, RouteError> {
        self.apply_session(&mut request, session);
        self.router.preview(request)
    }

    /// Directs a request to the rank of its session, without entering the session.
    fn apply_session(&self, request: &mut RouteRequest, session: Option<&RequestSession>) {
        if let (Some(routing), Some(session)) = (&self.session_routing, session)
            && let Some(target) = routing
                .sessions
                .target(session.name(self.request_model(request).as_ref()))
        {
            routing.affinity.bind(request, target);
        }
    }

    /// Explains how a request would be routed now, without entering its session or the queue.
    pub fn explain(
        &self,
        mut request: RouteRequest,
        session: Option<&RequestSession>,
    ) -> RouteExplanation {
        self.apply_session(&mut request, session);
        let context = self.router.prepare(request);
        let class = context
            .request()
            .has_prompt()
            .then(|| self.queue.class_of(&queue_metadata(&self.router, &context)));
        let threshold = self.queue.busy_threshold();
        self.router.explain_prepared(context, class, threshold)
    }

    /// Routes a request through session and queue. If it has to wait, `on_wait` is called once with
    /// the maximum waiting time.
    pub async fn dispatch(
        &self,
        mut request: RouteRequest,
        session: Option<&RequestSession>,
        on_wait: impl FnOnce(Duration),
    ) -> Result<ActiveRequest, DispatchError> {
        let opener = self
            .session_opener
            .get()
            .filter(|_| session.is_some_and(|session| session.parent.is_none()));
        let opening_time = opener.map_or(Duration::ZERO, |opener| opener.deadline);
        let mut on_wait = Some(|wait: Duration| on_wait(wait + opening_time));
        let model = session.and_then(|_| self.request_model(&request));
        let name = session.map(|session| session.name(model.as_ref()));
        let state = self.enter_session(name, &mut on_wait).await;
        let mut hard_request = None;
        if let (SessionState::Bound(lease), Some(routing)) = (&state, &self.session_routing) {
            routing.affinity.bind(&mut request, lease.target());
            let is_hard = routing.affinity == SessionAffinity::Hard;
            hard_request = is_hard.then(|| request.without_prompt());
        }
        let prepared = self.queue.placer().prepare(request);
        let placed = self.enter_queue(prepared, &mut on_wait).await?;
        let mut placement = placed.placement;
        // The prediction is made only now, because the placement of a client that disconnected
        // earlier must not be predicted.
        self.router.predict_placement(&mut placement);
        let target = placement.route.to.rank;
        let mut active = self.join_session(placement, state, session, hard_request.as_ref());
        active.times = placed.times;
        if let (Some(opener), Some(session), Some(_)) = (opener, session, &active.session) {
            notify_wait(&mut on_wait, Duration::ZERO);
            // After the deadline, the request is sent without an open session.
            let _ = Box::pin(timeout(opener.deadline, (opener.open)(target, session))).await;
        }
        Ok(active)
    }

    /// Binds the session of a placed request. `hard_request` is the request without its prompt, if
    /// its session has hard affinity.
    fn join_session(
        &self,
        placement: Placement,
        state: SessionState,
        session: Option<&RequestSession>,
        hard_request: Option<&RouteRequest>,
    ) -> ActiveRequest {
        let target = placement.route.to.rank;
        let mut active = ActiveRequest::new(placement);
        active.session = match state {
            SessionState::None => None,
            SessionState::First(binding) => {
                if let Some(idle) = session.and_then(|session| session.idle_timeout) {
                    binding.set_idle(idle);
                }
                Some(binding.bind(target))
            }
            SessionState::Bound(mut lease) => {
                // A session with hard affinity stays bound if its worker is only overloaded: its
                // cache is worth more than one request.
                active.keeps_binding = hard_request.is_some_and(|request| {
                    lease.target() == target
                        || self.router.is_only_overloaded(request, lease.target())
                });
                if lease.target() != target && !active.keeps_binding {
                    lease.rebind(target);
                }
                Some(lease)
            }
        };
        if let (Some(lease), Some(RequestSession { is_last: true, .. })) =
            (&active.session, session)
        {
            lease.finish();
        }
        active
    }

    /// Returns the model of a request. If its body could not be read in time, the request names no
    /// model but still belongs to its session; the model is known if all workers serve the same
    /// one.
    fn request_model(&self, request: &RouteRequest) -> Option<ModelName> {
        let common_model = || {
            let fleet = self.router.fleet();
            let first = fleet.workers().next()?.model.clone();
            fleet
                .workers()
                .all(|worker| worker.model == first)
                .then_some(first)
        };
        request.model.clone().or_else(common_model)
    }

    async fn enter_session(
        &self,
        session: Option<SessionName<'_>>,
        on_wait: &mut Option<impl FnOnce(Duration)>,
    ) -> SessionState {
        let (Some(routing), Some(name)) = (&self.session_routing, session) else {
            return SessionState::None;
        };
        let entry = match routing.sessions.enter(name) {
            Ok(SessionEntry::Deciding(wait)) => {
                let queue_time = if self.queue.may_wait() {
                    self.queue_deadline
                } else {
                    Duration::ZERO
                };
                notify_wait(on_wait, routing.max_wait + queue_time);
                match timeout(routing.max_wait, wait).await {
                    Ok(entry) => entry,
                    // The first request of the session is slow, so this one is routed without the
                    // session.
                    Err(_) => return SessionState::None,
                }
            }
            entry => entry,
        };
        match entry {
            Ok(SessionEntry::Bound(lease)) => SessionState::Bound(lease),
            Ok(SessionEntry::First(binding)) => SessionState::First(binding),
            Ok(SessionEntry::Deciding(_)) => SessionState::None,
            Err(error) => {
                debug!(%error, "session not entered");
                SessionState::None
            }
        }
    }

    async fn enter_queue(
        &self,
        request: TimedContext,
        on_wait: &mut Option<impl FnOnce(Duration)>,
    ) -> Result<TimedPlacement, DispatchError> {
        if !request.context.request().has_prompt() {
            let placed = self.queue.placer().place_unqueued(request);
            return placed.map_err(DispatchError::Refused);
        }
        let metadata = queue_metadata(&self.router, &request.context);
        match self.queue.enter(request, metadata) {
            EnterOutcome::Done(result) => result,
            EnterOutcome::Queued(wait) => {
                notify_wait(on_wait, wait.remaining());
                wait.placement().await
            }
        }
    }

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

fn notify_wait(on_wait: &mut Option<impl FnOnce(Duration)>, wait: Duration) {
    if let Some(on_wait) = on_wait.take() {
        on_wait(wait);
    }
}
