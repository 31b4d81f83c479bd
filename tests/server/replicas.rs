//! Replica sync over a real NATS server, which is stopped, started and killed. The tests use whole
//! servers through their API, and three replicas behind one Envoy.

mod behind_envoy;

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::Request;
use warmroute_server::proto::router as pb;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::debian::NATS;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::api::site::{ApiSite, attempt, book, book_unshared, worker};
use crate::engine_sessions::engine::{EngineBehaviour, SessionEngine, close, open};
use crate::support::process::WarmrouteProcess;

/// NATS server process.
pub(crate) struct NatsServer {
    server: Option<ChildProcess>,
    port: u16,
    dir: TempDir,
    args: Vec<String>,
}

impl NatsServer {
    /// Prepares a server without starting it.
    fn stopped(args: &[&str]) -> Self {
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
        let mut nats = Self::stopped(&[]);
        nats.start();
        nats
    }

    /// Starts the server at the same address as before.
    pub(crate) fn start(&mut self) {
        let mut command = NATS.command().unwrap();
        command
            .args(["--addr", "127.0.0.1", "--port", &self.port.to_string()])
            .args(&self.args);
        self.server = Some(ChildProcess::spawn("nats-server", &command, self.dir.path()).unwrap());
    }

    fn log(&self) -> String {
        let server = self.server.as_ref().unwrap();
        std::fs::read_to_string(server.log()).unwrap()
    }

