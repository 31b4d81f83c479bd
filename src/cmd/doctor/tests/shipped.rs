//! Checks of the shipped Envoy files, unchanged and with one injected fault each.

use serde_json::{Value, json};
use warmroute_doctor::envoy::dump::EnvoyAddress;

use super::*;
use FindingLevel::{Error, Note, Skipped, Warning};

#[test]
fn shipped_configurations_have_no_problems() {
    for name in [
        "standalone",
        "subset",
        "gateway-api",
        "original-dst",
        "route-per-header",
        "disaggregated-call",
        "disaggregated-mirror",
    ] {
        let found = findings(&page(name), &config(name));
        assert!(
            found
                .iter()
                .all(|finding| finding.level == FindingLevel::Ok),
            "{name}:\n{}",
            print(&found)
        );
        assert!(found.len() > 15, "{name}:\n{}", print(&found));
    }
}

#[test]
fn shipped_files_close_idle_worker_connections() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(root.join("envoy")).unwrap();
    let files = files
        .map(|entry| entry.unwrap().path())
        .filter(|file| {
            let name = file.file_name().unwrap().to_str().unwrap();
            name.ends_with(".yaml") && !name.ends_with(".warmroute.yaml")
        })
        .chain(
            ["deploy/envoy/envoy.yaml", "deploy/chart/files/envoy.yaml"]
                .map(|file| root.join(file)),
        );
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let bootstrap: Value = serde_saphyr::from_str(&text).unwrap();
        let clusters = bootstrap["static_resources"]["clusters"]
            .as_array()
            .unwrap();
        // The clusters of warmroute speak HTTP/2, and `admin` is Envoy itself.
        let idle_timeouts: Vec<_> = clusters
            .iter()
            .filter(|cluster| cluster["name"] != "admin")
            .map(|cluster| &cluster["typed_extension_protocol_options"][HTTP_PROTOCOL_OPTIONS])
            .filter(|options| {
                !options["explicit_http_config"]["http2_protocol_options"].is_object()
            })
            .map(|options| options["common_http_protocol_options"]["idle_timeout"].as_str())
            .collect();
        let name = file.display();
        assert!(!idle_timeouts.is_empty(), "{name}");
        assert!(
            idle_timeouts.iter().all(|timeout| *timeout == Some("4s")),
            "{name}: {idle_timeouts:?}"
        );
    }
}

#[test]
fn worker_idle_timeout_must_be_below_keep_alive() {
    let idle_timeout = |timeout: Value| {
        let (found, fixes) = inject_fault("standalone", |page, _| {
            http_options(page)["common_http_protocol_options"]["idle_timeout"] = timeout;
        });
        if !found.is_empty() {
            assert_eq!(found, [(Warning, "envoy.worker_idle_timeout")]);
            assert!(
                fixes.contains("`common_http_protocol_options: {idle_timeout: 4s}`"),
                "{fixes}"
            );
        }
        found.is_empty()
    };
    assert!(idle_timeout(json!("4.900s")));
    for timeout in [json!("5s"), json!("0s"), json!("3600s"), Value::Null] {
        assert!(!idle_timeout(timeout.clone()), "{timeout}");
    }
    let (found, _) = inject_fault("standalone", |page, _| {
        *http_options(page) = json!({
            "@type": format!("type.googleapis.com/{HTTP_PROTOCOL_OPTIONS}"),
            "common_http_protocol_options": {"idle_timeout": "8s"},
            "explicit_http_config": {"http2_protocol_options": {}},
        });
    });
    assert_eq!(found, [(Warning, "envoy.worker_idle_timeout")]);
    // The field of older configurations.
    let (found, _) = inject_fault("standalone", |page, _| {
        let workers = cluster(page, "workers");
        remove(workers, "typed_extension_protocol_options");
        workers["common_http_protocol_options"] = json!({"idle_timeout": "4s"});
    });
    assert_eq!(found, []);
}

