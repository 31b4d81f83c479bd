//! Findings for configurations that control planes generate, unchanged and with injected faults.
//! Fixes must name fields of the control plane's resources.

mod clusters;

use std::path::Path;

use serde_json::{Value, json};
use warmroute_doctor::finding::{Finding, FindingLevel};

use super::{
    HTTP_PROTOCOL_OPTIONS, cluster, expect_finding, expect_none, findings, items, print, remove,
    without,
};
use FindingLevel::{Error, Note, Skipped, Warning};

const ISTIO: &str = "istio";
const ISTIO_BUFFERED: &str = "istio-buffered";
const AI_GATEWAY: &str = "envoy-ai-gateway";
const ENVOY_GATEWAY: &str = "envoy-gateway";
const PICKER: &str = "outbound|9002||warmroute.inference.svc.cluster.local";
const ISTIO_WORKERS: &str = "outbound|54321||vllm-qwen-ip-b7595ee7.inference.svc.cluster.local";
const AI_PICKER: &str = "envoy.clusters.endpointpicker_vllm-qwen_inference_ext_proc";

/// Returns the configuration dump that Envoy shows for a generated configuration file.
fn generated(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gateways")
        .join(format!("{name}.yaml"));
    let bootstrap: Value = serde_saphyr::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let wrap_items = |list: &str, key: &str| -> Value {
        let items = bootstrap["static_resources"][list].as_array().unwrap();
        items.iter().map(|item| json!({key: item})).collect()
    };
    json!({"configs": [
        {"@type": "x/envoy.admin.v3.BootstrapConfigDump", "bootstrap": bootstrap},
        {"@type": "x/envoy.admin.v3.ClustersConfigDump", "static_clusters": wrap_items("clusters", "cluster")},
        {"@type": "x/envoy.admin.v3.ListenersConfigDump", "static_listeners": wrap_items("listeners", "listener")},
    ]})
}

/// Returns the warmroute.yaml of the manifests, with the addresses of the workers.
fn shipped(name: &str, page: &Value) -> Value {
    let clusters = page["configs"][1]["static_clusters"].as_array().unwrap();
    let clusters = clusters.iter().map(|item| &item["cluster"]);
    let selecting = clusters.filter(|cluster| cluster.to_string().contains("OverrideHost"));
    let endpoints = selecting.flat_map(|cluster| {
        let hosts = &cluster["load_assignment"]["endpoints"][0]["lb_endpoints"];
        hosts.as_array().unwrap()
    });
    let addresses = endpoints.map(|host| &host["endpoint"]["address"]["socket_address"]["address"]);
    let mut hosts: Vec<&str> = addresses.map(|address| address.as_str().unwrap()).collect();
    if hosts.is_empty() {
        hosts.push("10.244.1.1");
    }
    let workers: Value = hosts
        .iter()
        .zip(1..)
        .map(|(host, id)| json!({"id": id, "endpoint": format!("{host}:8000")}))
        .collect();
    let mut config = json!({
        "listeners": {
            "ext_proc": {
                "address": "0.0.0.0:9002",
                "unprotected": true,
                "tls": {"self_signed": true},
            },
        },
        "models": [{"name": "m"}],
        "workers": {"list": workers},
        "gateway": {"default_body_mode": "full_duplex", "failure": {"mode": "fail_closed"}},
    });
    if name == ISTIO_BUFFERED {
        config["gateway"]["default_body_mode"] = json!("buffered");
        config["gateway"]["failure"]["mode"] = json!("fail_open");
    }
    config
}

/// Returns all findings except `ok`, after a change of the dump and of warmroute's configuration.
fn found_after(name: &str, change: impl FnOnce(&mut Value, &mut Value)) -> Vec<Finding> {
    let mut page = generated(name);
    let mut config = shipped(name, &page);
    change(&mut page, &mut config);
    let mut found = findings(&page, &config);
    found.retain(|finding| finding.level != FindingLevel::Ok);
    found
}

