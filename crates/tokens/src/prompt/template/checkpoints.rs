//! Rendering of conversations before and after a checkpoint.

use std::collections::BTreeMap;

use minijinja::Value;

use super::{ChatTemplates, CompiledTemplate, TokenExactness, check_supported};
use crate::openai::ChatPrompt;
use crate::prompt::conversation::{self, TemplateMessage};
use crate::prompt::direct::{CheckpointPosition, RenderCheckpoint};
use crate::prompt::engine::EngineKind;
use crate::prompt::error::EncodeError;
use crate::prompt::media_renderer::{MediaDisplay, MediaRenderer};

/// A rendered conversation, or its end after a checkpoint.
pub(crate) struct RenderedChat {
    pub(crate) text: String,
    pub(crate) exactness: TokenExactness,
    /// The last checkpoint of each requested prefix that has one.
    pub(crate) checkpoints: Vec<CheckpointPosition>,
}

impl RenderedChat {
    /// Returns the text and its exactness.
    pub(super) fn into_text(self) -> (String, TokenExactness) {
        (self.text, self.exactness)
    }
}

/// A conversation in the form that its template receives.
struct PreparedChat<'c> {
    template: &'c CompiledTemplate,
    turns: Vec<TemplateMessage<'c>>,
    /// All variables except the messages.
    variables: BTreeMap<&'c str, Value>,
}

impl ChatTemplates {
    /// Renders the part of a conversation after a checkpoint. Also returns the last checkpoint of
    /// each requested prefix, if there is one. `prefix_lengths` are the lengths of these prefixes in
    /// messages. Returns `None` on any error, or if the template cannot resume there.
    pub(crate) fn render_after(
        &self,
        chat: &ChatPrompt,
        start: RenderCheckpoint,
        prefix_lengths: &[usize],
    ) -> Option<RenderedChat> {
        // The text of these messages is cached. The tool calls of the last one are kept, because
        // some templates read those of the previous message.
        let rendered_count = start.message_count.saturating_sub(1);
        let PreparedChat {
            template,
            turns,
            variables,
        } = self.prepare(chat, rendered_count).ok()??;
        let output = template
            .direct
            .render(&turns, &variables, Some(start), prefix_lengths)?;
        template.check_rendered(output).ok()
    }

    /// Renders a whole conversation without media. Also returns the last checkpoint of each
    /// requested prefix, if there is one.
    pub(crate) fn render_with_checkpoints(
        &self,
        chat: &ChatPrompt,
        prefix_lengths: &[usize],
    ) -> Result<RenderedChat, EncodeError> {
        if let Some(prepared) = self.prepare(chat, 0)? {
            let PreparedChat {
                template,
                turns,
                variables,
            } = prepared;
            return template.render_turns(turns, variables, prefix_lengths);
        }
        let (text, exactness) = self.render(chat)?;
        Ok(RenderedChat {
            text,
            exactness,
            checkpoints: Vec::new(),
        })
    }

    /// Converts a conversation for its template, without the tool calls of the first
    /// `rendered_count` messages. Returns `None` if messages may be merged or rearranged.
    fn prepare<'c>(
        &'c self,
        chat: &'c ChatPrompt,
        rendered_count: usize,
    ) -> Result<Option<PreparedChat<'c>>, EncodeError> {
        let needs_other_renderer = self.engine == EngineKind::Sglang
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
            self.format_for(template),
            rendered_count,
            &mut MediaRenderer::new(MediaDisplay::Rejected),
        )?;
        if turns.iter().any(|turn| turn.role == "developer") {
            return Ok(None);
        }
        template.check_reasoning_field(&turns)?;
        Ok(Some(PreparedChat {
            template,
            turns,
            variables: self.variables(chat)?,
        }))
    }
}
