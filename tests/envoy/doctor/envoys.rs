//! Findings for recorded configuration dumps of the shipped files, each with one fault.

mod clusters;
mod filters;
mod routes;

use std::path::Path;

use serde_json::{Value, json};
use warmroute::cmd::doctor::expected_envoy;
use warmroute_doctor::envoy::check_envoy;
use warmroute_doctor::envoy::dump::ConfigDump;
use warmroute_doctor::finding::{Finding, FindingLevel};
use warmroute_server::config::{Config, WorkerSource};

/// Configuration dump of Envoy, and the configuration of warmroute.
struct ConfigPair {
    envoy: Value,
    warmroute: Value,
}

impl ConfigPair {
    /// Returns the recorded dump of a shipped Envoy file, and the warmroute configuration that its
    /// header comment describes.
    fn shipped(name: &str) -> Self {
        let file = format!("tests/data/doctor/{name}.json");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let workers: Value = [8001, 8002, 8003]
            .into_iter()
            .take(if name == "route-per-header" { 3 } else { 1 })
            .map(|port| json!({"id": port, "endpoint": format!("127.0.0.1:{port}")}))
            .collect();
        let mut warmroute = json!({
            "listeners": {"ext_proc": {"unix_socket": "/tmp/warmroute/ext_proc.sock"}},
            "models": [{"name": "m"}],
            "workers": {"list": workers},
        });
        if !matches!(name, "original-dst" | "route-per-header") {
            warmroute["envoy"] = json!({"endpoints_file": "/tmp/warmroute/eds_workers.yaml"});
        }
        if matches!(name, "subset" | "gateway-api" | "original-dst") {
            warmroute["gateway"]["failure"] = json!({"mode": "fail_closed"});
        }
        Self {
            envoy: serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap(),
            warmroute,
        }
    }

    fn examine(&self) -> Vec<Finding> {
        let text = self.warmroute.to_string();
        let config = Config::parse(Path::new("/warmroute.yaml"), text.as_bytes()).unwrap();
        let WorkerSource::Fixed(workers) = config.worker_source() else {
            panic!("another source")
        };
        check_envoy(
            &ConfigDump::parse(&self.envoy.to_string()).unwrap(),
            &expected_envoy(&config, &workers),
        )
    }

    /// Returns a list of the dump.
    fn items(&mut self, list: &str) -> &mut Vec<Value> {
        let configs = self.envoy["configs"].as_array_mut().unwrap();
        let mut lists = configs.iter_mut().filter_map(|part| part.get_mut(list));
        lists.next().unwrap().as_array_mut().unwrap()
    }

    fn listener(&mut self) -> &mut Value {
        &mut self.items("static_listeners")[0]["listener"]
    }

    fn manager(&mut self) -> &mut Value {
        &mut self.listener()["filter_chains"][0]["filters"][0]["typed_config"]
    }

    fn filters(&mut self) -> &mut Vec<Value> {
        self.manager()["http_filters"].as_array_mut().unwrap()
    }

    fn filter(&mut self, name: &str) -> &mut Value {
        let found = self
            .filters()
            .iter_mut()
            .find(|filter| filter["name"] == name);
        &mut found.unwrap()["typed_config"]
    }

    fn main(&mut self) -> &mut Value {
        self.filter("envoy.filters.http.ext_proc")
    }

    fn modes(&mut self) -> &mut Value {
        &mut self.main()["processing_mode"]
    }

    fn probe(&mut self) -> &mut Value {
        self.filter("first_token_probe")
    }

    fn host(&mut self) -> &mut Value {
        &mut self.manager()["route_config"]["virtual_hosts"][0]
    }

    fn action(&mut self) -> &mut Value {
        &mut self.host()["routes"][0]["route"]
    }

    fn cluster(&mut self, name: &str) -> &mut Value {
        let clusters = self.items("static_clusters").iter_mut();
        let mut named = clusters.map(|item| &mut item["cluster"]);
        named.find(|cluster| cluster["name"] == name).unwrap()
    }

    fn policy(&mut self) -> &mut Value {
        &mut self.cluster("workers")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
            ["typed_config"]
    }

    fn without(object: &mut Value, key: &str) {
        object
            .as_object_mut()
            .unwrap()
            .remove(key)
            .expect("the key exists");
    }
}

/// A fault in one of the configurations, with the expected findings and a part of a fix.
#[derive(Clone, Copy)]
struct EnvoyFault {
    name: &'static str,
    file: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
}

use FindingLevel::{Error, Warning};

const fn standalone(
    name: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
) -> EnvoyFault {
    EnvoyFault {
        name,
        file: "standalone",
        plant,
        expected,
        words,
    }
}

const fn in_file(file: &'static str, fault: EnvoyFault) -> EnvoyFault {
    EnvoyFault { file, ..fault }
}

fn wrong(findings: &[Finding]) -> Vec<(FindingLevel, &str)> {
    let bad = findings
        .iter()
        .filter(|one| matches!(one.level, FindingLevel::Error | FindingLevel::Warning));
    let mut wrong: Vec<_> = bad.map(|one| (one.level, one.check)).collect();
    wrong.sort_unstable();
    wrong
}

fn assert_faults_found(faults: &[EnvoyFault]) {
    for fault in faults {
        let mut configs = ConfigPair::shipped(fault.file);
        (fault.plant)(&mut configs);
        let found = configs.examine();
        let mut expected = fault.expected.to_vec();
        expected.sort_unstable();
        assert_eq!(wrong(&found), expected, "{}: {found:#?}", fault.name);
        let fixes: Vec<_> = found.iter().filter_map(|one| one.fix.as_deref()).collect();
        assert!(
            fixes.iter().any(|fix| fix.contains(fault.words)),
            "{}: {fixes:#?}",
            fault.name
        );
    }
}

#[test]
fn filter_faults_are_found_with_fixes() {
    assert_faults_found(filters::FILTER_FAULTS);
}

#[test]
fn probe_faults_are_found_with_fixes() {
    assert_faults_found(filters::PROBE_FAULTS);
}

#[test]
fn cluster_faults_are_found_with_fixes() {
    assert_faults_found(clusters::CLUSTER_FAULTS);
}

#[test]
fn route_faults_are_found_with_fixes() {
    assert_faults_found(routes::ROUTE_FAULTS);
}
