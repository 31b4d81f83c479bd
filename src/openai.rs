//! OpenAI request bodies as vLLM reads them: only the fields that decide which tokens the engine sees, who is asked and
//! how much it will write. Unknown fields are ignored, because every engine version adds some; a body that cannot be
//! read is a [`ParseError`] in plain words and never a panic, because anybody can send one.

mod anthropic;
mod api;
mod by_load;
mod chat;
mod completion;
pub mod cut;
pub mod edit;
mod extension;
mod field;
mod form;
mod generate;
mod json;
mod lax;
mod part;
pub mod paths;
mod pooling;
mod responses;
pub mod restore;
mod scan;
pub mod usage;
mod walk;

#[cfg(test)]
mod tests;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::error::Category;
use serde_json::value::RawValue;
use thiserror::Error;

pub use api::{Api, Shape};
pub use chat::{Chat, Content, Message};
pub use extension::{
    AgentHints, Extension, QUERY, RoutingConstraints, SessionAction, SessionControl,
};
pub use field::text_of;
pub use form::boundary;
pub use json::{JsonError, JsonObject, JsonValue};
pub use part::{Meaning, Media, Modality, More, Part, Source, Typed};
pub use paths::Paths;

/// Most values of a conversation, with its tools, that are looked at: many times what honest clients send.
const MOST_VALUES: usize = 1 << 17;

/// One request, as far as routing needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Model or adapter asked for.
    pub model: Option<String>,
    /// Whether the answer is a stream of server-sent events.
    pub stream: bool,
    /// What the engine is asked to continue.
    pub prompt: Prompt,
    /// Separates equal prompts of different tenants.
    pub cache_salt: Option<String>,
    /// Most tokens the answer may have; none, where that is all there is room for.
    pub max_output_tokens: Option<u64>,
    /// How text becomes tokens.
    pub tokenization: Tokenization,
    /// What the body says to routers, where it says anything; unread JSON, because most clients are not to be believed.
    pub extension: Option<Box<str>>,
}

impl Request {
    fn of(model: Option<String>, prompt: Prompt) -> Self {
        Self {
            model,
            stream: false,
            prompt,
            cache_salt: None,
            max_output_tokens: None,
            tokenization: Tokenization::default(),
            extension: None,
        }
    }

    /// Says in tokens how long vLLM leaves a prompt that is to be cut to what its model takes, which is `longest` with the answer.
    pub fn measure(&mut self, longest: u64) {
        if self.tokenization.truncate_prompt_tokens != Some(-1) {
            return;
        }
        let room = match self.max_output_tokens {
            None | Some(0) => longest,
            // One token is kept back for an answer whose length was asked for.
            Some(_) => longest.saturating_sub(1),
        };
        // Where no room is left, the engine decides what is wrong with the request.
        self.tokenization.truncate_prompt_tokens = i64::try_from(room)
            .ok()
            .filter(|room| *room > 0)
            .or(Some(-1));
    }

    /// Work whose tokens cannot be known, with so many bytes of text.
    fn by_load(model: Option<String>, text_bytes: usize) -> Self {
        Self::of(
            model,
            Prompt::Opaque(Opaque {
                text_bytes,
                because: Hidden::Assembled,
            }),
        )
    }

    /// Work that goes on from something an engine remembers, with so many bytes of new text.
    fn remembered(model: Option<String>, text_bytes: usize) -> Self {
        Self::of(
            model,
            Prompt::Opaque(Opaque {
                text_bytes,
                because: Hidden::Remembered,
            }),
        )
    }
}

impl Prompt {
    /// Bytes of the text in it.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Chat(chat) => chat.text_bytes(),
            Self::Texts(texts) => texts.iter().map(String::len).sum(),
            Self::Opaque(opaque) => opaque.text_bytes,
            Self::Tokens(_) | Self::Embeddings | Self::TooMany | Self::Nothing => 0,
        }
    }
}

/// What the engine is asked to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, to be rendered by the chat template.
    Chat(Box<Chat>),
    /// One or many texts.
    Texts(Vec<String>),
    /// One or many prompts that are tokens already.
    Tokens(Vec<Vec<u32>>),
    /// Embeddings instead of tokens, alone or beside tokens.
    Embeddings,
    /// More prompts than are looked at.
    TooMany,
    /// Something that only the engine turns into tokens.
    Opaque(Opaque),
    /// Nothing that would have to be computed.
    Nothing,
}

/// Work whose tokens cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opaque {
    /// Bytes of the text in it.
    pub text_bytes: usize,
    /// Why.
    pub because: Hidden,
}

/// Why the tokens of a request cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// The engine, or the model, puts the prompt together in its own way.
    Assembled,
    /// It goes on from something that an engine remembers.
    Remembered,
}

/// Options of both endpoints that change how text becomes tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokenization {
    /// Whether the tokenizer adds its special tokens; unset means completions yes, chat no.
    pub add_special_tokens: Option<bool>,
    /// Most prompt tokens to keep; -1 means as many as the model takes.
    pub truncate_prompt_tokens: Option<i64>,
    /// Side that truncation cuts off, special tokens or not; unset means the tokenizer's, which spares those.
    pub truncation_side: Option<Side>,
    /// Side that the engine's tokenizer cuts off.
    pub tokenizer_side: Side,
}

/// A side of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The beginning.
    #[default]
    Left,
    /// The end.
    Right,
}

