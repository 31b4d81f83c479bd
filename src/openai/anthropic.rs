//! The body of Anthropic's `/v1/messages`, as the chat request that vLLM makes of it (`entrypoints/anthropic/serving.py`,
//! read in 2026 and not run). The system prompt is one message, results of tools are messages before that of the user who brought
//! them, thoughts and calls belong to the assistant. Where versions of vLLM differ (system messages in the midst, messages
//! that say nothing, tools that are loaded later) there is no conversation, and nothing is guessed.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::chat::{Chat, Content, Forwarded, Message};
use super::part::{Media, Modality, Part, Source, Typed};
use super::{ParseError, Prompt, Request};

/// Begins a line that Claude Code changes with every request, and that vLLM drops for the sake of its cache.
const BILLING: &str = "x-anthropic-billing-header";

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    max_tokens: Option<u64>,
    #[serde(default)]
    system: Option<System>,
    #[serde(default)]
    messages: Option<Turns>,
    #[serde(default)]
    tools: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    output_config: Option<OutputConfig>,
    #[serde(default)]
    thinking: Option<Thinking>,
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
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
    let text_bytes = turns.text_bytes + system.len();
    let request = Request {
        stream: body.stream.unwrap_or(false),
        max_output_tokens: body.max_tokens,
        extension: body.nvext.map(|raw| raw.get().into()),
        ..Request::by_load(body.model, text_bytes)
    };
    let tools = body.tools.map(|tools| tools.into_iter().map(tool).collect::<Option<Vec<_>>>());
    let (false, None | Some(Some(_))) = (turns.lost, &tools) else { return Ok(request) };
    let system = Some(system).filter(|text| !text.is_empty()).map(|text| Message::of("system", text));
    let messages: Vec<Message> = system.into_iter().chain(turns.messages).collect();
    if messages.is_empty() {
        return Err(ParseError::Empty("messages"));
    }
    let chat = Chat {
        messages,
        tools: tools.flatten(),
        add_generation_prompt: true,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.output_config.and_then(|config| config.effort),
        put_together: true,
        thinking_off: body.thinking.is_some_and(|thinking| thinking.kind.as_deref() == Some("disabled")),
        forwarded_tokens: body.kv_transfer_params.is_some_and(|params| params.has_tokens()),
        ..Chat::default()
    };
    Ok(Request { prompt: Prompt::Chat(Box::new(chat)), ..request })
}

/// A tool as chat completions have it; `None` for tools of servers and for what versions of the engine treat differently.
fn tool(mut tool: Map<String, Value>) -> Option<Value> {
    let given = |key: &str| tool.get(key).is_some_and(|value| !value.is_null());
    let custom = matches!(tool.get("type"), None | Some(Value::Null)) || tool["type"].as_str() == Some("custom");
    if !custom || given("strict") || given("defer_loading") {
        return None;
    }
    let Some(Value::Object(mut parameters)) = tool.shift_remove("input_schema") else { return None };
    if !parameters.contains_key("type") {
        parameters.insert("type".to_owned(), "object".into());
    }
    let (name, description) = (tool.shift_remove("name")?, tool.shift_remove("description"));
    let function = json!({"name": name, "description": description, "parameters": parameters});
    Some(json!({"type": "function", "function": function}))
}

/// The text of the system prompt.
#[derive(Default)]
struct System(String);

/// The messages, folded into those of a chat one by one, so that no list of blocks is kept.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    text_bytes: usize,
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
    calls: Vec<Value>,
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
}

/// What a tool says.
#[derive(Default)]
struct Output {
    text: String,
    texts: usize,
    images: Vec<Part>,
    lost: bool,
}

#[derive(Deserialize)]
struct OutputBlock {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    source: Option<Picture>,
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
    fn part(self) -> Part {
        let source = match self.kind.as_deref() {
            Some("url") => Source::Url(self.url.unwrap_or_default()),
            _ => Source::Base64(self.data.unwrap_or_default()),
        };
        Part::of_media(Media { modality: Modality::Image, source: Some(source), uuid: None })
    }
}

