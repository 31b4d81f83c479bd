//! Request body of Anthropic's `/v1/messages`, converted to a chat request as in vLLM 0.32.
//!
//! The system prompt becomes one message. Tool results become messages before the user message that
//! contains them. Reasoning and tool calls belong to the assistant message. System messages keep
//! their position if the template supports it, and their blocks may add or remove tools.
//!
//! The conversion was verified with requests captured from an engine. If a body has a feature
//! without such a capture, its prompt is unknown.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::chat::{self, ChatMessage, ChatPrompt, ForwardedPrompt, MessageContent};
use super::content_part::{ContentPart, TypedPart};
use super::error::ParseError;
use super::fold::{FoldSequence, folded};
use super::json::{self, JsonObject, JsonValue};
use super::lax::{LaxBool, LaxInteger};
use super::request::{ApiRequest, PromptInput};

mod image_source;
mod tools;

use image_source::ImageSource;
use tools::ToolChange;

/// Prefix of a line that Claude Code changes with every request. vLLM removes the line, because it
/// would prevent prefix cache hits.
pub(crate) const BILLING_HEADER_PREFIX: &str = "x-anthropic-billing-header";

#[derive(Deserialize)]
struct MessagesBody<'a> {
    model: Option<String>,
    stream: Option<LaxBool>,
    max_tokens: Option<LaxInteger<u64>>,
    cache_salt: Option<String>,
    system: Option<SystemPrompt>,
    messages: Option<FoldedMessages>,
    tools: Option<Vec<JsonValue>>,
    tool_choice: Option<JsonValue>,
    output_config: Option<OutputConfig>,
    thinking: Option<ThinkingOptions>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    kv_transfer_params: Option<ForwardedPrompt>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct OutputConfig {
    effort: Option<String>,
}

#[derive(Deserialize)]
struct ThinkingOptions {
    #[serde(rename = "type")]
    kind: Option<String>,
}

pub(super) fn parse(text: &str) -> Result<ApiRequest, ParseError> {
    let body: MessagesBody<'_> = serde_json::from_str(text)?;
    let turns = body.messages.ok_or(ParseError::Missing("messages"))?;
    let SystemPrompt(system) = body.system.unwrap_or_default();
    let sent = body
        .tools
        .iter()
        .flatten()
        .map(JsonValue::text_bytes)
        .sum::<usize>();
    let text_bytes = turns.text_bytes + system.len() + sent;
    let request = ApiRequest {
        stream: body.stream.is_some_and(LaxBool::get),
        max_output_tokens: body.max_tokens.map(LaxInteger::get),
        cache_salt: body.cache_salt,
        nvext: body.nvext.map(|raw| raw.get().into()),
        ..ApiRequest::untokenized(body.model, text_bytes)
    };
    let (false, Ok(tools)) = (
        turns.is_unsupported,
        tools::template_tools(body.tools, turns.tool_changes),
    ) else {
        return Ok(request);
    };
    let system = Some(system)
        .filter(|text| !text.is_empty())
        .map(|text| ChatMessage::with_text("system", text));
    let messages = chat::wrap_in_arc(system.into_iter().chain(turns.messages));
    if messages.is_empty() {
        return Err(ParseError::Empty("messages"));
    }
    let chat = ChatPrompt {
        messages,
        tools,
        // Engines convert it to the format of chat completions.
        tool_choice: body
            .tool_choice
            .and_then(|choice| choice.get("type").cloned()),
        add_generation_prompt: true,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.output_config.and_then(|config| config.effort),
        is_converted: true,
        allows_inline_system_messages: true,
        is_thinking_disabled: body
            .thinking
            .is_some_and(|thinking| thinking.kind.as_deref() == Some("disabled")),
        has_forwarded_tokens: ForwardedPrompt::is_in(body.kv_transfer_params),
        ..ChatPrompt::default()
    };
    Ok(ApiRequest {
        prompt: PromptInput::Chat(Box::new(chat)),
        ..request
    })
}

/// Text of the system prompt.
#[derive(Default)]
struct SystemPrompt(String);

/// Messages of a body. They are converted to chat messages one by one, so no list of blocks is
/// stored.
#[derive(Default)]
struct FoldedMessages {
    messages: Vec<ChatMessage>,
    text_bytes: usize,
    /// Tool changes, oldest first.
    tool_changes: Vec<ToolChange>,
    /// True if the engine's conversion is unknown.
    is_unsupported: bool,
}

#[derive(Deserialize)]
struct AnthropicMessage {
    role: String,
    content: FoldedBlocks,
}

