//! Tokens of requests compared with those of vLLM 0.32 (`tests/data/tokens`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod apis;
mod classes;
mod further;
mod multimodal;
mod sglang;

use further::contents;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::media::{EngineModelName, ImageRule};
use warmroute_tokens::prompt::{
    Config, EncodeError, Encoder, EngineKind, LoadError, MediaConfig, ModelTraits,
    MultimodalPrompt, TokenBudget, TokenExactness, TransformersVersion,
};

static QWEN: LazyLock<Encoder> = LazyLock::new(quick);
static TINYLLAMA: LazyLock<Encoder> = LazyLock::new(|| load("tinyllama"));

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/models")
        .join(name)
}

fn files(name: &str) -> Config {
    Config {
        tokenizer: model(name).join("tokenizer.json.gz"),
        tokenizer_config: None,
        chat_template: None,
    }
}

fn load(name: &str) -> Encoder {
    Encoder::load(&files(name)).unwrap()
}

/// Returns an encoder with the fast path. [`load`] returns one that uses the library.
fn quick() -> Encoder {
    let encoder = load("qwen2.5");
    assert_eq!(encoder.enable_fast_path(), Ok(()));
    encoder
}

fn data<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tokens")
        .join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn encode(encoder: &Encoder, api: ApiKind, request: &Value) -> Result<Vec<Vec<u32>>, EncodeError> {
    let request = openai::parse(api, &serde_json::to_vec(request).unwrap()).unwrap();
    let encoded = encoder.encode(&request)?;
    assert_eq!(encoded.exactness, TokenExactness::Exact);
    Ok(encoded.prompts)
}

fn chat(encoder: &Encoder, request: &Value) -> Result<Vec<u32>, EncodeError> {
    encode(encoder, ApiKind::ChatCompletions, request).map(|mut prompts| prompts.remove(0))
}

fn completion(encoder: &Encoder, request: &Value) -> Result<Vec<Vec<u32>>, EncodeError> {
    encode(encoder, ApiKind::Completions, request)
}

#[derive(Deserialize)]
struct Case {
    case: String,
    request: Value,
    tokenize: Vec<u32>,
    /// Tokens of the engine, or its error response.
    engine: Value,
}

#[test]
fn captured_chat_requests_match_engine_tokens() {
    let cases: Vec<Case> = data("qwen2_5-cases.json");
    assert_eq!(cases.len(), 14);
    for case in cases {
        // The only case that the engine rejects lacks a server flag (`--enable-auto-tool-choice`).
        // With the flag, the engine reports these tokens.
        let engine = serde_json::from_value(case.engine).unwrap_or(case.tokenize);
        assert_eq!(chat(&QWEN, &case.request), Ok(engine), "{}", case.case);
    }
}

#[derive(Deserialize)]
struct Rendering {
    case: String,
    request: Value,
    text: String,
}

/// The templates of these two models are included without their tokenizers, which are large or not
/// redistributable. The engine's tokens were decoded to text.
#[test]
fn captured_requests_render_as_in_engine() {
    for name in ["llama3", "mistral"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/rendered");
        let tokenizer_config = Some(directory.join(name).join("tokenizer_config.json"));
        let encoder = Encoder::load(&Config {
            tokenizer_config,
            ..files("tinyllama")
        })
        .unwrap();
        let cases: Vec<Rendering> =
            serde_json::from_slice(&contents(&directory.join(format!("{name}.json.gz")))).unwrap();
        let mut equal = 0;
        let mut skipped = Vec::new();
        for Rendering {
            case,
            request,
            text,
        } in &cases
        {
            let request = openai::parse(
                ApiKind::ChatCompletions,
                &serde_json::to_vec(request).unwrap(),
            )
            .unwrap();
            match encoder.render(&request) {
                Ok(rendered) => {
                    assert_eq!(rendered.texts()[0], *text, "{name} {case}");
                    equal += 1;
                }
                Err(error) => skipped.push(format!("{case}: {error}")),
            }
        }
        assert!(
            equal > 100 && skipped.len() < 12,
            "{name}: {equal} equal, not rendered: {skipped:#?}"
        );
    }
}

