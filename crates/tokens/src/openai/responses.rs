//! Request body of `/v1/responses`, converted to a conversation as in vLLM 0.32.
//!
//! The instructions become a system message. Consecutive reasoning, text and tool calls become one
//! assistant message, and tool outputs become tool messages. The template receives function tools,
//! custom tools and those of a namespace, but no other tools. Special tokens are added, because the
//! endpoint uses the tokenizer's default.
//!
//! The prompt is unknown if part of it is stored in the engine. The conversion was verified with
//! requests captured from an engine. If a body has a feature without such a capture, its prompt is
//! unknown too.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::chat::{self, ChatMessage, ChatPrompt, ForwardedPrompt, MessageContent};
use super::content_part::{ContentPart, TypedPart};
use super::error::ParseError;
use super::fold::{FoldSequence, folded};
use super::json::{self, JsonObject, JsonValue};
use super::lax::{LaxBool, LaxInteger};
use super::request::{ApiRequest, PromptInput, TokenizationOptions, UnknownPromptReason};

#[derive(Deserialize)]
struct ResponsesBody<'a> {
    model: Option<String>,
    stream: Option<LaxBool>,
    input: Option<ResponsesInput>,
    instructions: Option<String>,
    max_output_tokens: Option<LaxInteger<u64>>,
    cache_salt: Option<String>,
    tools: Option<Vec<JsonValue>>,
    tool_choice: Option<JsonValue>,
    reasoning: Option<ReasoningOptions>,
    /// An absent field means `disabled`, but `null` does not.
    #[serde(default = "disabled")]
    truncation: Option<String>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    kv_transfer_params: Option<ForwardedPrompt>,
    previous_response_id: Option<String>,
    store: Option<LaxBool>,
    previous_response: Option<IgnoredAny>,
    previous_input_messages: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
}

impl ResponsesBody<'_> {
    /// Returns true if the request continues from state stored in an engine.
    fn continues_stored_state(&self) -> bool {
        let stored = [
            &self.previous_response,
            &self.previous_input_messages,
            &self.conversation,
            &self.prompt,
        ];
        self.previous_response_id.is_some() || stored.into_iter().any(Option::is_some)
    }
}

#[derive(Deserialize)]
struct ReasoningOptions {
    effort: Option<String>,
}

fn disabled() -> Option<String> {
    Some("disabled".to_owned())
}

pub(super) fn parse(text: &str) -> Result<ApiRequest, ParseError> {
    let mut body: ResponsesBody<'_> = serde_json::from_str(text)?;
    body.previous_response_id.take_if(|id| id.is_empty());
    let remembered = body.continues_stored_state();
    let input = body.input.ok_or(ParseError::Missing("input"))?;
    let instructions = body.instructions.filter(|text| !text.is_empty());
    let tools = body.tools.unwrap_or_default();
    let shown = (!tools.is_empty()).then(|| template_tools(&tools));
    let tool_bytes = tools.iter().map(JsonValue::text_bytes).sum::<usize>();
    let text_bytes = input.text_bytes + instructions.as_ref().map_or(0, String::len) + tool_bytes;
    let request = ApiRequest {
        stream: body.stream.is_some_and(LaxBool::get),
        max_output_tokens: body.max_output_tokens.map(LaxInteger::get),
        cache_salt: body.cache_salt,
        nvext: body.nvext.map(|raw| raw.get().into()),
        previous_response_id: body.previous_response_id,
        stores_response: body.store.is_none_or(LaxBool::get),
        ..ApiRequest::untokenized(body.model, text_bytes)
    };
    if remembered || input.is_stored_in_engine {
        let prompt = PromptInput::unknown(text_bytes, UnknownPromptReason::StoredInEngine);
        return Ok(ApiRequest { prompt, ..request });
    }
    let (false, None | Some(Some(_))) = (input.is_unsupported, &shown) else {
        return Ok(request);
    };
    let system = instructions.map(|text| ChatMessage::with_text("system", text));
    let messages = chat::wrap_in_arc(system.into_iter().chain(input.messages));
    if messages.is_empty() {
        return Err(ParseError::Empty("input"));
    }
    let chat = ChatPrompt {
        messages,
        tools: shown.flatten(),
        tool_choice: body.tool_choice,
        add_generation_prompt: !input.continues_last_message,
        continue_final_message: input.continues_last_message,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.reasoning.and_then(|reasoning| reasoning.effort),
        is_converted: true,
        has_forwarded_tokens: ForwardedPrompt::is_in(body.kv_transfer_params),
        ..ChatPrompt::default()
    };
    let tokenization = TokenizationOptions {
        add_special_tokens: Some(true),
        truncate_prompt_tokens: (body.truncation.as_deref() != Some("disabled")).then_some(-1),
        ..TokenizationOptions::default()
    };
    Ok(ApiRequest {
        tokenization,
        prompt: PromptInput::Chat(Box::new(chat)),
        ..request
    })
}

