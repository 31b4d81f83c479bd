use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::fleet::Fleet;
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::{LoadListener, LoadTracker};
use warmroute_core::router::{
    Reason, RelocationOutcome, ResponseOrigin, RoutePrompt, RouteRequest, Router, RouterSettings,
    WorkerResponse,
};
use warmroute_core::sessions::{SessionRules, SessionStore};
use warmroute_core::worker::{BlockSize, Worker, WorkerEndpoint, WorkerId, WorkerRank};

use super::queue::{AdmissionQueue, PrefillBacklog};
use super::*;
use crate::dispatch::queue::config::QueueConfig;

fn endpoint(id: u64) -> WorkerEndpoint {
    format!("127.0.0.1:{}", 8000 + id).parse().unwrap()
}

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        endpoint(id),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// Wakes the queue when capacity is freed.
#[derive(Default)]
struct QueueWaker(OnceLock<Weak<AdmissionQueue<TimedRouter>>>);

impl LoadListener for QueueWaker {
    fn on_capacity_freed(&self) {
        if let Some(queue) = self.0.get().and_then(Weak::upgrade) {
            queue.wake();
        }
    }
}

/// Returns a dispatcher for workers that are busy beyond `threshold` prefill tokens.
fn new_dispatcher(
    workers: u64,
    threshold: Option<u64>,
    affinity: SessionAffinity,
) -> Arc<Dispatcher> {
    let waker = Arc::new(QueueWaker::default());
    let load = LoadTracker::with_listener(Instant::now, waker.clone());
    let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1);
    let router = Arc::new(router);
    publish(&router, 1..=workers);
    let config = QueueConfig {
        prefill_busy_threshold: threshold,
        ..QueueConfig::default()
    };
    let queue = AdmissionQueue::new(
        TimedRouter::new(router.clone()),
        &config,
        PrefillBacklog::Fixed,
    );
    waker.0.set(Arc::downgrade(&queue)).unwrap();
    let sessions = SessionStore::new(SessionRules::default(), Instant::now);
    let routing = SessionRouting {
        sessions,
        affinity,
        max_wait: Duration::from_secs(20),
    };
    Dispatcher::new(
        router,
        queue,
        Some(routing),
        SessionStore::new(RESPONSE_RULES, Instant::now),
        config.timeout.get(),
    )
}

fn publish(router: &Router, ids: std::ops::RangeInclusive<u64>) {
    router.set_workers(ids.map(worker));
}

/// Returns a request with its own prompt of 401 tokens.
fn request(first: u64) -> RouteRequest {
    let locals = (0..100).map(|at| LocalHash(first * 1000 + at)).collect();
    let hashes = BlockHashes::from_locals(401, BlockSize::new(4).unwrap(), locals);
    RouteRequest::new(None, RoutePrompt::Hashed(vec![hashes]))
}

fn session(id: &str) -> RequestSession {
    RequestSession {
        id: id.to_owned(),
        ..RequestSession::default()
    }
}

async fn dispatch(
    dispatcher: &Dispatcher,
    first: u64,
    session: Option<&RequestSession>,
) -> ActiveRequest {
    dispatcher
        .dispatch(request(first), session, |_| panic!("the request is queued"))
        .await
        .unwrap()
}

fn chosen_worker(active: &ActiveRequest) -> u64 {
    active.placement.route.to.rank.worker.0
}

fn is_idle(dispatcher: &Dispatcher) -> bool {
    let has_no_load = dispatcher
        .router()
        .load()
        .snapshot()
        .iter()
        .all(|load| load.active_requests == 0);
    let waiting: u64 = dispatcher
        .queue()
        .class_statuses()
        .iter()
        .map(|class| class.depth.requests)
        .sum();
    let sessions = dispatcher.sessions().unwrap().counts();
    has_no_load && waiting == 0 && (sessions.running, sessions.waiting) == (0, 0)
}

