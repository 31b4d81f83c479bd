//! Conversations of which only the beginning is here. What follows may change how the beginning is rendered: thoughts are
//! left out of all but the last turn, tools are shown before the last question, images stand before the text of their
//! message, systems are merged into the first, and text turns out to be thoughts. So the conversation is rendered as it is and with things that may follow, and
//! only what all of these begin with is taken.

use super::EncodeError;
use super::detect::ContentFormat;
use crate::openai::{Chat, Content, JsonValue, Media, Message, Modality, Part, Source};

/// A text that no conversation has where one may come that is not known.
const UNKNOWN: &str = "\u{10fffe}";

/// An id that templates take which want nine letters.
const CALL: &str = "unknown00";

/// What ends the thoughts of a model whose engine does not take them out of its text. Templates look for it, and leave out
/// of earlier turns what comes before it.
const END_OF_THOUGHTS: &str = "</think>";

/// The text that the whole conversation's prompt begins with.
pub(super) fn beginning<T>(
    chat: &Chat,
    format: ContentFormat,
    render: impl Fn(&Chat) -> Result<(String, T), EncodeError>,
) -> Result<(String, T), EncodeError> {
    let (mut text, told) = render(chat)?;
    for other in [changed(chat, format), rewritten(chat)] {
        let (other, _) = match render(&followed(&other)) {
            // A template may take no images, or no calls here.
            Err(_) => render(&followed(&unknown(chat)))?,
            rendered => rendered?,
        };
        text.truncate(same(&text, &other));
    }
    text.truncate(same(&text, &render(&followed(chat))?.0));
    Ok((text, told))
}

/// The conversation with further turns behind the last message.
fn followed(chat: &Chat) -> Chat {
    let says = |role: &str| Message {
        role: role.to_owned(),
        content: Some(Content::Text(UNKNOWN.to_owned())),
        ..Message::default()
    };
    let mut whole = Chat {
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
        Message {
            tool_call_id,
            ..says("tool")
        }
    });
    whole.messages.extend(answers);
    let turns: &[&str] = match last.role.as_str() {
        "assistant" if calls.is_empty() => &["user"],
        "system" | "developer" => &["user", "assistant", "user"],
        _ => &["assistant", "user"],
    };
    whole.messages.extend(turns.iter().map(|role| says(role)));
    // Who calls systems developers may do so again later.
    if chat
        .messages
        .iter()
        .any(|message| message.role == "developer")
    {
        whole.messages.push(says("developer"));
    }
    if chat.inline_systems {
        whole.messages.push(says("system"));
    }
    whole
}

/// The same with a last message that says all that may come behind the cut.
fn changed(chat: &Chat, format: ContentFormat) -> Chat {
    let mut chat = chat.clone();
    let Some(last) = chat.messages.last_mut() else {
        return chat;
    };
    match (&mut last.content, format) {
        (Some(Content::Parts(parts)), ContentFormat::Parts) => parts.push(image()),
        (content @ Some(Content::Parts(_)), ContentFormat::Text) => {
            *content = Some(Content::Text(UNKNOWN.to_owned()))
        }
        (Some(Content::Text(_)) | None, _) => {}
    }
    last.name.get_or_insert_with(|| UNKNOWN.into());
    match last.role.as_str() {
        "assistant" => {
            last.reasoning.get_or_insert_with(|| UNKNOWN.to_owned());
            let function =
                JsonValue::object([("name", UNKNOWN.into()), ("arguments", "{}".into())]);
            let call = JsonValue::object([
                ("id", CALL.into()),
                ("type", "function".into()),
                ("function", function),
            ]);
            last.tool_calls.get_or_insert_with(|| vec![call]);
        }
        "tool" => {
            last.tool_call_id.get_or_insert_with(|| CALL.to_owned());
        }
        _ => {}
    }
    chat
}

/// The same with a last message of which what was shown becomes something else behind the cut: text that turns out to be
/// thoughts, calls that a text stands before, arguments that are closed in a way of the template's own.
fn rewritten(chat: &Chat) -> Chat {
    let mut chat = chat.clone();
    let Some(last) = chat.messages.last_mut() else {
        return chat;
    };
    let answer = format!("{END_OF_THOUGHTS}{UNKNOWN}");
    match &mut last.content {
        Some(Content::Text(text)) if chat.continue_final_message => text.push_str(&answer),
        Some(Content::Parts(parts)) if chat.continue_final_message => {
            parts.push(Part::Bare(answer))
        }
        Some(_) => {}
        nothing => *nothing = Some(Content::Text(UNKNOWN.to_owned())),
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

fn image() -> Part {
    let source = Some(Source::Url("data:,".to_owned()));
    Part::of_media(Media {
        modality: Modality::Image,
        source,
        uuid: None,
    })
}

/// The same with a last message of which nothing is known.
fn unknown(chat: &Chat) -> Chat {
    let mut chat = chat.clone();
    if let Some(last) = chat.messages.last_mut() {
        last.content = Some(Content::Text(UNKNOWN.to_owned()));
    }
    chat
}

/// Bytes that two texts begin with, up to the end of a character.
pub(super) fn same(one: &str, other: &str) -> usize {
    let differ = |(one, other): ((usize, char), char)| (one.1 != other).then_some(one.0);
    let shorter = one.len().min(other.len());
    one.char_indices()
        .zip(other.chars())
        .find_map(differ)
        .unwrap_or(shorter)
}
