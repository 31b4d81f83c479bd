//! Checks of mirrored requests and of retries, with one injected fault each.

use serde_json::{Value, json};
use warmroute_doctor::finding::FindingLevel;

use super::{
    Fault, cluster, http_options, inject_fault, items, remove, replace_text, virtual_host, without,
};
use FindingLevel::{Error, Warning};

/// Changes every route action with mirror policies.
fn for_each_mirror_action(page: &mut Value, mut change: impl FnMut(&mut Value)) {
    for route in virtual_host(page)["routes"].as_array_mut().unwrap() {
        if route["route"]["request_mirror_policies"].is_array() {
            change(&mut route["route"]);
        }
    }
}

/// Returns the matcher around the upstream filter for retries.
fn retry_matcher(page: &mut Value) -> &mut Value {
    &mut http_options(page)["http_filters"][0]["typed_config"]
}

/// Returns the ext_proc filter for retries.
fn inner_filter(page: &mut Value) -> &mut Value {
    &mut retry_matcher(page)["extension_config"]["typed_config"]
}

const RETRY_FILTER: (FindingLevel, &str) = (Error, "envoy.retry_filter");

/// Injects a fault into a file. Expects only this problem, and a text in its fix.
fn expect_only(
    file: &str,
    name: &str,
    fault: Fault,
    problem: (FindingLevel, &'static str),
    text: &str,
) {
    let (found, fixes) = inject_fault(file, fault);
    assert_eq!(found, [problem], "{file}: {name}");
    assert!(fixes.contains(text), "{file}: {name}: {fixes}");
}

type MirrorFault = (&'static str, Fault, &'static str, &'static str);

/// Faults of the mirror policy: name, fault, failing check and text of the fix.
const MIRROR_POLICY_FAULTS: [MirrorFault; 5] = [
    (
        "no mirror policy",
        |page, _| for_each_mirror_action(page, |action| without(action, "request_mirror_policies")),
        "envoy.mirror",
        "cluster_header",
    ),
    (
        "a copy of every request",
        |page, _| {
            for_each_mirror_action(page, |action| {
                action["request_mirror_policies"] = json!([{"cluster": "prefill"}])
            })
        },
        "envoy.mirror",
        "and no other policy",
    ),
    (
        "a copy of every request, by the cluster",
        |page, _| http_options(page)["request_mirror_policies"] = json!([{"cluster": "prefill"}]),
        "envoy.mirror",
        "and no other policy",
    ),
    (
        "a copy of every tenth request",
        |page, _| {
            for_each_mirror_action(page, |action| {
                action["request_mirror_policies"][0]["runtime_fraction"] =
                    json!({"default_value": {"numerator": 10}});
            });
        },
        "envoy.mirror",
        "remove `runtime_fraction`",
    ),
    (
        "the header is removed first",
        |page, _| virtual_host(page)["request_headers_to_remove"] = json!(["x-prefill-cluster"]),
        "envoy.mirror",
        "remove `x-prefill-cluster`",
    ),
];

/// Faults of the cluster that receives the copies.
const MIRROR_CLUSTER_FAULTS: [MirrorFault; 7] = [
    (
        "no such cluster",
        |page, _| replace_text(page, r#""name":"prefill""#, r#""name":"zz""#),
        "envoy.mirror_cluster",
        "add the cluster `prefill`",
    ),
    (
        "copies to any worker",
        |page, _| {
            replace_text(
                page,
                r#""key":"x-prefill-destination""#,
                r#""key":"x-other""#,
            )
        },
        "envoy.mirror_cluster",
        "`- metadata: {key: envoy.lb, path: [{key: x-prefill-destination}]}`",
    ),
    (
        "endpoints of an unpublished name",
        |page, _| {
            without(
                &mut cluster(page, "prefill")["eds_cluster_config"],
                "service_name",
            )
        },
        "envoy.endpoints_file",
        "in the `eds_cluster_config` of cluster `prefill` write `service_name: workers`",
    ),
    (
        "the same for a cluster that sorts last",
        |page, config| {
            replace_text(page, r#""name":"prefill""#, r#""name":"zz""#);
            config["models"][0]["prefill"]["cluster"] = json!("zz");
            remove(
                &mut cluster(page, "zz")["eds_cluster_config"],
                "service_name",
            );
        },
        "envoy.endpoints_file",
        "in the `eds_cluster_config` of cluster `zz` write `service_name: workers`",
    ),
    (
        "default circuit breakers",
        |page, _| without(cluster(page, "prefill"), "circuit_breakers"),
        "envoy.circuit_breakers",
        "in cluster `prefill` write `circuit_breakers",
    ),
    (
        "a fallback to another worker",
        |page, _| {
            let fallback = json!({"policies": [{"typed_extension_config": {"name": "x", "typed_config": {"@type": "x/LeastRequest"}}}]});
            let policy = &mut cluster(page, "prefill")["load_balancing_policy"]["policies"][0];
            policy["typed_extension_config"]["typed_config"]["fallback_policy"] = fallback;
        },
        "envoy.mirror_fallback",
        "`fallback_policy` of cluster `prefill`",
    ),
    (
        "a separate list of endpoints",
        |page, _| {
            let cluster = cluster(page, "prefill");
            remove(cluster, "eds_cluster_config");
            cluster["load_assignment"] = json!({"cluster_name": "prefill", "endpoints": []});
        },
        "envoy.endpoints",
        "let cluster `prefill` read the endpoints that warmroute writes",
    ),
];

#[test]
fn mirror_faults_are_found() {
    for (name, fault, check, text) in MIRROR_POLICY_FAULTS
        .into_iter()
        .chain(MIRROR_CLUSTER_FAULTS)
    {
        let level = if check == "envoy.mirror_fallback" {
            Warning
        } else {
            Error
        };
        expect_only("disaggregated-mirror", name, fault, (level, check), text);
    }
}

/// Moves the mirror policies to another level.
fn move_policies(page: &mut Value, level: fn(&mut Value) -> &mut Value) {
    let mut policies = Value::Null;
    for_each_mirror_action(page, |action| {
        policies = remove(action, "request_mirror_policies")
    });
    level(page)["request_mirror_policies"] = policies;
}

#[test]
fn mirror_policy_of_any_level_is_accepted() {
    let accepted: [(&str, Fault); 6] = [
        ("policy of the virtual host", |page, _| {
            move_policies(page, virtual_host)
        }),
        ("policy of the route configuration", |page, _| {
            move_policies(page, |page| {
                let listener = &mut items(page, "static_listeners")[0]["listener"];
                &mut listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]
            });
        }),
        ("policy of the cluster", |page, _| {
            move_policies(page, http_options)
        }),
        ("an explicit fraction of all requests", |page, _| {
            for_each_mirror_action(page, |action| {
                let all =
                    json!({"default_value": {"numerator": 10_000, "denominator": "TEN_THOUSAND"}});
                action["request_mirror_policies"][0]["runtime_fraction"] = all;
            });
        }),
        ("another header is removed", |page, _| {
            virtual_host(page)["request_headers_to_remove"] = json!(["x-secret"])
        }),
        ("a route to the workers of another model", |page, config| {
            let mut others = cluster(page, "workers").clone();
            others["name"] = json!("others");
            remove(&mut others, "eds_cluster_config");
            let at = json!({"socket_address": {"address": "127.0.0.1", "port_value": 9001}});
            others["load_assignment"] = json!({"cluster_name": "others", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at}}]}]});
            items(page, "static_clusters").push(json!({"cluster": others}));
            let mut route = virtual_host(page)["routes"][0].clone();
            route["match"] = json!({"prefix": "/other/"});
            route["route"]["cluster"] = json!("others");
            remove(&mut route["route"], "request_mirror_policies");
            virtual_host(page)["routes"]
                .as_array_mut()
                .unwrap()
                .insert(0, route);
            config["models"]
                .as_array_mut()
                .unwrap()
                .push(json!({"name": "other"}));
            let workers = config["workers"]["list"].as_array_mut().unwrap();
            workers
                .iter_mut()
                .for_each(|worker| worker["model"] = json!("m"));
            workers.push(json!({"id": 3, "model": "other", "endpoint": "127.0.0.1:9001"}));
        }),
    ];
    for (name, fault) in accepted {
        assert_eq!(
            inject_fault("disaggregated-mirror", fault),
            (Vec::new(), String::new()),
            "{name}"
        );
    }
}

