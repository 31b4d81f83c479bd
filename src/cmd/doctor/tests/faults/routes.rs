//! Faults of routes, client headers and endpoints.

use super::*;

pub(super) const ROUTE_FAULTS: &[EnvoyFault] = &[
    standalone(
        "Envoy's default body limit",
        |configs| without(configs.host(), "request_body_buffer_limit"),
        &[(Warning, "envoy.body_limit")],
        "write `request_body_buffer_limit: 33554432`, or in the configuration of warmroute \
            `requests: {limits: {max_body_size: 1MiB}}`",
    ),
    standalone(
        "body limit above that of warmroute",
        |configs| configs.host()["request_body_buffer_limit"] = json!(64 << 20),
        &[(Error, "envoy.body_limit")],
        "`requests: {limits: {max_body_size: 64MiB}}`",
    ),
    standalone(
        "listener body limit above that of warmroute",
        |configs| {
            without(configs.host(), "request_body_buffer_limit");
            configs.listener()["per_connection_buffer_limit_bytes"] = json!(64 << 20);
        },
        &[(Error, "envoy.body_limit")],
        "`requests: {limits: {max_body_size: 64MiB}}`",
    ),
    standalone(
        "route timeout truncates responses",
        |configs| without(configs.action(), "timeout"),
        &[(Error, "envoy.route_timeout")],
        "write `timeout: 0s` in the route /v1/",
    ),
    standalone(
        "prompts computed twice",
        |configs| configs.action()["retry_policy"]["retry_on"] = json!("connect-failure,5xx"),
        &[(Warning, "envoy.retry")],
        "write `retry_on: connect-failure,refused-stream,reset-before-request`",
    ),
    standalone(
        "retries may reach the same dead worker",
        |configs| {
            without(
                &mut configs.action()["retry_policy"],
                "retry_host_predicate",
            )
        },
        &[(Warning, "envoy.retry")],
        "write the `retry_host_predicate`",
    ),
    standalone(
        "no retries",
        |configs| without(configs.action(), "retry_policy"),
        &[(Warning, "envoy.retry")],
        "write the `retry_policy` of envoy/standalone.yaml",
    ),
    standalone(
        "client header not removed",
        |configs| {
            let removed = &mut configs.manager()["early_header_mutation_extensions"][0]["typed_config"]
                ["mutations"];
            removed
                .as_array_mut()
                .unwrap()
                .retain(|line| line["remove"] != "x-data-parallel-rank");
        },
        &[(Warning, "envoy.client_headers")],
        "write - remove: x-data-parallel-rank",
    ),
    in_file(
        "original-dst",
        standalone(
            "clients can choose their worker",
            |configs| without(configs.manager(), "early_header_mutation_extensions"),
            &[(Error, "envoy.client_headers")],
            "- remove: x-gateway-destination-endpoint;",
        ),
    ),
    standalone(
        "another endpoint file",
        |configs| configs.warmroute["envoy"]["endpoints_file"] = json!("/run/warmroute/eds.yaml"),
        &[(Error, "envoy.endpoints_file")],
        "path_config_source: {path: /run/warmroute/eds.yaml, watched_directory: {path: \
            /run/warmroute}}",
    ),
    standalone(
        "endpoints of another cluster",
        |configs| configs.warmroute["envoy"]["cluster"] = json!("engines"),
        &[(Error, "envoy.endpoints_file")],
        "`envoy: {cluster: workers}`",
    ),
    standalone(
        "directory not watched",
        |configs| {
            let eds = &mut configs.cluster("workers")["eds_cluster_config"]["eds_config"]["path_config_source"];
            eds["watched_directory"]["path"] = json!("/tmp");
        },
        &[(Error, "envoy.endpoints_file")],
        "write `watched_directory: {path: /tmp/",
    ),
    standalone(
        "cluster not published",
        |configs| {
            configs.warmroute["envoy"] = json!({"xds": {}});
            let source = json!({"api_type": "DELTA_GRPC", "grpc_services": [
                {"envoy_grpc": {"cluster_name": "ext_proc"}},
            ]});
            configs.cluster("workers")["eds_cluster_config"] =
                json!({"service_name": "engines", "eds_config": {"api_config_source": source}});
        },
        &[(Error, "envoy.xds")],
        "`envoy: {cluster: engines}`",
    ),
    standalone(
        "no cluster uses xDS",
        |configs| configs.warmroute["envoy"]["xds"] = json!({}),
        &[(Warning, "envoy.xds")],
        "DELTA_GRPC",
    ),
    standalone(
        "worker unknown to Envoy",
        |configs| {
            let workers = configs.warmroute["workers"]["list"].as_array_mut().unwrap();
            workers.push(json!({"id": 4, "endpoint": "127.0.0.1:18004"}));
        },
        &[(Error, "envoy.endpoints")],
        "start warmroute, which writes",
    ),
];
