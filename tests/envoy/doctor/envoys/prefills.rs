//! Faults of disaggregated deployments.

use super::*;

const fn mirrored(
    name: &'static str,
    plant: fn(&mut EnvoySides),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
) -> EnvoyFault {
    of(
        "disaggregated-mirror",
        standalone(name, plant, expected, words),
    )
}

/// Faults of disaggregated deployments.
pub(super) const PREFILL_FAULTS: &[EnvoyFault] = &[
    mirrored(
        "no mirrored requests",
        |sides| {
            for route in sides.host()["routes"].as_array_mut().unwrap() {
                let action = route.get_mut("route").and_then(Value::as_object_mut);
                action.map(|action| action.remove("request_mirror_policies"));
            }
        },
        &[(Error, "envoy.mirror")],
        "`request_mirror_policies: [{cluster_header: x-prefill-cluster}]`",
    ),
    mirrored(
        "a cluster that asks for its own name",
        |sides| {
            EnvoySides::without(
                &mut sides.cluster("prefill")["eds_cluster_config"],
                "service_name",
            )
        },
        &[(Error, "envoy.endpoints_file")],
        "in the `eds_cluster_config` of cluster `prefill` write `service_name: workers`",
    ),
    mirrored(
        "copies beyond Envoy's own limit",
        |sides| EnvoySides::without(sides.cluster("prefill"), "circuit_breakers"),
        &[(Error, "envoy.circuit_breakers")],
        "in cluster `prefill` write",
    ),
    mirrored(
        "mirrored requests to any worker",
        |sides| {
            let policy = &mut sides.cluster("prefill")["load_balancing_policy"]["policies"][0];
            let fallback = &mut policy["typed_extension_config"]["typed_config"]["fallback_policy"];
            fallback["policies"][0]["typed_extension_config"]["typed_config"]["fallback_policy"] =
                json!("ANY_ENDPOINT");
        },
        &[(Warning, "envoy.mirror_fallback")],
        "`fallback_policy` of cluster `prefill`",
    ),
    mirrored(
        "the header of the copy is removed",
        |sides| sides.host()["request_headers_to_remove"] = json!(["x-prefill-cluster"]),
        &[(Error, "envoy.mirror")],
        "remove `x-prefill-cluster`",
    ),
    mirrored(
        "copies of some",
        |sides| {
            for route in sides.host()["routes"].as_array_mut().unwrap() {
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
        |sides| {
            for worker in sides.ours["workers"]["list"].as_array_mut().unwrap() {
                worker["role"] = json!("prefill");
                worker["bootstrap"] = json!({"port": 9000 + worker["id"].as_u64().unwrap()});
            }
        },
        &[(Warning, "envoy.fallback")],
        "in the `default_subset` of cluster `workers`",
    ),
    mirrored(
        "a retry without the filter",
        |sides| EnvoySides::without(sides.upstream(), "http_filters"),
        &[(Error, "envoy.retry_filter")],
        "with the filter `another_room` of envoy/disaggregated-mirror.yaml",
    ),
    mirrored(
        "tries without a number",
        |sides| EnvoySides::without(sides.host(), "include_request_attempt_count"),
        &[(Error, "envoy.retry_filter")],
        "`include_request_attempt_count: true`",
    ),
    of(
        "disaggregated-call",
        mirrored(
            "a further try with the blocks of the first",
            |sides| EnvoySides::without(sides.upstream(), "http_filters"),
            &[(Error, "envoy.retry_filter")],
            "with the filter `prefill_retry` of envoy/disaggregated-call.yaml",
        ),
    ),
    of(
        "disaggregated-call",
        mirrored(
            "the same while we are away",
            |sides| sides.retry_filter()["failure_mode_allow"] = json!(true),
            &[(Error, "envoy.retry_filter")],
            "`failure_mode_allow: false`",
        ),
    ),
    of(
        "disaggregated-call",
        mirrored(
            "no time for a prefill",
            |sides| {
                sides.main()["max_message_timeout"] = json!("20s");
                EnvoySides::without(sides.retry_filter(), "max_message_timeout");
            },
            &[
                (Error, "envoy.max_message_timeout"),
                (Error, "envoy.retry_filter"),
            ],
            "`max_message_timeout: 41s`",
        ),
    ),
];
