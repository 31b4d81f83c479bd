//! The workers file is edited while requests run.

use std::collections::BTreeSet;
use std::fs;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::deployment::{Deployment, PATIENCE, essay, fast, programs};
use crate::support::ports::until;
use crate::support::stack::Engine;

/// Engines that serve a number of requests that have nothing in common.
async fn served(deployment: &Deployment, requests: usize, topic: &mut usize) -> BTreeSet<String> {
    let mut engines = BTreeSet::new();
    for _ in 0..requests {
        *topic += 1;
        let answered = deployment.complete(&essay(*topic)).await;
        answered.assert_exact();
        engines.insert(answered.engine().to_owned());
    }
    engines
}

fn set(engines: &[&str]) -> BTreeSet<String> {
    engines.iter().map(|engine| (*engine).to_owned()).collect()
}

/// Writes the file as an editor without a temporary file does.
fn write_in_place(deployment: &Deployment, text: &str) {
    fs::write(deployment.workers_file(), text).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edits_of_the_workers_file_take_effect_without_a_restart() {
    let mut deployment = Deployment::start(&[fast(1), fast(2)]).await;
    let router = deployment.router().unwrap().pid();
    let topic = &mut 0;
    assert_eq!(served(&deployment, 20, topic).await, set(&["1", "2"]));

    // A new engine, by rename.
    let third = Engine::start(&programs(), fast(3), &deployment.run_dir)
        .await
        .unwrap();
    deployment.engines.push(third);
    deployment.write_workers().unwrap();
    // Envoy learns of the endpoint a moment after warmroute; a request in between goes to another worker.
    let used = until(PATIENCE, async || {
        *topic += 1;
        let answered = deployment.complete(&essay(*topic)).await;
        assert_eq!(answered.status, StatusCode::OK, "{answered:?}");
        answered.engine() == "3" && answered.header("x-worker-instance-id") == "3"
    })
    .await;
    assert!(
        used,
        "the new engine gets nothing:\n{}",
        deployment.router_log()
    );

    // One engine less, in place. It runs on, so that whatever were still sent to it would be answered by it.
    let entries: Vec<Value> = deployment.engines[1..].iter().map(Engine::entry).collect();
    write_in_place(&deployment, &serde_json::to_string(&entries).unwrap());
    deployment
        .metrics_show("the removed engine is gone", |page| {
            page.sum("workers", &[]) == 2.0
        })
        .await;
    assert_eq!(served(&deployment, 30, topic).await, set(&["2", "3"]));
    let page = deployment.metrics().await;
    for family in [
        "worker_active_requests",
        "worker_cached_blocks",
        "kv_event_source_trust",
    ] {
        let of = |id: &str| {
            page.samples(family)
                .filter(|sample| sample.labels["worker_id"] == id)
                .count()
        };
        assert!(
            of("1") == 0 && of("2") > 0 && of("3") > 0,
            "{family}:\n{}",
            page.text()
        );
    }

    // Back again with the prefixes it kept: the engine's replay tells them.
    deployment.write_workers().unwrap();
    deployment
        .metrics_show("it is back", |page| {
            page.sum(
                "kv_event_source_trust",
                &[("worker_id", "1"), ("trust", "exact")],
            ) == 1.0
        })
        .await;
    deployment.settle().await;
    assert_eq!(deployment.router().unwrap().pid(), router);
    assert!(deployment.router().unwrap().is_running());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_workers_file_is_reported_with_its_line_and_the_old_fleet_serves_on() {
    let deployment = Deployment::start(&[fast(1), fast(2)]).await;
    let good = fs::read_to_string(deployment.workers_file()).unwrap();
    let topic = &mut 0;
    assert_eq!(
        deployment.metrics().await.sum("workers_file_valid", &[]),
        1.0
    );

    let address = deployment.engines[0].address;
    let bad = format!("- id: 1\n  endpoint: {address}\n- id: 2\n  endpoint: nowhere\n");
    write_in_place(&deployment, &bad);
    deployment
        .metrics_show("the file is not valid", |page| {
            page.sum("workers_file_valid", &[]) == 0.0
        })
        .await;
    let told = until(PATIENCE, async || {
        deployment.router_log().contains("workers.yaml:4")
    })
    .await;
    assert!(
        told,
        "the fourth line is at fault:\n{}",
        deployment.router_log()
    );
    assert_eq!(served(&deployment, 20, topic).await, set(&["1", "2"]));
    let page = deployment.metrics().await;
    assert_eq!(page.sum("workers", &[]), 2.0);
    assert!(page.sum("workers_file_reloads_total", &[("outcome", "invalid")]) >= 1.0);

    fs::remove_file(deployment.workers_file()).unwrap();
    let told = until(PATIENCE, async || {
        deployment.router_log().contains("cannot be read")
    })
    .await;
    assert!(
        told,
        "the missing file is reported:\n{}",
        deployment.router_log()
    );
    assert_eq!(served(&deployment, 10, topic).await, set(&["1", "2"]));

    write_in_place(&deployment, &good);
    deployment
        .metrics_show("the file is valid", |page| {
            page.sum("workers_file_valid", &[]) == 1.0
        })
        .await;
    deployment
        .write_worker_entries(&json!([deployment.engines[1].entry()]))
        .unwrap();
    deployment
        .metrics_show("it is followed on", |page| page.sum("workers", &[]) == 1.0)
        .await;
    assert_eq!(served(&deployment, 10, topic).await, set(&["2"]));
}
