//! Conversion of messages to template values, as in vLLM. Joined parts, parsed arguments and key
//! order are visible to a template and thus change the tokens.

mod tools;

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::Value;

use super::content_format::ContentFormat;
use super::error::EncodeError;
use super::media_renderer::MediaRenderer;
use super::python::{self, PythonDict};
use crate::openai::{
    BILLING_HEADER_PREFIX, ChatMessage, ContentPart, JsonValue, MediaModality, MessageContent,
    MessageText, PartMeaning,
};
pub(super) use tools::template_tools;
use tools::tool_call;

/// One message in the form that a template receives.
pub(super) struct TemplateMessage<'m> {
    pub role: &'m str,
    pub content: TemplateContent<'m>,
    pub(super) other_fields: Vec<(&'static str, Value)>,
    /// True if the tool calls of the message were omitted.
    pub(super) has_omitted_tool_calls: bool,
}

impl<'m> TemplateMessage<'m> {
    /// Creates a message with text content.
    pub(super) fn with_text(role: &'m str, text: Cow<'m, str>) -> Self {
        Self {
            role,
            content: TemplateContent::Text(text),
            other_fields: Vec::new(),
            has_omitted_tool_calls: false,
        }
    }

    /// Returns true if the message has reasoning.
    pub(super) fn has_reasoning(&self) -> bool {
        self.other_fields.iter().any(|(key, _)| *key == "reasoning")
    }
}

/// Content of a message in one of the two formats of templates.
pub(super) enum TemplateContent<'m> {
    /// One string.
    Text(Cow<'m, str>),
    /// The text of a message, which is unescaped when the template reads it.
    Message(&'m MessageText),
    /// A list of parts.
    Parts(Vec<TemplatePart<'m>>),
}

/// A content part in the form that a template receives.
pub(super) struct TemplatePart<'m> {
    kind: TemplatePartKind<'m>,
    /// Keys that the engine does not know.
    unknown_keys: Vec<(String, Value)>,
}

enum TemplatePartKind<'m> {
    Text(Cow<'m, str>),
    Media(MediaModality),
    Reference(&'m str),
}

impl<'m> TemplateContent<'m> {
    /// Creates a list of text parts.
    pub(super) fn from_texts(texts: impl IntoIterator<Item = Cow<'m, str>>) -> Self {
        let parts = texts.into_iter().map(|text| TemplatePart {
            kind: TemplatePartKind::Text(text),
            unknown_keys: Vec::new(),
        });
        Self::Parts(parts.collect())
    }

    /// Returns the number of bytes of all texts.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Message(text) => text.len(),
            Self::Parts(parts) => parts
                .iter()
                .map(|part| part.text().map_or(0, str::len))
                .sum(),
        }
    }

    /// Returns the text that `continue_final_message` continues.
    pub(super) fn last_text(&mut self) -> Option<&mut String> {
        if let Self::Message(text) = self {
            *self = Self::Text(Cow::Borrowed(text));
        }
        match self {
            Self::Text(text) => Some(text.to_mut()),
            Self::Message(_) => None,
            Self::Parts(parts) => parts
                .iter_mut()
                .rev()
                .find_map(TemplatePart::text_mut)
                .map(Cow::to_mut),
        }
    }
}

/// A field of a part.
pub(super) enum TemplateField<'p> {
    Text(&'p str),
    Value(&'p Value),
}

impl<'m> TemplatePart<'m> {
    /// Returns the keys that the engine knows, with their values.
    fn known_fields(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let (kind, value) = match &self.kind {
            TemplatePartKind::Text(text) => ("text", Some(("text", &**text))),
            TemplatePartKind::Media(modality) => (modality.as_str(), None),
            TemplatePartKind::Reference(name) => ("tool_reference", Some(("name", *name))),
        };
        std::iter::once(("type", kind)).chain(value)
    }

    /// Returns a field of the part.
    pub(super) fn field(&self, key: &str) -> Option<TemplateField<'_>> {
        let more = || {
            self.unknown_keys
                .iter()
                .find(|(known, _)| known == key)
                .map(|(_, value)| TemplateField::Value(value))
        };
        self.known_fields()
            .find(|(known, _)| *known == key)
            .map(|(_, text)| TemplateField::Text(text))
            .or_else(more)
    }

    fn text(&self) -> Option<&str> {
        match &self.kind {
            TemplatePartKind::Text(text) => Some(text),
            TemplatePartKind::Media(_) | TemplatePartKind::Reference(_) => None,
        }
    }

    fn text_mut(&mut self) -> Option<&mut Cow<'m, str>> {
        match &mut self.kind {
            TemplatePartKind::Text(text) => Some(text),
            TemplatePartKind::Media(_) | TemplatePartKind::Reference(_) => None,
        }
    }

    fn into_value(self) -> Value {
        let known = self
            .known_fields()
            .map(|(key, text)| (key, Value::from(text)));
        let mut dict = PythonDict::from_iter(known);
        for (key, value) in self.unknown_keys {
            dict.push(&key, value);
        }
        dict.into_value()
    }
}