    pub(crate) fn kill(&mut self) {
        if let Some(server) = self.server.take() {
            server.kill9();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Returns the configuration of a replica.
    fn settings(&self, more: &Value) -> String {
        let mut replicas =
            json!({"nats": {"servers": [self.url()]}, "lease": "1s", "sync_timeout": "2s"});
        merge_config(&mut replicas, more);
        // JSON is valid YAML.
        format!("replicas: {replicas}\nsessions: {{}}\n")
    }

    /// Starts a replica that opens engine sessions, which expire after three seconds.
    async fn replica_with_engine(&self, workers: &[String]) -> ApiSite {
        let settings = self.settings(&json!({}));
        let sessions =
            "sessions: {ttl: 3s, engine: {kind: sglang}}\nprocess: {drain: {grace_period: 500ms}}";
        ApiSite::start(&settings.replace("sessions: {}", sessions), workers).await
    }

    /// Starts two replicas with two workers, and waits until they are synced.
    async fn two_replicas(&self) -> [ApiSite; 2] {
        let [a, b] = [
            self.replica(&two_workers()).await,
            self.replica(&two_workers()).await,
        ];
        wait_for_peers(&a, 1).await;
        wait_for_peers(&b, 1).await;
        [a, b]
    }

    /// Like [`Self::two_replicas`], with one engine whose sessions the replicas open.
    async fn two_replicas_of(&self, engine: &SessionEngine) -> [ApiSite; 2] {
        let workers = [format!("- {{id: 1, endpoint: '{}'}}\n", engine.address)];
        let [a, b] = [
            self.replica_with_engine(&workers).await,
            self.replica_with_engine(&workers).await,
        ];
        wait_for_peers(&a, 1).await;
        wait_for_peers(&b, 1).await;
        [a, b]
    }

    async fn replica(&self, workers: &[String]) -> ApiSite {
        ApiSite::start(&self.settings(&json!({})), workers).await
    }
}

fn two_workers() -> Vec<String> {
    vec![worker(1, ""), worker(2, "")]
}

/// Waits until a replica is synced with this number of peers.
async fn wait_for_peers(site: &ApiSite, peers: usize) {
    let level = |page: &Value| {
        let all = page["peers"].as_array().unwrap();
        all.len() == peers && all.iter().all(|peer| peer["synced"] == true)
    };
    site.until(
        &format!("the replica is synced with {peers} peers"),
        level,
        "debug/replicas",
    )
    .await;
}

/// Waits until a replica is connected to NATS, or not.
async fn wait_connected(site: &ApiSite, is_connected: bool) {
    let what = format!("connected: {is_connected}");
    let agrees = |page: &Value| page["connected"] == is_connected;
    site.until(&what, agrees, "debug/replicas").await;
}

#[tokio::test]
async fn peer_bookings_count_from_start_to_end() {
    let nats = NatsServer::started();
    let [a, b] = nats.two_replicas().await;
    let first = a.route(book("r", 0, 22)).await.unwrap().decode.unwrap();
    b.wait_load((22, 5, 1)).await;
    // The second request goes to the other worker, because replica b has received the
    // booking of the first one.
    let route_request = pb::RouteRequest {
        book: None,
        ..book_unshared("", 0, 22)
    };
    let second = b.route(route_request).await.unwrap().decode.unwrap();
    assert_ne!(first.worker, second.worker);
    let mut client = a.client.clone();
    client
        .mark_prefill_completed(pb::MarkPrefillCompletedRequest {
            attempt: attempt("r", 0),
        })
        .await
        .unwrap();
    b.wait_load((0, 5, 1)).await;
    let output = |decay_fraction| pb::AddOutputBlockRequest {
        attempt: attempt("r", 0),
        decay_fraction,
    };
    client.add_output_block(output(None)).await.unwrap();
    b.wait_load((0, 6, 1)).await;
    client.add_output_block(output(Some(0.5))).await.unwrap();
    b.wait_load((0, 4, 1)).await;
    // A replica that starts later receives a snapshot.
    let c = nats.replica(&two_workers()).await;
    assert_eq!(
        c.load().await,
        (0, 4, 1),
        "a replica is ready only after the snapshot"
    );
    assert!(a.free("r", 0).await);
    b.wait_load((0, 0, 0)).await;
    c.wait_load((0, 0, 0)).await;
    for site in [a, b, c] {
        site.end().await;
    }
}

/// Routes a request. Returns its decode worker.
async fn decode_worker(site: &ApiSite, request: pb::RouteRequest) -> Option<pb::WorkerRank> {
    site.route(request).await.unwrap().decode.unwrap().worker
}

#[tokio::test]
async fn peer_routes_are_predicted_as_cached() {
    let nats = NatsServer::started();
    let [a, b] = nats.two_replicas().await;
    let route_request = || pb::RouteRequest {
        book: None,
        ..book("", 0, 22)
    };
    let expected = async || {
        b.route(route_request())
            .await
            .unwrap()
            .predicted_cached_tokens
    };
    let other_prompt = || pb::RouteRequest {
        book: None,
        ..book_unshared("", 0, 22)
    };
    a.route(other_prompt()).await.unwrap();
    let there = decode_worker(&a, book("r", 0, 22)).await;
    assert!(a.free("r", 0).await);
    assert!(
        until(PATIENCE, async || expected().await == 20).await,
        "five blocks of four tokens"
    );
    assert_eq!(
        b.route(other_prompt())
            .await
            .unwrap()
            .predicted_cached_tokens,
        0,
        "a query is not a routed request"
    );
    b.wait_load((0, 0, 0)).await;
    assert_eq!(decode_worker(&b, route_request()).await, there);
    for site in [a, b] {
        site.end().await;
    }
}

#[tokio::test]
async fn killed_replica_expires_and_leaving_one_is_removed() {
    let mut nats = NatsServer::started();
    let a = nats.replica(&two_workers()).await;
    let b = nats.replica(&two_workers()).await;
    wait_for_peers(&b, 1).await;
    a.route(book("r", 0, 22)).await.unwrap();
    b.wait_load((22, 5, 1)).await;
    // Without NATS, each replica works alone.
    nats.kill();
    wait_connected(&b, false).await;
    assert_eq!(
        b.route(book_unshared("own", 0, 9))
            .await
            .unwrap()
            .prompt_tokens,
        9,
        "the replica still routes requests"
    );
    b.wait_load((9, 2, 1)).await;
    wait_for_peers(&b, 0).await;
    // After the restart of NATS, the replicas agree again.
    nats.start();
    wait_for_peers(&b, 1).await;
    // Replica a may not have noticed the outage. Then it detects the gap later.
    let agree = async || a.load().await.2 == 2;
    assert!(until(PATIENCE, agree).await, "{:?}", a.load().await);
    b.wait_load(a.load().await).await;
    // Replica a shuts down regularly.
    a.end().await;
    wait_for_peers(&b, 0).await;
    b.wait_load((9, 2, 1)).await;
    b.end().await;
}

#[tokio::test]
async fn sessions_and_overload_marks_reach_all_replicas() {
    let nats = NatsServer::started();
    let [a, b] = nats.two_replicas().await;
    let session = |id: &str| pb::Session {
        id: id.to_owned(),
        ..pb::Session::default()
    };
    let route_request = |request: &str, of: &str| pb::RouteRequest {
        session: Some(session(of)),
        ..book(request, 0, 9)
    };
    // Replica a binds sessions to both workers. Replica b routes each session to its worker
    // regardless of load.
    let mut bound = Vec::new();
    for nth in 0..6 {
        let of = format!("s{nth}");
        let worker = decode_worker(&a, route_request(&format!("a{nth}"), &of)).await;
        bound.push((of, worker));
    }
    assert!(
        bound.iter().any(|(_, worker)| *worker != bound[0].1),
        "{bound:?}"
    );
    b.wait_line("warmroute_sessions 6").await;
    for (of, worker) in &bound {
        let there = decode_worker(&b, route_request(&format!("b{of}"), of)).await;
        assert_eq!(there, *worker, "{of}");
    }
    // The first worker reports to replica a that it is overloaded.
    let refused = pb::FreeRequest {
        attempt: attempt("a0", 0),
        status: Some(503),
    };
    a.client.clone().free(Request::new(refused)).await.unwrap();
    let full = bound[0].1;
    let left_alone = async || {
        let route_request = pb::RouteRequest {
            book: None,
            ..book("", 0, 40)
        };
        let mut chosen = Vec::new();
        for _ in 0..8 {
            chosen.push(decode_worker(&b, route_request.clone()).await);
        }
        chosen.iter().all(|worker| *worker != full)
    };
    assert!(until(PATIENCE, left_alone).await);
    for site in [a, b] {
        site.end().await;
    }
}

#[tokio::test]
async fn engine_session_survives_departure_while_in_use() {
    let nats = NatsServer::started();
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let [a, b] = nats.two_replicas_of(&engine).await;
    let session = pb::Session {
        id: "s".to_owned(),
        ..pb::Session::default()
    };
    let route_request = |request: &str| pb::RouteRequest {
        session: Some(session.clone()),
        ..book(request, 0, 9)
    };
    a.route(route_request("first")).await.unwrap();
    assert_eq!(engine.received_calls(1).await, [open("s")]);
    b.wait_line("warmroute_sessions 1").await;
    b.route(route_request("second")).await.unwrap();
    assert!(a.free("first", 0).await);
    a.end().await;
    // The engine rejects the second open call because the session is still open. If it had been
    // closed, the call would have opened it again.
    assert_eq!(engine.received_calls(2).await, [open("s"), open("s")]);
    assert!(engine.state.borrow().open.contains("s"));
    assert!(b.free("second", 0).await);
    assert_eq!(
        engine.received_calls(3).await[2],
        close("s"),
        "the session has expired"
    );
    // This replica is the only one that can close the session.
    b.route(route_request("third")).await.unwrap();
    engine.received_calls(4).await;
    b.end().await;
    assert_eq!(engine.calls()[3..], [open("s"), close("s")]);
}

#[tokio::test]
async fn last_replica_closes_its_sessions() {
    let nats = NatsServer::started();
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let [a, b] = nats.two_replicas_of(&engine).await;
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
    engine.received_calls(2).await;
    a.stop();
    b.stop();
    a.end().await;
    b.end().await;
    assert!(
        engine.state.borrow().open.is_empty(),
        "{:?}",
        engine.calls()
    );
}

#[tokio::test]
async fn replica_is_ready_without_nats_and_joins_later() {
    let mut nats = NatsServer::stopped(&["--user", "router", "--pass", "s3cret"]);
    let secrets = tempfile::tempdir().unwrap();
    let file = secrets.path().join("password");
    std::fs::write(&file, "wrong\n").unwrap();
    let own =
        nats.settings(&json!({"nats": {"user": "router", "password_file": file}, "name": "first"}));
    let a = ApiSite::start(&own, &two_workers()).await;
    a.route(book("r", 0, 22)).await.unwrap();
    wait_connected(&a, false).await;
    // The password file is read again after a rejected login.
    nats.start();
    assert!(
        until(PATIENCE, async || nats
            .log()
            .contains("authentication error"))
        .await
    );
    wait_connected(&a, false).await;
    std::fs::write(&file, "s3cret\n").unwrap();
    wait_connected(&a, true).await;
    let b = ApiSite::start(&own, &two_workers()).await;
    b.wait_load((22, 5, 1)).await;
    let named = |page: &Value| page["peers"][0]["name"] == "first";
    b.until("known by name", named, "debug/replicas").await;
    // Replicas of another group are independent.
    let other = nats
        .settings(&json!({"nats": {"user": "router", "password_file": file}, "group": "other"}));
    let c = ApiSite::start(&other, &two_workers()).await;
    assert_eq!(c.load().await, (0, 0, 0));
    for site in [a, b, c] {
        site.end().await;
    }
}

/// Returns the warnings and errors about NATS in a log.
fn nats_warnings(log: &str) -> Vec<&str> {
    log.lines()
        .filter(|line| line.contains("WARN") || line.contains("ERROR"))
        .filter(|line| line.to_lowercase().contains("nats"))
        .collect()
}

#[tokio::test]
async fn nats_outage_is_logged_once_with_server() {
    let mut nats = NatsServer::stopped(&[]);
    let replicas = json!({"nats": {"servers": [nats.url()]}, "sync_timeout": "200ms"});
    let process = WarmrouteProcess::start(json!({"replicas": replicas}), &[]).await;
    // Long enough for several attempts to connect.
    let attempts = Duration::from_secs(3);
    tokio::time::sleep(attempts).await;
    let log = process.log();
    let [unreachable] = nats_warnings(&log)[..] else {
        panic!("{log}")
    };
    assert!(
        unreachable.contains("NATS client reported an error") && unreachable.contains(&nats.url()),
        "{unreachable}"
    );
    nats.start();
    process.wait_metric("replica_connected", 1.0).await;
    nats.kill();
    process.wait_metric("replica_connected", 0.0).await;
    tokio::time::sleep(attempts).await;
    let log = process.log();
    let [_, lost] = nats_warnings(&log)[..] else {
        panic!("{log}")
    };
    assert!(
        lost.contains("NATS connection lost") && lost.contains(&nats.url()),
        "{lost}"
    );
}
