//! Rendering of conversations as in SGLang. It follows the source of SGLang 0.5.23 and was not
//! verified with an engine.
//!
//! SGLang differs from vLLM in the joining of text parts, the key order of tools, the message
//! fields that reach the template, and the treatment of a final assistant message. Behavior that is
//! not reproduced here is uncertain, and the request is routed by load only.

use std::borrow::Cow;

use minijinja::Value;
use minijinja::machinery::ast::{Expr, Stmt};

use super::content_format::{self, ContentFormat};
use super::conversation::{TemplateContent, TemplateMessage};
use super::error::EncodeError;
use super::python::{self, PythonDict};
use super::syntax::{SyntaxNode, walk};
use crate::openai::{
    ChatMessage, ChatPrompt, ContentPart, JsonObject, JsonValue, MessageContent, PartMeaning,
};

/// Words in a template from which SGLang infers lists of parts.
const MULTIMODAL_WORDS: [&str; 4] = ["image", "audio", "video", "vision"];

/// Names of loop variables that SGLang recognizes as messages.
const MESSAGE_NAMES: [&str; 3] = ["message", "msg", "m"];

/// Schema types that SGLang does not rewrite.
const SCHEMA_TYPES: [&str; 7] = [
    "array", "boolean", "integer", "null", "number", "object", "string",
];

/// Detects the content format of a template. Returns `None` for a loop that SGLang may not
/// recognize.
pub(super) fn content_format(template: &Stmt<'_>, source: &str) -> Option<ContentFormat> {
    if MULTIMODAL_WORDS.iter().any(|word| source.contains(word)) {
        return Some(ContentFormat::Parts);
    }
    let mut has_known_loop = false;
    let mut has_content = false;
    walk(template, &mut |node| {
        if let SyntaxNode::Stmt(Stmt::ForLoop(node)) = node {
            let of_message = match &node.iter {
                Expr::GetAttr(content) if content.name == "content" => {
                    content_format::variable_name(&content.expr)
                }
                Expr::GetItem(content)
                    if content_format::is_string_constant(&content.subscript_expr, "content") =>
                {
                    content_format::variable_name(&content.expr)
                }
                _ => None,
            };
            has_known_loop |= of_message.is_some_and(|name| MESSAGE_NAMES.contains(&name));
        }
        if let SyntaxNode::Expr(Expr::Var(var)) = node {
            has_content |= var.id == "content";
        }
    });
    match (has_known_loop, content_format::content_format(template)) {
        (true, _) => Some(ContentFormat::Parts),
        (false, ContentFormat::Text) if !has_content => Some(ContentFormat::Text),
        (false, _) => None,
    }
}

/// Rejects requests whose behavior in SGLang is not reproduced.
pub(super) fn check_supported(chat: &ChatPrompt) -> Result<(), EncodeError> {
    let kwargs = &chat.chat_template_kwargs;
    let thinks = ["thinking", "enable_thinking"]
        .iter()
        .any(|key| kwargs.contains_key(*key));
    let unsupported_options = [
        (
            chat.is_converted,
            "SGLang converts conversations of this API differently",
        ),
        (
            chat.continue_final_message,
            "SGLang encodes a continued message separately",
        ),
        (chat.has_input_ids, "the request contains its token ids"),
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
    match unsupported_options.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, why)) => Err(EncodeError::uncertain(why)),
        None => Ok(()),
    }
}

/// Returns the messages in the form that the template receives.
pub(super) fn template_messages(
    chat: &ChatPrompt,
    format: Option<ContentFormat>,
) -> Result<Vec<TemplateMessage<'_>>, EncodeError> {
    let mut turns: Vec<TemplateMessage<'_>> = chat
        .messages
        .iter()
        .map(|message| template_message(message, format))
        .collect::<Result<_, _>>()?;
    // SGLang treats the text of a final assistant message as a user message.
    if let Some(last) = turns.last_mut().filter(|turn| turn.role == "assistant")
        && let TemplateContent::Text(text) = &mut last.content
    {
        *last = TemplateMessage::with_text("user", std::mem::take(text));
    }
    Ok(turns)
}

