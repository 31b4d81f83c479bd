//! The tools of `/v1/messages`: those of the request, and blocks of system messages that add and remove some. A template sees
//! one list, which holds the tools at the end of the conversation.

use std::collections::HashSet;

use indexmap::IndexMap;

use crate::openai::json::{JsonObject, JsonValue};

/// A block that changes the tools.
pub(super) enum ToolChange {
    /// Adds a tool, or replaces the tool of the same name.
    Definition(JsonObject),
    /// A tool that was known is no longer loaded later.
    Addition(String),
    /// Removes a tool.
    Removal(String),
}

/// The engine refuses these tools, or its behaviour with them is unknown.
pub(super) struct UnclearTools;

impl ToolChange {
    /// Reads the tool of a block of this type.
    pub(super) fn read(kind: &str, tool: &JsonValue) -> Option<Self> {
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

/// The tools in the form of chat completions; none where the request has no list of them.
pub(super) fn function_tools(
    tools: Option<Vec<JsonValue>>,
    changes: Vec<ToolChange>,
) -> Result<Option<Vec<JsonValue>>, UnclearTools> {
    if tools.is_none() && changes.is_empty() {
        return Ok(None);
    }
    let objects = tools
        .unwrap_or_default()
        .into_iter()
        .map(|tool| match tool {
            JsonValue::Object(tool) => Ok(tool),
            _ => Err(UnclearTools),
        });
    let tools = objects.collect::<Result<Vec<_>, _>>()?;
    let tools = if changes.is_empty() {
        tools
    } else {
        changed(tools, changes)?
    };
    tools
        .into_iter()
        .map(|tool| function(tool).ok_or(UnclearTools))
        .collect::<Result<_, _>>()
        .map(Some)
}

/// The tools after all changes. Of tools with one name the last counts, at the place of the first.
fn changed(
    tools: Vec<JsonObject>,
    changes: Vec<ToolChange>,
) -> Result<Vec<JsonObject>, UnclearTools> {
    let name_of = |tool: &JsonObject| {
        tool.get("name")
            .and_then(JsonValue::as_str)
            .map(str::to_owned)
            .ok_or(UnclearTools)
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
                    .ok_or(UnclearTools)?
                    .shift_remove("defer_loading");
                removed.remove(&name);
            }
            ToolChange::Removal(name) if named.contains_key(&name) => drop(removed.insert(name)),
            ToolChange::Removal(_) => return Err(UnclearTools),
        }
    }
    Ok(named
        .into_iter()
        .filter(|(name, _)| !removed.contains(name))
        .map(|(_, tool)| tool)
        .collect())
}

/// A tool in the form of chat completions; `None` where the engine refuses it. Its type, and other keys, do not count.
fn function(mut tool: JsonObject) -> Option<JsonValue> {
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
