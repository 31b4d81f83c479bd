//! A conversation as templates see it: vLLM turns the request's messages into plain ones first, and every turn it takes
//! (joined parts, parsed arguments, the order of keys) is visible to a template and so to the tokens.

use std::borrow::Cow;

use minijinja::Value;

use super::EncodeError;
use super::detect::ContentFormat;
use super::python::{self, DOUBT, Dict};
use super::stage::Stage;
use crate::openai::{Content, JsonError, JsonObject, JsonValue, Meaning, Message, Modality, Part};

/// One message on its way into a template.
pub(super) struct Turn<'m> {
    pub role: &'m str,
    pub content: Said<'m>,
    pub(super) rest: Vec<(&'static str, Value)>,
}

impl<'m> Turn<'m> {
    /// A message that says a text.
    pub(super) fn plain(role: &'m str, text: Cow<'m, str>) -> Self {
        Self {
            role,
            content: Said::Text(text),
            rest: Vec::new(),
        }
    }

    /// Whether the message carries the assistant's thoughts.
    pub(super) fn has_thoughts(&self) -> bool {
        self.rest.iter().any(|(key, _)| *key == "reasoning")
    }
}

/// The content of a message in one of the two shapes templates expect.
pub(super) enum Said<'m> {
    /// One string.
    Text(Cow<'m, str>),
    /// A list of parts.
    Parts(Vec<Piece<'m>>),
}

/// A part on its way into a template.
pub(super) struct Piece<'m> {
    what: What<'m>,
    /// Keys of which the engine knows nothing.
    extra: Vec<(String, Value)>,
}

enum What<'m> {
    Text(Cow<'m, str>),
    Media(Modality),
    Reference(&'m str),
}

impl<'m> Said<'m> {
    /// A list of texts.
    pub(super) fn of_texts(texts: impl IntoIterator<Item = Cow<'m, str>>) -> Self {
        Self::Parts(
            texts
                .into_iter()
                .map(|text| Piece {
                    what: What::Text(text),
                    extra: Vec::new(),
                })
                .collect(),
        )
    }

    /// Bytes of all texts.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts
                .iter()
                .map(|part| part.text().map_or(0, str::len))
                .sum(),
        }
    }

    /// The text that an answer would go on from.
    pub(super) fn last_text(&mut self) -> Option<&mut String> {
        match self {
            Self::Text(text) => Some(text.to_mut()),
            Self::Parts(parts) => parts
                .iter_mut()
                .rev()
                .find_map(Piece::text_mut)
                .map(Cow::to_mut),
        }
    }
}

/// An entry of a part.
pub(super) enum Field<'p> {
    Text(&'p str),
    Value(&'p Value),
}

impl<'m> Piece<'m> {
    /// An entry, as a template sees it.
    pub(super) fn field(&self, key: &str) -> Option<Field<'_>> {
        let known = match (&self.what, key) {
            (What::Text(_), "type") => Some("text"),
            (What::Text(text), "text") => Some(&**text),
            (What::Media(modality), "type") => Some(modality.as_str()),
            (What::Reference(_), "type") => Some("tool_reference"),
            (What::Reference(name), "name") => Some(*name),
            _ => None,
        };
        let more = || {
            self.extra
                .iter()
                .find(|(known, _)| known == key)
                .map(|(_, value)| Field::Value(value))
        };
        known.map(Field::Text).or_else(more)
    }

    fn text(&self) -> Option<&str> {
        match &self.what {
            What::Text(text) => Some(text),
            What::Media(_) | What::Reference(_) => None,
        }
    }

    fn text_mut(&mut self) -> Option<&mut Cow<'m, str>> {
        match &mut self.what {
            What::Text(text) => Some(text),
            What::Media(_) | What::Reference(_) => None,
        }
    }

    fn into_text(self) -> Option<Cow<'m, str>> {
        match self.what {
            What::Text(text) => Some(text),
            What::Media(_) | What::Reference(_) => None,
        }
    }

    fn into_value(self) -> Value {
        let mut dict = match self.what {
            What::Text(text) => {
                Dict::from_iter([("type", Value::from("text")), ("text", Value::from(&*text))])
            }
            What::Media(modality) => Dict::from_iter([("type", Value::from(modality.as_str()))]),
            What::Reference(name) => Dict::from_iter([
                ("type", Value::from("tool_reference")),
                ("name", Value::from(name)),
            ]),
        };
        for (key, value) in self.extra {
            dict.push(&key, value);
        }
        dict.into_value()
    }
}

