//! Faults of routes, client headers and endpoints.

use super::*;

/// Faults of routes, client headers and endpoints.
pub(super) const ROUTE_FAULTS: &[EnvoyFault] = &[
    standalone(
        "Envoy's own limit of bodies",
        |sides| EnvoySides::without(sides.host(), "request_body_buffer_limit"),
        &[(Warning, "envoy.body_limit")],
        "write `request_body_buffer_limit: 33554432`, or in the configuration of warmroute \
            `requests: {limits: {max_body_size: 1MiB}}`",
    ),
    standalone(
        "longer bodies than we take",
        |sides| sides.host()["request_body_buffer_limit"] = json!(64 << 20),
        &[(Error, "envoy.body_limit")],
        "`requests: {limits: {max_body_size: 64MiB}}`",
    ),
    standalone(
        "longer bodies than we take, by the listener",
        |sides| {
            EnvoySides::without(sides.host(), "request_body_buffer_limit");
            sides.listener()["per_connection_buffer_limit_bytes"] = json!(64 << 20);
        },
        &[(Error, "envoy.body_limit")],
        "`requests: {limits: {max_body_size: 64MiB}}`",
    ),
    standalone(
        "generations are cut",
        |sides| EnvoySides::without(sides.action(), "timeout"),
        &[(Error, "envoy.route_timeout")],
        "write `timeout: 0s` in the route /v1/",
    ),
    standalone(
        "prompts computed twice",
        |sides| sides.action()["retry_policy"]["retry_on"] = json!("connect-failure,5xx"),
        &[(Warning, "envoy.retry")],
        "write `retry_on: connect-failure,refused-stream,reset-before-request`",
    ),
    standalone(
        "the same dead worker again",
        |sides| EnvoySides::without(&mut sides.action()["retry_policy"], "retry_host_predicate"),
        &[(Warning, "envoy.retry")],
        "write the `retry_host_predicate`",
    ),
    standalone(
        "no other worker",
        |sides| EnvoySides::without(sides.action(), "retry_policy"),
        &[(Warning, "envoy.retry")],
        "write the `retry_policy` of envoy/standalone.yaml",
    ),
    standalone(
        "a header is left to clients",
        |sides| {
            let removed = &mut sides.manager()["early_header_mutation_extensions"][0]["typed_config"]
                ["mutations"];
            removed
                .as_array_mut()
                .unwrap()
                .retain(|line| line["remove"] != "x-data-parallel-rank");
        },
        &[(Warning, "envoy.client_headers")],
        "write - remove: x-data-parallel-rank",
    ),
    of(
        "original-dst",
        standalone(
            "clients go where they like",
            |sides| EnvoySides::without(sides.manager(), "early_header_mutation_extensions"),
            &[(Error, "envoy.client_headers")],
            "- remove: x-gateway-destination-endpoint;",
        ),
    ),
    standalone(
        "another file of endpoints",
        |sides| sides.ours["envoy"]["endpoints_file"] = json!("/run/warmroute/eds.yaml"),
        &[(Error, "envoy.endpoints_file")],
        "path_config_source: {path: /run/warmroute/eds.yaml, watched_directory: {path: \
            /run/warmroute}}",
    ),
    standalone(
        "endpoints of another cluster",
        |sides| sides.ours["envoy"]["cluster"] = json!("engines"),
        &[(Error, "envoy.endpoints_file")],
        "`envoy: {cluster: workers}`",
    ),
    standalone(
        "a folder that is not watched",
        |sides| {
            let eds = &mut sides.cluster("workers")["eds_cluster_config"]["eds_config"]["path_config_source"];
            eds["watched_directory"]["path"] = json!("/tmp");
        },
        &[(Error, "envoy.endpoints_file")],
        "write `watched_directory: {path: /tmp/",
    ),
    of(
        "xds",
        standalone(
            "an unpublished cluster",
            |sides| {
                sides.cluster("workers")["eds_cluster_config"]["service_name"] = json!("engines")
            },
            &[(Error, "envoy.xds"), (Error, "envoy.endpoints")],
            "`envoy: {cluster: engines}`",
        ),
    ),
    standalone(
        "no cluster uses xDS",
        |sides| sides.ours["envoy"]["xds"] = json!({}),
        &[(Warning, "envoy.xds")],
        "DELTA_GRPC",
    ),
    standalone(
        "a worker that Envoy does not know",
        |sides| {
            let workers = sides.ours["workers"]["list"].as_array_mut().unwrap();
            workers.push(json!({"id": 4, "endpoint": "127.0.0.1:18004"}));
        },
        &[(Error, "envoy.endpoints")],
        "start warmroute, which writes",
    ),
];
