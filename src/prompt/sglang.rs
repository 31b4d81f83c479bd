//! Conversations as SGLang renders them (0.5.23, read and not run). It differs from vLLM in how parts of a text are joined,
//! in the order of a tool's keys, in which fields of a message reach the template, and in what it does with a last message of
//! the assistant. What it does in ways that are not followed here is uncertain, and the request goes by load.

use std::borrow::Cow;

use minijinja::Value;
use minijinja::machinery::ast::{Expr, Stmt};

use super::EncodeError;
use super::conversation::{Said, Turn};
use super::detect::{self, ContentFormat};
use super::python::{self, Dict};
use super::syntax::{Node, walk};
use crate::openai::{Chat, Content, JsonObject, JsonValue, Meaning, Message, Part};

/// Words that make it take a template for one that wants lists of parts.
const WORDS: [&str; 4] = ["image", "audio", "video", "vision"];

/// Names of a message over whose content it looks for a loop.
const MESSAGES: [&str; 3] = ["message", "msg", "m"];

/// Types that it leaves alone in the parameters of a tool.
const TYPES: [&str; 7] = [
    "array", "boolean", "integer", "null", "number", "object", "string",
];

/// The content format of a template; `None` where the loop is of a form in which it may not be found.
pub(super) fn content_format(template: &Stmt<'_>, source: &str) -> Option<ContentFormat> {
    if WORDS.iter().any(|word| source.contains(word)) {
        return Some(ContentFormat::Parts);
    }
    let (mut plain, mut other) = (false, false);
    walk(template, &mut |node| {
        if let Node::Stmt(Stmt::ForLoop(node)) = node {
            let of_message = match &node.iter {
                Expr::GetAttr(content) if content.name == "content" => detect::name(&content.expr),
                Expr::GetItem(content) if detect::is_text(&content.subscript_expr, "content") => {
                    detect::name(&content.expr)
                }
                _ => None,
            };
            plain |= of_message.is_some_and(|name| MESSAGES.contains(&name));
        }
        if let Node::Expr(Expr::Var(var)) = node {
            other |= var.id == "content";
        }
    });
    match (plain, detect::content_format(template)) {
        (true, _) => Some(ContentFormat::Parts),
        (false, ContentFormat::Text) if !other => Some(ContentFormat::Text),
        (false, _) => None,
    }
}

/// What it does in ways that are not followed here.
pub(super) fn check(chat: &Chat) -> Result<(), EncodeError> {
    let kwargs = &chat.chat_template_kwargs;
    let thinks = ["thinking", "enable_thinking"]
        .iter()
        .any(|key| kwargs.contains_key(*key));
    let doubts = [
        (
            chat.put_together,
            "SGLang puts conversations of this API together in another way",
        ),
        (
            chat.continue_final_message,
            "SGLang encodes the message to be gone on with apart from the others",
        ),
        (chat.brings_tokens, "the request brings its tokens along"),
        (
            kwargs.contains_key("tools"),
            "`tools` in chat_template_kwargs",
        ),
        (
            kwargs.contains_key("reasoning_effort"),
            "reasoning_effort in chat_template_kwargs",
        ),
        (
            chat.reasoning_effort.is_some() && thinks,
            "reasoning_effort beside thinking in chat_template_kwargs",
        ),
    ];
    match doubts.into_iter().find(|(doubt, _)| *doubt) {
        Some((_, why)) => Err(EncodeError::uncertain(why)),
        None => Ok(()),
    }
}

/// The messages as it hands them to the template.
pub(super) fn turns(
    chat: &Chat,
    format: Option<ContentFormat>,
) -> Result<Vec<Turn<'_>>, EncodeError> {
    let mut turns: Vec<Turn<'_>> = chat
        .messages
        .iter()
        .map(|message| turn(message, format))
        .collect::<Result<_, _>>()?;
    // A last word of the assistant is taken for the user's.
    if let Some(last) = turns.last_mut().filter(|turn| turn.role == "assistant")
        && let Said::Text(text) = &mut last.content
    {
        *last = Turn::plain("user", std::mem::take(text));
    }
    Ok(turns)
}

