//! Findings for a real Envoy with the configurations that gateway control planes generated.

use std::path::Path;

use serde_json::{Value, json};
use warmroute::cmd::doctor::expected_envoy;
use warmroute_doctor::envoy::check_envoy;
use warmroute_doctor::envoy::dump::ConfigDump;
use warmroute_doctor::finding::{Finding, FindingLevel};
use warmroute_server::config::{Config, WorkerSource};
use warmroute_testbed::envoy;
use warmroute_testbed::ports::FreePort;

use crate::doctor::bed::{doctor, write};

use FindingLevel::{Error, Note, Warning};

/// Returns a generated configuration with local ports. Its name of warmroute's Service is replaced
/// by a name that resolves.
fn generated(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gateways")
        .join(format!("{name}.yaml"));
    let text = std::fs::read_to_string(file).unwrap();
    let text = text.replace(
        "address: warmroute.inference.svc.cluster.local",
        "address: localhost",
    );
    let mut config: Value = serde_saphyr::from_str(
        &text.replace("address: warmroute.inference.svc", "address: localhost"),
    )
    .unwrap();
    config["admin"]["address"]["socket_address"]["port_value"] = json!(0);
    let port = FreePort::find().unwrap().release();
    let socket = json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    config["static_resources"]["listeners"][0]["address"] = socket;
    config
}

/// Returns `warmroute.yaml` of the manifests for that control plane.
fn shipped(name: &str) -> Value {
    let is_buffered = name == "istio-buffered";
    let hosts = match name {
        "istio-as-generated" => [1, 2, 3, 4],
        "istio" => [1, 2, 4, 5],
        _ => [2, 3, 4, 5],
    };
    let workers: Vec<Value> = hosts
        .iter()
        .map(|host| json!({"id": host, "endpoint": format!("10.244.1.{host}:8000")}))
        .collect();
    json!({
        "listeners": {
            "ext_proc": {
                "address": "0.0.0.0:9002",
                "unprotected": true,
                "tls": {"self_signed": true},
            },
        },
        "models": [{"name": "m"}],
        "workers": {"list": workers},
        "gateway": {
            "default_body_mode": if is_buffered { "buffered" } else { "full_duplex" },
            "failure": {"mode": if is_buffered { "fail_open" } else { "fail_closed" }},
        },
    })
}

/// Runs a real Envoy and returns all findings with a level other than `ok`.
async fn examined(name: &str, change: fn(&mut Value)) -> Vec<Finding> {
    let dir = tempfile::Builder::new()
        .prefix("doctor-")
        .tempdir()
        .unwrap();
    let mut config = generated(name);
    change(&mut config);
    let envoy = envoy::start(&config.to_string(), dir.path(), 1)
        .await
        .unwrap();
    let address = std::fs::read_to_string(dir.path().join("envoy-admin")).unwrap();
    let page = reqwest::get(format!("http://{address}/config_dump?include_eds"))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    drop(envoy);
    let ours = Config::parse(
        Path::new("warmroute.yaml"),
        shipped(name).to_string().as_bytes(),
    )
    .unwrap();
    let WorkerSource::Fixed(workers) = ours.worker_source() else {
        panic!("another source")
    };
    let mut found = check_envoy(
        &ConfigDump::parse(&page).unwrap(),
        &expected_envoy(&ours, &workers),
    );
    found.retain(|one| one.level != FindingLevel::Ok);
    found
}