impl Turns {
    /// Adds a message to the conversation; `None` where it cannot be known how.
    fn fold(&mut self, turn: Turn) -> Option<()> {
        let is_user = match turn.role.as_str() {
            // What versions of Claude Code call the user.
            "user" | "ctx" | "msg" => true,
            "assistant" => false,
            _ => return None,
        };
        let Blocks { plain, parts, calls, thoughts, results, lost, .. } = turn.content;
        let foreign = if is_user { !calls.is_empty() || thoughts.is_some() } else { !results.is_empty() };
        if lost || foreign {
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
        if content.is_none() && calls.is_empty() && thoughts.is_none() {
            return None;
        }
        self.messages.push(Message {
            role: if is_user { "user" } else { "assistant" }.to_owned(),
            content,
            tool_calls: Some(calls).filter(|calls| !calls.is_empty()),
            reasoning: thoughts,
            ..Message::default()
        });
        Some(())
    }
}

/// A single text is plain content.
fn joined(parts: Vec<Part>) -> Content {
    match <[Part; 1]>::try_from(parts) {
        Ok([Part::Typed(Typed { kind: Some(kind), text: Some(text), .. })]) if kind == "text" => Content::Text(text),
        Ok([part]) => Content::Parts(vec![part]),
        Err(parts) => Content::Parts(parts),
    }
}

impl Blocks {
    fn fold(&mut self, block: Block) -> Option<()> {
        match block.kind.as_str() {
            "text" => self
                .parts
                .extend(block.text.filter(|text| !text.is_empty()).map(|text| Part::typed("text", Some(text)))),
            "image" => self.parts.extend(block.source.map(Picture::part)),
            "thinking" => {
                if let Some(thinking) = block.thinking {
                    self.thoughts.get_or_insert_default().push_str(&thinking);
                }
            }
            "redacted_thinking" => {}
            "tool_use" => {
                // Without an id the engine takes one from its clock.
                let id = block.id.filter(|id| !id.is_empty())?;
                let arguments = block.input.as_ref().map_or("{}", |input| input.get());
                if !arguments.starts_with('{') {
                    return None;
                }
                let function = json!({"name": block.name.unwrap_or_default(), "arguments": arguments});
                self.calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            "tool_result" => {
                let Output { text, images, lost, .. } = block.content.unwrap_or_default();
                if lost {
                    return None;
                }
                let tool_call_id = Some(block.tool_use_id.unwrap_or_default());
                self.results.push(Message { tool_call_id, ..Message::of("tool", text) });
                if !images.is_empty() {
                    let content = Some(Content::Parts(images));
                    self.results.push(Message { role: "user".to_owned(), content, ..Message::default() });
                }
            }
            _ => return None,
        }
        Some(())
    }
}

impl Block {
    fn text_bytes(&self) -> usize {
        let texts = [&self.text, &self.thinking].into_iter().flatten().map(String::len).sum::<usize>();
        let input = self.input.as_ref().map_or(0, |input| input.get().len());
        texts + input + self.content.as_ref().map_or(0, |content| content.text.len())
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
        let text = block.text.filter(|text| block.kind == "text" && !text.starts_with(BILLING));
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
        Some(Self { plain: Some(text.to_owned()), text_bytes: text.len(), ..Self::default() })
    }

    fn add(&mut self, block: Block) {
        self.text_bytes += block.text_bytes();
        if self.lost || self.fold(block).is_none() {
            *self = Self { lost: true, text_bytes: self.text_bytes, ..Self::default() };
        }
    }
}

impl Folded for Output {
    type Element = OutputBlock;

    fn of_text(text: &str) -> Option<Self> {
        Some(Self { text: text.to_owned(), ..Self::default() })
    }

    fn add(&mut self, block: OutputBlock) {
        match block.kind.as_deref() {
            Some("text") => {
                if self.texts > 0 {
                    self.text.push('\n');
                }
                self.texts += 1;
                self.text.push_str(&block.text.unwrap_or_default());
            }
            Some("image") => self.images.extend(block.source.map(Picture::part)),
            _ => self.lost = true,
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
        T::of_text(text).ok_or_else(|| E::invalid_type(Unexpected::Str(text), &"a list of messages"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
        let mut folded = T::default();
        while let Some(element) = seq.next_element()? {
            folded.add(element);
        }
        Ok(folded)
    }
}
