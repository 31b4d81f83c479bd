//! Bodies of `/v1/embeddings`, `/pooling` and `/classify`: texts or tokens as in completions, or a conversation. vLLM
//! (`entrypoints/pooling/base/protocol.py`) adds special tokens to texts by default and to conversations not, begins no
//! answer unless asked to, and its tokenizers cut on the right where the model pools (`tokenizers/registry.py`).

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::chat::{Chat, Message};
use super::completion::Prompts;
use super::json::{self, JsonObject};
use super::{ParseError, Prompt, Request, Side, Tokenization};

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    input: Option<Prompts>,
    #[serde(default)]
    messages: Option<Vec<Message>>,
    /// What a plugin of the engine understands.
    #[serde(default)]
    data: Option<IgnoredAny>,
    #[serde(default)]
    padding: Option<String>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    #[serde(default)]
    chat_template: Option<String>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
    #[serde(default)]
    truncation_side: Option<Side>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
}

pub(super) fn parse(text: &str) -> Result<Request, ParseError> {
    let body: Body<'_> = serde_json::from_str(text)?;
    // Padding goes up to the model's length, which only the engine knows.
    let hidden = body.data.is_some() || body.padding.is_some_and(|padding| padding != "do_not_pad");
    let prompt = match (body.input, body.messages) {
        _ if hidden => return Ok(Request::by_load(body.model, text.len())),
        (Some(Prompts(prompt)), _) => prompt,
        (None, Some(messages)) if messages.is_empty() => return Err(ParseError::Empty("messages")),
        (None, Some(messages)) => Prompt::Chat(Box::new(Chat {
            messages,
            add_generation_prompt: body.add_generation_prompt.unwrap_or(false),
            continue_final_message: body.continue_final_message.unwrap_or(false),
            chat_template: body.chat_template,
            chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
            ..Chat::default()
        })),
        (None, None) => return Err(ParseError::Missing("input")),
    };
    if matches!(&prompt, Prompt::Texts(texts) if texts.is_empty()) {
        return Err(ParseError::Empty("input"));
    }
    Ok(Request {
        cache_salt: body.cache_salt,
        tokenization: Tokenization {
            add_special_tokens: body.add_special_tokens,
            truncate_prompt_tokens: body.truncate_prompt_tokens,
            truncation_side: body.truncation_side,
            tokenizer_side: Side::Right,
        },
        extension: body.nvext.map(|raw| raw.get().into()),
        ..Request::of(body.model, prompt)
    })
}
