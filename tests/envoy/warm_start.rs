//! Warm start of a process from a peer or a snapshot, with engines that replay only their most
//! recent events.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_testbed::deployment::{EngineSpec, MODEL};
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::support::another::SecondRouter;
use crate::support::deployment::{
    RoutedAnswer, TestDeployment, essay, fast, with_response_headers,
};

/// Number of compared requests.
const REQUESTS: usize = 1_000;
/// Number of different prompts.
const PROMPTS: usize = 200;

/// Returns engines that replay only eight batches.
fn engines_with_short_replay() -> [EngineSpec; 4] {
    [1, 2, 3, 4].map(|id| fast(id).with(&["--buffer-steps", "8"]))
}

async fn json_of(http: &reqwest::Client, url: &str) -> Option<Value> {
    http.get(url).send().await.ok()?.json().await.ok()
}

/// Sends requests. Returns the share of prompt tokens that the engines had cached.
async fn hit_rate(deployment: &TestDeployment, from: usize, requests: usize) -> f64 {
    let mut prompt = 0.0;
    let mut cached = 0.0;
    for nth in 0..requests {
        let body =
            json!({"model": MODEL, "prompt": essay((from + nth * 7) % PROMPTS), "max_tokens": 1});
        let answer = deployment.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200);
        let usage = &answer.json()["usage"];
        prompt += usage["prompt_tokens"].as_f64().unwrap();
        cached += usage["prompt_tokens_details"]["cached_tokens"]
            .as_f64()
            .unwrap_or_default();
    }
    cached / prompt
}

/// Returns the number of device blocks in the index.
async fn known(another: &SecondRouter) -> u64 {
    another.page("index").await["total"]["device"]
        .as_u64()
        .unwrap()
}

/// Sends streamed requests, from which the latency of the engines is learned. Returns the number of
/// learned prefills. A first token that Envoy reports too late is not learned.
async fn stream_requests(deployment: &TestDeployment, requests: usize) -> u64 {
    for nth in 0..requests {
        let body = json!({"model": MODEL, "prompt": essay(PROMPTS + nth), "max_tokens": 4, "stream": true});
        let answer = deployment.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200);
    }
    deployment.settle().await;
    let learned = learned_prefills(&deployment.debug_page("calibration").await.unwrap());
    assert!(learned > 0, "no prefill was learned");
    learned
}

/// Returns the number of prefills from which the latency of the model was learned.
fn learned_prefills(calibration: &Value) -> u64 {
    calibration["models"][0]["prefill_observations"]
        .as_u64()
        .unwrap_or(0)
}

/// Waits until the index equals the caches of the engines.
async fn wait_index_matches(another: &SecondRouter, deployment: &TestDeployment) {
    let same = async || known(another).await == deployment.cached_blocks().await;
    assert!(
        until(PATIENCE, same).await,
        "{} and {}",
        known(another).await,
        deployment.cached_blocks().await
    );
}

