//! Rendering of conversations whose beginning is cached.

use std::borrow::Cow;

use super::engine::EngineKind;
use super::error::EncodeError;
use super::media_renderer::MediaDisplay;
use super::resume::{ConversationCheckpoint, ResumableText, ResumingTokenizer};
use super::template::{ChatTemplates, RenderedChat, TokenExactness};
use super::{Encoder, PromptSource, RenderedPrompt};
use crate::openai::{ApiRequest, ChatPrompt, MessagePrefix, MessageReuse, PromptInput};

impl Encoder {
    /// Renders a request like [`Encoder::render`], but only after the cached prefix of the
    /// conversation, if there is one. Only [`Encoder::tokenize_bounded`] accepts the result.
    pub fn render_cached<'r>(
        &self,
        request: &'r ApiRequest,
        reuse: MessageReuse,
    ) -> Result<RenderedPrompt<'r>, EncodeError> {
        let adds_special_tokens = request.tokenization.add_special_tokens == Some(true);
        let (PromptInput::Chat(chat), Some(templates), Some(resumer)) =
            (&request.prompt, &self.templates, &self.resuming_tokenizer)
        else {
            return self.render(request);
        };
        if self.engine != EngineKind::Vllm || adds_special_tokens || reuse.stored.is_none() {
            return self.render(request);
        }
        let (text, exactness) = match self.render_after_prefix(chat, templates, resumer, reuse) {
            Some(resumed) => resumed,
            None => {
                // The found prefix may be the one that other conversations continue, and the
                // stored one is that of the next turn.
                let prefixes = [reuse.found, reuse.stored];
                let lengths = prefix_lengths(prefixes);
                let rendered = templates.render_as(chat, MediaDisplay::Rejected, &lengths)?;
                let checkpoints = conversation_checkpoints(prefixes, &rendered);
                let text = ResumableText::new(Cow::Owned(rendered.text), checkpoints);
                (text, rendered.exactness)
            }
        };
        Ok(RenderedPrompt {
            prompts: PromptSource::Chat(text),
            tokenization: request.tokenization,
            add_special_tokens: false,
            exactness,
        })
    }

    /// Renders the part of a conversation after the checkpoint of its cached prefix. Returns `None`
    /// if no checkpoint is cached, or if the template cannot resume there.
    fn render_after_prefix(
        &self,
        chat: &ChatPrompt,
        templates: &ChatTemplates,
        resumer: &ResumingTokenizer,
        reuse: MessageReuse,
    ) -> Option<(ResumableText<'static>, TokenExactness)> {
        let uses_library = self.tokenizer.disabled_reason().is_some();
        let prefix = resumer.find_prefix(reuse.found?, uses_library)?;
        let prefixes = [None, reuse.stored];
        let rendered =
            templates.render_after(chat, prefix.checkpoint(), &prefix_lengths(prefixes))?;
        let checkpoints = conversation_checkpoints(prefixes, &rendered);
        let text = ResumableText::after_prefix(prefix, &rendered.text, checkpoints);
        Some((text, rendered.exactness))
    }
}

fn prefix_lengths(prefixes: [Option<MessagePrefix>; 2]) -> Vec<usize> {
    let prefixes = prefixes.into_iter().flatten();
    prefixes.map(|prefix| prefix.message_count).collect()
}

/// Combines the rendered checkpoints with the prefixes for which they were requested.
fn conversation_checkpoints(
    prefixes: [Option<MessagePrefix>; 2],
    rendered: &RenderedChat,
) -> Vec<ConversationCheckpoint> {
    let with_position = |messages: MessagePrefix| {
        let positions = &mut rendered.checkpoints.iter();
        let position = *positions
            .find(|position| position.checkpoint.prefix_length == messages.message_count)?;
        Some(ConversationCheckpoint { messages, position })
    };
    let prefixes = prefixes.into_iter().flatten();
    prefixes.filter_map(with_position).collect()
}
