//! The configurations that control planes generate: which findings are true of each, what its planted faults are found as, and
//! that fixes name fields of the control plane's own resources.

use super::*;

const ISTIO: &str = "istio";
const ISTIO_BUFFERED: &str = "istio-buffered";
const AI_GATEWAY: &str = "envoy-ai-gateway";
const ENVOY_GATEWAY: &str = "envoy-gateway";
const PICKER: &str = "outbound|9002||warmroute.inference.svc.cluster.local";
const AI_PICKER: &str = "envoy.clusters.endpointpicker_vllm-qwen_inference_ext_proc";

/// The page that Envoy shows of a configuration file.
fn generated(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gateways")
        .join(format!("{name}.yaml"));
    let bootstrap: Value = serde_saphyr::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let wrapped = |list: &str, key: &str| -> Value {
        let items = bootstrap["static_resources"][list].as_array().unwrap();
        items.iter().map(|item| json!({key: item})).collect()
    };
    json!({"configs": [
        {"@type": "x/envoy.admin.v3.BootstrapConfigDump", "bootstrap": bootstrap},
        {"@type": "x/envoy.admin.v3.ClustersConfigDump", "static_clusters": wrapped("clusters", "cluster")},
        {"@type": "x/envoy.admin.v3.ListenersConfigDump", "static_listeners": wrapped("listeners", "listener")},
    ]})
}

/// warmroute.yaml as the manifests ship it, with the workers by their addresses.
fn shipped(name: &str, page: &Value) -> Value {
    let clusters = page["configs"][1]["static_clusters"].as_array().unwrap();
    let endpoints = clusters
        .iter()
        .filter(|one| one.to_string().contains("OverrideHost"))
        .flat_map(|one| {
            let hosts = one["cluster"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
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
        "listen": {"tcp": "0.0.0.0:9002", "unprotected": true, "tls": {"self_signed": true}},
        "models": [{"name": "m"}],
        "workers": workers,
        "gateway": {"assume": "full_duplex"},
        "failure": {"mode": "fail_closed"},
    });
    if name == ISTIO_BUFFERED {
        config["gateway"]["assume"] = json!("buffered");
        config["failure"]["mode"] = json!("fail_open");
    }
    config
}

/// Everything but `ok`, after a change of both sides.
fn found_after(name: &str, change: impl FnOnce(&mut Value, &mut Value)) -> Vec<Finding> {
    let mut page = generated(name);
    let mut config = shipped(name, &page);
    change(&mut page, &mut config);
    let mut found = findings(&page, &config);
    found.retain(|one| one.level != Level::Ok);
    found
}

fn checks(found: &[Finding]) -> Vec<(Level, &'static str)> {
    let mut checks: Vec<_> = found.iter().map(|one| (one.level, one.check)).collect();
    checks.sort_unstable();
    checks
}

/// The only finding of a check.
fn of<'f>(found: &'f [Finding], check: &str) -> &'f Finding {
    let mut of_check = found.iter().filter(|one| one.check == check);
    let first = of_check
        .next()
        .unwrap_or_else(|| panic!("no {check}:\n{}", print(found)));
    assert!(of_check.next().is_none(), "two {check}:\n{}", print(found));
    first
}

fn fix<'f>(found: &'f [Finding], check: &str) -> &'f str {
    let finding = of(found, check);
    finding
        .mend
        .as_deref()
        .unwrap_or_else(|| panic!("no fix: {finding:?}"))
}

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

/// As the manifests configure it: a server name, a time to connect, and pings.
fn repaired_istio(page: &mut Value) {
    let picker = cluster(page, PICKER);
    picker["connect_timeout"] = json!("1s");
    picker["transport_socket"]["typed_config"]["sni"] =
        json!("warmroute.inference.svc.cluster.local");
    picker["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"] = json!({
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {"connection_keepalive": {"interval": "2s", "timeout": "2s"}}},
    });
}

use Level::{Error, Note, Skipped, Warning};

#[test]
fn authority_without_pool_is_found() {
    for name in ["istio-as-generated", AI_GATEWAY, ENVOY_GATEWAY] {
        let confine = |service: &'static str| {
            found_after(name, |_, config| {
                config["confine"] = json!({"authority": {service: "inference/vllm-qwen"}})
            })
        };
        let found = confine("warmroute.inference");
        assert!(
            found.iter().all(|one| one.check != "envoy.pool_authority"),
            "{}",
            print(&found)
        );
        let found = confine("warmroute-other.inference");
        assert_eq!(of(&found, "envoy.pool_authority").level, Warning, "{name}");
    }
}

