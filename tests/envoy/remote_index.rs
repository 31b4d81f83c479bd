//! Remote index: two processes serve their index, and a third process queries them instead of
//! keeping its own, with simulated engines behind a real Envoy. The tests compare cache hits, and
//! stop, kill and restart the servers.

use reqwest::StatusCode;
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::support::another::SecondRouter;
use crate::support::deployment::{RoutedAnswer, TestDeployment, essay, fast};

/// Number of compared requests.
const REQUESTS: usize = 800;
/// Number of different prompts.
const PROMPTS: usize = 200;
/// Number of requests during each failure.
const REQUESTS_PER_FAILURE: usize = 60;

async fn complete(deployment: &TestDeployment, topic: usize) -> RoutedAnswer {
    let body = json!({"model": MODEL, "prompt": essay(topic % PROMPTS), "max_tokens": 1});
    deployment.post("/v1/completions", &body).await
}

/// Sends the requests. Returns the share of prompt tokens that the engines had cached.
async fn hit_rate(deployment: &TestDeployment, from: usize) -> f64 {
    let mut prompt = 0.0;
    let mut cached = 0.0;
    for nth in 0..REQUESTS {
        let answer = complete(deployment, from + nth * 7).await;
        answer.assert_exact();
        let usage = &answer.documents()[0]["usage"];
        prompt += usage["prompt_tokens"].as_f64().unwrap();
        cached += usage["prompt_tokens_details"]["cached_tokens"]
            .as_f64()
            .unwrap_or_default();
    }
    cached / prompt
}

/// Sends requests that must all succeed. Returns their routing modes.
async fn modes(deployment: &TestDeployment, from: usize) -> Vec<String> {
    let mut modes = Vec::new();
    for nth in 0..REQUESTS_PER_FAILURE {
        let answer = complete(deployment, from + nth).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        modes.push(answer.mode().to_owned());
    }
    modes.sort();
    modes.dedup();
    modes
}

/// Returns the explanation of each worker for a prompt: overlap, index freshness and cost.
async fn explanations(deployment: &TestDeployment, page: &str, topic: usize) -> Value {
    let question = json!({"path": "/v1/completions", "body": {"model": MODEL, "prompt": essay(topic), "max_tokens": 1}});
    let answer = RoutedAnswer::send(deployment.http.post(page).json(&question)).await;
    let answer = answer.json();
    assert_eq!(answer["mode"], "exact", "{answer}");
    answer["phases"][0]["workers"].clone()
}

fn serving(port: u16) -> Value {
    json!({
        "listeners": {"api": {"address": format!("127.0.0.1:{port}")}},
        "index": {"serve": true},
        // The costs of both processes are compared, so they must not depend on learned latency.
        "routing": {"policy": "linear_tuned"},
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn remote_index_client_matches_server_and_survives_failures() {
    let ports = [0, 1].map(|_| FreePort::find().unwrap().release());
    let engines = [1, 2, 3, 4].map(fast);
    let mut deployment =
        TestDeployment::start_with(&engines, serving(ports[0]), str::to_owned).await;
    let second = SecondRouter::start(&deployment, "second", &serving(ports[1])).await;
    hit_rate(&deployment, 0).await;
    let of_server = hit_rate(&deployment, 3).await;
    deployment.settle().await;

    let servers = ports.map(|port| format!("http://127.0.0.1:{port}"));
    let query = json!({
        "index": {"remote": {"servers": servers, "timeout": "5s"}},
        "routing": {"policy": "linear_tuned"},
    });
    let client = SecondRouter::start(&deployment, "client", &query).await;
    // From here on, Envoy uses the client.
    let envoy = client.envoy_config(&deployment);
    deployment.start_envoy(&envoy).await.unwrap();
    let of_client = hit_rate(&deployment, 5).await;
    println!(
        "hit rate of a server {of_server:.4}, of the client {of_client:.4}: ratio {:.4}",
        of_client / of_server
    );
    assert!(of_client >= 0.98 * of_server, "{of_client} of {of_server}");
    let index = client.page("index").await;
    assert_eq!(
        (&index["total"]["device"], &index["distinct_blocks"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(index["remote"][1]["ranks"], 4, "{index}");

    deployment.settle().await;
    assert_client_agrees(&deployment, &client).await;
    assert_failures_are_survived(&mut deployment, &client, second, ports[1]).await;
}

/// Asserts that client and server agree on overlap, freshness and cost.
async fn assert_client_agrees(deployment: &TestDeployment, client: &SecondRouter) {
    let mut found = 0;
    for topic in 0..20 {
        let ours = explanations(deployment, &deployment.admin_url("/debug/explain"), topic).await;
        assert_eq!(
            explanations(deployment, &client.url("/debug/explain"), topic).await,
            ours
        );
        found += ours
            .as_array()
            .unwrap()
            .iter()
            .filter(|rank| rank["overlap"]["device"] != 0)
            .count();
    }
    assert!(found >= 20, "each prompt is cached on a worker: {found}");
}

/// Freezes and kills one server, then kills the other. A new server starts at the port of the
/// second one, and the engines replay their events.
async fn assert_failures_are_survived(
    deployment: &mut TestDeployment,
    client: &SecondRouter,
    second: SecondRouter,
    port: u16,
) {
    deployment.router().unwrap().freeze();
    assert_eq!(modes(deployment, 0).await, ["exact"]);
    let page = client.metrics().await;
    assert!(
        page.sum(
            "remote_index_queries_total",
            &[("outcome", "hedge_answered")]
        ) >= 1.0,
        "{}",
        page.text()
    );
    deployment.kill9_router();
    assert_eq!(modes(deployment, 20).await, ["exact"]);

    // The other server is killed.
    second.child.kill9();
    assert_eq!(modes(deployment, 40).await, ["approximate"]);
    let page = client.metrics().await;
    assert!(
        page.sum("degradations_total", &[("reason", "index_unreachable")])
            >= REQUESTS_PER_FAILURE as f64,
        "{}",
        page.text()
    );

    let third = SecondRouter::start(deployment, "third", &serving(port)).await;
    let exact = async || complete(deployment, 7).await.mode() == "exact";
    assert!(until(PATIENCE, exact).await, "{}", client.child.log_tail());
    let known = third.page("index").await["total"]["device"]
        .as_u64()
        .unwrap();
    assert!(known > 0, "{}", third.child.log_tail());
    assert_eq!(modes(deployment, 60).await, ["exact"]);
    let log = std::fs::read_to_string(client.child.log()).unwrap();
    assert_eq!(
        log.matches("all remote index servers ejected").count(),
        1,
        "{log}"
    );
    assert_eq!(
        log.matches("remote index server readmitted; queries resume")
            .count(),
        1,
        "{log}"
    );
}
