//! System messages of `/v1/messages` that stand behind others. vLLM leaves them there for templates that render them, which it
//! tries once with plain Jinja2, and merges them into the first system message for others.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::{Environment, ErrorKind, Value};

use super::EncodeError;
use super::python::{self, Dict};
use super::template::{NAME, Template};
use crate::openai::{Chat, Content, Message};

/// How the template treats system messages behind others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InlineSystems {
    /// They stay in their places.
    InPlace,
    /// Their text follows that of the first system message.
    Merged,
    /// It is not known whether the template renders them.
    Unclear,
}

impl InlineSystems {
    /// Tries a template as vLLM does: without the functions that transformers adds.
    pub(super) fn of(env: &Environment<'static>) -> Self {
        let mut plain = env.clone();
        plain.remove_global("raise_exception");
        plain.remove_global("strftime_now");
        let message = |role| {
            Dict::from_iter([("role", Value::from(role)), ("content", Value::from("t"))])
                .into_value()
        };
        let messages = ["system", "user", "system", "user"].map(message).to_vec();
        let variables = [
            ("messages", python::list(messages)),
            ("add_generation_prompt", Value::from(false)),
        ];
        let variables = Dict::from_iter(variables).into_value();
        let render = || {
            plain
                .get_template(NAME)
                .and_then(|template| template.render(variables))
        };
        match catch_unwind(AssertUnwindSafe(render)) {
            Ok(Ok(_)) => Self::InPlace,
            // Other errors may be specific to minijinja.
            Ok(Err(error)) if error.kind() == ErrorKind::UnknownFunction => Self::Merged,
            Ok(Err(_)) | Err(_) => Self::Unclear,
        }
    }

    /// The treatment for a model: messages are merged if any template does not render them. vLLM tries these two.
    pub(super) fn of_all(named: &BTreeMap<String, Template>) -> Self {
        let tried = ["default", "tool_use"]
            .map(|name| named.get(name).map(|template| template.inline_systems));
        let found = |wanted| tried.contains(&Some(wanted));
        match (found(Self::Merged), found(Self::Unclear)) {
            (true, _) => Self::Merged,
            (false, true) => Self::Unclear,
            (false, false) => Self::InPlace,
        }
    }

    /// The messages of a conversation, in the order in which the template sees them.
    pub(super) fn placed(self, chat: &Chat) -> Result<Cow<'_, [Message]>, EncodeError> {
        let inline = chat
            .messages
            .iter()
            .skip(1)
            .any(|message| message.role == "system");
        match self {
            _ if !chat.inline_systems || !inline => Ok(Cow::Borrowed(&chat.messages)),
            Self::InPlace => Ok(Cow::Borrowed(&chat.messages)),
            Self::Merged => Ok(Cow::Owned(merged(&chat.messages))),
            Self::Unclear => Err(EncodeError::uncertain(
                "whether the template renders inline system messages",
            )),
        }
    }
}

fn merged(messages: &[Message]) -> Vec<Message> {
    let (systems, others): (Vec<_>, Vec<_>) = messages
        .iter()
        .partition(|message| message.role == "system");
    let texts = systems
        .into_iter()
        .filter_map(|system| match &system.content {
            Some(Content::Text(text)) => Some(text.as_str()),
            _ => None,
        });
    let content = Some(Content::Text(texts.collect()));
    let first = Message {
        role: "system".to_owned(),
        content,
        ..Message::default()
    };
    std::iter::once(first)
        .chain(others.into_iter().cloned())
        .collect()
}