/// Content of one message.
#[derive(Default)]
struct FoldedBlocks {
    plain_text: Option<String>,
    parts: Vec<ContentPart>,
    tool_calls: Vec<JsonValue>,
    tool_changes: Vec<ToolChange>,
    reasoning: Option<String>,
    /// Chat messages that represent tool results.
    tool_results: Vec<ChatMessage>,
    text_bytes: usize,
    is_unsupported: bool,
}

#[derive(Deserialize)]
struct ContentBlock {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    source: Option<ImageSource>,
    id: Option<String>,
    tool_use_id: Option<String>,
    name: Option<String>,
    input: Option<Box<RawValue>>,
    content: Option<ToolResultContent>,
    thinking: Option<String>,
    tool: Option<JsonValue>,
}

/// Content of a tool result.
#[derive(Default)]
struct ToolResultContent {
    text: String,
    text_count: usize,
    images: Vec<ContentPart>,
    is_unsupported: bool,
}

impl FoldedMessages {
    /// Appends a message to the conversation. Returns `None` if the engine's conversion is unknown.
    fn try_fold(&mut self, turn: AnthropicMessage) -> Option<()> {
        let FoldedBlocks {
            plain_text,
            parts,
            tool_calls,
            tool_changes,
            reasoning,
            tool_results,
            is_unsupported,
            ..
        } = turn.content;
        let is_user = match turn.role.as_str() {
            // Some versions of Claude Code use the roles `ctx` and `msg` for the user.
            "user" | "ctx" | "msg" => true,
            "assistant" => false,
            "system" => {
                self.tool_changes.extend(tool_changes);
                let text = plain_text
                    .filter(|text| !text.starts_with(BILLING_HEADER_PREFIX))
                    .unwrap_or_else(|| system_message_text(parts));
                self.messages
                    .extend((!text.is_empty()).then(|| ChatMessage::with_text("system", text)));
                return (!is_unsupported).then_some(());
            }
            _ => return None,
        };
        // The engine prints a tool result in an assistant message with Python's `str`, which is not
        // reproduced.
        if is_unsupported || !tool_changes.is_empty() || (!is_user && !tool_results.is_empty()) {
            return None;
        }
        self.messages.extend(tool_results);
        let content = match (plain_text, parts) {
            (Some(text), _) => Some(MessageContent::Text(text.into())),
            (None, parts) if parts.is_empty() => None,
            (None, parts) => Some(content_of_parts(parts)),
        };
        if content.is_none() && is_user {
            return Some(());
        }
        self.messages.push(if is_user {
            ChatMessage {
                content,
                ..ChatMessage::with_role("user")
            }
        } else {
            ChatMessage {
                content,
                tool_calls: Some(tool_calls).filter(|tool_calls| !tool_calls.is_empty()),
                reasoning,
                ..ChatMessage::with_role("assistant")
            }
        });
        Some(())
    }
}

/// Returns the text of an inline system message.
fn system_message_text(parts: Vec<ContentPart>) -> String {
    let texts = parts.into_iter().filter_map(|part| match part {
        ContentPart::Typed(TypedPart {
            kind: Some(kind),
            text: Some(text),
            ..
        }) if kind == "text" => Some(text),
        _ => None,
    });
    texts
        .filter(|text| !text.starts_with(BILLING_HEADER_PREFIX))
        .collect()
}

/// Returns the content of a message with these parts. A single text becomes plain text.
fn content_of_parts(parts: Vec<ContentPart>) -> MessageContent {
    match <[ContentPart; 1]>::try_from(parts) {
        Ok(
            [
                ContentPart::Typed(TypedPart {
                    kind: Some(kind),
                    text: Some(text),
                    ..
                }),
            ],
        ) if kind == "text" => MessageContent::Text(text.into()),
        Ok([part]) => MessageContent::Parts(vec![part]),
        Err(parts) => MessageContent::Parts(parts),
    }
}

