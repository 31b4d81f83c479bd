//! Rendering of conversations after a checkpoint.

use super::{ChatTemplates, TokenExactness, check_supported};
use crate::openai::ChatPrompt;
use crate::prompt::conversation::{self, TemplateMessage};
use crate::prompt::direct::{CheckpointPosition, RenderCheckpoint};
use crate::prompt::engine::EngineKind;
use crate::prompt::media_renderer::{MediaDisplay, MediaRenderer};

/// A rendered conversation, or its end after a checkpoint.
pub(crate) struct RenderedChat {
    pub(crate) text: String,
    pub(crate) exactness: TokenExactness,
    /// The last checkpoint of each requested prefix that has one.
    pub(crate) checkpoints: Vec<CheckpointPosition>,
}

/// Returns true if rendering can resume within a conversation: its messages are not merged or
/// rearranged.
pub(super) fn can_resume(chat: &ChatPrompt, turns: &[TemplateMessage<'_>]) -> bool {
    !chat.continue_final_message
        && !chat.allows_inline_system_messages
        && turns.iter().all(|turn| turn.role != "developer")
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
        if self.engine == EngineKind::Sglang {
            return None;
        }
        check_supported(chat).ok()?;
        let template = self.template_for(chat).ok()?;
        template.check_thinking_switch(chat).ok()?;
        // The text of these messages is cached. The tool calls of the last one are kept, because
        // some templates read those of the previous message.
        let rendered_count = start.message_count.saturating_sub(1);
        let turns = conversation::template_messages(
            &chat.messages,
            self.format_for(template),
            rendered_count,
            &mut MediaRenderer::new(MediaDisplay::Rejected),
        );
        let turns = turns.ok().filter(|turns| can_resume(chat, turns))?;
        template.check_reasoning_field(&turns).ok()?;
        let variables = self.variables(chat).ok()?;
        let output = template
            .direct
            .render(&turns, &variables, Some(start), prefix_lengths)?;
        template.check_rendered(output).ok()
    }
}
