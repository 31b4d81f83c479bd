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