#[derive(Deserialize)]
struct Step {
    scenario: String,
    path: String,
    request: Value,
    engine: Option<Vec<u32>>,
    images: bool,
    usage: Option<usize>,
}

#[test]
fn captured_scenarios_match_engine_tokens() {
    let steps: Vec<Step> = data("scenarios.json");
    assert!(steps.len() > 20);
    for step in steps {
        let api = ApiKind::from_path(&step.path).unwrap();
        let prompts = encode(&QWEN, api, &step.request);
        match (step.engine, step.usage) {
            _ if step.images => assert_eq!(
                prompts,
                Err(EncodeError::Multimodal("image_url".to_owned()))
            ),
            (Some(engine), _) => assert_eq!(prompts, Ok(vec![engine]), "{}", step.scenario),
            (None, usage) => {
                let tokens = prompts.unwrap().iter().map(Vec::len).sum::<usize>();
                assert_eq!(Some(tokens), usage, "{}", step.scenario);
            }
        }
    }
}

#[test]
fn completions_add_special_tokens_by_default() {
    for (prompt, tokens) in [
        (json!({"prompt": "hello"}), vec![1, 22172]),
        // No space is added before a word that follows a special token.
        (json!({"prompt": "<s>hello"}), vec![1, 1, 12199]),
        (
            json!({"prompt": "hello", "add_special_tokens": false}),
            vec![22172],
        ),
        (json!({"prompt": [15, 16]}), vec![15, 16]),
        (
            json!({"prompt": [15, 16], "add_special_tokens": true}),
            vec![15, 16],
        ),
    ] {
        let encoded = completion(&TINYLLAMA, &prompt).unwrap();
        assert_eq!(encoded, [tokens], "{prompt}");
    }
    assert_eq!(
        completion(&QWEN, &json!({"prompt": "hello"})),
        Ok(vec![vec![14990]])
    );
}

#[test]
fn tokenizers_follow_transformers_version() {
    let traits = ModelTraits {
        transformers: TransformersVersion::V4,
        ..ModelTraits::default()
    };
    let written = Encoder::load_with_traits(&files("tinyllama"), &traits).unwrap();
    for (text, rebuilt, written_ids) in [
        ("<s>hello", vec![1, 1, 12199], vec![1, 1, 22172]),
        (" hello", vec![1, 22172], vec![1, 29871, 22172]),
    ] {
        assert_eq!(
            completion(&TINYLLAMA, &json!({"prompt": text})),
            Ok(vec![rebuilt]),
            "{text:?}"
        );
        assert_eq!(
            completion(&written, &json!({"prompt": text})),
            Ok(vec![written_ids]),
            "{text:?}"
        );
    }
}

#[test]
fn chats_add_special_tokens_only_on_request() {
    let mut request = json!({"messages": [{"role": "user", "content": "hello"}]});
    let without = chat(&TINYLLAMA, &request).unwrap();
    request["add_special_tokens"] = json!(true);
    let with = chat(&TINYLLAMA, &request).unwrap();
    assert_ne!(without[0], 1);
    assert_eq!(with, [&[1], without.as_slice()].concat());
}

#[test]
fn one_encoder_serves_many_threads() {
    let expected = completion(&TINYLLAMA, &json!({"prompt": "hello"})).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(
                    completion(&TINYLLAMA, &json!({"prompt": "hello"})).as_ref(),
                    Ok(&expected)
                )
            });
        }
    });
}

