//! Checks of generated clusters. Fixes must name fields of the control plane's resources.

use super::*;

#[test]
fn cluster_of_route_override_is_checked() {
    let found = found_after(ISTIO, |page, _| {
        apply_manifest_settings(page);
        without(cluster(page, PICKER), "transport_socket");
    });
    let fix = "DestinationRule of the host `warmroute.inference.svc.cluster.local`";
    expect_finding(&found, Error, "envoy.tls", &[fix]);
    let found = found_after(ISTIO, |page, _| {
        apply_manifest_settings(page);
        cluster(page, PICKER)["circuit_breakers"]["thresholds"][0]["max_requests"] = json!(1000);
    });
    let fix = "`trafficPolicy: {connectionPool: {http: \
        {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}`";
    expect_finding(&found, Error, "envoy.circuit_breakers", &[fix]);
    let found = found_after(ISTIO, |page, _| {
        let hosts = &mut cluster(page, PICKER)["load_assignment"]["endpoints"][0]["lb_endpoints"];
        for host in hosts.as_array_mut().unwrap() {
            host["endpoint"]["address"]["socket_address"]["port_value"] = json!(9003);
        }
    });
    expect_finding(&found, Error, "envoy.address", &["10.244.2.1:9003"]);
    let found = found_after(ISTIO, |page, _| {
        overrides(page)["grpc_service"]["envoy_grpc"]["cluster_name"] = json!("missing")
    });
    let text = "the cluster missing";
    expect_finding(&found, Error, "envoy.ext_proc_cluster", &[text]);
}

#[test]
fn cluster_name_as_server_name_names_destination_rule() {
    let found = found_after("istio-as-generated", |_, _| {});
    let message = format!("`{PICKER}`");
    let fix = "write `trafficPolicy: {tls: {sni: warmroute.inference.svc.cluster.local}}`";
    expect_finding(&found, Error, "envoy.server_name", &[&message, fix]);
}

#[test]
fn stall_detection_fixes_name_control_plane_fields() {
    let found = found_after(ISTIO, |_, _| {});
    let fix = "in an EnvoyFilter with `applyTo: CLUSTER`";
    expect_finding(&found, Warning, "envoy.keepalive", &[fix]);
    let fix = "`trafficPolicy: {connectionPool: {tcp: {connectTimeout: 1s}}}`";
    expect_finding(&found, Warning, "envoy.connect_timeout", &[fix]);
    let found = found_after(ENVOY_GATEWAY, |_, _| {});
    let texts = [
        "EnvoyExtensionPolicy `inference/warmroute`",
        "`backendSettings: {http2: {connectionKeepalive: {interval: 2s, timeout: 1s}}}`",
    ];
    expect_finding(&found, Warning, "envoy.keepalive", &texts);
    let fix = "backendSettings: {timeout: {tcp: {connectTimeout: 1s}}}";
    expect_finding(&found, Warning, "envoy.connect_timeout", &[fix]);
    let found = found_after(AI_GATEWAY, |_, _| {});
    let text = "Envoy AI Gateway has no field for it";
    expect_finding(&found, Note, "envoy.keepalive", &[text]);
}

#[test]
fn request_limits_name_control_plane_fields() {
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        without(
            cluster(page, "httproute/inference/qwen/rule/0"),
            "circuit_breakers",
        )
    });
    let fixes = |level: FindingLevel| {
        let found = found
            .iter()
            .filter(|finding| finding.level == level && finding.check == "envoy.circuit_breakers");
        found
            .filter_map(|finding| finding.fix.clone())
            .collect::<Vec<_>>()
            .join("\n")
    };
    let limits = "circuitBreaker: {maxConnections: 100000, maxPendingRequests: 100000, \
    maxParallelRequests: 100000}";
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
fn worker_idle_timeout_names_control_plane_fields() {
    for (name, resource, field) in [
        (
            ENVOY_GATEWAY,
            "BackendTrafficPolicy for the HTTPRoute `inference/qwen`",
            "`timeout: {http: {connectionIdleTimeout: 4s}}`",
        ),
        (
            AI_GATEWAY,
            "BackendTrafficPolicy for the HTTPRoute `inference/qwen`",
            "`timeout: {http: {connectionIdleTimeout: 4s}}`",
        ),
        (
            ISTIO,
            "DestinationRule of the host `vllm-qwen-ip-b7595ee7.inference.svc.cluster.local`",
            "`trafficPolicy: {connectionPool: {http: {idleTimeout: 4s}}}`",
        ),
    ] {
        let found = found_after(name, |_, _| {});
        let texts = [resource, field];
        expect_finding(&found, Warning, "envoy.worker_idle_timeout", &texts);
    }
}

