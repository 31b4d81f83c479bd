//! Canary requests that reveal common tokenization differences between routers and engines. They
//! cover a system prompt, tools, tool calls and reasoning in the history, documents, Unicode
//! normalization, text that looks like special tokens, and a length of many blocks.

use bytes::Bytes;
use serde_json::{Value, json};

use warmroute_tokens::openai::ApiKind;
use warmroute_tokens::prompt::EngineKind;

/// A request to compare.
#[derive(Clone, Debug)]
pub struct CanaryRequest {
    /// Name in logs and on status pages.
    pub name: &'static str,
    /// API of the request.
    pub api: ApiKind,
    /// JSON body.
    pub body: Bytes,
    /// Whether `/tokenize` ignores the feature that this canary tests, so that only the render API
    /// can compare it.
    pub render_only: bool,
}

impl CanaryRequest {
    /// Returns true if the request offers tools, all with `tool_choice: none`.
    pub fn has_tools(&self) -> bool {
        self.name.starts_with("chat_tool")
    }
}

/// Canaries for which SGLang's `/tokenize` differs from its chat API, so that a comparison is
/// meaningless.
const SGLANG_INCOMPARABLE: [&str; 3] = ["chat_open", "chat_continued", "text_bare"];

/// Canaries that `/tokenize` handles differently from the chat API.
const RENDER_ONLY: [&str; 3] = ["chat_documents", "chat_effort", "chat_thoughts"];

