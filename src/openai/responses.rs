//! The body of `/v1/responses`, as the conversation that vLLM makes of it (`entrypoints/openai/responses/protocol.py` and
//! `utils.py`, read in 2026 and not run): the instructions are a system message; thoughts, words and calls that follow one another
//! are one message of the assistant; outputs of functions are messages of tools. Special tokens are added, because the
//! endpoint leaves that at the tokenizer's default. Where versions of vLLM differ, or the words are stored with the
//! engine, there is no conversation, and nothing is guessed.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::chat::{Chat, Content, Forwarded, Message};
use super::part::{Part, Typed};
use super::{ParseError, Prompt, Request, Tokenization};

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    input: Option<Input>,
    #[serde(default)]
    instructions: Option<String>,
    #[serde(default)]
    max_output_tokens: Option<u64>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    tools: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    reasoning: Option<Reasoning>,
    /// Absent is `disabled`, and null is not.
    #[serde(default = "disabled")]
    truncation: Option<String>,
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
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
    let stored = [&body.previous_response, &body.previous_input_messages, &body.conversation, &body.prompt];
    let remembered =
        body.previous_response_id.is_some_and(|id| !id.is_empty()) || stored.into_iter().any(Option::is_some);
    let input = body.input.ok_or(ParseError::Missing("input"))?;
    let instructions = body.instructions.filter(|text| !text.is_empty());
    let text_bytes = input.text_bytes + instructions.as_ref().map_or(0, String::len);
    let extension = body.nvext.map(|raw| raw.get().into());
    let stream = body.stream.unwrap_or(false);
    if remembered || input.remembered {
        return Ok(Request { stream, extension, ..Request::remembered(body.model, text_bytes) });
    }
    let never = body.tool_choice.as_ref().and_then(Value::as_str) == Some("none");
    let tools = body.tools.filter(|tools| !tools.is_empty());
    let hidden = tools.is_some() && never;
    let tools = tools.map(|tools| tools.into_iter().map(tool).collect::<Option<Vec<_>>>());
    let (false, false, None | Some(Some(_))) = (input.lost, hidden, &tools) else {
        return Ok(Request { stream, extension, ..Request::by_load(body.model, text_bytes) });
    };
    let system = instructions.map(|text| Message::of("system", text));
    let messages: Vec<Message> = system.into_iter().chain(input.messages).collect();
    if messages.is_empty() {
        return Err(ParseError::Empty("input"));
    }
    let chat = Chat {
        messages,
        tools: tools.flatten(),
        add_generation_prompt: !input.unfinished,
        continue_final_message: input.unfinished,
        chat_template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        reasoning_effort: body.reasoning.and_then(|reasoning| reasoning.effort),
        put_together: true,
        forwarded_tokens: body.kv_transfer_params.is_some_and(|params| params.has_tokens()),
        ..Chat::default()
    };
    Ok(Request {
        stream,
        cache_salt: body.cache_salt,
        max_output_tokens: body.max_output_tokens,
        tokenization: Tokenization {
            add_special_tokens: Some(true),
            truncate_prompt_tokens: (body.truncation.as_deref() != Some("disabled")).then_some(-1),
            ..Tokenization::default()
        },
        extension,
        ..Request::of(body.model, Prompt::Chat(Box::new(chat)))
    })
}

/// A tool as chat completions have it; `None` for what is not a function, or not only one.
fn tool(mut tool: Map<String, Value>) -> Option<Value> {
    if tool.shift_remove("type")?.as_str() != Some("function") {
        return None;
    }
    if tool.get("strict").is_some_and(Value::is_null) {
        tool.shift_remove("strict");
    }
    let known = ["name", "description", "parameters", "strict"];
    let known = tool.keys().all(|key| known.contains(&key.as_str()));
    known.then(|| json!({"type": "function", "function": tool}))
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
    namespace: Option<IgnoredAny>,
    #[serde(default)]
    arguments: Option<Value>,
    #[serde(default)]
    output: Option<Value>,
}

impl Input {
    fn add(&mut self, item: Item) {
        self.text_bytes += item.text_bytes();
        self.unfinished = matches!(item.status.as_deref(), Some("in_progress" | "incomplete"))
            && matches!(item.kind.as_deref(), None | Some("message" | "reasoning"));
        self.remembered |= item.kind.as_deref() == Some("item_reference");
        // What the engine does with unfinished thoughts depends on the template.
        let unclear = self.unfinished && item.kind.as_deref() == Some("reasoning");
        if self.lost || unclear || self.fold(item).is_none() {
            self.lost = true;
            self.messages = Vec::new();
        }
    }

