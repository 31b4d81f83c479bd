//! The body of Anthropic's `/v1/messages`, as the chat request that vLLM 0.32 makes of it. The system prompt is one message,
//! tool results are messages before the user message that contains them, reasoning and tool calls belong to the assistant.
//! System messages stay where they are if the template accepts that, and blocks in them may add and remove tools. Where no
//! captured request shows what the engine does, there is no conversation.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;

use super::chat::{Chat, Content, Forwarded, Message};
use super::json::{self, JsonObject, JsonValue};
use super::part::{Media, Modality, Part, Source, Typed};
use super::{ParseError, Prompt, Request, lax};

mod tools;

use tools::ToolChange;

/// Begins a line that Claude Code changes with every request, and that vLLM drops for the sake of its cache.
const BILLING: &str = "x-anthropic-billing-header";

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default, deserialize_with = "lax::flag")]
    stream: Option<bool>,
    #[serde(default, deserialize_with = "lax::integer")]
    max_tokens: Option<u64>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    system: Option<System>,
    #[serde(default)]
    messages: Option<Turns>,
    #[serde(default)]
    tools: Option<Vec<JsonValue>>,
    #[serde(default)]
    output_config: Option<OutputConfig>,
    #[serde(default)]
    thinking: Option<Thinking>,
    #[serde(default, deserialize_with = "json::object")]
    chat_template_kwargs: Option<JsonObject>,
    #[serde(default)]
    kv_transfer_params: Option<Forwarded>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct OutputConfig {
    #[serde(default)]
    effort: Option<String>,
}

#[derive(Deserialize)]
struct Thinking {
    #[serde(default, rename = "type")]
    kind: Option<String>,
}

pub(super) fn parse(text: &str) -> Result<Request, ParseError> {
    let body: Body<'_> = serde_json::from_str(text)?;
    let turns = body.messages.ok_or(ParseError::Missing("messages"))?;
    let System(system) = body.system.unwrap_or_default();
    let sent = body
        .tools
        .iter()
        .flatten()
        .map(JsonValue::text_bytes)
        .sum::<usize>();
    let text_bytes = turns.text_bytes + system.len() + sent;
    let request = Request {
        stream: body.stream.unwrap_or(false),
        max_output_tokens: body.max_tokens,
        cache_salt: body.cache_salt,
        extension: body.nvext.map(|raw| raw.get().into()),
        ..Request::by_load(body.model, text_bytes)
    };
    let (false, Ok(tools)) = (turns.lost, tools::function_tools(body.tools, turns.changes)) else {
        return Ok(request);
    };
    let system = Some(system)
        .filter(|text| !text.is_empty())
        .map(|text| Message::of("system", text));
    let messages: Vec<Message> = system.into_iter().chain(turns.messages).collect();
    if messages.is_empty() {
        return Err(ParseError::Empty("messages"));
    }
    let chat = Chat {
        messages,
        tools,
        add_generation_prompt: true,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.output_config.and_then(|config| config.effort),
        put_together: true,
        inline_systems: true,
        thinking_off: body
            .thinking
            .is_some_and(|thinking| thinking.kind.as_deref() == Some("disabled")),
        forwarded_tokens: body
            .kv_transfer_params
            .is_some_and(|params| params.has_tokens()),
        ..Chat::default()
    };
    Ok(Request {
        prompt: Prompt::Chat(Box::new(chat)),
        ..request
    })
}

/// The text of the system prompt.
#[derive(Default)]
struct System(String);

/// The messages, folded into those of a chat one by one, so that no list of blocks is kept.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    text_bytes: usize,
    /// Changes of the tools, oldest first.
    changes: Vec<ToolChange>,
    /// Something cannot be known.
    lost: bool,
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: Blocks,
}

/// What one message says.
#[derive(Default)]
struct Blocks {
    plain: Option<String>,
    parts: Vec<Part>,
    calls: Vec<JsonValue>,
    changes: Vec<ToolChange>,
    thoughts: Option<String>,
    /// Messages that results of tools become.
    results: Vec<Message>,
    text_bytes: usize,
    lost: bool,
}

#[derive(Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    source: Option<Picture>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    tool_use_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    input: Option<Box<RawValue>>,
    #[serde(default)]
    content: Option<Output>,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    tool: Option<JsonValue>,
}