#[test]
fn retry_filter_is_required_for_late_retries() {
    let no_late_retries: Fault = |page, _| {
        remove(http_options(page), "http_filters");
        let safe = "connect-failure,refused-stream,reset-before-request";
        replace_text(page, &format!("{safe},reset,retriable-status-codes"), safe);
    };
    let every_attempt: Fault = |page, _| {
        let inner = retry_matcher(page)["extension_config"]["typed_config"].take();
        http_options(page)["http_filters"][0]["typed_config"] = inner;
        remove(virtual_host(page), "include_request_attempt_count");
    };
    for name in ["disaggregated-call", "disaggregated-mirror"] {
        for (fault_name, fault) in [
            ("no late retries", no_late_retries),
            ("every attempt", every_attempt),
        ] {
            assert_eq!(
                inject_fault(name, fault),
                (Vec::new(), String::new()),
                "{name}: {fault_name}"
            );
        }
    }
}

/// Faults of the retry filter: name, fault and text of the fix.
const RETRY_FILTER_FAULTS: [(&str, Fault, &str); 9] = [
    (
        "no filter",
        |page, _| without(http_options(page), "http_filters"),
        "in cluster `workers` write the `http_filters`",
    ),
    (
        "no initial metadata",
        |page, _| without(&mut inner_filter(page)["grpc_service"], "initial_metadata"),
        "write the `http_filters`",
    ),
    (
        "another server",
        |page, _| {
            inner_filter(page)["grpc_service"]["envoy_grpc"]["cluster_name"] = json!("workers")
        },
        "write the `grpc_service` of the main filter",
    ),
    (
        "no body",
        |page, _| inner_filter(page)["processing_mode"]["request_body_mode"] = json!("NONE"),
        "`request_body_mode: BUFFERED`",
    ),
    (
        "no address",
        |page, _| without(inner_filter(page), "request_attributes"),
        "`request_attributes: [upstream.address]`",
    ),
    (
        "no exchange id",
        |page, _| without(inner_filter(page), "metadata_options"),
        "`metadata_options: {forwarding_namespaces: {untyped: [warmroute]}}`",
    ),
    (
        "no upstream codec",
        |page, _| {
            drop(
                http_options(page)["http_filters"]
                    .as_array_mut()
                    .unwrap()
                    .pop(),
            )
        },
        "move `envoy.filters.http.upstream_codec` to the end",
    ),
    (
        "no attempt count",
        |page, _| without(virtual_host(page), "include_request_attempt_count"),
        "`include_request_attempt_count: true`",
    ),
    (
        "another header",
        |page, _| replace_text(page, "x-envoy-attempt-count", "x-attempt"),
        "write its `xds_matcher`",
    ),
];

#[test]
fn retry_filter_faults_are_found() {
    for name in ["disaggregated-call", "disaggregated-mirror"] {
        for (fault_name, fault, text) in &RETRY_FILTER_FAULTS {
            expect_only(name, fault_name, *fault, RETRY_FILTER, text);
        }
    }
}

#[test]
fn retry_filter_faults_of_called_prefills_are_found() {
    let faults: [(&str, Fault, &str); 3] = [
        (
            "retries pass without warmroute",
            |page, _| inner_filter(page)["failure_mode_allow"] = json!(true),
            "`failure_mode_allow: false`",
        ),
        (
            "a timeout below that of a prefill",
            |page, _| inner_filter(page)["max_message_timeout"] = json!("40s"),
            "`max_message_timeout: 41s`",
        ),
        (
            "a longer prefill timeout",
            |_, config| config["models"][0]["prefill"]["timeout"] = json!("31s"),
            "`max_message_timeout: 63s`",
        ),
    ];
    for (fault_name, fault, text) in faults {
        expect_only("disaggregated-call", fault_name, fault, RETRY_FILTER, text);
    }
}