#[test]
fn several_prompts_are_encoded_separately() {
    let texts = completion(&TINYLLAMA, &json!({"prompt": ["hello", "hello hello"]})).unwrap();
    assert_eq!(texts, [vec![1, 22172], vec![1, 22172, 22172]]);
    let tokens = completion(&TINYLLAMA, &json!({"prompt": [[1, 2], [3]]})).unwrap();
    assert_eq!(tokens, [vec![1, 2], vec![3]]);
}

#[test]
fn truncation_keeps_special_tokens_without_explicit_side() {
    let text = "one two three four five six seven eight";
    let full = completion(&TINYLLAMA, &json!({"prompt": text}))
        .unwrap()
        .remove(0);
    assert!(full.len() > 5);
    let cut = |side: Value, keep: usize| {
        let request =
            json!({"prompt": text, "truncate_prompt_tokens": keep, "truncation_side": side});
        completion(&TINYLLAMA, &request).unwrap().remove(0)
    };
    let spared = [&[1], &full[full.len() - 3..]].concat();
    assert_eq!(
        cut(Value::Null, 4),
        spared,
        "the left side is cut off by default"
    );
    assert_eq!(cut(json!("left"), 4), full[full.len() - 4..]);
    assert_eq!(cut(json!("right"), 4), full[..4]);
    assert_eq!(cut(json!("left"), 1000), full);
    let tokens = json!({"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 3});
    assert_eq!(completion(&TINYLLAMA, &tokens), Ok(vec![vec![2, 3, 4]]));
    for keep in [-1, 0] {
        let request = json!({"prompt": text, "truncate_prompt_tokens": keep});
        assert!(
            matches!(
                completion(&TINYLLAMA, &request),
                Err(EncodeError::Uncertain(_))
            ),
            "{keep}"
        );
    }
}

#[test]
fn developer_messages_merge_into_system_message() {
    let merged = json!({"messages": [
        {"role": "system", "content": "A"}, {"role": "user", "content": "hi"}, {"role": "developer", "content": "B"}]});
    let alone = json!({"messages": [{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "hi"}]});
    assert_eq!(chat(&QWEN, &merged), chat(&QWEN, &alone));
    let two = json!({"messages": [
        {"role": "system", "content": "A"}, {"role": "system", "content": "B"}, {"role": "user", "content": "hi"}]});
    assert_ne!(chat(&QWEN, &two), chat(&QWEN, &alone));
}

#[test]
fn parts_are_joined_and_null_content_is_empty() {
    let parts = json!({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"},
        {"type": "text", "text": null}]}]});
    let plain = json!({"messages": [{"role": "user", "content": "a\nb\nc"}]});
    assert_eq!(chat(&QWEN, &parts), chat(&QWEN, &plain));
    let null = json!({"messages": [{"role": "user", "content": null}]});
    let empty = json!({"messages": [{"role": "user", "content": ""}]});
    assert_eq!(chat(&QWEN, &null), chat(&QWEN, &empty));
}

#[test]
fn rejected_or_uncertain_request_is_error() {
    let user = json!([{"role": "user", "content": "hello"}]);
    let messages = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let call = |call: Value| json!({"messages": [{"role": "assistant", "tool_calls": [call]}]});
    for request in [
        json!({"messages": user, "chat_template": "x"}),
        json!({"messages": user, "continue_final_message": true}),
        json!({"messages": user, "chat_template_kwargs": {"tools": ["f"]}}),
        json!({"messages": user, "chat_template_kwargs": {"tokenize": true}}),
        json!({"messages": user, "kv_transfer_params": {"prompt_token_ids": [1]}}),
        json!({"messages": user, "tools": [{"type": "function"}]}),
        json!({"messages": user, "tools": [{"type": "custom", "custom": {}}]}),
        json!({"messages": user, "tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}),
        messages(json!([{"type": "audio_url", "audio_url": {"url": "x"}}])),
        messages(json!([{"type": "text", "text": "a", "uuid": "u"}])),
        messages(json!([{"text": "a"}])),
        call(json!({"type": "function", "function": {"name": "f", "arguments": "{}"}})),
        call(
            json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": \"\\ud83d\"}"}}),
        ),
        call(
            json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": format!("{{\"a\": {}}}", "9".repeat(39))}}),
        ),
    ] {
        assert!(chat(&QWEN, &request).is_err(), "{request}");
    }
    assert_eq!(
        completion(&QWEN, &json!({"prompt_embeds": "AA=="})),
        Err(EncodeError::Embeddings)
    );
}

