//! Engine sessions against a server that has SGLang's two session endpoints, records the calls, and
//! rejects the same calls as SGLang.

pub(crate) mod engine;
mod server;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use proto::external_processor_client::ExternalProcessorClient;
use serde_json::json;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::LoadTracker;
use warmroute_core::router::{Router, RouterSettings};
use warmroute_core::sessions::{
    BindingVersion, PendingBinding, SessionEntry, SessionKey, SessionLease, SessionListener,
    SessionName, SessionRecording, SessionRules, SessionStore, SessionUpdate, UpdateKind,
};
use warmroute_core::worker::{
    BlockSize, DpRank, RankRange, Worker, WorkerEndpoint, WorkerId, WorkerRank,
};
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_engines::engine_sessions::config::EngineSessionsConfig;
use warmroute_engines::engine_sessions::{EngineAccess, EngineSessions, RecordedSessions};
use warmroute_metrics::{EngineSessionLabels, Metrics};
use warmroute_settings::DurationSetting;
use warmroute_testbed::ports::{PATIENCE, until};

use engine::{EngineBehaviour, SessionEngine, close, open};

const TTL: u64 = 60;

/// Session table with workers 1, 2, … at the given addresses, and the client of their session
/// endpoints.
struct SessionBed {
    sessions: Arc<SessionStore>,
    router: Arc<Router>,
    engines: Arc<EngineSessions>,
    metrics: Arc<Metrics>,
    seconds: Arc<AtomicU64>,
    task: AbortOnDropHandle<()>,
}

fn worker(id: u64, address: SocketAddr) -> Worker {
    Worker {
        ranks: RankRange {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..Worker::new(
            WorkerId(id),
            WorkerEndpoint(address),
            "m".into(),
            BlockSize::new(16).unwrap(),
        )
    }
}

/// Wakes the session client after a session has moved.
struct MoveNotifier(Arc<Notify>);

impl SessionListener for MoveNotifier {
    fn on_moves(&self) {
        self.0.notify_one();
    }
}

impl SessionBed {
    fn start(addresses: &[SocketAddr], config: EngineSessionsConfig) -> Self {
        let seconds = Arc::new(AtomicU64::new(0));
        let begin = Instant::now();
        let clock = seconds.clone();
        let rules = SessionRules {
            ttl: Duration::from_secs(TTL),
            ..SessionRules::default()
        };
        let moves = Arc::new(Notify::new());
        let sessions = SessionStore::with_listener(
            rules,
            move || begin + Duration::from_secs(clock.load(Ordering::Relaxed)),
            SessionRecording {
                moves: true,
                updates_by: Some(1),
            },
            Arc::new(MoveNotifier(moves.clone())),
        );
        let load = LoadTracker::new(Instant::now);
        let router = Arc::new(Router::new(
            PrefixIndex::new(),
            load,
            RouterSettings::default(),
            1,
        ));
        let metrics = Arc::new(Metrics::new());
        let access = EngineAccess::new(
            &EngineClient::new(&EnginesConfig::default()).unwrap(),
            &EnginesConfig::default(),
        );
        let engines = EngineSessions::new(
            config,
            access,
            RecordedSessions {
                sessions: sessions.clone(),
                moves,
            },
            router.clone(),
            metrics.clone(),
        );
        let running = engines.clone();
        let task = AbortOnDropHandle::new(tokio::spawn(async move { running.run().await }));
        let bed = Self {
            sessions,
            router,
            engines,
            metrics,
            seconds,
            task,
        };
        bed.serve(addresses);
        bed
    }

    fn serve(&self, addresses: &[SocketAddr]) {
        let workers = addresses
            .iter()
            .zip(1..)
            .map(|(address, id)| worker(id, *address))
            .collect();
        let fleet = Arc::new(self.router.fleet().reconcile(workers).fleet);
        self.router.set_fleet(fleet.clone());
        self.sessions
            .retain(|worker| fleet.worker(worker).is_some());
    }

    fn enter(&self, id: &str, tenant: Option<&str>) -> SessionEntry {
        let name = SessionName {
            id,
            parent: None,
            model: None,
            tenant,
        };
        self.sessions.enter(name).unwrap()
    }

    fn enter_first(&self, id: &str) -> PendingBinding {
        match self.enter(id, None) {
            SessionEntry::First(binding) => binding,
            other => panic!("{other:?}"),
        }
    }

    fn enter_bound(&self, id: &str) -> SessionLease {
        match self.enter(id, None) {
            SessionEntry::Bound(hold) => hold,
            other => panic!("{other:?}"),
        }
    }

    fn advance_time(&self, seconds: u64) {
        self.seconds.fetch_add(seconds, Ordering::Relaxed);
        self.sessions.expire();
    }

    fn count(&self, call: &'static str, outcome: &'static str) -> u64 {
        self.metrics
            .sessions
            .engine_calls
            .get_or_create(&EngineSessionLabels { call, outcome })
            .get()
    }

    /// Waits until no engine session is counted as open.
    async fn wait_for_no_open_session(&self) {
        let closed = async || self.metrics.sessions.engine_sessions.get() == 0;
        assert!(until(PATIENCE, closed).await);
    }

    /// Waits until `count` calls have ended with an outcome.
    async fn wait_for_calls(&self, call: &'static str, outcome: &'static str, count: u64) {
        until(PATIENCE, async || self.count(call, outcome) >= count).await;
        assert_eq!(self.count(call, outcome), count, "{call} {outcome}");
    }
}

fn sglang() -> EngineSessionsConfig {
    serde_json::from_value(json!({"kind": "sglang"})).unwrap()
}

fn session_key(id: &str) -> Arc<SessionKey> {
    Arc::new(SessionKey {
        model: None,
        tenant: None,
        group: false,
        id: id.into(),
    })
}

fn rank(worker: u64, rank: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(rank),
    }
}

