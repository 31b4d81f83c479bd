//! Messages as the reader of a body finds them. The text of most messages stays in the body, so that
//! a cached message takes little memory.

use std::ops::Range;
use std::sync::Arc;

use super::chat::{ChatMessage, MessageContent};
use super::message_text::MessageText;

/// Maximum memory of a JSON value in a message, without its text: a field of an object of its own.
const VALUE_BYTES: usize = 448;

/// A message and its position in a list.
#[derive(Clone, Debug)]
pub(super) struct ParsedMessage {
    form: MessageForm,
    /// Position directly after the message, in bytes from the beginning of the list. White space
    /// is excluded, so that the bytes up to the end of a chunk determine its messages.
    pub(super) end: usize,
    /// Estimated memory of the message in bytes.
    pub(super) memory_bytes: usize,
}

#[derive(Clone, Debug)]
enum MessageForm {
    Plain(PlainMessage),
    Other(Arc<ChatMessage>),
}

/// A message that consists of strings.
#[derive(Clone, Debug)]
pub(super) struct PlainMessage {
    pub(super) role: Arc<str>,
    /// Position of the text with its quotes, in bytes from the beginning of the list.
    pub(super) content: Option<Range<usize>>,
    pub(super) tool_call_id: Option<Arc<str>>,
}

impl PlainMessage {
    /// Returns the message. `text_at` returns the text at its position.
    pub(super) fn to_message(
        &self,
        text_at: impl FnOnce(Range<usize>) -> MessageText,
    ) -> ChatMessage {
        ChatMessage {
            role: self.role.as_ref().into(),
            content: self.content.clone().map(text_at).map(MessageContent::Text),
            tool_call_id: self.tool_call_id.as_deref().map(Into::into),
            ..ChatMessage::default()
        }
    }
}

impl ParsedMessage {
    /// Creates a message that ends at `end`.
    pub(super) fn plain(message: PlainMessage, end: usize) -> Self {
        let id_bytes = message.tool_call_id.as_deref().map_or(0, str::len);
        // Each shared text has two counts.
        let counts = 4 * size_of::<usize>();
        Self {
            end,
            memory_bytes: size_of::<Self>() + counts + message.role.len() + id_bytes,
            form: MessageForm::Plain(message),
        }
    }

    /// Creates a message of `length` bytes that ends at `end`. `value_count` is the number of its
    /// JSON values.
    pub(super) fn other(
        message: ChatMessage,
        end: usize,
        length: usize,
        value_count: usize,
    ) -> Self {
        Self {
            end,
            memory_bytes: size_of::<ChatMessage>()
                + size_of::<Self>()
                + length
                + value_count * VALUE_BYTES,
            form: MessageForm::Other(Arc::new(message)),
        }
    }

    /// Returns the message. `text_at` returns the text at a position in the list.
    pub(super) fn message(
        &self,
        text_at: impl Fn(Range<usize>) -> MessageText,
    ) -> Arc<ChatMessage> {
        match &self.form {
            MessageForm::Plain(message) => Arc::new(message.to_message(text_at)),
            MessageForm::Other(message) => message.clone(),
        }
    }
}