/// What a tool says.
#[derive(Default)]
struct Output {
    text: String,
    texts: usize,
    images: Vec<Part>,
    lost: bool,
}

/// Where an image is: at a URL, or where that is not said, here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Picture {
    #[serde(rename = "type")]
    kind: Option<String>,
    url: Option<String>,
    data: Option<String>,
}

impl Picture {
    fn of(source: &JsonValue) -> Self {
        let text = |key| {
            source
                .get(key)
                .and_then(JsonValue::as_str)
                .map(str::to_owned)
        };
        Self {
            kind: text("type"),
            url: text("url"),
            data: text("data"),
        }
    }

    fn part(self) -> Part {
        let source = match self.kind.as_deref() {
            Some("url") => Source::Url(self.url.unwrap_or_default()),
            _ => Source::Base64(self.data.unwrap_or_default()),
        };
        Part::of_media(Media {
            modality: Modality::Image,
            source: Some(source),
            uuid: None,
        })
    }
}

impl Turns {
    /// Adds a message to the conversation; `None` where it cannot be known how.
    fn fold(&mut self, turn: Turn) -> Option<()> {
        let Blocks {
            plain,
            parts,
            calls,
            changes,
            thoughts,
            results,
            lost,
            ..
        } = turn.content;
        let is_user = match turn.role.as_str() {
            // What versions of Claude Code call the user.
            "user" | "ctx" | "msg" => true,
            "assistant" => false,
            "system" => {
                self.changes.extend(changes);
                let text = plain
                    .filter(|text| !text.starts_with(BILLING))
                    .unwrap_or_else(|| unbilled(parts));
                self.messages
                    .extend((!text.is_empty()).then(|| Message::of("system", text)));
                return (!lost).then_some(());
            }
            _ => return None,
        };
        // What the assistant says of a tool's result depends on how Python prints it.
        if lost || !changes.is_empty() || (!is_user && !results.is_empty()) {
            return None;
        }
        self.messages.extend(results);
        let content = match (plain, parts) {
            (Some(text), _) => Some(Content::Text(text)),
            (None, parts) if parts.is_empty() => None,
            (None, parts) => Some(joined(parts)),
        };
        if content.is_none() && is_user {
            return Some(());
        }
        let (role, tool_calls, reasoning) = match is_user {
            true => ("user", None, None),
            false => (
                "assistant",
                Some(calls).filter(|calls| !calls.is_empty()),
                thoughts,
            ),
        };
        self.messages.push(Message {
            role: role.to_owned(),
            content,
            tool_calls,
            reasoning,
            ..Message::default()
        });
        Some(())
    }
}

/// The text of an inline system message.
fn unbilled(parts: Vec<Part>) -> String {
    let texts = parts.into_iter().filter_map(|part| match part {
        Part::Typed(Typed {
            kind: Some(kind),
            text: Some(text),
            ..
        }) if kind == "text" => Some(text),
        _ => None,
    });
    texts.filter(|text| !text.starts_with(BILLING)).collect()
}

/// A single text is plain content.
fn joined(parts: Vec<Part>) -> Content {
    match <[Part; 1]>::try_from(parts) {
        Ok(
            [
                Part::Typed(Typed {
                    kind: Some(kind),
                    text: Some(text),
                    ..
                }),
            ],
        ) if kind == "text" => Content::Text(text),
        Ok([part]) => Content::Parts(vec![part]),
        Err(parts) => Content::Parts(parts),
    }
}

