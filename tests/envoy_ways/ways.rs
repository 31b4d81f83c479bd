//! Every way from warmroute's word to the worker: the shipped files one by one, with exact requests, forged headers, dead
//! workers, and without warmroute.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use warmroute::ext_proc::contract::Contract;

use crate::bursts::{Bursts, EVENTS, PACED, begin, is_whole};
use crate::deployment::{Answered, Deployment, PATIENCE, chat, essay, fast, telling};
use crate::support::envoy;
use crate::support::ports::until;
use crate::support::stack::MODEL;

/// What a shipped file promises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    /// `envoy/<file>.yaml`.
    pub(crate) file: &'static str,
    /// What clients get while warmroute is away or frozen.
    away: u16,
    /// What clients get where warmroute has nobody to choose.
    nobody: u16,
    /// Whether another worker takes over where the chosen one is dead.
    takes_over: bool,
    /// Whether answers that stream survive the end of warmroute.
    survives: bool,
}

pub(crate) const STANDALONE: Way = Way {
    file: "standalone",
    away: 200,
    nobody: 200,
    takes_over: true,
    survives: true,
};
pub(crate) const SUBSET: Way = Way {
    file: "subset",
    away: 503,
    nobody: 503,
    takes_over: false,
    survives: true,
};
pub(crate) const ORIGINAL_DST: Way = Way {
    file: "original-dst",
    away: 503,
    nobody: 503,
    takes_over: false,
    survives: true,
};
pub(crate) const ROUTES: Way = Way {
    file: "route-per-header",
    away: 200,
    nobody: 200,
    takes_over: false,
    survives: true,
};
pub(crate) const GATEWAY_API: Way = Way {
    file: "gateway-api",
    away: 500,
    nobody: 503,
    takes_over: true,
    survives: false,
};

pub(crate) const XDS: Way = Way {
    file: "xds",
    away: 200,
    nobody: 503,
    takes_over: true,
    survives: true,
};

impl Way {
    /// warmroute's configuration for it, with answers that tell every decision.
    pub(crate) fn warmroute(self) -> Value {
        let mut own = envoy::counterpart(self.file)
            .unwrap()
            .unwrap_or_else(|| json!({}));
        // Where to listen and to write is the deployment's affair.
        own.as_object_mut().unwrap().remove("listen");
        if own["envoy"]["xds"].is_null() {
            own.as_object_mut().unwrap().remove("envoy");
        }
        // A dead worker is left alone by the end of its events already; here it is to be chosen all the same.
        own["index_trust"] = json!({"stale_credit": 1.0});
        telling(own)
    }

    /// Starts warmroute and Envoy with workers that are there already.
    pub(crate) async fn serve(self, deployment: &mut Deployment, workers: &[SocketAddr]) {
        deployment.start_router(&self.warmroute()).await.unwrap();
        let config = self.envoy(deployment, workers, "30s");
        deployment.start_envoy(&config).await.unwrap();
    }

    pub(crate) fn envoy(
        self,
        deployment: &Deployment,
        workers: &[SocketAddr],
        timeout: &str,
    ) -> String {
        let config = deployment
            .standalone()
            .config_of(self.file, workers)
            .unwrap();
        assert_eq!(config.matches(" message_timeout: 1s").count(), 1);
        config.replace(
            " message_timeout: 1s",
            &format!(" message_timeout: {timeout}"),
        )
    }

    async fn engines(self) -> Deployment {
        let mut deployment = Deployment::engines(&[fast(1), fast(2), fast(3)]).await;
        deployment.write_workers().unwrap();
        let workers: Vec<_> = deployment
            .engines
            .iter()
            .map(|engine| engine.address)
            .collect();
        self.serve(&mut deployment, &workers).await;
        deployment
    }
}