fn turn(message: &Message, format: Option<ContentFormat>) -> Result<Turn<'_>, EncodeError> {
    let role = message.role.as_str();
    if !["system", "developer", "user", "assistant", "tool"].contains(&role)
        || message.tools.is_some()
    {
        return Err(EncodeError::uncertain("a message of an uncommon kind"));
    }
    let content = match &message.content {
        None if role == "user" => return Err(EncodeError::rejected("a user who says nothing")),
        None => Said::Text(Cow::Borrowed("")),
        Some(Content::Text(text)) => Said::Text(Cow::Borrowed(text)),
        Some(Content::Parts(parts)) => {
            let texts = parts.iter().map(text_of).collect::<Result<Vec<_>, _>>()?;
            match format.filter(|_| role != "tool") {
                Some(ContentFormat::Parts) => Said::of_texts(texts),
                Some(ContentFormat::Text) => Said::Text(Cow::Owned(texts.join(" "))),
                None if role == "tool" => Said::Text(Cow::Owned(texts.join(" "))),
                None => {
                    return Err(EncodeError::uncertain(
                        "whether the template is given lists of parts",
                    ));
                }
            }
        }
    };
    let mut turn = Turn::plain(role, Cow::Borrowed(""));
    turn.content = content;
    let field = |key, text: &Option<String>| text.as_deref().map(|text| (key, Value::from(text)));
    if role == "tool" {
        turn.rest
            .extend(field("tool_call_id", &message.tool_call_id));
    }
    if let (Some(JsonValue::String(name)), true) = (&message.name, role != "user") {
        turn.rest.push(("name", Value::from(name.as_str())));
    }
    if role == "assistant" {
        turn.rest
            .extend(field("reasoning_content", &message.reasoning_content));
        if let Some(calls) = &message.tool_calls {
            let calls = calls.iter().map(tool_call).collect::<Result<_, _>>()?;
            turn.rest.push(("tool_calls", python::list(calls)));
        }
    }
    Ok(turn)
}

fn text_of(part: &Part) -> Result<Cow<'_, str>, EncodeError> {
    match (part, part.meaning()) {
        (_, Meaning::Media(media)) => Err(EncodeError::Multimodal(format!(
            "{}_url",
            media.modality.as_str()
        ))),
        (_, Meaning::Other(kind)) => Err(EncodeError::Multimodal(kind.to_owned())),
        (Part::Typed(part), Meaning::Text(text)) if part.kind.as_deref() == Some("text") => {
            Ok(Cow::Borrowed(text))
        }
        _ => Err(EncodeError::uncertain("a part that is no plain text")),
    }
}

/// A call with the fields it knows, in their order.
fn tool_call(call: &JsonValue) -> Result<Value, EncodeError> {
    let unclear = || EncodeError::uncertain("a tool call of an uncommon form");
    let call = call.as_object().ok_or_else(unclear)?;
    let function = call
        .get("function")
        .and_then(JsonValue::as_object)
        .ok_or_else(unclear)?;
    let (Some(JsonValue::String(_)), Some("function")) =
        (call.get("id"), call.get("type").and_then(JsonValue::as_str))
    else {
        return Err(unclear());
    };
    let arguments = match function.get("arguments") {
        None | Some(JsonValue::Null) => Value::from(()),
        Some(object @ JsonValue::Object(_)) => python::value(object)?,
        Some(JsonValue::String(text)) => match JsonValue::read(text) {
            Ok(object @ JsonValue::Object(_)) if object.is_portable() => python::value(&object)?,
            // Its reader turns long integers into floats and refuses numbers that are not finite.
            Ok(JsonValue::Object(_)) => return Err(unclear()),
            _ => {
                return Err(EncodeError::rejected(
                    "arguments of a tool call that are no JSON object",
                ));
            }
        },
        Some(_) => return Err(unclear()),
    };
    let name = function
        .get("name")
        .filter(|name| name.is_string())
        .ok_or_else(unclear)?;
    let function =
        Dict::from_iter([("name", python::value(name)?), ("arguments", arguments)]).into_value();
    let index = python::value(call.get("index").unwrap_or(&JsonValue::Null))?;
    let fields = [
        ("id", python::value(&call["id"])?),
        ("index", index),
        ("type", Value::from("function")),
    ];
    Ok(Dict::from_iter(fields.into_iter().chain([("function", function)])).into_value())
}