/// Returns the messages in the form that the template receives. Omits the tool calls of the first
/// `rendered_count` messages: the text of these messages is cached, and the conversion would parse
/// their arguments.
pub(super) fn template_messages<'m>(
    messages: &'m [Arc<ChatMessage>],
    format: ContentFormat,
    rendered_count: usize,
    renderer: &mut MediaRenderer<'_>,
) -> Result<Vec<TemplateMessage<'m>>, EncodeError> {
    let messages = messages.iter().enumerate();
    messages
        .map(|(index, message)| template_message(message, format, index < rendered_count, renderer))
        .collect()
}

fn template_message<'m>(
    message: &'m ChatMessage,
    format: ContentFormat,
    omits_tool_calls: bool,
    renderer: &mut MediaRenderer<'_>,
) -> Result<TemplateMessage<'m>, EncodeError> {
    let content = match &message.content {
        Some(MessageContent::Text(text)) => content_of_text(message, text, format),
        Some(MessageContent::Parts(parts)) => content_of_parts(message, parts, format, renderer)?,
        None => content_of_parts(message, &[], format, renderer)?,
    };
    let mut other_fields = Vec::new();
    match message.role.as_str() {
        "assistant" => push_assistant_fields(message, omits_tool_calls, &mut other_fields)?,
        "tool" => other_fields.extend(
            message
                .tool_call_id
                .as_deref()
                .map(|id| ("tool_call_id", Value::from(id))),
        ),
        "developer" => other_fields.extend(
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
            other_fields.push((key, Value::from(text.as_str())));
        }
    }
    let has_omitted_tool_calls =
        omits_tool_calls && message.role == "assistant" && message.tool_calls.is_some();
    Ok(TemplateMessage {
        role: &message.role,
        content,
        other_fields,
        has_omitted_tool_calls,
    })
}

/// Converts content that is one string. Templates that take parts receive it as a single part.
fn content_of_text<'m>(
    message: &ChatMessage,
    text: &'m MessageText,
    format: ContentFormat,
) -> TemplateContent<'m> {
    let text = if message.role == "system" {
        strip_billing_header(text)
    } else if format == ContentFormat::Text || message.role == "tool" {
        return TemplateContent::Message(text);
    } else {
        Some(&**text)
    };
    match format {
        ContentFormat::Parts => TemplateContent::from_texts(text.map(Cow::Borrowed)),
        ContentFormat::Text => TemplateContent::Text(Cow::Borrowed(text.unwrap_or_default())),
    }
}

/// Converts content that is a list of parts.
fn content_of_parts<'m>(
    message: &'m ChatMessage,
    parts: &'m [ContentPart],
    format: ContentFormat,
    renderer: &mut MediaRenderer<'_>,
) -> Result<TemplateContent<'m>, EncodeError> {
    let is_system = message.role == "system";
    let parts = parts.iter().filter_map(|part| {
        if is_system {
            without_billing(part)
        } else {
            Some((part, None))
        }
    });
    match format {
        ContentFormat::Parts => parts_as_list(message, parts, renderer),
        ContentFormat::Text => parts_as_text(parts, renderer).map(TemplateContent::Text),
    }
}

/// Returns a part of a system message. For a text, also returns the text without its billing line.
/// Returns `None` if no text remains.
fn without_billing(part: &ContentPart) -> Option<(&ContentPart, Option<&str>)> {
    let is_text = match part {
        ContentPart::Bare(_) => true,
        ContentPart::Typed(part) => part.kind.as_deref() == Some("text"),
    };
    match part.meaning() {
        PartMeaning::Text(text) if is_text => Some((part, Some(strip_billing_header(text)?))),
        _ => Some((part, None)),
    }
}

/// Removes a leading billing line. Returns `None` if no text remains.
fn strip_billing_header(text: &str) -> Option<&str> {
    if !text.starts_with(BILLING_HEADER_PREFIX) {
        return Some(text);
    }
    text.split_once('\n')
        .map(|(_, rest)| rest)
        .filter(|rest| !rest.is_empty())
}