#[test]
fn generated_configurations_have_only_true_findings() {
    let frozen = [
        (Warning, "envoy.connect_timeout"),
        (Warning, "envoy.keepalive"),
    ];
    let istio = [
        (Note, "envoy.client_headers"),
        (Note, "envoy.failure_mode"),
        (Note, "envoy.full_duplex"),
    ];
    let cases: [(&str, Vec<(Level, &str)>); 5] = [
        (ISTIO, [&frozen[..], &istio].concat()),
        (
            "istio-as-generated",
            [&[(Error, "envoy.server_name")], &frozen[..], &istio].concat(),
        ),
        (ISTIO_BUFFERED, vec![(Note, "envoy.client_headers")]),
        (
            AI_GATEWAY,
            vec![
                (Error, "envoy.circuit_breakers"),
                (Warning, "envoy.circuit_breakers"),
                (Warning, "envoy.suppressed_headers"),
                (Note, "envoy.connect_timeout"),
                (Note, "envoy.full_duplex"),
                (Note, "envoy.keepalive"),
                (Note, "envoy.retry"),
            ],
        ),
        (
            ENVOY_GATEWAY,
            vec![
                (Error, "envoy.circuit_breakers"),
                (Warning, "envoy.connect_timeout"),
                (Warning, "envoy.keepalive"),
                (Warning, "envoy.retry"),
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
        let found = found_after(name, |page, _| repaired_istio(page));
        assert!(
            found.iter().all(|one| one.level == Note),
            "{name}:\n{}",
            print(&found)
        );
    }
}

#[test]
fn cluster_of_route_override_is_checked() {
    let found = found_after(ISTIO, |page, _| {
        repaired_istio(page);
        drop(remove(cluster(page, PICKER), "transport_socket"));
    });
    assert_eq!(of(&found, "envoy.tls").level, Error);
    assert!(
        fix(&found, "envoy.tls")
            .contains("DestinationRule of the host `warmroute.inference.svc.cluster.local`")
    );
    let found = found_after(ISTIO, |page, _| {
        repaired_istio(page);
        cluster(page, PICKER)["circuit_breakers"]["thresholds"][0]["max_requests"] = json!(1000);
    });
    assert!(fix(&found, "envoy.circuit_breakers").contains(
        "`trafficPolicy: {connectionPool: {http: {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}`"
    ));
    let found = found_after(ISTIO, |page, _| {
        let hosts = &mut cluster(page, PICKER)["load_assignment"]["endpoints"][0]["lb_endpoints"];
        for host in hosts.as_array_mut().unwrap() {
            host["endpoint"]["address"]["socket_address"]["port_value"] = json!(9003);
        }
    });
    assert!(
        of(&found, "envoy.address").seen.contains("10.244.2.1:9003"),
        "{}",
        print(&found)
    );
    let found = found_after(ISTIO, |page, _| {
        overrides(page)["grpc_service"]["envoy_grpc"]["cluster_name"] = json!("gone")
    });
    assert!(
        of(&found, "envoy.ext_proc_cluster")
            .seen
            .contains("the cluster gone")
    );
}

#[test]
fn cluster_name_as_server_name_names_destination_rule() {
    let found = found_after("istio-as-generated", |_, _| {});
    assert!(
        of(&found, "envoy.server_name")
            .seen
            .contains(&format!("`{PICKER}`"))
    );
    let words = "write `trafficPolicy: {tls: {sni: warmroute.inference.svc.cluster.local}}`";
    assert!(
        fix(&found, "envoy.server_name").contains(words),
        "{}",
        fix(&found, "envoy.server_name")
    );
}

#[test]
fn frozen_warmroute_fixes_name_control_plane_fields() {
    let found = found_after(ISTIO, |_, _| {});
    assert!(
        fix(&found, "envoy.keepalive").starts_with("in an EnvoyFilter with `applyTo: CLUSTER`")
    );
    assert!(
        fix(&found, "envoy.connect_timeout")
            .contains("`trafficPolicy: {connectionPool: {tcp: {connectTimeout: 1s}}}`")
    );
    let found = found_after(ENVOY_GATEWAY, |_, _| {});
    let keepalive = fix(&found, "envoy.keepalive");
    assert!(
        keepalive.contains("EnvoyExtensionPolicy `inference/warmroute`"),
        "{keepalive}"
    );
    assert!(
        keepalive.contains(
            "`backendSettings: {http2: {connectionKeepalive: {interval: 2s, timeout: 1s}}}`"
        ),
        "{keepalive}"
    );
    assert!(
        fix(&found, "envoy.connect_timeout")
            .contains("backendSettings: {timeout: {tcp: {connectTimeout: 1s}}}")
    );
    let found = found_after(AI_GATEWAY, |_, _| {});
    assert!(
        of(&found, "envoy.keepalive")
            .seen
            .ends_with("Envoy AI Gateway has no field for it")
    );
}

#[test]
fn request_limits_name_control_plane_fields() {
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        drop(remove(
            cluster(page, "httproute/inference/qwen/rule/0"),
            "circuit_breakers",
        ));
    });
    let fixes = |level: Level| {
        let found = found
            .iter()
            .filter(|one| one.level == level && one.check == "envoy.circuit_breakers");
        found
            .filter_map(|one| one.mend.clone())
            .collect::<Vec<_>>()
            .join("\n")
    };
    let limits = "circuitBreaker: {maxConnections: 100000, maxPendingRequests: 100000, maxParallelRequests: 100000}";
    assert!(
        fixes(Error).contains(&format!("`backendSettings: {{{limits}}}`")),
        "{}",
        fixes(Error)
    );
    assert!(
        fixes(Warning).contains("BackendTrafficPolicy for the HTTPRoute `inference/qwen`"),
        "{}",
        fixes(Warning)
    );
    assert!(fixes(Warning).contains(limits), "{}", fixes(Warning));
}

