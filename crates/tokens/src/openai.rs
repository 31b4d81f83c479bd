//! Request bodies of the OpenAI-compatible APIs, parsed as vLLM parses them.
//!
//! Only the fields that decide the prompt tokens, the worker and the output length are read.
//! Unknown fields are ignored, because every engine version adds some. An unreadable body is a
//! [`ParseError`] and never a panic, because any client can send one.

mod anthropic;
mod api;
mod body_encoding;
mod chat;
mod completion;
mod content_part;
mod error;
mod fold;
mod generate;
mod json;
pub mod json_edit;
mod json_scan;
mod json_stream;
mod lax;
mod message_cache;
mod message_text;
mod multipart;
mod nvext;
mod parsed_message;
pub mod paths;
mod plain_messages;
mod pooling;
mod request;
mod response_id;
mod responses;
pub mod restore;
mod untokenized;
pub mod usage;

#[cfg(test)]
mod tests;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

pub(crate) use anthropic::BILLING_HEADER_PREFIX;
pub use api::{ApiKind, ApiWorkload};
pub use body_encoding::decode_body;
use body_encoding::without_byte_order_mark;
pub use chat::{ChatMessage, ChatPrompt, MessageContent};
pub use content_part::{
    ContentPart, MediaItem, MediaModality, MediaSource, PartExtras, PartMeaning, TypedPart,
};
pub use error::ParseError;
pub use json::{JsonError, JsonObject, JsonValue};
pub use json_edit::text_at_path;
use json_scan::MAX_JSON_VALUES;
pub(crate) use message_cache::MessagePrefix;
pub use message_cache::{MessageCache, MessageReuse};
pub use message_text::MessageText;
pub use multipart::multipart_boundary;
pub use nvext::{AgentHints, NvExt, RoutingConstraints, SessionAction, SessionControl};
pub use paths::ApiPaths;
pub use request::{
    ApiRequest, PromptInput, TokenizationOptions, TruncationSide, UnknownPrompt,
    UnknownPromptReason,
};
pub use response_id::ResponseIdReader;

/// Reads only the model name of a body. Engines accept some bodies that [`parse`] rejects. Such a
/// request can then still be routed to a worker that serves its model.
pub fn read_model(body: &[u8]) -> Option<String> {
    text_at_path(&decode_body(body).ok()?, "model")
}

/// Maximum number of bytes of a body that are searched for single fields.
const MAX_SEARCHED_BYTES: usize = 1 << 20;

/// Maximum length of a model name in bytes; longer names only waste memory.
pub const MAX_MODEL_NAME_BYTES: usize = 1024;

/// Returns the beginning of a body, for a quick search for single fields.
pub fn searched_prefix(body: &[u8]) -> &[u8] {
    let body = without_byte_order_mark(body);
    &body[..body.len().min(MAX_SEARCHED_BYTES)]
}

/// Reads the model name from the beginning of a body. A truncated name is ignored.
pub fn read_model_from_prefix(body: &[u8]) -> Option<String> {
    text_at_path(searched_prefix(body), "model")
}

/// Parses a JSON body, or a multipart form if the API accepts forms and `boundary` is set.
pub fn parse_body(
    api: ApiKind,
    boundary: Option<&str>,
    body: &[u8],
) -> Result<ApiRequest, ParseError> {
    match boundary.filter(|_| !api.has_text_body()) {
        Some(boundary) => Ok(ApiRequest::untokenized(
            multipart::multipart_model(boundary, body),
            0,
        )),
        None => parse(api, body),
    }
}

/// Parses a body like [`parse_body`], and reuses cached messages of earlier bodies. Tenants share no
/// messages. Also returns the prefixes found and stored.
pub fn parse_body_cached(
    api: ApiKind,
    boundary: Option<&str>,
    body: &Bytes,
    cache: &MessageCache,
    tenant: Option<&str>,
) -> Result<(ApiRequest, MessageReuse), ParseError> {
    let cached = (api == ApiKind::ChatCompletions)
        .then(|| chat::parse_cached(body, cache, tenant))
        .flatten();
    match cached {
        Some(parsed) => Ok(parsed),
        None => parse_body(api, boundary, body).map(|request| (request, MessageReuse::default())),
    }
}

