//! `continue_final_message`: the prompt must end inside the last message. As transformers does it, the end of that
//! message is marked before rendering and everything from the mark on is cut away, so the template decides what stays.

use super::EncodeError;
use super::conversation::Turn;
use super::methods;

const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Marks the end of the last message; gives the text before the mark.
pub(super) fn mark(turns: &mut [Turn<'_>]) -> Result<String, EncodeError> {
    let text = turns
        .last_mut()
        .and_then(|turn| turn.content.last_text())
        .ok_or_else(|| EncodeError::rejected("the last message has no text to continue"))?;
    let before = text.clone();
    text.push_str(MARK);
    Ok(before)
}

/// Cuts the rendered text at the mark.
pub(super) fn cut(mut rendered: String, message: &str) -> Result<String, EncodeError> {
    let place = rendered
        .rfind(MARK.trim_end())
        .filter(|_| rendered.contains(methods::strip(message)))
        .ok_or_else(|| EncodeError::rejected("the template drops the end of the last message"))?;
    let spaced = rendered[place..].starts_with(MARK);
    rendered.truncate(place);
    if !spaced {
        rendered.truncate(methods::strip_end(&rendered).len());
    }
    Ok(rendered)
}
