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
use serde_json::error::Category;
use serde_json::value::RawValue;
use thiserror::Error;

pub use api::{ApiKind, ApiWorkload};
pub use body_encoding::decode_body;
use body_encoding::without_byte_order_mark;
pub use chat::{ChatMessage, ChatPrompt, MessageContent};
pub use content_part::{
    ContentPart, MediaItem, MediaModality, MediaSource, PartExtras, PartMeaning, TypedPart,
};
pub use json::{JsonError, JsonObject, JsonValue};
pub use json_edit::text_at_path;
pub(crate) use message_cache::{ChunkMessages, MessagePrefix};
pub use message_cache::{MessageCache, MessageReuse};
pub use message_text::MessageText;
pub use multipart::multipart_boundary;
pub use nvext::{AgentHints, NvExt, RoutingConstraints, SessionAction, SessionControl};
pub use paths::ApiPaths;
pub use response_id::ResponseIdReader;

/// Maximum number of JSON values in a conversation and its tools; real requests have far fewer.
const MAX_JSON_VALUES: usize = 1 << 17;

/// One request with the fields that routing needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiRequest {
    /// Requested model or LoRA adapter.
    pub model: Option<String>,
    /// True if the response is a stream of server-sent events.
    pub stream: bool,
    /// The input that the engine continues.
    pub prompt: PromptInput,
    /// Cache salt that separates equal prompts of different tenants.
    pub cache_salt: Option<String>,
    /// Maximum number of output tokens; `None` means as many as the context allows.
    pub max_output_tokens: Option<u64>,
    /// Options of the conversion from text to tokens.
    pub tokenization: TokenizationOptions,
    /// Raw JSON of `nvext`, if present. It is parsed later, because most clients are not trusted.
    pub nvext: Option<Box<str>>,
    /// Id of the stored response that the request continues.
    pub previous_response_id: Option<String>,
    /// True if the engine may store the response under its id.
    pub stores_response: bool,
    /// True if a parameter of vLLM requests log probabilities of prompt tokens. vLLM then computes
    /// the whole prompt. Not detected in SGLang's own API.
    pub returns_prompt_logprobs: bool,
}

impl ApiRequest {
    fn with_prompt(model: Option<String>, prompt: PromptInput) -> Self {
        Self {
            model,
            stream: false,
            prompt,
            cache_salt: None,
            max_output_tokens: None,
            tokenization: TokenizationOptions::default(),
            nvext: None,
            previous_response_id: None,
            stores_response: false,
            returns_prompt_logprobs: false,
        }
    }

    /// Replaces `truncate_prompt_tokens: -1` by the number of prompt tokens that vLLM keeps.
    /// `max_model_len` is the model's context length in tokens, output included.
    pub fn resolve_truncation(&mut self, max_model_len: u64) {
        if self.tokenization.truncate_prompt_tokens != Some(-1) {
            return;
        }
        let room = match self.max_output_tokens {
            None | Some(0) => max_model_len,
            // vLLM reserves one token for the output if its length was requested.
            Some(_) => max_model_len.saturating_sub(1),
        };
        // Without room for the prompt, the engine decides how to reject the request.
        self.tokenization.truncate_prompt_tokens = i64::try_from(room)
            .ok()
            .filter(|room| *room > 0)
            .or(Some(-1));
    }

    /// Creates a request whose tokens cannot be known, with `text_bytes` bytes of text.
    fn untokenized(model: Option<String>, text_bytes: usize) -> Self {
        Self::with_prompt(
            model,
            PromptInput::Unknown(UnknownPrompt {
                text_bytes,
                reason: UnknownPromptReason::BuiltByEngine,
            }),
        )
    }

    /// Creates a request that continues from state stored in an engine, with `text_bytes` bytes of
    /// new text.
    fn stored_in_engine(model: Option<String>, text_bytes: usize) -> Self {
        Self::with_prompt(
            model,
            PromptInput::Unknown(UnknownPrompt {
                text_bytes,
                reason: UnknownPromptReason::StoredInEngine,
            }),
        )
    }
}

impl PromptInput {
    /// Returns the number of bytes of text in the prompt.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Chat(chat) => chat.text_bytes(),
            Self::Texts(texts) => texts.iter().map(String::len).sum(),
            Self::Unknown(unknown) => unknown.text_bytes,
            Self::Tokens(_) | Self::Embeddings | Self::OverLimit | Self::NoPrompt => 0,
        }
    }
}

