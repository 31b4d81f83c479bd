//! Each shipped Envoy configuration: exact routing, forged headers, dead workers, and operation
//! without warmroute.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use warmroute_server::ext_proc::routing_headers::RoutingHeaders;
use warmroute_testbed::envoy;
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::shipped::bursts::{BurstEngine, EVENTS, PACED, begin, is_whole};
use crate::support::deployment::{
    RoutedAnswer, TestDeployment, chat, essay, fast, with_response_headers,
};

const CHATS: &str = "/v1/chat/completions";

/// Expected behaviour of a shipped Envoy configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConfigurationCase {
    /// Name of the file `envoy/<file>.yaml`.
    pub(crate) file: &'static str,
    /// Response status while warmroute is down or frozen.
    status_without_warmroute: u16,
    /// Response status if warmroute has no eligible worker.
    status_without_workers: u16,
    /// True if another worker serves the request when the chosen one is dead.
    takes_over: bool,
    /// True if streaming responses survive the exit of warmroute.
    survives: bool,
}

pub(crate) const STANDALONE: ConfigurationCase = ConfigurationCase {
    file: "standalone",
    status_without_warmroute: 200,
    status_without_workers: 200,
    takes_over: true,
    survives: true,
};
pub(crate) const MINIMAL: ConfigurationCase = ConfigurationCase {
    file: "minimal",
    ..STANDALONE
};
pub(crate) const SUBSET: ConfigurationCase = ConfigurationCase {
    file: "subset",
    status_without_warmroute: 503,
    status_without_workers: 503,
    takes_over: false,
    ..STANDALONE
};
pub(crate) const ORIGINAL_DST: ConfigurationCase = ConfigurationCase {
    file: "original-dst",
    ..SUBSET
};
pub(crate) const ROUTES: ConfigurationCase = ConfigurationCase {
    file: "route-per-header",
    takes_over: false,
    ..STANDALONE
};
pub(crate) const GATEWAY_API: ConfigurationCase = ConfigurationCase {
    file: "gateway-api",
    status_without_warmroute: 500,
    status_without_workers: 503,
    takes_over: true,
    survives: false,
};

pub(crate) const XDS: ConfigurationCase = ConfigurationCase {
    file: "xds",
    status_without_workers: 503,
    ..STANDALONE
};

impl ConfigurationCase {
    /// Returns warmroute's configuration for this file, with response headers for each decision.
    pub(crate) fn warmroute(self) -> Value {
        let mut own = envoy::warmroute_settings(self.file)
            .unwrap()
            .unwrap_or_else(|| json!({}));
        // The deployment has its own listeners and endpoint file.
        own.as_object_mut().unwrap().remove("listeners");
        if own["envoy"]["xds"].is_null() {
            own.as_object_mut().unwrap().remove("envoy");
        }
        // By default, a worker that stops publishing events is no longer chosen. The tests need
        // dead workers to be chosen.
        own["index"]["freshness"] = json!({"stale_credit": 1.0});
        with_response_headers(own)
    }

    /// Starts warmroute and Envoy for running workers.
    pub(crate) async fn serve(self, deployment: &mut TestDeployment, workers: &[SocketAddr]) {
        deployment.start_router(&self.warmroute()).await.unwrap();
        let config = self.envoy(deployment, workers, "30s");
        deployment.start_envoy(&config).await.unwrap();
    }

    pub(crate) fn envoy(
        self,
        deployment: &TestDeployment,
        workers: &[SocketAddr],
        timeout: &str,
    ) -> String {
        let config = deployment
            .envoy_setup()
            .shipped_config(self.file, workers)
            .unwrap();
        assert_eq!(config.matches(" message_timeout: 1s").count(), 1);
        config.replace(
            " message_timeout: 1s",
            &format!(" message_timeout: {timeout}"),
        )
    }