/// Returns level and check of the findings, sorted.
fn checks(found: &[Finding]) -> Vec<(FindingLevel, &'static str)> {
    let mut checks: Vec<_> = found
        .iter()
        .map(|finding| (finding.level, finding.check))
        .collect();
    checks.sort_unstable();
    checks
}

/// Expects no finding that is worse than a note.
fn expect_only_notes(found: &[Finding]) {
    let has_only_notes = found.iter().all(|finding| finding.level == Note);
    assert!(has_only_notes, "{}", print(found));
}

/// Returns the HTTP connection manager.
fn manager(page: &mut Value) -> &mut Value {
    let listener = &mut items(page, "static_listeners")[0]["listener"];
    let chain = if listener["filter_chains"].is_array() {
        &mut listener["filter_chains"][0]
    } else {
        &mut listener["default_filter_chain"]
    };
    &mut chain["filters"][0]["typed_config"]
}

fn route(page: &mut Value) -> &mut Value {
    &mut manager(page)["route_config"]["virtual_hosts"][0]["routes"][0]
}

fn push_route(page: &mut Value, route: Value) {
    let routes = &mut manager(page)["route_config"]["virtual_hosts"][0]["routes"];
    routes.as_array_mut().unwrap().push(route);
}

fn overrides(page: &mut Value) -> &mut Value {
    &mut route(page)["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["overrides"]
}

/// Applies the settings of the manifests: a server name, a connect timeout, and pings. The idle
/// timeout of the workers is from the guide.
fn apply_manifest_settings(page: &mut Value) {
    let picker = cluster(page, PICKER);
    picker["connect_timeout"] = json!("1s");
    picker["transport_socket"]["typed_config"]["sni"] =
        json!("warmroute.inference.svc.cluster.local");
    picker["typed_extension_protocol_options"][HTTP_PROTOCOL_OPTIONS] = json!({
        "@type": format!("type.googleapis.com/{HTTP_PROTOCOL_OPTIONS}"),
        "explicit_http_config": {"http2_protocol_options": {
            "connection_keepalive": {"interval": "2s", "timeout": "2s"},
            "initial_stream_window_size": 65536,
            "initial_connection_window_size": 1048576,
        }},
    });
    cluster(page, ISTIO_WORKERS)["typed_extension_protocol_options"][HTTP_PROTOCOL_OPTIONS] = json!({
        "@type": format!("type.googleapis.com/{HTTP_PROTOCOL_OPTIONS}"),
        "common_http_protocol_options": {"idle_timeout": "4s"},
    });
}

#[test]
fn authority_without_pool_is_found() {
    for name in ["istio-as-generated", AI_GATEWAY, ENVOY_GATEWAY] {
        let found_with_authority = |service: &'static str| {
            found_after(name, |_, config| {
                config["routing"]["pool_routes"] =
                    json!({"authorities": {service: "inference/vllm-qwen"}})
            })
        };
        let check = "envoy.pool_authority";
        expect_none(&found_with_authority("warmroute.inference"), check);
        let found = found_with_authority("warmroute-other.inference");
        expect_finding(&found, Warning, check, &[]);
    }
}