/// Why a body cannot be read.
#[derive(Debug, Error)]
pub enum ParseError {
    /// Not text.
    #[error("the request body is not UTF-8 (byte {0})")]
    NotUtf8(usize),
    /// A list or a bare value.
    #[error("the request body is not a JSON object")]
    NotAnObject,
    /// Not JSON, or JSON of another shape; said without a word of the body, because this is logged.
    #[error("the request body is not understood: {0}")]
    Json(String),
    /// Nothing to continue.
    #[error("the request has no `{0}`")]
    Missing(&'static str),
    /// An empty list where the engine wants at least one entry.
    #[error("`{0}` is empty")]
    Empty(&'static str),
}

impl From<serde_json::Error> for ParseError {
    fn from(error: serde_json::Error) -> Self {
        let text = error.to_string();
        if error.classify() != Category::Data {
            return Self::Json(text);
        }
        // What is wrong with the shape comes with the value that has it. What was expected instead comes last.
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

/// The model that a body names, read without asking more of the body than that: engines take bodies that are refused
/// here, and such a request should still reach a worker that serves its model.
pub fn model_of(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Named {
        model: String,
    }
    // The derived reader would take a list for the fields in their order.
    let object = body.trim_ascii_start().starts_with(b"{");
    object.then(|| {
        serde_json::from_slice::<Named>(body)
            .ok()
            .map(|named| named.model)
    })?
}

/// Longest body that is looked through for its model alone, and the beginning of longer ones that is.
const LOOKED_THROUGH: usize = 1 << 20;

/// Longest name of a model that is believed; longer ones only cost memory wherever they are written.
pub const LONGEST_MODEL: usize = 1024;

/// The model of a body that is not read any further, as far as it is found quickly; of a body that is cut, not a name that
/// may go on.
pub fn model_quickly(body: &[u8]) -> Option<String> {
    let mended = cut::mend(&body[..body.len().min(LOOKED_THROUGH)])?;
    let in_name = mended.cut == cut::Cut::Text(vec!["model".into()]);
    let mended = if in_name { mended.shorter()? } else { mended };
    model_of(&mended.json)
}

/// Reads a body that is JSON, or where the API takes forms and there is a `boundary`, a form.
pub fn parse_body(api: Api, boundary: Option<&str>, body: &[u8]) -> Result<Request, ParseError> {
    match boundary.filter(|_| !api.is_text()) {
        Some(boundary) => Ok(Request::by_load(form::model(boundary, body), 0)),
        None => parse(api, body),
    }
}

/// Whether a body is kept as values, each of which takes far more memory than its bytes do, and not as texts and tokens.
fn keeps_values(api: Api, text: &str) -> bool {
    #[derive(Deserialize)]
    struct Kept<'a> {
        messages: Option<IgnoredAny>,
        chat_template_kwargs: Option<IgnoredAny>,
        #[serde(default, borrow)]
        lora_path: Option<&'a RawValue>,
    }
    match api {
        // A value has a byte, and another that separates it from the next.
        _ if text.len() <= 2 * MOST_VALUES => false,
        Api::ChatCompletions | Api::Responses | Api::Messages => true,
        Api::Embeddings | Api::Pooling | Api::Classify | Api::SglangGenerate => {
            serde_json::from_str::<Kept<'_>>(text).is_ok_and(|kept| {
                let nested = kept
                    .lora_path
                    .is_some_and(|raw| raw.get().starts_with(['[', '{']));
                kept.messages.is_some() || kept.chat_template_kwargs.is_some() || nested
            })
        }
        _ => false,
    }
}

/// Whether a body has so many prompts, or values, that none is looked at.
pub fn is_too_much(api: Api, body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok_and(|text| match api {
        Api::Completions => completion::has_too_many(text),
        api => keeps_values(api, text) && scan::has_more_values(body, MOST_VALUES),
    })
}

/// Reads a request body. Nesting deeper than 128 levels is refused, and deeper than 200 in values for templates is not known, so
/// that a body cannot exhaust the stack.
pub fn parse(api: Api, body: &[u8]) -> Result<Request, ParseError> {
    let text =
        std::str::from_utf8(body).map_err(|error| ParseError::NotUtf8(error.valid_up_to()))?;
    // The derived readers would take a list for the fields in their order.
    if text.trim_start().starts_with(|c| c != '{') {
        return Err(ParseError::NotAnObject);
    }
    if keeps_values(api, text) && scan::has_more_values(body, MOST_VALUES) {
        return Ok(Request::of(model_of(body), Prompt::TooMany));
    }
    match api {
        Api::ChatCompletions => chat::parse(text),
        Api::Completions => completion::parse(text),
        Api::Embeddings | Api::Pooling | Api::Classify => pooling::parse(text),
        Api::Responses => responses::parse(text),
        Api::Messages => anthropic::parse(text),
        Api::SglangGenerate => generate::sglang(text),
        Api::VllmGenerate => generate::vllm(text),
        Api::Score
        | Api::Rerank
        | Api::Transcriptions
        | Api::Translations
        | Api::Speech
        | Api::ImageGenerations
        | Api::ImageEdits
        | Api::ImageVariations => by_load::parse(text),
        Api::CountTokens
        | Api::Conversations
        | Api::Tokenize
        | Api::Detokenize
        | Api::Render
        | Api::Models => Ok(Request::of(model_of(body), Prompt::Nothing)),
    }
}
