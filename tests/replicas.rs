//! Replicas against a real server of messages, which is stopped, started and killed: whole processes by their service, and
//! three of them behind one Envoy.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "replicas/behind_envoy.rs"]
mod behind_envoy;
#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "engine_sessions/engine.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod engine;
#[path = "envoy_e2e/openmetrics.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod openmetrics;
#[path = "api/site.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod site;

use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::Request;
use warmroute::api::pb;

use engine::{Engine, Manner, close, open};
use site::{Site, attempt, book, worker};
use support::child::Child;
use support::debian::NATS;
use support::ports::FreePort;

/// A server of messages.
pub(crate) struct Nats {
    server: Option<Child>,
    port: u16,
    dir: TempDir,
    args: Vec<String>,
}

impl Nats {
    /// None runs yet.
    fn none(args: &[&str]) -> Self {
        let port = FreePort::find().unwrap().release();
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self {
            server: None,
            port,
            dir: tempfile::tempdir().unwrap(),
            args,
        }
    }

    pub(crate) fn started() -> Self {
        let mut nats = Self::none(&[]);
        nats.start();
        nats
    }

    /// Starts it, again where it was.
    pub(crate) fn start(&mut self) {
        let mut command = NATS.command().unwrap();
        command
            .args(["--addr", "127.0.0.1", "--port", &self.port.to_string()])
            .args(&self.args);
        self.server = Some(Child::spawn("nats-server", &command, self.dir.path()).unwrap());
    }

