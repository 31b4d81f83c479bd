//! Tools and tool calls in the form that templates receive, which is the result of the engine's
//! validation.

use minijinja::Value;

use crate::openai::{JsonError, JsonObject, JsonValue};
use crate::prompt::error::EncodeError;
use crate::prompt::python::{self, POISON, PythonDict};

/// Returns a tool call after the engine's validation: known keys in schema order, then the others
/// in request order. A call that the engine built itself is not validated and begins with the name.
pub(super) fn tool_call(call: &JsonValue, is_converted: bool) -> Result<Value, EncodeError> {
    let call = call
        .as_object()
        .ok_or_else(|| EncodeError::rejected("a tool call is not an object"))?;
    let function = call.get("function").and_then(JsonValue::as_object);
    let (Some(function), Some("function")) =
        (function, call.get("type").and_then(JsonValue::as_str))
    else {
        return Err(EncodeError::uncertain(
            "a tool call without type or function",
        ));
    };
    let id = match call.get("id") {
        Some(JsonValue::String(id)) => Value::from(id.as_str()),
        // The id is unknown. A template that prints it fails.
        Some(JsonValue::Unknown(_)) => Value::from(POISON.repeat(8)),
        _ => return Err(EncodeError::uncertain("a tool call without id")),
    };
    let (Some(name), Some(arguments)) = (
        function.get("name").and_then(JsonValue::as_str),
        function.get("arguments").and_then(JsonValue::as_str),
    ) else {
        return Err(EncodeError::uncertain(
            "a tool call whose name or arguments are not strings",
        ));
    };
    let mut inner = [
        ("arguments", arguments_value(arguments)?),
        ("name", Value::from(name)),
    ];
    if is_converted {
        inner.reverse();
    }
    let function = with_unknown_keys(inner, function)?;
    let outer = [
        ("id", id),
        ("function", function),
        ("type", Value::from("function")),
    ];
    with_unknown_keys(outer, call)
}

fn with_unknown_keys<const N: usize>(
    known: [(&'static str, Value); N],
    sent: &JsonObject,
) -> Result<Value, EncodeError> {
    let names = known.each_ref().map(|(name, _)| *name);
    let mut dict = PythonDict::from_iter(known);
    for (key, value) in sent
        .iter()
        .filter(|(key, _)| !names.contains(&key.as_str()))
    {
        dict.push(key, python::value(value)?);
    }
    Ok(dict.into_value())
}

/// Parses the arguments of a tool call. Text that is not a JSON object becomes an empty object.
fn arguments_value(text: &str) -> Result<Value, EncodeError> {
    match JsonValue::parse(text) {
        Ok(json @ JsonValue::Object(_)) => python::value(&json),
        Ok(_) | Err(JsonError::Invalid) => Ok(PythonDict::default().into_value()),
        Err(JsonError::Unsupported(why)) => Err(EncodeError::uncertain(format!(
            "arguments of a tool call with {why}"
        ))),
    }
}

/// Returns the tools after the engine's validation: known keys in schema order, with `null` for
/// missing ones.
pub(crate) fn template_tools(tools: &[JsonValue]) -> Result<Value, EncodeError> {
    Ok(python::list(
        tools.iter().map(template_tool).collect::<Result<_, _>>()?,
    ))
}

fn template_tool(tool: &JsonValue) -> Result<Value, EncodeError> {
    let tool = tool
        .as_object()
        .ok_or_else(|| EncodeError::rejected("a tool is not an object"))?;
    let function = tool
        .get("function")
        .and_then(JsonValue::as_object)
        .ok_or_else(|| EncodeError::rejected("a tool without a function"))?;
    if !matches!(
        tool.get("type").map(JsonValue::as_str),
        None | Some(Some("function"))
    ) {
        return Err(EncodeError::rejected("a tool that is not a function"));
    }
    let mut dict = PythonDict::default();
    dict.push(
        "name",
        checked_field(function, "name", |value| value.is_string())?,
    );
    dict.push(
        "description",
        checked_field(function, "description", |value| {
            value.is_string() || value.is_null()
        })?,
    );
    dict.push(
        "parameters",
        checked_field(function, "parameters", |value| {
            value.is_object() || value.is_null()
        })?,
    );
    copy_flag(function, "strict", &mut dict)?;
    // The function inherits `defer_loading` from its tool, but not the reverse.
    let of_tool = tool.get("defer_loading").filter(|value| !value.is_null());
    match (
        function
            .get("defer_loading")
            .filter(|value| !value.is_null()),
        of_tool,
    ) {
        (None, Some(_)) => copy_flag(tool, "defer_loading", &mut dict)?,
        _ => copy_flag(function, "defer_loading", &mut dict)?,
    }
    let mut outer = PythonDict::from_iter([
        ("type", Value::from("function")),
        ("function", dict.into_value()),
    ]);
    copy_flag(tool, "defer_loading", &mut outer)?;
    Ok(outer.into_value())
}

/// Copies a boolean of a function; an absent one is omitted.
fn copy_flag(function: &JsonObject, key: &str, dict: &mut PythonDict) -> Result<(), EncodeError> {
    match function.get(key) {
        None | Some(JsonValue::Null) => {}
        Some(JsonValue::Bool(flag)) => dict.push(key, Value::from(*flag)),
        Some(_) => {
            return Err(EncodeError::uncertain(format!(
                "the field `{key}` of a function is not a boolean"
            )));
        }
    }
    Ok(())
}

fn checked_field(
    function: &JsonObject,
    name: &str,
    good: impl Fn(&JsonValue) -> bool,
) -> Result<Value, EncodeError> {
    let value = function.get(name).unwrap_or(&JsonValue::Null);
    if !good(value) {
        return Err(EncodeError::rejected(format!(
            "the field `{name}` of a function is of the wrong type"
        )));
    }
    python::value(value)
}
