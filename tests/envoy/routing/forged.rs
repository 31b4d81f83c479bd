//! Clients that forge the target of the mirrored copy of their request. Without protection, a
//! forged pair of headers makes Envoy send the copy to any address. Two protections exist, and each
//! must suffice alone: Envoy removes the headers before all filters, and warmroute ignores them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{
    RoutedAnswer, RoutingBed, chat, engine, engine_for, essay, patient, stream,
};
use crate::routing::mirror::{self, PREFILL};

const CLUSTER: &str = "x-prefill-cluster";
const DESTINATION: &str = "x-prefill-destination";

/// Cluster that routes by a header, as other gateways have.
const ANYWHERE: &str = "  - name: anywhere
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 1s
    original_dst_lb_config: {use_http_header: true, http_header_name: x-prefill-destination}
";

/// Change of a shipped Envoy file.
type EnvoyTemplate = fn(&str) -> String;

/// Returns the shipped file with the cluster [`ANYWHERE`].
fn with_anywhere(shipped: &str) -> String {
    let clusters = "  clusters:\n";
    assert_eq!(shipped.matches(clusters).count(), 1);
    patient(shipped).replace(clusters, &format!("{clusters}{ANYWHERE}"))
}

/// Like [`with_anywhere`], without the removal of headers, so that only warmroute protects.
fn without_header_removal(shipped: &str) -> String {
    let mut config = with_anywhere(shipped);
    for name in [CLUSTER, DESTINATION] {
        let line = format!("              - remove: {name}\n");
        assert_eq!(config.matches(&line).count(), 1, "{name}");
        config = config.replace(&line, "");
    }
    config
}

/// Makes Envoy select a decode worker if warmroute is down. The shipped configuration responds with
/// 503.
fn with_fallback(config: &str) -> String {
    let no_fallback = "fallback_policy: NO_FALLBACK\n                    default_subset:";
    assert_eq!(config.matches(no_fallback).count(), 1);
    config.replace(
        no_fallback,
        &no_fallback.replace("NO_FALLBACK", "DEFAULT_SUBSET"),
    )
}

/// Server that must receive no request. Counts connections.
struct OutsideServer {
    address: String,
    connections: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

impl OutsideServer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = connections.clone();
        let task = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                counter.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self {
            address,
            connections,
            _task: AbortOnDropHandle::new(task),
        }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

async fn query(bed: &RoutingBed, body: &Value, forged: [Option<&str>; 2]) -> RoutedAnswer {
    let names = [CLUSTER, DESTINATION].into_iter().zip(forged);
    let set = names.filter_map(|(name, value)| Some((name, value?)));
    RoutedAnswer::send(set.fold(bed.post(body), |request, (name, value)| {
        request.header(name, value)
    }))
    .await
}

/// Returns forged pairs of headers: for the outsider, for an engine that was not chosen, and
/// incomplete ones.
fn forgeries<'a>(outsider: &'a OutsideServer, engine: &'a str) -> [[Option<&'a str>; 2]; 5] {
    [
        [Some("anywhere"), Some(&outsider.address)],
        [Some("workers"), Some(engine)],
        [Some("prefill"), Some(engine)],
        [Some("anywhere"), None],
        [None, Some(&outsider.address)],
    ]
}

/// Returns the number of generations that the engines have computed.
async fn request_count(bed: &RoutingBed) -> f64 {
    bed.engines("vllm:request_success_total").await
}

/// Asserts that the copy is sent only to the prefill worker that warmroute chose.
async fn with_prefill_workers(envoy: EnvoyTemplate) {
    let bed = mirror::start_behind("20", json!({}), envoy).await;
    let outsider = OutsideServer::start().await;
    let engine = bed.engine(PREFILL[0]).address.to_string();
    for (topic, forged) in forgeries(&outsider, &engine).into_iter().enumerate() {
        for body in [chat(&essay(topic)), stream(&essay(topic + 100), 4)] {
            let before = (
                request_count(&bed).await,
                bed.engines("engine_sim:rooms_met_total").await,
            );
            let answer = query(&bed, &body, forged).await;
            assert_eq!(answer.status, 200, "{forged:?}: {answer:?}");
            mirror::assert_all_rooms_joined(&bed).await;
            let after = (
                request_count(&bed).await,
                bed.engines("engine_sim:rooms_met_total").await,
            );
            assert_eq!(
                after,
                (before.0 + 2.0, before.1 + 2.0),
                "one prefill and one decode worker: {forged:?}"
            );
        }
    }
    assert_eq!(
        outsider.connections(),
        0,
        "a server that was not chosen received a copy"
    );
}

/// Asserts that aggregated workers receive no copy.
async fn without_prefill_workers(envoy: EnvoyTemplate) {
    let specs = [engine(21), engine(22)];
    let bed =
        RoutingBed::start_with_envoy_file("disaggregated-mirror", &specs, json!({}), envoy).await;
    let outsider = OutsideServer::start().await;
    let engine = bed.engine(22).address.to_string();
    for (topic, forged) in forgeries(&outsider, &engine).into_iter().enumerate() {
        let before = request_count(&bed).await;
        let answer = query(&bed, &chat(&essay(topic)), forged).await;
        assert_eq!(answer.status, 200, "{forged:?}: {answer:?}");
        bed.wait_engines_idle().await;
        assert_eq!(
            request_count(&bed).await,
            before + 1.0,
            "only the chosen worker: {forged:?}"
        );
    }
    assert_eq!(
        outsider.connections(),
        0,
        "a server that was not chosen received a copy"
    );
}

long_tests! {
    envoy_removes_forged_target_of_copy: with_prefill_workers(with_anywhere),
    warmroute_alone_ignores_forged_target: with_prefill_workers(without_header_removal),
    envoy_removes_forged_request_for_a_copy: without_prefill_workers(with_anywhere),
    warmroute_alone_ignores_forged_copy: without_prefill_workers(without_header_removal),
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_alone_protects_without_warmroute() {
    let envoys: [(EnvoyTemplate, u16, bool); 3] = [
        (without_header_removal, 503, false),
        (|shipped| with_fallback(&with_anywhere(shipped)), 200, false),
        (
            |shipped| with_fallback(&without_header_removal(shipped)),
            200,
            true,
        ),
    ];
    for (envoy, status, reached) in envoys {
        let specs = [engine_for("decode", 21), engine_for("decode", 22)];
        let mut bed =
            RoutingBed::start_with_envoy_file("disaggregated-mirror", &specs, json!({}), envoy)
                .await;
        let outsider = OutsideServer::start().await;
        bed.stack.kill9_router();
        let answer = query(
            &bed,
            &chat(&essay(1)),
            [Some("anywhere"), Some(&outsider.address)],
        )
        .await;
        assert_eq!(answer.status, status, "{answer:?}");
        if reached {
            assert!(
                until(PATIENCE, async || outsider.connections() > 0).await,
                "without any protection the copy is sent"
            );
        } else {
            let page = "/stats?filter=cluster.anywhere.upstream_cx_total";
            let copies = bed.page(bed.envoy_setup().admin_url(page)).await;
            assert!(copies.contains("upstream_cx_total: 0"), "{copies}");
            assert_eq!(outsider.connections(), 0);
        }
    }
}