#[test]
fn runtime_keys_raise_limits_of_generated_cluster() {
    let key = format!("circuit_breakers.{AI_PICKER}.default.max_requests");
    let pending = format!("circuit_breakers.{AI_PICKER}.default.max_pending_requests");
    let found = found_after(AI_GATEWAY, |_, _| {});
    let limits = found
        .iter()
        .find(|one| one.check == "envoy.circuit_breakers" && one.level == Error)
        .unwrap();
    let words = limits.mend.clone().unwrap();
    assert!(
        words.contains("EnvoyProxy that the Gateway `inference/inference-gateway` refers to"),
        "{words}"
    );
    assert!(
        words.contains(&format!("/layered_runtime/layers/0/static_layer/{key}")),
        "{words}"
    );
    let picker = |layers: Value| {
        let found = found_after(AI_GATEWAY, |page, _| {
            page["configs"][0]["bootstrap"]["layered_runtime"] = json!({"layers": layers})
        });
        let of_picker = |one: &&Finding| {
            one.check == "envoy.circuit_breakers" && one.subject.contains(AI_PICKER)
        };
        found.iter().find(of_picker).map(|one| one.level)
    };
    let layer = |value: Value| json!({"name": "l", "static_layer": value});
    assert_eq!(
        picker(json!([layer(json!({&key: 100_000, &pending: 100_000}))])),
        None
    );
    // Bursts before Envoy is connected keep their limit.
    assert_eq!(
        picker(json!([layer(json!({&key: 100_000}))])),
        Some(Warning)
    );
    // Nested, as text, and overridden by a later layer.
    let nested = json!({"circuit_breakers": {AI_PICKER: {"default": {"max_requests": "100000", "max_pending_requests": 1e5}}}});
    assert_eq!(
        picker(json!([layer(json!({&key: 7})), layer(nested.clone())])),
        None
    );
    assert_eq!(
        picker(json!([layer(nested), layer(json!({&key: 7}))])),
        Some(Error)
    );
}

#[test]
fn tls_of_matching_transport_socket_is_checked() {
    let tls = |change: fn(&mut Value)| {
        let found = found_after(ENVOY_GATEWAY, |page, _| {
            change(cluster(
                page,
                "envoyextensionpolicy/inference/warmroute/extproc/0",
            ));
        });
        found
            .iter()
            .find(|one| one.check == "envoy.tls")
            .map(|one| (one.level, one.mend.clone().unwrap()))
    };
    assert_eq!(tls(|_| {}), None);
    // Only the matching socket counts.
    assert_eq!(tls(|picker| drop(remove(picker, "transport_socket"))), None);
    let (level, fix) = tls(|picker| {
        picker["transport_socket_matches"][0]["transport_socket"] =
            json!({"name": "envoy.transport_sockets.raw_buffer"});
    })
    .unwrap();
    assert_eq!(level, Error);
    assert!(
        fix.contains("in the Backend that the EnvoyExtensionPolicy"),
        "{fix}"
    );
    // No endpoint matches, so that the socket of the cluster counts.
    let other = tls(|picker| {
        picker["transport_socket_matches"][0]["match"]["name"] = json!("other");
        picker["transport_socket"] = json!({"name": "envoy.transport_sockets.raw_buffer"});
    });
    assert_eq!(other.map(|(level, _)| level), Some(Error));
    let found = found_after(ENVOY_GATEWAY, |_, config| {
        drop(remove(&mut config["listen"], "tls"))
    });
    assert!(super::gateways::fix(&found, "envoy.tls").contains("`tls: {self_signed: true}`"));
}

