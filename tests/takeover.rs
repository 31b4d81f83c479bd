//! A start with what is known already: several processes of ours, engines that repeat only the newest of what they told, and
//! the requests of those that start.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "envoy_e2e/another.rs"]
mod another;
#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "envoy_e2e/openmetrics.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod openmetrics;

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use another::Another;
use deployment::{Deployment, PATIENCE, essay, fast, programs, telling};
use support::ports::{FreePort, until};
use support::stack::{EngineSpec, MODEL};

/// Requests that are compared.
const REQUESTS: usize = 1_000;
/// Different prompts.
const PROMPTS: usize = 200;

/// Engines that repeat eight batches and no more.
fn forgetful() -> [EngineSpec; 4] {
    [1, 2, 3, 4].map(|id| fast(id).with(&["--buffer-steps", "8"]))
}

async fn json_of(http: &reqwest::Client, url: &str) -> Option<Value> {
    http.get(url).send().await.ok()?.json().await.ok()
}

/// Sends some requests, and says what share of the prompts' tokens was found cached by the engines.
async fn hit_rate(deployment: &Deployment, from: usize, requests: usize) -> f64 {
    let (mut prompt, mut cached) = (0.0, 0.0);
    for nth in 0..requests {
        let body =
            json!({"model": MODEL, "prompt": essay((from + nth * 7) % PROMPTS), "max_tokens": 1});
        let answer = deployment.post("/v1/completions", &body).await;
        assert_eq!(answer.status(), 200);
        let answer: Value = answer.json().await.unwrap();
        let usage = &answer["usage"];
        prompt += usage["prompt_tokens"].as_f64().unwrap();
        cached += usage["prompt_tokens_details"]["cached_tokens"]
            .as_f64()
            .unwrap_or_default();
    }
    cached / prompt
}

/// Blocks on the device that it knows of.
async fn known(another: &Another) -> u64 {
    another.index().await["total"]["device"].as_u64().unwrap()
}

/// Waits until it knows exactly what the engines hold.
async fn settles(another: &Another, deployment: &Deployment) {
    let same = async || known(another).await == deployment.cached_blocks().await;
    assert!(
        until(PATIENCE, same).await,
        "{} and {}",
        known(another).await,
        deployment.cached_blocks().await
    );
}

/// A deployment whose warmroute can be copied from at this address.
async fn deployment() -> (Deployment, String) {
    let mut deployment = Deployment::engines(&forgetful()).await;
    deployment.write_workers().unwrap();
    let api = format!("127.0.0.1:{}", FreePort::find().unwrap().release());
    deployment
        .start_router(&telling(json!({"api": {"listen": api}})))
        .await
        .unwrap();
    let envoy = deployment.envoy_config();
    deployment.start_envoy(&envoy).await.unwrap();
    (deployment, format!("http://{api}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_requests_of_a_new_one_find_what_those_of_its_peer_found() {
    let (mut deployment, api) = deployment().await;
    hit_rate(&deployment, 0, REQUESTS).await;
    let of_peer = hit_rate(&deployment, 3, REQUESTS).await;
    deployment.settle().await;

    // One that has to learn for itself, for comparison, and one that copies while requests go on.
    let cold = Another::start(&deployment, "cold", &json!({})).await;
    let held = deployment.cached_blocks().await;
    assert!(
        known(&cold).await < held / 2,
        "the engines repeat {} of {held} blocks",
        known(&cold).await
    );
    let from = json!({"takeover": {"from": api}});
    let starts = Another::start(&deployment, "new", &from);
    let (new, _) = tokio::join!(starts, hit_rate(&deployment, 1, 100));
    settles(&new, &deployment).await;

    // From now on Envoy asks the new one.
    let envoy = new.envoy_config(&deployment);
    deployment.start_envoy(&envoy).await.unwrap();
    let of_new = hit_rate(&deployment, 5, REQUESTS).await;
    println!(
        "hit rate of the peer {of_peer:.4}, of the new one {of_new:.4}: {:.4} of it",
        of_new / of_peer
    );
    assert!(of_new >= 0.98 * of_peer, "{of_new} of {of_peer}");
    // Both go on.
    settles(&new, &deployment).await;
    deployment.settle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_goes_on_where_the_file_ends_and_an_engine_that_is_a_new_one_is_known_to_be() {
    let mut deployment = Deployment::engines(&forgetful()).await;
    deployment.write_workers().unwrap();
    let own = telling(json!({"takeover": {"file": "index.warmroute"}}));
    deployment.start_router(&own).await.unwrap();
    let envoy = deployment.envoy_config();
    deployment.start_envoy(&envoy).await.unwrap();
    hit_rate(&deployment, 0, 400).await;
    deployment.settle().await;
    let known = deployment.cached_blocks().await;

    // Engines work while we are away; one of them is another one afterwards.
    let router = deployment.router().unwrap();
    router.terminate();
    let end = std::time::Instant::now() + PATIENCE;
    assert!(
        router.wait_exit(end).is_some_and(|status| status.success()),
        "{}",
        router.log_tail()
    );
    assert!(deployment.run_dir.join("index.warmroute").is_file());
    for engine in &deployment.engines[1..] {
        let body = json!({"model": MODEL, "prompt": essay(PROMPTS + 1), "max_tokens": 1});
        let answer = deployment
            .http
            .post(engine.url("/v1/completions"))
            .json(&body)
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status(), 200);
    }
    deployment.engines[0].kill9();
    let (programs, run_dir) = (programs(), deployment.run_dir.clone());
    deployment.engines[0]
        .restart(&programs, &run_dir)
        .await
        .unwrap();
    deployment.start_router(&own).await.unwrap();
    deployment.settle().await;
    assert!(
        deployment.cached_blocks().await > known / 2,
        "three of four engines are as they were"
    );
    assert!(hit_rate(&deployment, 0, 200).await > 0.5);

    // Whoever is killed leaves nothing, and starts with the file of before; what that misses is doubted, and no error.
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
            .contains("what was known at the last end is of no use")
    );
    hit_rate(&deployment, 0, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nobody_tells_we_start_cold_or_wait_as_it_is_configured() {
    let (deployment, api) = deployment().await;
    hit_rate(&deployment, 0, 100).await;
    deployment.settle().await;
    let nobody = format!("http://127.0.0.1:{}", FreePort::find().unwrap().release());
    let alone = Another::start(
        &deployment,
        "alone",
        &json!({"takeover": {"from": nobody, "deadline": "1s"}}),
    )
    .await;
    assert!(known(&alone).await < deployment.cached_blocks().await);

    // Two that wait for one another know nothing; when one of them need not wait any longer, the other one need not either.
    let [one, two] = [0, 1].map(|_| format!("127.0.0.1:{}", FreePort::find().unwrap().release()));
    let waits = json!({"api": {"listen": one}, "takeover": {"from": format!("http://{two}"), "deadline": "1s", "late": "wait"}});
    let waits = Another::spawn(&deployment, "waits", &waits);
    let late = Instant::now() + Duration::from_secs(3);
    while Instant::now() < late {
        let page = json_of(&deployment.http, &waits.url("/readyz")).await;
        assert!(
            page.is_none_or(|page| page["ready"] == false),
            "nobody has told"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let page = json_of(&deployment.http, &waits.url("/readyz"))
        .await
        .unwrap();
    assert!(
        page["pending"]
            .to_string()
            .contains("what is known of worker rank"),
        "{page}"
    );
    let _other = Another::start(
        &deployment,
        "other",
        &json!({"api": {"listen": two}, "takeover": {"from": api}}),
    )
    .await;
    waits.is_ready().await;
    settles(&waits, &deployment).await;
}