fn checks(found: &[Finding]) -> Vec<(FindingLevel, &str)> {
    let mut checks: Vec<_> = found.iter().map(|one| (one.level, one.check)).collect();
    checks.sort_unstable();
    checks
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_configurations_have_only_true_findings() {
    let frozen = [
        (Warning, "envoy.connect_timeout"),
        (Warning, "envoy.keepalive"),
    ];
    let istio = [
        (Warning, "envoy.stream_window"),
        (Warning, "envoy.worker_idle_timeout"),
        (Note, "envoy.client_headers"),
        (Note, "envoy.failure_mode"),
        (Note, "envoy.full_duplex"),
    ];
    let cases: [(&str, Vec<(FindingLevel, &str)>); 5] = [
        ("istio", [&frozen[..], &istio].concat()),
        (
            "istio-as-generated",
            [&[(Error, "envoy.server_name")], &frozen[..], &istio].concat(),
        ),
        (
            "istio-buffered",
            vec![
                (Warning, "envoy.worker_idle_timeout"),
                (Note, "envoy.client_headers"),
            ],
        ),
        (
            "envoy-ai-gateway",
            vec![
                (Error, "envoy.circuit_breakers"),
                (Warning, "envoy.circuit_breakers"),
                (Warning, "envoy.suppressed_headers"),
                (Warning, "envoy.worker_idle_timeout"),
                (Note, "envoy.connect_timeout"),
                (Note, "envoy.full_duplex"),
                (Note, "envoy.keepalive"),
                (Note, "envoy.retry"),
                (Note, "envoy.stream_window"),
            ],
        ),
        (
            "envoy-gateway",
            vec![
                (Error, "envoy.circuit_breakers"),
                (Warning, "envoy.connect_timeout"),
                (Warning, "envoy.keepalive"),
                (Warning, "envoy.retry"),
                (Warning, "envoy.worker_idle_timeout"),
                (Note, "envoy.full_duplex"),
            ],
        ),
    ];
    for (name, expected) in cases {
        let found = examined(name, |_| {}).await;
        assert_eq!(checks(&found), expected, "{name}: {found:#?}");
    }
}

/// In its `/config_dump`, Envoy prints runtime keys of the bootstrap in another number format.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runtime_keys_of_bootstrap_raise_limits() {
    let found = examined("envoy-ai-gateway", |config| {
        let key = |name: &str| {
            format!(
                "circuit_breakers.envoy.clusters.endpointpicker_vllm-qwen_inference_ext_proc.default.{name}"
            )
        };
        let layer = json!({key("max_requests"): 100_000, key("max_pending_requests"): 100_000});
        config["layered_runtime"] = json!({"layers": [{"name": "static", "static_layer": layer}]});
    });
    let found = found.await;
    assert!(found.iter().all(|one| one.level != Error), "{found:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plaintext_of_matching_transport_socket_is_found() {
    let found = examined("envoy-gateway", |config| {
        let picker = &mut config["static_resources"]["clusters"][0];
        picker["transport_socket_matches"][0]["transport_socket"] = json!({
            "name": "envoy.transport_sockets.raw_buffer",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"},
        });
    });
    let found = found.await;
    let tls: Vec<_> = found
        .iter()
        .filter(|one| one.check == "envoy.tls")
        .collect();
    assert!(matches!(tls[..], [one] if one.level == Error), "{found:#?}");
}

/// Fixes name the resources of the control plane instead of Envoy's fields.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_names_resources_of_control_plane() {
    let dir = tempfile::Builder::new()
        .prefix("doctor-")
        .tempdir()
        .unwrap();
    let envoy = envoy::start(&generated("envoy-gateway").to_string(), dir.path(), 1)
        .await
        .unwrap();
    let admin = format!(
        "http://{}",
        std::fs::read_to_string(dir.path().join("envoy-admin")).unwrap()
    );
    let mut config = shipped("envoy-gateway");
    config["workers"]["list"] = json!([{"id": 1, "endpoint": "127.0.0.1:1"}]);
    let found = doctor(
        &write(dir.path(), &config),
        &["--no-canary", "--envoy-admin", &admin],
    )
    .await;
    drop(envoy);
    let fixes = found.fixes();
    for words in [
        "EnvoyExtensionPolicy `inference/warmroute`",
        "BackendTrafficPolicy for the HTTPRoute `inference/qwen`",
    ] {
        assert!(fixes.contains(words), "{fixes}");
    }
}
