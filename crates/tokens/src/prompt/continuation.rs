//! Support for `continue_final_message`, where the prompt ends inside the last message. As in
//! transformers, the end of that message is marked before rendering, and the rendered text is
//! truncated at the mark. The template thus decides which text remains.

use super::conversation::TemplateMessage;
use super::error::EncodeError;
use super::white_space;

const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Marks the end of the last message. Returns the text of the message without the mark.
pub(super) fn mark_last_message(turns: &mut [TemplateMessage<'_>]) -> Result<String, EncodeError> {
    let text = turns
        .last_mut()
        .and_then(|turn| turn.content.last_text())
        .ok_or_else(|| EncodeError::rejected("the last message has no text to continue"))?;
    let before = text.clone();
    text.push_str(MARK);
    Ok(before)
}

/// Truncates the rendered text at the mark.
pub(super) fn truncate_at_mark(mut rendered: String, message: &str) -> Result<String, EncodeError> {
    let place = rendered
        .rfind(MARK.trim_end())
        .filter(|_| rendered.contains(white_space::strip(message)))
        .ok_or_else(|| EncodeError::rejected("the template drops the end of the last message"))?;
    let spaced = rendered[place..].starts_with(MARK);
    rendered.truncate(place);
    if !spaced {
        rendered.truncate(white_space::strip_end(&rendered).len());
    }
    Ok(rendered)
}
