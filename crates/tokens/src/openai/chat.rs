//! Request body of `/v1/chat/completions`: the conversation and all variables of the chat template.
//! Values that only a template reads (tools, documents, arguments) are kept as JSON in their key
//! order, because the order changes the tokens.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::content_part::{ContentPart, MediaItem};
use super::error::ParseError;
use super::json::{self, JsonObject, JsonValue};
use super::lax::{LaxBool, LaxInteger};
use super::message_cache::{MessageCache, MessageReuse};
use super::message_text::MessageText;
use super::plain_messages::{self, PlainMessages};
use super::request::{ApiRequest, PromptInput, TokenizationOptions, TruncationSide};

/// A conversation and the options that its rendering depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatPrompt {
    /// Messages, oldest first.
    pub messages: Vec<Arc<ChatMessage>>,
    /// Tools offered to the model, unchanged.
    pub tools: Option<Vec<JsonValue>>,
    /// Documents for retrieval templates, unchanged.
    pub documents: Option<Vec<JsonValue>>,
    /// True if the prompt ends with the beginning of an assistant message.
    pub add_generation_prompt: bool,
    /// True if the output continues the last message.
    pub continue_final_message: bool,
    /// Chat template of the client. Engines reject it unless they are configured to trust clients.
    pub chat_template: Option<String>,
    /// Additional template variables.
    pub chat_template_kwargs: JsonObject,
    /// Requested reasoning effort.
    pub reasoning_effort: Option<String>,
    /// True if the request has options for decoding or resizing its media.
    pub has_media_options: bool,
    /// Tools that the model may or must call, unchanged.
    pub tool_choice: Option<JsonValue>,
    /// True if the conversation was converted from a request of another API.
    pub is_converted: bool,
    /// True if the client disables reasoning through an API where engines must probe the template
    /// for the switch.
    pub is_thinking_disabled: bool,
    /// True if the request also has `input_ids`, which some engines use instead of the messages.
    pub has_input_ids: bool,
    /// True if another engine forwards prompt token ids that replace the messages.
    pub has_forwarded_tokens: bool,
    /// True if system messages may follow other messages, as in `/v1/messages`. vLLM merges them
    /// for some templates.
    pub allows_inline_system_messages: bool,
    /// True for the pooling APIs, whose prompts engines render without their default variables.
    pub is_pooling: bool,
}

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ChatMessage {
    /// Role of the author.
    pub role: String,
    /// Content; absent in messages that only call tools.
    pub content: Option<MessageContent>,
    /// Name of the author.
    pub name: Option<JsonValue>,
    /// Task instruction that some templates read.
    pub task: Option<JsonValue>,
    /// Tool calls of the assistant, unchanged.
    pub tool_calls: Option<Vec<JsonValue>>,
    /// True if the engine builds the tool calls itself, which changes the order of their keys.
    #[serde(skip)]
    pub has_converted_calls: bool,
    /// Id of the tool call that this message answers.
    pub tool_call_id: Option<String>,
    /// Reasoning of the assistant.
    pub reasoning: Option<String>,
    /// Older name of `reasoning`.
    pub reasoning_content: Option<String>,
    /// Tools defined by a developer message.
    pub tools: Option<JsonValue>,
}

/// Content of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum MessageContent {
    /// Plain text.
    Text(MessageText),
    /// A list of parts.
    Parts(Vec<ContentPart>),
}

// Implemented by hand, because the derived code for an untagged enum makes another copy of each
// text.
impl<'de> Deserialize<'de> for MessageContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MessageContentVisitor)
    }
}

struct MessageContentVisitor;

impl<'de> Visitor<'de> for MessageContentVisitor {
    type Value = MessageContent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<MessageContent, E> {
        Ok(MessageContent::Text(text.to_owned().into()))
    }

    fn visit_string<E>(self, text: String) -> Result<MessageContent, E> {
        Ok(MessageContent::Text(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<MessageContent, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(MessageContent::Parts)
    }
}

impl ChatPrompt {
    /// Returns true if a part is not text.
    pub fn has_media(&self) -> bool {
        self.parts().any(ContentPart::is_media)
    }

    /// Returns the number of bytes of text in messages (with tool calls and reasoning), tools and
    /// documents.
    pub fn text_bytes(&self) -> usize {
        let offered = [&self.tools, &self.documents]
            .into_iter()
            .flatten()
            .flatten();
        let messages = self
            .messages
            .iter()
            .map(|message| message.text_bytes())
            .sum::<usize>();
        messages + offered.map(JsonValue::text_bytes).sum::<usize>()
    }

    /// Returns the media items in order.
    pub fn media_items(&self) -> impl Iterator<Item = &MediaItem> {
        self.parts().filter_map(ContentPart::media)
    }

    fn parts(&self) -> impl Iterator<Item = &ContentPart> {
        self.messages
            .iter()
            .flat_map(|message| match &message.content {
                Some(MessageContent::Parts(parts)) => &parts[..],
                _ => &[],
            })
    }
}

impl ChatMessage {
    /// Creates a message without content.
    pub(super) fn with_role(role: &str) -> Self {
        Self {
            role: role.to_owned(),
            ..Self::default()
        }
    }

    /// Creates a message with text content.
    pub(crate) fn with_text(role: &str, text: String) -> Self {
        Self {
            content: Some(MessageContent::Text(text.into())),
            ..Self::with_role(role)
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
        self.content.as_ref().map_or(0, MessageContent::text_bytes) + reasoning + calls
    }
}

impl MessageContent {
    /// Returns the number of bytes of text.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts.iter().map(ContentPart::text_bytes).sum(),
        }
    }
}

#[derive(Deserialize)]
struct ChatBody<'a> {
    model: Option<String>,
    stream: Option<LaxBool>,
    cache_salt: Option<String>,
    max_tokens: Option<LaxInteger<u64>>,
    max_completion_tokens: Option<LaxInteger<u64>>,
    messages: Option<Vec<ChatMessage>>,
    tools: Option<Vec<JsonValue>>,
    documents: Option<Vec<JsonValue>>,
    add_generation_prompt: Option<LaxBool>,
    continue_final_message: Option<LaxBool>,
    chat_template: Option<String>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    reasoning_effort: Option<String>,
    tool_choice: Option<JsonValue>,
    input_ids: Option<IgnoredAny>,
    #[serde(default, deserialize_with = "json::object")]
    media_io_kwargs: Option<JsonObject>,
    #[serde(default, deserialize_with = "json::object")]
    mm_processor_kwargs: Option<JsonObject>,
    kv_transfer_params: Option<ForwardedPrompt>,
    add_special_tokens: Option<LaxBool>,
    truncate_prompt_tokens: Option<LaxInteger<i64>>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
    truncation_side: Option<TruncationSide>,
    prompt_logprobs: Option<IgnoredAny>,
    echo: Option<LaxBool>,
    #[serde(default = "default_top_logprobs")]
    top_logprobs: Option<IgnoredAny>,
}