impl Blocks {
    fn fold(&mut self, block: Block) -> Option<()> {
        match block.kind.as_str() {
            "text" => self.parts.extend(
                block
                    .text
                    .filter(|text| !text.is_empty())
                    .map(|text| Part::typed("text", Some(text))),
            ),
            "image" => self.parts.extend(block.source.map(Picture::part)),
            "thinking" => {
                if let Some(thinking) = block.thinking {
                    self.thoughts.get_or_insert_default().push_str(&thinking);
                }
            }
            // A reference counts only in the result of a tool.
            "redacted_thinking" | "tool_reference" => {}
            "tool_addition" | "tool_removal" => self
                .changes
                .push(ToolChange::read(&block.kind, block.tool.as_ref()?)?),
            "tool_use" => {
                let id = block.id.filter(|id| !id.is_empty()).map(JsonValue::from);
                let id = id.unwrap_or(JsonValue::Unknown(
                    "an id that the engine takes from its clock",
                ));
                let arguments = block.input.as_ref().map_or("{}", |input| input.get());
                if !arguments.starts_with('{') {
                    return None;
                }
                let name = block.name.unwrap_or_default();
                let function =
                    JsonValue::object([("name", name.into()), ("arguments", arguments.into())]);
                self.calls.push(JsonValue::object([
                    ("id", id),
                    ("type", "function".into()),
                    ("function", function),
                ]));
            }
            "tool_result" => {
                let Output {
                    text, images, lost, ..
                } = block.content.unwrap_or_default();
                if lost {
                    return None;
                }
                let tool_call_id = Some(block.tool_use_id.unwrap_or_default());
                self.results.push(Message {
                    tool_call_id,
                    ..Message::of("tool", text)
                });
                if !images.is_empty() {
                    let content = Some(Content::Parts(images));
                    self.results.push(Message {
                        role: "user".to_owned(),
                        content,
                        ..Message::default()
                    });
                }
            }
            _ => return None,
        }
        Some(())
    }
}

impl Block {
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

/// What is read from a text, or from a list whose elements are added one by one.
trait Folded: Default {
    type Element: for<'de> Deserialize<'de>;

    /// The value of a text; `None` where only a list will do.
    fn of_text(text: &str) -> Option<Self>;
    fn add(&mut self, element: Self::Element);
}

impl Folded for System {
    type Element = Block;

    fn of_text(text: &str) -> Option<Self> {
        Some(Self(text.to_owned()))
    }

    fn add(&mut self, block: Block) {
        let text = block
            .text
            .filter(|text| block.kind == "text" && !text.starts_with(BILLING));
        self.0.push_str(&text.unwrap_or_default());
    }
}

impl Folded for Turns {
    type Element = Turn;

    fn of_text(_: &str) -> Option<Self> {
        None
    }

    fn add(&mut self, turn: Turn) {
        self.text_bytes += turn.content.text_bytes;
        if self.lost || self.fold(turn).is_none() {
            self.lost = true;
            self.messages = Vec::new();
        }
    }
}

impl Folded for Blocks {
    type Element = Block;

    fn of_text(text: &str) -> Option<Self> {
        Some(Self {
            plain: Some(text.to_owned()),
            text_bytes: text.len(),
            ..Self::default()
        })
    }

    fn add(&mut self, block: Block) {
        self.text_bytes += block.text_bytes();
        if self.lost || self.fold(block).is_none() {
            *self = Self {
                lost: true,
                text_bytes: self.text_bytes,
                ..Self::default()
            };
        }
    }
}

impl Folded for Output {
    type Element = JsonValue;

    fn of_text(text: &str) -> Option<Self> {
        Some(Self {
            text: text.to_owned(),
            ..Self::default()
        })
    }

    fn add(&mut self, block: JsonValue) {
        match block.get("type").and_then(JsonValue::as_str) {
            Some("text") => {
                if self.texts > 0 {
                    self.text.push('\n');
                }
                self.texts += 1;
                match block.get("text") {
                    None => {}
                    Some(JsonValue::String(text)) => self.text.push_str(text),
                    Some(_) => self.lost = true,
                }
            }
            Some("image") => self
                .images
                .extend(block.get("source").map(|source| Picture::of(source).part())),
            // No captured request shows how the engine treats it.
            Some("tool_reference") => self.lost = true,
            // The engine ignores others.
            _ => self.lost |= !block.is_object(),
        }
    }
}

macro_rules! folded {
    ($($kind:ident),*) => {
        $(impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(FoldedVisitor(PhantomData))
            }
        })*
    };
}

folded!(System, Turns, Blocks, Output);

struct FoldedVisitor<T>(PhantomData<T>);

impl<'de, T: Folded> Visitor<'de> for FoldedVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of blocks")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        T::of_text(text)
            .ok_or_else(|| E::invalid_type(Unexpected::Str(text), &"a list of messages"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
        let mut folded = T::default();
        while let Some(element) = seq.next_element()? {
            folded.add(element);
        }
        Ok(folded)
    }
}
