//! Requests for a LoRA adapter reach an engine that has loaded it, without configuration.

use serde_json::{Value, json};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutedAnswer, RoutingBed, engine, text};

const REQUESTS: usize = 9;

fn with_model(model: &str, prompt: &str) -> Value {
    let mut body = text(prompt);
    body["model"] = json!(model);
    body
}

/// Sends requests for a model, and returns the responses.
async fn query_all(bed: &RoutingBed, model: &str) -> Vec<RoutedAnswer> {
    let mut answers = Vec::new();
    for number in 0..REQUESTS {
        let body = with_model(model, &format!("{number} is the number of this request."));
        answers.push(bed.query(&body).await);
    }
    answers
}

/// Waits until the engine of each of these workers lists exactly these adapters.
async fn wait_listed(bed: &RoutingBed, expected: [&[&str]; 3]) {
    let is_listed = async || {
        let fleet = bed.stack.debug_page("fleet").await.unwrap();
        let members = fleet["members"].as_array().unwrap();
        members.len() == 3
            && members.iter().all(|member| {
                let worker = &member["worker"];
                let id: usize = worker["id"].as_str().unwrap().parse().unwrap();
                worker["adapters"] == json!(expected[id - 1])
            })
    };
    assert!(
        until(PATIENCE, is_listed).await,
        "{}",
        bed.stack.debug_page("fleet").await.unwrap()
    );
}

async fn change(bed: &RoutingBed, id: u64, action: &str, adapter: &str) {
    let url = bed.engine(id).url(&format!("/v1/{action}_lora_adapter"));
    let body = json!({"lora_name": adapter, "lora_path": "/adapters"});
    let response = bed.http.post(url).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200, "{action} {adapter}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn adapter_requests_reach_engines_that_list_it() {
    let specs = [
        engine(1).with(&["--lora", "first", "--lora", "both"]),
        engine(2).with(&["--lora", "both"]),
        engine(3),
    ];
    let config = json!({
        "routing": {"policy": "round_robin"},
        "engines": {"discovery": {"interval": "1s"}},
    });
    let bed = RoutingBed::start(&specs, config).await;
    wait_listed(&bed, [&["both", "first"], &["both"], &[]]).await;
    for (model, workers) in [("first", &[1][..]), ("both", &[1, 2])] {
        let answers = query_all(&bed, model).await;
        let mut engines: Vec<u64> = answers.iter().map(RoutedAnswer::engine).collect();
        engines.sort_unstable();
        engines.dedup();
        assert_eq!(engines, workers, "{model}");
        assert!(answers.iter().all(|answer| answer.mode() == "exact"));
    }
    // Adapters change while the engines run.
    change(&bed, 3, "load", "late").await;
    change(&bed, 1, "unload", "first").await;
    change(&bed, 2, "load", "first").await;
    wait_listed(&bed, [&["both"], &["both", "first"], &["late"]]).await;
    for (model, worker) in [("late", 3), ("first", 2)] {
        for answer in query_all(&bed, model).await {
            assert_eq!(answer.engine(), worker, "{model}");
        }
    }
    // No engine lists the name, so the request is routed like one for an unknown model.
    let unknown = bed.query(&with_model("nowhere", "Hello.")).await;
    assert_eq!(
        (unknown.status.as_u16(), unknown.mode()),
        (404, "load_only")
    );
    let base = query_all(&bed, warmroute_testbed::deployment::MODEL).await;
    assert!(base.iter().map(RoutedAnswer::engine).any(|id| id == 1));
    bed.wait_idle().await;
}
