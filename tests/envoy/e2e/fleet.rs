//! Edits of the workers file under load.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineProcess;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::support::deployment::{TestDeployment, essay, fast, programs};
use crate::support::openmetrics::OpenMetricsPage;

/// Sends unrelated requests. Returns the engines that served them.
async fn served(deployment: &TestDeployment, requests: usize, topic: &mut usize) -> BTreeSet<u64> {
    let mut engines = BTreeSet::new();
    for _ in 0..requests {
        *topic += 1;
        let answered = deployment.complete(&essay(*topic)).await;
        answered.assert_exact();
        engines.insert(answered.engine());
    }
    engines
}

/// Overwrites the file in place, without a rename.
fn write_in_place(deployment: &TestDeployment, text: &str) {
    fs::write(deployment.workers_file(), text).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_file_edits_apply_without_restart() {
    let mut deployment = TestDeployment::start(&[fast(1), fast(2)]).await;
    let router = deployment.router().unwrap().pid();
    let topic = &mut 0;
    assert_eq!(served(&deployment, 20, topic).await, [1, 2].into());

    // Adds an engine and replaces the file by a rename.
    let third = EngineProcess::start(&programs(), fast(3), &deployment.run_dir)
        .await
        .unwrap();
    deployment.engines.push(third);
    deployment.write_workers().unwrap();
    // Envoy applies the endpoint slightly after warmroute. Until then, Envoy selects another
    // worker.
    let used = until(PATIENCE, async || {
        *topic += 1;
        let answered = deployment.complete(&essay(*topic)).await;
        answered.engine() == 3 && answered.header("x-worker-instance-id") == "3"
    })
    .await;
    assert!(
        used,
        "the new engine receives no request:\n{}",
        deployment.router_log()
    );

    // Removes an engine by a write in place. It still runs, so it would serve any request that
    // reaches it.
    let entries: Vec<Value> = deployment.engines[1..]
        .iter()
        .map(EngineProcess::worker_entry)
        .collect();
    write_in_place(&deployment, &serde_json::to_string(&entries).unwrap());
    deployment.wait_metric("workers", &[], 2.0).await;
    assert_eq!(served(&deployment, 30, topic).await, [2, 3].into());
    let page = deployment.metrics().await;
    assert_only_listed_workers_have_series(&page);

    // Adds the engine again. A replay of its events restores the index.
    deployment.write_workers().unwrap();
    deployment
        .wait_metric(
            "kv_event_source_freshness",
            &[("worker_id", "1"), ("freshness", "exact")],
            1.0,
        )
        .await;
    deployment.settle().await;
    assert_eq!(deployment.router().unwrap().pid(), router);
    assert!(deployment.router().unwrap().is_running());
}

/// Asserts that workers 2 and 3 have metric series, and the removed worker 1 has none.
fn assert_only_listed_workers_have_series(page: &OpenMetricsPage) {
    for family in [
        "worker_active_requests",
        "worker_cached_blocks",
        "kv_event_source_freshness",
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
}

async fn wait_logged(deployment: &TestDeployment, text: &str) {
    let is_logged = until(PATIENCE, async || deployment.router_log().contains(text)).await;
    assert!(is_logged, "no {text}:\n{}", deployment.router_log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn invalid_workers_file_is_reported_and_fleet_stays() {
    let deployment = TestDeployment::start(&[fast(1), fast(2)]).await;
    let good = fs::read_to_string(deployment.workers_file()).unwrap();
    let topic = &mut 0;
    assert_eq!(
        deployment
            .metric("workers_file_last_reload_successful", &[])
            .await,
        1.0
    );

    let address = deployment.engines[0].address;
    let bad = format!("- id: 1\n  endpoint: {address}\n- id: 2\n  endpoint: nowhere\n");
    write_in_place(&deployment, &bad);
    deployment
        .wait_metric("workers_file_last_reload_successful", &[], 0.0)
        .await;
    wait_logged(&deployment, "workers.yaml:4").await;
    assert_eq!(served(&deployment, 20, topic).await, [1, 2].into());
    let page = deployment.metrics().await;
    assert_eq!(page.sum("workers", &[]), 2.0);
    assert!(page.sum("workers_file_reloads_total", &[("outcome", "invalid")]) >= 1.0);

    fs::remove_file(deployment.workers_file()).unwrap();
    wait_logged(&deployment, "cannot be read").await;
    assert_eq!(served(&deployment, 10, topic).await, [1, 2].into());

    write_in_place(&deployment, &good);
    deployment
        .wait_metric("workers_file_last_reload_successful", &[], 1.0)
        .await;
    deployment
        .write_worker_entries(&json!([deployment.engines[1].worker_entry()]))
        .unwrap();
    deployment.wait_metric("workers", &[], 1.0).await;
    assert_eq!(served(&deployment, 10, topic).await, [2].into());
}
