//! Requests to tokens, held against what vLLM 0.32 made of the same requests (`tests/data/tokens`).

#![expect(
    clippy::unwrap_used,
    reason = "in a test a failed step is a failed test"
)]

#[path = "tokens/apis.rs"]
mod apis;
#[path = "tokens/classes.rs"]
mod classes;
#[path = "tokens/further.rs"]
mod further;

use further::contents;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute::openai::{self, Api};
use warmroute::prompt::media::{ItemRule, Root};
use warmroute::prompt::{
    Config, EncodeError, Encoder, Engine, Exactness, Illustrated, LoadError, MediaConfig,
    TokenBudget, Traits, Transformers,
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

/// One that tokenises the fast way. The other one's tokenizer stays with the library.
fn quick() -> Encoder {
    let encoder = load("qwen2.5");
    assert_eq!(encoder.quicken(), Ok(()));
    encoder
}

fn data<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tokens")
        .join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn encode(encoder: &Encoder, api: Api, request: &Value) -> Result<Vec<Vec<u32>>, EncodeError> {
    let request = openai::parse(api, &serde_json::to_vec(request).unwrap()).unwrap();
    let encoded = encoder.encode(&request)?;
    assert_eq!(encoded.exact, Exactness::Exact);
    Ok(encoded.prompts)
}

fn chat(encoder: &Encoder, request: &Value) -> Result<Vec<u32>, EncodeError> {
    encode(encoder, Api::ChatCompletions, request).map(|mut prompts| prompts.remove(0))
}

fn completion(encoder: &Encoder, request: &Value) -> Result<Vec<Vec<u32>>, EncodeError> {
    encode(encoder, Api::Completions, request)
}

#[derive(Deserialize)]
struct Case {
    case: String,
    request: Value,
    tokenize: Vec<u32>,
    /// The engine's tokens, or the answer with which it refused.
    engine: Value,
}

#[test]
fn every_captured_chat_request_becomes_the_engines_tokens() {
    let cases: Vec<Case> = data("qwen2_5-cases.json");
    assert_eq!(cases.len(), 14);
    for case in cases {
        // The only refused one lacks a server flag (`--enable-auto-tool-choice`); with the flag its tokens are these.
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

/// Of two models only the templates are here, because their tokenizers are large or others' to give away: what their engine
/// made of a request was put back into text.
#[test]
fn every_captured_request_of_other_templates_becomes_the_engines_text() {
    for name in ["llama3", "mistral"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/rendered");
        let tokenizer_config = Some(folder.join(name).join("tokenizer_config.json"));
        let encoder = Encoder::load(&Config {
            tokenizer_config,
            ..files("tinyllama")
        })
        .unwrap();
        let cases: Vec<Rendering> =
            serde_json::from_slice(&contents(&folder.join(format!("{name}.json.gz")))).unwrap();
        let (mut equal, mut skipped) = (0, Vec::new());
        for Rendering {
            case,
            request,
            text,
        } in &cases
        {
            let request =
                openai::parse(Api::ChatCompletions, &serde_json::to_vec(request).unwrap()).unwrap();
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
fn every_captured_scenario_becomes_the_engines_tokens() {
    let steps: Vec<Step> = data("scenarios.json");
    assert!(steps.len() > 20);
    for step in steps {
        let api = Api::of_path(&step.path).unwrap();
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
fn completions_begin_with_the_tokenizers_special_tokens_unless_told_not_to() {
    for (prompt, tokens) in [
        (json!({"prompt": "hello"}), vec![1, 22172]),
        // Behind a special token no space is put before a word.
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
fn tokenizers_are_built_as_the_engines_transformers_does() {
    let traits = Traits {
        transformers: Transformers::V4,
        ..Traits::default()
    };
    let written = Encoder::load_as(&files("tinyllama"), &traits).unwrap();
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
fn chats_begin_with_special_tokens_only_when_told_to() {
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
fn several_prompts_are_encoded_each_for_itself() {
    let texts = completion(&TINYLLAMA, &json!({"prompt": ["hello", "hello hello"]})).unwrap();
    assert_eq!(texts, [vec![1, 22172], vec![1, 22172, 22172]]);
    let tokens = completion(&TINYLLAMA, &json!({"prompt": [[1, 2], [3]]})).unwrap();
    assert_eq!(tokens, [vec![1, 2], vec![3]]);
}

#[test]
fn truncation_spares_special_tokens_unless_its_side_is_named() {
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
fn developers_become_systems_and_only_then_systems_are_merged() {
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
fn what_the_engine_refuses_or_cannot_be_known_is_an_error() {
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
fn arguments_that_are_not_json_become_an_empty_object() {
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
fn files_that_cannot_be_used_are_named_with_the_problem() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
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
        tokenizer: folder.path().join("no.json"),
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
fn a_bos_token_that_the_files_disagree_on_makes_special_tokens_uncertain() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("tokenizer_config.json");
    std::fs::write(
        folder.path().join("config.json"),
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

/// A conversation with a tool, as three APIs have it.
fn the_same_conversation() -> [(Api, Value); 3] {
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
        (Api::ChatCompletions, chat),
        (Api::Responses, responses),
        (Api::Messages, messages),
    ]
}

#[test]
fn responses_and_messages_become_the_tokens_of_the_chat_that_says_the_same() {
    let [(_, expected), rest @ ..] = the_same_conversation();
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
        encode(&QWEN, Api::Responses, &json!({"input": "hello"})),
        Ok(vec![hello_chat.clone()])
    );
    assert_eq!(encode(&QWEN, Api::Messages, &hello), Ok(vec![hello_chat]));
}

#[test]
fn parts_of_messages_are_joined_as_parts_of_chats_are() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]);
    let messages = json!({"messages": [{"role": "user", "content": parts}]});
    let chat_body = json!({"messages": [{"role": "user", "content": "a\nb"}]});
    assert_eq!(
        encode(&QWEN, Api::Messages, &messages),
        chat(&QWEN, &chat_body).map(|tokens| vec![tokens])
    );
}

#[test]
fn an_unfinished_message_of_a_response_is_gone_on_with() {
    let body = json!({"input": [{"role": "user", "content": "hello"},
        {"type": "message", "role": "assistant", "status": "incomplete",
            "content": [{"type": "output_text", "text": "Hi the"}]}]});
    let expected = json!({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi the"}],
        "add_generation_prompt": false, "continue_final_message": true});
    assert_eq!(
        encode(&QWEN, Api::Responses, &body),
        chat(&QWEN, &expected).map(|tokens| vec![tokens])
    );
}

#[test]
fn responses_and_embeddings_begin_with_special_tokens() {
    let embedding = encode(&TINYLLAMA, Api::Embeddings, &json!({"input": ["hello"]}));
    assert_eq!(embedding, Ok(vec![vec![1, 22172]]));
    assert_eq!(
        encode(&TINYLLAMA, Api::SglangGenerate, &json!({"text": "hello"})),
        Ok(vec![vec![1, 22172]])
    );
    let messages = json!({"messages": [{"role": "user", "content": "hello"}]});
    let without = chat(&TINYLLAMA, &messages).unwrap();
    let responses = encode(&TINYLLAMA, Api::Responses, &json!({"input": "hello"})).unwrap();
    assert_eq!(responses, [[&[1], without.as_slice()].concat()]);
    assert_eq!(
        encode(&TINYLLAMA, Api::Messages, &messages),
        Ok(vec![without])
    );
}

/// What is known of a conversation with an image, for a model of which nothing is said about images.
fn shown(encoder: &Encoder, request: &Value) -> Illustrated {
    let request =
        openai::parse(Api::ChatCompletions, &serde_json::to_vec(request).unwrap()).unwrap();
    encoder
        .illustrate(&request, None, &TokenBudget::UNLIMITED, &Root::Unsaid)
        .unwrap()
}

#[test]
fn a_prompt_is_known_up_to_the_first_image_that_is_not() {
    let config = model("qwen2.5").join("tokenizer.json.gz");
    let vision = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tokens/qwen2-vl/tokenizer_config.json");
    let config = Config {
        tokenizer: config,
        tokenizer_config: Some(vision),
        chat_template: None,
    };
    let plain = Encoder::load(&config).unwrap();
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let user = |parts: Value| json!({"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]});
    let request = user(
        json!([{"type": "text", "text": "look at"}, image("https://a/b.png"), {"type": "text", "text": "and"}]),
    );
    let ours = shown(&plain, &request);
    let text =
        json!({"prompt": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nlook at"});
    assert_eq!(
        vec![ours.tokens.to_vec()],
        completion(&plain, &text).unwrap()
    );
    assert!(!ours.whole && ours.items.is_empty() && ours.at_least > ours.tokens.len());

    // Where the template takes strings, the engine writes something of its own before the words of the message.
    let strings = json!({"messages": [{"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image("https://a/b.png")]}]});
    let ours = shown(&QWEN, &strings);
    let text = json!({"prompt": "<|im_start|>system\nS<|im_end|>\n<|im_start|>"});
    assert_eq!(
        vec![ours.tokens.to_vec()],
        completion(&QWEN, &text).unwrap(),
        "up to the last token that nothing joins"
    );
    assert_eq!(
        chat(&QWEN, &strings),
        Err(EncodeError::Multimodal("image_url".to_owned()))
    );
}

#[test]
fn images_before_the_first_unknown_one_stand_in_the_prompt() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/qwen2-vl");
    let image: ItemRule =
        serde_json::from_value(json!({"token": "<|image_pad|>", "rule": "fixed", "tokens": 5}))
            .unwrap();
    let traits = Traits {
        media: Some(MediaConfig {
            image: Some(image),
            ..MediaConfig::default()
        }),
        ..Traits::default()
    };
    let tokenizer_config = Some(folder.join("tokenizer_config.json"));
    let config = Config {
        tokenizer: model("qwen2.5").join("tokenizer.json.gz"),
        tokenizer_config,
        chat_template: None,
    };
    let encoder = Encoder::load_as(&config, &traits).unwrap();
    let named =
        json!({"type": "image_url", "image_url": {"url": "https://a/b.png"}, "uuid": "first"});
    let other = json!({"type": "image_url", "image_url": {"url": "https://a/c.png"}});
    let conversation = |second: &Value| {
        json!({"messages": [
        {"role": "user", "content": [named, {"type": "text", "text": "what is this?"}]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [second, {"type": "text", "text": "and this?"}]}]})
    };
    let partial = shown(&encoder, &conversation(&other));
    let mut second = named.clone();
    second["uuid"] = json!("second");
    let whole = shown(&encoder, &conversation(&second));
    assert!(whole.whole && !partial.whole);
    assert_eq!(
        whole
            .items
            .iter()
            .map(|item| item.id.as_str())
            .collect::<Vec<_>>(),
        ["first", "second"]
    );
    assert_eq!(partial.items, whole.items[..1]);
    assert!(whole.tokens.starts_with(&partial.tokens));
    // Up to the mark that begins the second.
    assert_eq!(partial.tokens.len(), whole.items[1].range.start - 1);
    for options in ["mm_processor_kwargs", "media_io_kwargs"] {
        let mut request = conversation(&second);
        request[options] = json!({"max_pixels": 1});
        assert!(
            shown(&encoder, &request).items.is_empty(),
            "{options} change what items are"
        );
    }
    let mut truncated = conversation(&second);
    truncated["truncate_prompt_tokens"] = json!(4);
    let request = openai::parse(
        Api::ChatCompletions,
        &serde_json::to_vec(&truncated).unwrap(),
    )
    .unwrap();
    assert!(
        encoder
            .illustrate(&request, None, &TokenBudget::UNLIMITED, &Root::Unsaid)
            .is_err()
    );
}

#[test]
fn sglang_differs_where_it_is_known_to_and_is_uncertain_where_it_is_not() {
    let traits = Traits {
        engine: Engine::Sglang,
        ..Traits::default()
    };
    let sglang = Encoder::load_as(&files("qwen2.5"), &traits).unwrap();
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(
        chat(&sglang, &user(parts)),
        chat(&QWEN, &user(json!("a b"))),
        "parts are joined by a space"
    );
    let tools = json!([{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": "d"}}]);
    let mut with = user(json!("hello"));
    with["tools"] = tools;
    let text = sglang
        .render(&openai::parse(Api::ChatCompletions, &serde_json::to_vec(&with).unwrap()).unwrap())
        .unwrap()
        .texts()[0]
        .to_string();
    let expected = r#"{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": "d"}, "defer_loading": null}"#;
    assert!(text.contains(expected), "{text}");
    with["tool_choice"] = json!("none");
    assert_eq!(
        chat(&sglang, &with),
        chat(&QWEN, &user(json!("hello"))),
        "tools that may not be used are not shown"
    );
    let mut ignored = user(json!("hello"));
    ignored["add_generation_prompt"] = json!(false);
    ignored["truncate_prompt_tokens"] = json!(3);
    assert_eq!(
        chat(&sglang, &ignored),
        chat(&QWEN, &user(json!("hello"))),
        "fields that it does not have"
    );
    let last = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    let as_user =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]});
    assert_eq!(
        chat(&sglang, &last),
        chat(&QWEN, &as_user),
        "a last word of the assistant is the user's"
    );
    let developer = json!({"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]});
    assert_ne!(
        chat(&sglang, &developer),
        chat(&QWEN, &developer),
        "developers stay what they are"
    );
    for (key, value) in [
        ("continue_final_message", json!(true)),
        ("input_ids", json!([1])),
        ("chat_template_kwargs", json!({"reasoning_effort": "low"})),
    ] {
        let mut request = user(json!("hello"));
        request[key] = value;
        assert!(chat(&sglang, &request).is_err(), "{key}");
    }
    assert!(encode(&sglang, Api::Messages, &user(json!("hello"))).is_err());
    let picture = user(json!([{"type": "image_url", "image_url": {"url": "data:,"}}]));
    assert!(matches!(
        chat(&sglang, &picture),
        Err(EncodeError::Multimodal(_))
    ));
}