#[test]
fn every_shipped_file_is_a_way_that_is_tested() {
    let shipped = envoy::shipped().unwrap();
    let shipped: BTreeSet<_> = shipped
        .iter()
        .map(|file| file.file_stem().unwrap().to_str().unwrap())
        .collect();
    let ways = [STANDALONE, SUBSET, ORIGINAL_DST, ROUTES, GATEWAY_API, XDS].map(|way| way.file);
    // These need engines that hand over, which `tests/routing` has.
    let handovers = ["disaggregated-call", "disaggregated-mirror"];
    assert_eq!(shipped, ways.into_iter().chain(handovers).collect());
    assert!(
        ["gateway-api", "xds"]
            .iter()
            .all(|name| envoy::counterpart(name).unwrap().is_some())
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

/// The bytes of an answer without what differs from one to the next: its name, its time, and what was cached.
fn bytes(answer: &[u8]) -> String {
    let mut text = String::from_utf8(answer.to_vec()).unwrap();
    for (key, end) in [
        ("\"id\":", ','),
        ("\"created\":", ','),
        ("\"cached_tokens\":", '}'),
    ] {
        let mut kept = String::new();
        let mut parts = text.split(key);
        kept.push_str(parts.next().unwrap());
        for part in parts {
            kept.push_str(key);
            kept.push_str(&part[part.find(end).unwrap()..]);
        }
        text = kept;
    }
    text
}

/// 300 requests, each at the worker that was named and answered to the byte as that worker answers by itself.
async fn three_hundred_are_exact(deployment: &Deployment) {
    const QUESTIONS: usize = 30;
    let mut known = BTreeMap::new();
    for number in 0..QUESTIONS {
        let direct = deployment
            .http
            .post(deployment.engines[0].url("/v1/chat/completions"))
            .json(&question(number));
        known.insert(
            number,
            bytes(&direct.send().await.unwrap().bytes().await.unwrap()),
        );
    }
    let answers = futures_util::stream::iter(0..300).map(async |at| {
        let number = (at * 7) % QUESTIONS;
        (
            number,
            Answered::read(
                deployment
                    .post("/v1/chat/completions", &question(number))
                    .await,
            )
            .await,
        )
    });
    let answers: Vec<_> = answers.buffer_unordered(6).collect().await;
    let mut served = BTreeSet::new();
    for (number, answered) in &answers {
        answered.assert_exact();
        assert_eq!(bytes(&answered.body), known[number], "question {number}");
        served.insert(answered.engine());
    }
    assert_eq!((answers.len(), served.len()), (300, 3), "{served:?}");
    deployment.idle().await;
}

/// A request with every routing header a client could think of, all of them for the worker at `wanted`.
fn forged(deployment: &Deployment, number: usize, wanted: SocketAddr) -> reqwest::RequestBuilder {
    let mut request = deployment
        .http
        .post(deployment.url("/v1/chat/completions"))
        .json(&question(100 + number));
    for name in Contract::default().reserved() {
        let value = match name {
            name if name.contains("endpoint") || name.contains("host-port") => wanted.to_string(),
            name if name.contains("rank") => "0".to_owned(),
            _ => "1".to_owned(),
        };
        request = request.header(name, value);
    }
    request
}

async fn forged_headers_are_void(deployment: &Deployment) {
    let mut served = BTreeSet::new();
    for number in 0..12 {
        let answered = Answered::read(
            forged(deployment, number, deployment.engines[0].address)
                .send()
                .await
                .unwrap(),
        )
        .await;
        answered.assert_exact();
        served.insert(answered.engine().to_owned());
    }
    assert!(served.len() > 1, "forged headers steer: {served:?}");
    deployment.idle().await;
}

async fn without_warmroute(way: Way, deployment: &mut Deployment) {
    deployment.kill9_router();
    let mut served = BTreeSet::new();
    for number in 0..12 {
        let response = forged(deployment, number, deployment.engines[0].address)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), way.away, "without warmroute");
        served.insert(Answered::read(response).await.engine().to_owned());
    }
    assert!(
        way.away != 200 || served.len() > 1,
        "forged headers steer: {served:?}"
    );
    deployment.start_router(&way.warmroute()).await.unwrap();
    let back = until(PATIENCE, async || {
        deployment.ask("are you back?").await.mode() == "exact"
    });
    assert!(back.await, "{}", deployment.router_log());
}