/// The tools that it shows to the template.
pub(super) fn tools(chat: &Chat) -> Result<Value, EncodeError> {
    let all = chat.tools.as_deref().unwrap_or_default();
    let wanted =
        match &chat.tool_choice {
            Some(JsonValue::String(choice)) if choice == "none" => return Ok(Value::from(())),
            None | Some(JsonValue::Null | JsonValue::String(_)) => None,
            Some(named) => {
                let name = function_name(named);
                Some(name.ok_or_else(|| {
                    EncodeError::uncertain("a choice of tools of an uncommon form")
                })?)
            }
        };
    let shown = all
        .iter()
        .filter(|tool| wanted.is_none_or(|name| function_name(tool) == Some(name)));
    let shown: Vec<Value> = shown.map(tool).collect::<Result<_, _>>()?;
    Ok(if shown.is_empty() {
        Value::from(())
    } else {
        python::list(shown)
    })
}

fn function_name(tool: &JsonValue) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

/// A tool with its function's keys as they were sent, and what was not sent behind them.
fn tool(tool: &JsonValue) -> Result<Value, EncodeError> {
    let unclear = |what: &str| EncodeError::uncertain(format!("{what} of a tool"));
    let function = tool
        .get("function")
        .and_then(JsonValue::as_object)
        .ok_or_else(|| unclear("no function"))?;
    if !matches!(
        tool.get("type").map(JsonValue::as_str),
        None | Some(Some("function"))
    ) {
        return Err(unclear("the type"));
    }
    let delayed = |object: &JsonObject| {
        object
            .get("defer_loading")
            .is_some_and(|value| !value.is_null())
    };
    if delayed(function) || tool.as_object().is_some_and(delayed) {
        return Err(unclear("the field `defer_loading`"));
    }
    if !function.get("name").is_some_and(JsonValue::is_string) {
        return Err(unclear("the name"));
    }
    let mut dict = Dict::default();
    for (key, value) in function {
        let good = match key.as_str() {
            "name" | "description" => value.is_string() || value.is_null(),
            "parameters" => value.is_null() || (value.is_object() && is_plain_schema(value)),
            "strict" if value.is_null() => continue,
            "strict" => matches!(value, JsonValue::Bool(_)),
            _ => continue,
        };
        if !good {
            return Err(unclear("a field"));
        }
        dict.push(key, python::value(value)?);
    }
    for key in ["description", "parameters"] {
        if !function.contains_key(key) {
            dict.push(key, Value::from(()));
        }
    }
    let fields = [
        ("type", Value::from("function")),
        ("function", dict.into_value()),
        ("defer_loading", Value::from(())),
    ];
    Ok(Dict::from_iter(fields).into_value())
}

/// Whether every type in a schema is one of JSON's; others are rewritten.
fn is_plain_schema(schema: &JsonValue) -> bool {
    match schema {
        JsonValue::Object(fields) => {
            fields
                .iter()
                .all(|(key, value)| match (key.as_str(), value) {
                    ("type", JsonValue::String(name)) => TYPES.contains(&name.as_str()),
                    (_, value) => is_plain_schema(value),
                })
        }
        JsonValue::Array(items) => items.iter().all(is_plain_schema),
        _ => true,
    }
}

/// The variables of the template that are not the conversation.
pub(super) fn variables(chat: &Chat) -> Result<Vec<(String, Value)>, EncodeError> {
    let mut variables = vec![("documents".to_owned(), Value::from(()))];
    for (name, value) in &chat.chat_template_kwargs {
        variables.push((name.clone(), python::comparable_value(value)?));
    }
    if let Some(effort) = chat.reasoning_effort.as_deref() {
        variables.push(("reasoning_effort".to_owned(), Value::from(effort)));
        for name in ["thinking", "enable_thinking"] {
            variables.push((name.to_owned(), Value::from(effort != "none")));
        }
    }
    variables.push(("tools".to_owned(), tools(chat)?));
    variables.push(("add_generation_prompt".to_owned(), Value::from(true)));
    Ok(variables)
}

/// A template that the operator gives, as it reads the file.
pub(super) fn template_file(source: &str) -> String {
    source.trim_matches('\n').replace("\\n", "\n")
}
