use serde_json::{Value, json};

use super::*;

const CAPTURED_PREFILL: &[u8] = include_bytes!("../../../../../tests/data/prefill/vllm-nixl.json");

/// Returns one step of the captured handoff: request and response.
fn step(at: usize) -> (Value, Value) {
    let captured: Value = serde_json::from_slice(CAPTURED_PREFILL).unwrap();
    let step = &captured["log"][at];
    (step["request"].clone(), step["response"].clone())
}

fn bytes(value: &Value) -> Bytes {
    value.to_string().into()
}

/// Returns the prefill worker's response to this request.
fn response_to(handoff: &KvHandoff, answer: &[u8]) -> PrefillResponse {
    let (_, into_response) = handoff.prefill_body().unwrap().into_parts();
    into_response(Bytes::copy_from_slice(answer))
}

fn decode(handoff: KvHandoff, answer: &[u8]) -> Result<Bytes, HandoffError> {
    let response = response_to(&handoff, answer);
    handoff.decode_body(response)
}

fn prefill_request(handoff: &KvHandoff) -> Value {
    serde_json::from_slice(&handoff.prefill_body().unwrap().into_parts().0).unwrap()
}

/// Returns the client's request that led to the captured bodies.
fn original() -> Value {
    let mut body = step(1).0;
    body.as_object_mut()
        .unwrap()
        .remove("kv_transfer_params")
        .unwrap();
    body
}

#[test]
fn bodies_of_both_workers_equal_captured_ones() {
    let unknown = json!({"big": 12_345_678_901_234_567_890_u64});
    let mut client = original();
    client["some_engines_own"] = unknown.clone();
    let handoff = |client: &Value| {
        KvHandoff::new(
            Some(ApiKind::ChatCompletions),
            KvTransferProtocol::Vllm,
            &bytes(client),
        )
        .unwrap()
    };
    let ((mut to_prefill, answer), (mut to_decode, _)) = (step(0), step(1));
    to_decode["some_engines_own"] = unknown.clone();
    let body: Value =
        serde_json::from_slice(&decode(handoff(&client), &bytes(&answer)).unwrap()).unwrap();
    assert_eq!(body, to_decode);

    // In the capture, only the request to the decode worker asks for token ids.
    client
        .as_object_mut()
        .unwrap()
        .remove("return_token_ids")
        .unwrap();
    to_prefill["some_engines_own"] = unknown;
    assert_eq!(prefill_request(&handoff(&client)), to_prefill);
}