#[test]
fn generated_configurations_have_only_valid_findings() {
    let stall_findings = [
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
        (ISTIO, [&stall_findings[..], &istio].concat()),
        (
            "istio-as-generated",
            [&[(Error, "envoy.server_name")], &stall_findings[..], &istio].concat(),
        ),
        (
            ISTIO_BUFFERED,
            vec![
                (Warning, "envoy.worker_idle_timeout"),
                (Note, "envoy.client_headers"),
            ],
        ),
        (
            AI_GATEWAY,
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
            ENVOY_GATEWAY,
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
        let found = found_after(name, |_, _| {});
        assert_eq!(checks(&found), expected, "{name}:\n{}", print(&found));
    }
}

#[test]
fn istio_with_shipped_settings_has_no_warnings() {
    for name in [ISTIO, "istio-as-generated"] {
        expect_only_notes(&found_after(name, |page, _| apply_manifest_settings(page)));
    }
}

#[test]
fn full_duplex_failure_mode_is_a_note() {
    let check = "envoy.failure_mode";
    let text = "only if it has no endpoint of warmroute";
    expect_finding(&found_after(ISTIO, |_, _| {}), Note, check, &[text]);
    expect_none(&found_after(ISTIO_BUFFERED, |_, _| {}), check);
}

#[test]
fn suppressed_headers_need_client_traffic_policy() {
    let check = "envoy.suppressed_headers";
    let fix = "in a ClientTrafficPolicy for the Gateway `inference/inference-gateway` \
        write `headers: {enableEnvoyHeaders: true}`";
    expect_finding(&found_after(AI_GATEWAY, |_, _| {}), Warning, check, &[fix]);
    let found = found_after(AI_GATEWAY, |page, _| {
        let filters = manager(page)["http_filters"].as_array_mut().unwrap();
        let router = filters.last_mut().unwrap();
        remove(&mut router["typed_config"], "suppress_envoy_headers");
    });
    expect_none(&found, check);
    expect_none(&found, "envoy.response_attributes");
    // Envoy Gateway without the AI Gateway also suppresses them, but its policy requests
    // attributes.
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        let filter = &mut manager(page)["http_filters"][0]["typed_config"];
        without(filter, "response_attributes");
    });
    expect_finding(&found, Warning, check, &[]);
}

#[test]
fn attributes_of_route_override_do_not_count() {
    let check = "envoy.response_attributes";
    let remove_host_key = |page: &mut Value| {
        let policy = &mut cluster(page, ISTIO_WORKERS)["load_balancing_policy"]["policies"][0];
        let config = &mut policy["typed_extension_config"]["typed_config"];
        without(config, "selected_host_key");
    };
    // Envoy 1.40 sends no attributes that only the overrides of a route list.
    let found = found_after(ISTIO_BUFFERED, |page, _| remove_host_key(page));
    let texts = [
        "Envoy ignores those in the `overrides` of a route",
        "in an EnvoyFilter with `applyTo: HTTP_FILTER`",
    ];
    expect_finding(&found, Warning, check, &texts);
    let found = found_after(ISTIO, |page, _| {
        remove_host_key(page);
        manager(page)["http_filters"][0]["typed_config"]["response_attributes"] =
            json!(["upstream.address", "response.flags"]);
    });
    expect_none(&found, check);
}

#[test]
fn overrides_of_several_levels_are_merged() {
    let found = found_after(ISTIO, |page, _| {
        apply_manifest_settings(page);
        // The virtual host sets the service, the route the other fields.
        let service = remove(overrides(page), "grpc_service");
        let host = &mut manager(page)["route_config"]["virtual_hosts"][0];
        host["typed_per_filter_config"]["envoy.filters.http.ext_proc"] = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_service": service, "failure_mode_allow": false},
        });
        overrides(page)["metadata_options"] =
            json!({"forwarding_namespaces": {"untyped": ["envoy.lb", "other"]}});
        overrides(page)["grpc_initial_metadata"] = json!([{"key": "x", "value": "y"}]);
    });
    expect_only_notes(&found);
    let found = found_after(ISTIO, |page, _| {
        overrides(page)["metadata_options"] =
            json!({"receiving_namespaces": {"untyped": ["other"]}});
    });
    let fix = "`applyTo: HTTP_ROUTE` that names the route `inference.qwen.0`";
    expect_finding(&found, Error, "envoy.metadata", &[fix]);
}

