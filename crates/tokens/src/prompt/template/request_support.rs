//! Requests that a template can render exactly.

use crate::openai::{ChatPrompt, JsonValue};
use crate::prompt::engine::RESERVED_VARIABLES;
use crate::prompt::error::EncodeError;

/// Returns true if an entry of chat_template_kwargs is set. vLLM treats `null` and `auto` as
/// absent.
pub(super) fn is_kwarg_set(value: &JsonValue) -> bool {
    !value.is_null() && value.as_str() != Some("auto")
}

/// Returns the tools in chat_template_kwargs. They replace those of the request and reach the
/// template unchanged.
pub(super) fn tools_of_kwargs(chat: &ChatPrompt) -> Option<&JsonValue> {
    chat.chat_template_kwargs
        .get("tools")
        .filter(|tools| is_kwarg_set(tools))
}

/// Rejects requests that the engine rejects before rendering or whose behavior is unknown.
pub(super) fn check_supported(chat: &ChatPrompt) -> Result<(), EncodeError> {
    if chat.chat_template.is_some() {
        return Err(EncodeError::RequestTemplate);
    }
    if chat.has_forwarded_tokens {
        return Err(EncodeError::uncertain(
            "another engine forwards the prompt's tokens",
        ));
    }
    if chat.continue_final_message && chat.add_generation_prompt {
        return Err(EncodeError::rejected(
            "continue_final_message together with add_generation_prompt",
        ));
    }
    match chat
        .chat_template_kwargs
        .keys()
        .find(|name| RESERVED_VARIABLES.contains(&name.as_str()))
    {
        Some(name) => Err(EncodeError::uncertain(format!(
            "`{name}` in chat_template_kwargs"
        ))),
        None => Ok(()),
    }
}