fn template_message(
    message: &ChatMessage,
    format: Option<ContentFormat>,
) -> Result<TemplateMessage<'_>, EncodeError> {
    let role = message.role.as_str();
    if !["system", "developer", "user", "assistant", "tool"].contains(&role)
        || message.tools.is_some()
    {
        return Err(EncodeError::uncertain(
            "a message with an unsupported role or field",
        ));
    }
    let content = match &message.content {
        None if role == "user" => {
            return Err(EncodeError::rejected("a user message without content"));
        }
        None => TemplateContent::Text(Cow::Borrowed("")),
        Some(MessageContent::Text(text)) => TemplateContent::Text(Cow::Borrowed(text)),
        Some(MessageContent::Parts(parts)) => {
            let texts = parts
                .iter()
                .map(text_of_part)
                .collect::<Result<Vec<_>, _>>()?;
            match format.filter(|_| role != "tool") {
                Some(ContentFormat::Parts) => TemplateContent::from_texts(texts),
                Some(ContentFormat::Text) => TemplateContent::Text(Cow::Owned(texts.join(" "))),
                None if role == "tool" => TemplateContent::Text(Cow::Owned(texts.join(" "))),
                None => {
                    return Err(EncodeError::uncertain(
                        "whether the template receives lists of parts",
                    ));
                }
            }
        }
    };
    let mut turn = TemplateMessage::with_text(role, Cow::Borrowed(""));
    turn.content = content;
    let field = |key, text: &Option<String>| text.as_deref().map(|text| (key, Value::from(text)));
    if role == "tool" {
        turn.other_fields
            .extend(field("tool_call_id", &message.tool_call_id));
    }
    if let (Some(JsonValue::String(name)), true) = (&message.name, role != "user") {
        turn.other_fields.push(("name", Value::from(name.as_str())));
    }
    if role == "assistant" {
        turn.other_fields
            .extend(field("reasoning_content", &message.reasoning_content));
        if let Some(calls) = &message.tool_calls {
            let calls = calls.iter().map(tool_call).collect::<Result<_, _>>()?;
            turn.other_fields.push(("tool_calls", python::list(calls)));
        }
    }
    Ok(turn)
}

fn text_of_part(part: &ContentPart) -> Result<Cow<'_, str>, EncodeError> {
    match (part, part.meaning()) {
        (_, PartMeaning::Media(media)) => Err(EncodeError::Multimodal(format!(
            "{}_url",
            media.modality.as_str()
        ))),
        (_, PartMeaning::Unknown(kind)) => Err(EncodeError::Multimodal(kind.to_owned())),
        (ContentPart::Typed(part), PartMeaning::Text(text))
            if part.kind.as_deref() == Some("text") =>
        {
            Ok(Cow::Borrowed(text))
        }
        _ => Err(EncodeError::uncertain("a part that is not plain text")),
    }
}

/// Returns a tool call with the known fields in SGLang's order.
fn tool_call(call: &JsonValue) -> Result<Value, EncodeError> {
    let unsupported = || EncodeError::uncertain("a tool call in an unsupported format");
    let call = call.as_object().ok_or_else(unsupported)?;
    let function = call
        .get("function")
        .and_then(JsonValue::as_object)
        .ok_or_else(unsupported)?;
    let (Some(JsonValue::String(_)), Some("function")) =
        (call.get("id"), call.get("type").and_then(JsonValue::as_str))
    else {
        return Err(unsupported());
    };
    let arguments = match function.get("arguments") {
        None | Some(JsonValue::Null) => Value::from(()),
        Some(object @ JsonValue::Object(_)) => python::value(object)?,
        Some(JsonValue::String(text)) => match JsonValue::parse(text) {
            Ok(object @ JsonValue::Object(_)) if object.is_portable() => python::value(&object)?,
            // SGLang's parser converts long integers to floats and rejects non-finite numbers.
            Ok(JsonValue::Object(_)) => return Err(unsupported()),
            _ => {
                return Err(EncodeError::rejected(
                    "tool call arguments that are not a JSON object",
                ));
            }
        },
        Some(_) => return Err(unsupported()),
    };
    let name = function
        .get("name")
        .filter(|name| name.is_string())
        .ok_or_else(unsupported)?;
    let function =
        PythonDict::from_iter([("name", python::value(name)?), ("arguments", arguments)])
            .into_value();
    let index = python::value(call.get("index").unwrap_or(&JsonValue::Null))?;
    let fields = [
        ("id", python::value(&call["id"])?),
        ("index", index),
        ("type", Value::from("function")),
    ];
    Ok(PythonDict::from_iter(fields.into_iter().chain([("function", function)])).into_value())
}