#[tokio::test]
async fn stored_response_outweighs_session() {
    let dispatcher = new_dispatcher(4, None, SessionAffinity::Hard);
    let reference = |id: &str, tenant: Option<&str>| ResponseReference {
        id: Some(id.to_owned()),
        may_store_response: true,
        tenant: tenant.map(str::to_owned),
    };
    let first = dispatch(&dispatcher, 0, None).await;
    let rank = first.placement.route.to.rank;
    dispatcher.record_stored("r", None, rank);
    let other = WorkerRank {
        worker: WorkerId(rank.worker.0 % 4 + 1),
        ..rank
    };
    dispatcher.record_stored("r", None, other);
    dispatcher.record_stored("r", Some("other tenant"), other);
    dispatcher.record_stored(&"r".repeat(257), None, rank);
    assert_eq!(dispatcher.stored_responses().counts().sessions, 2);
    assert_eq!(dispatcher.find_stored(&reference("r", None)), Some(rank));
    assert_eq!(dispatcher.find_stored(&reference("s", None)), None);
    assert_eq!(
        dispatcher.find_stored(&reference("r", Some("third tenant"))),
        None
    );
    for at in 1..8 {
        let session = session(&at.to_string());
        let mut request = request(at);
        request.constraints.storing_rank = dispatcher.find_stored(&reference("r", None));
        let next = dispatcher.dispatch(request, Some(&session), |_| ()).await;
        assert_eq!(next.unwrap().placement.route.to.rank, rank);
        let bound = dispatch(&dispatcher, at, Some(&session)).await;
        assert_eq!(bound.placement.route.to.rank, rank, "the session is there");
    }
    drop(first);
    assert!(is_idle(&dispatcher));
}

#[tokio::test]
async fn hard_session_stays_on_busy_worker() {
    let dispatcher = new_dispatcher(4, None, SessionAffinity::Hard);
    let first = dispatch(&dispatcher, 0, Some(&session("s"))).await;
    let mut held = Vec::new();
    for at in 1..20 {
        let next = dispatch(&dispatcher, at, Some(&session("s"))).await;
        assert_eq!(chosen_worker(&next), chosen_worker(&first));
        held.push(next);
    }
    assert_ne!(
        chosen_worker(&dispatch(&dispatcher, 99, None).await),
        chosen_worker(&first),
        "other requests go to an idle worker"
    );
    drop((first, held));
    assert!(is_idle(&dispatcher));
}

#[tokio::test]
async fn only_soft_session_leaves_busy_worker() {
    for (affinity, stays) in [
        (SessionAffinity::Hard, true),
        (SessionAffinity::Soft, false),
    ] {
        let dispatcher = new_dispatcher(2, Some(500), affinity);
        let held = [
            dispatch(&dispatcher, 0, Some(&session("s"))).await,
            dispatch(&dispatcher, 1, Some(&session("s"))).await,
        ];
        assert_eq!(chosen_worker(&held[0]), chosen_worker(&held[1]));
        let mut reported_wait = None;
        let s = session("s");
        let next = dispatcher.dispatch(request(2), Some(&s), |wait| reported_wait = Some(wait));
        let next = tokio::time::timeout(Duration::from_millis(50), next).await;
        if stays {
            assert!(next.is_err(), "the session waits for its worker");
            assert_eq!(
                reported_wait.map(|wait| wait.as_secs_f64().round()),
                Some(30.0),
                "the maximum wait is reported"
            );
        } else {
            assert_ne!(
                chosen_worker(&next.unwrap().unwrap()),
                chosen_worker(&held[0])
            );
            assert_ne!(
                chosen_worker(&dispatch(&dispatcher, 3, Some(&session("s"))).await),
                chosen_worker(&held[0]),
                "the session moved"
            );
        }
        drop(held);
        assert!(is_idle(&dispatcher), "the cancelled request leaves nothing");
    }
}