#[test]
fn runtime_keys_raise_limits_of_generated_cluster() {
    let key = format!("circuit_breakers.{AI_PICKER}.default.max_requests");
    let pending = format!("circuit_breakers.{AI_PICKER}.default.max_pending_requests");
    let found = found_after(AI_GATEWAY, |_, _| {});
    let limits = found
        .iter()
        .find(|finding| finding.check == "envoy.circuit_breakers" && finding.level == Error)
        .unwrap();
    let text = limits.fix.clone().unwrap();
    assert!(
        text.contains("EnvoyProxy that the Gateway `inference/inference-gateway` refers to"),
        "{text}"
    );
    assert!(
        text.contains(&format!("/layered_runtime/layers/0/static_layer/{key}")),
        "{text}"
    );
    let picker = |layers: Value| {
        let found = found_after(AI_GATEWAY, |page, _| {
            page["configs"][0]["bootstrap"]["layered_runtime"] = json!({"layers": layers})
        });
        let is_of_picker = |finding: &&Finding| {
            finding.check == "envoy.circuit_breakers" && finding.subject.contains(AI_PICKER)
        };
        found.iter().find(is_of_picker).map(|finding| finding.level)
    };
    let layer = |value: Value| json!({"name": "l", "static_layer": value});
    assert_eq!(
        picker(json!([layer(json!({&key: 100_000, &pending: 100_000}))])),
        None
    );
    // Without the second key, the limit of pending requests stays.
    assert_eq!(
        picker(json!([layer(json!({&key: 100_000}))])),
        Some(Warning)
    );
    // Nested keys with text values. A later layer takes precedence.
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
            .find(|finding| finding.check == "envoy.tls")
            .map(|finding| (finding.level, finding.fix.clone().unwrap()))
    };
    assert_eq!(tls(|_| {}), None);
    // Only the matching socket counts.
    assert_eq!(tls(|picker| without(picker, "transport_socket")), None);
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
    // No endpoint matches, so the socket of the cluster applies.
    let other = tls(|picker| {
        picker["transport_socket_matches"][0]["match"]["name"] = json!("other");
        picker["transport_socket"] = json!({"name": "envoy.transport_sockets.raw_buffer"});
    });
    assert_eq!(other.map(|(level, _)| level), Some(Error));
    let found = found_after(ENVOY_GATEWAY, |_, config| {
        without(&mut config["listeners"]["ext_proc"], "tls")
    });
    let fix = "`tls: {self_signed: true}`";
    expect_finding(&found, Error, "envoy.tls", &[fix]);
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
            without(picker, "transport_socket");
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
                without(&mut config["listeners"]["ext_proc"], "tls");
            }
        });
        found
            .iter()
            .find(|finding| finding.check == "envoy.tls")
            .map(|finding| finding.level)
    };
    assert_eq!(found(false), None);
    assert_eq!(found(true), Some(Error));
}

#[test]
fn single_dns_address_with_replicas_needs_headless_service() {
    let found = |hosts: &[&str], replicas: bool| {
        let found = found_after(AI_GATEWAY, |page, config| {
            let host = |address: &&str| json!({"endpoint": {"address": {"socket_address": {"address": address, "port_value": 9002}}}});
            let hosts: Value = hosts.iter().map(host).collect();
            // Envoy lists the resolved addresses of a name in this form.
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
            .find(|finding| finding.check == "envoy.dns")
            .map(|finding| finding.fix.unwrap())
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
        let filters = &mut manager(page)["http_filters"];
        filters.as_array_mut().unwrap().insert(0, filter);
        push_route(page, other);
    };
    let worker = json!({"id": 9, "endpoint": "10.244.1.9:8000"});
    let add_worker = |config: &mut Value| {
        let workers = &mut config["workers"]["list"];
        workers.as_array_mut().unwrap().push(worker.clone());
    };
    let found = found_after(ENVOY_GATEWAY, |page, config| {
        second(page);
        add_worker(config);
    });
    expect_none(&found, "envoy.endpoints");
    let found = found_after(ENVOY_GATEWAY, |_, config| add_worker(config));
    let fix = "a `selector` that selects these pods";
    expect_finding(&found, Error, "envoy.endpoints", &[fix]);
}

#[test]
fn picker_protocol_and_balancer_name_control_plane_fields() {
    let found = found_after(ISTIO, |page, _| {
        without(cluster(page, PICKER), "typed_extension_protocol_options")
    });
    expect_finding(&found, Error, "envoy.http2", &["`appProtocol: grpc`"]);
    let found = found_after(ENVOY_GATEWAY, |page, _| {
        without(
            cluster(page, "httproute/inference/qwen/rule/0"),
            "load_balancing_policy",
        )
    });
    let fix = "`loadBalancer: {type: LeastRequest, endpointOverride: {extractFrom: [{header:";
    expect_finding(&found, Error, "envoy.host_selection", &[fix]);
}

#[test]
fn original_dst_with_fallbacks_is_an_error() {
    let check = "envoy.host_selection";
    let found_with_fallbacks = |name: &str| {
        found_after(name, |_, config| {
            config["gateway"]["fallback_endpoints"] = json!(2)
        })
    };
    let texts = [
        "gateway.fallback_endpoints: 2",
        "`gateway: {fallback_endpoints: 0}`",
    ];
    expect_finding(&found_with_fallbacks(AI_GATEWAY), Error, check, &texts);
    for name in [ISTIO, ENVOY_GATEWAY] {
        expect_none(&found_with_fallbacks(name), check);
    }
}
