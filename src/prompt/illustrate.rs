//! Conversations with images and the like to tokens. The prompt is rendered as the engine renders it, tokenised, and each
//! placeholder becomes as many tokens as its item has. From the first item on of which not everything is known, nothing
//! is: to find where it stands, the prompt is rendered once more with a mark in its place, and what both begin with comes
//! before it.

use std::borrow::Cow;

use super::media::{Illustrated, Known, Root, common, expand};
use super::stage::{MARK, Show};
use super::template::Templates;
use super::unfinished::same;
use super::{
    BoundedTokens, EncodeError, Encoder, Engine, Exactness, Rendered, Source, TokenBudget, Tokens,
};
use crate::openai::{Chat, Modality, Prompt, Request, Tokenization};

impl Encoder {
    /// The tokens of a conversation that shows or plays something, as far as they can be known. Text is taken over from
    /// earlier prompts as in [`Encoder::tokenize_resuming`].
    pub fn illustrate(
        &self,
        request: &Request,
        apart: Option<&str>,
        budget: &TokenBudget<'_>,
        root: &Root,
    ) -> Result<Illustrated, EncodeError> {
        let Prompt::Chat(chat) = &request.prompt else {
            return Err(EncodeError::uncertain(
                "images and the like in another request than a conversation",
            ));
        };
        if request.tokenization.truncate_prompt_tokens.is_some() {
            return Err(EncodeError::uncertain(
                "truncation of a prompt with images and the like",
            ));
        }
        if self.engine == Engine::Sglang {
            // Its names for items come from what its own processor makes of them.
            return Err(EncodeError::Multimodal("any".to_owned()));
        }
        let templates = self.templates.as_ref().ok_or(EncodeError::NoTemplate)?;
        let how = How {
            special: request.tokenization.add_special_tokens.unwrap_or(false),
            apart,
            budget,
        };
        let (known, all) = self.known((chat, root), templates)?;
        if all {
            self.whole(templates, chat, &known, how)
        } else {
            self.beginning(templates, chat, &known, how)
        }
    }

    /// The items up to the first of which not everything is known, and whether these are all.
    fn known(
        &self,
        (chat, root): (&Chat, &Root),
        templates: &Templates,
    ) -> Result<(Vec<(Modality, Known)>, bool), EncodeError> {
        let lists = templates.takes_parts(chat)?;
        let mut known = Vec::new();
        for media in chat.media() {
            let placed = lists || self.rules.placeholder(media.modality, 1).is_some();
            match self
                .rules
                .known(media, root)
                .filter(|_| placed && !chat.media_options)
            {
                Some(item) => known.push((media.modality, item)),
                None => return Ok((known, false)),
            }
        }
        Ok((known, true))
    }

    fn whole(
        &self,
        templates: &Templates,
        chat: &Chat,
        items: &[(Modality, Known)],
        how: How<'_>,
    ) -> Result<Illustrated, EncodeError> {
        let (text, _) = templates.render_as(chat, Show::As(&self.rules))?;
        let BoundedTokens { tokens, stopped } = self.first_tokens(&text, how)?;
        expand(tokens, items, &self.rules, stopped.is_none())
    }

    fn beginning(
        &self,
        templates: &Templates,
        chat: &Chat,
        items: &[(Modality, Known)],
        how: How<'_>,
    ) -> Result<Illustrated, EncodeError> {
        let (marked, _) = templates.render_as(chat, Show::Marked(&self.rules, items.len()))?;
        let place = marked
            .find(MARK)
            .ok_or_else(|| EncodeError::uncertain("the template does not show an item"))?;
        let (tokens, least) = match templates.render_as(chat, Show::As(&self.rules)) {
            Ok((shown, _)) => {
                let before = &shown[..same(&shown, &marked[..place])];
                let all = self.ids(&shown, how)?;
                let least = all.len();
                (common(all, &self.ids(before, how)?), least)
            }
            // What the engine writes for the item may join the text before it, up to the last token that nothing joins.
            Err(EncodeError::Multimodal(_)) => {
                let mut tokens = self.ids(&marked[..place], how)?;
                let edge = tokens.iter().rposition(|&token| self.is_edge(token));
                let least = tokens.len();
                tokens.truncate(edge.map_or(0, |edge| edge + 1));
                (tokens, least)
            }
            Err(error) => return Err(error),
        };
        let expanded = expand(tokens, items, &self.rules, false)?;
        let at_least = least.max(expanded.tokens.len());
        Ok(Illustrated {
            at_least,
            whole: false,
            ..expanded
        })
    }

    /// Whether the text around a token is tokenised without regard to one another.
    fn is_edge(&self, token: u32) -> bool {
        self.tokenizer
            .library()
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&token)
            .is_some_and(|token| token.special)
    }

    fn ids(&self, text: &str, how: How<'_>) -> Result<Tokens, EncodeError> {
        Ok(self.first_tokens(text, how)?.tokens)
    }

    fn first_tokens(&self, text: &str, how: How<'_>) -> Result<BoundedTokens, EncodeError> {
        let rendered = Rendered {
            prompts: Source::Texts(vec![Cow::Borrowed(text)]),
            tokenization: Tokenization::default(),
            add_special_tokens: how.special,
            exact: Exactness::Exact,
        };
        let mut prompts = self.tokenize_within(&rendered, how.apart, how.budget)?;
        prompts
            .pop()
            .ok_or_else(|| EncodeError::uncertain("no prompt"))
    }
}

/// How texts become tokens.
#[derive(Clone, Copy)]
struct How<'a> {
    /// With special tokens around them.
    special: bool,
    /// What they share nothing with others by.
    apart: Option<&'a str>,
    /// How far.
    budget: &'a TokenBudget<'a>,
}