async fn a_worker_dies(way: Way, deployment: &mut Deployment) {
    deployment.engines[1].kill9();
    let mut refused = 0;
    let (mut row, mut number) = (0, 200);
    // As long as warmroute has not noticed, and now and then when it tries again.
    while row < 20 {
        number += 1;
        assert!(
            number < 400,
            "{refused} of {number} were refused:\n{}",
            deployment.router_log()
        );
        let answered = Answered::read(
            deployment
                .post("/v1/chat/completions", &question(number))
                .await,
        )
        .await;
        match answered.status.as_u16() {
            200 => {
                assert_ne!(answered.engine(), "2");
                row += 1;
            }
            503 => (refused, row) = (refused + 1, 0),
            status => panic!("{status}: {answered:?}"),
        }
    }
    let page = deployment.metrics().await;
    assert!(
        page.sum("chosen_not_reached_total", &[("worker_id", "2")]) > 0.0,
        "{}",
        page.text()
    );
    let moved = page.sum("served_elsewhere_total", &[("outcome", "moved")]);
    if way.takes_over {
        assert!(
            refused == 0 && moved > 0.0,
            "{refused} refused, {moved} moved:\n{}",
            page.text()
        );
    } else {
        assert!(
            (1..=8).contains(&refused) && moved == 0.0,
            "{refused} refused, {moved} moved:\n{}",
            page.text()
        );
    }
    deployment.idle().await;
}

async fn is_exact(way: Way) {
    let mut deployment = way.engines().await;
    three_hundred_are_exact(&deployment).await;
    forged_headers_are_void(&deployment).await;
    without_warmroute(way, &mut deployment).await;
    a_worker_dies(way, &mut deployment).await;
}

/// What happens to answers that stream, and to new requests, when warmroute is killed or frozen.
async fn outlives_warmroute(way: Way) {
    let workers = [
        Bursts::start(1).await,
        Bursts::start(2).await,
        Bursts::start(3).await,
    ];
    let mut deployment = Deployment::engines(&[]).await;
    deployment
        .write_worker_entries(&workers.iter().map(Bursts::entry).collect())
        .unwrap();
    let addresses: Vec<_> = workers.iter().map(|worker| worker.address).collect();
    way.serve(&mut deployment, &addresses).await;
    let paced = |deployment: &Deployment| {
        let request = deployment
            .http
            .post(deployment.url("/v1/chat/completions"))
            .json(&chat(&essay(1)));
        request.header(EVENTS, 50).header(PACED, 1)
    };
    let open = begin(paced(&deployment), &workers).await;
    deployment.kill9_router();
    assert_eq!(
        is_whole(open, &workers).await,
        way.survives,
        "killed while an answer streams"
    );

    deployment.start_router(&way.warmroute()).await.unwrap();
    // With the shipped time, which is what ends the wait for a frozen process.
    let config = way.envoy(&deployment, &addresses, "1s");
    deployment.start_envoy(&config).await.unwrap();
    let ask = async || paced(&deployment).send().await.unwrap().status().as_u16();
    assert!(until(PATIENCE, async || ask().await == 200).await);
    let open = begin(paced(&deployment), &workers).await;
    deployment.router().unwrap().freeze();
    assert_eq!(
        is_whole(open, &workers).await,
        way.survives,
        "frozen while an answer streams"
    );
    assert_eq!(ask().await, way.away, "warmroute is frozen");
    deployment.router().unwrap().thaw();
    assert!(until(PATIENCE, async || ask().await == 200).await);
    outlives_a_restart(way, deployment, &workers).await;
}

