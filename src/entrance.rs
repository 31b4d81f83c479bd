//! What every request goes through, wherever it comes from: the session it belongs to, its turn among others, and then
//! the router. Those who wait here wait as a future; dropping it leaves nothing behind.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::timeout;
use tracing::debug;

use crate::admission::{Admission, Attempt, Entered, Gate, Lane, Rejected, Turn};
use crate::router::{
    Booked, Explanation, Moved, Prepared, Route, RouteError, RouteRequest, Router,
};
use crate::schedule::Pin;
use crate::sessions::{Binding, Entry, Hold, SessionName, Sessions};
use crate::worker::{DpRank, Endpoint, ModelName, Worker, WorkerRank};

/// What a request says of its session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionWord {
    /// Its id.
    pub id: String,
    /// The session that started it.
    pub parent: Option<String>,
    /// The tenant of the client, if `clients.tenant_header` is set.
    pub tenant: Option<String>,
    /// Whether this is its last request.
    pub last: bool,
    /// After this time without a request the engine may close the session.
    pub idle: Option<Duration>,
}

type OpenSession = Box<dyn Fn(WorkerRank, &SessionWord) -> BoxFuture<'static, ()> + Send + Sync>;

/// Opens sessions at engines before their first request is sent there.
struct SessionOpener {
    /// Longest time that a request waits for it.
    deadline: Duration,
    open: OpenSession,
}

/// How strictly sessions stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affinity {
    /// Wherever the session is, its requests wait for that worker rank.
    Hard,
    /// They go elsewhere when it is busy.
    Soft,
}

impl Affinity {
    /// Sends a request where its session is.
    fn bind(self, request: &mut RouteRequest, target: WorkerRank) {
        match self {
            Affinity::Hard => request.constraints.exclusive = Some(target),
            Affinity::Soft => request.affinity = Some(target),
        }
    }
}

impl SessionWord {
    fn name<'a>(&'a self, model: Option<&'a ModelName>) -> SessionName<'a> {
        SessionName {
            id: &self.id,
            parent: self.parent.as_deref(),
            model: model.map(ModelName::as_str),
            tenant: self.tenant.as_deref(),
        }
    }
}

/// The sessions, and what they mean for routing.
pub struct Affinities {
    /// The sessions.
    pub sessions: Arc<Sessions>,
    /// How strict they are.
    pub affinity: Affinity,
    /// How long a request waits for the first of its session.
    pub wait: Duration,
}

/// A request that was let in, and everything it holds.
#[derive(Debug)]
pub struct Admitted {
    /// Where to, and its share of the load.
    pub booked: Booked,
    /// Its session.
    pub session: Option<Hold>,
    /// Whether the session comes back to where it is bound, wherever this request went.
    pub comes_back: bool,
}

impl Admitted {
    /// A request that was booked, outside of any session.
    pub fn new(booked: Booked) -> Self {
        Self {
            booked,
            session: None,
            comes_back: false,
        }
    }

    /// Takes note of the endpoint that served the request: the booking moves there, and the session with it.
    pub fn served(&mut self, router: &Router, by: Endpoint) -> Moved {
        let moved = router.served(&mut self.booked, by);
        if let Moved::To(target) = moved {
            self.moved(router, target);
        }
        moved
    }

    /// Somebody else serves the request than was chosen.
    fn moved(&mut self, router: &Router, to: WorkerRank) {
        let Some(hold) = &mut self.session else {
            return;
        };
        // A hard session has its cache where it was before, and that one try did not reach its worker says little:
        // it comes back, as it does to a worker that had too much to do. If the worker is dead indeed, health takes
        // it out after a few such tries, and then the session goes with whom it got. Where the session was not served
        // before there is no cache of it, so it stays with whom it got at once.
        if hold.target() != to && !(self.comes_back && router.is_usable(hold.target())) {
            hold.rebind(to);
        }
    }
}

/// Why a request was not let in.
pub type Refusal = Rejected<RouteError>;

/// The way to the router.
pub struct Entrance {
    router: Arc<Router>,
    admission: Arc<Admission<Router>>,
    affinities: Option<Affinities>,
    queue_deadline: Duration,
    opening: OnceLock<SessionOpener>,
}

/// Where a request stands in its session.
enum Standing {
    None,
    Bound(Hold),
    First(Binding),
}

