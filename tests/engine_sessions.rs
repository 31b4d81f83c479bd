//! Engines that are told of sessions: a server with SGLang's two session endpoints, which remembers what it was told and
//! refuses what SGLang refuses.

#![expect(
    clippy::unwrap_used,
    reason = "in a test, and in what helps it, a failure is a failed test"
)]

#[path = "engine_sessions/engine.rs"]
mod engine;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use proto::external_processor_client::ExternalProcessorClient;
use proto::processing_request::Request as Message;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use warmroute::app::App;
use warmroute::config::Config;
use warmroute::engine_client::EngineClient;
use warmroute::engine_client::config::EnginesConfig;
use warmroute::engine_sessions::config::{EngineKind, EngineSessionsConfig};
use warmroute::engine_sessions::{EngineAccess, EngineSessions};
use warmroute::index::PrefixIndex;
use warmroute::load::LoadTracker;
use warmroute::metrics::{EngineSessionLabels, Metrics};
use warmroute::router::{Router, RouterSettings};
use warmroute::sessions::{
    Binding, Entry, Hold, SessionKey, SessionName, SessionRules, Sessions, Stamp, Use, Word,
};
use warmroute::settings::Period;
use warmroute::worker::{BlockSize, DpRank, Endpoint, Ranks, Worker, WorkerId, WorkerRank};

use engine::{Engine, Manner, close, open};

const DEADLINE: Duration = Duration::from_secs(20);
const TTL: u64 = 60;

/// Sessions on workers 1, 2, … at the given addresses, and the part that tells their engines.
struct Bed {
    sessions: Arc<Sessions>,
    router: Arc<Router>,
    engines: Arc<EngineSessions>,
    metrics: Arc<Metrics>,
    seconds: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn worker(id: u64, address: SocketAddr) -> Worker {
    Worker {
        ranks: Ranks {
            start: 0,
            size: 2.try_into().unwrap(),
        },
        ..Worker::new(
            WorkerId(id),
            Endpoint(address),
            "m".into(),
            BlockSize::new(16).unwrap(),
        )
    }
}

impl Bed {
    fn start(addresses: &[SocketAddr], config: EngineSessionsConfig) -> Self {
        let seconds = Arc::new(AtomicU64::new(0));
        let (begin, clock) = (Instant::now(), seconds.clone());
        let rules = SessionRules {
            ttl: Duration::from_secs(TTL),
            ..SessionRules::default()
        };
        let sessions = Sessions::new(rules, move || {
            begin + Duration::from_secs(clock.load(Ordering::Relaxed))
        });
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
            sessions.clone(),
            router.clone(),
            metrics.clone(),
        );
        let running = engines.clone();
        let task = tokio::spawn(async move { running.run().await });
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
        self.router.publish(fleet.clone());
        self.sessions
            .retain(|worker| fleet.worker(worker).is_some());
    }

    fn first(&self, id: &str) -> Binding {
        match self
            .sessions
            .enter(SessionName {
                id,
                parent: None,
                model: None,
                tenant: None,
            })
            .unwrap()
        {
            Entry::First(binding) => binding,
            other => panic!("{other:?}"),
        }
    }

    fn bound(&self, id: &str) -> Hold {
        match self
            .sessions
            .enter(SessionName {
                id,
                parent: None,
                model: None,
                tenant: None,
            })
            .unwrap()
        {
            Entry::Bound(hold) => hold,
            other => panic!("{other:?}"),
        }
    }

    fn pass(&self, seconds: u64) {
        self.seconds.fetch_add(seconds, Ordering::Relaxed);
        self.sessions.expire();
    }

    fn count(&self, call: &'static str, outcome: &'static str) -> u64 {
        self.metrics
            .engine_session_calls
            .get_or_create(&EngineSessionLabels { call, outcome })
            .get()
    }