/// Returns the tools that the template receives, in the format of chat completions. Returns `None`
/// if the engine rejects a tool.
fn template_tools(tools: &[JsonValue]) -> Option<Vec<JsonValue>> {
    let mut shown = Vec::new();
    for tool in tools {
        let tool = tool.as_object()?;
        match tool.get("type")?.as_str()? {
            "function" => shown.push(wrap_function(tool.clone())),
            "custom" => shown.push(wrap_function(function_of_custom_tool(tool)?)),
            "namespace" => {
                let JsonValue::Array(inner) = tool.get("tools")? else {
                    return None;
                };
                for function in inner {
                    shown.extend(function_in_namespace(
                        tool.get("name")?.as_str()?,
                        function.as_object()?,
                    )?);
                }
            }
            // Other tools are executed by the engine or a server, and the template omits them.
            _ => {}
        }
    }
    Some(shown)
}

fn wrap_function(function: JsonObject) -> JsonValue {
    JsonValue::object([
        ("type", "function".into()),
        ("function", JsonValue::Object(function)),
    ])
}

/// Returns the function with one text parameter that represents a custom tool.
fn function_of_custom_tool(tool: &JsonObject) -> Option<JsonObject> {
    let text = JsonValue::object([
        ("type", "string".into()),
        (
            "description",
            "The freeform text payload for this tool.".into(),
        ),
    ]);
    let parameters = JsonValue::object([
        ("type", "object".into()),
        ("properties", JsonValue::object([("input", text)])),
        ("required", JsonValue::Array(vec!["input".into()])),
        ("additionalProperties", JsonValue::Bool(false)),
    ]);
    let description = tool.get("description").cloned().unwrap_or(JsonValue::Null);
    let entries = [
        ("name", tool.get("name")?.clone()),
        ("description", description),
        ("parameters", parameters),
    ];
    Some(
        entries
            .map(|(key, value)| (key.to_owned(), value))
            .into_iter()
            .collect(),
    )
}

/// Returns a tool of a namespace. The inner value is `None` if the template does not receive the
/// tool. The outer value is `None` if the engine rejects it.
fn function_in_namespace(namespace: &str, tool: &JsonObject) -> Option<Option<JsonValue>> {
    if tool.get("type")?.as_str()? != "function" {
        return Some(None);
    }
    let mut function = tool.clone();
    let name = qualified_name(namespace, tool.get("name")?.as_str()?);
    function.insert("name".to_owned(), name.into());
    Some(Some(wrap_function(function)))
}

/// Returns the name of a function, qualified with its namespace. Returns `None` if the namespace is
/// not a string.
fn function_name(name: String, namespace: Option<JsonValue>) -> Option<String> {
    match namespace {
        None | Some(JsonValue::Null) => Some(name),
        Some(JsonValue::String(namespace)) if namespace.is_empty() => Some(name),
        Some(JsonValue::String(namespace)) => Some(qualified_name(&namespace, &name)),
        Some(_) => None,
    }
}