#[test]
fn transfer_params_are_passed_byte_for_byte() {
    let body = Bytes::from_static(br#"{"prompt":"x", "seed":1.50}"#);
    let handoff =
        KvHandoff::new(Some(ApiKind::Completions), KvTransferProtocol::Vllm, &body).unwrap();
    let answer =
        br#"{"id":"a","kv_transfer_params" : {"b":1.0e2, "new":[18446744073709551616]} ,"x":{"kv_transfer_params":1}}"#;
    let decode = decode(handoff, answer).unwrap();
    let expected = r#"{"kv_transfer_params":{"b":1.0e2, "new":[18446744073709551616]},"prompt":"x", "seed":1.50}"#;
    assert_eq!(std::str::from_utf8(&decode).unwrap(), expected);
}

#[test]
fn prefill_body_requests_one_token_unstreamed() {
    let body = json!({"prompt": [1, 2], "max_tokens": 900, "min_tokens": 5, "stream": true,
        "stream_options": {"include_usage": true}, "kv_transfer_params": {"remote_host": "elsewhere"}});
    let handoff = KvHandoff::new(
        Some(ApiKind::Completions),
        KvTransferProtocol::Vllm,
        &bytes(&body),
    )
    .unwrap();
    let request = prefill_request(&handoff);
    assert_eq!(
        (
            &request["max_tokens"],
            &request["min_tokens"],
            &request["stream"]
        ),
        (&json!(1), &json!(0), &json!(false))
    );
    assert_eq!(
        (
            &request["stream_options"],
            request.get("max_completion_tokens")
        ),
        (&Value::Null, None)
    );
    assert_eq!(request["kv_transfer_params"]["remote_host"], Value::Null);
    assert_eq!(
        request["kv_transfer_params"]["do_remote_decode"],
        json!(true)
    );
}

#[test]
fn response_without_transfer_params_is_error() {
    let new = |protocol| {
        KvHandoff::new(
            Some(ApiKind::Completions),
            protocol,
            &Bytes::from_static(b"{\"prompt\":\"x\"}"),
        )
        .unwrap()
    };
    use HandoffError::{NoParams, Unreadable};
    for (protocol, answer, expected) in [
        (KvTransferProtocol::Vllm, json!({}), NoParams),
        (
            KvTransferProtocol::Vllm,
            json!({"kv_transfer_params": null}),
            NoParams,
        ),
        (
            KvTransferProtocol::Vllm,
            json!({"kv_transfer_params": [1]}),
            Unreadable,
        ),
        (KvTransferProtocol::Vllm, json!([]), Unreadable),
        (
            KvTransferProtocol::Trtllm,
            json!({"choices": [{}]}),
            NoParams,
        ),
        (
            KvTransferProtocol::Trtllm,
            json!({"choices": [{"disaggregated_params": {"ctx_request_id": null}}]}),
            NoParams,
        ),
        (
            KvTransferProtocol::Trtllm,
            json!({"choices": [{"finish_reason": "stop", "disaggregated_params": {"ctx_request_id": 1}}]}),
            NoParams,
        ),
        (
            KvTransferProtocol::Trtllm,
            json!({"choices": []}),
            Unreadable,
        ),
        (
            KvTransferProtocol::Trtllm,
            json!({"error": "x"}),
            Unreadable,
        ),
    ] {
        assert_eq!(
            decode(new(protocol), &bytes(&answer)),
            Err(expected),
            "{protocol:?} {answer}"
        );
    }
    let twice = br#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"a":2}}"#;
    assert_eq!(
        decode(new(KvTransferProtocol::Vllm), twice),
        Err(Unreadable),
        "a repeated field is ambiguous"
    );
}

#[test]
fn tensorrt_llm_params_are_converted_for_generation() {
    let body = Bytes::from_static(br#"{"prompt":"x","max_tokens":9}"#);
    let handoff = KvHandoff::new(
        Some(ApiKind::Completions),
        KvTransferProtocol::Trtllm,
        &body,
    )
    .unwrap();
    let request = prefill_request(&handoff);
    assert_eq!(
        request["disaggregated_params"],
        json!({"request_type": "context_only"})
    );
    let answer = br#"{"choices":[{"index":0,"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":18446744073709551615,"opaque_state":"AAE=" }}]}"#;
    let decode = decode(handoff, answer).unwrap();
    let expected = r#"{"disaggregated_params":{"request_type":"generation_only","first_gen_tokens":[5],"ctx_request_id":18446744073709551615,"opaque_state":"AAE=" },"prompt":"x","max_tokens":9}"#;
    assert_eq!(std::str::from_utf8(&decode).unwrap(), expected);
}

#[test]
fn unsplittable_requests_are_rejected() {
    let chat = Some(ApiKind::ChatCompletions);
    let text = Some(ApiKind::Completions);
    let several = Some(SplitError::MultipleChoices);
    let reported = Some(SplitError::ReportsPrompt);
    for (api, body, expected) in [
        (chat, json!({"n": 2}), several),
        (
            chat,
            json!({"n": 1, "use_beam_search": false, "prompt_logprobs": null}),
            None,
        ),
        (chat, json!({"n": null}), None),
        (text, json!({"best_of": 3}), several),
        (text, json!({"use_beam_search": true}), several),
        (text, json!({"prompt": ["a"]}), None),
        (text, json!({"prompt": ["a", "b"]}), several),
        (text, json!({"prompt": [1, 2, 3]}), None),
        (text, json!({"prompt": [[1, 2], [3]]}), several),
        (text, json!({"prompt": [[1, 2]]}), None),
        (text, json!({"echo": true}), reported),
        (text, json!({"prompt_logprobs": 0}), reported),
        (text, json!({"prompt": "a", "prompt_embeds": "b"}), several),
        (
            text,
            json!({"truncate_prompt_tokens": -1}),
            Some(SplitError::TruncatedPrompt),
        ),
        (
            text,
            json!({"truncate_prompt_tokens": 5, "prompt_embeds": null}),
            None,
        ),
        (Some(ApiKind::Responses), json!({}), Some(SplitError::Api)),
        (None, json!({}), Some(SplitError::Api)),
        (text, json!("x"), Some(SplitError::Body)),
    ] {
        assert_eq!(
            KvHandoff::new(api, KvTransferProtocol::Vllm, &bytes(&body)).err(),
            expected,
            "{body}"
        );
    }
}

#[test]
fn response_of_other_request_is_rejected() {
    let new = || {
        KvHandoff::new(
            Some(ApiKind::Completions),
            KvTransferProtocol::Vllm,
            &Bytes::from_static(b"{\"prompt\":\"x\"}"),
        )
        .unwrap()
    };
    let answer = br#"{"kv_transfer_params":{"remote_request_id":"theirs"}}"#;
    let one = new();
    let other = new();
    let response = response_to(&other, answer);
    assert_eq!(one.decode_body(response), Err(HandoffError::OtherRequest));
    let (_, into_response) = PrefillBody::without_handoff(Bytes::new()).into_parts();
    let unrelated = into_response(Bytes::from_static(answer));
    assert_eq!(
        other.decode_body(unrelated),
        Err(HandoffError::OtherRequest)
    );
    assert!(decode(new(), answer).is_ok());
}

#[test]
fn kv_fields_of_clients_are_removed() {
    let changed = |to: &'static str| StrippedBody::Changed(Bytes::from_static(to.as_bytes()));
    let many = |count: usize| {
        format!(
            "{{{}\"kv_transfer_params\":{{}}}}",
            "\"kv_transfer_params\":null,".repeat(count)
        )
    };
    for (body, expected) in [
        (
            r#"{"a":1.50,"kv_transfer_params":{"remote_request_id":"x"},"bootstrap_room":7}"#,
            changed(r#"{"a":1.50,"kv_transfer_params":null,"bootstrap_room":null}"#),
        ),
        (
            r#"{"kv_tr\u0061nsfer_params":{}}"#,
            changed(r#"{"kv_tr\u0061nsfer_params":null}"#),
        ),
        (
            r#"{"vllm_xargs":{"kv_transfer_params":"x"}}"#,
            changed(r#"{"vllm_xargs":null}"#),
        ),
        (
            r#"{"vllm_xargs":{"a":1},"routed_dp_rank":3}"#,
            changed(r#"{"vllm_xargs":{"a":1},"routed_dp_rank":null}"#),
        ),
        (r#"{"a":1}"#, StrippedBody::Unchanged),
        (
            r#"{"kv_transfer_params":null,"vllm_xargs":{"kv":1}}"#,
            StrippedBody::Unchanged,
        ),
        ("no object", StrippedBody::Unreadable),
        (
            "\u{feff}{\"kv_transfer_params\":{}}",
            changed(r#"{"kv_transfer_params":null}"#),
        ),
        (&many(16), StrippedBody::Unreadable),
        (&many(1000), StrippedBody::Unreadable),
    ] {
        assert_eq!(strip_kv_fields(body.as_bytes()), expected, "{body:.80}");
    }
    let utf16: Vec<u8> =
        r#"{"kv_transfer_params":{}}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(
        strip_kv_fields(&utf16),
        changed(r#"{"kv_transfer_params":null}"#)
    );
    let StrippedBody::Changed(body) = strip_kv_fields(many(5).as_bytes()) else {
        panic!("a repeated field is ambiguous")
    };
    assert_eq!(
        json_edit::find_values(&body, &[KV_TRANSFER]).unwrap(),
        [(0, &b"null"[..]); 6]
    );
}

#[test]
fn engine_path_depends_on_api() {
    for (api, expected) in [
        (ApiKind::ChatCompletions, "/v1/chat/completions"),
        (ApiKind::Completions, "/v1/completions"),
        (ApiKind::SglangGenerate, "/generate"),
    ] {
        assert_eq!(engine_path(api), expected);
        assert_eq!(ApiKind::from_path(expected), Some(api));
    }
}

#[test]
fn prefill_response_of_vllm_reports_its_own_cache() {
    for (at, cached) in [(0, 0), (3, 416)] {
        let usage = warmroute_tokens::openai::usage::TokenUsage::from_document(&bytes(&step(at).1))
            .unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.cached_tokens),
            (419, Some(cached)),
            "step {at}"
        );
    }
}