#[test]
fn full_duplex_failure_mode_is_a_note() {
    let found = found_after(ISTIO, |_, _| {});
    let note = of(&found, "envoy.failure_mode");
    assert_eq!(note.level, Note);
    assert!(
        note.seen
            .contains("only when it has no endpoint of warmroute"),
        "{}",
        note.seen
    );
    assert!(
        !found_after(ISTIO_BUFFERED, |_, _| {})
            .iter()
            .any(|one| one.check == "envoy.failure_mode")
    );
}

#[test]
fn suppressed_headers_need_client_traffic_policy() {
    let found = found_after(AI_GATEWAY, |_, _| {});
    let words = fix(&found, "envoy.suppressed_headers");
    assert_eq!(
        words,
        "in a ClientTrafficPolicy for the Gateway `inference/inference-gateway` write `headers: {enableEnvoyHeaders: true}`"
    );
    let found = found_after(AI_GATEWAY, |page, _| {
        let router = manager(page)["http_filters"]
            .as_array_mut()
            .unwrap()
            .last_mut()
            .unwrap();
        remove(&mut router["typed_config"], "suppress_envoy_headers");
    });
    assert!(!found.iter().any(|one| matches!(
        one.check,
        "envoy.suppressed_headers" | "envoy.response_attributes"
    )));
    // Envoy Gateway alone suppresses them too, and its policy asks for attributes.
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        drop(remove(
            &mut manager(page)["http_filters"][0]["typed_config"],
            "response_attributes",
        ));
    });
    assert_eq!(of(&found, "envoy.suppressed_headers").level, Warning);
}

#[test]
fn attributes_of_route_override_do_not_count() {
    // Envoy 1.40 sends no attributes that only the overrides of a route list.
    let found = found_after(ISTIO_BUFFERED, |page, _| {
        let target = "outbound|54321||vllm-qwen-ip-b7595ee7.inference.svc.cluster.local";
        let policy = &mut cluster(page, target)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        drop(remove(&mut policy["typed_config"], "selected_host_key"));
    });
    let finding = of(&found, "envoy.response_attributes");
    assert!(
        finding
            .seen
            .contains("Envoy ignores those in the `overrides` of a route"),
        "{}",
        finding.seen
    );
    let words = fix(&found, "envoy.response_attributes");
    assert!(
        words.starts_with("in an EnvoyFilter with `applyTo: HTTP_FILTER`"),
        "{words}"
    );
    let found = found_after(ISTIO, |page, _| {
        let target = "outbound|54321||vllm-qwen-ip-b7595ee7.inference.svc.cluster.local";
        let policy = &mut cluster(page, target)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        drop(remove(&mut policy["typed_config"], "selected_host_key"));
        manager(page)["http_filters"][0]["typed_config"]["response_attributes"] =
            json!(["upstream.address", "response.flags"]);
    });
    assert!(
        !found
            .iter()
            .any(|one| one.check == "envoy.response_attributes"),
        "{}",
        print(&found)
    );
}

