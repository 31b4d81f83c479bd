//! Tools of `/v1/messages`: those of the request, and blocks of system messages that add or remove
//! tools. The template receives one list: the tools that are valid at the end of the conversation.

use std::collections::HashSet;

use indexmap::IndexMap;

use crate::openai::json::{JsonObject, JsonValue};

/// A block that changes the tools.
pub(super) enum ToolChange {
    /// Adds a tool, or replaces the tool of the same name.
    Definition(JsonObject),
    /// Enables a known tool: ends the deferral of its loading, or undoes its removal.
    Addition(String),
    /// Removes a tool.
    Removal(String),
}

/// The engine rejects the tools, or its behavior with them is unknown.
pub(super) struct UnsupportedToolsError;

impl ToolChange {
    /// Parses the tool of a block of type `kind`.
    pub(super) fn parse(kind: &str, tool: &JsonValue) -> Option<Self> {
        let named = || tool.get("name")?.as_str().map(str::to_owned);
        match (kind, tool.get("type")?.as_str()?) {
            ("tool_addition", "tool_definition") => Some(Self::Definition(
                tool.get("definition")?.as_object()?.clone(),
            )),
            ("tool_addition", "tool_reference") => named().map(Self::Addition),
            ("tool_removal", "tool_reference") => named().map(Self::Removal),
            _ => None,
        }
    }
}

/// Returns the tools in the format of chat completions, or `None` if the request has no tool list.
pub(super) fn template_tools(
    tools: Option<Vec<JsonValue>>,
    changes: Vec<ToolChange>,
) -> Result<Option<Vec<JsonValue>>, UnsupportedToolsError> {
    if tools.is_none() && changes.is_empty() {
        return Ok(None);
    }
    let objects = tools
        .unwrap_or_default()
        .into_iter()
        .map(|tool| match tool {
            JsonValue::Object(tool) => Ok(tool),
            _ => Err(UnsupportedToolsError),
        });
    let tools = objects.collect::<Result<Vec<_>, _>>()?;
    let tools = if changes.is_empty() {
        tools
    } else {
        apply_changes(tools, changes)?
    };
    tools
        .into_iter()
        .map(|tool| to_chat_tool(tool).ok_or(UnsupportedToolsError))
        .collect::<Result<_, _>>()
        .map(Some)
}

/// Applies all changes. A later tool replaces an earlier one of the same name at its position.
fn apply_changes(
    tools: Vec<JsonObject>,
    changes: Vec<ToolChange>,
) -> Result<Vec<JsonObject>, UnsupportedToolsError> {
    let name_of = |tool: &JsonObject| {
        tool.get("name")
            .and_then(JsonValue::as_str)
            .map(str::to_owned)
            .ok_or(UnsupportedToolsError)
    };
    let mut named: IndexMap<String, JsonObject> = tools
        .into_iter()
        .map(|tool| Ok((name_of(&tool)?, tool)))
        .collect::<Result<_, _>>()?;
    let mut removed = HashSet::new();
    for change in changes {
        match change {
            ToolChange::Definition(tool) => {
                let name = name_of(&tool)?;
                removed.remove(&name);
                named.insert(name, tool);
            }
            ToolChange::Addition(name) => {
                named
                    .get_mut(&name)
                    .ok_or(UnsupportedToolsError)?
                    .shift_remove("defer_loading");
                removed.remove(&name);
            }
            ToolChange::Removal(name) if named.contains_key(&name) => drop(removed.insert(name)),
            ToolChange::Removal(_) => return Err(UnsupportedToolsError),
        }
    }
    Ok(named
        .into_iter()
        .filter(|(name, _)| !removed.contains(name))
        .map(|(_, tool)| tool)
        .collect())
}

/// Converts a tool to the format of chat completions. Returns `None` if the engine rejects it.
/// Other keys, such as the type, are dropped.
fn to_chat_tool(mut tool: JsonObject) -> Option<JsonValue> {
    let mut function = JsonObject::new();
    let JsonValue::Object(mut parameters) = tool.shift_remove("input_schema")? else {
        return None;
    };
    parameters
        .entry("type".to_owned())
        .or_insert_with(|| "object".into());
    function.insert("parameters".to_owned(), JsonValue::Object(parameters));
    for key in ["name", "description", "strict", "defer_loading"] {
        function.extend(tool.shift_remove(key).map(|value| (key.to_owned(), value)));
    }
    Some(JsonValue::object([
        ("type", "function".into()),
        ("function", JsonValue::Object(function)),
    ]))
}
