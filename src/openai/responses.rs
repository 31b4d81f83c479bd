//! The body of `/v1/responses`, as the conversation that vLLM 0.32 makes of it: the instructions are a system message;
//! reasoning, text and tool calls that follow one another are one message of the assistant; outputs of tools are messages of
//! tools. Function and custom tools and those of a namespace are shown to the template, and other tools are not. Special tokens
//! are added, because the endpoint leaves that at the tokenizer's default. Where text is stored with the engine, or no captured
//! request shows what the engine does, there is no conversation.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::chat::{Chat, Content, Forwarded, Message};
use super::json::{self, JsonObject, JsonValue};
use super::part::{Part, Typed};
use super::{Hidden, Opaque, ParseError, Prompt, Request, Tokenization, lax};

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default, deserialize_with = "lax::flag")]
    stream: Option<bool>,
    #[serde(default)]
    input: Option<Input>,
    #[serde(default)]
    instructions: Option<String>,
    #[serde(default, deserialize_with = "lax::integer")]
    max_output_tokens: Option<u64>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    tools: Option<Vec<JsonValue>>,
    #[serde(default)]
    reasoning: Option<Reasoning>,
    /// Absent is `disabled`, and null is not.
    #[serde(default = "disabled")]
    truncation: Option<String>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    #[serde(default)]
    kv_transfer_params: Option<Forwarded>,
    #[serde(default)]
    previous_response_id: Option<String>,
    #[serde(default)]
    previous_response: Option<IgnoredAny>,
    #[serde(default)]
    previous_input_messages: Option<IgnoredAny>,
    #[serde(default)]
    conversation: Option<IgnoredAny>,
    #[serde(default)]
    prompt: Option<IgnoredAny>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Reasoning {
    #[serde(default)]
    effort: Option<String>,
}

fn disabled() -> Option<String> {
    Some("disabled".to_owned())
}

pub(super) fn parse(text: &str) -> Result<Request, ParseError> {
    let body: Body<'_> = serde_json::from_str(text)?;
    let stored = [
        &body.previous_response,
        &body.previous_input_messages,
        &body.conversation,
        &body.prompt,
    ];
    let remembered = body.previous_response_id.is_some_and(|id| !id.is_empty())
        || stored.into_iter().any(Option::is_some);
    let input = body.input.ok_or(ParseError::Missing("input"))?;
    let instructions = body.instructions.filter(|text| !text.is_empty());
    let tools = body.tools.unwrap_or_default();
    let shown = (!tools.is_empty()).then(|| function_tools(&tools));
    let tool_bytes = tools.iter().map(JsonValue::text_bytes).sum::<usize>();
    let text_bytes = input.text_bytes + instructions.as_ref().map_or(0, String::len) + tool_bytes;
    let request = Request {
        stream: body.stream.unwrap_or(false),
        max_output_tokens: body.max_output_tokens,
        cache_salt: body.cache_salt,
        extension: body.nvext.map(|raw| raw.get().into()),
        ..Request::by_load(body.model, text_bytes)
    };
    if remembered || input.remembered {
        let prompt = Prompt::Opaque(Opaque {
            text_bytes,
            because: Hidden::Remembered,
        });
        return Ok(Request { prompt, ..request });
    }
    let (false, None | Some(Some(_))) = (input.lost, &shown) else {
        return Ok(request);
    };
    let system = instructions.map(|text| Message::of("system", text));
    let messages: Vec<Message> = system.into_iter().chain(input.messages).collect();
    if messages.is_empty() {
        return Err(ParseError::Empty("input"));
    }
    let chat = Chat {
        messages,
        tools: shown.flatten(),
        add_generation_prompt: !input.unfinished,
        continue_final_message: input.unfinished,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.reasoning.and_then(|reasoning| reasoning.effort),
        put_together: true,
        forwarded_tokens: body
            .kv_transfer_params
            .is_some_and(|params| params.has_tokens()),
        ..Chat::default()
    };
    let tokenization = Tokenization {
        add_special_tokens: Some(true),
        truncate_prompt_tokens: (body.truncation.as_deref() != Some("disabled")).then_some(-1),
        ..Tokenization::default()
    };
    Ok(Request {
        tokenization,
        prompt: Prompt::Chat(Box::new(chat)),
        ..request
    })
}

