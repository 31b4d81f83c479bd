//! Checks of mirrored requests and of retries, with one fault each.

use serde_json::{Value, json};
use warmroute_doctor::finding::FindingLevel;

use super::{Plant, cluster, host, items, options, planted, remove, swap};

/// Every action with mirror policies.
fn copying(page: &mut Value, mut change: impl FnMut(&mut Value)) {
    for route in host(page)["routes"].as_array_mut().unwrap() {
        if route["route"]["request_mirror_policies"].is_array() {
            change(&mut route["route"]);
        }
    }
}

/// The upstream filter for retries.
fn retry_filter(page: &mut Value) -> &mut Value {
    &mut options(page)["http_filters"][0]["typed_config"]
}

fn inner(page: &mut Value) -> &mut Value {
    &mut retry_filter(page)["extension_config"]["typed_config"]
}

type MirrorFault = (&'static str, Plant, &'static str, &'static str);

/// Faults of the mirror policy: name, change, check and words of the fix.
const MIRROR_POLICY_FAULTS: [MirrorFault; 5] = [
    (
        "none",
        |page, _| {
            copying(page, |action| {
                drop(remove(action, "request_mirror_policies"))
            })
        },
        "envoy.mirror",
        "cluster_header",
    ),
    (
        "of everything",
        |page, _| {
            copying(page, |action| {
                action["request_mirror_policies"] = json!([{"cluster": "prefill"}])
            })
        },
        "envoy.mirror",
        "and no other policy",
    ),
    (
        "of everything, by a cluster",
        |page, _| options(page)["request_mirror_policies"] = json!([{"cluster": "prefill"}]),
        "envoy.mirror",
        "and no other policy",
    ),
    (
        "of every tenth",
        |page, _| {
            copying(page, |action| {
                action["request_mirror_policies"][0]["runtime_fraction"] =
                    json!({"default_value": {"numerator": 10}});
            });
        },
        "envoy.mirror",
        "remove `runtime_fraction`",
    ),
    (
        "the header is gone before",
        |page, _| host(page)["request_headers_to_remove"] = json!(["x-prefill-cluster"]),
        "envoy.mirror",
        "remove `x-prefill-cluster`",
    ),
];

/// Faults of the cluster that receives the copies.
const MIRROR_CLUSTER_FAULTS: [MirrorFault; 7] = [
    (
        "no such cluster",
        |page, _| swap(page, r#""name":"prefill""#, r#""name":"zz""#),
        "envoy.mirror_cluster",
        "add the cluster `prefill`",
    ),
    (
        "to any worker",
        |page, _| {
            swap(
                page,
                r#""key":"x-prefill-destination""#,
                r#""key":"elsewhere""#,
            )
        },
        "envoy.mirror_cluster",
        "`- metadata: {key: envoy.lb, path: [{key: x-prefill-destination}]}`",
    ),
    (
        "endpoints of an unpublished name",
        |page, _| {
            drop(remove(
                &mut cluster(page, "prefill")["eds_cluster_config"],
                "service_name",
            ))
        },
        "envoy.endpoints_file",
        "in the `eds_cluster_config` of cluster `prefill` write `service_name: workers`",
    ),
    (
        "the same of a cluster behind the others in the alphabet",
        |page, config| {
            swap(page, r#""name":"prefill""#, r#""name":"zz""#);
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
        "Envoy's own limits",
        |page, _| drop(remove(cluster(page, "prefill"), "circuit_breakers")),
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
        "endpoints of its own",
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
    for (name, plant, check, words) in MIRROR_POLICY_FAULTS
        .into_iter()
        .chain(MIRROR_CLUSTER_FAULTS)
    {
        let (found, fixes) = planted("disaggregated-mirror", plant);
        let level = if check == "envoy.mirror_fallback" {
            FindingLevel::Warning
        } else {
            FindingLevel::Error
        };
        assert_eq!(found, [(level, check)], "{name}");
        assert!(fixes.contains(words), "{name}: {fixes}");
    }
}

/// Moves the mirror policies to another level.
fn policies_at(page: &mut Value, put: fn(&mut Value) -> &mut Value) {
    let mut policies = Value::Null;
    copying(page, |action| {
        policies = remove(action, "request_mirror_policies")
    });
    put(page)["request_mirror_policies"] = policies;
}

#[test]
fn mirror_policy_of_any_level_is_accepted() {
    let well: [(&str, Plant); 6] = [
        ("by the virtual host", |page, _| policies_at(page, host)),
        ("by the route configuration", |page, _| {
            policies_at(page, |page| {
                let listener = &mut items(page, "static_listeners")[0]["listener"];
                &mut listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]
            });
        }),
        ("by the cluster", |page, _| policies_at(page, options)),
        ("all of them, in words", |page, _| {
            copying(page, |action| {
                let all =
                    json!({"default_value": {"numerator": 10_000, "denominator": "TEN_THOUSAND"}});
                action["request_mirror_policies"][0]["runtime_fraction"] = all;
            });
        }),
        ("another header is gone", |page, _| {
            host(page)["request_headers_to_remove"] = json!(["x-secret"])
        }),
        ("a route to workers of another model", |page, config| {
            let mut others = cluster(page, "workers").clone();
            others["name"] = json!("others");
            remove(&mut others, "eds_cluster_config");
            let at = json!({"socket_address": {"address": "127.0.0.1", "port_value": 9001}});
            others["load_assignment"] = json!({"cluster_name": "others", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at}}]}]});
            items(page, "static_clusters").push(json!({"cluster": others}));
            let mut route = host(page)["routes"][0].clone();
            route["match"] = json!({"prefix": "/other/"});
            route["route"]["cluster"] = json!("others");
            remove(&mut route["route"], "request_mirror_policies");
            host(page)["routes"]
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
    for (name, plant) in well {
        assert_eq!(
            planted("disaggregated-mirror", plant),
            (Vec::new(), String::new()),
            "{name}"
        );
    }
}

#[test]
fn retry_filter_is_required_for_late_retries() {
    let no_late: Plant = |page, _| {
        remove(options(page), "http_filters");
        let safe = "connect-failure,refused-stream,reset-before-request";
        swap(page, &format!("{safe},reset,retriable-status-codes"), safe);
    };
    let all_tries: Plant = |page, _| {
        let inner = retry_filter(page)["extension_config"]["typed_config"].take();
        options(page)["http_filters"][0]["typed_config"] = inner;
        remove(host(page), "include_request_attempt_count");
    };
    for name in ["disaggregated-call", "disaggregated-mirror"] {
        for (what, plant) in [("no late tries", no_late), ("all tries", all_tries)] {
            assert_eq!(
                planted(name, plant),
                (Vec::new(), String::new()),
                "{name}: {what}"
            );
        }
    }
}

/// Faults of the retry filter: name, change and words of the fix.
const RETRY_FILTER_FAULTS: [(&str, Plant, &str); 9] = [
    (
        "no filter",
        |page, _| drop(remove(options(page), "http_filters")),
        "in cluster `workers` write the `http_filters`",
    ),
    (
        "no word of itself",
        |page, _| drop(remove(&mut inner(page)["grpc_service"], "initial_metadata")),
        "write the `http_filters`",
    ),
    (
        "another server",
        |page, _| inner(page)["grpc_service"]["envoy_grpc"]["cluster_name"] = json!("workers"),
        "write the `grpc_service` of the main filter",
    ),
    (
        "no body",
        |page, _| inner(page)["processing_mode"]["request_body_mode"] = json!("NONE"),
        "`request_body_mode: BUFFERED`",
    ),
    (
        "no address",
        |page, _| drop(remove(inner(page), "request_attributes")),
        "`request_attributes: [upstream.address]`",
    ),
    (
        "no exchange",
        |page, _| drop(remove(inner(page), "metadata_options")),
        "`metadata_options: {forwarding_namespaces: {untyped: [warmroute]}}`",
    ),
    (
        "nothing behind it",
        |page, _| drop(options(page)["http_filters"].as_array_mut().unwrap().pop()),
        "move `envoy.filters.http.upstream_codec` to the end",
    ),
    (
        "attempts that are not counted",
        |page, _| drop(remove(host(page), "include_request_attempt_count")),
        "`include_request_attempt_count: true`",
    ),
    (
        "another header",
        |page, _| swap(page, "x-envoy-attempt-count", "x-attempt"),
        "write its `xds_matcher`",
    ),
];
#[test]
fn retry_filter_faults_are_found() {
    for name in ["disaggregated-call", "disaggregated-mirror"] {
        for (what, plant, words) in &RETRY_FILTER_FAULTS {
            let (found, fixes) = planted(name, plant);
            assert_eq!(
                found,
                [(FindingLevel::Error, "envoy.retry_filter")],
                "{name}: {what}"
            );
            assert!(fixes.contains(words), "{name}: {what}: {fixes}");
        }
    }
}

#[test]
fn retry_filter_faults_of_called_prefills_are_found() {
    let of_call: [(&str, Plant, &str); 3] = [
        (
            "the first hand-over again",
            |page, _| inner(page)["failure_mode_allow"] = json!(true),
            "`failure_mode_allow: false`",
        ),
        (
            "less time than a prefill takes",
            |page, _| inner(page)["max_message_timeout"] = json!("40s"),
            "`max_message_timeout: 41s`",
        ),
        (
            "longer prefills",
            |_, config| config["models"][0]["prefill"]["timeout"] = json!("31s"),
            "`max_message_timeout: 63s`",
        ),
    ];
    for (what, plant, words) in of_call {
        let (found, fixes) = planted("disaggregated-call", plant);
        assert_eq!(
            found,
            [(FindingLevel::Error, "envoy.retry_filter")],
            "{what}"
        );
        assert!(fixes.contains(words), "{what}: {fixes}");
    }
}