    /// Waits until nothing is open because of us.
    async fn forgets(&self) {
        let forgotten = async {
            while self.metrics.engine_sessions.get() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        assert!(tokio::time::timeout(DEADLINE, forgotten).await.is_ok());
    }

    /// Waits until calls have ended so.
    async fn counted(&self, call: &'static str, outcome: &'static str, count: u64) {
        let counted = async {
            while self.count(call, outcome) < count {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let reached = tokio::time::timeout(DEADLINE, counted).await;
        assert!(
            reached.is_ok(),
            "{call} {outcome} is {}, not {count}",
            self.count(call, outcome)
        );
        assert_eq!(self.count(call, outcome), count);
    }
}

fn sglang() -> EngineSessionsConfig {
    EngineSessionsConfig::of(EngineKind::Sglang)
}

fn rank(worker: u64, rank: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(rank),
    }
}

#[tokio::test]
async fn a_session_is_opened_once_and_closed_when_it_was_not_used_for_its_time() {
    let engine = Engine::start(Manner::Well).await;
    let bed = Bed::start(&[engine.address], sglang());
    drop(bed.first("a").bind(rank(1, 0)));
    bed.counted("open", "ok", 1).await;
    bed.pass(TTL - 1);
    drop((bed.bound("a"), bed.bound("a")));
    bed.pass(TTL - 1);
    drop(bed.bound("a"));
    assert_eq!(bed.metrics.engine_sessions.get(), 1);
    bed.pass(TTL);
    assert_eq!(engine.heard(2).await, [open("a"), close("a")]);
    bed.counted("close", "ok", 1).await;
    assert_eq!(
        (bed.count("open", "ok"), bed.metrics.engine_sessions.get()),
        (1, 0)
    );
}

#[tokio::test]
async fn the_last_request_of_a_session_closes_it() {
    let engine = Engine::start(Manner::Well).await;
    let bed = Bed::start(&[engine.address], sglang());
    let hold = bed.first("a").bind(rank(1, 0));
    engine.heard(1).await;
    hold.finish();
    assert_eq!(bed.count("close", "ok"), 0, "it still runs");
    drop(hold);
    assert_eq!(engine.heard(2).await, [open("a"), close("a")]);
}

#[tokio::test]
async fn a_session_that_moves_is_closed_where_it_was_and_opened_where_it_goes() {
    let engines = [
        Engine::start(Manner::Well).await,
        Engine::start(Manner::Well).await,
    ];
    let bed = Bed::start(&[engines[0].address, engines[1].address], sglang());
    let mut hold = bed.first("a").bind(rank(1, 0));
    engines[0].heard(1).await;
    hold.rebind(rank(2, 1));
    assert_eq!(engines[0].heard(2).await, [open("a"), close("a")]);
    assert_eq!(engines[1].heard(1).await, [open("a")]);
    // Another rank of the same worker has a cache of its own, so what was kept is of no use there.
    hold.rebind(rank(2, 0));
    assert_eq!(
        engines[1].heard(3).await,
        [open("a"), close("a"), open("a")]
    );
    hold.rebind(rank(1, 0));
    assert_eq!(engines[1].heard(4).await[3], close("a"));
    assert_eq!(engines[0].heard(3).await[2], open("a"));
}

#[tokio::test]
async fn the_sessions_of_a_worker_that_leaves_the_fleet_are_closed_at_its_engine() {
    let engines = [
        Engine::start(Manner::Well).await,
        Engine::start(Manner::Well).await,
    ];
    let bed = Bed::start(&[engines[0].address, engines[1].address], sglang());
    drop(bed.first("idle").bind(rank(2, 0)));
    let _running = bed.first("running").bind(rank(2, 0));
    engines[1].heard(2).await;
    bed.serve(&[engines[0].address]);
    engines[1].heard(4).await;
    assert!(engines[1].told.borrow().open.is_empty());
    assert_eq!(engines[0].calls(), []);
}

#[tokio::test]
async fn ends_and_beginnings_of_one_name_come_in_their_order() {
    let engine = Engine::start(Manner::Well).await;
    let bed = Bed::start(&[engine.address], sglang());
    for nth in 0..200 {
        let hold = bed.first("a").bind(rank(1, 0));
        engine.heard(2 * nth + 1).await;
        hold.finish();
        // The next one begins before this end is told.
        drop(hold);
    }
    let calls = engine.heard(400).await;
    assert!(calls.chunks(2).all(|pair| pair == [open("a"), close("a")]));
    bed.counted("close", "ok", 200).await;
    assert_eq!(engine.told.borrow().refused, 0);
}

#[tokio::test]
async fn groups_are_not_opened_and_what_is_configured_is_said() {
    let engine = Engine::start(Manner::Well).await;
    let config = EngineSessionsConfig {
        capacity: 1000,
        streaming: true,
        idle: Some(Period::seconds(90)),
        ..EngineSessionsConfig::of(EngineKind::Sglang)
    };
    let bed = Bed::start(&[engine.address], config);
    let Ok(Entry::First(group)) = bed.sessions.enter(SessionName {
        id: "child",
        parent: Some("p"),
        model: None,
        tenant: None,
    }) else {
        panic!("nobody was there before")
    };
    drop(group.bind(rank(1, 0)));
    drop(bed.first("a").bind(rank(1, 0)));
    let said = json!({ "capacity_of_str_len": 1000, "session_id": "a", "streaming": true, "timeout": 90.0 });
    assert_eq!(engine.heard(1).await, [("open_session".to_owned(), said)]);
    bed.pass(TTL);
    assert_eq!(engine.heard(2).await[1], close("a"));
}

#[tokio::test]
async fn an_engine_that_is_down_or_refuses_is_counted_and_nothing_else_happens() {
    let down = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let engine = Engine::start(Manner::Well).await;
    // Somebody else has this one open.
    engine
        .told
        .send_modify(|told| told.open.extend(["taken".to_owned()]));
    let bed = Bed::start(&[down, engine.address], sglang());
    drop((
        bed.first("a").bind(rank(1, 0)),
        bed.first("taken").bind(rank(2, 0)),
    ));
    bed.counted("open", "unreachable", 1).await;
    bed.counted("open", "status", 1).await;
    assert_eq!(
        bed.bound("a").target(),
        rank(1, 0),
        "the session is where it was"
    );
    bed.pass(TTL);
    // Where nobody was there is nothing to close. The refused one may be left from ourselves, before we began anew.
    bed.counted("close", "ok", 1).await;
    drop(bed.first("b").bind(rank(2, 0)));
    bed.counted("open", "ok", 1).await;
    let names: Vec<_> = engine.calls().into_iter().map(|(path, _)| path).collect();
    assert_eq!(names, ["open_session", "close_session", "open_session"]);
    assert!(!engine.told.borrow().open.contains("taken"));
    assert_eq!(bed.metrics.engine_sessions.get(), 1);
}

#[tokio::test]
async fn an_engine_that_hangs_delays_no_other_and_is_told_to_close_what_it_may_have_opened() {
    let engines = [
        Engine::start(Manner::Never).await,
        Engine::start(Manner::Well).await,
    ];
    let config = EngineSessionsConfig {
        timeout: Period::millis(50),
        ..sglang()
    };
    let bed = Bed::start(&[engines[0].address, engines[1].address], config);
    for nth in 0..100 {
        drop(bed.first(&format!("slow {nth}")).bind(rank(1, 0)));
    }
    drop(bed.first("quick").bind(rank(2, 0)));
    assert_eq!(engines[1].heard(1).await, [open("quick")]);
    bed.counted("open", "timeout", 100).await;
    assert_eq!(bed.metrics.engine_sessions.get(), 101);
    bed.pass(TTL);
    bed.counted("close", "timeout", 100).await;
    bed.counted("close", "ok", 1).await;
    assert_eq!(bed.metrics.engine_sessions.get(), 0);
}

#[tokio::test]
async fn a_session_that_another_router_sees_to_is_not_closed_until_it_is_inherited() {
    let engine = Engine::start(Manner::Well).await;
    let bed = Bed::start(&[engine.address], sglang());
    bed.sessions.on_word(1, || ());
    let hold = bed.first("a").bind(rank(1, 0));
    bed.counted("open", "ok", 1).await;
    let session = Arc::new(SessionKey {
        model: None,
        tenant: None,
        group: false,
        id: "a".into(),
    });
    let bound = |version, by| Word::Bound {
        session: session.clone(),
        target: rank(1, 0),
        stamp: Stamp { version, by },
    };
    bed.sessions.take(bound(1, 2), Use::Now);
    bed.forgets().await;
    drop(hold);
    bed.sessions.take(
        Word::Ended {
            session: session.clone(),
            stamp: Stamp { version: 1, by: 2 },
        },
        Use::Now,
    );
    // Calls of one session come in their order: had it been closed for this end, that would have come before.
    drop(bed.first("a").bind(rank(1, 0)));
    bed.counted("open", "status", 1).await;
    assert_eq!(engine.calls(), [open("a"), open("a")]);

    // The one that has it leaves: it is open already, and closed from here.
    bed.sessions.take(bound(2, 2), Use::Now);
    bed.forgets().await;
    assert_eq!(bed.sessions.inherit(|_| false), 1);
    bed.counted("open", "status", 2).await;
    bed.pass(TTL);
    bed.counted("close", "ok", 1).await;
    assert_eq!(engine.calls()[2..], [open("a"), close("a")]);
}

#[tokio::test]
async fn tenants_share_one_session_of_an_engine() {
    let engine = Engine::start(Manner::Well).await;
    let bed = Bed::start(&[engine.address], sglang());
    let bind = |tenant, dp_rank| {
        let name = SessionName {
            id: "a",
            parent: None,
            model: None,
            tenant: Some(tenant),
        };
        match bed.sessions.enter(name).unwrap() {
            Entry::First(binding) => binding.bind(rank(1, dp_rank)),
            other => panic!("{other:?}"),
        }
    };
    let one = bind("one", 0);
    let two = bind("two", 1);
    bed.counted("open", "ok", 1).await;
    two.finish();
    drop(two);
    let _other = bed.first("b").bind(rank(1, 0));
    bed.counted("open", "ok", 2).await;
    assert_eq!(
        engine.calls(),
        [open("a"), open("b")],
        "tenant one still uses it"
    );
    one.finish();
    drop(one);
    bed.counted("close", "ok", 1).await;
    assert_eq!(engine.calls()[2..], [close("a")]);
}

#[tokio::test]
async fn requests_of_inherited_sessions_do_not_wait() {
    let engine = Engine::start(Manner::Never).await;
    let bed = Bed::start(&[engine.address], sglang());
    bed.sessions.on_word(1, || ());
    let session = Arc::new(SessionKey {
        model: None,
        tenant: None,
        group: false,
        id: "a".into(),
    });
    let stamp = Stamp { version: 1, by: 2 };
    bed.sessions.take(
        Word::Bound {
            session,
            target: rank(1, 0),
            stamp,
        },
        Use::Now,
    );
    assert_eq!(bed.sessions.inherit(|_| false), 1);
    let waiting = bed
        .engines
        .wait_until_open(rank(1, 0), "a".to_owned(), None);
    let open = tokio::time::timeout(bed.engines.deadline() / 2, waiting).await;
    assert!(open.is_ok(), "the engine has it open");
}

#[tokio::test]
async fn at_the_end_all_that_is_open_is_closed_and_who_hangs_is_left() {
    let engines = [
        Engine::start(Manner::Well).await,
        Engine::start(Manner::Never).await,
    ];
    let bed = Bed::start(&[engines[0].address, engines[1].address], sglang());
    let holds: Vec<_> = (0..300)
        .map(|nth| bed.first(&nth.to_string()).bind(rank(1, 0)))
        .collect();
    let _hangs = bed.first("hangs").bind(rank(2, 0));
    bed.counted("open", "ok", 300).await;
    engines[1].heard(1).await;
    bed.task.abort();
    bed.engines
        .close_all(Duration::from_millis(500), false)
        .await;
    assert!(engines[0].told.borrow().open.is_empty());
    assert_eq!(engines[1].calls(), [open("hangs"), close("hangs")]);
    drop(holds);
}

#[tokio::test]
async fn what_is_in_use_is_left_to_heirs_and_the_rest_is_closed() {
    let engine = Engine::start(Manner::Well).await;
    let bed = Bed::start(&[engine.address], sglang());
    let _used = bed.first("used").bind(rank(1, 0));
    let ended = bed.first("ended").bind(rank(1, 0));
    bed.counted("open", "ok", 2).await;
    bed.task.abort();
    ended.finish();
    drop(ended);
    bed.engines.close_all(DEADLINE, true).await;
    assert_eq!(engine.calls()[2..], [close("ended")]);
    bed.engines.close_all(DEADLINE, false).await;
    assert_eq!(engine.calls()[3..], [close("used")]);
}

fn header(key: &str, value: &str) -> HeaderValue {
    HeaderValue {
        key: key.to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    }
}

/// A started warmroute in front of one engine.
struct Whole {
    client: ExternalProcessorClient<Channel>,
    stop: CancellationToken,
    running: JoinHandle<anyhow::Result<()>>,
}

impl Whole {
    /// `more` is put behind the usual settings.
    async fn start(engine: &Engine, sessions: &str, more: &str) -> Self {
        let text = format!(
            "listen: {{tcp: '127.0.0.1:0'}}\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m}}]\n\
             workers: [{{id: 1, endpoint: '{}'}}]\nsessions: {{engine: {{kind: sglang{sessions}}}}}\n\
             drain: {{grace: 0s}}\n{more}",
            engine.address
        );
        let app =
            App::start(Config::parse(std::path::Path::new("w.yaml"), text.as_bytes()).unwrap())
                .await
                .unwrap();
        let address = app.ext_proc_address.unwrap();
        let stop = CancellationToken::new();
        let running = tokio::spawn(app.run_until(stop.clone().cancelled_owned()));
        let client = ExternalProcessorClient::connect(format!("http://{address}"))
            .await
            .unwrap();
        Self {
            client,
            stop,
            running,
        }
    }

    /// Sends a request through; ends when it is routed.
    fn send(&self, session: &[(&str, &str)], body: &str) -> JoinHandle<()> {
        let head = [(":method", "POST"), (":path", "/v1/completions")];
        let head = head
            .iter()
            .chain(session)
            .map(|(key, value)| header(key, value))
            .collect();
        let headers = Some(HeaderMap { headers: head });
        let messages = [
            Message::RequestHeaders(proto::HttpHeaders {
                headers,
                ..proto::HttpHeaders::default()
            }),
            Message::RequestBody(proto::HttpBody {
                body: body.as_bytes().to_vec(),
                end_of_stream: true,
                ..proto::HttpBody::default()
            }),
        ];
        let request = |message| proto::ProcessingRequest {
            request: Some(message),
            ..proto::ProcessingRequest::default()
        };
        let mut client = self.client.clone();
        tokio::spawn(async move {
            // Envoy keeps the stream open while the request runs.
            let (sender, receiver) = mpsc::channel(2);
            for message in messages.map(request) {
                sender.send(message).await.unwrap();
            }
            let mut answers = client
                .process(ReceiverStream::new(receiver))
                .await
                .unwrap()
                .into_inner();
            let mut replies = 0;
            while replies < 2 {
                let answer = answers.message().await.unwrap().unwrap();
                // A request for more time is no reply.
                replies += usize::from(answer.response.is_some());
            }
            drop(sender);
            while answers.message().await.unwrap().is_some() {}
        })
    }

    async fn stop(self) {
        drop(self.client);
        self.stop.cancel();
        self.running.await.unwrap().unwrap();
    }
}

const BODY: &str = r#"{"model": "m", "prompt": "x"}"#;

#[tokio::test]
async fn a_whole_warmroute_opens_for_its_first_request_and_closes_as_it_stops() {
    let engine = Engine::start(Manner::Well).await;
    let whole = Whole::start(&engine, "", "").await;
    whole.send(&[("x-session-id", "s")], BODY).await.unwrap();
    assert_eq!(engine.heard(1).await, [open("s")]);
    whole.stop().await;
    assert_eq!(engine.calls(), [open("s"), close("s")]);
}

#[tokio::test]
async fn requests_of_a_session_wait_until_it_is_open() {
    let engine = Engine::start(Manner::Held).await;
    let whole = Whole::start(&engine, ", timeout: 20s", "engines: {deadline: 20s}\n").await;
    let first = whole.send(&[("x-session-id", "s")], BODY);
    engine.heard(1).await;
    let second = whole.send(&[("x-session-id", "s")], BODY);
    // A request without a session waits for nothing.
    whole.send(&[], BODY).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(
        !first.is_finished() && !second.is_finished(),
        "sent before the session was open"
    );
    engine.told.send_modify(|told| told.released = true);
    first.await.unwrap();
    second.await.unwrap();
    assert_eq!(engine.calls(), [open("s")]);
    whole.stop().await;
}

#[tokio::test]
async fn requests_are_sent_when_opening_exceeds_its_deadline() {
    let engine = Engine::start(Manner::Never).await;
    let whole = Whole::start(&engine, ", timeout: 300ms", "").await;
    let began = Instant::now();
    tokio::time::timeout(DEADLINE, whole.send(&[("x-session-id", "s")], BODY))
        .await
        .unwrap()
        .unwrap();
    assert!(
        began.elapsed() >= Duration::from_millis(250),
        "{:?}",
        began.elapsed()
    );
    whole.stop().await;
}

#[tokio::test]
async fn session_calls_carry_the_token_of_engines() {
    let engine = Engine::start(Manner::Protected).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, "secret\n").unwrap();
    let whole = Whole::start(
        &engine,
        "",
        &format!("engines: {{token_file: '{}'}}\n", file.display()),
    )
    .await;
    whole.send(&[("x-session-id", "s")], BODY).await.unwrap();
    assert_eq!(engine.calls(), [open("s")]);
    whole.stop().await;
    assert_eq!(engine.calls(), [open("s"), close("s")]);
}

#[tokio::test]
async fn session_control_of_trusted_clients_opens_and_closes() {
    let body = |control: &str| {
        format!(r#"{{"model": "m", "prompt": "x", "nvext": {{"session_control": {control}}}}}"#)
    };
    let begins = body(r#"{"session_id": "s", "action": "open", "timeout": 90}"#);
    let ends = body(r#"{"session_id": "s", "action": "close"}"#);
    let engine = Engine::start(Manner::Well).await;
    let whole = Whole::start(&engine, "", "clients: {trusted: true}\n").await;
    whole.send(&[], &begins).await.unwrap();
    let said = json!({ "capacity_of_str_len": 65_536, "session_id": "s", "timeout": 90.0 });
    assert_eq!(engine.calls(), [("open_session".to_owned(), said)]);
    whole.send(&[], &ends).await.unwrap();
    assert_eq!(engine.heard(2).await[1], close("s"));
    whole.stop().await;
    // Without trust, `nvext` says nothing to routers.
    let engine = Engine::start(Manner::Well).await;
    let whole = Whole::start(&engine, "", "").await;
    whole.send(&[], &begins).await.unwrap();
    whole.stop().await;
    assert_eq!(engine.calls(), []);
}