/// Returns true if the parsed request may contain many JSON values, each of which takes far more
/// memory than its text.
fn retains_json_values(api: ApiKind, text: &str) -> bool {
    #[derive(Deserialize)]
    struct RetainedFields<'a> {
        messages: Option<IgnoredAny>,
        chat_template_kwargs: Option<IgnoredAny>,
        #[serde(borrow)]
        lora_path: Option<&'a RawValue>,
    }
    match api {
        // Each value has at least one byte and one separator.
        _ if text.len() <= 2 * MAX_JSON_VALUES => false,
        ApiKind::ChatCompletions | ApiKind::Responses | ApiKind::Messages => true,
        ApiKind::Embeddings | ApiKind::Pooling | ApiKind::Classify | ApiKind::SglangGenerate => {
            serde_json::from_str::<RetainedFields<'_>>(text).is_ok_and(|fields| {
                let nested = fields
                    .lora_path
                    .is_some_and(|raw| raw.get().starts_with(['[', '{']));
                fields.messages.is_some() || fields.chat_template_kwargs.is_some() || nested
            })
        }
        _ => false,
    }
}

/// Returns true if a body has more prompts or JSON values than warmroute reads.
pub fn exceeds_value_limit(api: ApiKind, body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok_and(|text| match api {
        ApiKind::Completions => completion::exceeds_prompt_limit(text),
        api => retains_json_values(api, text) && json_scan::has_too_many_values(body),
    })
}

/// Parses a JSON request body. Nesting deeper than 128 levels is an error, and template values
/// deeper than 200 levels are unknown, so a body cannot exhaust the stack.
pub fn parse(api: ApiKind, body: &[u8]) -> Result<ApiRequest, ParseError> {
    let body = decode_body(body)?;
    let text =
        std::str::from_utf8(&body).map_err(|error| ParseError::NotUtf8(error.valid_up_to()))?;
    // The derived `Deserialize` also accepts a list of the fields in order.
    if text.trim_start().starts_with(|c| c != '{') {
        return Err(ParseError::NotAnObject);
    }
    let exceeds_limit = || json_scan::has_too_many_values(text.as_bytes());
    if retains_json_values(api, text) && exceeds_limit() {
        return Ok(ApiRequest::with_prompt(
            read_model(&body),
            PromptInput::OverLimit,
        ));
    }
    match parse_text(api, text) {
        Err(error @ ParseError::Json(_)) if !exceeds_limit() => without_repeated_keys(text)
            .and_then(|text| parse_text(api, &text).ok())
            .ok_or(error),
        parsed => parsed,
    }
}

/// Returns a body in which no key is repeated. As in Python, the last value takes effect. Returns
/// `None` if this parser cannot read the body, or if not all parsers read the same values.
fn without_repeated_keys(text: &str) -> Option<String> {
    let body = JsonValue::parse(text).ok().filter(JsonValue::is_portable)?;
    serde_json::to_string(&body).ok()
}

fn parse_text(api: ApiKind, text: &str) -> Result<ApiRequest, ParseError> {
    match api {
        ApiKind::ChatCompletions => chat::parse(text),
        ApiKind::Completions => completion::parse(text),
        ApiKind::Embeddings | ApiKind::Pooling | ApiKind::Classify => pooling::parse(text),
        ApiKind::Responses => responses::parse(text),
        ApiKind::Messages => anthropic::parse(text),
        ApiKind::SglangGenerate => generate::parse_sglang(text),
        ApiKind::VllmGenerate => generate::parse_vllm(text),
        _ if api.workload() == ApiWorkload::LoadOnly => untokenized::parse(text),
        _ => Ok(ApiRequest::with_prompt(
            read_model(text.as_bytes()),
            PromptInput::NoPrompt,
        )),
    }
}