/// Returns all canaries for a model and engine.
pub fn canaries(model: &str, engine: EngineKind) -> Vec<CanaryRequest> {
    let is_comparable =
        |name: &str| engine == EngineKind::Vllm || !SGLANG_INCOMPARABLE.contains(&name);
    let chats = chat_bodies()
        .into_iter()
        .map(|(name, body)| (name, ApiKind::ChatCompletions, body));
    let texts = completion_bodies()
        .into_iter()
        .map(|(name, body)| (name, ApiKind::Completions, body));
    let canary = |(name, api, mut body): (&'static str, ApiKind, Value)| {
        body["model"] = model.into();
        CanaryRequest {
            name,
            api,
            body: body.to_string().into(),
            render_only: RENDER_ONLY.contains(&name),
        }
    };
    chats
        .chain(texts)
        .filter(|(name, ..)| is_comparable(name))
        .map(canary)
        .collect()
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn chat_bodies() -> Vec<(&'static str, Value)> {
    let system = message("system", "You answer in one short sentence.");
    let user = message("user", "What is a canary good for?");
    let parts = json!({"role": "user", "content": [
        {"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]});
    let turns = [
        system.clone(),
        user.clone(),
        message("assistant", "It notices first."),
        message("user", "What exactly?"),
    ];
    let unfinished = [user.clone(), message("assistant", "It is good for")];
    vec![
        ("chat_plain", json!({"messages": [user]})),
        ("chat_system", json!({"messages": [system, user]})),
        ("chat_turns", json!({"messages": turns})),
        (
            "chat_open",
            json!({"messages": [user], "add_generation_prompt": false}),
        ),
        (
            "chat_continued",
            json!({"messages": unfinished, "add_generation_prompt": false, "continue_final_message": true}),
        ),
        ("chat_parts", json!({"messages": [parts]})),
        (
            "chat_unicode",
            json!({"messages": [message("user", UNICODE)]}),
        ),
        (
            "chat_special_text",
            json!({"messages": [message("user", SPECIAL_TOKENS)]}),
        ),
        (
            "chat_long",
            json!({"messages": [system, message("user", &long_text())]}),
        ),
        // Engines accept `tool_choice: none` without a tool call parser, and the prompt contains
        // the tools anyway.
        (
            "chat_tools",
            json!({"messages": [system, user], "tools": tool_definitions(), "tool_choice": "none"}),
        ),
        (
            "chat_tool_calls",
            json!({"messages": tool_call_history(), "tools": tool_definitions(), "tool_choice": "none"}),
        ),
        (
            "chat_documents",
            json!({"messages": [user], "documents": documents_body()}),
        ),
        (
            "chat_effort",
            json!({"messages": [user], "reasoning_effort": "low"}),
        ),
        ("chat_thoughts", json!({"messages": reasoning_history()})),
    ]
}

fn documents_body() -> Value {
    json!([{"title": "Shafts", "text": "Shaft 7 is dry."}, {"title": "Birds", "text": "A canary \
    weighs 20 g."}])
}

/// Returns a history with reasoning. Templates show or omit earlier reasoning depending on the
/// later messages.
fn reasoning_history() -> Value {
    json!([
        message("user", "Is 91 a prime?"),
        {"role": "assistant", "reasoning_content": "7 times 13 is 91.", "content": "No."},
        message("user", "And 97?")
    ])
}

fn completion_bodies() -> Vec<(&'static str, Value)> {
    vec![
        (
            "text_plain",
            json!({"prompt": "The canary stops singing when"}),
        ),
        (
            "text_bare",
            json!({"prompt": "The canary stops singing when", "add_special_tokens": false}),
        ),
        ("text_unicode", json!({"prompt": UNICODE})),
        ("text_spaces", json!({"prompt": SPACES})),
        ("text_special", json!({"prompt": SPECIAL_TOKENS})),
        ("text_long", json!({"prompt": long_text()})),
    ]
}

/// A family emoji joined from several code points, a decomposed accent, Chinese, Japanese, Korean,
/// Arabic, Hebrew and Devanagari, a flag, a letter outside the Basic Multilingual Plane, and
/// zero-width characters.
const UNICODE: &str =
    "👩‍👩‍👧‍👦 cafe\u{301} Å\u{323} 漢字と仮名 한국어 عربي עברית नमस्ते 🇺🇳 𝔘 a\u{200b}b\u{feff}c ﬁ ½";

const SPECIAL_TOKENS: &str = "<|im_start|>system\n<|im_end|> <s>[INST] </s> \
<|begin_of_text|><|eot_id|> <|endoftext|> <pad> [/INST]";

const SPACES: &str = "  two  spaces\tand\t\ttabs \n\n\n new lines\r\n    def f(x):\n        \
return x**2 + 3.14159e-10 # 1234567890\n ";

/// Returns a text of many blocks without repetition.
fn long_text() -> String {
    (0..400)
        .map(|nth| format!("{nth} canaries sing in shaft {}, and ", nth * nth % 97))
        .collect()
}

fn tool_definitions() -> Value {
    json!([{"type": "function", "function": {
        "name": "air_quality",
        "description": "Measures the air of a shaft.",
        "parameters": {
            "type": "object",
            "properties": {
                "shaft": {"type": "integer", "description": "Number of the shaft"},
                "gas": {"type": "string", "enum": ["methane", "carbon monoxide"]}
            },
            "required": ["shaft"]
        }
    }}])
}

fn tool_call_history() -> Value {
    json!([
        message("user", "How is the air in shaft 7?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": {
            "name": "air_quality", "arguments": "{\"shaft\": 7, \"gas\": \"methane\"}"}}]},
        {"role": "tool", "tool_call_id": "call00001", "name": "air_quality",
            "content": "{\"ppm\": 12.5}"},
        message("assistant", "It is fine."),
        message("user", "And in shaft 8?")
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_tokens::openai;

    #[test]
    fn canaries_are_valid_and_uniquely_named() {
        let canaries = canaries("m", EngineKind::Vllm);
        for canary in &canaries {
            let request = openai::parse(canary.api, &canary.body)
                .unwrap_or_else(|error| panic!("{}: {error}", canary.name));
            assert_eq!(request.model.as_deref(), Some("m"));
            let chat = matches!(request.prompt, openai::PromptInput::Chat(_));
            assert_eq!(chat, canary.name.starts_with("chat_"), "{}", canary.name);
        }
        let names: std::collections::BTreeSet<_> =
            canaries.iter().map(|canary| canary.name).collect();
        assert_eq!(names.len(), canaries.len());
    }
}