/// An absent `top_logprobs` is 0 in vLLM, not null. With `echo`, 0 also requests log probabilities of
/// the prompt.
fn default_top_logprobs() -> Option<IgnoredAny> {
    Some(IgnoredAny)
}

/// KV transfer parameters that another engine may send with a request.
#[derive(Deserialize)]
pub(super) struct ForwardedPrompt {
    prompt_token_ids: Option<IgnoredAny>,
}

impl ForwardedPrompt {
    /// Returns true if the parameters contain the prompt's token ids.
    pub(super) fn is_in(params: Option<Self>) -> bool {
        params.is_some_and(|params| params.prompt_token_ids.is_some())
    }
}

pub(super) fn parse(text: &str) -> Result<ApiRequest, ParseError> {
    if let Some(PlainMessages { messages, rest }) = plain_messages::read(text)
        && let Ok(body) = serde_json::from_str(&rest)
    {
        return parse_body(body, Some(messages));
    }
    parse_with_serde(text)
}

/// Parses a body, and reuses cached messages of earlier bodies. Returns `None` if the cache is not
/// usable for the body, or if the body is invalid.
pub(super) fn parse_cached(
    body: &Bytes,
    cache: &MessageCache,
    tenant: Option<&str>,
) -> Option<(ApiRequest, MessageReuse)> {
    let (messages, rest) = plain_messages::read_cached(body, cache, tenant)?;
    let fields = serde_json::from_str(&rest).ok()?;
    let request = parse_body(fields, Some(messages.messages())).ok()?;
    // The name of the salt may be written with escapes.
    let may_have_salt = |extension: &str| extension.contains('\\');
    if request.cache_salt.is_some() || request.nvext.as_deref().is_some_and(may_have_salt) {
        return None;
    }
    let has_media = matches!(&request.prompt, PromptInput::Chat(chat) if chat.has_media());
    let reuse = if has_media {
        // Images would evict many prompts.
        MessageReuse::default()
    } else {
        cache.store(&messages, &rest)
    };
    Some((request, reuse))
}

pub(super) fn parse_with_serde(text: &str) -> Result<ApiRequest, ParseError> {
    let mut body: ChatBody<'_> = serde_json::from_str(text)?;
    let messages = body.messages.take();
    parse_body(body, messages.map(wrap_in_arc))
}

/// Wraps each message in an [`Arc`].
pub(super) fn wrap_in_arc(
    messages: impl IntoIterator<Item = ChatMessage>,
) -> Vec<Arc<ChatMessage>> {
    messages.into_iter().map(Arc::new).collect()
}

fn parse_body(
    body: ChatBody<'_>,
    messages: Option<Vec<Arc<ChatMessage>>>,
) -> Result<ApiRequest, ParseError> {
    let messages = messages.ok_or(ParseError::Missing("messages"))?;
    if messages.is_empty() {
        return Err(ParseError::Empty("messages"));
    }
    let options = [&body.media_io_kwargs, &body.mm_processor_kwargs];
    let chat = ChatPrompt {
        messages,
        has_media_options: options
            .into_iter()
            .flatten()
            .any(|options| !options.is_empty()),
        tools: body.tools,
        documents: body.documents,
        add_generation_prompt: body.add_generation_prompt.is_none_or(LaxBool::get),
        continue_final_message: body.continue_final_message.is_some_and(LaxBool::get),
        chat_template: body.chat_template,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.reasoning_effort,
        tool_choice: body.tool_choice,
        has_input_ids: body.input_ids.is_some(),
        has_forwarded_tokens: ForwardedPrompt::is_in(body.kv_transfer_params),
        ..ChatPrompt::default()
    };
    let prompt = PromptInput::Chat(Box::new(chat));
    Ok(ApiRequest {
        stream: body.stream.is_some_and(LaxBool::get),
        cache_salt: body.cache_salt,
        max_output_tokens: body
            .max_completion_tokens
            .or(body.max_tokens)
            .map(LaxInteger::get),
        tokenization: TokenizationOptions {
            add_special_tokens: body.add_special_tokens.map(LaxBool::get),
            truncate_prompt_tokens: body.truncate_prompt_tokens.map(LaxInteger::get),
            truncation_side: body.truncation_side,
            ..TokenizationOptions::default()
        },
        nvext: body.nvext.map(|raw| raw.get().into()),
        returns_prompt_logprobs: body.prompt_logprobs.is_some()
            || body.echo.is_some_and(LaxBool::get) && body.top_logprobs.is_some(),
        ..ApiRequest::with_prompt(body.model, prompt)
    })
}