    pub(crate) fn kill(&mut self) {
        if let Some(server) = self.server.take() {
            server.kill9();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// What a replica is told of it.
    fn settings(&self, more: &Value) -> String {
        let mut replicas = json!({"nats": {"servers": [self.url()]}, "lease": "1s", "wait": "2s"});
        merge(&mut replicas, more);
        // JSON is YAML.
        format!("replicas: {replicas}\nsessions: {{}}\n")
    }

    /// One that tells engines of sessions, which it remembers for three seconds.
    async fn replica_with_engine(&self, workers: &[String]) -> Site {
        let settings = self.settings(&json!({}));
        let sessions = "sessions: {ttl: 3s, engine: {kind: sglang}}\ndrain: {grace: 500ms}";
        Site::start(&settings.replace("sessions: {}", sessions), workers).await
    }

    async fn replica(&self, workers: &[String]) -> Site {
        Site::start(&self.settings(&json!({})), workers).await
    }
}

fn merge(into: &mut Value, more: &Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (key, value) in more {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (into, more) => *into = more.clone(),
    }
}

fn two() -> Vec<String> {
    vec![worker(1, ""), worker(2, "")]
}

/// Waits until a replica knows all of so many others.
async fn knows(site: &Site, peers: usize) {
    let level = |page: &Value| {
        let all = page["peers"].as_array().unwrap();
        all.len() == peers && all.iter().all(|peer| peer["level"] == true)
    };
    site.until(&format!("knows {peers} peers"), level, "debug/replicas")
        .await;
}

#[tokio::test]
async fn what_one_books_counts_at_the_other_from_the_beginning_to_the_end() {
    let nats = Nats::started();
    let (a, b) = (nats.replica(&two()).await, nats.replica(&two()).await);
    knows(&a, 1).await;
    knows(&b, 1).await;
    let first = a.route(book("r", 0, 22)).await.unwrap().decode.unwrap();
    b.loaded((22, 5, 1)).await;
    // It goes to the other worker now, because b knows that this one has something to do.
    let asked = pb::RouteRequest {
        book: None,
        ..book("", 0, 22)
    };
    let second = b.route(asked).await.unwrap().decode.unwrap();
    assert_ne!(first.worker, second.worker);
    let mut client = a.client.clone();
    client
        .mark_prefill_completed(pb::MarkPrefillCompletedRequest {
            attempt: attempt("r", 0),
        })
        .await
        .unwrap();
    b.loaded((0, 5, 1)).await;
    let output = |decay_fraction| pb::AddOutputBlockRequest {
        attempt: attempt("r", 0),
        decay_fraction,
    };
    client.add_output_block(output(None)).await.unwrap();
    b.loaded((0, 6, 1)).await;
    client.add_output_block(output(Some(0.5))).await.unwrap();
    b.loaded((0, 4, 1)).await;
    // Who comes later learns how it stands now.
    let c = nats.replica(&two()).await;
    assert_eq!(c.load().await, (0, 4, 1), "it is ready only when it knows");
    assert!(a.free("r", 0).await);
    b.loaded((0, 0, 0)).await;
    c.loaded((0, 0, 0)).await;
    for site in [a, b, c] {
        site.stop();
        site.stopped().await;
    }
}

#[tokio::test]
async fn what_one_routes_to_a_worker_without_events_all_expect_to_be_cached_there() {
    let nats = Nats::started();
    let (a, b) = (nats.replica(&two()).await, nats.replica(&two()).await);
    knows(&a, 1).await;
    knows(&b, 1).await;
    let asked = || pb::RouteRequest {
        book: None,
        ..book("", 0, 22)
    };
    let expected = async || b.route(asked()).await.unwrap().predicted_cached_tokens;
    let question = || {
        let prompt = pb::question::Prompt::Tokens(pb::Tokens {
            ids: (500..522).collect(),
        });
        let question = Some(pb::Question {
            prompt: Some(prompt),
            ..pb::Question::default()
        });
        pb::RouteRequest {
            question,
            ..asked()
        }
    };
    a.route(question()).await.unwrap();
    let there = a
        .route(book("r", 0, 22))
        .await
        .unwrap()
        .decode
        .unwrap()
        .worker;
    assert!(a.free("r", 0).await);
    assert!(
        support::ports::until(site::PATIENCE, async || expected().await == 20).await,
        "five blocks of four tokens"
    );
    assert_eq!(
        b.route(question()).await.unwrap().predicted_cached_tokens,
        0,
        "a question is not a request"
    );
    b.loaded((0, 0, 0)).await;
    assert_eq!(
        b.route(asked()).await.unwrap().decode.unwrap().worker,
        there
    );
    for site in [a, b] {
        site.stop();
        site.stopped().await;
    }
}

#[tokio::test]
async fn one_that_is_killed_loses_its_bookings_after_its_lease_and_one_that_leaves_at_once() {
    let mut nats = Nats::started();
    let (a, b) = (nats.replica(&two()).await, nats.replica(&two()).await);
    knows(&b, 1).await;
    a.route(book("r", 0, 22)).await.unwrap();
    b.loaded((22, 5, 1)).await;
    // As long as nobody hears anything: each is alone.
    nats.kill();
    b.until("alone", |page| page["connected"] == false, "debug/replicas")
        .await;
    assert_eq!(
        b.route(book("own", 0, 9)).await.unwrap().prompt_tokens,
        9,
        "it goes on"
    );
    b.loaded((9, 2, 1)).await;
    b.until(
        "no peer",
        |page| page["peers"] == json!([]),
        "debug/replicas",
    )
    .await;
    // Back again they agree.
    nats.start();
    knows(&b, 1).await;
    // It may not have noticed that it was alone, and then takes a moment to find out what it has missed.
    let agree = async || a.load().await.2 == 2;
    assert!(
        support::ports::until(site::PATIENCE, agree).await,
        "{:?}",
        a.load().await
    );
    b.loaded(a.load().await).await;
    // It leaves in order.
    a.stop();
    a.stopped().await;
    b.until(
        "a has left",
        |page| page["peers"] == json!([]),
        "debug/replicas",
    )
    .await;
    b.loaded((9, 2, 1)).await;
    b.stop();
    b.stopped().await;
}

#[tokio::test]
async fn a_session_is_bound_for_all_and_a_worker_that_one_finds_overloaded_is_left_alone_by_all() {
    let nats = Nats::started();
    let (a, b) = (nats.replica(&two()).await, nats.replica(&two()).await);
    knows(&a, 1).await;
    knows(&b, 1).await;
    let session = |id: &str| pb::Session {
        id: id.to_owned(),
        ..pb::Session::default()
    };
    let asked = |request: &str, of: &str| pb::RouteRequest {
        session: Some(session(of)),
        ..book(request, 0, 9)
    };
    // Sessions of a spread over both workers; b sends each to where it is, whatever is booked there.
    let mut bound = Vec::new();
    for nth in 0..6 {
        let of = format!("s{nth}");
        bound.push((
            of.clone(),
            a.route(asked(&format!("a{nth}"), &of))
                .await
                .unwrap()
                .decode
                .unwrap()
                .worker,
        ));
    }
    assert!(
        bound.iter().any(|(_, worker)| *worker != bound[0].1),
        "{bound:?}"
    );
    let sessions = |page: &Value| page.as_str().unwrap().contains("\nwarmroute_sessions 6\n");
    b.until("all sessions are known", sessions, "metrics").await;
    for (of, worker) in &bound {
        let there = b
            .route(asked(&format!("b{of}"), of))
            .await
            .unwrap()
            .decode
            .unwrap()
            .worker;
        assert_eq!(there, *worker, "{of}");
    }
    // The first worker says to a that it has too much to do.
    let refused = pb::FreeRequest {
        attempt: attempt("a0", 0),
        status: Some(503),
    };
    a.client.clone().free(Request::new(refused)).await.unwrap();
    let full = bound[0].1;
    let left_alone = async || {
        let asked = pb::RouteRequest {
            book: None,
            ..book("", 0, 40)
        };
        let mut chosen = Vec::new();
        for _ in 0..8 {
            chosen.push(b.route(asked.clone()).await.unwrap().decode.unwrap().worker);
        }
        chosen.iter().all(|worker| *worker != full)
    };
    assert!(support::ports::until(site::PATIENCE, left_alone).await);
    for site in [a, b] {
        site.stop();
        site.stopped().await;
    }
}

#[tokio::test]
async fn the_engine_keeps_a_session_whose_replica_leaves_as_long_as_another_uses_it() {
    let (nats, engine) = (Nats::started(), Engine::start(Manner::Well).await);
    let workers = [format!("- {{id: 1, endpoint: '{}'}}\n", engine.address)];
    let (a, b) = (
        nats.replica_with_engine(&workers).await,
        nats.replica_with_engine(&workers).await,
    );
    knows(&a, 1).await;
    knows(&b, 1).await;
    let session = pb::Session {
        id: "s".to_owned(),
        ..pb::Session::default()
    };
    let asked = |request: &str| pb::RouteRequest {
        session: Some(session.clone()),
        ..book(request, 0, 9)
    };
    a.route(asked("first")).await.unwrap();
    assert_eq!(engine.heard(1).await, [open("s")]);
    let known = |page: &Value| page.as_str().unwrap().contains("\nwarmroute_sessions 1\n");
    b.until("the session is known", known, "metrics").await;
    b.route(asked("second")).await.unwrap();
    assert!(a.free("first", 0).await);
    a.stop();
    a.stopped().await;
    // It is open already, so that this is refused; had it been closed, it would be open again.
    assert_eq!(engine.heard(2).await, [open("s"), open("s")]);
    assert!(engine.told.borrow().open.contains("s"));
    assert!(b.free("second", 0).await);
    assert_eq!(engine.heard(3).await[2], close("s"), "its time is over");
    // Nobody else is there who would see to another one.
    b.route(asked("third")).await.unwrap();
    engine.heard(4).await;
    b.stop();
    b.stopped().await;
    assert_eq!(engine.calls()[3..], [open("s"), close("s")]);
}

#[tokio::test]
async fn where_all_leave_nobody_leaves_a_session_to_another() {
    let (nats, engine) = (Nats::started(), Engine::start(Manner::Well).await);
    let workers = [format!("- {{id: 1, endpoint: '{}'}}\n", engine.address)];
    let (a, b) = (
        nats.replica_with_engine(&workers).await,
        nats.replica_with_engine(&workers).await,
    );
    knows(&a, 1).await;
    knows(&b, 1).await;
    for (site, id) in [(&a, "of a"), (&b, "of b")] {
        let session = Some(pb::Session {
            id: id.to_owned(),
            ..pb::Session::default()
        });
        site.route(pb::RouteRequest {
            session,
            ..book(id, 0, 9)
        })
        .await
        .unwrap();
    }
    engine.heard(2).await;
    a.stop();
    b.stop();
    a.stopped().await;
    b.stopped().await;
    assert!(engine.told.borrow().open.is_empty(), "{:?}", engine.calls());
}

#[tokio::test]
async fn without_a_server_a_replica_is_ready_alone_and_joins_when_there_is_one() {
    let mut nats = Nats::none(&["--user", "router", "--pass", "s3cret"]);
    let secrets = tempfile::tempdir().unwrap();
    let file = secrets.path().join("password");
    std::fs::write(&file, "wrong\n").unwrap();
    let own =
        nats.settings(&json!({"nats": {"user": "router", "password_file": file}, "name": "first"}));
    let a = Site::start(&own, &two()).await;
    a.route(book("r", 0, 22)).await.unwrap();
    a.until("alone", |page| page["connected"] == false, "debug/replicas")
        .await;
    // A password that is refused is read again at the next try.
    nats.start();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    a.until(
        "still alone",
        |page| page["connected"] == false,
        "debug/replicas",
    )
    .await;
    std::fs::write(&file, "s3cret\n").unwrap();
    a.until(
        "connected",
        |page| page["connected"] == true,
        "debug/replicas",
    )
    .await;
    let b = Site::start(&own, &two()).await;
    b.loaded((22, 5, 1)).await;
    let named = |page: &Value| page["peers"][0]["name"] == "first";
    b.until("known by name", named, "debug/replicas").await;
    // Other groups have nothing to do with it.
    let other = nats
        .settings(&json!({"nats": {"user": "router", "password_file": file}, "group": "other"}));
    let c = Site::start(&other, &two()).await;
    assert_eq!(c.load().await, (0, 0, 0));
    for site in [a, b, c] {
        site.stop();
        site.stopped().await;
    }
}
