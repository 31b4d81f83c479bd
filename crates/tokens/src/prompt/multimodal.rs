//! Encoding of conversations with media items. The prompt is rendered as in the engine and
//! tokenized, and each placeholder is expanded to the number of tokens of its item.
//!
//! The tokens are unknown from the first item with unknown id or size on. To find its position, the
//! prompt is rendered again with a mark in the place of the item. The common prefix of both
//! renderings precedes the item.

use std::borrow::Cow;

use super::bounded_tokens::BoundedTokens;
use super::engine::EngineKind;
use super::error::EncodeError;
use super::media::{
    EngineModelName, MultimodalPrompt, ResolvedMediaItem, common_prefix, expand_placeholders,
};
use super::media_renderer::{MARK, MediaDisplay};
use super::pieces::TokenBudget;
use super::resume::PromptTokens;
use super::template::{ChatTemplates, RenderedChat, TokenExactness};
use super::{Encoder, PromptSource, RenderedPrompt};
use crate::openai::{ApiRequest, ChatPrompt, MediaModality, PromptInput, TokenizationOptions};

impl Encoder {
    /// Encodes a conversation with media items as far as its tokens are known. Text prefixes are
    /// reused as in [`Encoder::tokenize_cached`].
    pub fn encode_multimodal(
        &self,
        request: &ApiRequest,
        cache_namespace: Option<&str>,
        budget: &TokenBudget<'_>,
        engine_model: &EngineModelName,
    ) -> Result<MultimodalPrompt, EncodeError> {
        let PromptInput::Chat(chat) = &request.prompt else {
            return Err(EncodeError::uncertain(
                "media items outside of a conversation",
            ));
        };
        if request.tokenization.truncate_prompt_tokens.is_some() {
            return Err(EncodeError::uncertain(
                "truncation of a prompt with media items",
            ));
        }
        if self.engine == EngineKind::Sglang {
            // SGLang's ids of items depend on the output of its processor.
            return Err(EncodeError::Multimodal("any".to_owned()));
        }
        let templates = self.templates.as_ref().ok_or(EncodeError::NoTemplate)?;
        let options = TokenizeOptions {
            add_special_tokens: request.tokenization.add_special_tokens.unwrap_or(false),
            cache_namespace,
            budget,
        };
        let (known, all) = self.resolve_items(chat, engine_model, templates)?;
        if all {
            self.encode_complete(templates, chat, &known, options)
        } else {
            self.encode_prefix(templates, chat, &known, options)
        }
    }

    /// Returns the items before the first unknown one, and whether these are all items.
    fn resolve_items(
        &self,
        chat: &ChatPrompt,
        engine_model: &EngineModelName,
        templates: &ChatTemplates,
    ) -> Result<(Vec<(MediaModality, ResolvedMediaItem)>, bool), EncodeError> {
        let lists = templates.takes_parts(chat)?;
        let mut known = Vec::new();
        for media in chat.media_items() {
            let placed = lists || self.media_rules.placeholder(media.modality, 1).is_some();
            match self
                .media_rules
                .resolve_item(media, engine_model)
                .filter(|_| placed && !chat.has_media_options)
            {
                Some(item) => known.push((media.modality, item)),
                None => return Ok((known, false)),
            }
        }
        Ok((known, true))
    }

    fn encode_complete(
        &self,
        templates: &ChatTemplates,
        chat: &ChatPrompt,
        items: &[(MediaModality, ResolvedMediaItem)],
        options: TokenizeOptions<'_>,
    ) -> Result<MultimodalPrompt, EncodeError> {
        let show = MediaDisplay::AsEngine(&self.media_rules);
        let rendered = templates.render_as(chat, show, &[])?;
        let BoundedTokens { tokens, stopped } = self.tokenize_one(&rendered.text, options)?;
        expand_placeholders(tokens, items, &self.media_rules, stopped.is_none())
    }

    fn encode_prefix(
        &self,
        templates: &ChatTemplates,
        chat: &ChatPrompt,
        items: &[(MediaModality, ResolvedMediaItem)],
        options: TokenizeOptions<'_>,
    ) -> Result<MultimodalPrompt, EncodeError> {
        let with_mark = MediaDisplay::WithMark(&self.media_rules, items.len());
        let marked = templates.render_as(chat, with_mark, &[])?.text;
        let place = marked
            .find(MARK)
            .ok_or_else(|| EncodeError::uncertain("the template does not render an item"))?;
        let (tokens, min_tokens) =
            match templates.render_as(chat, MediaDisplay::AsEngine(&self.media_rules), &[]) {
                Ok(RenderedChat { text: shown, .. }) => {
                    let before = &shown[..common_prefix_len(&shown, &marked[..place])];
                    let all = self.prompt_tokens(&shown, options)?;
                    let min_tokens = all.len();
                    (
                        common_prefix(all, &self.prompt_tokens(before, options)?),
                        min_tokens,
                    )
                }
                // The tokens of the engine's text for the item may merge with those of the text
                // before it, but not across a special token.
                Err(EncodeError::Multimodal(_)) => {
                    let mut tokens = self.prompt_tokens(&marked[..place], options)?;
                    let edge = tokens
                        .iter()
                        .rposition(|&token| self.is_special_token(token));
                    let min_tokens = tokens.len();
                    tokens.truncate(edge.map_or(0, |edge| edge + 1));
                    (tokens, min_tokens)
                }
                Err(error) => return Err(error),
            };
        let expanded = expand_placeholders(tokens, items, &self.media_rules, false)?;
        let min_tokens = min_tokens.max(expanded.tokens.len());
        Ok(MultimodalPrompt {
            min_tokens,
            is_complete: false,
            ..expanded
        })
    }

    /// Returns true if the texts on both sides of a token are tokenized independently.
    fn is_special_token(&self, token: u32) -> bool {
        self.tokenizer
            .library()
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&token)
            .is_some_and(|token| token.special)
    }

    fn prompt_tokens(
        &self,
        text: &str,
        options: TokenizeOptions<'_>,
    ) -> Result<PromptTokens, EncodeError> {
        Ok(self.tokenize_one(text, options)?.tokens)
    }

    fn tokenize_one(
        &self,
        text: &str,
        options: TokenizeOptions<'_>,
    ) -> Result<BoundedTokens, EncodeError> {
        let rendered = RenderedPrompt {
            prompts: PromptSource::Texts(vec![Cow::Borrowed(text)]),
            tokenization: TokenizationOptions::default(),
            add_special_tokens: options.add_special_tokens,
            exactness: TokenExactness::Exact,
        };
        let mut prompts =
            self.tokenize_bounded(&rendered, options.cache_namespace, options.budget)?;
        prompts
            .pop()
            .ok_or_else(|| EncodeError::uncertain("no prompt"))
    }
}

/// Returns the length in bytes of the common prefix of two texts, up to a character boundary.
fn common_prefix_len(one: &str, other: &str) -> usize {
    let differ = |(one, other): ((usize, char), char)| (one.1 != other).then_some(one.0);
    let shorter = one.len().min(other.len());
    one.char_indices()
        .zip(other.chars())
        .find_map(differ)
        .unwrap_or(shorter)
}

/// Tokenization options of a prompt with media items.
#[derive(Clone, Copy)]
struct TokenizeOptions<'a> {
    /// Whether special tokens are added.
    add_special_tokens: bool,
    /// Namespace of cached prefixes. Different namespaces share no prefixes.
    cache_namespace: Option<&'a str>,
    /// Limits of tokenization.
    budget: &'a TokenBudget<'a>,
}