/// Returns the tools that the template receives.
pub(super) fn template_tools(chat: &ChatPrompt) -> Result<Value, EncodeError> {
    let all = chat.tools.as_deref().unwrap_or_default();
    let wanted =
        match &chat.tool_choice {
            Some(JsonValue::String(choice)) if choice == "none" => return Ok(Value::from(())),
            None | Some(JsonValue::Null | JsonValue::String(_)) => None,
            Some(named) => {
                let name = function_name(named);
                Some(name.ok_or_else(|| {
                    EncodeError::uncertain("a tool choice in an unsupported format")
                })?)
            }
        };
    let shown = all
        .iter()
        .filter(|tool| wanted.is_none_or(|name| function_name(tool) == Some(name)));
    let shown: Vec<Value> = shown.map(template_tool).collect::<Result<_, _>>()?;
    Ok(if shown.is_empty() {
        Value::from(())
    } else {
        python::list(shown)
    })
}

fn function_name(tool: &JsonValue) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

/// Returns a tool with its function's keys in request order and the missing keys after them.
fn template_tool(tool: &JsonValue) -> Result<Value, EncodeError> {
    let unsupported = |what: &str| EncodeError::uncertain(format!("{what} of a tool"));
    let function = tool
        .get("function")
        .and_then(JsonValue::as_object)
        .ok_or_else(|| unsupported("no function"))?;
    if !matches!(
        tool.get("type").map(JsonValue::as_str),
        None | Some(Some("function"))
    ) {
        return Err(unsupported("the type"));
    }
    let delayed = |object: &JsonObject| {
        object
            .get("defer_loading")
            .is_some_and(|value| !value.is_null())
    };
    if delayed(function) || tool.as_object().is_some_and(delayed) {
        return Err(unsupported("the field `defer_loading`"));
    }
    if !function.get("name").is_some_and(JsonValue::is_string) {
        return Err(unsupported("the name"));
    }
    let mut dict = PythonDict::default();
    for (key, value) in function {
        let good = match key.as_str() {
            "name" | "description" => value.is_string() || value.is_null(),
            "parameters" => value.is_null() || (value.is_object() && is_plain_schema(value)),
            "strict" if value.is_null() => continue,
            "strict" => matches!(value, JsonValue::Bool(_)),
            _ => continue,
        };
        if !good {
            return Err(unsupported("a field"));
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
    Ok(PythonDict::from_iter(fields).into_value())
}

/// Returns true if all types in a schema are JSON types. SGLang rewrites other types.
fn is_plain_schema(schema: &JsonValue) -> bool {
    match schema {
        JsonValue::Object(fields) => {
            fields
                .iter()
                .all(|(key, value)| match (key.as_str(), value) {
                    ("type", JsonValue::String(name)) => SCHEMA_TYPES.contains(&name.as_str()),
                    (_, value) => is_plain_schema(value),
                })
        }
        JsonValue::Array(items) => items.iter().all(is_plain_schema),
        _ => true,
    }
}

/// Returns the template variables except the messages.
pub(super) fn template_variables(chat: &ChatPrompt) -> Result<Vec<(String, Value)>, EncodeError> {
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
    variables.push(("tools".to_owned(), template_tools(chat)?));
    variables.push(("add_generation_prompt".to_owned(), Value::from(true)));
    Ok(variables)
}
