//! Rendering of conversations of which only the beginning is known.
//!
//! The missing part may change how the beginning is rendered. Templates omit reasoning in all but
//! the last turn, render tools before the last question, place images before the text of their
//! message, and merge system messages into the first. Text may also turn out to be reasoning. So
//! the conversation is rendered as it is and with possible continuations, and only the common
//! prefix is used.

use std::sync::Arc;

use super::EncodeError;
use super::content_format::ContentFormat;
use crate::openai::{
    ChatMessage, ChatPrompt, ContentPart, JsonValue, MediaItem, MediaModality, MediaSource,
    MessageContent,
};

/// Text that occurs in no conversation, used for unknown text.
const UNKNOWN_TEXT: &str = "\u{10fffe}";

/// Tool call id for templates that require nine letters.
const PLACEHOLDER_CALL_ID: &str = "unknown00";

/// End of reasoning for models whose engine leaves it in the text. Templates search for it and omit
/// the text before it in earlier turns.
const END_OF_REASONING: &str = "</think>";

/// Renders the text that the prompt of the complete conversation begins with.
pub(super) fn render_known_prefix<T>(
    chat: &ChatPrompt,
    format: ContentFormat,
    render: impl Fn(&ChatPrompt) -> Result<(String, T), EncodeError>,
) -> Result<(String, T), EncodeError> {
    let (mut text, outcome) = render(chat)?;
    for other in [with_additions(chat, format), with_rewritten_content(chat)] {
        let (other, _) = match render(&with_following_messages(&other)) {
            // The template may not support images or tool calls here.
            Err(_) => render(&with_following_messages(&with_unknown_last_message(chat)))?,
            rendered => rendered?,
        };
        text.truncate(common_prefix_len(&text, &other));
    }
    text.truncate(common_prefix_len(
        &text,
        &render(&with_following_messages(chat))?.0,
    ));
    Ok((text, outcome))
}

/// Appends further turns after the last message.
fn with_following_messages(chat: &ChatPrompt) -> ChatPrompt {
    let message_of = |role: &str| ChatMessage {
        role: role.to_owned(),
        content: Some(MessageContent::Text(UNKNOWN_TEXT.to_owned().into())),
        ..ChatMessage::default()
    };
    let new_message = |role: &str| Arc::new(message_of(role));
    let mut whole = ChatPrompt {
        add_generation_prompt: false,
        continue_final_message: false,
        ..chat.clone()
    };
    let Some(last) = chat.messages.last() else {
        return whole;
    };
    let calls = last.tool_calls.as_deref().unwrap_or_default();
    let answers = calls.iter().map(|call| {
        let tool_call_id = call
            .get("id")
            .and_then(JsonValue::as_str)
            .map(str::to_owned);
        Arc::new(ChatMessage {
            tool_call_id,
            ..message_of("tool")
        })
    });
    whole.messages.extend(answers);
    let turns: &[&str] = match last.role.as_str() {
        "assistant" if calls.is_empty() => &["user"],
        "system" | "developer" => &["user", "assistant", "user"],
        _ => &["assistant", "user"],
    };
    whole
        .messages
        .extend(turns.iter().map(|role| new_message(role)));
    // A conversation with developer messages may continue with another one.
    if chat
        .messages
        .iter()
        .any(|message| message.role == "developer")
    {
        whole.messages.push(new_message("developer"));
    }
    if chat.allows_inline_system_messages {
        whole.messages.push(new_message("system"));
    }
    whole
}

/// Adds all fields and parts to the last message that the missing part of the conversation may add.
fn with_additions(chat: &ChatPrompt, format: ContentFormat) -> ChatPrompt {
    let mut chat = chat.clone();
    let Some(last) = chat.messages.last_mut().map(Arc::make_mut) else {
        return chat;
    };
    match (&mut last.content, format) {
        (Some(MessageContent::Parts(parts)), ContentFormat::Parts) => {
            parts.push(placeholder_image())
        }
        (content @ Some(MessageContent::Parts(_)), ContentFormat::Text) => {
            *content = Some(MessageContent::Text(UNKNOWN_TEXT.to_owned().into()))
        }
        (Some(MessageContent::Text(_)) | None, _) => {}
    }
    last.name.get_or_insert_with(|| UNKNOWN_TEXT.into());
    match last.role.as_str() {
        "assistant" => {
            last.reasoning
                .get_or_insert_with(|| UNKNOWN_TEXT.to_owned());
            let function =
                JsonValue::object([("name", UNKNOWN_TEXT.into()), ("arguments", "{}".into())]);
            let call = JsonValue::object([
                ("id", PLACEHOLDER_CALL_ID.into()),
                ("type", "function".into()),
                ("function", function),
            ]);
            last.tool_calls.get_or_insert_with(|| vec![call]);
        }
        "tool" => {
            last.tool_call_id
                .get_or_insert_with(|| PLACEHOLDER_CALL_ID.to_owned());
        }
        _ => {}
    }
    chat
}

/// Changes the parts of the last message that the missing text may turn into something else: text
/// that becomes reasoning, tool calls after a text, and arguments that the template closes itself.
fn with_rewritten_content(chat: &ChatPrompt) -> ChatPrompt {
    let mut chat = chat.clone();
    let Some(last) = chat.messages.last_mut().map(Arc::make_mut) else {
        return chat;
    };
    let answer = format!("{END_OF_REASONING}{UNKNOWN_TEXT}");
    match &mut last.content {
        Some(MessageContent::Text(text)) if chat.continue_final_message => {
            *text = [text, answer.as_str()].concat().into()
        }
        Some(MessageContent::Parts(parts)) if chat.continue_final_message => {
            parts.push(ContentPart::Bare(answer))
        }
        Some(_) => {}
        nothing => *nothing = Some(MessageContent::Text(UNKNOWN_TEXT.to_owned().into())),
    }
    let call = last.tool_calls.as_mut().and_then(|calls| calls.last_mut());
    let function = call.and_then(|call| call.get_mut("function"));
    if let Some(arguments) = function.and_then(|function| function.get_mut("arguments")) {
        *arguments = if arguments.is_string() {
            "{}".into()
        } else {
            JsonValue::object([])
        };
    }
    chat
}

fn placeholder_image() -> ContentPart {
    let source = Some(MediaSource::Url("data:,".to_owned()));
    ContentPart::from_media(MediaItem {
        modality: MediaModality::Image,
        source,
        uuid: None,
    })
}

/// Replaces the content of the last message with unknown text.
fn with_unknown_last_message(chat: &ChatPrompt) -> ChatPrompt {
    let mut chat = chat.clone();
    if let Some(last) = chat.messages.last_mut().map(Arc::make_mut) {
        last.content = Some(MessageContent::Text(UNKNOWN_TEXT.to_owned().into()));
    }
    chat
}

/// Returns the length in bytes of the common prefix of two texts, up to a character boundary.
pub(super) fn common_prefix_len(one: &str, other: &str) -> usize {
    let differ = |(one, other): ((usize, char), char)| (one.1 != other).then_some(one.0);
    let shorter = one.len().min(other.len());
    one.char_indices()
        .zip(other.chars())
        .find_map(differ)
        .unwrap_or(shorter)
}