    async fn engines(self) -> TestDeployment {
        let mut deployment = TestDeployment::engines(&[fast(1), fast(2), fast(3)]).await;
        deployment.write_workers().unwrap();
        let workers = deployment.addresses();
        self.serve(&mut deployment, &workers).await;
        deployment
    }
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn shipped_files_are_all_tested() {
    let shipped = envoy::shipped_configs().unwrap();
    let shipped: BTreeSet<_> = shipped
        .iter()
        .map(|file| file.file_stem().unwrap().to_str().unwrap())
        .collect();
    let ways = [
        STANDALONE,
        MINIMAL,
        SUBSET,
        ORIGINAL_DST,
        ROUTES,
        GATEWAY_API,
        XDS,
    ]
    .map(|way| way.file);
    // These two need engines with KV transfer, so `tests/envoy/routing` tests them.
    let handovers = ["disaggregated-call", "disaggregated-mirror"];
    assert_eq!(shipped, ways.into_iter().chain(handovers).collect());
    assert!(
        ["gateway-api", "xds"]
            .iter()
            .all(|name| envoy::warmroute_settings(name).unwrap().is_some())
    );
}

fn question(number: usize) -> Value {
    let mut body = chat(&essay(number));
    body["max_tokens"] = json!(6);
    if number.is_multiple_of(2) {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

/// Returns a response without id, time and cached tokens, which differ between equal requests.
fn bytes(answer: RoutedAnswer) -> String {
    let mut text = answer.text;
    for (key, end) in [
        ("\"id\":", ','),
        ("\"created\":", ','),
        ("\"cached_tokens\":", '}'),
    ] {
        let mut rest = String::new();
        let mut parts = text.split(key);
        rest.push_str(parts.next().unwrap());
        for part in parts {
            rest.push_str(key);
            rest.push_str(&part[part.find(end).unwrap()..]);
        }
        text = rest;
    }
    text
}

/// Sends 300 requests. Asserts that each reaches the named worker, and that the response equals a
/// direct one byte by byte.
async fn assert_300_exact_requests(deployment: &TestDeployment) {
    const QUESTIONS: usize = 30;
    let mut known = BTreeMap::new();
    for number in 0..QUESTIONS {
        // Each engine caches some of the prompts and receives them later.
        let engine = &deployment.engines[number % deployment.engines.len()];
        let direct = deployment
            .http
            .post(engine.url("/v1/chat/completions"))
            .json(&question(number));
        known.insert(number, bytes(RoutedAnswer::send(direct).await));
    }
    let answers = futures_util::stream::iter(0..300).map(async |at| {
        let number = (at * 7) % QUESTIONS;
        let question = question(number);
        (number, deployment.post(CHATS, &question).await)
    });
    let answers: Vec<_> = answers.buffer_unordered(6).collect().await;
    let mut served = BTreeSet::new();
    assert_eq!(answers.len(), 300);
    for (number, answered) in answers {
        answered.assert_exact();
        served.insert(answered.engine());
        assert_eq!(bytes(answered), known[&number], "question {number}");
    }
    assert_eq!(served.len(), 3, "{served:?}");
    deployment.idle().await;
}

/// Returns a request with all reserved routing headers, each of which names the worker at `wanted`.
fn forged(
    deployment: &TestDeployment,
    number: usize,
    wanted: SocketAddr,
) -> reqwest::RequestBuilder {
    let mut request = deployment.request(CHATS, &question(100 + number));
    for name in RoutingHeaders::default().reserved_names() {
        let value = match name {
            name if name.contains("endpoint") || name.contains("host-port") => wanted.to_string(),
            name if name.contains("rank") => "0".to_owned(),
            _ => "1".to_owned(),
        };
        request = request.header(name, value);
    }
    request
}

async fn assert_forged_headers_ignored(deployment: &TestDeployment) {
    let query = async |number: usize| {
        let answer = deployment.post(CHATS, &question(100 + number)).await;
        answer.engine()
    };
    let mut homes = Vec::new();
    for number in 0..12 {
        homes.push(query(number).await);
    }
    deployment.settle().await;
    // The prompts are cached, so only forged headers could lead to another engine.
    for (number, home) in homes.iter().enumerate() {
        let mut engines = deployment.engines.iter();
        let other = engines.find(|engine| engine.spec.id != *home);
        let request = forged(deployment, number, other.unwrap().address);
        let answered = RoutedAnswer::send(request).await;
        answered.assert_exact();
        assert_eq!(answered.engine(), *home, "forged headers take effect");
    }
    deployment.idle().await;
}

async fn assert_fallback_without_warmroute(
    way: ConfigurationCase,
    deployment: &mut TestDeployment,
) {
    deployment.kill9_router();
    let mut served = BTreeSet::new();
    for number in 0..12 {
        let request = forged(deployment, number, deployment.engines[0].address);
        let answered = RoutedAnswer::send(request).await;
        assert_eq!(
            answered.status, way.status_without_warmroute,
            "without warmroute"
        );
        served.insert(answered.header("x-engine-id").to_owned());
    }
    assert!(
        way.status_without_warmroute != 200 || served.len() > 1,
        "forged headers take effect: {served:?}"
    );
    deployment.start_router(&way.warmroute()).await.unwrap();
    let back = until(PATIENCE, async || {
        deployment.query("are you back?").await.mode() == "exact"
    });
    assert!(back.await, "{}", deployment.router_log());
}

async fn assert_dead_worker_avoided(way: ConfigurationCase, deployment: &mut TestDeployment) {
    deployment.engines[1].kill9();
    let mut rejected = 0;
    let mut in_a_row = 0;
    let mut number = 200;
    // Requests fail until warmroute ejects the worker, and when warmroute probes it.
    while in_a_row < 20 {
        number += 1;
        assert!(
            number < 400,
            "{rejected} of {number} requests were rejected:\n{}",
            deployment.router_log()
        );
        let answered = deployment.post(CHATS, &question(number)).await;
        match answered.status.as_u16() {
            200 => {
                assert_ne!(answered.engine(), 2);
                in_a_row += 1;
            }
            503 => {
                rejected += 1;
                in_a_row = 0;
            }
            status => panic!("{status}: {answered:?}"),
        }
    }
    let page = deployment.metrics().await;
    assert!(
        page.sum(
            "worker_failed_requests_total",
            &[("worker_id", "2"), ("kind", "unreachable")]
        ) > 0.0,
        "{}",
        page.text()
    );
    let moved = page.sum("served_endpoint_mismatches_total", &[("outcome", "moved")]);
    if way.takes_over {
        assert!(
            rejected == 0 && moved > 0.0,
            "{rejected} rejected, {moved} moved:\n{}",
            page.text()
        );
    } else {
        assert!(
            (1..=8).contains(&rejected) && moved == 0.0,
            "{rejected} rejected, {moved} moved:\n{}",
            page.text()
        );
    }
    deployment.idle().await;
}

async fn assert_exact_routing(way: ConfigurationCase) {
    let mut deployment = way.engines().await;
    assert_300_exact_requests(&deployment).await;
    assert_forged_headers_ignored(&deployment).await;
    assert_fallback_without_warmroute(way, &mut deployment).await;
    assert_dead_worker_avoided(way, &mut deployment).await;
}

/// Returns a request whose response has 50 events, which are sent one by one.
fn paced(deployment: &TestDeployment) -> reqwest::RequestBuilder {
    let request = deployment.request(CHATS, &chat(&essay(1)));
    request.header(EVENTS, 50).header(PACED, 1)
}

/// Asserts the outcome of streaming responses and new requests while warmroute is killed or frozen.
async fn assert_behavior_without_warmroute(way: ConfigurationCase) {
    let workers = BurstEngine::start_all(3).await;
    let mut deployment = TestDeployment::engines(&[]).await;
    deployment
        .write_worker_entries(&BurstEngine::entries(&workers))
        .unwrap();
    let addresses = BurstEngine::addresses(&workers);
    way.serve(&mut deployment, &addresses).await;
    let open = begin(paced(&deployment), &workers).await;
    deployment.kill9_router();
    assert_eq!(
        is_whole(open, &workers).await,
        way.survives,
        "killed during a streaming response"
    );

    deployment.start_router(&way.warmroute()).await.unwrap();
    // The shipped message timeout, after which Envoy stops waiting for a frozen process.
    let config = way.envoy(&deployment, &addresses, "1s");
    deployment.start_envoy(&config).await.unwrap();
    let query = async || paced(&deployment).send().await.unwrap().status().as_u16();
    assert!(until(PATIENCE, async || query().await == 200).await);
    let open = begin(paced(&deployment), &workers).await;
    deployment.router().unwrap().freeze();
    assert_eq!(
        is_whole(open, &workers).await,
        way.survives,
        "frozen during a streaming response"
    );
    assert_eq!(
        query().await,
        way.status_without_warmroute,
        "warmroute is frozen"
    );
    deployment.router().unwrap().thaw();
    assert!(until(PATIENCE, async || query().await == 200).await);
    assert_graceful_restart(way, deployment, &workers).await;
}

/// Asserts that a graceful restart interrupts no response.
async fn assert_graceful_restart(
    way: ConfigurationCase,
    mut deployment: TestDeployment,
    workers: &[BurstEngine],
) {
    let mut own = way.warmroute();
    own["process"]["drain"] = json!({"grace_period": "5s", "timeout": "60s"});
    deployment.kill9_router();
    deployment.start_router(&own).await.unwrap();
    BurstEngine::permit(workers, 1_000);
    let served = async || paced(&deployment).send().await.unwrap().status() == 200;
    assert!(until(PATIENCE, served).await);
    let open = begin(paced(&deployment), workers).await;
    let old = deployment.replace_router(&own).await.unwrap();
    // The grace period of the old process ends when its successor is ready and it receives no new
    // requests.
    assert!(
        is_whole(open, workers).await,
        "{}: a successor took over during a streaming response",
        way.file
    );
    assert!(
        until(PATIENCE, async || !old.is_running()).await,
        "{}",
        old.log_tail()
    );
}

async fn assert_status_without_workers(way: ConfigurationCase) {
    let workers = BurstEngine::start_all(3).await;
    let addresses = BurstEngine::addresses(&workers);
    let mut deployment = TestDeployment::engines(&[]).await;
    deployment.write_worker_entries(&json!([])).unwrap();
    let mut config = way.warmroute();
    if config["envoy"]["xds"].is_null() {
        // The endpoint file exists, but warmroute does not write it.
        envoy::write_endpoints(&deployment.envoy_setup().endpoint_file(), &addresses).unwrap();
        config["envoy"] = Value::Null;
    }
    config["process"]["readiness"] = json!({"min_workers": 0});
    deployment.start_router(&config).await.unwrap();
    let envoy = way.envoy(&deployment, &addresses, "30s");
    deployment.start_envoy(&envoy).await.unwrap();
    for number in 0..6 {
        let answered = deployment.query(&essay(number)).await;
        assert_eq!(answered.status, way.status_without_workers);
        if way.file == "gateway-api" {
            assert!(answered.json()["error"]["code"].is_string(), "{answered:?}");
        }
    }
}

macro_rules! ways {
    ($($name:ident: $way:expr),+) => {$(
        mod $name {
            long_tests! {
                requests_reach_their_chosen_workers: super::assert_exact_routing($way),
                requests_without_warmroute_behave_as_documented:
                    super::assert_behavior_without_warmroute($way),
                requests_without_eligible_worker_behave_as_documented:
                    super::assert_status_without_workers($way),
            }
        }
    )+};
}

ways! {
    override_host: super::STANDALONE,
    minimal: super::MINIMAL,
    subset: super::SUBSET,
    original_dst: super::ORIGINAL_DST,
    route_per_header: super::ROUTES,
    gateway_api: super::GATEWAY_API,
    xds: super::XDS
}

async fn assert_bookings_follow(way: ConfigurationCase, change: impl FnOnce(String) -> String) {
    let alive = BurstEngine::start(2).await;
    let dead = format!("127.0.0.1:{}", FreePort::find().unwrap().release());
    let mut deployment = TestDeployment::engines(&[]).await;
    let entries = json!([{"id": 1, "endpoint": dead}, alive.entry()]);
    deployment.write_worker_entries(&entries).unwrap();
    deployment.start_router(&way.warmroute()).await.unwrap();
    let config = change(way.envoy(&deployment, &[], "30s"));
    deployment.start_envoy(&config).await.unwrap();
    let mut open = Vec::new();
    for number in 0..6 {
        let request = deployment.request(CHATS, &chat(&essay(number)));
        let request = request.header(EVENTS, 5).header(PACED, 1);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        open.push(response);
        let active = async |id| deployment.load(id, "active_requests").await;
        let booked = async || (active(1).await, active(2).await);
        let wanted = (0, open.len() as u64);
        assert!(
            until(PATIENCE, async || booked().await == wanted).await,
            "{:?}, not {wanted:?}",
            booked().await
        );
    }
    let page = deployment.metrics().await;
    let moved = page.sum("served_endpoint_mismatches_total", &[("outcome", "moved")]);
    assert!(moved >= 1.0, "{}", page.text());
    drop(open);
    deployment.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn booking_moves_to_serving_worker() {
    assert_bookings_follow(STANDALONE, |shipped| shipped).await;
    assert_bookings_follow(GATEWAY_API, |shipped| shipped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn booking_moves_by_endpoint_metadata_alone() {
    let without_attributes = |shipped: String| {
        let attributes = "response_attributes: [upstream.address, response.flags]";
        assert_eq!(shipped.matches(attributes).count(), 1);
        shipped.replace(attributes, "response_attributes: []")
    };
    assert_bookings_follow(STANDALONE, without_attributes).await;
    assert_bookings_follow(GATEWAY_API, without_attributes).await;
}

/// Data-parallel ranks share an address. Envoy selects the address by worker id, and a header names
/// the rank.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn subset_reaches_every_rank_of_an_address() {
    let mut spec = fast(u64::MAX).with(&["--dp-size", "2"]);
    // The second rank uses the next port after the event port. It is free if there is no replay
    // endpoint.
    spec.replay = false;
    let mut deployment = TestDeployment::engines(&[spec, fast(2)]).await;
    let mut entries = [
        deployment.engines[0].worker_entry(),
        deployment.engines[1].worker_entry(),
    ];
    entries[0]["data_parallel"] = json!({"size": 2});
    deployment.write_worker_entries(&json!(entries)).unwrap();
    SUBSET.serve(&mut deployment, &[]).await;
    let mut served = BTreeSet::new();
    let mut number = 0;
    let all = until(PATIENCE, async || {
        number += 1;
        let answered = deployment.complete(&essay(number)).await;
        answered.assert_exact();
        served.insert((
            answered.engine(),
            answered.header("x-served-dp-rank").to_owned(),
        ));
        served.len() == 3
    });
    assert!(all.await, "{served:?}");
}

/// Another program that writes the endpoint file may give a host several ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn subset_finds_host_by_each_id() {
    let [shared, other] = [BurstEngine::start(1).await, BurstEngine::start(2).await];
    let mut deployment = TestDeployment::engines(&[]).await;
    deployment
        .write_worker_entries(&json!([shared.entry(), other.entry()]))
        .unwrap();
    SUBSET.serve(&mut deployment, &[]).await;
    let file = deployment.envoy_setup().endpoint_file();
    let mut endpoints: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let hosts = endpoints
        .pointer_mut("/resources/0/endpoints/0/lb_endpoints")
        .unwrap()
        .as_array_mut()
        .unwrap();
    let of_shared =
        |host: &&mut Value| host["metadata"]["filter_metadata"]["envoy.lb"]["worker_id"] == "1";
    let one = hosts.iter_mut().find(of_shared).unwrap();
    one["metadata"]["filter_metadata"]["envoy.lb"]["worker_id"] = json!(["77", "1", "2"]);
    hosts.retain(|host| host["metadata"]["filter_metadata"]["envoy.lb"]["worker_id"] != "2");
    let new = tempfile::NamedTempFile::new_in(file.parent().unwrap()).unwrap();
    std::fs::write(&new, endpoints.to_string()).unwrap();
    new.persist(&file).unwrap();
    let mut number = 0;
    // The ids of both workers now select the same host.
    let found = until(PATIENCE, async || {
        number += 1;
        let answered = deployment.complete(&essay(number)).await;
        assert_eq!(answered.engine(), 1, "{answered:?}");
        // A move means that warmroute chose worker 2, whose id selects the host of worker 1.
        let moved = [("outcome", "moved")];
        deployment
            .metric("served_endpoint_mismatches_total", &moved)
            .await
            > 0.0
    });
    assert!(found.await);
    for number in 0..20 {
        let answered = deployment.complete(&essay(number)).await;
        assert_eq!(answered.engine(), 1, "{answered:?}");
    }
}

/// The gateway restricts the endpoints in request metadata, which clients cannot set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn gateway_subset_hint_is_followed_or_gets_503() {
    let mut deployment = GATEWAY_API.engines().await;
    let wanted = deployment.engines[2].address;
    for (hint, status) in [(wanted.to_string(), 200), (String::new(), 503)] {
        let workers = deployment.addresses();
        let config = GATEWAY_API.envoy(&deployment, &workers, "30s");
        let mut config: Value = serde_saphyr::from_str(&config).unwrap();
        let filters =
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        let filters = config.pointer_mut(filters).unwrap().as_array_mut().unwrap();
        let hint = json!({
            "metadata_namespace": "envoy.lb.subset_hint",
            "value": {"x-gateway-destination-endpoint-subset": [hint]},
        });
        let kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config";
        filters.insert(
            0,
            json!({"name": "hint", "typed_config": {"@type": kind, "metadata": [hint]}}),
        );
        deployment.start_envoy(&config.to_string()).await.unwrap();
        for number in 0..10 {
            let answered = deployment.complete(&essay(number)).await;
            assert_eq!(answered.status, status, "{answered:?}");
            if status == 200 {
                answered.assert_exact();
                assert_eq!(answered.engine(), 3);
            } else {
                assert!(answered.json()["error"]["code"].is_string(), "{answered:?}");
            }
        }
    }
}