    /// Adds an item to the conversation; `None` where it cannot be known how.
    fn fold(&mut self, item: Item) -> Option<()> {
        match (item.kind.as_deref(), item.role.as_deref()) {
            (None | Some("message"), Some("assistant")) => {
                let text = only_text(item.content, "output_text")?;
                match self.assistant().filter(|message| message.content.is_none()) {
                    Some(message) => message.content = Some(Content::Text(text)),
                    None => self.messages.push(Message::of("assistant", text)),
                }
            }
            (None | Some("message"), Some("user" | "system" | "developer")) => {
                let content = Some(item.content?);
                self.messages.push(Message { role: item.role?, content, ..Message::default() });
            }
            (Some("reasoning"), _) => self.think(item)?,
            (Some("function_call"), _) => self.call(item)?,
            (Some("function_call_output"), _) => {
                let Value::String(output) = item.output? else { return None };
                let tool_call_id = Some(item.call_id?);
                self.messages.push(Message { tool_call_id, ..Message::of("tool", output) });
            }
            _ => return None,
        }
        Some(())
    }

    fn think(&mut self, item: Item) -> Option<()> {
        if item.encrypted_content.is_some_and(|content| !content.is_empty()) {
            return None;
        }
        // Versions differ in which of the two goes first.
        let filled = |content: &Content| !matches!(content, Content::Parts(parts) if parts.is_empty());
        let thought = match (item.content.filter(filled), item.summary.filter(filled)) {
            (Some(_), Some(_)) => return None,
            (Some(content), None) => only_text(Some(content), "reasoning_text")?,
            (None, summary) => only_text(summary, "summary_text")?,
        };
        let message = match self.assistant().filter(|message| message.reasoning.is_none()) {
            Some(message) => message,
            None => self.begin_assistant(),
        };
        message.reasoning = Some(thought);
        Some(())
    }

    fn call(&mut self, item: Item) -> Option<()> {
        let Value::String(arguments) = item.arguments? else { return None };
        if item.namespace.is_some() {
            return None;
        }
        let function = json!({"name": item.name?, "arguments": arguments});
        let call = json!({"id": item.call_id?, "function": function, "type": "function"});
        let message = match self.messages.last().is_some_and(|message| message.role == "assistant") {
            true => self.messages.last_mut()?,
            false => self.begin_assistant(),
        };
        message.calls_put_together = true;
        message.tool_calls.get_or_insert_default().push(call);
        Some(())
    }

    /// The last message, if it is the assistant's.
    fn assistant(&mut self) -> Option<&mut Message> {
        self.messages.last_mut().filter(|message| message.role == "assistant")
    }

    fn begin_assistant(&mut self) -> &mut Message {
        self.messages.push(Message { role: "assistant".to_owned(), ..Message::default() });
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

impl Item {
    fn text_bytes(&self) -> usize {
        let of_content = |content: &Content| match content {
            Content::Text(text) => text.len(),
            Content::Parts(parts) => parts.iter().map(Part::text_bytes).sum(),
        };
        let contents = [&self.content, &self.summary].into_iter().flatten().map(of_content).sum::<usize>();
        let texts = [&self.arguments, &self.output].into_iter().flatten();
        contents + texts.filter_map(Value::as_str).map(str::len).sum::<usize>()
    }
}

/// The text of content with at most one part, which is of this kind: of more, versions of the engine take the first or all.
fn only_text(content: Option<Content>, wanted: &str) -> Option<String> {
    match content {
        None => Some(String::new()),
        Some(Content::Text(text)) => Some(text),
        Some(Content::Parts(parts)) => match <[Part; 1]>::try_from(parts) {
            Ok([Part::Typed(Typed { kind: Some(kind), text: Some(text), .. })]) if kind == wanted => Some(text),
            Ok(_) => None,
            Err(parts) => parts.is_empty().then(String::new),
        },
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
        Ok(Input { messages, text_bytes: text.len(), ..Input::default() })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Input, A::Error> {
        let mut input = Input::default();
        while let Some(item) = seq.next_element()? {
            input.add(item);
        }
        Ok(input)
    }
}
