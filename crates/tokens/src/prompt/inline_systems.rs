//! System messages of `/v1/messages` that follow other messages. vLLM probes the template once with
//! plain Jinja2. If the template renders such messages, they keep their positions. Otherwise they
//! are merged into the first system message.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::{Environment, ErrorKind, Value};

use super::error::EncodeError;
use super::python::{self, PythonDict};
use crate::openai::{ChatMessage, ChatPrompt, MessageContent};

/// Treatment of system messages that follow other messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InlineSystemMode {
    /// They keep their positions.
    InPlace,
    /// Their text is appended to the first system message.
    Merged,
    /// It is unknown whether the template renders them.
    Unknown,
}

impl InlineSystemMode {
    /// Probes the template `name` of an environment as vLLM does, without the functions that
    /// transformers adds.
    pub(super) fn probe(env: &Environment<'static>, name: &str) -> Self {
        let mut plain = env.clone();
        plain.remove_global("raise_exception");
        plain.remove_global("strftime_now");
        let message = |role| {
            PythonDict::from_iter([("role", Value::from(role)), ("content", Value::from("t"))])
                .into_value()
        };
        let messages = ["system", "user", "system", "user"].map(message).to_vec();
        let variables = [
            ("messages", python::list(messages)),
            ("add_generation_prompt", Value::from(false)),
        ];
        let variables = PythonDict::from_iter(variables).into_value();
        let render = || {
            plain
                .get_template(name)
                .and_then(|template| template.render(variables))
        };
        match catch_unwind(AssertUnwindSafe(render)) {
            Ok(Ok(_)) => Self::InPlace,
            // Other errors may be specific to minijinja.
            Ok(Err(error)) if error.kind() == ErrorKind::UnknownFunction => Self::Merged,
            Ok(Err(_)) | Err(_) => Self::Unknown,
        }
    }

    /// Combines the modes of a model's templates. Messages are merged if any template does not
    /// render them. Only the templates `default` and `tool_use` count, as in vLLM. `mode_of` returns
    /// the mode of a template, or `None` if the model lacks it.
    pub(super) fn combine(mode_of: impl Fn(&str) -> Option<Self>) -> Self {
        let tried = ["default", "tool_use"].map(mode_of);
        let found = |wanted| tried.contains(&Some(wanted));
        match (found(Self::Merged), found(Self::Unknown)) {
            (true, _) => Self::Merged,
            (false, true) => Self::Unknown,
            (false, false) => Self::InPlace,
        }
    }

    /// Returns the messages that the template receives.
    pub(super) fn arrange_messages(
        self,
        chat: &ChatPrompt,
    ) -> Result<Cow<'_, [Arc<ChatMessage>]>, EncodeError> {
        let inline = chat
            .messages
            .iter()
            .skip(1)
            .any(|message| message.role == "system");
        match self {
            _ if !chat.allows_inline_system_messages || !inline => {
                Ok(Cow::Borrowed(&chat.messages))
            }
            Self::InPlace => Ok(Cow::Borrowed(&chat.messages)),
            Self::Merged => Ok(Cow::Owned(merge_system_messages(&chat.messages))),
            Self::Unknown => Err(EncodeError::uncertain(
                "whether the template renders inline system messages",
            )),
        }
    }
}

fn merge_system_messages(messages: &[Arc<ChatMessage>]) -> Vec<Arc<ChatMessage>> {
    let (systems, others): (Vec<_>, Vec<_>) = messages
        .iter()
        .partition(|message| message.role == "system");
    let texts = systems
        .into_iter()
        .filter_map(|system| match &system.content {
            Some(MessageContent::Text(text)) => Some(&**text),
            _ => None,
        });
    let first = ChatMessage::with_text("system", texts.collect());
    std::iter::once(Arc::new(first))
        .chain(others.into_iter().cloned())
        .collect()
}
