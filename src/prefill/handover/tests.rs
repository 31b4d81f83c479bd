use serde_json::{Value, json};

use super::*;

const P01: &[u8] = include_bytes!("../../../tests/data/prefill/p01-nixl-pd.json");

/// One step of the captured handover: what was asked and what was answered.
fn step(at: usize) -> (Value, Value) {
    let captured: Value = serde_json::from_slice(P01).unwrap();
    let step = &captured["log"][at];
    (step["request"].clone(), step["response"].clone())
}

fn bytes(value: &Value) -> Bytes {
    value.to_string().into()
}

/// What a prefill worker answers to this request.
fn answer_to(handing: &Handing, answer: &[u8]) -> HandedOver {
    handing
        .question()
        .unwrap()
        .send()
        .1
        .answered(Bytes::copy_from_slice(answer))
}

fn decode(handing: Handing, answer: &[u8]) -> Result<Bytes, NotHandedOver> {
    let handed = answer_to(&handing, answer);
    handing.decode_body(handed)
}

fn asked(handing: &Handing) -> Value {
    serde_json::from_slice(&handing.question().unwrap().send().0).unwrap()
}

/// The client's request, of which the captured bodies are made.
fn original() -> Value {
    let mut body = step(1).0;
    body.as_object_mut()
        .unwrap()
        .remove("kv_transfer_params")
        .unwrap();
    body
}

#[test]
fn the_captured_bodies_of_both_workers_come_out_field_by_field() {
    let unknown = json!({"big": 12_345_678_901_234_567_890_u64});
    let mut client = original();
    client["some_engines_own"] = unknown.clone();
    let handing = |client: &Value| {
        Handing::new(Some(Api::ChatCompletions), Protocol::Vllm, &bytes(client)).unwrap()
    };
    let ((mut to_prefill, answer), (mut to_decode, _)) = (step(0), step(1));
    to_decode["some_engines_own"] = unknown.clone();
    let body: Value =
        serde_json::from_slice(&decode(handing(&client), &bytes(&answer)).unwrap()).unwrap();
    assert_eq!(body, to_decode);

    // When it was captured only the decode worker was asked for the ids of tokens.
    client
        .as_object_mut()
        .unwrap()
        .remove("return_token_ids")
        .unwrap();
    to_prefill["some_engines_own"] = unknown;
    assert_eq!(asked(&handing(&client)), to_prefill);
}

#[test]
fn what_is_handed_over_stays_as_the_engine_wrote_it() {
    let body = Bytes::from_static(br#"{"prompt":"x", "seed":1.50}"#);
    let handing = Handing::new(Some(Api::Completions), Protocol::Vllm, &body).unwrap();
    let answer =
        br#"{"id":"a","kv_transfer_params" : {"b":1.0e2, "new":[18446744073709551616]} ,"x":{"kv_transfer_params":1}}"#;
    let decode = decode(handing, answer).unwrap();
    let expected = r#"{"kv_transfer_params":{"b":1.0e2, "new":[18446744073709551616]},"prompt":"x", "seed":1.50}"#;
    assert_eq!(std::str::from_utf8(&decode).unwrap(), expected);
}

#[test]
fn a_prefill_is_one_token_in_one_piece_whatever_the_client_wants() {
    let body = json!({"prompt": [1, 2], "max_tokens": 900, "min_tokens": 5, "stream": true,
        "stream_options": {"include_usage": true}, "kv_transfer_params": {"remote_host": "elsewhere"}});
    let handing = Handing::new(Some(Api::Completions), Protocol::Vllm, &bytes(&body)).unwrap();
    let asked = asked(&handing);
    assert_eq!(
        (&asked["max_tokens"], &asked["min_tokens"], &asked["stream"]),
        (&json!(1), &json!(0), &json!(false))
    );
    assert_eq!(
        (&asked["stream_options"], asked.get("max_completion_tokens")),
        (&Value::Null, None)
    );
    assert_eq!(asked["kv_transfer_params"]["remote_host"], Value::Null);
    assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], json!(true));
}

#[test]
fn an_answer_without_anything_to_take_over_is_none() {
    let new = |protocol| {
        Handing::new(
            Some(Api::Completions),
            protocol,
            &Bytes::from_static(b"{\"prompt\":\"x\"}"),
        )
        .unwrap()
    };
    use NotHandedOver::{Nothing, Unreadable};
    for (protocol, answer, expected) in [
        (Protocol::Vllm, json!({}), Nothing),
        (Protocol::Vllm, json!({"kv_transfer_params": null}), Nothing),
        (
            Protocol::Vllm,
            json!({"kv_transfer_params": [1]}),
            Unreadable,
        ),
        (Protocol::Vllm, json!([]), Unreadable),
        (Protocol::Trtllm, json!({"choices": [{}]}), Nothing),
        (
            Protocol::Trtllm,
            json!({"choices": [{"disaggregated_params": {"ctx_request_id": null}}]}),
            Nothing,
        ),
        (
            Protocol::Trtllm,
            json!({"choices": [{"finish_reason": "stop", "disaggregated_params": {"ctx_request_id": 1}}]}),
            Nothing,
        ),
        (Protocol::Trtllm, json!({"choices": []}), Unreadable),
        (Protocol::Trtllm, json!({"error": "x"}), Unreadable),
    ] {
        assert_eq!(
            decode(new(protocol), &bytes(&answer)),
            Err(expected),
            "{protocol:?} {answer}"
        );
    }
    let twice = br#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"a":2}}"#;
    assert_eq!(
        decode(new(Protocol::Vllm), twice),
        Err(Unreadable),
        "which is meant?"
    );
}