/// Begins a line that Claude Code changes with every request, and that vLLM drops from system messages for the sake of its
/// cache.
const BILLING: &str = "x-anthropic-billing-header";

/// The messages as vLLM hands them to the template.
pub(super) fn turns<'m>(
    messages: &'m [Message],
    format: ContentFormat,
    stage: &mut Stage<'_>,
) -> Result<Vec<Turn<'m>>, EncodeError> {
    messages
        .iter()
        .map(|message| turn(message, format, stage))
        .collect()
}

fn turn<'m>(
    message: &'m Message,
    format: ContentFormat,
    stage: &mut Stage<'_>,
) -> Result<Turn<'m>, EncodeError> {
    let content = match &message.content {
        Some(Content::Text(text)) => bare(message, text, format),
        Some(Content::Parts(parts)) => of_parts(message, parts, format, stage)?,
        None => of_parts(message, &[], format, stage)?,
    };
    let mut rest = Vec::new();
    match message.role.as_str() {
        "assistant" => assistant(message, &mut rest)?,
        "tool" => rest.extend(
            message
                .tool_call_id
                .as_deref()
                .map(|id| ("tool_call_id", Value::from(id))),
        ),
        "developer" => rest.extend(
            message
                .tools
                .as_ref()
                .map(|tools| Ok(("tools", python::value(tools)?)))
                .transpose()?,
        ),
        _ => {}
    }
    for (key, value) in [("name", &message.name), ("task", &message.task)] {
        if let Some(JsonValue::String(text)) = value {
            rest.push((key, Value::from(text.as_str())));
        }
    }
    Ok(Turn {
        role: &message.role,
        content,
        rest,
    })
}

/// Content that came as one string, which is one part.
fn bare<'m>(message: &Message, text: &'m str, format: ContentFormat) -> Said<'m> {
    let text = if message.role == "system" {
        unbilled(text)
    } else {
        Some(text)
    };
    match format {
        ContentFormat::Parts if message.role != "tool" => Said::of_texts(text.map(Cow::Borrowed)),
        ContentFormat::Parts | ContentFormat::Text => {
            Said::Text(Cow::Borrowed(text.unwrap_or_default()))
        }
    }
}

/// Content that came as a list of parts.
fn of_parts<'m>(
    message: &'m Message,
    parts: &'m [Part],
    format: ContentFormat,
    stage: &mut Stage<'_>,
) -> Result<Said<'m>, EncodeError> {
    let is_system = message.role == "system";
    let parts = parts.iter().filter_map(|part| {
        if is_system {
            without_billing(part)
        } else {
            Some((part, None))
        }
    });
    match format {
        ContentFormat::Parts => listed(message, parts, stage),
        ContentFormat::Text => joined(parts, stage).map(Said::Text),
    }
}

/// A part of a system message, and where it begins with the line of the bill, what of its text is left.
fn without_billing(part: &Part) -> Option<(&Part, Option<&str>)> {
    let is_text = match part {
        Part::Bare(_) => true,
        Part::Typed(part) => part.kind.as_deref() == Some("text"),
    };
    match part.meaning() {
        Meaning::Text(text) if is_text => Some((part, Some(unbilled(text)?))),
        _ => Some((part, None)),
    }
}

/// A text of a system message without the line of the bill; nothing, if that was all.
fn unbilled(text: &str) -> Option<&str> {
    if !text.starts_with(BILLING) {
        return Some(text);
    }
    text.split_once('\n')
        .map(|(_, rest)| rest)
        .filter(|rest| !rest.is_empty())
}