/// The input that the engine continues.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptInput {
    /// A conversation, rendered by the chat template.
    Chat(Box<ChatPrompt>),
    /// One or several texts.
    Texts(Vec<String>),
    /// One or several lists of token ids.
    Tokens(Vec<Vec<u32>>),
    /// Embeddings instead of tokens, or in addition to them.
    Embeddings,
    /// More prompts or JSON values than warmroute reads.
    OverLimit,
    /// A prompt whose tokens only the engine knows.
    Unknown(UnknownPrompt),
    /// No prompt: the request needs no computation.
    NoPrompt,
}

/// A prompt whose tokens cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPrompt {
    /// Number of bytes of text in the prompt.
    pub text_bytes: usize,
    /// Reason why the tokens are unknown.
    pub reason: UnknownPromptReason,
}

/// Reason why the tokens of a request cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownPromptReason {
    /// The engine or the model builds the prompt in its own way.
    BuiltByEngine,
    /// The prompt continues from state stored in an engine.
    StoredInEngine,
}

/// Request options that change the conversion from text to tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenizationOptions {
    /// Overrides whether the tokenizer adds its special tokens. By default it does for completions
    /// and not for chats.
    pub add_special_tokens: Option<bool>,
    /// Maximum number of prompt tokens; -1 means the model's context length.
    pub truncate_prompt_tokens: Option<i64>,
    /// Side that truncation removes, special tokens included. `None` means the tokenizer's side,
    /// where special tokens are never removed.
    pub truncation_side: Option<TruncationSide>,
    /// Truncation side of the engine's tokenizer.
    pub tokenizer_side: TruncationSide,
}

impl TokenizationOptions {
    /// Returns the side that truncation removes.
    pub fn removed_side(&self) -> TruncationSide {
        self.truncation_side.unwrap_or(self.tokenizer_side)
    }
}

/// The side of a prompt that truncation removes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TruncationSide {
    /// Truncation removes the beginning.
    #[default]
    Left,
    /// Truncation removes the end.
    Right,
}

/// A request body that cannot be read.
#[derive(Debug, Error)]
pub enum ParseError {
    /// The body is not UTF-8; holds the offset of the first invalid byte.
    #[error("the request body is not UTF-8 (byte {0})")]
    NotUtf8(usize),
    /// The body is a JSON list or a bare value.
    #[error("the request body is not a JSON object")]
    NotAnObject,
    /// The body is not JSON or has an unexpected structure. The message is logged, so it contains
    /// no content of the body.
    #[error("the request body is invalid: {0}")]
    Json(String),
    /// A required field is missing.
    #[error("the request has no `{0}`")]
    Missing(&'static str),
    /// A list is empty where the engine requires an entry.
    #[error("`{0}` is empty")]
    Empty(&'static str),
}

impl From<serde_json::Error> for ParseError {
    fn from(error: serde_json::Error) -> Self {
        let text = error.to_string();
        if error.classify() != Category::Data {
            return Self::Json(text);
        }
        // serde's message begins with the invalid value, which must not be logged, and ends with
        // the expected type.
        let place = format!(" at line {} column {}", error.line(), error.column());
        let message = text.strip_suffix(&place).unwrap_or(&text);
        let named = ["missing field `", "duplicate field `"]
            .iter()
            .any(|known| message.starts_with(known));
        let what = match message.rfind(", expected ") {
            _ if named => message,
            Some(at) => &message[at + 2..],
            None => "a value of another shape",
        };
        Self::Json(format!("{what}{place}"))
    }
}

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
        #[serde(default, borrow)]
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
        api => retains_json_values(api, text) && json_scan::has_more_values(body, MAX_JSON_VALUES),
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
    let exceeds_limit = || json_scan::has_more_values(text.as_bytes(), MAX_JSON_VALUES);
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
        ApiKind::Score
        | ApiKind::Rerank
        | ApiKind::Transcriptions
        | ApiKind::Translations
        | ApiKind::Speech
        | ApiKind::ImageGenerations
        | ApiKind::ImageEdits
        | ApiKind::ImageVariations => untokenized::parse(text),
        ApiKind::CountTokens
        | ApiKind::Conversations
        | ApiKind::Tokenize
        | ApiKind::Detokenize
        | ApiKind::Render
        | ApiKind::Models => Ok(ApiRequest::with_prompt(
            read_model(text.as_bytes()),
            PromptInput::NoPrompt,
        )),
    }
}