/// A restart in order costs no answer, whatever the way.
async fn outlives_a_restart(way: Way, mut deployment: Deployment, workers: &[Bursts]) {
    let mut own = way.warmroute();
    own["drain"] = json!({"grace": "5s", "deadline": "60s"});
    deployment.kill9_router();
    deployment.start_router(&own).await.unwrap();
    let paced = |deployment: &Deployment| {
        let request = deployment
            .http
            .post(deployment.url("/v1/chat/completions"))
            .json(&chat(&essay(1)));
        request.header(EVENTS, 50).header(PACED, 1)
    };
    workers
        .iter()
        .for_each(|worker| worker.go.add_permits(1_000));
    let served = async || paced(&deployment).send().await.unwrap().status() == 200;
    assert!(until(PATIENCE, served).await);
    let open = begin(paced(&deployment), workers).await;
    let old = deployment.succeed_router(&own).await.unwrap();
    // Its grace is over when its successor is there, and nothing new comes to it.
    assert!(
        is_whole(open, workers).await,
        "{}: a successor took over while an answer streamed",
        way.file
    );
    assert!(
        until(PATIENCE, async || !old.is_running()).await,
        "{}",
        old.log_tail()
    );
}

async fn has_nobody_to_choose(way: Way) {
    let workers = [
        Bursts::start(1).await,
        Bursts::start(2).await,
        Bursts::start(3).await,
    ];
    let addresses: Vec<_> = workers.iter().map(|worker| worker.address).collect();
    let mut deployment = Deployment::engines(&[]).await;
    deployment.write_worker_entries(&json!([])).unwrap();
    let mut config = way.warmroute();
    if config["envoy"]["xds"].is_null() {
        // The endpoints are there, and are none of warmroute's.
        envoy::write_endpoints(&deployment.standalone().endpoint_file(), &addresses).unwrap();
        config["envoy"] = Value::Null;
    }
    config["readiness"] = json!({"min_initial_workers": 0});
    deployment.start_router(&config).await.unwrap();
    let envoy = way.envoy(&deployment, &addresses, "30s");
    deployment.start_envoy(&envoy).await.unwrap();
    for number in 0..6 {
        let response = deployment
            .post("/v1/chat/completions", &chat(&essay(number)))
            .await;
        assert_eq!(response.status(), way.nobody);
        if way.file == "gateway-api" {
            let error: Value = response.json().await.unwrap();
            assert!(error["error"]["code"].is_string(), "{error}");
        }
    }
}

macro_rules! ways {
    ($($name:ident: $way:expr),+) => {$(
        mod $name {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn serves_every_request_exactly_where_it_is_sent() {
                super::is_exact($way).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn does_without_warmroute_what_is_documented() {
                super::outlives_warmroute($way).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn answers_as_documented_where_nobody_can_be_chosen() {
                super::has_nobody_to_choose($way).await;
            }
        }
    )+};
}

ways! {
    override_host: super::STANDALONE,
    subset: super::SUBSET,
    original_dst: super::ORIGINAL_DST,
    route_per_header: super::ROUTES,
    gateway_api: super::GATEWAY_API,
    xds: super::XDS
}

/// The load of a worker as `/debug/load` has it.
async fn active(deployment: &Deployment, id: u64) -> u64 {
    let load = deployment.debug("load").await.unwrap();
    let of = load
        .as_array()
        .unwrap()
        .iter()
        .filter(|rank| rank["rank"]["worker"] == json!(id.to_string()));
    of.map(|rank| rank["active_requests"].as_u64().unwrap())
        .sum()
}

async fn bookings_follow(way: Way, change: impl FnOnce(String) -> String) {
    let alive = Bursts::start(2).await;
    let dead = SocketAddr::from((
        [127, 0, 0, 1],
        crate::support::ports::FreePort::find().unwrap().release(),
    ));
    let mut deployment = Deployment::engines(&[]).await;
    let entries = json!([{"id": 1, "endpoint": dead.to_string()}, alive.entry()]);
    deployment.write_worker_entries(&entries).unwrap();
    deployment.start_router(&way.warmroute()).await.unwrap();
    let config = change(way.envoy(&deployment, &[], "30s"));
    deployment.start_envoy(&config).await.unwrap();
    let mut open = Vec::new();
    for number in 0..6 {
        let request = deployment
            .http
            .post(deployment.url("/v1/chat/completions"))
            .json(&chat(&essay(number)));
        let response = request
            .header(EVENTS, 5)
            .header(PACED, 1)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 200);
        open.push(response);
        let booked = async || (active(&deployment, 1).await, active(&deployment, 2).await);
        let wanted = (0, open.len() as u64);
        assert!(
            until(PATIENCE, async || booked().await == wanted).await,
            "{:?}, not {wanted:?}",
            booked().await
        );
    }
    let moved = deployment
        .metrics()
        .await
        .sum("served_elsewhere_total", &[("outcome", "moved")]);
    assert!(moved >= 1.0, "{}", deployment.metrics().await.text());
    drop(open);
    deployment.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_booking_follows_its_request_to_the_worker_that_served_it() {
    bookings_follow(STANDALONE, |shipped| shipped).await;
    bookings_follow(GATEWAY_API, |shipped| shipped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_metadata_of_the_endpoint_served_is_enough_for_a_booking_to_follow() {
    let without_attributes = |shipped: String| {
        let attributes = "response_attributes: [upstream.address, response.flags]";
        assert_eq!(shipped.matches(attributes).count(), 1);
        shipped.replace(attributes, "response_attributes: []")
    };
    bookings_follow(STANDALONE, without_attributes).await;
    bookings_follow(GATEWAY_API, without_attributes).await;
}

/// Data-parallel ranks share an address; Envoy finds it by the worker, and the worker is told the rank.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subset_finds_every_rank_behind_one_address() {
    let mut spec = fast(u64::MAX).with(&["--dp-size", "2"]);
    // The port after that of the events is the second rank's, and without replay endpoint nobody else's.
    spec.replay = false;
    let mut deployment = Deployment::engines(&[spec, fast(2)]).await;
    let mut entries = [deployment.engines[0].entry(), deployment.engines[1].entry()];
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
            answered.engine().to_owned(),
            answered.header("x-served-dp-rank").to_owned(),
        ));
        served.len() == 3
    });
    assert!(all.await, "{served:?}");
}

