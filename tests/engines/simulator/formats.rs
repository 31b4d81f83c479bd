//! Request and response formats of the simulator.

use super::*;

/// Returns the documents of an event stream before `[DONE]`.
fn stream_chunks(stream: &str) -> Vec<Value> {
    let events: Vec<_> = stream
        .split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").unwrap())
        .collect();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    chunks
        .iter()
        .map(|chunk| serde_json::from_str(chunk).unwrap())
        .collect()
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn stream_matches_document_and_ends_with_usage() {
    let engine = simulator(&[]).await;
    let mut ask = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5});
    engine.post("/v1/chat/completions", ask.clone()).await;
    let document = engine.post_json("/v1/chat/completions", ask.clone()).await;
    assert_eq!(cached_tokens(&document), 16);
    for include_usage in [true, false] {
        ask["stream"] = json!(true);
        ask["stream_options"] = json!({"include_usage": include_usage});
        let response = engine.post("/v1/chat/completions", ask.clone()).await;
        assert!(
            response.headers()["content-type"]
                .to_str()
                .unwrap()
                .starts_with("text/event-stream")
        );
        let mut chunks = stream_chunks(&response.text().await.unwrap());
        if include_usage {
            let last = chunks.pop().unwrap();
            assert_eq!(
                (&last["choices"], &last["usage"]),
                (&json!([]), &document["usage"])
            );
        }
        assert_eq!(
            chunks[0]["choices"][0]["delta"],
            json!({"role": "assistant", "content": ""})
        );
        let streamed_content: String = chunks
            .iter()
            .map(|c| c["choices"][0]["delta"]["content"].as_str().unwrap())
            .collect();
        assert_eq!(
            streamed_content,
            document["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
        );
        let reasons: Vec<_> = chunks
            .iter()
            .map(|chunk| chunk["choices"][0]["finish_reason"].clone())
            .collect();
        let (last, others) = reasons.split_last().unwrap();
        assert_eq!(*last, "length");
        assert_eq!(others, [const { Value::Null }; 5]);
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn completions_accept_all_valid_prompt_formats() {
    let engine = simulator(&["--num-blocks", "8", "--lora", "lora-x"]).await;
    let both = engine
        .complete(json!({"prompt": ["one", "two"], "n": 2, "max_tokens": 2}))
        .await;
    assert_eq!(
        (
            both["choices"].as_array().unwrap().len(),
            &both["usage"]["completion_tokens"]
        ),
        (4, &json!(8))
    );
    let lists = engine
        .complete(json!({"prompt": [[1, 2, 3], [4]], "max_tokens": 1}))
        .await;
    assert_eq!(lists["usage"]["prompt_tokens"], 4);
    let plain = engine.complete(ids(0..40, 1)).await;
    let salted = engine.complete(
        json!({"prompt": (0..40).collect::<Vec<_>>(), "max_tokens": 1, "cache_salt": "t"}),
    );
    assert_eq!(
        (cached_tokens(&plain), cached_tokens(&salted.await)),
        (0, 0)
    );
    let adapted =
        json!({"model": "lora-x", "prompt": (0..40).collect::<Vec<_>>(), "max_tokens": 1});
    assert_eq!(cached_tokens(&engine.complete(adapted.clone()).await), 0);
    assert_eq!(cached_tokens(&engine.complete(adapted).await), 32);
    for (body, status) in [
        (json!({"prompt": "x", "model": "nobody"}), 404),
        (json!({"prompt": "x", "max_tokens": 0}), 400),
        (ids(0..127, 2), 400),
        (json!({"prompt": {"not": "a prompt"}}), 400),
    ] {
        let response = engine.post("/v1/completions", body.clone()).await;
        assert_eq!(response.status().as_u16(), status, "{body}");
        assert_eq!(
            response.json::<Value>().await.unwrap()["error"]["code"],
            status
        );
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn token_endpoints_match_vllm_formats() {
    let engine = with_events(&["--model", "m"]).await;
    let chat = json!({"model": "m", "max_tokens": 1, "cache_salt": "s", "return_token_ids": true,
        "messages": [{"role": "user", "content": "Hello, what is new?"}]});
    let answer = engine.post_json("/v1/chat/completions", chat.clone()).await;
    let tokens = answer["prompt_token_ids"].clone();
    let tokenized = engine.post_json("/tokenize", chat.clone()).await;
    assert_eq!(
        (&tokenized["tokens"], tokenized["count"].as_u64()),
        (&tokens, Some(tokens.as_array().unwrap().len() as u64))
    );
    let rendered = engine
        .post_json("/v1/chat/completions/render", chat.clone())
        .await;
    assert_eq!(
        (&rendered["token_ids"], &rendered["cache_salt"]),
        (&tokens, &json!("s"))
    );
    let body = json!({"prompt": ["one", "two three"], "truncate_prompt_tokens": 1});
    let lists = engine.post_json("/v1/completions/render", body).await;
    assert_eq!(
        lists
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["token_ids"].as_array().unwrap().len())
            .max(),
        Some(1)
    );
    let tokenized = engine
        .post_json(
            "/tokenize",
            json!({"prompt": "two three", "truncate_prompt_tokens": 1}),
        )
        .await;
    assert_eq!(tokenized["count"], 2, "/tokenize ignores truncation");
    for (path, body) in [
        ("/tokenize", json!([])),
        ("/tokenize", json!({})),
        ("/tokenize", json!({"prompt": [1]})),
    ] {
        assert_eq!(
            engine.post(path, body.clone()).await.status(),
            StatusCode::BAD_REQUEST,
            "{path} {body}"
        );
    }
}

/// Returns the documents of a stream whose events have names, without the names.
fn named_events(stream: &str) -> Vec<Value> {
    let events = stream.split_terminator("\n\n").filter_map(|event| {
        let (name, data) = event.strip_prefix("event: ")?.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name);
        Some(data)
    });
    events.collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect()
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn responses_stream_has_event_order_of_vllm() {
    let engine = simulator(&[]).await;
    let mut ask = json!({"model": "sim", "max_output_tokens": 2, "instructions": "Weigh every word. ".repeat(40),
        "input": [{"role": "user", "content": "What is 2+2?"}]});
    let whole = engine.post_json("/v1/responses", ask.clone()).await;
    assert_eq!(
        (&whole["status"], &whole["usage"]["output_tokens"]),
        (&json!("incomplete"), &json!(2))
    );
    let input = whole["usage"]["input_tokens"].as_u64().unwrap();
    ask["stream"] = json!(true);
    let text = engine
        .post("/v1/responses", ask)
        .await
        .text()
        .await
        .unwrap();
    let events = named_events(&text);
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at);
    }
    assert_eq!(events[0]["response"]["usage"], Value::Null);
    let last = &events[9]["response"];
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!(last["usage"]["input_tokens"], input);
    assert_eq!(
        last["usage"]["input_tokens_details"]["cached_tokens"],
        (input - 1) / 16 * 16
    );
    assert!(!text.contains("[DONE]"));
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn messages_stream_has_event_order_of_vllm() {
    let engine = simulator(&[]).await;
    let mut ask = json!({"model": "sim", "max_tokens": 2, "system": "Be brief.",
        "messages": [{"role": "user", "content": "What is 2+2?"}]});
    let whole = engine.post_json("/v1/messages", ask.clone()).await;
    assert_eq!(
        (&whole["type"], &whole["stop_reason"]),
        (&json!("message"), &json!("max_tokens"))
    );
    ask["stream"] = json!(true);
    let text = engine
        .post("/v1/messages", ask.clone())
        .await
        .text()
        .await
        .unwrap();
    let events = named_events(&text);
    let order = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(types(&events), order);
    let input = &whole["usage"]["input_tokens"];
    assert_eq!(
        events[0]["message"]["usage"],
        json!({"input_tokens": input, "output_tokens": 0})
    );
    assert_eq!(
        events[5]["usage"],
        json!({"input_tokens": input, "output_tokens": 2})
    );
    let patch = json!({"early_stream_events": true});
    let patched = engine.post("/sim/misbehave", patch).await;
    assert_eq!(patched.status(), StatusCode::OK);
    let text = engine.post("/v1/messages", ask).await.text().await.unwrap();
    let early: Vec<_> = [order[0], "ping"]
        .into_iter()
        .chain(order[1..].iter().copied())
        .collect();
    assert_eq!(types(&named_events(&text)), early);
}
