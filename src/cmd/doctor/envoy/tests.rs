//! What the shipped configurations look like through a real Envoy's page, and what is found where one word is another.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::cmd::doctor::finding::Level;
use crate::config::Config;

fn page(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/doctor").join(format!("{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// What the heads of the shipped files say that our configuration needs.
fn config(name: &str) -> Value {
    let workers = |ports: &[u16]| -> Value {
        ports.iter().zip(1..).map(|(port, id)| json!({"id": id, "endpoint": format!("127.0.0.1:{port}")})).collect()
    };
    let mut config = json!({
        "listen": {"unix": "/tmp/warmroute/ext_proc.sock"},
        "models": [{"name": "m"}],
        "workers": workers(if name == "route-per-header" { &[8001, 8002, 8003] } else { &[8001] }),
    });
    if matches!(name, "standalone" | "subset" | "gateway-api") {
        config["envoy"] = json!({"endpoints_file": "/tmp/warmroute/eds_workers.yaml"});
    }
    if matches!(name, "subset" | "gateway-api" | "original-dst") {
        config["failure"] = json!({"mode": "fail_closed"});
    }
    config
}

fn expected(config: &Value) -> Expected {
    let config = Config::parse(Path::new("/warmroute.yaml"), config.to_string().as_bytes()).unwrap();
    let crate::config::WorkerSource::Fixed(workers) = config.worker_source() else { panic!("another source") };
    Expected::new(&config, &workers)
}

fn findings(page: &Value, config: &Value) -> Vec<Finding> {
    examine(&Dump::read(&page.to_string()).unwrap(), &expected(config))
}

fn print(findings: &[Finding]) -> String {
    findings.iter().map(|one| format!("{:?} {} {}: {}\n", one.level, one.check, one.subject, one.seen)).collect()
}

#[test]
fn every_shipped_configuration_is_found_to_be_well() {
    for name in ["standalone", "subset", "gateway-api", "original-dst", "route-per-header"] {
        let found = findings(&page(name), &config(name));
        assert!(found.iter().all(|finding| finding.level == Level::Ok), "{name}:\n{}", print(&found));
        assert!(found.len() > 15, "{name}:\n{}", print(&found));
    }
}

/// The same configuration as a control plane brings it: everything dynamic, routes and a filter by discovery of their own.
fn by_control_plane(mut page: Value) -> Value {
    let configs = page["configs"].as_array_mut().unwrap();
    let section = |configs: &mut Vec<Value>, kind: &str| {
        configs.iter().position(|config| config["@type"].as_str().unwrap().ends_with(kind)).unwrap()
    };
    let at = section(configs, "ClustersConfigDump");
    let clusters = configs[at]["static_clusters"].take();
    configs[at] = json!({"@type": "x/envoy.admin.v3.ClustersConfigDump", "dynamic_active_clusters": clusters});
    let at = section(configs, "ListenersConfigDump");
    let mut listener = configs[at]["static_listeners"][0]["listener"].take();
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    let mut routes = manager.as_object_mut().unwrap().remove("route_config").unwrap();
    routes["name"] = json!("by-rds");
    manager["rds"] = json!({"route_config_name": "by-rds", "config_source": {"ads": {}}});
    let mut filter = manager["http_filters"][1].take();
    manager["http_filters"][1] = json!({"name": filter["name"], "config_discovery": {"config_source": {"ads": {}}}});
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
    configs[at] =
        json!({"@type": "x/envoy.admin.v3.RoutesConfigDump", "dynamic_route_configs": [{"route_config": routes}]});
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
    found.into_iter().filter(|one| one.level < Level::Skipped).map(|one| (one.level, one.check)).collect()
}

#[test]
fn a_filter_is_as_its_routes_have_it() {
    let route = r#""match":{"prefix":"/v1/"},"#;
    let said = |what: &str| format!(r#"{route}"typed_per_filter_config":{{"envoy.filters.http.ext_proc":{what}}},"#);
    let per_route = r#""@type":"t/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute""#;
    let none =
        said(&format!(r#"{{{per_route},"overrides":{{"processing_mode":{{"response_trailer_mode":"SEND"}}}}}}"#));
    assert_eq!(changed(route, &none), [(Level::Error, "envoy.request_body")]);
    let closed = said(&format!(r#"{{{per_route},"overrides":{{"failure_mode_allow":false}}}}"#));
    assert_eq!(changed(route, &closed), [(Level::Warning, "envoy.failure_mode")]);
    let off = said(r#"{"@type":"t/envoy.config.route.v3.FilterConfig","disabled":true}"#);
    assert_eq!(changed(route, &off), [(Level::Error, "envoy.filter")]);
    let wrapped = said(&format!(r#"{{"@type":"t/envoy.config.route.v3.FilterConfig","config":{{{per_route}}}}}"#));
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
        configs.retain(|config| !config["@type"].as_str().unwrap().ends_with("RoutesConfigDump"));
        let extensions = configs.iter_mut().find_map(|config| config.get_mut("ecds_filters")).unwrap();
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
    let trailers = elsewhere(|filter| filter["processing_mode"]["response_trailer_mode"] = json!("SKIP"));
    assert_eq!(trailers, [skipped, (Level::Error, "envoy.response_trailers")]);
    let namespaces = elsewhere(|filter| {
        filter["metadata_options"].as_object_mut().unwrap().remove("receiving_namespaces");
    });
    assert!(namespaces.contains(&(Level::Warning, "envoy.probe")), "{namespaces:?}");
}

#[test]
fn copies_are_made_where_prefills_are_mirrored_and_get_to_whom_they_are_meant_for() {
    let mut config = config("standalone");
    config["models"] = json!([{"name": "m", "prefill": {"by": "mirror"}}]);
    let found = |change: fn(&mut Value)| {
        let mut page = page("standalone");
        let configs = page["configs"].as_array_mut().unwrap();
        let clusters = configs.iter_mut().find_map(|config| config.get_mut("static_clusters")).unwrap();
        let clusters = clusters.as_array_mut().unwrap();
        let mut copies = clusters.iter().find(|one| one["cluster"]["name"] == "workers").unwrap().clone();
        copies["cluster"]["name"] = json!("prefill");
        copies["cluster"]["eds_cluster_config"]["service_name"] = json!("workers");
        let text = copies.to_string().replace("\"x-gateway-destination-endpoint\"", "\"x-prefill-destination\"");
        clusters.push(serde_json::from_str(&text).unwrap());
        let route = r#""match":{"prefix":"/v1/"},"route":{"#;
        let text = page.to_string();
        assert!(text.contains(route));
        let policy = r#""request_mirror_policies":[{"cluster_header":"x-prefill-cluster"}],"#;
        let mut page: Value = serde_json::from_str(&text.replace(route, &format!("{route}{policy}"))).unwrap();
        change(&mut page);
        let found = findings(&page, &config);
        found.into_iter().filter(|one| one.level < Level::Skipped).map(|one| (one.level, one.check)).collect::<Vec<_>>()
    };
    fn swap(page: &mut Value, from: &str, to: &str) {
        let text = page.to_string();
        assert!(text.contains(from), "{from}");
        *page = serde_json::from_str(&text.replace(from, to)).unwrap();
    }
    let error = |check| vec![(Level::Error, check)];
    assert_eq!(found(|_| {}), []);
    assert_eq!(found(|page| swap(page, r#"{"cluster_header":"x-prefill-cluster"}"#, "")), error("envoy.mirror"));
    let always = found(|page| swap(page, r#"{"cluster_header":"x-prefill-cluster"}"#, r#"{"cluster":"prefill"}"#));
    assert_eq!(always, error("envoy.mirror"));
    assert_eq!(found(|page| swap(page, r#""name":"prefill""#, r#""name":"others""#)), error("envoy.mirror_cluster"));
    let anywhere = found(|page| swap(page, r#""key":"x-prefill-destination""#, r#""key":"elsewhere""#));
    assert_eq!(anywhere, error("envoy.mirror_cluster"));
}

#[test]
fn the_way_to_us_may_be_an_address_in_the_filter() {
    let cluster = r#""grpc_service":{"envoy_grpc":{"cluster_name":"ext_proc"}"#;
    let by = |target: &str| format!(r#""grpc_service":{{"google_grpc":{{"target_uri":"{target}","stat_prefix":"x"}}"#);
    assert_eq!(changed(cluster, &by("unix:/tmp/warmroute/ext_proc.sock")), []);
    assert_eq!(changed(cluster, &by("unix:///tmp/warmroute/ext_proc.sock")), []);
    assert_eq!(changed(cluster, &by("dns:///warmroute:9002")), [(Level::Error, "envoy.address")]);
    let gone = r#""grpc_service":{"envoy_grpc":{"cluster_name":"gone"}"#;
    assert_eq!(changed(cluster, gone), [(Level::Error, "envoy.ext_proc_cluster")]);
}

#[test]
fn an_address_is_ours_by_its_port_where_it_is_a_name_or_we_listen_everywhere() {
    let listens = |tcp: &str| {
        let mut config = config("standalone");
        config["listen"] = json!({"tcp": tcp});
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
        (&everywhere, dump::Address::Pipe("/tmp/warmroute/ext_proc.sock".to_owned()), false),
    ] {
        assert_eq!(expected.is_ours(&address), ours, "{address}");
    }
}

#[test]
fn headers_that_trusted_clients_may_pin_by_need_not_be_removed() {
    let text = page("standalone").to_string().replace(r#"{"remove":"x-worker-instance-id"},"#, "");
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
    let empty = examine(&Dump::read(r#"{"configs":[]}"#).unwrap(), &expected(&config("standalone")));
    assert_eq!(empty.iter().map(|one| (one.level, one.check)).collect::<Vec<_>>(), [(Level::Error, "envoy.filter")]);
}