impl FoldedBlocks {
    fn try_fold(&mut self, block: ContentBlock) -> Option<()> {
        match block.kind.as_str() {
            "text" => self.parts.extend(
                block
                    .text
                    .filter(|text| !text.is_empty())
                    .map(|text| ContentPart::with_type("text", Some(text))),
            ),
            "image" => self.parts.extend(block.source.map(ImageSource::into_part)),
            "thinking" => {
                if let Some(thinking) = block.thinking {
                    self.reasoning.get_or_insert_default().push_str(&thinking);
                }
            }
            // The engine ignores tool references outside of tool results.
            "redacted_thinking" | "tool_reference" => {}
            "tool_addition" | "tool_removal" => self
                .tool_changes
                .push(ToolChange::parse(&block.kind, block.tool.as_ref()?)?),
            "tool_use" => {
                let id = block.id.filter(|id| !id.is_empty()).map(JsonValue::from);
                let id = id.unwrap_or(JsonValue::Unknown("an id that the engine generates"));
                let arguments = block.input.as_ref().map_or("{}", |input| input.get());
                if !arguments.starts_with('{') {
                    return None;
                }
                let name = block.name.unwrap_or_default();
                let function =
                    JsonValue::object([("name", name.into()), ("arguments", arguments.into())]);
                self.tool_calls.push(JsonValue::object([
                    ("id", id),
                    ("type", "function".into()),
                    ("function", function),
                ]));
            }
            "tool_result" => {
                let ToolResultContent {
                    text,
                    images,
                    is_unsupported,
                    ..
                } = block.content.unwrap_or_default();
                if is_unsupported {
                    return None;
                }
                let tool_call_id = Some(block.tool_use_id.unwrap_or_default());
                self.tool_results.push(ChatMessage {
                    tool_call_id,
                    ..ChatMessage::with_text("tool", text)
                });
                if !images.is_empty() {
                    self.tool_results.push(ChatMessage {
                        content: Some(MessageContent::Parts(images)),
                        ..ChatMessage::with_role("user")
                    });
                }
            }
            _ => return None,
        }
        Some(())
    }
}

impl ContentBlock {
    fn text_bytes(&self) -> usize {
        let texts = [&self.text, &self.thinking]
            .into_iter()
            .flatten()
            .map(String::len)
            .sum::<usize>();
        let input = self.input.as_ref().map_or(0, |input| input.get().len());
        let tool = self.tool.as_ref().map_or(0, JsonValue::text_bytes);
        texts
            + input
            + tool
            + self
                .content
                .as_ref()
                .map_or(0, |content| content.text.len())
    }
}

impl FoldSequence for SystemPrompt {
    type Element = ContentBlock;

    fn from_text(text: &str) -> Option<Self> {
        Some(Self(text.to_owned()))
    }

    fn add_element(&mut self, block: ContentBlock) {
        let text = block
            .text
            .filter(|text| block.kind == "text" && !text.starts_with(BILLING_HEADER_PREFIX));
        self.0.push_str(&text.unwrap_or_default());
    }
}

impl FoldSequence for FoldedMessages {
    type Element = AnthropicMessage;

    fn from_text(_: &str) -> Option<Self> {
        None
    }

    fn add_element(&mut self, turn: AnthropicMessage) {
        self.text_bytes += turn.content.text_bytes;
        if self.is_unsupported || self.try_fold(turn).is_none() {
            self.is_unsupported = true;
            self.messages = Vec::new();
        }
    }
}

impl FoldSequence for FoldedBlocks {
    type Element = ContentBlock;

    fn from_text(text: &str) -> Option<Self> {
        Some(Self {
            plain_text: Some(text.to_owned()),
            text_bytes: text.len(),
            ..Self::default()
        })
    }

    fn add_element(&mut self, block: ContentBlock) {
        self.text_bytes += block.text_bytes();
        if self.is_unsupported || self.try_fold(block).is_none() {
            *self = Self {
                is_unsupported: true,
                text_bytes: self.text_bytes,
                ..Self::default()
            };
        }
    }
}

impl FoldSequence for ToolResultContent {
    type Element = JsonValue;

    fn from_text(text: &str) -> Option<Self> {
        Some(Self {
            text: text.to_owned(),
            ..Self::default()
        })
    }

    fn add_element(&mut self, block: JsonValue) {
        match block.get("type").and_then(JsonValue::as_str) {
            Some("text") => {
                if self.text_count > 0 {
                    self.text.push('\n');
                }
                self.text_count += 1;
                match block.get("text") {
                    None => {}
                    Some(JsonValue::String(text)) => self.text.push_str(text),
                    Some(_) => self.is_unsupported = true,
                }
            }
            Some("image") => self.images.extend(
                block
                    .get("source")
                    .map(|source| ImageSource::from_json(source).into_part()),
            ),
            // The engine's conversion is not covered by a capture.
            Some("tool_reference") => self.is_unsupported = true,
            // The engine ignores other blocks.
            _ => self.is_unsupported |= !block.is_object(),
        }
    }
}

folded!(
    SystemPrompt,
    FoldedMessages,
    FoldedBlocks,
    ToolResultContent
);