/// Whoever else writes the endpoints may give one host several ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subset_finds_a_host_by_each_of_its_ids() {
    let [shared, other] = [Bursts::start(1).await, Bursts::start(2).await];
    let mut deployment = Deployment::engines(&[]).await;
    deployment
        .write_worker_entries(&json!([shared.entry(), other.entry()]))
        .unwrap();
    SUBSET.serve(&mut deployment, &[]).await;
    let file = deployment.standalone().endpoint_file();
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
    // Both ids lead to the one host now.
    let found = until(PATIENCE, async || {
        number += 1;
        let answered = deployment.complete(&essay(number)).await;
        assert_eq!(
            (answered.status.as_u16(), answered.engine()),
            (200, "1"),
            "{answered:?}"
        );
        // The choice was worker 2, and its id led to the host of worker 1.
        deployment
            .metrics()
            .await
            .sum("served_elsewhere_total", &[("outcome", "moved")])
            > 0.0
    });
    assert!(found.await);
    for number in 0..20 {
        let answered = deployment.complete(&essay(number)).await;
        assert_eq!(
            (answered.status.as_u16(), answered.engine()),
            (200, "1"),
            "{answered:?}"
        );
    }
}

/// The gateway says which endpoints will do: in the metadata, which no client can write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subset_hint_of_the_gateway_is_kept_and_an_empty_one_is_503() {
    let mut deployment = GATEWAY_API.engines().await;
    let wanted = deployment.engines[2].address;
    for (hint, status) in [(wanted.to_string(), 200), (String::new(), 503)] {
        let workers: Vec<_> = deployment
            .engines
            .iter()
            .map(|engine| engine.address)
            .collect();
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
            let body = json!({"model": MODEL, "prompt": essay(number), "max_tokens": 2});
            let answered = Answered::read(deployment.post("/v1/completions", &body).await).await;
            assert_eq!(answered.status, status, "{answered:?}");
            if status == 200 {
                answered.assert_exact();
                assert_eq!(answered.engine(), "3");
            } else {
                let error: Value = serde_json::from_slice(&answered.body).unwrap();
                assert!(error["error"]["code"].is_string(), "{error}");
            }
        }
    }
}
