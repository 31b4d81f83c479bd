//! Findings for configurations that control planes generate, unchanged and with injected faults.
//! Fixes must name fields of the control plane's resources.

mod clusters;

use std::path::Path;

use serde_json::{Value, json};
use warmroute_doctor::finding::{Finding, FindingLevel};

use super::{HTTP_PROTOCOL_OPTIONS, cluster, findings, items, print, remove};
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
    let endpoints = clusters
        .iter()
        .filter(|item| item.to_string().contains("OverrideHost"))
        .flat_map(|item| {
            let hosts = item["cluster"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
                .as_array()
                .unwrap();
            hosts.iter().map(|host| {
                host["endpoint"]["address"]["socket_address"]["address"]
                    .as_str()
                    .unwrap()
                    .to_owned()
            })
        });
    let mut hosts: Vec<String> = endpoints.collect();
    if hosts.is_empty() {
        hosts.push("10.244.1.1".to_owned());
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

/// Returns the only finding of a check.
fn finding_of<'f>(found: &'f [Finding], check: &str) -> &'f Finding {
    let mut matching = found.iter().filter(|finding| finding.check == check);
    let first = matching
        .next()
        .unwrap_or_else(|| panic!("no {check}:\n{}", print(found)));
    assert!(matching.next().is_none(), "two {check}:\n{}", print(found));
    first
}

/// Returns the fix of the only finding of a check.
fn fix<'f>(found: &'f [Finding], check: &str) -> &'f str {
    let finding = finding_of(found, check);
    finding
        .fix
        .as_deref()
        .unwrap_or_else(|| panic!("no fix: {finding:?}"))
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
        let found = found_with_authority("warmroute.inference");
        assert!(
            found
                .iter()
                .all(|finding| finding.check != "envoy.pool_authority"),
            "{}",
            print(&found)
        );
        let found = found_with_authority("warmroute-other.inference");
        assert_eq!(
            finding_of(&found, "envoy.pool_authority").level,
            Warning,
            "{name}"
        );
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
        let found = found_after(name, |page, _| apply_manifest_settings(page));
        assert!(
            found.iter().all(|finding| finding.level == Note),
            "{name}:\n{}",
            print(&found)
        );
    }
}

#[test]
fn full_duplex_failure_mode_is_a_note() {
    let found = found_after(ISTIO, |_, _| {});
    let note = finding_of(&found, "envoy.failure_mode");
    assert_eq!(note.level, Note);
    assert!(
        note.message
            .contains("only if it has no endpoint of warmroute"),
        "{}",
        note.message
    );
    assert!(
        !found_after(ISTIO_BUFFERED, |_, _| {})
            .iter()
            .any(|finding| finding.check == "envoy.failure_mode")
    );
}

#[test]
fn suppressed_headers_need_client_traffic_policy() {
    let found = found_after(AI_GATEWAY, |_, _| {});
    let text = fix(&found, "envoy.suppressed_headers");
    assert_eq!(
        text,
        "in a ClientTrafficPolicy for the Gateway `inference/inference-gateway` write `headers: \
        {enableEnvoyHeaders: true}`"
    );
    let found = found_after(AI_GATEWAY, |page, _| {
        let router = manager(page)["http_filters"]
            .as_array_mut()
            .unwrap()
            .last_mut()
            .unwrap();
        remove(&mut router["typed_config"], "suppress_envoy_headers");
    });
    assert!(!found.iter().any(|finding| matches!(
        finding.check,
        "envoy.suppressed_headers" | "envoy.response_attributes"
    )));
    // Envoy Gateway without the AI Gateway also suppresses them, but its policy requests
    // attributes.
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        drop(remove(
            &mut manager(page)["http_filters"][0]["typed_config"],
            "response_attributes",
        ));
    });
    assert_eq!(
        finding_of(&found, "envoy.suppressed_headers").level,
        Warning
    );
}

#[test]
fn attributes_of_route_override_do_not_count() {
    // Envoy 1.40 sends no attributes that only the overrides of a route list.
    let found = found_after(ISTIO_BUFFERED, |page, _| {
        let policy = &mut cluster(page, ISTIO_WORKERS)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        drop(remove(&mut policy["typed_config"], "selected_host_key"));
    });
    let finding = finding_of(&found, "envoy.response_attributes");
    assert!(
        finding
            .message
            .contains("Envoy ignores those in the `overrides` of a route"),
        "{}",
        finding.message
    );
    let text = fix(&found, "envoy.response_attributes");
    assert!(
        text.starts_with("in an EnvoyFilter with `applyTo: HTTP_FILTER`"),
        "{text}"
    );
    let found = found_after(ISTIO, |page, _| {
        let policy = &mut cluster(page, ISTIO_WORKERS)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        drop(remove(&mut policy["typed_config"], "selected_host_key"));
        manager(page)["http_filters"][0]["typed_config"]["response_attributes"] =
            json!(["upstream.address", "response.flags"]);
    });
    assert!(
        !found
            .iter()
            .any(|finding| finding.check == "envoy.response_attributes"),
        "{}",
        print(&found)
    );
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
    assert!(
        found.iter().all(|finding| finding.level == Note),
        "{}",
        print(&found)
    );
    let found = found_after(ISTIO, |page, _| {
        overrides(page)["metadata_options"] =
            json!({"receiving_namespaces": {"untyped": ["other"]}});
    });
    assert!(
        fix(&found, "envoy.metadata")
            .contains("`applyTo: HTTP_ROUTE` that names the route `inference.qwen.0`")
    );
}