#[test]
fn invalid_json_arguments_become_empty_object() {
    let call = |arguments: &str| {
        json!({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]}]})
    };
    let empty = chat(&QWEN, &call("{}")).unwrap();
    for broken in ["", " ", "{", "{'a': 1}", "\u{feff}{}"] {
        assert_eq!(
            chat(&QWEN, &call(broken)).as_ref(),
            Ok(&empty),
            "{broken:?}"
        );
    }
    assert_ne!(chat(&QWEN, &call("{\"a\": 1}")).unwrap(), empty);
}

#[test]
fn unusable_files_are_named_with_problem() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let tokenizer = model("tinyllama").join("tokenizer.json.gz");
    let check = |config: Config, words: [&str; 2]| {
        let error: LoadError = Encoder::load(&config).unwrap_err();
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    let none = Config {
        tokenizer: directory.path().join("no.json"),
        tokenizer_config: None,
        chat_template: None,
    };
    check(none, ["no.json", "No such file"]);
    write("config.json", r#"{"model_type": "llama"}"#);
    let bad = Config {
        tokenizer: write("bad.json", "{}"),
        tokenizer_config: None,
        chat_template: None,
    };
    check(bad, ["bad.json", "not a tokenizer.json"]);
    let template = |source: &str| Config {
        tokenizer: tokenizer.clone(),
        tokenizer_config: None,
        chat_template: Some(write("t.jinja", source)),
    };
    for (source, feature) in [
        ("{% include 'x' %}", "`include`"),
        ("{{ x | urlencode }}", "`urlencode`"),
        ("{{ x is escaped }}", "`escaped`"),
        ("{{ cycler('a') }}", "`cycler`"),
        ("{{ x.encode() }}", "`encode`"),
        ("{{ tool.items }}", "`.items`"),
        ("{{ tool['items'] }}", "`['items']`"),
        ("{% if %}", "syntax error"),
    ] {
        check(template(source), ["t.jinja", feature]);
    }
    let config = write(
        "tokenizer_config.json",
        r#"{"added_tokens_decoder": {"7": {"content": "<new>"}}}"#,
    );
    let added = Config {
        tokenizer: tokenizer.clone(),
        tokenizer_config: Some(config),
        chat_template: None,
    };
    check(added, ["tokenizer_config.json", "<new>"]);
}

#[test]
fn bos_token_mismatch_makes_special_tokens_uncertain() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("tokenizer_config.json");
    std::fs::write(
        directory.path().join("config.json"),
        r#"{"model_type": "llama"}"#,
    )
    .unwrap();
    std::fs::write(&config, r#"{"add_bos_token": false, "bos_token": "<s>"}"#).unwrap();
    let config = Config {
        tokenizer: model("tinyllama").join("tokenizer.json.gz"),
        tokenizer_config: Some(config),
        chat_template: None,
    };
    let encoder = Encoder::load(&config).unwrap();
    assert!(matches!(
        completion(&encoder, &json!({"prompt": "hello"})),
        Err(EncodeError::Uncertain(_))
    ));
    let without = json!({"prompt": "hello", "add_special_tokens": false});
    assert_eq!(completion(&encoder, &without), Ok(vec![vec![22172]]));
    let chat_request = json!({"messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(chat(&encoder, &chat_request), Err(EncodeError::NoTemplate));
}

/// Returns a conversation with a tool in the formats of three APIs.
fn equal_conversations() -> [(ApiKind, Value); 3] {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let arguments = json!({"city": "Paris", "n": [1, 2.5, {"b": 1, "a": null}]});
    let chat = json!({
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "Let me look.", "reasoning": "hm", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments.to_string()}},
                {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "sun"},
            {"role": "user", "content": "And tomorrow?"}],
        "tools": [{"type": "function",
            "function": {"name": "look", "description": "Looks.", "parameters": parameters}}]});
    let responses = json!({
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments.to_string()},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": "sun"},
            {"type": "message", "role": "user", "content": "And tomorrow?"}],
        "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": parameters,
            "strict": null}]});
    let messages = json!({
        "max_tokens": 7,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"}, {"type": "thinking", "thinking": "m"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": arguments},
                {"type": "tool_use", "id": "c2", "name": "look", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                {"type": "text", "text": "And tomorrow?"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "sun"}]}]}],
        "tools": [{"name": "look", "description": "Looks.",
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]});
    [
        (ApiKind::ChatCompletions, chat),
        (ApiKind::Responses, responses),
        (ApiKind::Messages, messages),
    ]
}