/// Converts a dump to the form that a control plane causes: all resources are dynamic, with RDS and
/// ECDS.
fn as_dynamic(mut page: Value) -> Value {
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
fn dynamic_resources_equal_static_ones() {
    let page = page("standalone");
    let config = config("standalone");
    let found = findings(&as_dynamic(page.clone()), &config);
    assert_eq!(print(&found), print(&findings(&page, &config)));
}

#[test]
fn route_overrides_apply_to_the_filter() {
    let route = r#""match":{"prefix":"/v1/"},"#;
    let with_override = |filter_config: &str| {
        format!(
            r#"{route}"typed_per_filter_config":{{"envoy.filters.http.ext_proc":{filter_config}}},"#
        )
    };
    let per_route = r#""@type":"t/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute""#;
    let none = with_override(&format!(
        r#"{{{per_route},"overrides":{{"processing_mode":{{"response_trailer_mode":"SEND"}}}}}}"#
    ));
    assert_eq!(
        problems_after(route, &none),
        [(Error, "envoy.request_body")]
    );
    let closed = with_override(&format!(
        r#"{{{per_route},"overrides":{{"failure_mode_allow":false}}}}"#
    ));
    assert_eq!(
        problems_after(route, &closed),
        [(Warning, "envoy.failure_mode")]
    );
    let disabled =
        with_override(r#"{"@type":"t/envoy.config.route.v3.FilterConfig","disabled":true}"#);
    assert_eq!(problems_after(route, &disabled), [(Error, "envoy.filter")]);
    let wrapped = with_override(&format!(
        r#"{{"@type":"t/envoy.config.route.v3.FilterConfig","config":{{{per_route}}}}}"#
    ));
    assert_eq!(problems_after(route, &wrapped), []);
    // A filter that is disabled in the filter list and that no route enables.
    let name = r#""name":"envoy.filters.http.ext_proc","typed_config""#;
    let disabled_in_list = r#""name":"envoy.filters.http.ext_proc","disabled":true,"typed_config""#;
    assert_eq!(
        problems_after(name, disabled_in_list),
        [(Error, "envoy.filter")]
    );
}

#[test]
fn filter_is_checked_without_routes_in_dump() {
    // Removes the routes from the dump and injects a fault into the filter.
    let problems_without_routes = |fault: fn(&mut Value)| {
        let mut page = as_dynamic(page("standalone"));
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
            .filter(|finding| finding.level <= Skipped)
            .map(|finding| (finding.level, finding.check))
            .collect::<Vec<_>>()
    };
    let skipped = (Skipped, "envoy.filter");
    assert_eq!(problems_without_routes(|_| {}), [skipped]);
    let trailers = problems_without_routes(|filter| {
        filter["processing_mode"]["response_trailer_mode"] = json!("SKIP")
    });
    assert_eq!(trailers, [skipped, (Error, "envoy.response_trailers")]);
    let namespaces = problems_without_routes(|filter| {
        filter["metadata_options"]
            .as_object_mut()
            .unwrap()
            .remove("receiving_namespaces");
    });
    assert!(
        namespaces.contains(&(Warning, "envoy.probe")),
        "{namespaces:?}"
    );
}

#[test]
fn auto_sni_with_invalid_dns_name_fails() {
    let use_istio_cluster = |page: &mut Value, is_automatic: bool| {
        replace_text(
            page,
            r#""cluster_name":"ext_proc""#,
            r#""cluster_name":"outbound|9002||picker.ns.svc""#,
        );
        replace_text(
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
        options[HTTP_PROTOCOL_OPTIONS]["upstream_http_protocol_options"] =
            json!({"auto_sni": is_automatic});
    };
    let (found, fixes) = inject_fault("standalone", |page, _| use_istio_cluster(page, true));
    assert!(found.contains(&(Error, "envoy.server_name")), "{found:?}");
    assert!(
        fixes.contains("`trafficPolicy: {tls: {sni: picker.ns.svc}}`"),
        "{fixes}"
    );
    let (found, _) = inject_fault("standalone", |page, _| use_istio_cluster(page, false));
    assert!(
        !found.iter().any(|(_, check)| *check == "envoy.server_name"),
        "{found:?}"
    );
}

#[test]
fn fallback_subset_without_workers_is_a_warning() {
    let roles = |_: &mut Value, config: &mut Value| {
        config["models"][0] = json!({"name": "m"});
        for worker in config["workers"]["list"].as_array_mut().unwrap() {
            worker["role"] = json!("aggregated");
        }
    };
    let (found, fixes) = inject_fault("disaggregated-call", roles);
    assert!(found.contains(&(Warning, "envoy.fallback")), "{found:?}");
    assert!(
        fixes.contains("in the `default_subset` of cluster `workers`"),
        "{fixes}"
    );
}

#[test]
fn google_grpc_address_is_checked() {
    let cluster = r#""grpc_service":{"envoy_grpc":{"cluster_name":"ext_proc"}"#;
    let google_grpc = |target: &str| {
        format!(r#""grpc_service":{{"google_grpc":{{"target_uri":"{target}","stat_prefix":"x"}}"#)
    };
    assert_eq!(
        problems_after(cluster, &google_grpc("unix:/tmp/warmroute/ext_proc.sock")),
        []
    );
    assert_eq!(
        problems_after(cluster, &google_grpc("unix:///tmp/warmroute/ext_proc.sock")),
        []
    );
    assert_eq!(
        problems_after(cluster, &google_grpc("dns:///warmroute:9002")),
        [(Error, "envoy.address")]
    );
    let missing = r#""grpc_service":{"envoy_grpc":{"cluster_name":"missing"}"#;
    assert_eq!(
        problems_after(cluster, missing),
        [(Error, "envoy.ext_proc_cluster")]
    );
}

#[test]
fn host_names_and_wildcards_match_by_port() {
    let listens = |tcp: &str| {
        let mut config = config("standalone");
        config["listeners"]["ext_proc"] = json!({"address": tcp, "unprotected": true});
        expected(&config)
    };
    let at = |host: &str, port: u16| EnvoyAddress::Socket(host.to_owned(), port);
    let local = listens("127.0.0.1:9002");
    let everywhere = listens("0.0.0.0:9002");
    for (expected, address, ours) in [
        (&local, at("127.0.0.1", 9002), true),
        (&local, at("127.0.0.1", 9003), false),
        (&local, at("10.0.0.1", 9002), false),
        (&local, at("warmroute.svc", 9002), true),
        (&everywhere, at("10.0.0.1", 9002), true),
        (
            &everywhere,
            EnvoyAddress::Pipe("/tmp/warmroute/ext_proc.sock".to_owned()),
            false,
        ),
    ] {
        assert_eq!(expected.is_ours(&address), ours, "{address}");
    }
}

#[test]
fn pin_headers_of_trusted_clients_may_stay() {
    let mut page = page("standalone");
    replace_text(&mut page, r#"{"remove":"x-worker-instance-id"},"#, "");
    let levels = |config: &Value| {
        let found = findings(&page, config);
        found.iter().map(|finding| finding.level).min()
    };
    let mut settings = config("standalone");
    assert_eq!(levels(&settings), Some(Warning));
    settings["requests"]["clients"] = json!({"trusted": true});
    assert_eq!(levels(&settings), Some(FindingLevel::Ok));
}

#[test]
fn invalid_config_dump_is_rejected_with_reason() {
    for (text, reason) in [
        ("<html>", "it is not JSON"),
        ("{}", "it has no `configs`"),
        (
            r#"{"configs":[{"@type":"x/envoy.admin.v3.ClustersConfigDump","static_clusters":[{"cluster":7}]}]}"#,
            "a cluster",
        ),
    ] {
        let refused = ConfigDump::parse(text).unwrap_err();
        assert!(refused.contains(reason), "{text}: {refused}");
    }
    let found = findings(&json!({"configs": []}), &config("standalone"));
    assert_eq!(problems(&found), [(Error, "envoy.filter")]);
}

/// Returns the findings about counters after the text of two pages.
fn counter_findings(page: &Value, first: &str, last: &str) -> Vec<(FindingLevel, String)> {
    let samples = CounterSamples {
        first: EnvoyCounters::parse(first),
        last: EnvoyCounters::parse(last),
    };
    let dump = ConfigDump::parse(&page.to_string()).unwrap();
    let found = check_counters(&dump, &expected(&config("standalone")), &samples);
    let text = |finding: Finding| {
        let subject = finding.subject;
        (
            finding.level,
            format!("{} {subject}: {}", finding.check, finding.message),
        )
    };
    found.into_iter().map(text).collect()
}

#[test]
fn growing_overflow_counters_are_errors() {
    let mut page = page("standalone");
    let idle = "cluster.workers.upstream_rq_active_overflow: 0\n\
                cluster.ext_proc.circuit_breakers.default.rq_open: 0\n\
                http.ingress.ext_proc.failure_mode_allowed: 0\n";
    let found = counter_findings(&page, idle, idle);
    assert!(
        matches!(found.as_slice(), [(FindingLevel::Ok, text)] if text.contains("envoy.bypass")),
        "{found:?}"
    );
    let full = "cluster.workers.upstream_rq_pending_overflow: 229\n\
                cluster.ext_proc.upstream_rq_active_overflow: 381\n\
                cluster.ext_proc.circuit_breakers.default.rq_open: 1\n\
                http.ingress.ext_proc.failure_mode_allowed: 381\n\
                http.ingress.downstream_rq_total: 705\n\
                server.uptime: 754\n";
    let found = counter_findings(&page, idle, full);
    let errors: Vec<_> = found
        .iter()
        .filter(|(level, _)| *level == Error)
        .map(|(_, text)| text.as_str())
        .collect();
    assert_eq!(
        errors,
        [
            "envoy.overflow cluster ext_proc: requests are refused now; since its start Envoy \
             refused 381 because of a circuit breaker; they were served without warmroute",
            "envoy.overflow cluster workers: requests are refused now; since its start Envoy \
             refused 229 because of a circuit breaker; they were answered with 503, or dropped if \
             they are mirrored",
            "envoy.bypass listener ingress: requests bypass warmroute now; since its start \
             12m 34s ago Envoy served 381 of 705 requests (54.0 %) after a failure of their \
             ext_proc stream",
        ]
    );
    let past = full.replace("rq_open: 1", "rq_open: 0");
    let found = counter_findings(&page, &past, &past);
    assert!(
        found.len() == 3 && found.iter().all(|(level, _)| *level == Note),
        "{found:?}"
    );
    replace_text(
        &mut page,
        r#""failure_mode_allow":true"#,
        r#""failure_mode_allow":false"#,
    );
    let found = counter_findings(&page, idle, full);
    assert!(found[0].1.ends_with("answered with 500"), "{found:?}");
}

#[test]
fn breaker_effect_follows_failure_mode() {
    let effect = |allow: &str| {
        let mut page = page("standalone");
        replace_text(&mut page, r#""failure_mode_allow":true"#, allow);
        without(cluster(&mut page, "ext_proc"), "circuit_breakers");
        let found = findings(&page, &config("standalone"));
        let is_breaker = |finding: &Finding| {
            finding.check == "envoy.circuit_breakers" && finding.subject == "cluster ext_proc"
        };
        found.into_iter().find(is_breaker).unwrap().message
    };
    let unrouted = effect(r#""failure_mode_allow":true"#);
    assert!(
        unrouted.ends_with("served without warmroute, so they are not routed"),
        "{unrouted}"
    );
    let rejected = effect(r#""failure_mode_allow":false"#);
    assert!(rejected.ends_with("get 500"), "{rejected}");
}
