//! Envoy with the configuration that Istio generates for an InferencePool. Its `:authority` is the name of the cluster,
//! `outbound|9002||warmroute.inference.svc.cluster.local`, which is not an authority of RFC 3986.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::deployment::{Deployment, essay, fast, telling};
use crate::support::ports::FreePort;

const REQUESTS: usize = 100;
const PICKER: &str = "outbound|9002||warmroute.inference.svc.cluster.local";
const SERVER_NAME: &str = "warmroute.inference.svc.cluster.local";

/// The transport of Envoy's calls to warmroute.
#[derive(Clone, Copy)]
enum Transport {
    /// Without a DestinationRule.
    Plaintext,
    /// With the DestinationRule as it was: Envoy sends the name of the cluster as server name.
    Tls,
    /// With `sni` in the DestinationRule.
    TlsWithServerName,
}

fn socket(port: u16) -> Value {
    json!({"socket_address": {"address": "127.0.0.1", "port_value": port}})
}

/// The generated configuration with other addresses and ports.
fn generated(deployment: &Deployment, picker_port: u16, transport: Transport) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/istio/as-generated.yaml");
    let mut config: Value = serde_saphyr::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    config["admin"]["address"] = socket(deployment.standalone().admin_port);
    let resources = &mut config["static_resources"];
    resources["listeners"][0]["address"] = socket(deployment.standalone().port);
    for cluster in resources["clusters"].as_array_mut().unwrap() {
        let is_picker = cluster["name"] == PICKER;
        let ports = match is_picker {
            true => vec![picker_port],
            false => deployment.engines.iter().map(|engine| engine.address.port()).collect(),
        };
        let endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array_mut().unwrap();
        assert_eq!(endpoints.len(), ports.len());
        for (endpoint, port) in endpoints.iter_mut().zip(ports) {
            endpoint["endpoint"]["address"] = socket(port);
        }
        match transport {
            Transport::Plaintext if is_picker => drop(cluster.as_object_mut().unwrap().remove("transport_socket")),
            Transport::TlsWithServerName if is_picker => {
                cluster["transport_socket"]["typed_config"]["sni"] = json!(SERVER_NAME);
                // As pilot generates it then.
                let options = cluster["typed_extension_protocol_options"].as_object_mut().unwrap();
                let http = options.values_mut().next().unwrap().as_object_mut().unwrap();
                http.remove("upstream_http_protocol_options").unwrap();
            }
            _ => {}
        }
    }
    config.to_string()
}

async fn deploy(transport: Transport) -> Deployment {
    let mut deployment = Deployment::engines(&[1, 2, 3, 4].map(fast)).await;
    deployment.write_workers().unwrap();
    let port = FreePort::find().unwrap().release();
    let mut listen = json!({"tcp": format!("127.0.0.1:{port}")});
    if !matches!(transport, Transport::Plaintext) {
        listen["tls"] = json!({"self_signed": true});
    }
    let envoy = generated(&deployment, port, transport);
    let more = json!({"listen": listen, "gateway": {"assume": "full_duplex"}, "failure": {"mode": "fail_closed"}});
    deployment.start_router(&telling(more)).await.unwrap();
    deployment.start_envoy(&envoy).await.unwrap();
    deployment
}

async fn assert_all_routed(transport: Transport) {
    let deployment = deploy(transport).await;
    for topic in 0..REQUESTS {
        deployment.complete(&essay(topic)).await.assert_exact();
    }
    let all = REQUESTS as f64;
    deployment.metrics_show("every exchange has ended", |page| page.sum("exchanges_total", &[]) == all).await;
    let page = deployment.metrics().await;
    assert_eq!(page.sum("http2_errors_total", &[]), 0.0, "{}", page.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istio_requests_are_routed_in_plaintext() {
    assert_all_routed(Transport::Plaintext).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istio_requests_are_routed_over_tls() {
    assert_all_routed(Transport::TlsWithServerName).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_server_name_is_logged_with_its_fix() {
    let deployment = deploy(Transport::Tls).await;
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
