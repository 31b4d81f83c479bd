//! What the shipped configurations look like through a real Envoy's page, and what is found where one word is another.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::cmd::doctor::finding::Level;
use crate::config::Config;

fn page(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/doctor")
        .join(format!("{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// What the heads of the shipped files say that our configuration needs.
fn config(name: &str) -> Value {
    let workers = |ports: &[u16]| -> Value {
        ports
            .iter()
            .zip(1..)
            .map(|(port, id)| json!({"id": id, "endpoint": format!("127.0.0.1:{port}")}))
            .collect()
    };
    let mut config = json!({
        "listen": {"unix": "/tmp/warmroute/ext_proc.sock"},
        "models": [{"name": "m"}],
        "workers": workers(if name == "route-per-header" { &[8001, 8002, 8003] } else { &[8001] }),
    });
    if let Some(by) = name.strip_prefix("disaggregated-") {
        config["models"][0]["prefill"] = json!({"by": by});
        config["workers"] = json!([
            {"id": 1, "endpoint": "127.0.0.1:8001", "role": "prefill"},
            {"id": 2, "endpoint": "127.0.0.1:8002", "role": "decode"},
        ]);
    }
    if !matches!(name, "original-dst" | "route-per-header") {
        config["envoy"] = json!({"endpoints_file": "/tmp/warmroute/eds_workers.yaml"});
    }
    if matches!(name, "subset" | "gateway-api" | "original-dst") {
        config["failure"] = json!({"mode": "fail_closed"});
    }
    config
}

fn expected(config: &Value) -> Expected {
    let config =
        Config::parse(Path::new("/warmroute.yaml"), config.to_string().as_bytes()).unwrap();
    let crate::config::WorkerSource::Fixed(workers) = config.worker_source() else {
        panic!("another source")
    };
    Expected::new(&config, &workers)
}

fn findings(page: &Value, config: &Value) -> Vec<Finding> {
    examine(&Dump::read(&page.to_string()).unwrap(), &expected(config))
}

fn print(findings: &[Finding]) -> String {
    findings
        .iter()
        .map(|one| {
            format!(
                "{:?} {} {}: {}\n",
                one.level, one.check, one.subject, one.seen
            )
        })
        .collect()
}

#[test]
fn every_shipped_configuration_is_found_to_be_well() {
    let disaggregated = ["disaggregated-call", "disaggregated-mirror"];
    for name in [
        "standalone",
        "subset",
        "gateway-api",
        "original-dst",
        "route-per-header",
    ]
    .into_iter()
    .chain(disaggregated)
    {
        let found = findings(&page(name), &config(name));
        assert!(
            found.iter().all(|finding| finding.level == Level::Ok),
            "{name}:\n{}",
            print(&found)
        );
        assert!(found.len() > 15, "{name}:\n{}", print(&found));
    }
}

/// The same configuration as a control plane brings it: everything dynamic, routes and a filter by discovery of their own.
fn by_control_plane(mut page: Value) -> Value {
    let configs = page["configs"].as_array_mut().unwrap();
    let section = |configs: &mut Vec<Value>, kind: &str| {
        configs
            .iter()
            .position(|config| config["@type"].as_str().unwrap().ends_with(kind))
            .unwrap()
    };
    let at = section(configs, "ClustersConfigDump");
    let clusters = configs[at]["static_clusters"].take();
    configs[at] = json!({"@type": "x/envoy.admin.v3.ClustersConfigDump", "dynamic_active_clusters": clusters});
    let at = section(configs, "ListenersConfigDump");
    let mut listener = configs[at]["static_listeners"][0]["listener"].take();
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    let mut routes = manager
        .as_object_mut()
        .unwrap()
        .remove("route_config")
        .unwrap();
    routes["name"] = json!("by-rds");
    manager["rds"] = json!({"route_config_name": "by-rds", "config_source": {"ads": {}}});
    let mut filter = manager["http_filters"][1].take();
    manager["http_filters"][1] =
        json!({"name": filter["name"], "config_discovery": {"config_source": {"ads": {}}}});
    let filters = json!([{"ecds_filter": {
        "@type": "x/envoy.config.core.v3.TypedExtensionConfig",
        "name": filter["name"], "typed_config": filter["typed_config"].take(),
    }}]);
    configs[at] = json!({"@type": "x/envoy.admin.v3.ListenersConfigDump", "dynamic_listeners": [
        {"name": "ingress", "active_state": {"listener": listener}},
        {"name": "warming", "warming_state": {"listener": {"name": "warming"}}},
    ]});
    configs.push(json!({"@type": "x/envoy.admin.v3.EcdsConfigDump", "ecds_filters": filters}));
    let at = section(configs, "RoutesConfigDump");
    configs[at] = json!({"@type": "x/envoy.admin.v3.RoutesConfigDump", "dynamic_route_configs": [{"route_config": routes}]});
    page
}

#[test]
fn what_a_control_plane_brings_is_read_as_what_stands_in_a_file() {
    let (page, config) = (page("standalone"), config("standalone"));
    let found = findings(&by_control_plane(page.clone()), &config);
    assert_eq!(print(&found), print(&findings(&page, &config)));
}

/// The words in which a page is changed, and then what is found in place of nothing.
fn changed(from: &str, to: &str) -> Vec<(Level, &'static str)> {
    let text = page("standalone").to_string();
    assert!(text.contains(from), "{from}");
    let page = serde_json::from_str(&text.replace(from, to)).unwrap();
    let found = findings(&page, &config("standalone"));
    found
        .into_iter()
        .filter(|one| one.level < Level::Skipped)
        .map(|one| (one.level, one.check))
        .collect()
}

#[test]
fn a_filter_is_as_its_routes_have_it() {
    let route = r#""match":{"prefix":"/v1/"},"#;
    let said = |what: &str| {
        format!(r#"{route}"typed_per_filter_config":{{"envoy.filters.http.ext_proc":{what}}},"#)
    };
    let per_route = r#""@type":"t/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute""#;
    let none = said(&format!(
        r#"{{{per_route},"overrides":{{"processing_mode":{{"response_trailer_mode":"SEND"}}}}}}"#
    ));
    assert_eq!(
        changed(route, &none),
        [(Level::Error, "envoy.request_body")]
    );
    let closed = said(&format!(
        r#"{{{per_route},"overrides":{{"failure_mode_allow":false}}}}"#
    ));
    assert_eq!(
        changed(route, &closed),
        [(Level::Warning, "envoy.failure_mode")]
    );
    let off = said(r#"{"@type":"t/envoy.config.route.v3.FilterConfig","disabled":true}"#);
    assert_eq!(changed(route, &off), [(Level::Error, "envoy.filter")]);
    let wrapped = said(&format!(
        r#"{{"@type":"t/envoy.config.route.v3.FilterConfig","config":{{{per_route}}}}}"#
    ));
    assert_eq!(changed(route, &wrapped), []);
    // Switched off in the list, and on again by that route.
    let name = r#""name":"envoy.filters.http.ext_proc","typed_config""#;
    let off_in_list = r#""name":"envoy.filters.http.ext_proc","disabled":true,"typed_config""#;
    assert_eq!(changed(name, off_in_list), [(Level::Error, "envoy.filter")]);
}

#[test]
fn where_no_route_is_on_the_page_the_filter_itself_is_looked_at() {
    // Routes of which the page knows the name alone, and a fault in the filter.
    let elsewhere = |fault: fn(&mut Value)| {
        let mut page = by_control_plane(page("standalone"));
        let configs = page["configs"].as_array_mut().unwrap();
        configs.retain(|config| {
            !config["@type"]
                .as_str()
                .unwrap()
                .ends_with("RoutesConfigDump")
        });
        let extensions = configs
            .iter_mut()
            .find_map(|config| config.get_mut("ecds_filters"))
            .unwrap();
        fault(&mut extensions[0]["ecds_filter"]["typed_config"]);
        let found = findings(&page, &config("standalone"));
        found
            .into_iter()
            .filter(|one| one.level <= Level::Skipped)
            .map(|one| (one.level, one.check))
            .collect::<Vec<_>>()
    };
    let skipped = (Level::Skipped, "envoy.filter");
    assert_eq!(elsewhere(|_| {}), [skipped]);
    let trailers =
        elsewhere(|filter| filter["processing_mode"]["response_trailer_mode"] = json!("SKIP"));
    assert_eq!(
        trailers,
        [skipped, (Level::Error, "envoy.response_trailers")]
    );
    let namespaces = elsewhere(|filter| {
        filter["metadata_options"]
            .as_object_mut()
            .unwrap()
            .remove("receiving_namespaces");
    });
    assert!(
        namespaces.contains(&(Level::Warning, "envoy.probe")),
        "{namespaces:?}"
    );
}

/// One word of a page in place of another, wherever it stands.
fn swap(page: &mut Value, from: &str, to: &str) {
    let text = page.to_string();
    assert!(text.contains(from), "{from}");
    *page = serde_json::from_str(&text.replace(from, to)).unwrap();
}

fn items<'p>(page: &'p mut Value, list: &str) -> &'p mut Vec<Value> {
    let configs = page["configs"].as_array_mut().unwrap();
    configs
        .iter_mut()
        .find_map(|config| config.get_mut(list))
        .unwrap()
        .as_array_mut()
        .unwrap()
}

fn cluster<'p>(page: &'p mut Value, name: &str) -> &'p mut Value {
    let clusters = items(page, "static_clusters")
        .iter_mut()
        .map(|one| &mut one["cluster"]);
    clusters
        .into_iter()
        .find(|cluster| cluster["name"] == name)
        .unwrap()
}

fn host(page: &mut Value) -> &mut Value {
    let listener = &mut items(page, "static_listeners")[0]["listener"];
    &mut listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        [0]
}

/// Every action that makes copies.
fn copying(page: &mut Value, mut change: impl FnMut(&mut Value)) {
    for route in host(page)["routes"].as_array_mut().unwrap() {
        if route["route"]["request_mirror_policies"].is_array() {
            change(&mut route["route"]);
        }
    }
}

fn options(page: &mut Value) -> &mut Value {
    &mut cluster(page, "workers")["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
}

/// The filter for further tries.
fn retry_filter(page: &mut Value) -> &mut Value {
    &mut options(page)["http_filters"][0]["typed_config"]
}

fn remove(place: &mut Value, key: &str) -> Value {
    place
        .as_object_mut()
        .unwrap()
        .remove(key)
        .expect("it is there")
}

/// What is found of a page in which something is another, with the mends.
fn planted(
    name: &str,
    change: impl FnOnce(&mut Value, &mut Value),
) -> (Vec<(Level, &'static str)>, String) {
    let (mut page, mut config) = (page(name), config(name));
    change(&mut page, &mut config);
    let found = findings(&page, &config);
    let wrong = || found.iter().filter(|one| one.level < Level::Skipped);
    let mends = wrong()
        .filter_map(|one| one.mend.as_deref())
        .collect::<Vec<_>>()
        .join("\n");
    (wrong().map(|one| (one.level, one.check)).collect(), mends)
}

#[test]
fn auto_sni_with_invalid_dns_name_is_an_error() {
    let as_istio = |page: &mut Value, is_automatic: bool| {
        swap(
            page,
            r#""cluster_name":"ext_proc""#,
            r#""cluster_name":"outbound|9002||picker.ns.svc""#,
        );
        swap(
            page,
            r#""name":"ext_proc""#,
            r#""name":"outbound|9002||picker.ns.svc""#,
        );
        let cluster = cluster(page, "outbound|9002||picker.ns.svc");
        cluster["transport_socket"] = json!({"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": "picker.ns.svc",
        }});
        let options = &mut cluster["typed_extension_protocol_options"];
        options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["upstream_http_protocol_options"] =
            json!({"auto_sni": is_automatic});
    };
    let (found, fixes) = planted("standalone", |page, _| as_istio(page, true));
    assert!(
        found.contains(&(Level::Error, "envoy.server_name")),
        "{found:?}"
    );
    assert!(
        fixes.contains("`trafficPolicy: {tls: {sni: picker.ns.svc}}`"),
        "{fixes}"
    );
    let (found, _) = planted("standalone", |page, _| as_istio(page, false));
    assert!(
        !found.iter().any(|(_, check)| *check == "envoy.server_name"),
        "{found:?}"
    );
}

#[test]
fn hidden_request_body_means_routing_by_load() {
    let mut hidden = page("standalone");
    swap(
        &mut hidden,
        r#""request_body_mode":"BUFFERED""#,
        r#""request_body_mode":"NONE""#,
    );
    let found = findings(&hidden, &config("standalone"));
    let body = found
        .iter()
        .find(|finding| finding.check == "envoy.request_body")
        .unwrap();
    assert_eq!(body.level, Level::Error);
    let seen = "request_body_mode: NONE: no prompt is shown to warmroute, so every request is routed by load alone";
    assert_eq!(body.seen, seen);
}

mod gateways;

type Plant = fn(&mut Value, &mut Value);

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn copies_are_made_where_prefills_are_mirrored_and_get_to_whom_they_are_meant_for() {
    let cases: [(&str, Plant, &str, &str); 12] = [
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
            "take `runtime_fraction` out",
        ),
        (
            "the header is gone before",
            |page, _| host(page)["request_headers_to_remove"] = json!(["x-prefill-cluster"]),
            "envoy.mirror",
            "take `x-prefill-cluster` out",
        ),
        (
            "no such cluster",
            |page, _| swap(page, r#""name":"prefill""#, r#""name":"zz""#),
            "envoy.mirror_cluster",
            "add the cluster `prefill`",
        ),
        (
            "to anybody",
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
            "endpoints of a name that nobody writes",
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
            "a room that nobody knows",
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
            "have cluster `prefill` read the endpoints that we write",
        ),
    ];
    for (name, plant, check, words) in cases {
        let (found, mends) = planted("disaggregated-mirror", plant);
        let level = if check == "envoy.mirror_fallback" {
            Level::Warning
        } else {
            Level::Error
        };
        assert_eq!(found, [(level, check)], "{name}");
        assert!(mends.contains(words), "{name}: {mends}");
    }
}

/// The policies of a page at another level.
fn policies_at(page: &mut Value, put: fn(&mut Value) -> &mut Value) {
    let mut policies = Value::Null;
    copying(page, |action| {
        policies = remove(action, "request_mirror_policies")
    });
    put(page)["request_mirror_policies"] = policies;
}

#[test]
fn copies_may_be_made_anywhere_and_need_not_be_made_where_nobody_is_to_meet() {
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
            let workers = config["workers"].as_array_mut().unwrap();
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
fn a_further_try_is_shown_to_us_wherever_it_may_have_reached_a_worker() {
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

fn inner(page: &mut Value) -> &mut Value {
    &mut retry_filter(page)["extension_config"]["typed_config"]
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn what_the_filter_for_further_tries_needs_is_found_missing() {
    let cases: [(&str, Plant, &str); 9] = [
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
            "it asks somebody else",
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
            "put `envoy.filters.http.upstream_codec` last",
        ),
        (
            "tries that nobody counts",
            |page, _| drop(remove(host(page), "include_request_attempt_count")),
            "`include_request_attempt_count: true`",
        ),
        (
            "another header",
            |page, _| swap(page, "x-envoy-attempt-count", "x-attempt"),
            "write its `xds_matcher`",
        ),
    ];
    for name in ["disaggregated-call", "disaggregated-mirror"] {
        for (what, plant, words) in &cases {
            let (found, mends) = planted(name, plant);
            assert_eq!(
                found,
                [(Level::Error, "envoy.retry_filter")],
                "{name}: {what}"
            );
            assert!(mends.contains(words), "{name}: {what}: {mends}");
        }
    }
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
            |_, config| config["models"][0]["prefill"]["deadline"] = json!("31s"),
            "`max_message_timeout: 63s`",
        ),
    ];
    for (what, plant, words) in of_call {
        let (found, mends) = planted("disaggregated-call", plant);
        assert_eq!(found, [(Level::Error, "envoy.retry_filter")], "{what}");
        assert!(mends.contains(words), "{what}: {mends}");
    }
}

#[test]
fn nobody_is_told_to_choose_among_workers_that_are_not_there() {
    let roles = |_: &mut Value, config: &mut Value| {
        config["models"][0] = json!({"name": "m"});
        for worker in config["workers"].as_array_mut().unwrap() {
            worker["role"] = json!("aggregated");
        }
    };
    let (found, mends) = planted("disaggregated-call", roles);
    assert!(
        found.contains(&(Level::Warning, "envoy.fallback")),
        "{found:?}"
    );
    assert!(
        mends.contains("in the `default_subset` of cluster `workers`"),
        "{mends}"
    );
}

#[test]
fn the_way_to_us_may_be_an_address_in_the_filter() {
    let cluster = r#""grpc_service":{"envoy_grpc":{"cluster_name":"ext_proc"}"#;
    let by = |target: &str| {
        format!(r#""grpc_service":{{"google_grpc":{{"target_uri":"{target}","stat_prefix":"x"}}"#)
    };
    assert_eq!(
        changed(cluster, &by("unix:/tmp/warmroute/ext_proc.sock")),
        []
    );
    assert_eq!(
        changed(cluster, &by("unix:///tmp/warmroute/ext_proc.sock")),
        []
    );
    assert_eq!(
        changed(cluster, &by("dns:///warmroute:9002")),
        [(Level::Error, "envoy.address")]
    );
    let gone = r#""grpc_service":{"envoy_grpc":{"cluster_name":"gone"}"#;
    assert_eq!(
        changed(cluster, gone),
        [(Level::Error, "envoy.ext_proc_cluster")]
    );
}

#[test]
fn an_address_is_ours_by_its_port_where_it_is_a_name_or_we_listen_everywhere() {
    let listens = |tcp: &str| {
        let mut config = config("standalone");
        config["listen"] = json!({"tcp": tcp, "unprotected": true});
        expected(&config)
    };
    let at = |host: &str, port: u16| dump::Address::Socket(host.to_owned(), port);
    let (local, everywhere) = (listens("127.0.0.1:9002"), listens("0.0.0.0:9002"));
    for (expected, address, ours) in [
        (&local, at("127.0.0.1", 9002), true),
        (&local, at("127.0.0.1", 9003), false),
        (&local, at("10.0.0.1", 9002), false),
        (&local, at("warmroute.svc", 9002), true),
        (&everywhere, at("10.0.0.1", 9002), true),
        (
            &everywhere,
            dump::Address::Pipe("/tmp/warmroute/ext_proc.sock".to_owned()),
            false,
        ),
    ] {
        assert_eq!(expected.is_ours(&address), ours, "{address}");
    }
}

#[test]
fn headers_that_trusted_clients_may_pin_by_need_not_be_removed() {
    let text = page("standalone")
        .to_string()
        .replace(r#"{"remove":"x-worker-instance-id"},"#, "");
    let page: Value = serde_json::from_str(&text).unwrap();
    let levels = |config: &Value| findings(&page, config).iter().map(|one| one.level).min();
    let mut trusting = config("standalone");
    assert_eq!(levels(&trusting), Some(Level::Warning));
    trusting["clients"] = json!({"trusted": true});
    assert_eq!(levels(&trusting), Some(Level::Ok));
}

#[test]
fn what_is_no_page_of_envoy_is_refused_with_the_reason() {
    for (text, reason) in [
        ("<html>", "it is no JSON"),
        ("{}", "it has no `configs`"),
        (
            r#"{"configs":[{"@type":"x/envoy.admin.v3.ClustersConfigDump","static_clusters":[{"cluster":7}]}]}"#,
            "a cluster",
        ),
    ] {
        let refused = Dump::read(text).unwrap_err();
        assert!(refused.contains(reason), "{text}: {refused}");
    }
    let empty = examine(
        &Dump::read(r#"{"configs":[]}"#).unwrap(),
        &expected(&config("standalone")),
    );
    assert_eq!(
        empty
            .iter()
            .map(|one| (one.level, one.check))
            .collect::<Vec<_>>(),
        [(Level::Error, "envoy.filter")]
    );
}