impl Entrance {
    /// The way to a router. `queue_deadline` is how long a request may wait for its turn.
    pub fn new(
        router: Arc<Router>,
        admission: Arc<Admission<Router>>,
        affinities: Option<Affinities>,
        queue_deadline: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            router,
            admission,
            affinities,
            queue_deadline,
            opening: OnceLock::new(),
        })
    }

    /// The router behind it.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Registers the function that opens sessions at worker ranks. A request of a session waits for it, at most for `deadline`.
    /// Only the first registration takes effect.
    pub fn on_open(
        &self,
        deadline: Duration,
        open: impl Fn(WorkerRank, &SessionWord) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) {
        self.opening
            .set(SessionOpener {
                deadline,
                open: Box::new(open),
            })
            .ok();
    }

    /// The waiting room.
    pub fn admission(&self) -> &Arc<Admission<Router>> {
        &self.admission
    }

    /// The sessions.
    pub fn sessions(&self) -> Option<&Arc<Sessions>> {
        self.affinities
            .as_ref()
            .map(|affinities| &affinities.sessions)
    }

    /// Routes without booking, without entering the session and without a turn.
    pub fn ask(
        &self,
        mut request: RouteRequest,
        session: Option<&SessionWord>,
    ) -> Result<Route, RouteError> {
        self.follow(&mut request, session);
        self.router.ask(request)
    }

    /// Sends a request where its session is, without entering it.
    fn follow(&self, request: &mut RouteRequest, session: Option<&SessionWord>) {
        if let (Some(affinities), Some(word)) = (&self.affinities, session)
            && let Some(target) = affinities
                .sessions
                .target(word.name(self.model(request).as_ref()))
        {
            affinities.affinity.bind(request, target);
        }
    }

    /// Places a request anew that was let in before, because of what has become of it meanwhile: it keeps its session and
    /// its turn, and waits for nobody. What it held is given back. Where the gateway has sent it to an endpoint already, only
    /// the worker beside that one is found anew.
    pub fn place_anew(
        &self,
        admitted: &mut Admitted,
        request: RouteRequest,
        at: Option<Endpoint>,
    ) -> Result<(), RouteError> {
        match at {
            None => self.follow_up(admitted, request),
            Some(at) => self.follow_to(admitted, request, at),
        }
    }

    fn follow_up(
        &self,
        admitted: &mut Admitted,
        mut request: RouteRequest,
    ) -> Result<(), RouteError> {
        if let (Some(hold), Some(affinities)) = (&admitted.session, &self.affinities) {
            affinities.affinity.bind(&mut request, hold.target());
        }
        admitted.booked = self.router.route(request)?;
        let target = admitted.booked.route.to.rank;
        if let Some(hold) = admitted
            .session
            .as_mut()
            .filter(|hold| hold.target() != target)
            && !admitted.comes_back
        {
            hold.rebind(target);
        }
        Ok(())
    }

    fn follow_to(
        &self,
        admitted: &mut Admitted,
        mut request: RouteRequest,
        endpoint: Endpoint,
    ) -> Result<(), RouteError> {
        let fleet = self.router.fleet();
        let Route { to, model, .. } = &admitted.booked.route;
        let is_there = |worker: &&Arc<Worker>| {
            worker.model == *model && worker.endpoint.canonical() == endpoint.canonical()
        };
        let worker = fleet
            .workers()
            .find(is_there)
            .ok_or(RouteError::NoCandidate)?;
        // The request still names the rank that it was to go to.
        let named = Some(to.rank.rank).filter(|rank| worker.ranks.contains(*rank));
        let rank =
            (worker.ranks.size.get() > 1).then(|| named.unwrap_or(DpRank(worker.ranks.start)));
        let constraints = &mut request.constraints;
        (constraints.pin, constraints.exclusive) = (
            Some(Pin {
                worker: worker.id,
                rank,
            }),
            None,
        );
        request.affinity = None;
        admitted.booked = self.router.route(request)?;
        let target = admitted.booked.route.to.rank;
        admitted.moved(&self.router, target);
        Ok(())
    }

    /// Says why a request would go where it would go now, without entering its session or taking a turn.
    pub fn explain(&self, mut request: RouteRequest, session: Option<&SessionWord>) -> Explanation {
        self.follow(&mut request, session);
        let prepared = self.router.prepare(request);
        let class = prepared
            .request()
            .has_prompt()
            .then(|| self.admission.class_of(&turn(&self.router, &prepared)));
        self.router.explain_prepared(prepared, class)
    }

    /// Lets a request in. Where it has to wait, `told` hears once how long that may take at most.
    pub async fn admit(
        &self,
        mut request: RouteRequest,
        session: Option<&SessionWord>,
        told: impl FnOnce(Duration),
    ) -> Result<Admitted, Refusal> {
        let opening = self
            .opening
            .get()
            .filter(|_| session.is_some_and(|word| word.parent.is_none()));
        let more = opening.map_or(Duration::ZERO, |opening| opening.deadline);
        let mut told = Some(|wait: Duration| told(wait + more));
        let model = session.and_then(|_| self.model(&request));
        let standing = self
            .session(session.map(|word| word.name(model.as_ref())), &mut told)
            .await;
        let mut hard = None;
        if let (Standing::Bound(hold), Some(affinities)) = (&standing, &self.affinities) {
            affinities.affinity.bind(&mut request, hold.target());
            hard = (affinities.affinity == Affinity::Hard).then(|| request.without_prompt());
        }
        let mut booked = self.turn(self.router.prepare(request), &mut told).await?;
        // Not before it is here: a request that was placed while its client left is sent nowhere.
        self.router.expect_booked(&mut booked);
        let target = booked.route.to.rank;
        let mut comes_back = false;
        let hold = match standing {
            Standing::None => None,
            Standing::First(binding) => {
                if let Some(idle) = session.and_then(|word| word.idle) {
                    binding.set_idle(idle);
                }
                Some(binding.bind(target))
            }
            Standing::Bound(mut hold) => {
                // A hard session that went elsewhere only because its worker has too much to do just now comes back: what
                // is cached of it is worth more than one request.
                comes_back = hard.as_ref().is_some_and(|request| {
                    hold.target() == target || self.router.only_overloaded(request, hold.target())
                });
                if hold.target() != target && !comes_back {
                    // Where it was it cannot be served any longer; it stays with whom it got.
                    hold.rebind(target);
                }
                Some(hold)
            }
        };
        if let (Some(hold), Some(SessionWord { last: true, .. })) = (&hold, session) {
            hold.finish();
        }
        let admitted = Admitted {
            booked,
            session: hold,
            comes_back,
        };
        if let (Some(opening), Some(word), Some(_)) = (opening, session, &admitted.session) {
            tell(&mut told, Duration::ZERO);
            // After the deadline the request is sent without an open session.
            let _ = Box::pin(timeout(opening.deadline, (opening.open)(target, word))).await;
        }
        Ok(admitted)
    }

    /// The model a request is for. One whose body could not be read in time names none, and still is of the same session as
    /// those before it; where all workers serve one model it can be for no other.
    fn model(&self, request: &RouteRequest) -> Option<ModelName> {
        let only = || {
            let fleet = self.router.fleet();
            let first = fleet.workers().next()?.model.clone();
            fleet
                .workers()
                .all(|worker| worker.model == first)
                .then_some(first)
        };
        request.model.clone().or_else(only)
    }

    async fn session(
        &self,
        session: Option<SessionName<'_>>,
        told: &mut Option<impl FnOnce(Duration)>,
    ) -> Standing {
        let (Some(affinities), Some(name)) = (&self.affinities, session) else {
            return Standing::None;
        };
        let entry = match affinities.sessions.enter(name) {
            Ok(Entry::Wait(waiting)) => {
                let queue = if self.admission.may_wait() {
                    self.queue_deadline
                } else {
                    Duration::ZERO
                };
                tell(told, affinities.wait + queue);
                match timeout(affinities.wait, waiting).await {
                    Ok(entry) => entry,
                    // The first of the session is slow; this one goes its own way.
                    Err(_) => return Standing::None,
                }
            }
            entry => entry,
        };
        match entry {
            Ok(Entry::Bound(hold)) => Standing::Bound(hold),
            Ok(Entry::First(binding)) => Standing::First(binding),
            Ok(Entry::Wait(_)) => Standing::None,
            Err(refused) => {
                debug!(%refused, "routed without its session");
                Standing::None
            }
        }
    }

    async fn turn(
        &self,
        mut prepared: Prepared,
        told: &mut Option<impl FnOnce(Duration)>,
    ) -> Result<Booked, Refusal> {
        if !prepared.request().has_prompt() {
            return match self.router.place(&mut prepared, &Gate::default()) {
                Attempt::Placed(booked) => Ok(booked),
                Attempt::Refused(error) => Err(Refusal::Refused(error)),
                // Nothing makes a worker busy where there is no threshold.
                Attempt::Busy => Err(Refusal::Refused(RouteError::NoCandidate)),
            };
        }
        let turn = turn(&self.router, &prepared);
        match self.admission.enter(prepared, turn) {
            Entered::Done(outcome) => outcome,
            Entered::Waiting(waiting) => {
                tell(told, waiting.deadline());
                waiting.placed().await
            }
        }
    }
}

