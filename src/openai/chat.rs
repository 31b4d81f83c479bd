//! The body of `/v1/chat/completions`: the conversation and everything the chat template may look at. Values that only
//! a template reads (tools, documents, arguments) stay JSON with their key order, since the order reaches the tokens.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::json::{self, JsonObject, JsonValue};
use super::part::{Media, Part};
use super::{ParseError, Prompt, Request, Side, Tokenization, lax};

/// A conversation and what its rendering depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// Tools offered to the model, as sent.
    pub tools: Option<Vec<JsonValue>>,
    /// Documents for retrieval templates, as sent.
    pub documents: Option<Vec<JsonValue>>,
    /// Whether the prompt ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Whether the answer goes on inside the last message.
    pub continue_final_message: bool,
    /// A template sent by the client; engines refuse it unless told to trust clients.
    pub chat_template: Option<String>,
    /// Further variables of the template.
    pub chat_template_kwargs: JsonObject,
    /// How hard to think.
    pub reasoning_effort: Option<String>,
    /// Whether the request says how its images and the like are to be read and cut.
    pub media_options: bool,
    /// Which of the tools the model may or must use, as sent.
    pub tool_choice: Option<JsonValue>,
    /// Whether it was put together from a request of another API.
    pub put_together: bool,
    /// Whether the client wants no thoughts, in the words of an API where engines find out what that is for a model.
    pub thinking_off: bool,
    /// Whether finished prompt tokens come beside the messages, which some engines take in their place.
    pub brings_tokens: bool,
    /// Whether another engine forwards finished prompt tokens that stand in for the messages.
    pub forwarded_tokens: bool,
    /// Whether system messages may stand behind others, as in `/v1/messages`, where vLLM merges them for some templates.
    pub inline_systems: bool,
    /// Whether more of its last message and further ones may follow that were not shown.
    pub unfinished: bool,
}

/// One message.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: String,
    /// What is said; absent when only tools are called.
    #[serde(default)]
    pub content: Option<Content>,
    /// Name of the speaker.
    #[serde(default)]
    pub name: Option<JsonValue>,
    /// What some templates are told to do.
    #[serde(default)]
    pub task: Option<JsonValue>,
    /// Calls the assistant made, as sent.
    #[serde(default)]
    pub tool_calls: Option<Vec<JsonValue>>,
    /// Whether the engine put the calls together itself; the order of their keys is another then.
    #[serde(skip)]
    pub calls_put_together: bool,
    /// The call a tool answers.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// What the assistant thought.
    #[serde(default)]
    pub reasoning: Option<String>,
    /// The older name of `reasoning`.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    /// Tools that a developer message brings along.
    #[serde(default)]
    pub tools: Option<JsonValue>,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts in order.
    Parts(Vec<Part>),
}