/// The parts as a list of dicts.
fn listed<'p>(
    message: &Message,
    parts: impl Iterator<Item = (&'p Part, Option<&'p str>)>,
    stage: &mut Stage<'_>,
) -> Result<Said<'p>, EncodeError> {
    let mut pieces = Vec::new();
    for (part, shortened) in parts {
        let what = match understood(part)? {
            Meaning::Text(text) => What::Text(Cow::Borrowed(shortened.unwrap_or(text))),
            Meaning::Media(media) => match stage.listed(media.modality)? {
                Some(text) => What::Text(Cow::Owned(text)),
                None => What::Media(media.modality),
            },
            Meaning::Reference(name) => What::Reference(name),
            _ => continue,
        };
        let extra = part
            .extra()
            .map(|(key, value)| Ok((key.clone(), python::value(value)?)));
        let extra = if matches!(what, What::Reference(_)) {
            Vec::new()
        } else {
            extra.collect::<Result<_, _>>()?
        };
        pieces.push(Piece { what, extra });
    }
    // Templates seldom take lists of texts from tools, so the engine joins those always.
    if message.role == "tool" && pieces.iter_mut().all(|piece| piece.text_mut().is_some()) {
        let texts: Vec<_> = pieces.into_iter().filter_map(Piece::into_text).collect();
        return Ok(Said::Text(Cow::Owned(texts.join("\n"))));
    }
    Ok(Said::Parts(pieces))
}

/// The parts as one text: what stands for items goes to its front, as far as the text does not say it already.
fn joined<'p>(
    parts: impl Iterator<Item = (&'p Part, Option<&'p str>)>,
    stage: &mut Stage<'_>,
) -> Result<Cow<'p, str>, EncodeError> {
    let mut texts: Vec<&'p str> = Vec::new();
    let mut placeholders: Vec<(String, usize)> = Vec::new();
    for (part, shortened) in parts {
        match understood(part)? {
            Meaning::Text(text) => texts.push(shortened.unwrap_or(text)),
            Meaning::Reference(name) => texts.push(name),
            Meaning::Media(media) => {
                let Some(text) = stage.placeholder(media.modality)? else {
                    continue;
                };
                match placeholders.iter_mut().find(|(known, _)| *known == text) {
                    Some((_, count)) => *count += 1,
                    None => placeholders.push((text, 1)),
                }
            }
            _ => {}
        }
    }
    // An empty text is no part, and leaves no line.
    texts.retain(|text| !text.is_empty());
    let text = match *texts.as_slice() {
        [] => Cow::Borrowed(""),
        [only] => Cow::Borrowed(only),
        _ => Cow::Owned(texts.join("\n")),
    };
    if placeholders.is_empty() {
        return Ok(text);
    }
    let mut lines: Vec<&str> = Vec::new();
    for (placeholder, count) in &placeholders {
        let missing = count
            .checked_sub(text.matches(placeholder.as_str()).count())
            .ok_or_else(|| EncodeError::rejected("more placeholders in the text than items"))?;
        lines.extend(std::iter::repeat_n(placeholder.as_str(), missing));
    }
    if !text.is_empty() {
        lines.push(&text);
    }
    Ok(Cow::Owned(lines.join("\n")))
}

/// What a part means, where its words can be known.
fn understood(part: &Part) -> Result<Meaning<'_>, EncodeError> {
    match part.meaning() {
        Meaning::Hollow(kind) => Err(EncodeError::uncertain(format!(
            "an empty part of type {kind}"
        ))),
        Meaning::Other(kind) => Err(EncodeError::Multimodal(kind.to_owned())),
        meaning => Ok(meaning),
    }
}

