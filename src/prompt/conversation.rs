//! A conversation as templates see it: vLLM turns the request's messages into plain ones first, and every turn it takes
//! (joined parts, parsed arguments, the order of keys) is visible to a template and so to the tokens.

use minijinja::Value;
use serde_json::{Map, Value as Json};

use super::EncodeError;
use super::detect::ContentFormat;
use super::python::{self, Dict};
use crate::openai::{Content, Message, Part};

/// One message on its way into a template.
pub(super) struct Turn {
    pub role: String,
    pub content: Said,
    rest: Vec<(&'static str, Value)>,
}

impl Turn {
    /// Whether the message carries the assistant's thoughts.
    pub(super) fn has_thoughts(&self) -> bool {
        self.rest.iter().any(|(key, _)| *key == "reasoning")
    }
}

/// The content of a message in one of the two shapes templates expect.
pub(super) enum Said {
    /// One string.
    Text(String),
    /// A list of text parts.
    Parts(Vec<String>),
}

impl Said {
    /// The text that an answer would go on from.
    pub(super) fn last_text(&mut self) -> Option<&mut String> {
        match self {
            Self::Text(text) => Some(text),
            Self::Parts(parts) => parts.last_mut(),
        }
    }
}

/// The messages as vLLM hands them to the template.
pub(super) fn turns(messages: &[Message], format: ContentFormat) -> Result<Vec<Turn>, EncodeError> {
    messages.iter().map(|message| turn(message, format)).collect()
}

fn turn(message: &Message, format: ContentFormat) -> Result<Turn, EncodeError> {
    let parts = parts(message.content.as_ref())?;
    // Templates seldom take lists from tools, so the engine joins those always.
    let content = match format {
        ContentFormat::Parts if message.role != "tool" => Said::Parts(parts),
        _ => Said::Text(parts.join("\n")),
    };
    let mut rest = Vec::new();
    match message.role.as_str() {
        "assistant" => assistant(message, &mut rest)?,
        "tool" => rest.extend(message.tool_call_id.as_deref().map(|id| ("tool_call_id", Value::from(id)))),
        "developer" => {
            rest.extend(message.tools.as_ref().map(|tools| Ok(("tools", python::value(tools)?))).transpose()?)
        }
        _ => {}
    }
    if let Some(Json::String(name)) = &message.name {
        rest.push(("name", Value::from(name.as_str())));
    }
    Ok(Turn { role: message.role.clone(), content, rest })
}

fn assistant(message: &Message, rest: &mut Vec<(&'static str, Value)>) -> Result<(), EncodeError> {
    if let Some(calls) = message.tool_calls.as_ref().filter(|calls| !calls.is_empty()) {
        let calls: Vec<Value> =
            calls.iter().map(|call| tool_call(call, message.calls_put_together)).collect::<Result<_, _>>()?;
        rest.push(("tool_calls", python::list(calls)));
    }
    if let Some(thought) = message.reasoning.as_ref().or(message.reasoning_content.as_ref()) {
        rest.push(("reasoning", Value::from(thought.as_str())));
        rest.push(("reasoning_content", Value::from(thought.as_str())));
    }
    Ok(())
}

fn parts(content: Option<&Content>) -> Result<Vec<String>, EncodeError> {
    match content {
        None => Ok(Vec::new()),
        Some(Content::Text(text)) => Ok(vec![text.clone()]),
        Some(Content::Parts(parts)) => parts.iter().filter_map(|part| part_text(part).transpose()).collect(),
    }
}

/// The text of a part; a text part without text is skipped.
fn part_text(part: &Part) -> Result<Option<String>, EncodeError> {
    let (kind, text, refusal, thinking, uuid) = match part {
        Part::Bare(text) => return Ok(Some(text.clone())),
        Part::Typed { kind, text, refusal, thinking, uuid } => (kind, text, refusal, thinking, uuid),
    };
    let kind = kind.as_deref().ok_or_else(|| EncodeError::Multimodal("unnamed".to_owned()))?;
    if uuid.is_some() {
        return Err(EncodeError::Multimodal(kind.to_owned()));
    }
    match kind {
        "text" => Ok(text.clone()),
        "refusal" => Ok(refusal.clone()),
        "input_text" | "output_text" => known(kind, text.as_ref()),
        "thinking" => known(kind, thinking.as_ref()),
        "tool_reference" => Err(EncodeError::uncertain("a tool_reference part")),
        media => Err(EncodeError::Multimodal(media.to_owned())),
    }
}

fn known(kind: &str, text: Option<&String>) -> Result<Option<String>, EncodeError> {
    text.map(|text| Some(text.clone())).ok_or_else(|| EncodeError::uncertain(format!("an empty part of type {kind}")))
}

/// A call as validation leaves it: known keys in the order of the schema, then the others as sent. One that the engine put
/// together is not validated again, and has its name first.
fn tool_call(call: &Json, put_together: bool) -> Result<Value, EncodeError> {
    let call = call.as_object().ok_or_else(|| EncodeError::rejected("a tool call is not an object"))?;
    let function = call.get("function").and_then(Json::as_object);
    let (Some(function), Some("function"), Some(_)) =
        (function, call.get("type").and_then(Json::as_str), call.get("id").and_then(Json::as_str))
    else {
        return Err(EncodeError::uncertain("a tool call without id, type or function"));
    };
    let (Some(name), Some(arguments)) =
        (function.get("name").and_then(Json::as_str), function.get("arguments").and_then(Json::as_str))
    else {
        return Err(EncodeError::uncertain("a tool call whose name or arguments are not strings"));
    };
    let mut inner = [("arguments", arguments_value(arguments)?), ("name", Value::from(name))];
    if put_together {
        inner.reverse();
    }
    let function = with_others(inner, function)?;
    let outer = [("id", python::value(&call["id"])?), ("function", function), ("type", Value::from("function"))];
    with_others(outer, call)
}

fn with_others<const N: usize>(
    known: [(&'static str, Value); N],
    sent: &Map<String, Json>,
) -> Result<Value, EncodeError> {
    let names = known.each_ref().map(|(name, _)| *name);
    let mut dict = Dict::from_iter(known);
    for (key, value) in sent.iter().filter(|(key, _)| !names.contains(&key.as_str())) {
        dict.push(key, python::value(value)?);
    }
    Ok(dict.into_value())
}

/// Arguments are parsed, and what is not JSON becomes an empty object; Python's idea of JSON is a little wider than ours.
fn arguments_value(text: &str) -> Result<Value, EncodeError> {
    match serde_json::from_str::<Json>(text) {
        Ok(json) => python::value(&json),
        Err(error) => {
            let reason = error.to_string();
            let wider = ["NaN", "Infinity", "\\u"].iter().any(|mark| text.contains(mark))
                || ["recursion", "out of range"].iter().any(|mark| reason.contains(mark));
            if wider {
                return Err(EncodeError::uncertain("arguments of a tool call that only Python reads"));
            }
            Ok(Dict::default().into_value())
        }
    }
}

/// Where the template knows no developer, developers are systems, and all systems are merged into one at the front.
pub(super) fn without_developers(mut turns: Vec<Turn>) -> Vec<Turn> {
    for turn in turns.iter_mut().filter(|turn| turn.role == "developer") {
        "system".clone_into(&mut turn.role);
        turn.rest.retain(|(key, _)| *key != "tools");
    }
    let scattered = turns.iter().enumerate().any(|(place, turn)| place > 0 && turn.role == "system");
    if !scattered {
        return turns;
    }
    let (systems, others): (Vec<_>, Vec<_>) = turns.into_iter().partition(|turn| turn.role == "system");
    let texts: Vec<String> = systems
        .into_iter()
        .map(|turn| match turn.content {
            Said::Text(text) => text,
            Said::Parts(parts) => parts.join("\n"),
        })
        .filter(|text| !text.is_empty())
        .collect();
    let merged = Turn { role: "system".to_owned(), content: Said::Text(texts.join("\n\n")), rest: Vec::new() };
    std::iter::once(merged).chain(others).collect()
}

/// The messages as values for the template.
pub(super) fn into_value(turns: Vec<Turn>) -> Value {
    python::list(turns.into_iter().map(message_value).collect())
}

fn message_value(turn: Turn) -> Value {
    let content = match turn.content {
        Said::Text(text) => Value::from(text),
        Said::Parts(parts) => python::list(parts.into_iter().map(text_part).collect()),
    };
    let mut dict = Dict::from_iter([("role", Value::from(turn.role)), ("content", content)]);
    for (key, value) in turn.rest {
        dict.push(key, value);
    }
    dict.into_value()
}

fn text_part(text: String) -> Value {
    Dict::from_iter([("type", Value::from("text")), ("text", Value::from(text))]).into_value()
}

/// Tools as the engine's validation leaves them: known keys in the order of the schema, missing ones `null`.
pub(super) fn tools(tools: &[Json]) -> Result<Value, EncodeError> {
    Ok(python::list(tools.iter().map(tool).collect::<Result<_, _>>()?))
}

fn tool(tool: &Json) -> Result<Value, EncodeError> {
    let tool = tool.as_object().ok_or_else(|| EncodeError::rejected("a tool is not an object"))?;
    let function = tool
        .get("function")
        .and_then(Json::as_object)
        .ok_or_else(|| EncodeError::rejected("a tool without a function"))?;
    if !matches!(tool.get("type").map(Json::as_str), None | Some(Some("function"))) {
        return Err(EncodeError::rejected("a tool that is not a function"));
    }
    if let Some(key) = tool.keys().find(|key| !["type", "function"].contains(&key.as_str())) {
        return Err(EncodeError::uncertain(format!("the field `{key}` of a tool")));
    }
    let known = ["name", "description", "parameters", "strict"];
    if let Some(key) = function.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(EncodeError::uncertain(format!("the field `{key}` of a function")));
    }
    let mut dict = Dict::default();
    dict.push("name", field(function, "name", |value| value.is_string())?);
    dict.push("description", field(function, "description", |value| value.is_string() || value.is_null())?);
    dict.push("parameters", field(function, "parameters", |value| value.is_object() || value.is_null())?);
    match function.get("strict") {
        None => {}
        Some(Json::Bool(strict)) => dict.push("strict", Value::from(*strict)),
        Some(_) => return Err(EncodeError::uncertain("the field `strict` of a function is not a boolean")),
    }
    Ok(Dict::from_iter([("type", Value::from("function")), ("function", dict.into_value())]).into_value())
}

fn field(function: &Map<String, Json>, name: &str, good: impl Fn(&Json) -> bool) -> Result<Value, EncodeError> {
    let value = function.get(name).unwrap_or(&Json::Null);
    if !good(value) {
        return Err(EncodeError::rejected(format!("the field `{name}` of a function is of the wrong type")));
    }
    python::value(value)
}