/// Converts the parts to a list of dicts.
fn parts_as_list<'p>(
    message: &ChatMessage,
    parts: impl Iterator<Item = (&'p ContentPart, Option<&'p str>)>,
    renderer: &mut MediaRenderer<'_>,
) -> Result<TemplateContent<'p>, EncodeError> {
    let mut pieces = Vec::new();
    for (part, shortened) in parts {
        let kind = match checked_meaning(part)? {
            PartMeaning::Text(text) => {
                TemplatePartKind::Text(Cow::Borrowed(shortened.unwrap_or(text)))
            }
            PartMeaning::Media(media) => match renderer.render_part(media.modality)? {
                Some(text) => TemplatePartKind::Text(Cow::Owned(text)),
                None => TemplatePartKind::Media(media.modality),
            },
            PartMeaning::Reference(name) => TemplatePartKind::Reference(name),
            _ => continue,
        };
        let unknown_keys = part
            .unknown_keys()
            .map(|(key, value)| Ok((key.clone(), python::value(value)?)));
        let unknown_keys = if matches!(kind, TemplatePartKind::Reference(_)) {
            Vec::new()
        } else {
            unknown_keys.collect::<Result<_, _>>()?
        };
        pieces.push(TemplatePart { kind, unknown_keys });
    }
    // The engine always joins the texts of a tool message, because few templates support a list.
    if message.role == "tool" && pieces.iter().all(|piece| piece.text().is_some()) {
        return Ok(TemplateContent::Text(Cow::Owned(join_texts(&pieces))));
    }
    Ok(TemplateContent::Parts(pieces))
}

fn join_texts(parts: &[TemplatePart<'_>]) -> String {
    let texts: Vec<&str> = parts.iter().filter_map(TemplatePart::text).collect();
    texts.join("\n")
}

/// Joins the parts to one text. Placeholders of media items precede it unless the text already
/// contains them.
fn parts_as_text<'p>(
    parts: impl Iterator<Item = (&'p ContentPart, Option<&'p str>)>,
    renderer: &mut MediaRenderer<'_>,
) -> Result<Cow<'p, str>, EncodeError> {
    let mut texts: Vec<&'p str> = Vec::new();
    let mut placeholders: Vec<(String, usize)> = Vec::new();
    for (part, shortened) in parts {
        match checked_meaning(part)? {
            PartMeaning::Text(text) => texts.push(shortened.unwrap_or(text)),
            PartMeaning::Reference(name) => texts.push(name),
            PartMeaning::Media(media) => {
                let Some(text) = renderer.render_placeholder(media.modality)? else {
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
    // Empty texts are removed, so they add no empty line.
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

/// Returns the engine's interpretation of a part, or an error if its text is unknown.
fn checked_meaning(part: &ContentPart) -> Result<PartMeaning<'_>, EncodeError> {
    match part.meaning() {
        PartMeaning::MissingValue(kind) => Err(EncodeError::uncertain(format!(
            "an empty part of type {kind}"
        ))),
        PartMeaning::Unknown(kind) => Err(EncodeError::Multimodal(kind.to_owned())),
        meaning => Ok(meaning),
    }
}

fn push_assistant_fields(
    message: &ChatMessage,
    omits_tool_calls: bool,
    other_fields: &mut Vec<(&'static str, Value)>,
) -> Result<(), EncodeError> {
    if let Some(calls) = message
        .tool_calls
        .as_ref()
        .filter(|calls| !calls.is_empty() && !omits_tool_calls)
    {
        let calls: Vec<Value> = calls
            .iter()
            .map(|call| tool_call(call, message.has_converted_calls))
            .collect::<Result<_, _>>()?;
        other_fields.push(("tool_calls", python::list(calls)));
    }
    if let Some(reasoning) = message
        .reasoning
        .as_ref()
        .or(message.reasoning_content.as_ref())
    {
        other_fields.push(("reasoning", Value::from(reasoning.as_str())));
        other_fields.push(("reasoning_content", Value::from(reasoning.as_str())));
    }
    Ok(())
}

/// Converts developer messages to system messages and merges all system messages at the front, for
/// templates without a developer role.
pub(super) fn merge_developer_messages(
    mut turns: Vec<TemplateMessage<'_>>,
) -> Vec<TemplateMessage<'_>> {
    for turn in turns.iter_mut().filter(|turn| turn.role == "developer") {
        turn.role = "system";
        turn.other_fields.retain(|(key, _)| *key != "tools");
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
            TemplateContent::Text(text) => text,
            TemplateContent::Message(text) => Cow::Borrowed(&**text),
            TemplateContent::Parts(parts) => Cow::Owned(join_texts(&parts)),
        })
        .filter(|text| !text.is_empty())
        .collect();
    let merged = TemplateMessage::with_text("system", Cow::Owned(texts.join("\n\n")));
    std::iter::once(merged).chain(others).collect()
}

/// Converts the messages to template values.
pub(super) fn into_value(turns: Vec<TemplateMessage<'_>>) -> Value {
    python::list(turns.into_iter().map(message_value).collect())
}

fn message_value(turn: TemplateMessage<'_>) -> Value {
    let content = match turn.content {
        TemplateContent::Text(text) => Value::from(&*text),
        TemplateContent::Message(text) => Value::from(&**text),
        TemplateContent::Parts(parts) => {
            python::list(parts.into_iter().map(TemplatePart::into_value).collect())
        }
    };
    let mut dict = PythonDict::from_iter([("role", Value::from(turn.role)), ("content", content)]);
    for (key, value) in turn.other_fields {
        dict.push(key, value);
    }
    dict.into_value()
}
