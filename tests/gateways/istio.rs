//! Istio without an EnvoyFilter. The `:authority` of its calls is the name of the cluster,
//! `outbound|9002||warmroute.inference.svc.cluster.local`, which is not an authority of RFC 3986.

use reqwest::StatusCode;
use serde_json::json;

use crate::chats::assert_chats_routed;
use crate::deployment::{Deployment, essay, fast};
use crate::generated::{EnvoyConfig, ISTIO_AS_GENERATED, Place, local, serve};
use crate::support::ports::FreePort;

const SERVER_NAME: &str = "warmroute.inference.svc.cluster.local";

/// As pilot generates it where the DestinationRule has `sni`.
fn with_server_name() -> EnvoyConfig {
    let mut config = ISTIO_AS_GENERATED.generated();
    let cluster = config.cluster(ISTIO_AS_GENERATED.picker);
    cluster["transport_socket"]["typed_config"]["sni"] = json!(SERVER_NAME);
    let options = cluster["typed_extension_protocol_options"].as_object_mut().unwrap();
    let http = options.values_mut().next().unwrap().as_object_mut().unwrap();
    http.remove("upstream_http_protocol_options").unwrap();
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istio_routes_chats_in_plaintext() {
    let mut deployment = Deployment::engines(&[1, 2, 3, 4].map(fast)).await;
    deployment.write_workers().unwrap();
    let port = FreePort::find().unwrap().release();
    // Without a DestinationRule.
    let mut config = ISTIO_AS_GENERATED.generated();
    config.cluster(ISTIO_AS_GENERATED.picker).as_object_mut().unwrap().remove("transport_socket").unwrap();
    let workers: Vec<_> = deployment.engines.iter().map(|engine| engine.address).collect();
    let place = Place { deployment: &deployment, pickers: &[local(port)], workers: &workers };
    let config = ISTIO_AS_GENERATED.placed(config, &place).0.to_string();
    let mut warmroute = ISTIO_AS_GENERATED.warmroute(port);
    warmroute["listen"] = json!({"tcp": local(port)});
    deployment.start_router(&warmroute).await.unwrap();
    deployment.start_envoy(&config).await.unwrap();
    assert_chats_routed(&deployment).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istio_routes_chats_over_tls() {
    let mut deployment = Deployment::engines(&[1, 2, 3, 4].map(fast)).await;
    serve(&mut deployment, ISTIO_AS_GENERATED, with_server_name()).await;
    assert_chats_routed(&deployment).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_server_name_is_logged_with_its_fix() {
    let mut deployment = Deployment::engines(&[fast(1)]).await;
    serve(&mut deployment, ISTIO_AS_GENERATED, ISTIO_AS_GENERATED.generated()).await;
    for topic in 0..5 {
        assert_eq!(deployment.complete(&essay(topic)).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    let page = deployment.metrics().await;
    let refused = page.sum("tls_handshake_errors_total", &[("listener", "ext_proc"), ("reason", "server_name")]);
    assert!(refused >= 1.0, "{}", page.text());
    let log = deployment.router_log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("server_name") || line.contains("SNI")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    for part in ["WARN", "127.0.0.1", "trafficPolicy.tls.sni", "DestinationRule"] {
        assert!(lines[0].contains(part), "{part}: {}", lines[0]);
    }
}