/// What the queue has to know of a request.
fn turn(router: &Router, prepared: &Prepared) -> Turn {
    let request = prepared.request();
    Turn {
        class: request.priority.class.clone(),
        lane: lane(request),
        strict_priority: request.priority.strict,
        priority_jump: request.priority.jump,
        prompt_tokens: request.prompt.tokens(),
        cached_tokens: router.best_cached_tokens(prepared),
    }
}

/// Those who compete for other workers do not stand in each other's way.
fn lane(request: &RouteRequest) -> Lane {
    let constraints = &request.constraints;
    let pinned = constraints.pin.and_then(|pin| {
        Some(WorkerRank {
            worker: pin.worker,
            rank: pin.rank?,
        })
    });
    if let Some(rank) = pinned.or(constraints.exclusive) {
        return Lane::Pinned(rank);
    }
    let mut hasher = DefaultHasher::new();
    request.model.hash(&mut hasher);
    constraints.pin.map(|pin| pin.worker).hash(&mut hasher);
    constraints.allowed.hash(&mut hasher);
    constraints.pool.hash(&mut hasher);
    constraints.endpoints.hash(&mut hasher);
    constraints.required_taints.hash(&mut hasher);
    request
        .prefill_pin
        .map(|pin| (pin.worker, pin.rank))
        .hash(&mut hasher);
    Lane::Among(hasher.finish())
}

fn tell(told: &mut Option<impl FnOnce(Duration)>, wait: Duration) {
    if let Some(told) = told.take() {
        told(wait);
    }
}

#[cfg(test)]
mod tests;
