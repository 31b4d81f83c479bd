//! TensorRT-LLM's protocol: like vLLM's, but the transfer parameters are in the choice of a
//! response.

use std::sync::Arc;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::disaggregation::bed::{DisaggregatedEngine, ids, kv, text, with};

async fn pair() -> (DisaggregatedEngine, DisaggregatedEngine) {
    let flags = ["--disaggregation", "trtllm", "--kv-load-timeout", "200ms"];
    tokio::join!(
        DisaggregatedEngine::start(&flags),
        DisaggregatedEngine::start(&flags)
    )
}

async fn context(
    engine: &DisaggregatedEngine,
    body: &Value,
    number: impl Into<Option<u64>>,
) -> Value {
    let params = json!({"request_type": "context_only", "disagg_request_id": number.into()});
    engine
        .complete(&with(body, &json!({"disaggregated_params": params})))
        .await
}

fn generation_of(body: &Value, params: &Value) -> Value {
    let params = with(params, &json!({"request_type": "generation_only"}));
    with(body, &json!({"disaggregated_params": params}))
}

#[tokio::test]
async fn transferred_context_continues_like_local_one() {
    let (contexts, generations) = pair().await;
    let ask = ids(100..200, 12);
    let expected = generations.complete(&ask).await;
    assert!(expected["choices"][0].get("disaggregated_params").is_none());
    let other = ids(300..400, 12);
    let answer = context(&contexts, &other, 4711).await;
    assert_eq!(
        answer["usage"]["completion_tokens"], 1,
        "whatever max_tokens says"
    );
    assert_eq!(answer["prompt_token_ids"], other["prompt"]);
    let params = &answer["choices"][0]["disaggregated_params"];
    assert_eq!(
        (&params["request_type"], &params["disagg_request_id"]),
        (&json!("context_only"), &json!(4711))
    );
    assert_eq!(params["ctx_request_id"], 4711, "both sides call it that");
    assert!(params["encoded_opaque_state"].is_string(), "{params}");
    contexts.expect_metrics(&[("kv_leases", 1.0)]).await;
    let continued = generations.complete(&generation_of(&other, params)).await;
    assert!(
        text(&continued).starts_with(text(&answer)),
        "the first token is the context's"
    );
    assert_eq!(text(&continued), text(&contexts.complete(&other).await));
    assert_ne!(text(&continued), text(&expected));
    assert_eq!((kv(&answer), kv(&continued)), ("computed", "fetched"));
    generations
        .expect_metrics(&[("kv_transfers_total", 1.0), ("kv_mismatches_total", 0.0)])
        .await;
    contexts.eventually_metric("kv_leases", 0.0).await;
}

