//! Faults of the ext_proc cluster and of the host selection.

use super::*;

pub(super) const CLUSTER_FAULTS: &[EnvoyFault] = &[
    standalone(
        "default circuit breakers of the ext_proc cluster",
        |configs| without(configs.cluster("ext_proc"), "circuit_breakers"),
        &[(Error, "envoy.circuit_breakers")],
        "in cluster `ext_proc` write `circuit_breakers: {thresholds: [{max_connections: 100000",
    ),
    standalone(
        "default circuit breakers of the workers",
        |configs| {
            configs.cluster("workers")["circuit_breakers"]["thresholds"][0]["max_requests"] =
                json!(1024)
        },
        &[(Warning, "envoy.circuit_breakers")],
        "in cluster `workers` write `circuit_breakers",
    ),
    standalone(
        "default idle timeout of the workers",
        |configs| {
            without(
                configs.cluster("workers"),
                "typed_extension_protocol_options",
            )
        },
        &[(Warning, "envoy.worker_idle_timeout")],
        "`common_http_protocol_options: {idle_timeout: 4s}`",
    ),
    standalone(
        "HTTP/1 to warmroute",
        |configs| {
            without(
                configs.cluster("ext_proc"),
                "typed_extension_protocol_options",
            )
        },
        &[(Error, "envoy.http2"), (Warning, "envoy.keepalive")],
        "`typed_extension_protocol_options` as in cluster `ext_proc`",
    ),
    standalone(
        "no keepalive pings",
        |configs| {
            let options = &mut configs.cluster("ext_proc")["typed_extension_protocol_options"];
            options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["explicit_http_config"] =
                json!({"http2_protocol_options": {}});
        },
        &[(Warning, "envoy.keepalive")],
        "`connection_keepalive: {interval: 2s, timeout: 2s}`",
    ),
    standalone(
        "plaintext to a TLS listener",
        |configs| {
            configs.warmroute["listeners"]["ext_proc"] =
                json!({"address": "127.0.0.1:9002", "tls": {"self_signed": true}});
            let pipe = r#"{"pipe":{"path":"/tmp/warmroute/ext_proc.sock"}}"#;
            let socket = r#"{"socket_address":{"address":"127.0.0.1","port_value":9002}}"#;
            let text = configs.envoy.to_string().replace(pipe, socket);
            configs.envoy = serde_json::from_str(&text).unwrap();
        },
        &[(Error, "envoy.tls"), (Error, "envoy.tls")],
        "write a `transport_socket` as in envoy/README.md",
    ),
    standalone(
        "another metadata key",
        |configs| {
            configs.policy()["override_host_sources"][0]["metadata"]["path"][0]["key"] =
                json!("x-worker");
        },
        &[(Error, "envoy.override_host")],
        "`- metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}`",
    ),
    standalone(
        "metadata namespace that is not received",
        |configs| {
            configs.main()["metadata_options"]["receiving_namespaces"]["untyped"] =
                json!(["warmroute"]);
        },
        &[(Error, "envoy.metadata")],
        "`envoy.lb` into `receiving_namespaces",
    ),
    standalone(
        "served endpoint not reported",
        |configs| without(configs.policy(), "selected_host_key"),
        &[(Warning, "envoy.served")],
        "write `selected_host_key: {key: envoy.lb, path: [{key: \
            x-gateway-destination-endpoint-served}]}`",
    ),
    standalone(
        "load balancing without the override",
        |configs| without(configs.cluster("workers"), "load_balancing_policy"),
        &[(Error, "envoy.host_selection")],
        "write the `load_balancing_policy` of cluster `workers` in envoy/standalone.yaml",
    ),
    in_file(
        "subset",
        standalone(
            "one host per subset",
            |configs| {
                configs.policy()["subset_selectors"][0]["single_host_per_subset"] = json!(true)
            },
            &[(Error, "envoy.host_selection")],
            "remove `single_host_per_subset`",
        ),
    ),
    in_file(
        "subset",
        standalone(
            "worker id not copied to metadata",
            |configs| {
                configs
                    .filters()
                    .retain(|filter| filter["name"] != "envoy.filters.http.header_to_metadata")
            },
            &[(Error, "envoy.host_selection")],
            "add the filter `envoy.filters.http.header_to_metadata`",
        ),
    ),
    in_file(
        "subset",
        standalone(
            "endpoint in the metadata of subsets",
            |configs| {
                configs.main()["metadata_options"]["receiving_namespaces"]["untyped"] =
                    json!(["envoy.lb", "warmroute"]);
            },
            &[(Error, "envoy.host_selection")],
            "remove `envoy.lb` from the `receiving_namespaces`",
        ),
    ),
    in_file(
        "original-dst",
        standalone(
            "the address in another header",
            |configs| {
                configs.cluster("workers")["original_dst_lb_config"]["http_header_name"] =
                    json!("x-where")
            },
            &[(Error, "envoy.host_selection")],
            "write `http_header_name: x-gateway-destination-endpoint`",
        ),
    ),
    in_file(
        "route-per-header",
        standalone(
            "route cache not cleared",
            |configs| configs.warmroute["gateway"] = json!({"clear_route_cache": false}),
            &[(Error, "envoy.clear_route_cache")],
            "`gateway: {clear_route_cache: true}`",
        ),
    ),
];
