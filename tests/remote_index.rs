//! The index of others: two real processes of ours that serve it, one that asks them and keeps none, real engines behind a
//! real Envoy. What the asker's requests find cached, and what they get when servers are stopped, killed and started again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "envoy_e2e/another.rs"]
mod another;
#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;

use reqwest::StatusCode;
use serde_json::{Value, json};

use another::Another;
use deployment::{Answered, Deployment, PATIENCE, essay, fast, telling};
use support::ports::{FreePort, until};
use support::stack::MODEL;

/// Requests that are compared.
const REQUESTS: usize = 800;
/// Different prompts.
const PROMPTS: usize = 200;
/// Requests while something is wrong.
const MEANWHILE: usize = 60;

async fn complete(deployment: &Deployment, topic: usize) -> Answered {
    let body = json!({"model": MODEL, "prompt": essay(topic % PROMPTS), "max_tokens": 1});
    Answered::read(deployment.post("/v1/completions", &body).await).await
}

/// Sends the requests, and says what share of the prompts' tokens was found cached by the engines.
async fn hit_rate(deployment: &Deployment, from: usize) -> f64 {
    let (mut prompt, mut cached) = (0.0, 0.0);
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

/// Sends requests that all must be answered, and says in which modes they were routed.
async fn modes(deployment: &Deployment, from: usize) -> Vec<String> {
    let mut modes = Vec::new();
    for nth in 0..MEANWHILE {
        let answer = complete(deployment, from + nth).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        modes.push(answer.mode().to_owned());
    }
    modes.sort();
    modes.dedup();
    modes
}

/// What a page of explanations says of each worker for a prompt: what it holds, how far that is believed, and what it costs.
async fn judged(deployment: &Deployment, page: &str, topic: usize) -> Value {
    let question = json!({"path": "/v1/completions", "body": {"model": MODEL, "prompt": essay(topic), "max_tokens": 1}});
    let answer: Value = deployment
        .http
        .post(page)
        .json(&question)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(answer["mode"], "exact", "{answer}");
    answer["phases"][0]["judged"].clone()
}

async fn metrics(deployment: &Deployment, asker: &Another) -> openmetrics::Page {
    let asking = deployment
        .http
        .get(asker.url("/metrics"))
        .header("accept", openmetrics::ACCEPT);
    let page = asking.send().await.unwrap();
    openmetrics::Page::read(&page.text().await.unwrap())
}

fn serving(port: u16) -> Value {
    json!({"api": {"listen": format!("127.0.0.1:{port}")}, "serve_index": true})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_for_the_index_routes_as_who_keeps_it_and_loses_servers_without_an_error() {
    let mut deployment = Deployment::engines(&[1, 2, 3, 4].map(fast)).await;
    deployment.write_workers().unwrap();
    let ports = [0, 1].map(|_| FreePort::find().unwrap().release());
    deployment
        .start_router(&telling(serving(ports[0])))
        .await
        .unwrap();
    let envoy = deployment.envoy_config();
    deployment.start_envoy(&envoy).await.unwrap();
    let second = Another::start(&deployment, "second", &serving(ports[1])).await;
    hit_rate(&deployment, 0).await;
    let of_server = hit_rate(&deployment, 3).await;
    deployment.settle().await;

    let servers = ports.map(|port| format!("http://127.0.0.1:{port}"));
    let asking =
        json!({"use_remote_index": {"servers": servers, "deadline": "5s", "hedge": "20ms"}});
    let asker = Another::start(&deployment, "asker", &asking).await;
    // From now on Envoy asks the one without an index.
    let envoy = asker.envoy_config(&deployment);
    deployment.start_envoy(&envoy).await.unwrap();
    let of_asker = hit_rate(&deployment, 5).await;
    println!(
        "hit rate of a server {of_server:.4}, of the asker {of_asker:.4}: {:.4} of it",
        of_asker / of_server
    );
    assert!(of_asker >= 0.98 * of_server, "{of_asker} of {of_server}");
    let index = asker.index().await;
    assert_eq!(
        (&index["total"]["device"], &index["distinct_blocks"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(index["remote"][1]["ranks"], 4, "{index}");

    // Of what is cached, how far that is believed and what it costs both say the same.
    deployment.settle().await;
    let mut found = 0;
    for topic in 0..20 {
        let ours = judged(&deployment, &deployment.admin_url("/debug/explain"), topic).await;
        assert_eq!(
            judged(&deployment, &asker.url("/debug/explain"), topic).await,
            ours
        );
        found += ours
            .as_array()
            .unwrap()
            .iter()
            .filter(|rank| rank["overlap"]["device"] != 0)
            .count();
    }
    assert!(found >= 20, "each prompt is somewhere: {found}");

    // One is slow, and then gone.
    deployment.router().unwrap().freeze();
    assert_eq!(modes(&deployment, 0).await, ["exact"]);
    let page = metrics(&deployment, &asker).await;
    assert!(
        page.sum("remote_index_questions_total", &[("outcome", "hedged_won")]) >= 1.0,
        "{}",
        page.text()
    );
    deployment.kill9_router();
    assert_eq!(modes(&deployment, 20).await, ["exact"]);

    // Both are.
    second.child.kill9();
    assert_eq!(modes(&deployment, 40).await, ["approximate"]);
    let page = metrics(&deployment, &asker).await;
    assert!(
        page.sum("degradations_total", &[("reason", "index_away")]) >= MEANWHILE as f64,
        "{}",
        page.text()
    );

    // One comes back, and the engines tell it again what they hold.
    let third = Another::start(&deployment, "third", &serving(ports[1])).await;
    let exact = async || complete(&deployment, 7).await.mode() == "exact";
    assert!(until(PATIENCE, exact).await, "{}", asker.child.log_tail());
    let known = third.index().await["total"]["device"].as_u64().unwrap();
    assert!(known > 0, "{}", third.child.log_tail());
    assert_eq!(modes(&deployment, 60).await, ["exact"]);
    let log = std::fs::read_to_string(asker.child.log()).unwrap();
    assert_eq!(
        log.matches("no server of the index answers in time")
            .count(),
        1,
        "{log}"
    );
    assert_eq!(
        log.matches("answers again, where none did before").count(),
        1,
        "{log}"
    );
}
