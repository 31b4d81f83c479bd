//! Istio without an EnvoyFilter. The `:authority` of its ext_proc calls is the name of the cluster,
//! `outbound|9002||warmroute.inference.svc.cluster.local`, which is not a valid authority of RFC
//! 3986.

use reqwest::StatusCode;
use serde_json::json;

use crate::gateways::bed::GatewayTestbed;
use crate::gateways::chats::{assert_chats_routed, chats_are_routed};
use crate::gateways::generated::{ISTIO_AS_GENERATED, ISTIO_BUFFERED};
use crate::shipped::bursts::BurstEngine;
use crate::support::deployment::{chat, essay, fast};

/// Istio generates this configuration if there is no DestinationRule.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istio_routes_chats_in_plaintext() {
    let mut config = ISTIO_AS_GENERATED.generated();
    config
        .cluster(ISTIO_AS_GENERATED.picker)
        .as_object_mut()
        .unwrap()
        .remove("transport_socket")
        .unwrap();
    let mut bed = GatewayTestbed::engines(ISTIO_AS_GENERATED, &[1, 2, 3, 4].map(fast)).await;
    let mut warmroute = bed.warmroute();
    warmroute["listeners"]["ext_proc"]
        .as_object_mut()
        .unwrap()
        .remove("tls")
        .unwrap();
    bed.start_router(&warmroute).await.unwrap();
    bed.start_envoy(config).await;
    assert_chats_routed(&bed).await;
}

long_tests! {
    istio_routes_chats_over_tls:
        chats_are_routed(ISTIO_AS_GENERATED, ISTIO_AS_GENERATED.shipped()),
    istio_buffered_routes_chats_as_shipped:
        chats_are_routed(ISTIO_BUFFERED, ISTIO_BUFFERED.shipped()),
}

/// For a rule with a filter of type CORS, Istio generates no call to warmroute. The EnvoyFilter of
/// the buffered variant adds the call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_cors_rule_is_routed_only_when_buffered() {
    for (gateway, mode) in [(ISTIO_AS_GENERATED, ""), (ISTIO_BUFFERED, "exact")] {
        let mut config = ISTIO_AS_GENERATED.generated();
        let cors = json!({"@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy"});
        config.routes().for_each(|route| {
            route["typed_per_filter_config"] = json!({"envoy.filters.http.cors": cors})
        });
        let mut bed = GatewayTestbed::engines(gateway, &[fast(1)]).await;
        bed.start(gateway.render(config).patient()).await;
        let answered = bed.complete(&essay(1)).await;
        assert_eq!(answered.status, StatusCode::OK);
        assert_eq!(answered.mode(), mode, "{}", gateway.file);
    }
}

/// The EnvoyFilter limits bodies to 32 MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_buffered_passes_bodies_of_32_mib() {
    let workers = [BurstEngine::start(1).await];
    let mut bed = GatewayTestbed::workers(ISTIO_BUFFERED, &workers).await;
    bed.start(ISTIO_BUFFERED.shipped()).await;
    for (megabytes, status) in [(12, 200), (31, 200), (33, 413)] {
        let body = chat(&"four".repeat(megabytes << 18));
        assert_eq!(
            bed.post("/v1/chat/completions", &body).await.status,
            status,
            "{megabytes} MiB"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn refused_server_name_is_logged_with_its_fix() {
    let mut deployment = GatewayTestbed::engines(ISTIO_AS_GENERATED, &[fast(1)]).await;
    deployment.start(ISTIO_AS_GENERATED.generated()).await;
    for topic in 0..5 {
        assert_eq!(
            deployment.complete(&essay(topic)).await.status,
            StatusCode::INTERNAL_SERVER_ERROR
        );
    }
    let page = deployment.metrics().await;
    let refused = page.sum(
        "tls_handshake_errors_total",
        &[("listener", "ext_proc"), ("reason", "server_name")],
    );
    assert!(refused >= 1.0, "{}", page.text());
    let log = deployment.router_log();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("server_name") || line.contains("SNI"))
        .collect();
    assert!(!lines.is_empty(), "{log}");
    for line in lines {
        for part in [
            "WARN",
            "127.0.0.1",
            "trafficPolicy.tls.sni",
            "DestinationRule",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
}