#[test]
fn cors_filter_is_cause_of_lost_override() {
    let cors = |page: &mut Value| {
        route(page)["typed_per_filter_config"] = json!({"envoy.filters.http.cors": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy",
        }});
    };
    let found = found_after(ISTIO, |page, _| cors(page));
    let finding = finding_of(&found, "envoy.route_override");
    assert_eq!(
        (finding.level, finding.subject.as_str()),
        (Error, "listener 0.0.0.0_80, route inference.qwen.0")
    );
    assert!(
        finding
            .message
            .contains("Istio drops the override of a rule with CORS"),
        "{}",
        finding.message
    );
    assert!(
        fix(&found, "envoy.route_override")
            .starts_with("remove the CORS filter from the rule of the HTTPRoute")
    );
    // A route with its override does not hide the finding of the other route.
    let found = found_after(ISTIO, |page, _| {
        let mut other = route(page).clone();
        other["name"] = json!("inference.other.0");
        cors(page);
        manager(page)["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .unwrap()
            .push(other);
    });
    assert!(
        finding_of(&found, "envoy.route_override")
            .message
            .contains("CORS")
    );
    assert!(
        !found
            .iter()
            .any(|finding| finding.level == Error && finding.check != "envoy.route_override"),
        "{}",
        print(&found)
    );
    // A route of the same Gateway to another service does not concern warmroute.
    let found = found_after(ISTIO, |page, _| {
        let mut other_service = route(page).clone();
        remove(&mut other_service, "typed_per_filter_config");
        other_service["route"]["cluster"] = json!(PICKER);
        manager(page)["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .unwrap()
            .push(other_service);
    });
    assert!(
        !found.iter().any(|finding| finding.level == Error),
        "{}",
        print(&found)
    );
}

#[test]
fn missing_retry_names_what_control_plane_can_set() {
    let found = found_after(ENVOY_GATEWAY, |_, _| {});
    let text = fix(&found, "envoy.retry");
    assert!(
        text.contains(
            "BackendTrafficPolicy for the HTTPRoute `inference/qwen` write `retry: {numRetries: 5"
        ),
        "{text}"
    );
    let found = found_after(AI_GATEWAY, |_, _| {});
    let note = finding_of(&found, "envoy.retry");
    assert!(
        note.message.contains("requests to a dead worker get 503"),
        "{}",
        note.message
    );
    assert!(
        note.message
            .ends_with("Envoy AI Gateway has no field for it"),
        "{}",
        note.message
    );
}

#[test]
fn buffered_ai_gateway_names_annotation() {
    let found = found_after(AI_GATEWAY, |page, _| {
        let modes = &mut manager(page)["http_filters"][0]["typed_config"]["processing_mode"];
        modes["request_body_mode"] = json!("BUFFERED");
        modes["response_body_mode"] = json!("BUFFERED");
    });
    let limit = finding_of(&found, "envoy.body_limit");
    assert_eq!(limit.level, Error);
    assert!(
        limit
            .message
            .starts_with("32KiB (per_connection_buffer_limit_bytes"),
        "{}",
        limit.message
    );
    assert!(
        fix(&found, "envoy.body_limit")
            .contains("`aigateway.envoyproxy.io/processing-body-mode: buffered`")
    );
    assert!(
        fix(&found, "envoy.response_body")
            .contains("`aigateway.envoyproxy.io/processing-body-mode: duplex`")
    );
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
        manager(page)["http_filters"]
            .as_array_mut()
            .unwrap()
            .insert(0, filter);
        items(page, "static_clusters").push(json!({"cluster": picker}));
    });
    let pickers = found
        .iter()
        .filter(|finding| finding.check == "envoy.circuit_breakers" && finding.level == Error);
    assert_eq!(pickers.count(), 2, "{}", print(&found));
    assert_eq!(finding_of(&found, "envoy.response_trailers").level, Error);
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
    assert!(
        checks(&found).iter().all(|(level, _)| *level >= Note),
        "{}",
        print(&found)
    );
    assert_eq!(finding_of(&found, "envoy.filter").level, Skipped);
}