async fn one_engine() -> (SessionEngine, SessionBed) {
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let bed = SessionBed::start(&[engine.address], sglang());
    (engine, bed)
}

async fn two_engines(
    [first, second]: [EngineBehaviour; 2],
    config: EngineSessionsConfig,
) -> ([SessionEngine; 2], SessionBed) {
    let engines = [
        SessionEngine::start(first).await,
        SessionEngine::start(second).await,
    ];
    let bed = SessionBed::start(&[engines[0].address, engines[1].address], config);
    (engines, bed)
}

#[tokio::test]
async fn session_opens_once_and_closes_when_idle() {
    let (engine, bed) = one_engine().await;
    drop(bed.enter_first("a").bind(rank(1, 0)));
    bed.wait_for_calls("open", "ok", 1).await;
    bed.advance_time(TTL - 1);
    drop((bed.enter_bound("a"), bed.enter_bound("a")));
    bed.advance_time(TTL - 1);
    drop(bed.enter_bound("a"));
    assert_eq!(bed.metrics.sessions.engine_sessions.get(), 1);
    bed.advance_time(TTL);
    assert_eq!(engine.received_calls(2).await, [open("a"), close("a")]);
    bed.wait_for_calls("close", "ok", 1).await;
    assert_eq!(
        (
            bed.count("open", "ok"),
            bed.metrics.sessions.engine_sessions.get()
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn last_request_of_session_closes_it() {
    let (engine, bed) = one_engine().await;
    let hold = bed.enter_first("a").bind(rank(1, 0));
    engine.received_calls(1).await;
    hold.finish();
    assert_eq!(bed.count("close", "ok"), 0, "the request is still active");
    drop(hold);
    assert_eq!(engine.received_calls(2).await, [open("a"), close("a")]);
}

#[tokio::test]
async fn moved_session_closes_and_opens() {
    let (engines, bed) = two_engines([EngineBehaviour::Well; 2], sglang()).await;
    let mut hold = bed.enter_first("a").bind(rank(1, 0));
    engines[0].received_calls(1).await;
    hold.rebind(rank(2, 1));
    assert_eq!(engines[0].received_calls(2).await, [open("a"), close("a")]);
    assert_eq!(engines[1].received_calls(1).await, [open("a")]);
    // Another rank of the same worker has a separate cache, so the engine session is opened again.
    hold.rebind(rank(2, 0));
    assert_eq!(
        engines[1].received_calls(3).await,
        [open("a"), close("a"), open("a")]
    );
    hold.rebind(rank(1, 0));
    assert_eq!(engines[1].received_calls(4).await[3], close("a"));
    assert_eq!(engines[0].received_calls(3).await[2], open("a"));
}

#[tokio::test]
async fn sessions_of_removed_worker_are_closed() {
    let (engines, bed) = two_engines([EngineBehaviour::Well; 2], sglang()).await;
    drop(bed.enter_first("idle").bind(rank(2, 0)));
    let _running = bed.enter_first("running").bind(rank(2, 0));
    engines[1].received_calls(2).await;
    bed.serve(&[engines[0].address]);
    engines[1].received_calls(4).await;
    assert!(engines[1].state.borrow().open.is_empty());
    assert_eq!(engines[0].calls(), []);
}

#[tokio::test]
async fn open_and_close_of_one_id_are_ordered() {
    let (engine, bed) = one_engine().await;
    for nth in 0..200 {
        let hold = bed.enter_first("a").bind(rank(1, 0));
        engine.received_calls(2 * nth + 1).await;
        hold.finish();
        // The next session with this id begins before the close call of this one.
        drop(hold);
    }
    let calls = engine.received_calls(400).await;
    assert!(calls.chunks(2).all(|pair| pair == [open("a"), close("a")]));
    bed.wait_for_calls("close", "ok", 200).await;
    assert_eq!(engine.state.borrow().refused, 0);
}

#[tokio::test]
async fn groups_are_not_opened_and_options_are_sent() {
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let config = EngineSessionsConfig {
        capacity: 1000,
        streaming: true,
        idle_timeout: Some(DurationSetting::seconds(90)),
        ..sglang()
    };
    let bed = SessionBed::start(&[engine.address], config);
    let Ok(SessionEntry::First(group)) = bed.sessions.enter(SessionName {
        id: "child",
        parent: Some("p"),
        model: None,
        tenant: None,
    }) else {
        panic!("the group is new")
    };
    drop(group.bind(rank(1, 0)));
    drop(bed.enter_first("a").bind(rank(1, 0)));
    let expected_options = json!({ "capacity_of_str_len": 1000, "session_id": "a", "streaming": true, "timeout": 90.0 });
    assert_eq!(
        engine.received_calls(1).await,
        [("open_session".to_owned(), expected_options)]
    );
    bed.advance_time(TTL);
    assert_eq!(engine.received_calls(2).await[1], close("a"));
}

#[tokio::test]
async fn failed_calls_are_counted_without_other_effect() {
    let down = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    // Another client has opened this session.
    engine
        .state
        .send_modify(|state| state.open.extend(["taken".to_owned()]));
    let bed = SessionBed::start(&[down, engine.address], sglang());
    drop((
        bed.enter_first("a").bind(rank(1, 0)),
        bed.enter_first("taken").bind(rank(2, 0)),
    ));
    bed.wait_for_calls("open", "unreachable", 1).await;
    bed.wait_for_calls("open", "status", 1).await;
    assert_eq!(
        bed.enter_bound("a").target(),
        rank(1, 0),
        "the session remains bound"
    );
    bed.advance_time(TTL);
    // A session that did not open on an unreachable engine is not closed. The session that the
    // engine rejected is closed, because it may be left from before a restart of warmroute.
    bed.wait_for_calls("close", "ok", 1).await;
    drop(bed.enter_first("b").bind(rank(2, 0)));
    bed.wait_for_calls("open", "ok", 1).await;
    let names: Vec<_> = engine.calls().into_iter().map(|(path, _)| path).collect();
    assert_eq!(names, ["open_session", "close_session", "open_session"]);
    assert!(!engine.state.borrow().open.contains("taken"));
    assert_eq!(bed.metrics.sessions.engine_sessions.get(), 1);
}

#[tokio::test]
async fn hanging_engine_is_isolated_and_still_closed() {
    let config = EngineSessionsConfig {
        timeout: DurationSetting::millis(50),
        ..sglang()
    };
    let behaviours = [EngineBehaviour::Never, EngineBehaviour::Well];
    let (engines, bed) = two_engines(behaviours, config).await;
    for nth in 0..100 {
        drop(bed.enter_first(&format!("slow {nth}")).bind(rank(1, 0)));
    }
    drop(bed.enter_first("quick").bind(rank(2, 0)));
    assert_eq!(engines[1].received_calls(1).await, [open("quick")]);
    bed.wait_for_calls("open", "timeout", 100).await;
    assert_eq!(bed.metrics.sessions.engine_sessions.get(), 101);
    bed.advance_time(TTL);
    bed.wait_for_calls("close", "timeout", 100).await;
    bed.wait_for_calls("close", "ok", 1).await;
    assert_eq!(bed.metrics.sessions.engine_sessions.get(), 0);
}

#[tokio::test]
async fn session_of_another_replica_closes_after_inheritance() {
    let (engine, bed) = one_engine().await;
    let hold = bed.enter_first("a").bind(rank(1, 0));
    bed.wait_for_calls("open", "ok", 1).await;
    let session = session_key("a");
    let bound = |version, by| SessionUpdate::Bound {
        session: session.clone(),
        target: rank(1, 0),
        version: BindingVersion {
            version,
            router: by,
        },
    };
    bed.sessions.apply_update(bound(1, 2), UpdateKind::InUse);
    bed.wait_for_no_open_session().await;
    drop(hold);
    bed.sessions.apply_update(
        SessionUpdate::Ended {
            session: session.clone(),
            version: BindingVersion {
                version: 1,
                router: 2,
            },
        },
        UpdateKind::InUse,
    );
    // Calls of one session are ordered. A close call for this end would have preceded the next open
    // call.
    drop(bed.enter_first("a").bind(rank(1, 0)));
    bed.wait_for_calls("open", "status", 1).await;
    assert_eq!(engine.calls(), [open("a"), open("a")]);

    // The replica that opened the session leaves. This replica takes the open session over and
    // closes it.
    bed.sessions.apply_update(bound(2, 2), UpdateKind::InUse);
    bed.wait_for_no_open_session().await;
    assert_eq!(bed.sessions.take_over_orphans(|_| false), 1);
    bed.wait_for_calls("open", "status", 2).await;
    bed.advance_time(TTL);
    bed.wait_for_calls("close", "ok", 1).await;
    assert_eq!(engine.calls()[2..], [open("a"), close("a")]);
}

#[tokio::test]
async fn tenants_share_one_engine_session() {
    let (engine, bed) = one_engine().await;
    let bind = |tenant, dp_rank| match bed.enter("a", Some(tenant)) {
        SessionEntry::First(binding) => binding.bind(rank(1, dp_rank)),
        other => panic!("{other:?}"),
    };
    let one = bind("one", 0);
    let two = bind("two", 1);
    bed.wait_for_calls("open", "ok", 1).await;
    two.finish();
    drop(two);
    let _other = bed.enter_first("b").bind(rank(1, 0));
    bed.wait_for_calls("open", "ok", 2).await;
    assert_eq!(
        engine.calls(),
        [open("a"), open("b")],
        "tenant one still uses it"
    );
    one.finish();
    drop(one);
    bed.wait_for_calls("close", "ok", 1).await;
    assert_eq!(engine.calls()[2..], [close("a")]);
}

#[tokio::test]
async fn requests_of_inherited_sessions_do_not_wait() {
    let engine = SessionEngine::start(EngineBehaviour::Never).await;
    let bed = SessionBed::start(&[engine.address], sglang());
    let session = session_key("a");
    let stamp = BindingVersion {
        version: 1,
        router: 2,
    };
    bed.sessions.apply_update(
        SessionUpdate::Bound {
            session,
            target: rank(1, 0),
            version: stamp,
        },
        UpdateKind::InUse,
    );
    assert_eq!(bed.sessions.take_over_orphans(|_| false), 1);
    let waiting = bed
        .engines
        .wait_until_open(rank(1, 0), "a".to_owned(), None);
    let open = tokio::time::timeout(bed.engines.deadline() / 2, waiting).await;
    assert!(open.is_ok(), "the session is already open on the engine");
}

#[tokio::test]
async fn shutdown_closes_sessions_and_skips_hanging_engines() {
    let behaviours = [EngineBehaviour::Well, EngineBehaviour::Never];
    let config = EngineSessionsConfig {
        timeout: DurationSetting::seconds(3_600),
        ..sglang()
    };
    let (engines, bed) = two_engines(behaviours, config).await;
    let holds: Vec<_> = (0..300)
        .map(|nth| bed.enter_first(&nth.to_string()).bind(rank(1, 0)))
        .collect();
    let _hangs = bed.enter_first("hangs").bind(rank(2, 0));
    bed.wait_for_calls("open", "ok", 300).await;
    engines[1].received_calls(1).await;
    bed.task.abort();
    let all_closed = async {
        engines[0].received_calls(600).await;
        engines[1].received_calls(2).await;
    };
    tokio::select! {
        () = bed.engines.close_all(PATIENCE * 2, false) => panic!("the hanging engine responded"),
        () = all_closed => {}
    }
    assert!(engines[0].state.borrow().open.is_empty());
    assert_eq!(engines[1].calls(), [open("hangs"), close("hangs")]);
    bed.engines.close_all(Duration::ZERO, false).await;
    drop(holds);
}

#[tokio::test]
async fn shutdown_leaves_active_sessions_to_replicas() {
    let (engine, bed) = one_engine().await;
    let _used = bed.enter_first("used").bind(rank(1, 0));
    let ended = bed.enter_first("ended").bind(rank(1, 0));
    bed.wait_for_calls("open", "ok", 2).await;
    bed.task.abort();
    ended.finish();
    drop(ended);
    bed.engines.close_all(PATIENCE, true).await;
    assert_eq!(engine.calls()[2..], [close("ended")]);
    bed.engines.close_all(PATIENCE, false).await;
    assert_eq!(engine.calls()[3..], [close("used")]);
}
