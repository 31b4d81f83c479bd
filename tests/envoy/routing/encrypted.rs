//! ext_proc over TCP with TLS, as in gateways: without verification of the server, and with mutual
//! verification.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use warmroute_testbed::ports::FreePort;

use crate::routing::bed::{RoutingBed, chat, engine, patient};
use crate::support::pki::TestAuthority;

/// Returns `envoy/standalone.yaml` with ext_proc at a TCP port with TLS.
fn encrypting(shipped: &str, port: u16, context: &Value) -> String {
    let mut config = patient(shipped);
    let start = config.find("{pipe: {path: ").unwrap();
    let end = start + config[start..].find("}}").unwrap() + "}}".len();
    config.replace_range(
        start..end,
        &format!("{{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}"),
    );
    let mut context = context.clone();
    context["@type"] =
        json!("type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext");
    let socket = json!({"name": "envoy.transport_sockets.tls", "typed_config": context});
    let cluster = "  - name: ext_proc\n    type: STATIC\n    connect_timeout: 0.25s\n";
    assert_eq!(config.matches(cluster).count(), 1);
    let encrypted = format!(
        "  - name: ext_proc\n    type: STATIC\n    connect_timeout: 30s\n    transport_socket: {socket}\n"
    );
    config.replace(cluster, &encrypted)
}

/// Asserts that requests are routed in mode `exact` and that the connection uses TLS.
async fn serves_exactly(bed: &RoutingBed) {
    for at in 0..20 {
        let answer = bed.query(&chat(&format!("what is {at}?"))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.mode(), "exact", "{answer:?}");
        assert_eq!(answer.engine(), answer.chosen());
    }
    bed.wait_idle().await;
    let page = bed.metrics().await;
    let shaken = page.sum(
        "tls_handshakes_total",
        &[("listener", "ext_proc"), ("outcome", "done")],
    );
    assert!(shaken >= 1.0, "{}", page.text());
    assert_eq!(
        page.sum("tls_handshakes_total", &[("outcome", "failed")]),
        0.0,
        "{}",
        page.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_without_verification_is_served() {
    let port = FreePort::find().unwrap().release();
    let more = json!({
        "listeners": {
            "ext_proc": {"address": format!("127.0.0.1:{port}"), "tls": {"self_signed": true}},
        },
    });
    let context = json!({"common_tls_context": {"alpn_protocols": ["h2"]}});
    let bed = RoutingBed::start_with_envoy(&[engine(1), engine(2)], more, |shipped| {
        encrypting(shipped, port, &context)
    })
    .await;
    serves_exactly(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn envoy_with_client_certificate_is_served() {
    let port = FreePort::find().unwrap().release();
    let dir = tempfile::tempdir().unwrap();
    let servers = TestAuthority::new("servers");
    let clients = TestAuthority::new("clients");
    let path = |name: &str| dir.path().join(name);
    servers.sign(1).write(&path("server"));
    clients.sign(2).write(&path("client"));
    fs::write(path("servers.pem"), &servers.cert).unwrap();
    fs::write(path("clients.pem"), &clients.cert).unwrap();
    let more = json!({
        "listeners": {
            "ext_proc": {
                "address": format!("127.0.0.1:{port}"),
                "tls": {"cert_dir": path("server"), "client_ca": path("clients.pem")},
            },
        },
    });
    let file = |path: &Path| json!({"filename": path});
    let context = json!({
        "sni": "localhost",
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "tls_certificates": [{
                "certificate_chain": file(&path("client/tls.crt")),
                "private_key": file(&path("client/tls.key")),
            }],
            "validation_context": {
                "trusted_ca": file(&path("servers.pem")),
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "localhost"}}],
            },
        },
    });
    let bed = RoutingBed::start_with_envoy(&[engine(1), engine(2)], more, |shipped| {
        encrypting(shipped, port, &context)
    })
    .await;
    serves_exactly(&bed).await;
}