#[test]
fn tensorrt_llms_parameters_come_from_the_choice_and_go_on_as_those_of_the_generation() {
    let body = Bytes::from_static(br#"{"prompt":"x","max_tokens":9}"#);
    let handing = Handing::new(Some(Api::Completions), Protocol::Trtllm, &body).unwrap();
    let asked = asked(&handing);
    assert_eq!(
        asked["disaggregated_params"],
        json!({"request_type": "context_only"})
    );
    let answer = br#"{"choices":[{"index":0,"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":18446744073709551615,"opaque_state":"AAE=" }}]}"#;
    let decode = decode(handing, answer).unwrap();
    let expected = r#"{"disaggregated_params":{"request_type":"generation_only","first_gen_tokens":[5],"ctx_request_id":18446744073709551615,"opaque_state":"AAE=" },"prompt":"x","max_tokens":9}"#;
    assert_eq!(std::str::from_utf8(&decode).unwrap(), expected);
}

#[test]
fn what_one_prefill_cannot_serve_is_left_together() {
    for (api, body, unfit) in [
        (
            Some(Api::ChatCompletions),
            json!({"n": 2}),
            Some(Unfit::Several),
        ),
        (
            Some(Api::ChatCompletions),
            json!({"n": 1, "use_beam_search": false, "prompt_logprobs": null}),
            None,
        ),
        (Some(Api::ChatCompletions), json!({"n": null}), None),
        (
            Some(Api::Completions),
            json!({"best_of": 3}),
            Some(Unfit::Several),
        ),
        (
            Some(Api::Completions),
            json!({"use_beam_search": true}),
            Some(Unfit::Several),
        ),
        (Some(Api::Completions), json!({"prompt": ["a"]}), None),
        (
            Some(Api::Completions),
            json!({"prompt": ["a", "b"]}),
            Some(Unfit::Several),
        ),
        (Some(Api::Completions), json!({"prompt": [1, 2, 3]}), None),
        (
            Some(Api::Completions),
            json!({"prompt": [[1, 2], [3]]}),
            Some(Unfit::Several),
        ),
        (Some(Api::Completions), json!({"prompt": [[1, 2]]}), None),
        (
            Some(Api::Completions),
            json!({"echo": true}),
            Some(Unfit::TellsPrompt),
        ),
        (
            Some(Api::Completions),
            json!({"prompt_logprobs": 0}),
            Some(Unfit::TellsPrompt),
        ),
        (
            Some(Api::Completions),
            json!({"prompt": "a", "prompt_embeds": "b"}),
            Some(Unfit::Several),
        ),
        (
            Some(Api::Completions),
            json!({"truncate_prompt_tokens": -1}),
            Some(Unfit::Cut),
        ),
        (
            Some(Api::Completions),
            json!({"truncate_prompt_tokens": 5, "prompt_embeds": null}),
            None,
        ),
        (Some(Api::Responses), json!({}), Some(Unfit::Api)),
        (None, json!({}), Some(Unfit::Api)),
        (Some(Api::Completions), json!("x"), Some(Unfit::Body)),
    ] {
        assert_eq!(
            Handing::new(api, Protocol::Vllm, &bytes(&body)).err(),
            unfit,
            "{body}"
        );
    }
}

#[test]
fn what_was_handed_over_for_one_request_is_taken_over_by_no_other() {
    let new = || {
        Handing::new(
            Some(Api::Completions),
            Protocol::Vllm,
            &Bytes::from_static(b"{\"prompt\":\"x\"}"),
        )
        .unwrap()
    };
    let answer = br#"{"kv_transfer_params":{"remote_request_id":"theirs"}}"#;
    let (one, other) = (new(), new());
    let handed = answer_to(&other, answer);
    assert_eq!(one.decode_body(handed), Err(NotHandedOver::Others));
    let strange = Question::alone(Bytes::new())
        .send()
        .1
        .answered(Bytes::from_static(answer));
    assert_eq!(other.decode_body(strange), Err(NotHandedOver::Others));
    assert!(decode(new(), answer).is_ok());
}

#[test]
fn a_clients_word_on_whose_kv_to_take_is_taken_out() {
    let changed = |to: &'static str| Cleaned::Changed(Bytes::from_static(to.as_bytes()));
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
        (r#"{"a":1}"#, Cleaned::Clean),
        (
            r#"{"kv_transfer_params":null,"vllm_xargs":{"kv":1}}"#,
            Cleaned::Clean,
        ),
        ("no object", Cleaned::Unreadable),
        ("\u{feff}{\"kv_transfer_params\":{}}", Cleaned::Unreadable),
        (&many(16), Cleaned::Unreadable),
        (&many(1000), Cleaned::Unreadable),
    ] {
        assert_eq!(clean(body.as_bytes()), expected, "{body:.80}");
    }
    let wide: Vec<u8> =
        r#"{"kv_transfer_params":{}}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(clean(&wide), Cleaned::Unreadable);
    let Cleaned::Changed(body) = clean(many(5).as_bytes()) else {
        panic!("it says it six times")
    };
    assert_eq!(
        edit::look(&body, &[KV_TRANSFER]).unwrap(),
        [(0, &b"null"[..]); 6]
    );
}

#[test]
fn engines_are_asked_at_their_own_paths() {
    for (api, expected) in [
        (Api::ChatCompletions, "/v1/chat/completions"),
        (Api::Completions, "/v1/completions"),
        (Api::SglangGenerate, "/generate"),
    ] {
        assert_eq!(path(api), expected);
        assert_eq!(Api::of_path(expected), Some(api));
    }
}

#[test]
fn prefill_response_of_vllm_reports_its_own_cache() {
    for (at, cached) in [(0, 0), (3, 416)] {
        let usage = crate::openai::usage::Usage::of_document(&bytes(&step(at).1)).unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.cached_tokens),
            (419, Some(cached)),
            "step {at}"
        );
    }
}