#[test]
fn cors_filter_is_cause_of_lost_override() {
    let check = "envoy.route_override";
    let cors = |page: &mut Value| {
        route(page)["typed_per_filter_config"] = json!({"envoy.filters.http.cors": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy",
        }});
    };
    let texts = [
        "Istio drops the override of a rule with CORS",
        "remove the CORS filter from the rule of the HTTPRoute",
    ];
    let found = found_after(ISTIO, |page, _| cors(page));
    expect_finding(&found, Error, check, &texts);
    let subject = "listener 0.0.0.0_80, route inference.qwen.0";
    assert!(found.iter().any(|finding| finding.subject == subject));
    // A route with its override does not hide the finding of the other route.
    let found = found_after(ISTIO, |page, _| {
        let mut other = route(page).clone();
        other["name"] = json!("inference.other.0");
        cors(page);
        push_route(page, other);
    });
    expect_finding(&found, Error, check, &texts);
    let errors = found.iter().filter(|finding| finding.level == Error);
    assert_eq!(errors.count(), 1, "{}", print(&found));
    // A route of the same Gateway to another service does not concern warmroute.
    let found = found_after(ISTIO, |page, _| {
        let mut other_service = route(page).clone();
        remove(&mut other_service, "typed_per_filter_config");
        other_service["route"]["cluster"] = json!(PICKER);
        push_route(page, other_service);
    });
    let mut found = found.iter();
    assert_eq!(found.find(|finding| finding.level == Error), None);
}

#[test]
fn missing_retry_names_what_control_plane_can_set() {
    let check = "envoy.retry";
    let found = found_after(ENVOY_GATEWAY, |_, _| {});
    let fix = "BackendTrafficPolicy for the HTTPRoute `inference/qwen` \
        write `retry: {numRetries: 5";
    expect_finding(&found, Warning, check, &[fix]);
    let found = found_after(AI_GATEWAY, |_, _| {});
    let texts = [
        "requests to a dead worker get 503",
        "Envoy AI Gateway has no field for it",
    ];
    expect_finding(&found, Note, check, &texts);
}

#[test]
fn buffered_ai_gateway_names_annotation() {
    let found = found_after(AI_GATEWAY, |page, _| {
        let modes = &mut manager(page)["http_filters"][0]["typed_config"]["processing_mode"];
        modes["request_body_mode"] = json!("BUFFERED");
        modes["response_body_mode"] = json!("BUFFERED");
    });
    let texts = [
        "32KiB (per_connection_buffer_limit_bytes",
        "`aigateway.envoyproxy.io/processing-body-mode: buffered`",
    ];
    expect_finding(&found, Error, "envoy.body_limit", &texts);
    let annotation = "`aigateway.envoyproxy.io/processing-body-mode: duplex`";
    expect_finding(&found, Error, "envoy.response_body", &[annotation]);
}

#[test]
fn filter_of_second_pool_is_checked() {
    let second = "envoy.clusters.endpointpicker_other_inference_ext_proc";
    let found = found_after(AI_GATEWAY, |page, _| {
        let mut filter = manager(page)["http_filters"][0].clone();
        filter["name"] =
            json!("envoy.filters.http.ext_proc/endpointpicker/other_inference_ext_proc");
        filter["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = json!(second);
        filter["typed_config"]["processing_mode"]["response_trailer_mode"] = json!("SKIP");
        let mut picker = cluster(page, AI_PICKER).clone();
        picker["name"] = json!(second);
        let filters = &mut manager(page)["http_filters"];
        filters.as_array_mut().unwrap().insert(0, filter);
        items(page, "static_clusters").push(json!({"cluster": picker}));
    });
    let mut checks = checks(&found);
    checks.retain(|check| *check == (Error, "envoy.circuit_breakers"));
    assert_eq!(checks.len(), 2, "{}", print(&found));
    expect_finding(&found, Error, "envoy.response_trailers", &[]);
}

#[test]
fn unseen_routes_of_istio_are_skipped_without_findings() {
    let found = found_after(ISTIO, |page, _| {
        remove(manager(page), "route_config");
        manager(page)["rds"] = json!({"route_config_name": "http.80"});
        remove(
            &mut manager(page)["http_filters"][0]["typed_config"]["grpc_service"],
            "timeout",
        );
    });
    assert!(found.iter().all(|finding| finding.level >= Note));
    expect_finding(&found, Skipped, "envoy.filter", &[]);
}