// By hand, because what serde derives for such a choice copies each text once more.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<Content, E> {
        Ok(Content::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Content, E> {
        Ok(Content::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
    }
}

impl Chat {
    /// Whether a part is something else than text.
    pub fn has_media(&self) -> bool {
        self.parts().any(Part::is_media)
    }

    /// Bytes of the text that reaches the prompt: messages with their tool calls and reasoning, tools and documents.
    pub fn text_bytes(&self) -> usize {
        let offered = [&self.tools, &self.documents]
            .into_iter()
            .flatten()
            .flatten();
        let messages = self.messages.iter().map(Message::text_bytes).sum::<usize>();
        messages + offered.map(JsonValue::text_bytes).sum::<usize>()
    }

    /// What is shown and played, in its order.
    pub fn media(&self) -> impl Iterator<Item = &Media> {
        self.parts().filter_map(Part::media)
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.messages
            .iter()
            .flat_map(|message| match &message.content {
                Some(Content::Parts(parts)) => &parts[..],
                _ => &[],
            })
    }
}

impl Message {
    /// A message that says a text.
    pub(super) fn of(role: &str, text: String) -> Self {
        Self {
            role: role.to_owned(),
            content: Some(Content::Text(text)),
            ..Self::default()
        }
    }

    fn text_bytes(&self) -> usize {
        let reasoning = self
            .reasoning
            .as_ref()
            .or(self.reasoning_content.as_ref())
            .map_or(0, String::len);
        let calls = self
            .tool_calls
            .iter()
            .flatten()
            .map(JsonValue::text_bytes)
            .sum::<usize>();
        self.content.as_ref().map_or(0, Content::text_bytes) + reasoning + calls
    }
}

impl Content {
    /// Bytes of its text.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts.iter().map(Part::text_bytes).sum(),
        }
    }
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default, deserialize_with = "lax::flag")]
    stream: Option<bool>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default, deserialize_with = "lax::integer")]
    max_tokens: Option<u64>,
    #[serde(default, deserialize_with = "lax::integer")]
    max_completion_tokens: Option<u64>,
    #[serde(default)]
    messages: Option<Vec<Message>>,
    #[serde(default)]
    tools: Option<Vec<JsonValue>>,
    #[serde(default)]
    documents: Option<Vec<JsonValue>>,
    #[serde(default, deserialize_with = "lax::flag")]
    add_generation_prompt: Option<bool>,
    #[serde(default, deserialize_with = "lax::flag")]
    continue_final_message: Option<bool>,
    #[serde(default)]
    chat_template: Option<String>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    #[serde(default)]
    reasoning_effort: Option<String>,
    #[serde(default)]
    tool_choice: Option<JsonValue>,
    #[serde(default)]
    input_ids: Option<IgnoredAny>,
    #[serde(default, deserialize_with = "json::object")]
    media_io_kwargs: Option<JsonObject>,
    #[serde(default, deserialize_with = "json::object")]
    mm_processor_kwargs: Option<JsonObject>,
    #[serde(default)]
    kv_transfer_params: Option<Forwarded>,
    #[serde(default, deserialize_with = "lax::flag")]
    add_special_tokens: Option<bool>,
    #[serde(default, deserialize_with = "lax::integer")]
    truncate_prompt_tokens: Option<i64>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
    #[serde(default)]
    truncation_side: Option<Side>,
}

/// What engines tell one another about a request.
#[derive(Deserialize)]
pub(super) struct Forwarded {
    #[serde(default)]
    prompt_token_ids: Option<IgnoredAny>,
}

impl Forwarded {
    /// Whether the prompt's tokens are among it.
    pub(super) fn has_tokens(&self) -> bool {
        self.prompt_token_ids.is_some()
    }
}

pub(super) fn parse(text: &str) -> Result<Request, ParseError> {
    let body: Body<'_> = serde_json::from_str(text)?;
    let messages = body.messages.ok_or(ParseError::Missing("messages"))?;
    if messages.is_empty() {
        return Err(ParseError::Empty("messages"));
    }
    let options = [&body.media_io_kwargs, &body.mm_processor_kwargs];
    let chat = Chat {
        messages,
        media_options: options
            .into_iter()
            .flatten()
            .any(|options| !options.is_empty()),
        tools: body.tools,
        documents: body.documents,
        add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
        continue_final_message: body.continue_final_message.unwrap_or(false),
        chat_template: body.chat_template,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.reasoning_effort,
        tool_choice: body.tool_choice,
        put_together: false,
        thinking_off: false,
        brings_tokens: body.input_ids.is_some(),
        forwarded_tokens: body
            .kv_transfer_params
            .is_some_and(|params| params.has_tokens()),
        inline_systems: false,
        unfinished: false,
    };
    Ok(Request {
        model: body.model,
        stream: body.stream.unwrap_or(false),
        prompt: Prompt::Chat(Box::new(chat)),
        cache_salt: body.cache_salt,
        max_output_tokens: body.max_completion_tokens.or(body.max_tokens),
        tokenization: Tokenization {
            add_special_tokens: body.add_special_tokens,
            truncate_prompt_tokens: body.truncate_prompt_tokens,
            truncation_side: body.truncation_side,
            ..Tokenization::default()
        },
        extension: body.nvext.map(|raw| raw.get().into()),
    })
}
