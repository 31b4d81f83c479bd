//! Faults of disaggregated deployments.

use super::*;

const fn mirrored(
    name: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
) -> EnvoyFault {
    in_file(
        "disaggregated-mirror",
        standalone(name, plant, expected, words),
    )
}

pub(super) const PREFILL_FAULTS: &[EnvoyFault] = &[
    mirrored(
        "no mirrored requests",
        |configs| {
            for route in configs.host()["routes"].as_array_mut().unwrap() {
                let action = route.get_mut("route").and_then(Value::as_object_mut);
                action.map(|action| action.remove("request_mirror_policies"));
            }
        },
        &[(Error, "envoy.mirror")],
        "`request_mirror_policies: [{cluster_header: x-prefill-cluster}]`",
    ),
    mirrored(
        "cluster without the service name of the workers",
        |configs| {
            ConfigPair::without(
                &mut configs.cluster("prefill")["eds_cluster_config"],
                "service_name",
            )
        },
        &[(Error, "envoy.endpoints_file")],
        "in the `eds_cluster_config` of cluster `prefill` write `service_name: workers`",
    ),
    mirrored(
        "default circuit breakers of the prefill cluster",
        |configs| ConfigPair::without(configs.cluster("prefill"), "circuit_breakers"),
        &[(Error, "envoy.circuit_breakers")],
        "in cluster `prefill` write",
    ),
    mirrored(
        "mirrored requests to any worker",
        |configs| {
            let policy = &mut configs.cluster("prefill")["load_balancing_policy"]["policies"][0];
            let fallback = &mut policy["typed_extension_config"]["typed_config"]["fallback_policy"];
            fallback["policies"][0]["typed_extension_config"]["typed_config"]["fallback_policy"] =
                json!("ANY_ENDPOINT");
        },
        &[(Warning, "envoy.mirror_fallback")],
        "`fallback_policy` of cluster `prefill`",
    ),
    mirrored(
        "mirror header removed",
        |configs| configs.host()["request_headers_to_remove"] = json!(["x-prefill-cluster"]),
        &[(Error, "envoy.mirror")],
        "remove `x-prefill-cluster`",
    ),
    mirrored(
        "only a fraction of the requests mirrored",
        |configs| {
            for route in configs.host()["routes"].as_array_mut().unwrap() {
                if let Some(policies) = route.pointer_mut("/route/request_mirror_policies") {
                    policies[0]["runtime_fraction"] = json!({"default_value": {"numerator": 50}});
                }
            }
        },
        &[(Error, "envoy.mirror")],
        "remove `runtime_fraction`",
    ),
    mirrored(
        "no decode workers",
        |configs| {
            for worker in configs.warmroute["workers"]["list"].as_array_mut().unwrap() {
                worker["role"] = json!("prefill");
                worker["bootstrap"] = json!({"port": 9000 + worker["id"].as_u64().unwrap()});
            }
        },
        &[(Warning, "envoy.fallback")],
        "in the `default_subset` of cluster `workers`",
    ),
    mirrored(
        "retry without the retry filter",
        |configs| ConfigPair::without(configs.upstream(), "http_filters"),
        &[(Error, "envoy.retry_filter")],
        "with the filter `another_room` of envoy/disaggregated-mirror.yaml",
    ),
    mirrored(
        "no attempt count",
        |configs| ConfigPair::without(configs.host(), "include_request_attempt_count"),
        &[(Error, "envoy.retry_filter")],
        "`include_request_attempt_count: true`",
    ),
    in_file(
        "disaggregated-call",
        mirrored(
            "retry with the KV blocks of the first attempt",
            |configs| ConfigPair::without(configs.upstream(), "http_filters"),
            &[(Error, "envoy.retry_filter")],
            "with the filter `prefill_retry` of envoy/disaggregated-call.yaml",
        ),
    ),
    in_file(
        "disaggregated-call",
        mirrored(
            "retry filter that fails open",
            |configs| configs.retry_filter()["failure_mode_allow"] = json!(true),
            &[(Error, "envoy.retry_filter")],
            "`failure_mode_allow: false`",
        ),
    ),
    in_file(
        "disaggregated-call",
        mirrored(
            "message timeout shorter than a prefill",
            |configs| {
                configs.main()["max_message_timeout"] = json!("20s");
                ConfigPair::without(configs.retry_filter(), "max_message_timeout");
            },
            &[
                (Error, "envoy.max_message_timeout"),
                (Error, "envoy.retry_filter"),
            ],
            "`max_message_timeout: 41s`",
        ),
    ),
];