#[tokio::test]
async fn concurrent_first_requests_share_one_worker() {
    let dispatcher = new_dispatcher(8, Some(500), SessionAffinity::Hard);
    // All workers are busy, so the first request of the session is queued, and the others wait for
    // it.
    let held: Vec<_> = futures_util::future::join_all((0..16).map(|at| {
        let dispatcher = &dispatcher;
        async move { dispatch(dispatcher, at, None).await }
    }))
    .await;
    let running: Vec<_> = (100..110)
        .map(|at| {
            let dispatcher = dispatcher.clone();
            tokio::spawn(async move {
                dispatcher
                    .dispatch(request(at), Some(&session("s")), |_| {})
                    .await
                    .unwrap()
            })
        })
        .collect();
    while dispatcher.sessions().unwrap().counts().waiting < 9 {
        tokio::task::yield_now().await;
    }
    drop(held);
    let mut ids = Vec::new();
    for task in running {
        let mut active = task.await.unwrap();
        active.placement.reservation.on_first_token();
        ids.push(chosen_worker(&active));
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
    assert!(is_idle(&dispatcher));
}

#[tokio::test]
async fn session_of_removed_worker_moves_and_can_end() {
    let dispatcher = new_dispatcher(2, None, SessionAffinity::Hard);
    let first = chosen_worker(&dispatch(&dispatcher, 0, Some(&session("s"))).await);
    publish(dispatcher.router(), if first == 1 { 2..=3 } else { 1..=1 });
    let second = chosen_worker(&dispatch(&dispatcher, 1, Some(&session("s"))).await);
    assert_ne!(first, second);
    for at in 2..10 {
        assert_eq!(
            chosen_worker(&dispatch(&dispatcher, at, Some(&session("s"))).await),
            second
        );
    }
    let last = RequestSession {
        is_last: true,
        ..session("s")
    };
    let active = dispatch(&dispatcher, 10, Some(&last)).await;
    assert_eq!(dispatcher.sessions().unwrap().counts().sessions, 1);
    drop(active);
    assert_eq!(dispatcher.sessions().unwrap().counts().sessions, 0);
}

/// Reports that the chosen worker is unreachable, until it is ejected.
fn eject(router: &Router, active: &mut ActiveRequest) {
    // The request was answered already.
    active.placement.tracked.clear();
    let dead = WorkerResponse {
        status: 503,
        origin: ResponseOrigin::Gateway,
    };
    (0..3).for_each(|_| drop(router.on_response(&mut active.placement, dead)));
}

#[tokio::test]
async fn hard_session_returns_after_overload_of_its_worker() {
    let dispatcher = new_dispatcher(2, None, SessionAffinity::Hard);
    let mut first = dispatch(&dispatcher, 0, Some(&session("s"))).await;
    let home = chosen_worker(&first);
    let response = |status, origin| WorkerResponse { status, origin };
    let router = dispatcher.router();
    router.on_response(&mut first.placement, response(503, ResponseOrigin::Chosen));
    let detour = dispatch(&dispatcher, 1, Some(&session("s"))).await;
    assert_ne!(chosen_worker(&detour), home);
    assert_eq!(
        detour.session.unwrap().target(),
        first.placement.route.to.rank,
        "the session is still bound there"
    );
    eject(router, &mut first);
    let moved = dispatch(&dispatcher, 2, Some(&session("s"))).await;
    assert_ne!(chosen_worker(&moved), home);
    assert_eq!(
        moved.session.unwrap().target(),
        moved.placement.route.to.rank,
        "the worker does not respond any more"
    );
}

#[tokio::test]
async fn serving_worker_takes_over_the_session_unless_hard() {
    for affinity in [SessionAffinity::Hard, SessionAffinity::Soft] {
        let dispatcher = new_dispatcher(2, None, affinity);
        let router = dispatcher.router();
        let target = |active: &ActiveRequest| active.session.as_ref().unwrap().target().worker.0;
        let mut first = dispatch(&dispatcher, 0, Some(&session("s"))).await;
        let home = 3 - chosen_worker(&first);
        let moved = first.on_served_by(router, endpoint(home));
        assert_eq!(
            moved,
            RelocationOutcome::Moved(first.placement.route.to.rank),
            "{affinity:?}"
        );
        assert_eq!(
            (chosen_worker(&first), target(&first)),
            (home, home),
            "{affinity:?}: no other worker has its cache"
        );
        assert_eq!(
            first.on_served_by(router, endpoint(home)),
            RelocationOutcome::Unchanged
        );
        assert_eq!(
            first.on_served_by(router, endpoint(9)),
            RelocationOutcome::Released
        );
        assert_eq!(
            target(&first),
            home,
            "{affinity:?}: the endpoint is unknown"
        );

        let mut second = dispatch(&dispatcher, 1, Some(&session("s"))).await;
        assert_eq!(chosen_worker(&second), home, "{affinity:?}");
        second.on_served_by(router, endpoint(3 - home));
        let stays = affinity == SessionAffinity::Hard;
        assert_eq!(target(&second) == home, stays, "{affinity:?}");
        if stays {
            let mut third = dispatch(&dispatcher, 2, Some(&session("s"))).await;
            eject(router, &mut third);
            third.on_served_by(router, endpoint(3 - home));
            assert_ne!(target(&third), home, "the ejected worker loses the session");
        }
        drop((first, second));
        assert!(is_idle(&dispatcher));
    }
}

#[tokio::test]
async fn session_leaves_draining_worker() {
    for affinity in [SessionAffinity::Hard, SessionAffinity::Soft] {
        let dispatcher = new_dispatcher(2, None, affinity);
        let first = dispatch(&dispatcher, 0, Some(&session("s"))).await;
        let home = chosen_worker(&first);
        let draining = |id| Worker {
            draining: id == home,
            ..worker(id)
        };
        let change =
            Fleet::clone(&dispatcher.router().fleet()).reconcile((1..=2).map(draining).collect());
        assert!(change.added.is_empty() && change.removed.is_empty());
        dispatcher.router().set_fleet(Arc::new(change.fleet));
        let second = dispatch(&dispatcher, 1, Some(&session("s"))).await;
        assert_eq!(
            (
                chosen_worker(&second),
                second.session.unwrap().target().worker.0
            ),
            (3 - home, 3 - home),
            "{affinity:?}"
        );
    }
}

#[tokio::test]
async fn requests_for_different_workers_are_admitted_independently() {
    let dispatcher = new_dispatcher(2, Some(300), SessionAffinity::Hard);
    let request_for = |id: u64, first: u64| {
        let mut request = request(first);
        request.constraints.allowed = Some([WorkerId(id)].into());
        request
    };
    let _held = dispatcher
        .dispatch(request_for(1, 0), None, |_| {})
        .await
        .unwrap();
    let blocked = tokio::spawn({
        let dispatcher = dispatcher.clone();
        let request = request_for(1, 1);
        async move { dispatcher.dispatch(request, None, |_| {}).await }
    });
    while dispatcher.queue().class_statuses()[0].depth.requests == 0 {
        tokio::task::yield_now().await;
    }
    let other = dispatcher
        .dispatch(request_for(2, 2), None, |_| panic!("the request is queued"))
        .await
        .unwrap();
    assert_eq!(chosen_worker(&other), 2);
    blocked.abort();
    assert!(blocked.await.is_err_and(|error| error.is_cancelled()));
    assert_eq!(dispatcher.queue().class_statuses()[0].depth.requests, 0);
}

#[tokio::test]
async fn explanation_reads_session_and_queue_without_entering() {
    for (affinity, stays) in [
        (SessionAffinity::Hard, true),
        (SessionAffinity::Soft, false),
    ] {
        let dispatcher = new_dispatcher(2, Some(100), affinity);
        let held = dispatch(&dispatcher, 1, Some(&session("s"))).await;
        let before = (
            dispatcher.router().load().snapshot(),
            dispatcher.sessions().unwrap().counts(),
        );
        let winner = |id: &str| {
            let explanation = dispatcher.explain(request(2), Some(&session(id)));
            assert_eq!(explanation.class.as_deref(), Some("default"));
            (
                explanation.phases[0].winner.map(|rank| rank.worker.0),
                explanation.busy,
                explanation.summary,
            )
        };
        let (bound, busy, summary) = winner("s");
        assert_eq!(
            (bound == Some(chosen_worker(&held)), busy),
            (stays, stays),
            "{affinity:?}: {summary}"
        );
        assert_eq!(
            summary.contains("but it is queued first, because all candidates are busy"),
            stays
        );
        let (free, busy, _) = winner("another");
        assert!(free != Some(chosen_worker(&held)) && !busy, "{affinity:?}");
        let other = dispatch(&dispatcher, 3, None).await;
        assert!(winner("another").1, "{affinity:?}: both workers are busy");
        drop(other);
        assert_eq!(
            (
                dispatcher.router().load().snapshot(),
                dispatcher.sessions().unwrap().counts()
            ),
            before
        );
        drop(held);
        assert!(is_idle(&dispatcher));
    }
}

#[tokio::test]
async fn preview_follows_session_and_excluded_worker_moves_it() {
    let dispatcher = new_dispatcher(2, None, SessionAffinity::Hard);
    let home = chosen_worker(&dispatch(&dispatcher, 0, Some(&session("s"))).await);
    let _held = dispatch(&dispatcher, 1, Some(&session("s"))).await;
    assert_eq!(
        dispatcher
            .preview(request(2), Some(&session("s")))
            .unwrap()
            .to
            .rank
            .worker
            .0,
        home
    );
    assert_ne!(
        dispatcher
            .preview(request(2), None)
            .unwrap()
            .to
            .rank
            .worker
            .0,
        home,
        "an idle worker"
    );
    let mut restricted = request(3);
    restricted.constraints.allowed = Some([WorkerId(3 - home)].into());
    let moved = dispatcher
        .dispatch(restricted, Some(&session("s")), |_| {})
        .await
        .unwrap();
    assert_eq!(moved.session.unwrap().target().worker, WorkerId(3 - home));
}

#[tokio::test]
async fn request_without_prompt_bypasses_the_queue() {
    let dispatcher = new_dispatcher(1, Some(100), SessionAffinity::Hard);
    let _held = dispatch(&dispatcher, 0, None).await;
    let reason = Reason::NotInference;
    let models = RouteRequest::new(None, RoutePrompt::Estimated { tokens: 0, reason });
    let active = dispatcher
        .dispatch(models, None, |_| panic!("the request is queued"))
        .await
        .unwrap();
    assert_eq!(chosen_worker(&active), 1);
}