#[tokio::test]
async fn mixed_up_contexts_are_detected() {
    let (contexts, generations) = pair().await;
    let prompts = [ids(0..70, 4), ids(100..170, 4), ids(200..270, 4)];
    let mut params = Vec::new();
    for ask in &prompts {
        params
            .push(context(&contexts, ask, None).await["choices"][0]["disaggregated_params"].take());
    }
    let numbers: Vec<_> = params
        .iter()
        .map(|params| params["ctx_request_id"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [1, 2, 3], "every engine counts for itself");
    // All parameters are those of another request; only the id is; only the first token is.
    let number = with(
        &params[0],
        &json!({"ctx_request_id": params[2]["ctx_request_id"]}),
    );
    let token = with(
        &params[0],
        &json!({"first_gen_tokens": params[1]["first_gen_tokens"]}),
    );
    for (count, params) in [params[1].clone(), number, token].into_iter().enumerate() {
        // The cache salt ensures that the generation engine has not cached the prompt.
        let ask = with(
            &prompts[0],
            &json!({"cache_salt": if count < 2 { json!(format!("{count}")) } else { json!(null) }}),
        );
        let answer = generations.complete(&generation_of(&ask, &params)).await;
        assert_eq!(kv(&answer), "mismatch");
        assert_ne!(text(&answer), text(&contexts.complete(&prompts[0]).await));
        generations
            .expect_metrics(&[("kv_mismatches_total", (count + 1) as f64)])
            .await;
    }
    contexts.eventually_metric("kv_leases", 0.0).await;
    for missing in ["ctx_request_id", "encoded_opaque_state", "request_type"] {
        let mut body = generation_of(&prompts[0], &params[0]);
        body["disaggregated_params"]
            .as_object_mut()
            .unwrap()
            .remove(missing);
        assert_eq!(
            generations.send(&body).await.0,
            StatusCode::BAD_REQUEST,
            "{missing}"
        );
    }
}

#[tokio::test]
async fn equal_context_ids_collide_unless_assigned() {
    let ((contexts, generations), (others, alone)) = tokio::join!(pair(), pair());
    let generations = Arc::new(generations);
    let prompts = [ids(0..70, 4), ids(100..170, 4)];
    for (round, given) in [None, Some([1 << 41, (1 << 41) + 1])]
        .into_iter()
        .enumerate()
    {
        let mut params = Vec::new();
        let salted = prompts
            .each_ref()
            .map(|ask| with(ask, &json!({"cache_salt": format!("{round}")})));
        for (at, engine) in [&contexts, &others].into_iter().enumerate() {
            let answer = context(engine, &salted[at], given.map(|given| given[at])).await;
            params.push(answer["choices"][0]["disaggregated_params"].clone());
        }
        let is_same = given.is_none();
        let ids = [&params[0]["ctx_request_id"], &params[1]["ctx_request_id"]];
        assert_eq!(ids[0] == ids[1], is_same);
        // Both requests run at the same time.
        generations
            .misbehave(json!({"hold_first_tokens": true}))
            .await;
        let before = generations.metric("kv_transfers_total").await;
        let send = |at: usize| {
            let generations = generations.clone();
            let body = generation_of(&salted[at], &params[at]);
            tokio::spawn(async move { generations.complete(&body).await })
        };
        let first = send(0);
        generations
            .eventually_metric("kv_transfers_total", before + 1.0)
            .await;
        let second = send(1);
        let (metric, value) = if is_same {
            ("kv_mismatches_total", 1.0)
        } else {
            ("kv_transfers_total", before + 2.0)
        };
        generations.eventually_metric(metric, value).await;
        generations
            .misbehave(json!({"hold_first_tokens": false}))
            .await;
        let first = first.await.unwrap();
        let second = second.await.unwrap();
        assert_eq!(
            (kv(&first), text(&first)),
            ("fetched", text(&alone.complete(&prompts[0]).await))
        );
        assert_eq!(kv(&second), if is_same { "mismatch" } else { "fetched" });
        assert_eq!(
            text(&second) == text(&alone.complete(&prompts[1]).await),
            !is_same
        );
    }
    generations
        .expect_metrics(&[("kv_mismatches_total", 1.0)])
        .await;
    // The context of `others` whose id collided in the first round is never fetched.
    others.expect_metrics(&[("kv_leases", 1.0)]).await;
    contexts.eventually_metric("kv_leases", 0.0).await;
}

#[tokio::test]
async fn one_sided_context_id_finds_nothing() {
    let (contexts, generations) = pair().await;
    for (given, requested) in [(Some(71), 72), (None, 73)] {
        let ask = ids(0..70, 4);
        let mut params =
            context(&contexts, &ask, given).await["choices"][0]["disaggregated_params"].take();
        params["disagg_request_id"] = json!(requested);
        let (status, answer) = generations.send(&generation_of(&ask, &params)).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{answer}");
        assert!(
            answer["error"]["message"]
                .as_str()
                .unwrap()
                .contains("no such request"),
            "{answer}"
        );
    }
    contexts.expect_metrics(&[("kv_leases", 2.0)]).await;
    generations
        .expect_metrics(&[("kv_mismatches_total", 0.0), ("kv_transfers_total", 0.0)])
        .await;
}

#[tokio::test]
async fn one_token_response_needs_no_generation_engine() {
    let (contexts, generations) = pair().await;
    contexts.misbehave(json!({"stop_prefills": true})).await;
    let ask = ids(0..70, 4);
    let answer = context(&contexts, &ask, 5).await;
    assert_eq!(
        (&answer["choices"][0]["finish_reason"], kv(&answer)),
        (&json!("stop"), "computed")
    );
    contexts.expect_metrics(&[("kv_leases", 0.0)]).await;
    let params = &answer["choices"][0]["disaggregated_params"];
    let (status, answer) = generations.send(&generation_of(&ask, params)).await;
    assert_eq!(
        status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "nothing is kept for it: {answer}"
    );
}
