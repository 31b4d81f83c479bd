//! Request bodies of `/v1/embeddings`, `/pooling` and `/classify`: texts or token ids as in
//! completions, or a conversation.
//!
//! vLLM (`entrypoints/pooling/base/protocol.py`) adds special tokens to texts by default but not to
//! conversations, and adds no generation prompt unless requested. Its tokenizers truncate on the
//! right for pooling models (`tokenizers/registry.py`).

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::chat::{self, ChatMessage, ChatPrompt};
use super::completion::PromptList;
use super::error::ParseError;
use super::json::{self, JsonObject};
use super::request::{ApiRequest, PromptInput, TokenizationOptions, TruncationSide};

#[derive(Deserialize)]
struct PoolingBody<'a> {
    model: Option<String>,
    input: Option<PromptList>,
    messages: Option<Vec<ChatMessage>>,
    /// Input of an engine plugin, which only the plugin can interpret.
    data: Option<IgnoredAny>,
    padding: Option<String>,
    cache_salt: Option<String>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template: Option<String>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    truncation_side: Option<TruncationSide>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
}

pub(super) fn parse(text: &str) -> Result<ApiRequest, ParseError> {
    let body: PoolingBody<'_> = serde_json::from_str(text)?;
    // Padding extends to the model's context length, which only the engine knows.
    let is_unknown =
        body.data.is_some() || body.padding.is_some_and(|padding| padding != "do_not_pad");
    let prompt = match (body.input, body.messages) {
        _ if is_unknown => return Ok(ApiRequest::untokenized(body.model, text.len())),
        (Some(PromptList(prompt)), _) => prompt,
        (None, Some(messages)) if messages.is_empty() => return Err(ParseError::Empty("messages")),
        (None, Some(messages)) => PromptInput::Chat(Box::new(ChatPrompt {
            messages: chat::wrap_in_arc(messages),
            add_generation_prompt: body.add_generation_prompt.unwrap_or(false),
            continue_final_message: body.continue_final_message.unwrap_or(false),
            chat_template: body.chat_template,
            chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
            is_pooling: true,
            ..ChatPrompt::default()
        })),
        (None, None) => return Err(ParseError::Missing("input")),
    };
    if matches!(&prompt, PromptInput::Texts(texts) if texts.is_empty()) {
        return Err(ParseError::Empty("input"));
    }
    Ok(ApiRequest {
        cache_salt: body.cache_salt,
        tokenization: TokenizationOptions {
            add_special_tokens: body.add_special_tokens,
            truncate_prompt_tokens: body.truncate_prompt_tokens,
            truncation_side: body.truncation_side,
            tokenizer_side: TruncationSide::Right,
        },
        nvext: body.nvext.map(|raw| raw.get().into()),
        ..ApiRequest::with_prompt(body.model, prompt)
    })
}
