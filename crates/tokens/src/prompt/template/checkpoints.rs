//! Rendering of conversations before and after a checkpoint.

use super::{ChatTemplates, check_supported};
use crate::openai::ChatPrompt;
use crate::prompt::conversation;
use crate::prompt::direct::{CheckpointPosition, DirectOutput, RenderCheckpoint};
use crate::prompt::media_renderer::{MediaDisplay, MediaRenderer};
use crate::prompt::python::PythonDict;
use crate::prompt::{EncodeError, EngineKind, TokenExactness};

/// A rendered conversation, or its end after a checkpoint.
pub(in crate::prompt) struct RenderedChat {
    pub(in crate::prompt) text: String,
    pub(in crate::prompt) exactness: TokenExactness,
    /// The last checkpoint of each requested prefix that has one.
    pub(in crate::prompt) checkpoints: Vec<CheckpointPosition>,
}

impl ChatTemplates {
    /// Renders the part of a conversation after a checkpoint. Also returns the last checkpoint of
    /// each requested prefix, if there is one. `prefix_lengths` are the lengths of these prefixes in
    /// messages. Returns `None` on any error, or if the template cannot resume there.
    pub(in crate::prompt) fn render_after(
        &self,
        chat: &ChatPrompt,
        start: RenderCheckpoint,
        prefix_lengths: &[usize],
    ) -> Option<RenderedChat> {
        self.render_directly(chat, Some(start), prefix_lengths)
            .ok()?
    }

    /// Renders a whole conversation without media. Also returns the last checkpoint of each
    /// requested prefix, if there is one.
    pub(in crate::prompt) fn render_with_checkpoints(
        &self,
        chat: &ChatPrompt,
        prefix_lengths: &[usize],
    ) -> Result<RenderedChat, EncodeError> {
        if let Some(rendered) = self.render_directly(chat, None, prefix_lengths)? {
            return Ok(rendered);
        }
        let (text, exactness) = self.render(chat)?;
        Ok(RenderedChat {
            text,
            exactness,
            checkpoints: Vec::new(),
        })
    }

    /// Renders a conversation, after a checkpoint if `start` is set. Returns `None` if messages may
    /// be merged or rearranged, or if the template cannot resume at the checkpoint.
    fn render_directly(
        &self,
        chat: &ChatPrompt,
        start: Option<RenderCheckpoint>,
        prefix_lengths: &[usize],
    ) -> Result<Option<RenderedChat>, EncodeError> {
        let needs_other_renderer = self.engine == EngineKind::Sglang
            || chat.is_partial
            || chat.continue_final_message
            || chat.allows_inline_system_messages;
        if needs_other_renderer {
            return Ok(None);
        }
        check_supported(chat)?;
        let template = self.template_for(chat)?;
        template.check_thinking_switch(chat)?;
        let turns = conversation::template_messages(
            &chat.messages,
            template.format,
            // The text of these messages is cached. Some templates read the tool calls of the
            // previous message; those of earlier messages are rendered from the beginning.
            start.map_or(0, |start| start.message_count.saturating_sub(1)),
            &mut MediaRenderer::new(MediaDisplay::Rejected),
        )?;
        if turns.iter().any(|turn| turn.role == "developer") {
            return Ok(None);
        }
        template.check_reasoning_field(&turns)?;
        let mut variables = self.variables(chat)?;
        let output = template
            .direct
            .render(&turns, &variables, start, prefix_lengths);
        let (rendered, checkpoints) = match output {
            Some(DirectOutput { text, checkpoints }) => {
                (template.check_rendered(text)?, checkpoints)
            }
            None if start.is_some() => return Ok(None),
            None => {
                variables.insert("messages", conversation::into_value(turns));
                let variables = PythonDict::from_iter(variables).into_value();
                (template.render(variables)?, Vec::new())
            }
        };
        let (text, exactness) = rendered;
        Ok(Some(RenderedChat {
            text,
            exactness,
            checkpoints,
        }))
    }
}
