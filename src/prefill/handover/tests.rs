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

/// The client's request, of which the captured bodies are made.
fn original() -> Value {
    let mut body = step(1).0;
    body.as_object_mut().unwrap().remove("kv_transfer_params").unwrap();
    body
}

#[test]
fn the_captured_bodies_of_both_workers_come_out_field_by_field() {
    let unknown = json!({"big": 12_345_678_901_234_567_890_u64});
    let mut client = original();
    client["some_engines_own"] = unknown.clone();
    let handing = |client: &Value| Handing::new(Some(Api::ChatCompletions), Protocol::Vllm, &bytes(client)).unwrap();
    let ((mut to_prefill, answer), (mut to_decode, _)) = (step(0), step(1));
    to_decode["some_engines_own"] = unknown.clone();
    let decode: Value = serde_json::from_slice(&handing(&client).decode_body(&bytes(&answer)).unwrap()).unwrap();
    assert_eq!(decode, to_decode);

    // When it was captured only the decode worker was asked for the ids of tokens.
    client.as_object_mut().unwrap().remove("return_token_ids").unwrap();
    to_prefill["some_engines_own"] = unknown;
    let asked: Value = serde_json::from_slice(&handing(&client).prefill_body().unwrap()).unwrap();
    assert_eq!(asked, to_prefill);
}

#[test]
fn what_is_handed_over_stays_as_the_engine_wrote_it() {
    let body = Bytes::from_static(br#"{"prompt":"x", "seed":1.50}"#);
    let handing = Handing::new(Some(Api::Completions), Protocol::Vllm, &body).unwrap();
    let answer =
        br#"{"id":"a","kv_transfer_params" : {"b":1.0e2, "new":[18446744073709551616]} ,"x":{"kv_transfer_params":1}}"#;
    let decode = handing.decode_body(answer).unwrap();
    let expected = r#"{"kv_transfer_params":{"b":1.0e2, "new":[18446744073709551616]},"prompt":"x", "seed":1.50}"#;
    assert_eq!(std::str::from_utf8(&decode).unwrap(), expected);
}

#[test]
fn a_prefill_is_one_token_in_one_piece_whatever_the_client_wants() {
    let body = json!({"prompt": [1, 2], "max_tokens": 900, "min_tokens": 5, "stream": true,
        "stream_options": {"include_usage": true}, "kv_transfer_params": {"remote_host": "elsewhere"}});
    let handing = Handing::new(Some(Api::Completions), Protocol::Vllm, &bytes(&body)).unwrap();
    let asked: Value = serde_json::from_slice(&handing.prefill_body().unwrap()).unwrap();
    assert_eq!((&asked["max_tokens"], &asked["min_tokens"], &asked["stream"]), (&json!(1), &json!(0), &json!(false)));
    assert_eq!((&asked["stream_options"], asked.get("max_completion_tokens")), (&Value::Null, None));
    assert_eq!(asked["kv_transfer_params"]["remote_host"], Value::Null);
    assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], json!(true));
}

#[test]
fn an_answer_without_anything_to_take_over_is_none() {
    let new =
        |protocol| Handing::new(Some(Api::Completions), protocol, &Bytes::from_static(b"{\"prompt\":\"x\"}")).unwrap();
    use NotHandedOver::{Nothing, Unreadable};
    for (protocol, answer, expected) in [
        (Protocol::Vllm, json!({}), Nothing),
        (Protocol::Vllm, json!({"kv_transfer_params": null}), Nothing),
        (Protocol::Vllm, json!({"kv_transfer_params": [1]}), Unreadable),
        (Protocol::Vllm, json!([]), Unreadable),
        (Protocol::Trtllm, json!({"choices": [{}]}), Nothing),
        (Protocol::Trtllm, json!({"choices": [{"disaggregated_params": {"ctx_request_id": null}}]}), Nothing),
        (Protocol::Trtllm, json!({"choices": []}), Unreadable),
        (Protocol::Trtllm, json!({"error": "x"}), Unreadable),
    ] {
        assert_eq!(new(protocol).decode_body(&bytes(&answer)), Err(expected), "{protocol:?} {answer}");
    }
    let twice = br#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"a":2}}"#;
    assert_eq!(new(Protocol::Vllm).decode_body(twice), Err(Unreadable), "which is meant?");
}

#[test]
fn tensorrt_llms_parameters_come_from_the_choice_and_go_on_as_those_of_the_generation() {
    let body = Bytes::from_static(br#"{"prompt":"x","max_tokens":9}"#);
    let handing = Handing::new(Some(Api::Completions), Protocol::Trtllm, &body).unwrap();
    let asked: Value = serde_json::from_slice(&handing.prefill_body().unwrap()).unwrap();
    assert_eq!(asked["disaggregated_params"], json!({"request_type": "context_only"}));
    let answer = br#"{"choices":[{"index":0,"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":18446744073709551615,"opaque_state":"AAE=" }}]}"#;
    let decode = handing.decode_body(answer).unwrap();
    let expected = r#"{"disaggregated_params":{"request_type":"generation_only","first_gen_tokens":[5],"ctx_request_id":18446744073709551615,"opaque_state":"AAE=" },"prompt":"x","max_tokens":9}"#;
    assert_eq!(std::str::from_utf8(&decode).unwrap(), expected);
}

#[test]
fn what_one_prefill_cannot_serve_is_left_together() {
    for (api, body, unfit) in [
        (Some(Api::ChatCompletions), json!({"n": 2}), Some(Unfit::Several)),
        (Some(Api::ChatCompletions), json!({"n": 1, "use_beam_search": false, "prompt_logprobs": null}), None),
        (Some(Api::ChatCompletions), json!({"n": null}), None),
        (Some(Api::Completions), json!({"best_of": 3}), Some(Unfit::Several)),
        (Some(Api::Completions), json!({"use_beam_search": true}), Some(Unfit::Several)),
        (Some(Api::Completions), json!({"prompt": ["a"]}), None),
        (Some(Api::Completions), json!({"prompt": ["a", "b"]}), Some(Unfit::Several)),
        (Some(Api::Completions), json!({"prompt": [1, 2, 3]}), None),
        (Some(Api::Completions), json!({"prompt": [[1, 2], [3]]}), Some(Unfit::Several)),
        (Some(Api::Completions), json!({"prompt": [[1, 2]]}), None),
        (Some(Api::Completions), json!({"echo": true}), Some(Unfit::TellsPrompt)),
        (Some(Api::Completions), json!({"prompt_logprobs": 0}), Some(Unfit::TellsPrompt)),
        (Some(Api::Responses), json!({}), Some(Unfit::Api)),
        (None, json!({}), Some(Unfit::Api)),
        (Some(Api::Completions), json!("x"), Some(Unfit::Body)),
    ] {
        assert_eq!(Handing::new(api, Protocol::Vllm, &bytes(&body)).err(), unfit, "{body}");
    }
}

#[test]
fn a_clients_word_on_whose_kv_to_take_is_taken_out() {
    let forged = br#"{"a":1.50,"kv_transfer_params":{"remote_request_id":"x"},"bootstrap_room":7}"#;
    let clean = without_forged(forged).unwrap();
    assert_eq!(&clean[..], br#"{"a":1.50,"kv_transfer_params":null,"bootstrap_room":null}"#);
    for honest in [&br#"{"a":1}"#[..], br#"{"kv_transfer_params":null}"#, b"no object"] {
        assert_eq!(without_forged(honest), None);
    }
}
