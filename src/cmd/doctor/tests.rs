//! Tests of the checks of Envoy's configuration against that of warmroute. They use the shipped
//! files and configurations that control planes generate, unchanged and with one injected fault
//! each.

mod faults;
mod gateways;
mod prefill;
mod shipped;

use std::path::Path;

use serde_json::{Value, json};
use warmroute_doctor::envoy::check_envoy;
use warmroute_doctor::envoy::counters::{CounterSamples, EnvoyCounters, check_counters};
use warmroute_doctor::envoy::dump::ConfigDump;
use warmroute_doctor::envoy::expected::ExpectedEnvoy;
use warmroute_doctor::finding::{Finding, FindingLevel};

use super::inputs::expected_envoy;
use warmroute_server::config::{Config, WorkerSource};

const HTTP_PROTOCOL_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// Returns the recorded configuration dump of a shipped file.
fn page(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/doctor")
        .join(format!("{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Returns the warmroute configuration that the header of a shipped file describes.
fn config(name: &str) -> Value {
    let workers = |ports: &[u16]| -> Value {
        ports
            .iter()
            .zip(1..)
            .map(|(port, id)| json!({"id": id, "endpoint": format!("127.0.0.1:{port}")}))
            .collect()
    };
    let mut config = json!({
        "listeners": {"ext_proc": {"unix_socket": "/tmp/warmroute/ext_proc.sock"}},
        "models": [{"name": "m"}],
        "workers": {
            "list": workers(if name == "route-per-header" { &[8001, 8002, 8003] } else { &[8001] }),
        },
    });
    if let Some(mode) = name.strip_prefix("disaggregated-") {
        config["models"][0]["prefill"] = json!({"mode": mode});
        config["workers"]["list"] = json!([
            {"id": 1, "endpoint": "127.0.0.1:8001", "role": "prefill"},
            {"id": 2, "endpoint": "127.0.0.1:8002", "role": "decode"},
        ]);
    }
    if !matches!(name, "original-dst" | "route-per-header") {
        config["envoy"] = json!({"endpoints_file": "/tmp/warmroute/eds_workers.yaml"});
    }
    if matches!(name, "subset" | "gateway-api" | "original-dst") {
        config["gateway"]["failure"] = json!({"mode": "fail_closed"});
    }
    config
}

fn expected(config: &Value) -> ExpectedEnvoy {
    let config =
        Config::parse(Path::new("/warmroute.yaml"), config.to_string().as_bytes()).unwrap();
    let WorkerSource::Fixed(workers) = config.worker_source() else {
        panic!("the workers are not a fixed list")
    };
    expected_envoy(&config, &workers)
}

fn findings(page: &Value, config: &Value) -> Vec<Finding> {
    check_envoy(
        &ConfigDump::parse(&page.to_string()).unwrap(),
        &expected(config),
    )
}

fn print(findings: &[Finding]) -> String {
    findings
        .iter()
        .map(|finding| {
            format!(
                "{:?} {} {}: {}\n",
                finding.level, finding.check, finding.subject, finding.message
            )
        })
        .collect()
}

/// Changes a configuration dump and the configuration of warmroute.
type Fault = fn(&mut Value, &mut Value);

/// Expects one finding of a check, and these texts in its message or its fix.
fn expect_finding(found: &[Finding], level: FindingLevel, check: &str, texts: &[&str]) {
    let matching = found.iter().filter(|finding| finding.check == check);
    let [finding] = matching.collect::<Vec<_>>()[..] else {
        panic!("not one {check}:\n{}", print(found));
    };
    assert_eq!(finding.level, level, "{finding:?}");
    let fix = finding.fix.as_deref().unwrap_or_default();
    for text in texts {
        let is_found = finding.message.contains(text) || fix.contains(text);
        assert!(is_found, "no {text}: {finding:?}");
    }
}

/// Expects no finding of a check.
fn expect_none(found: &[Finding], check: &str) {
    let mut found = found.iter();
    assert_eq!(found.find(|finding| finding.check == check), None);
}

/// Returns level and check of the problems.
fn problems(found: &[Finding]) -> Vec<(FindingLevel, &'static str)> {
    let problems = found
        .iter()
        .filter(|finding| finding.level < FindingLevel::Skipped);
    problems
        .map(|finding| (finding.level, finding.check))
        .collect()
}

/// Replaces a text in the dump of `standalone` and returns the resulting problems.
fn problems_after(from: &str, to: &str) -> Vec<(FindingLevel, &'static str)> {
    let mut page = page("standalone");
    replace_text(&mut page, from, to);
    problems(&findings(&page, &config("standalone")))
}

/// Replaces a text everywhere in a dump.
fn replace_text(page: &mut Value, from: &str, to: &str) {
    let text = page.to_string();
    assert!(text.contains(from), "{from}");
    *page = serde_json::from_str(&text.replace(from, to)).unwrap();
}

/// Returns a list of a dump, for example `static_clusters`.
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
        .map(|item| &mut item["cluster"]);
    clusters
        .into_iter()
        .find(|cluster| cluster["name"] == name)
        .unwrap()
}

/// Returns the virtual host.
fn virtual_host(page: &mut Value) -> &mut Value {
    let listener = &mut items(page, "static_listeners")[0]["listener"];
    &mut listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        [0]
}

/// Returns the HTTP options of cluster `workers`.
fn http_options(page: &mut Value) -> &mut Value {
    &mut cluster(page, "workers")["typed_extension_protocol_options"][HTTP_PROTOCOL_OPTIONS]
}

/// Removes a key of an object and returns its value.
fn remove(object: &mut Value, key: &str) -> Value {
    object
        .as_object_mut()
        .unwrap()
        .remove(key)
        .expect("the key exists")
}

/// Removes a key of an object.
fn without(object: &mut Value, key: &str) {
    drop(remove(object, key));
}

/// Injects a fault. Returns the resulting problems and the text of their fixes.
fn inject_fault(
    name: &str,
    change: impl FnOnce(&mut Value, &mut Value),
) -> (Vec<(FindingLevel, &'static str)>, String) {
    let mut page = page(name);
    let mut config = config(name);
    change(&mut page, &mut config);
    let found = findings(&page, &config);
    let fixes: Vec<&str> = found
        .iter()
        .filter_map(|finding| finding.fix.as_deref())
        .collect();
    (problems(&found), fixes.join("\n"))
}