fn assistant(message: &Message, rest: &mut Vec<(&'static str, Value)>) -> Result<(), EncodeError> {
    if let Some(calls) = message
        .tool_calls
        .as_ref()
        .filter(|calls| !calls.is_empty())
    {
        let calls: Vec<Value> = calls
            .iter()
            .map(|call| tool_call(call, message.calls_put_together))
            .collect::<Result<_, _>>()?;
        rest.push(("tool_calls", python::list(calls)));
    }
    if let Some(thought) = message
        .reasoning
        .as_ref()
        .or(message.reasoning_content.as_ref())
    {
        rest.push(("reasoning", Value::from(thought.as_str())));
        rest.push(("reasoning_content", Value::from(thought.as_str())));
    }
    Ok(())
}

/// A call as validation leaves it: known keys in the order of the schema, then the others as sent. One that the engine put
/// together is not validated again, and has its name first.
fn tool_call(call: &JsonValue, put_together: bool) -> Result<Value, EncodeError> {
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
        // A template that prints it fails.
        Some(JsonValue::Unknown(_)) => Value::from(DOUBT.repeat(8)),
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
    if put_together {
        inner.reverse();
    }
    let function = with_others(inner, function)?;
    let outer = [
        ("id", id),
        ("function", function),
        ("type", Value::from("function")),
    ];
    with_others(outer, call)
}

fn with_others<const N: usize>(
    known: [(&'static str, Value); N],
    sent: &JsonObject,
) -> Result<Value, EncodeError> {
    let names = known.each_ref().map(|(name, _)| *name);
    let mut dict = Dict::from_iter(known);
    for (key, value) in sent
        .iter()
        .filter(|(key, _)| !names.contains(&key.as_str()))
    {
        dict.push(key, python::value(value)?);
    }
    Ok(dict.into_value())
}

/// Arguments are parsed, and what is no JSON object becomes an empty one.
fn arguments_value(text: &str) -> Result<Value, EncodeError> {
    match JsonValue::read(text) {
        Ok(json @ JsonValue::Object(_)) => python::value(&json),
        Ok(_) | Err(JsonError::Invalid) => Ok(Dict::default().into_value()),
        Err(JsonError::Unsupported(why)) => Err(EncodeError::uncertain(format!(
            "arguments of a tool call with {why}"
        ))),
    }
}

/// Where the template knows no developer, developers are systems, and all systems are merged into one at the front.
pub(super) fn without_developers(mut turns: Vec<Turn<'_>>) -> Vec<Turn<'_>> {
    for turn in turns.iter_mut().filter(|turn| turn.role == "developer") {
        turn.role = "system";
        turn.rest.retain(|(key, _)| *key != "tools");
    }
    let scattered = turns
        .iter()
        .enumerate()
        .any(|(place, turn)| place > 0 && turn.role == "system");
    if !scattered {
        return turns;
    }
    let (systems, others): (Vec<_>, Vec<_>) =
        turns.into_iter().partition(|turn| turn.role == "system");
    let texts: Vec<Cow<'_, str>> = systems
        .into_iter()
        .map(|turn| match turn.content {
            Said::Text(text) => text,
            Said::Parts(parts) => Cow::Owned(
                parts
                    .into_iter()
                    .filter_map(Piece::into_text)
                    .collect::<Vec<_>>()
                    .join("\n"),
            ),
        })
        .filter(|text| !text.is_empty())
        .collect();
    let merged = Turn::plain("system", Cow::Owned(texts.join("\n\n")));
    std::iter::once(merged).chain(others).collect()
}

/// The messages as values for the template.
pub(super) fn into_value(turns: Vec<Turn<'_>>) -> Value {
    python::list(turns.into_iter().map(message_value).collect())
}

fn message_value(turn: Turn<'_>) -> Value {
    let content = match turn.content {
        Said::Text(text) => Value::from(&*text),
        Said::Parts(parts) => python::list(parts.into_iter().map(Piece::into_value).collect()),
    };
    let mut dict = Dict::from_iter([("role", Value::from(turn.role)), ("content", content)]);
    for (key, value) in turn.rest {
        dict.push(key, value);
    }
    dict.into_value()
}

/// Tools as the engine's validation leaves them: known keys in the order of the schema, missing ones `null`.
pub(super) fn tools(tools: &[JsonValue]) -> Result<Value, EncodeError> {
    Ok(python::list(
        tools.iter().map(tool).collect::<Result<_, _>>()?,
    ))
}

fn tool(tool: &JsonValue) -> Result<Value, EncodeError> {
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
    let mut dict = Dict::default();
    dict.push("name", field(function, "name", |value| value.is_string())?);
    dict.push(
        "description",
        field(function, "description", |value| {
            value.is_string() || value.is_null()
        })?,
    );
    dict.push(
        "parameters",
        field(function, "parameters", |value| {
            value.is_object() || value.is_null()
        })?,
    );
    flag(function, "strict", &mut dict)?;
    // What delays a tool delays its function, and not the other way round.
    let of_tool = tool.get("defer_loading").filter(|value| !value.is_null());
    match (
        function
            .get("defer_loading")
            .filter(|value| !value.is_null()),
        of_tool,
    ) {
        (None, Some(_)) => flag(tool, "defer_loading", &mut dict)?,
        _ => flag(function, "defer_loading", &mut dict)?,
    }
    let mut outer = Dict::from_iter([
        ("type", Value::from("function")),
        ("function", dict.into_value()),
    ]);
    flag(tool, "defer_loading", &mut outer)?;
    Ok(outer.into_value())
}

/// A flag of a function, which is left out where it says nothing.
fn flag(function: &JsonObject, key: &str, dict: &mut Dict) -> Result<(), EncodeError> {
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

fn field(
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