/// The tools that the template sees, in the form of chat completions; `None` where the engine refuses one.
fn function_tools(tools: &[JsonValue]) -> Option<Vec<JsonValue>> {
    let mut shown = Vec::new();
    for tool in tools {
        let tool = tool.as_object()?;
        match tool.get("type")?.as_str()? {
            "function" => shown.push(shown_function(tool.clone())),
            "custom" => shown.push(shown_function(custom_function(tool)?)),
            "namespace" => {
                let JsonValue::Array(inner) = tool.get("tools")? else {
                    return None;
                };
                for function in inner {
                    shown.extend(namespace_function(
                        tool.get("name")?.as_str()?,
                        function.as_object()?,
                    )?);
                }
            }
            // Others are for the engine itself or for a server.
            _ => {}
        }
    }
    Some(shown)
}

fn shown_function(function: JsonObject) -> JsonValue {
    JsonValue::object([
        ("type", "function".into()),
        ("function", JsonValue::Object(function)),
    ])
}

/// The function with one text that stands for a tool of free form.
fn custom_function(tool: &JsonObject) -> Option<JsonObject> {
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

/// A tool of a namespace, if it is shown at all.
fn namespace_function(namespace: &str, tool: &JsonObject) -> Option<Option<JsonValue>> {
    if tool.get("type")?.as_str()? != "function" {
        return Some(None);
    }
    let mut function = tool.clone();
    let name = in_namespace(namespace, tool.get("name")?.as_str()?);
    function.insert("name".to_owned(), name.into());
    Some(Some(shown_function(function)))
}

fn in_namespace(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// The input: a text, or items that are folded into messages one by one, so that no list of them is kept.
#[derive(Default)]
struct Input {
    messages: Vec<Message>,
    text_bytes: usize,
    /// An item was of a kind whose words cannot be known.
    lost: bool,
    /// An item stands for something stored with the engine.
    remembered: bool,
    /// The last message is to be gone on with.
    unfinished: bool,
}

#[derive(Deserialize)]
struct Item {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    role: Option<String>,
    #[serde(default)]
    status: Option<String>,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    summary: Option<Content>,
    #[serde(default)]
    encrypted_content: Option<String>,
    #[serde(default)]
    call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    namespace: Option<JsonValue>,
    #[serde(default)]
    arguments: Option<JsonValue>,
    #[serde(default)]
    input: Option<JsonValue>,
    #[serde(default)]
    output: Option<Content>,
}

impl Input {
    fn add(&mut self, item: Item) {
        self.text_bytes += item.text_bytes();
        self.unfinished = matches!(item.status.as_deref(), Some("in_progress" | "incomplete"))
            && matches!(item.kind.as_deref(), None | Some("message" | "reasoning"));
        self.remembered |= item.kind.as_deref() == Some("item_reference");
        if self.lost || self.fold(item).is_none() {
            self.lost = true;
            self.messages = Vec::new();
        }
    }

    /// Adds an item to the conversation; `None` where it cannot be known how.
    fn fold(&mut self, item: Item) -> Option<()> {
        match (item.kind.as_deref(), item.role.as_deref()) {
            (None | Some("message"), Some("assistant")) => {
                let text = first_text(item.content?)?;
                match self.assistant().filter(|message| message.content.is_none()) {
                    Some(message) => message.content = Some(Content::Text(text)),
                    None => self.messages.push(Message::of("assistant", text)),
                }
            }
            (None | Some("message"), Some("user" | "system" | "developer")) => {
                let content = Some(item.content?);
                self.messages.push(Message {
                    role: item.role?,
                    content,
                    ..Message::default()
                });
            }
            (Some("reasoning"), _) => self.think(item)?,
            (Some("function_call"), _) => {
                let JsonValue::String(arguments) = item.arguments? else {
                    return None;
                };
                let name = item.name?;
                let name = match item.namespace {
                    None | Some(JsonValue::Null) => name,
                    Some(JsonValue::String(namespace)) if namespace.is_empty() => name,
                    Some(JsonValue::String(namespace)) => in_namespace(&namespace, &name),
                    Some(_) => return None,
                };
                self.call(item.call_id?, name, arguments)?;
            }
            (Some("custom_tool_call"), _) => {
                let JsonValue::String(text) = item.input? else {
                    return None;
                };
                let arguments = serde_json::json!({"input": text}).to_string();
                self.call(item.call_id?, item.name?, arguments)?;
            }
            (Some("function_call_output" | "custom_tool_call_output"), _) => {
                let output = item.output.filter(|output| match output {
                    Content::Text(_) => true,
                    Content::Parts(parts) => parts
                        .iter()
                        .all(|part| text_of(part, &["input_text"]).is_some()),
                });
                let content = Some(output?);
                let tool_call_id = Some(item.call_id?);
                self.messages.push(Message {
                    role: "tool".to_owned(),
                    content,
                    tool_call_id,
                    ..Message::default()
                });
            }
            _ => return None,
        }
        Some(())
    }

    fn think(&mut self, item: Item) -> Option<()> {
        if item
            .encrypted_content
            .is_some_and(|content| !content.is_empty())
        {
            return None;
        }
        let filled =
            |content: &Content| !matches!(content, Content::Parts(parts) if parts.is_empty());
        let reasoning = match (item.content.filter(filled), item.summary.filter(filled)) {
            (Some(Content::Parts(parts)), _) => {
                text_of(parts.first()?, &["reasoning_text"])?.to_owned()
            }
            (None, Some(Content::Parts(parts))) => {
                text_of(parts.first()?, &["summary_text"])?.to_owned()
            }
            (None, None) => String::new(),
            _ => return None,
        };
        let message = match self
            .assistant()
            .filter(|message| message.reasoning.is_none())
        {
            Some(message) => message,
            None => self.begin_assistant(),
        };
        message.reasoning = Some(reasoning);
        Some(())
    }

    fn call(&mut self, call_id: String, name: String, arguments: String) -> Option<()> {
        let function = JsonValue::object([("name", name.into()), ("arguments", arguments.into())]);
        let call = JsonValue::object([
            ("id", call_id.into()),
            ("function", function),
            ("type", "function".into()),
        ]);
        let message = match self
            .messages
            .last()
            .is_some_and(|message| message.role == "assistant")
        {
            true => self.messages.last_mut()?,
            false => self.begin_assistant(),
        };
        message.calls_put_together = true;
        message.tool_calls.get_or_insert_default().push(call);
        Some(())
    }

    /// The last message, if it is the assistant's.
    fn assistant(&mut self) -> Option<&mut Message> {
        self.messages
            .last_mut()
            .filter(|message| message.role == "assistant")
    }

    fn begin_assistant(&mut self) -> &mut Message {
        self.messages.push(Message {
            role: "assistant".to_owned(),
            ..Message::default()
        });
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

impl Item {
    fn text_bytes(&self) -> usize {
        let contents = [&self.content, &self.summary, &self.output]
            .into_iter()
            .flatten();
        let texts = [&self.arguments, &self.input]
            .into_iter()
            .flatten()
            .filter_map(JsonValue::as_str);
        contents.map(Content::text_bytes).sum::<usize>() + texts.map(str::len).sum::<usize>()
    }
}

/// The text of the assistant: of several parts the engine takes the first.
fn first_text(content: Content) -> Option<String> {
    match content {
        Content::Text(text) => Some(text),
        Content::Parts(parts) => {
            Some(text_of(parts.first()?, &["output_text", "input_text"])?.to_owned())
        }
    }
}

/// The text of a part of one of these types.
fn text_of<'p>(part: &'p Part, kinds: &[&str]) -> Option<&'p str> {
    match part {
        Part::Typed(Typed {
            kind: Some(kind),
            text,
            ..
        }) if kinds.contains(&kind.as_str()) => text.as_deref(),
        _ => None,
    }
}

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(InputVisitor)
    }
}

struct InputVisitor;

impl<'de> Visitor<'de> for InputVisitor {
    type Value = Input;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of items")
    }

    fn visit_str<E>(self, text: &str) -> Result<Input, E> {
        let messages = vec![Message::of("user", text.to_owned())];
        Ok(Input {
            messages,
            text_bytes: text.len(),
            ..Input::default()
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Input, A::Error> {
        let mut input = Input::default();
        while let Some(item) = seq.next_element()? {
            input.add(item);
        }
        Ok(input)
    }
}
