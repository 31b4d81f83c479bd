//! TensorRT-LLM's way: as vLLM's, with the parameters in the choice.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::bed::{Engine, ids, text, with};

async fn pair() -> (Engine, Engine) {
    let flags = ["--disaggregation", "trtllm", "--kv-load-timeout", "200ms"];
    tokio::join!(Engine::start(&flags), Engine::start(&flags))
}

async fn context(engine: &Engine, body: &Value) -> Value {
    let params = json!({"disaggregated_params": {"request_type": "context_only", "disagg_request_id": 4711}});
    engine.complete(&with(body, &params)).await
}

fn generation_of(body: &Value, params: &Value) -> Value {
    let params = with(params, &json!({"request_type": "generation_only"}));
    with(body, &json!({"disaggregated_params": params}))
}

#[tokio::test]
async fn a_context_computed_elsewhere_is_continued_as_if_computed_here() {
    let (contexts, generations) = pair().await;
    let ask = ids(100..200, 12);
    let expected = generations.complete(&ask).await;
    assert!(expected["choices"][0].get("disaggregated_params").is_none());
    let other = ids(300..400, 12);
    let answer = context(&contexts, &other).await;
    assert_eq!(answer["usage"]["completion_tokens"], 1, "whatever max_tokens says");
    assert_eq!(answer["prompt_token_ids"], other["prompt"]);
    let params = &answer["choices"][0]["disaggregated_params"];
    assert_eq!((&params["request_type"], &params["disagg_request_id"]), (&json!("context_only"), &json!(4711)));
    assert!(params["ctx_request_id"].is_u64() && params["encoded_opaque_state"].is_string(), "{params}");
    contexts.expect_metrics(&[("kv_leases", 1.0)]).await;
    let continued = generations.complete(&generation_of(&other, params)).await;
    assert!(text(&continued).starts_with(text(&answer)), "the first token is the context's");
    assert_eq!(text(&continued), text(&contexts.complete(&other).await));
    assert_ne!(text(&continued), text(&expected));
    generations.expect_metrics(&[("kv_transfers_total", 1.0), ("kv_mismatches_total", 0.0)]).await;
    contexts.eventually_metric("kv_leases", 0.0).await;
}

#[tokio::test]
async fn mixed_up_contexts_are_counted_and_incomplete_ones_refused() {
    let (contexts, generations) = pair().await;
    let asks = [ids(0..70, 4), ids(100..170, 4), ids(0..70, 4)];
    let mut params = Vec::new();
    for ask in &asks {
        params.push(context(&contexts, ask).await["choices"][0]["disaggregated_params"].take());
    }
    // The whole of another, the number of another with the own state, the first token of another.
    let number = with(&params[0], &json!({"ctx_request_id": params[2]["ctx_request_id"]}));
    let token = with(&params[0], &json!({"first_gen_tokens": params[1]["first_gen_tokens"]}));
    for (count, params) in [params[1].clone(), number, token].into_iter().enumerate() {
        let (status, answer) = generations.ask(&generation_of(&asks[0], &params)).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{answer}");
        generations.expect_metrics(&[("kv_mismatches_total", (count + 1) as f64)]).await;
    }
    contexts.eventually_metric("kv_leases", 0.0).await;
    for missing in ["ctx_request_id", "encoded_opaque_state", "request_type"] {
        let mut body = generation_of(&asks[0], &params[0]);
        body["disaggregated_params"].as_object_mut().unwrap().remove(missing);
        assert_eq!(generations.ask(&body).await.0, StatusCode::BAD_REQUEST, "{missing}");
    }
}