#[test]
fn overrides_of_several_levels_are_merged() {
    let found = found_after(ISTIO, |page, _| {
        repaired_istio(page);
        // The virtual host gives the service, and the route the rest.
        let service = remove(overrides(page), "grpc_service");
        let host = &mut manager(page)["route_config"]["virtual_hosts"][0];
        host["typed_per_filter_config"]["envoy.filters.http.ext_proc"] = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_service": service, "failure_mode_allow": false},
        });
        overrides(page)["metadata_options"] =
            json!({"forwarding_namespaces": {"untyped": ["envoy.lb", "more"]}});
        overrides(page)["grpc_initial_metadata"] = json!([{"key": "x", "value": "y"}]);
    });
    assert!(
        found.iter().all(|one| one.level == Note),
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
fn cors_filter_is_named_as_cause_of_lost_override() {
    let cors = |page: &mut Value| {
        route(page)["typed_per_filter_config"] = json!({"envoy.filters.http.cors": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy",
        }});
    };
    let found = found_after(ISTIO, |page, _| cors(page));
    let lost = of(&found, "envoy.route_override");
    assert_eq!(
        (lost.level, lost.subject.as_str()),
        (Error, "listener 0.0.0.0_80, route inference.qwen.0")
    );
    assert!(
        lost.seen
            .contains("Istio drops the override of a rule with CORS"),
        "{}",
        lost.seen
    );
    assert!(
        fix(&found, "envoy.route_override")
            .starts_with("remove the CORS filter from the rule of the HTTPRoute")
    );
    // The same beside a route that kept its override.
    let found = found_after(ISTIO, |page, _| {
        let mut other = route(page).clone();
        other["name"] = json!("inference.other.0");
        cors(page);
        manager(page)["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .unwrap()
            .push(other);
    });
    assert!(of(&found, "envoy.route_override").seen.contains("CORS"));
    assert!(
        !found
            .iter()
            .any(|one| one.level == Error && one.check != "envoy.route_override"),
        "{}",
        print(&found)
    );
    // A route of the same Gateway that leads elsewhere is none of warmroute's.
    let found = found_after(ISTIO, |page, _| {
        let mut foreign = route(page).clone();
        remove(&mut foreign, "typed_per_filter_config");
        foreign["route"]["cluster"] = json!(PICKER);
        manager(page)["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .unwrap()
            .push(foreign);
    });
    assert!(
        !found.iter().any(|one| one.level == Error),
        "{}",
        print(&found)
    );
}

#[test]
fn original_dst_with_fallbacks_is_an_error() {
    let found = found_after(AI_GATEWAY, |_, config| {
        config["gateway"]["fallbacks"] = json!(2)
    });
    assert!(
        of(&found, "envoy.way")
            .seen
            .contains("gateway.fallbacks: 2")
    );
    assert!(fix(&found, "envoy.way").contains("`gateway: {fallbacks: 0}`"));
    for name in [ISTIO, ENVOY_GATEWAY] {
        let found = found_after(name, |_, config| config["gateway"]["fallbacks"] = json!(2));
        assert!(!found.iter().any(|one| one.check == "envoy.way"), "{name}");
    }
}

#[test]
fn missing_retry_names_what_control_plane_can_set() {
    let found = found_after(ENVOY_GATEWAY, |_, _| {});
    let words = fix(&found, "envoy.retry");
    assert!(
        words.contains(
            "BackendTrafficPolicy for the HTTPRoute `inference/qwen` write `retry: {numRetries: 5"
        ),
        "{words}"
    );
    let found = found_after(AI_GATEWAY, |_, _| {});
    let note = of(&found, "envoy.retry");
    assert!(
        note.seen.contains("requests to a dead worker get 503"),
        "{}",
        note.seen
    );
    assert!(
        note.seen.ends_with("Envoy AI Gateway has no field for it"),
        "{}",
        note.seen
    );
}

#[test]
fn buffered_ai_gateway_names_annotation() {
    let found = found_after(AI_GATEWAY, |page, _| {
        let modes = &mut manager(page)["http_filters"][0]["typed_config"]["processing_mode"];
        modes["request_body_mode"] = json!("BUFFERED");
        modes["response_body_mode"] = json!("BUFFERED");
    });
    let limit = of(&found, "envoy.body_limit");
    assert_eq!(limit.level, Error);
    assert!(
        limit
            .seen
            .starts_with("32KiB (per_connection_buffer_limit_bytes"),
        "{}",
        limit.seen
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
fn single_dns_address_with_replicas_needs_headless_service() {
    let found = |hosts: &[&str], replicas: bool| {
        let found = found_after(AI_GATEWAY, |page, config| {
            let host = |address: &&str| json!({"endpoint": {"address": {"socket_address": {"address": address, "port_value": 9002}}}});
            let hosts: Value = hosts.iter().map(host).collect();
            // As Envoy lists the addresses that a name resolves to.
            page["configs"].as_array_mut().unwrap().push(json!({
                "@type": "x/envoy.admin.v3.EndpointsConfigDump",
                "static_endpoint_configs": [{"endpoint_config": {"cluster_name": AI_PICKER, "endpoints": [{"lb_endpoints": hosts}]}}],
            }));
            if replicas {
                config["replicas"] = json!({"nats": {"servers": ["nats://nats:4222"]}});
            }
        });
        found
            .into_iter()
            .find(|one| one.check == "envoy.dns")
            .map(|one| one.mend.unwrap())
    };
    assert!(
        found(&["10.96.0.7"], true)
            .unwrap()
            .contains("`clusterIP: None`")
    );
    assert_eq!(found(&["10.244.2.1", "10.244.2.2"], true), None);
    assert_eq!(found(&["10.96.0.7"], false), None);
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
        .filter(|one| one.check == "envoy.circuit_breakers" && one.level == Error);
    assert_eq!(pickers.count(), 2, "{}", print(&found));
    assert_eq!(of(&found, "envoy.response_trailers").level, Error);
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
    assert_eq!(of(&found, "envoy.filter").level, Skipped);
}

#[test]
fn mesh_tls_ends_in_sidecar() {
    let found = |listens_tls: bool| {
        let found = found_after(ISTIO, |page, config| {
            let picker = cluster(page, PICKER);
            let tls = json!({"name": "envoy.transport_sockets.tls", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["istio-peer-exchange", "istio", "h2"]},
                "sni": "outbound_.9002_._.warmroute.inference.svc.cluster.local",
            }});
            drop(remove(picker, "transport_socket"));
            picker["transport_socket_matches"] = json!([
                {"name": "tlsMode-istio", "match": {"tlsMode": "istio"}, "transport_socket": tls},
                {"name": "tlsMode-disabled", "match": {}, "transport_socket": {"name": "envoy.transport_sockets.raw_buffer"}},
            ]);
            let hosts = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
                .as_array_mut()
                .unwrap();
            for host in hosts {
                host["metadata"]["filter_metadata"]["envoy.transport_socket_match"] =
                    json!({"tlsMode": "istio"});
            }
            if !listens_tls {
                drop(remove(&mut config["listen"], "tls"));
            }
        });
        found
            .iter()
            .find(|one| one.check == "envoy.tls")
            .map(|one| one.level)
    };
    assert_eq!(found(false), None);
    assert_eq!(found(true), Some(Error));
}

#[test]
fn endpoints_of_second_pool_are_known() {
    let second = |page: &mut Value| {
        let mut other = cluster(page, "httproute/inference/qwen/rule/0").clone();
        other["name"] = json!("httproute/inference/other/rule/0");
        let host = &mut other["load_assignment"]["endpoints"][0]["lb_endpoints"][0];
        host["endpoint"]["address"]["socket_address"]["address"] = json!("10.244.1.9");
        items(page, "static_clusters").push(json!({"cluster": other}));
        let mut filter = manager(page)["http_filters"][0].clone();
        let own = filter["name"].as_str().unwrap().to_owned();
        filter["name"] =
            json!("envoy.filters.http.ext_proc/envoyextensionpolicy/inference/other/extproc/0");
        let mut other = route(page).clone();
        other["route"]["cluster"] = json!("httproute/inference/other/rule/0");
        let config = remove(&mut other["typed_per_filter_config"], &own);
        other["typed_per_filter_config"][filter["name"].as_str().unwrap()] = config;
        manager(page)["http_filters"]
            .as_array_mut()
            .unwrap()
            .insert(0, filter);
        manager(page)["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .unwrap()
            .push(other);
    };
    let worker = json!({"id": 9, "endpoint": "10.244.1.9:8000"});
    let found = found_after(ENVOY_GATEWAY, |page, config| {
        second(page);
        config["workers"]
            .as_array_mut()
            .unwrap()
            .push(worker.clone());
    });
    assert!(
        !found.iter().any(|one| one.check == "envoy.endpoints"),
        "{}",
        print(&found)
    );
    let found = found_after(ENVOY_GATEWAY, |_, config| {
        config["workers"].as_array_mut().unwrap().push(worker)
    });
    assert!(fix(&found, "envoy.endpoints").contains("a `selector` that selects these pods"));
}

#[test]
fn picker_protocol_and_balancer_name_control_plane_fields() {
    let found = found_after(ISTIO, |page, _| {
        drop(remove(
            cluster(page, PICKER),
            "typed_extension_protocol_options",
        ))
    });
    assert!(fix(&found, "envoy.http2").contains("`appProtocol: grpc`"));
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        drop(remove(
            cluster(page, "httproute/inference/qwen/rule/0"),
            "load_balancing_policy",
        ));
    });
    let words = fix(&found, "envoy.way");
    assert!(
        words.contains(
            "`loadBalancer: {type: LeastRequest, endpointOverride: {extractFrom: [{header:"
        ),
        "{words}"
    );
}