fn qualified_name(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// The input: a text, or a list of items. Items are converted to messages one by one, so no list of
/// items is stored.
#[derive(Default)]
struct ResponsesInput {
    messages: Vec<ChatMessage>,
    text_bytes: usize,
    /// True if the text of an item cannot be known.
    is_unsupported: bool,
    /// True if an item refers to state stored in the engine.
    is_stored_in_engine: bool,
    /// True if the output continues the last message.
    continues_last_message: bool,
}

#[derive(Deserialize)]
struct ResponsesItem {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    status: Option<String>,
    content: Option<MessageContent>,
    summary: Option<MessageContent>,
    encrypted_content: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    namespace: Option<JsonValue>,
    arguments: Option<JsonValue>,
    input: Option<JsonValue>,
    output: Option<MessageContent>,
}

impl FoldSequence for ResponsesInput {
    type Element = ResponsesItem;

    fn from_text(text: &str) -> Option<Self> {
        Some(Self {
            messages: vec![ChatMessage::with_text("user", text.to_owned())],
            text_bytes: text.len(),
            ..Self::default()
        })
    }

    fn add_element(&mut self, item: ResponsesItem) {
        self.text_bytes += item.text_bytes();
        self.continues_last_message =
            matches!(item.status.as_deref(), Some("in_progress" | "incomplete"))
                && matches!(item.kind.as_deref(), None | Some("message" | "reasoning"));
        self.is_stored_in_engine |= item.kind.as_deref() == Some("item_reference");
        if self.is_unsupported || self.try_fold(item).is_none() {
            self.is_unsupported = true;
            self.messages = Vec::new();
        }
    }
}

impl ResponsesInput {
    /// Appends an item to the conversation. Returns `None` if the engine's conversion is unknown.
    fn try_fold(&mut self, item: ResponsesItem) -> Option<()> {
        match (item.kind.as_deref(), item.role.as_deref()) {
            (None | Some("message"), Some("assistant")) => {
                let text = text_of_first_part(item.content?)?;
                let message = self.assistant_message(|message| message.content.is_none());
                message.content = Some(MessageContent::Text(text.into()));
            }
            (None | Some("message"), Some("user" | "system" | "developer")) => {
                let content = Some(item.content?);
                self.messages.push(ChatMessage {
                    content,
                    ..ChatMessage::with_role(&item.role?)
                });
            }
            (Some("reasoning"), _) => self.add_reasoning(item)?,
            (Some("function_call"), _) => {
                let JsonValue::String(arguments) = item.arguments? else {
                    return None;
                };
                let name = function_name(item.name?, item.namespace)?;
                self.add_tool_call(item.call_id?, name, arguments)?;
            }
            (Some("custom_tool_call"), _) => {
                let JsonValue::String(text) = item.input? else {
                    return None;
                };
                let arguments = serde_json::json!({"input": text}).to_string();
                self.add_tool_call(item.call_id?, item.name?, arguments)?;
            }
            (Some("function_call_output" | "custom_tool_call_output"), _) => {
                let output = item.output.filter(|output| match output {
                    MessageContent::Text(_) => true,
                    MessageContent::Parts(parts) => parts
                        .iter()
                        .all(|part| text_of_part(part, &["input_text"]).is_some()),
                });
                let content = Some(output?);
                let tool_call_id = Some(item.call_id?);
                self.messages.push(ChatMessage {
                    content,
                    tool_call_id,
                    ..ChatMessage::with_role("tool")
                });
            }
            _ => return None,
        }
        Some(())
    }

    fn add_reasoning(&mut self, item: ResponsesItem) -> Option<()> {
        if item
            .encrypted_content
            .is_some_and(|content| !content.is_empty())
        {
            return None;
        }
        let filled = |content: &MessageContent| match content {
            MessageContent::Text(_) => true,
            MessageContent::Parts(parts) => !parts.is_empty(),
        };
        let reasoning = match (item.content.filter(filled), item.summary.filter(filled)) {
            (Some(MessageContent::Parts(parts)), _) => {
                text_of_part(parts.first()?, &["reasoning_text"])?.to_owned()
            }
            (None, Some(MessageContent::Parts(parts))) => {
                text_of_part(parts.first()?, &["summary_text"])?.to_owned()
            }
            (None, None) => String::new(),
            _ => return None,
        };
        let message = self.assistant_message(|message| message.reasoning.is_none());
        message.reasoning = Some(reasoning);
        Some(())
    }

    fn add_tool_call(&mut self, call_id: String, name: String, arguments: String) -> Option<()> {
        let function = JsonValue::object([("name", name.into()), ("arguments", arguments.into())]);
        let call = JsonValue::object([
            ("id", call_id.into()),
            ("function", function),
            ("type", "function".into()),
        ]);
        let message = self.assistant_message(|_| true);
        message.has_converted_calls = true;
        message.tool_calls.get_or_insert_default().push(call);
        Some(())
    }

    /// Returns the last message if it is an assistant message with room for an item, or a new one.
    fn assistant_message(&mut self, has_room: impl Fn(&ChatMessage) -> bool) -> &mut ChatMessage {
        let last = self.messages.last();
        if !last.is_some_and(|last| last.role == "assistant" && has_room(last)) {
            self.messages.push(ChatMessage::with_role("assistant"));
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

impl ResponsesItem {
    fn text_bytes(&self) -> usize {
        let contents = [&self.content, &self.summary, &self.output]
            .into_iter()
            .flatten();
        let texts = [&self.arguments, &self.input]
            .into_iter()
            .flatten()
            .filter_map(JsonValue::as_str);
        contents.map(MessageContent::text_bytes).sum::<usize>() + texts.map(str::len).sum::<usize>()
    }
}

/// Returns the text of an assistant message. The engine uses only the first part.
fn text_of_first_part(content: MessageContent) -> Option<String> {
    match content {
        MessageContent::Text(text) => Some(text.into_string()),
        MessageContent::Parts(parts) => {
            Some(text_of_part(parts.first()?, &["output_text", "input_text"])?.to_owned())
        }
    }
}

/// Returns the text of a part, if its type is one of `kinds`.
fn text_of_part<'p>(part: &'p ContentPart, kinds: &[&str]) -> Option<&'p str> {
    match part {
        ContentPart::Typed(TypedPart {
            kind: Some(kind),
            text,
            ..
        }) if kinds.contains(&kind.as_str()) => text.as_deref(),
        _ => None,
    }
}

folded!(ResponsesInput);