/// Starts a deployment. Returns it with the API address of its warmroute.
async fn deployment() -> (TestDeployment, String) {
    let api = format!("127.0.0.1:{}", FreePort::find().unwrap().release());
    let more = json!({"listeners": {"api": {"address": api}}});
    let engines = engines_with_short_replay();
    let deployment = TestDeployment::start_with(&engines, more, str::to_owned).await;
    (deployment, format!("http://{api}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn new_replica_starts_with_index_of_peer() {
    let (mut deployment, api) = deployment().await;
    let learned = stream_requests(&deployment, 12).await;
    hit_rate(&deployment, 0, REQUESTS).await;
    let of_peer = hit_rate(&deployment, 3, REQUESTS).await;
    deployment.settle().await;

    // One process has a cold start, for comparison. The other copies the index while requests
    // continue.
    let cold = SecondRouter::start(&deployment, "cold", &json!({})).await;
    let held = deployment.cached_blocks().await;
    assert!(
        known(&cold).await < held / 2,
        "the engines replay {} of {held} blocks",
        known(&cold).await
    );
    let from = json!({"index": {"warm_start": {"url": api}}});
    let starts = SecondRouter::start(&deployment, "new", &from);
    let (new, _) = tokio::join!(starts, hit_rate(&deployment, 1, 100));
    wait_index_matches(&new, &deployment).await;
    let calibration = new.page("calibration").await;
    assert_eq!(learned_prefills(&calibration), learned, "{calibration}");

    // Envoy switches to the new process.
    let envoy = new.envoy_config(&deployment);
    deployment.start_envoy(&envoy).await.unwrap();
    let of_new = hit_rate(&deployment, 5, REQUESTS).await;
    println!(
        "hit rate of the peer {of_peer:.4}, of the new process {of_new:.4}: ratio {:.4}",
        of_new / of_peer
    );
    assert!(of_new >= 0.98 * of_peer, "{of_new} of {of_peer}");
    // The peer and the new process both stay up to date.
    wait_index_matches(&new, &deployment).await;
    deployment.settle().await;
}

/// Stops warmroute, which then writes its snapshots.
fn stop_router(deployment: &TestDeployment) {
    let router = deployment.router().unwrap();
    router.terminate();
    let end = std::time::Instant::now() + PATIENCE;
    assert!(
        router.wait_exit(end).is_some_and(|status| status.success()),
        "{}",
        router.log_tail()
    );
    for file in ["index.warmroute", "index.warmroute.latency.json"] {
        assert!(deployment.run_dir.join(file).is_file(), "{file}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn restart_resumes_from_snapshot_unless_engine_changed() {
    let more = json!({"index": {"warm_start": {"snapshot_file": "index.warmroute"}}});
    let own = with_response_headers(more.clone());
    let engines = engines_with_short_replay();
    let mut deployment = TestDeployment::start_with(&engines, more, str::to_owned).await;
    let learned = stream_requests(&deployment, 12).await;
    hit_rate(&deployment, 0, 400).await;
    deployment.settle().await;
    let known = deployment.cached_blocks().await;

    // Engines continue while warmroute is stopped, and one of them is replaced.
    stop_router(&deployment);
    for engine in &deployment.engines[1..] {
        let body = json!({"model": MODEL, "prompt": essay(PROMPTS + 1), "max_tokens": 1});
        let request = deployment.http.post(engine.url("/v1/completions"));
        let answer = RoutedAnswer::send(request.json(&body)).await;
        assert_eq!(answer.status, 200);
    }
    deployment.engines[0].kill9();
    deployment.restart_engine(0).await;
    deployment.start_router(&own).await.unwrap();
    deployment.settle().await;
    assert!(
        deployment.cached_blocks().await > known / 2,
        "three of four engines still have their caches"
    );
    assert!(hit_rate(&deployment, 0, 200).await > 0.5);
    let calibration = deployment.debug_page("calibration").await.unwrap();
    assert_eq!(learned_prefills(&calibration), learned, "{calibration}");

    // A killed process writes no snapshot, so its successor uses the previous one. Blocks that are
    // missing there are marked stale and cause no error.
    deployment.settle().await;
    deployment.kill9_router();
    deployment.start_router(&own).await.unwrap();
    hit_rate(&deployment, 0, 200).await;
    deployment.kill9_router();
    std::fs::write(deployment.run_dir.join("index.warmroute"), "no index").unwrap();
    deployment.start_router(&own).await.unwrap();
    assert!(
        deployment
            .router_log()
            .contains("warm start: snapshot file not usable")
    );
    hit_rate(&deployment, 0, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn unreachable_peer_means_cold_start_or_wait() {
    let (deployment, api) = deployment().await;
    hit_rate(&deployment, 0, 100).await;
    deployment.settle().await;
    let unreachable = format!("http://127.0.0.1:{}", FreePort::find().unwrap().release());
    let alone = SecondRouter::start(
        &deployment,
        "alone",
        &json!({"index": {"warm_start": {"url": unreachable, "timeout": "1s"}}}),
    )
    .await;
    assert!(known(&alone).await < deployment.cached_blocks().await);

    // If two processes wait for each other, both are cold. As soon as one stops waiting, the other
    // one does too.
    let [one, two] = [0, 1].map(|_| format!("127.0.0.1:{}", FreePort::find().unwrap().release()));
    let waits = json!({
        "listeners": {"api": {"address": one}},
        "index": {
            "warm_start": {"url": format!("http://{two}"), "timeout": "1s", "on_timeout": "wait"},
        },
    });
    let waits = SecondRouter::spawn(&deployment, "waits", &waits);
    let late = Instant::now() + Duration::from_secs(3);
    while Instant::now() < late {
        let page = json_of(&deployment.http, &waits.url("/readyz")).await;
        assert!(
            page.is_none_or(|page| page["ready"] == false),
            "no peer has sent an index yet"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let page = json_of(&deployment.http, &waits.url("/readyz"))
        .await
        .unwrap();
    assert!(
        page["pending"]
            .to_string()
            .contains("warm start of worker rank"),
        "{page}"
    );
    let _other = SecondRouter::start(
        &deployment,
        "other",
        &json!({"listeners": {"api": {"address": two}}, "index": {"warm_start": {"url": api}}}),
    )
    .await;
    waits.is_ready().await;
    wait_index_matches(&waits, &deployment).await;
}