#[test]
fn responses_and_messages_match_tokens_of_equal_chat() {
    let [(_, expected), rest @ ..] = equal_conversations();
    let expected = chat(&QWEN, &expected).unwrap();
    assert!(expected.len() > 150);
    for (api, body) in rest {
        assert_eq!(
            encode(&QWEN, api, &body),
            Ok(vec![expected.clone()]),
            "{api:?}"
        );
    }
    let hello = json!({"messages": [{"role": "user", "content": "hello"}]});
    let hello_chat = chat(&QWEN, &hello).unwrap();
    assert_eq!(
        encode(&QWEN, ApiKind::Responses, &json!({"input": "hello"})),
        Ok(vec![hello_chat.clone()])
    );
    assert_eq!(
        encode(&QWEN, ApiKind::Messages, &hello),
        Ok(vec![hello_chat])
    );
}

#[test]
fn message_parts_join_like_chat_parts() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]);
    let messages = json!({"messages": [{"role": "user", "content": parts}]});
    let chat_body = json!({"messages": [{"role": "user", "content": "a\nb"}]});
    assert_eq!(
        encode(&QWEN, ApiKind::Messages, &messages),
        chat(&QWEN, &chat_body).map(|tokens| vec![tokens])
    );
}

#[test]
fn incomplete_response_message_is_continued() {
    let body = json!({"input": [{"role": "user", "content": "hello"},
        {"type": "message", "role": "assistant", "status": "incomplete",
            "content": [{"type": "output_text", "text": "Hi the"}]}]});
    let expected = json!({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi the"}],
        "add_generation_prompt": false, "continue_final_message": true});
    assert_eq!(
        encode(&QWEN, ApiKind::Responses, &body),
        chat(&QWEN, &expected).map(|tokens| vec![tokens])
    );
}

#[test]
fn responses_and_embeddings_begin_with_special_tokens() {
    let embedding = encode(
        &TINYLLAMA,
        ApiKind::Embeddings,
        &json!({"input": ["hello"]}),
    );
    assert_eq!(embedding, Ok(vec![vec![1, 22172]]));
    assert_eq!(
        encode(
            &TINYLLAMA,
            ApiKind::SglangGenerate,
            &json!({"text": "hello"})
        ),
        Ok(vec![vec![1, 22172]])
    );
    let messages = json!({"messages": [{"role": "user", "content": "hello"}]});
    let without = chat(&TINYLLAMA, &messages).unwrap();
    let responses = encode(&TINYLLAMA, ApiKind::Responses, &json!({"input": "hello"})).unwrap();
    assert_eq!(responses, [[&[1], without.as_slice()].concat()]);
    assert_eq!(
        encode(&TINYLLAMA, ApiKind::Messages, &messages),
        Ok(vec![without])
    );
}
