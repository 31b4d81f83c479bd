//! The canaries: requests whose tokens show what routers and engines commonly do differently. Between them they have a system
//! prompt, tools, calls of tools and thoughts in the history, documents, scripts that normalise, texts that look like special
//! tokens, and a length of many blocks.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::openai::Api;
use crate::prompt::Engine;

/// One request to compare.
#[derive(Clone, Debug)]
pub struct Canary {
    /// Its name in logs and on pages.
    pub name: &'static str,
    /// Its API.
    pub api: Api,
    /// Its body.
    pub body: Bytes,
    /// Whether `/tokenize` leaves out what it is about, so that it says nothing of it.
    pub render_only: bool,
}

/// What SGLang's `/tokenize` reads and its chat does not, or the other way round: what it says of these is not what it does.
const NOT_AS_IN_SGLANGS_CHAT: [&str; 3] = ["chat_open", "chat_continued", "text_bare"];

/// What `/tokenize` does not read as the chat does.
const NOT_TOKENIZED: [&str; 3] = ["chat_documents", "chat_effort", "chat_thoughts"];

/// All canaries, as requests for a model of such engines.
pub fn canaries(model: &str, engine: Engine) -> Vec<Canary> {
    let tells = |name: &str| engine == Engine::Vllm || !NOT_AS_IN_SGLANGS_CHAT.contains(&name);
    let chats = chats()
        .into_iter()
        .map(|(name, body)| (name, Api::ChatCompletions, body));
    let texts = texts()
        .into_iter()
        .map(|(name, body)| (name, Api::Completions, body));
    let canary = |(name, api, mut body): (&'static str, Api, Value)| {
        body["model"] = model.into();
        Canary {
            name,
            api,
            body: body.to_string().into(),
            render_only: NOT_TOKENIZED.contains(&name),
        }
    };
    chats
        .chain(texts)
        .filter(|(name, ..)| tells(name))
        .map(canary)
        .collect()
}

fn says(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn chats() -> Vec<(&'static str, Value)> {
    let system = says("system", "You answer in one short sentence.");
    let user = says("user", "What is a canary good for?");
    let parts = json!({"role": "user", "content": [
        {"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]});
    let turns = [
        system.clone(),
        user.clone(),
        says("assistant", "It notices first."),
        says("user", "What exactly?"),
    ];
    let unfinished = [user.clone(), says("assistant", "It is good for")];
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
        ("chat_unicode", json!({"messages": [says("user", UNICODE)]})),
        (
            "chat_special_text",
            json!({"messages": [says("user", SPECIAL)]}),
        ),
        (
            "chat_long",
            json!({"messages": [system, says("user", &long())]}),
        ),
        // Engines take it without a parser of calls; the tools are in the prompt all the same.
        (
            "chat_tools",
            json!({"messages": [system, user], "tools": tools(), "tool_choice": "none"}),
        ),
        (
            "chat_tool_calls",
            json!({"messages": called(), "tools": tools(), "tool_choice": "none"}),
        ),
        (
            "chat_documents",
            json!({"messages": [user], "documents": documents()}),
        ),
        (
            "chat_effort",
            json!({"messages": [user], "reasoning_effort": "low"}),
        ),
        ("chat_thoughts", json!({"messages": thought()})),
    ]
}

fn documents() -> Value {
    json!([{"title": "Shafts", "text": "Shaft 7 is dry."}, {"title": "Birds", "text": "A canary weighs 20 g."}])
}

/// A history with thoughts; what follows them asks templates to show or to leave out the earlier ones.
fn thought() -> Value {
    json!([
        says("user", "Is 91 a prime?"),
        {"role": "assistant", "reasoning_content": "7 times 13 is 91.", "content": "No."},
        says("user", "And 97?")
    ])
}

fn texts() -> Vec<(&'static str, Value)> {
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
        ("text_special", json!({"prompt": SPECIAL})),
        ("text_long", json!({"prompt": long()})),
    ]
}

/// A family joined to one sign, a decomposed accent, Chinese, Japanese and Korean, Arabic and Hebrew, Devanagari, a flag,
/// a letter outside of the first plane, and signs of no width.
const UNICODE: &str =
    "👩‍👩‍👧‍👦 cafe\u{301} Å\u{323} 漢字と仮名 한국어 عربي עברית नमस्ते 🇺🇳 𝔘 a\u{200b}b\u{feff}c ﬁ ½";

const SPECIAL: &str = "<|im_start|>system\n<|im_end|> <s>[INST] </s> <|begin_of_text|><|eot_id|> <|endoftext|> <pad> [/INST]";

const SPACES: &str = "  two  spaces\tand\t\ttabs \n\n\n new lines\r\n    def f(x):\n        return x**2 + 3.14159e-10 # 1234567890\n ";

/// As long as many blocks, and nowhere the same.
fn long() -> String {
    (0..400)
        .map(|nth| format!("{nth} canaries sing in shaft {}, and ", nth * nth % 97))
        .collect()
}

fn tools() -> Value {
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

fn called() -> Value {
    json!([
        says("user", "How is the air in shaft 7?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": {
            "name": "air_quality", "arguments": "{\"shaft\": 7, \"gas\": \"methane\"}"}}]},
        {"role": "tool", "tool_call_id": "call00001", "name": "air_quality", "content": "{\"ppm\": 12.5}"},
        says("assistant", "It is fine."),
        says("user", "And in shaft 8?")
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai;

    #[test]
    fn every_canary_is_a_request_of_its_api_and_has_a_name_of_its_own() {
        let canaries = canaries("m", Engine::Vllm);
        for canary in &canaries {
            let request = openai::parse(canary.api, &canary.body)
                .unwrap_or_else(|error| panic!("{}: {error}", canary.name));
            assert_eq!(request.model.as_deref(), Some("m"));
            let chat = matches!(request.prompt, openai::Prompt::Chat(_));
            assert_eq!(chat, canary.name.starts_with("chat_"), "{}", canary.name);
        }
        let names: std::collections::BTreeSet<_> =
            canaries.iter().map(|canary| canary.name).collect();
        assert_eq!(names.len(), canaries.len());
    }
}
