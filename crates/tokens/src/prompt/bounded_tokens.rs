//! Tokenization of prompts within a budget of tokens and time. The result may be only the first
//! tokens of a prompt.

use std::borrow::Cow;

use super::error::EncodeError;
use super::pieces::{self, LeadingTokens, StopReason, TokenBudget};
use super::resume::{PromptTokens, ResumableText, ResumingTokenizer};
use super::tokenizer_parts::SpecialTokenFrame;
use super::truncation::{
    retained_range, text_token_limit, truncate_encoding, truncate_tokens, truncation_limit,
};
use super::{Encoder, PromptSource, RenderedPrompt, tokenizer_error};
use crate::openai::TruncationSide;

/// Tokens of one prompt within a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundedTokens {
    /// The first tokens of the prompt, or all of them.
    pub tokens: PromptTokens,
    /// Reason why tokens are missing; `None` if the prompt is complete.
    pub stopped: Option<StopReason>,
}

impl BoundedTokens {
    /// Returns the first of some known tokens, up to the budget.
    fn from_ids(tokens: &[u32], budget: &TokenBudget<'_>) -> Self {
        let stopped = (tokens.len() > budget.max_tokens).then_some(StopReason::TooLong);
        Self {
            tokens: tokens[..tokens.len().min(budget.max_tokens)]
                .to_vec()
                .into(),
            stopped,
        }
    }
}

/// Truncation that a request specifies for its prompt.
#[derive(Clone, Copy)]
struct PromptTruncation {
    /// True if special tokens are added.
    add_special_tokens: bool,
    max_tokens: Option<usize>,
    side: TruncationSide,
    /// True if truncation also removes special tokens, because the engine truncates the complete
    /// output of the tokenizer.
    includes_special_tokens: bool,
}

/// Reuse of cached prefixes.
#[derive(Clone, Copy)]
pub(super) struct PrefixReuse<'t> {
    tokenizer: &'t ResumingTokenizer,
    cache_namespace: Option<&'t str>,
}

impl Encoder {
    /// Tokenizes rendered prompts like [`Encoder::tokenize_cached`], within a budget.
    pub fn tokenize_bounded(
        &self,
        rendered: &RenderedPrompt<'_>,
        cache_namespace: Option<&str>,
        budget: &TokenBudget<'_>,
    ) -> Result<Vec<BoundedTokens>, EncodeError> {
        let reuse = self
            .resuming_tokenizer
            .as_ref()
            .map(|tokenizer| PrefixReuse {
                tokenizer,
                cache_namespace,
            });
        self.tokenize_with(rendered, reuse, budget)
    }

    pub(super) fn tokenize_with(
        &self,
        rendered: &RenderedPrompt<'_>,
        reuse: Option<PrefixReuse<'_>>,
        budget: &TokenBudget<'_>,
    ) -> Result<Vec<BoundedTokens>, EncodeError> {
        let tokenization = rendered.tokenization;
        let limit = truncation_limit(tokenization)?;
        let side = tokenization.removed_side();
        let truncation = PromptTruncation {
            add_special_tokens: rendered.add_special_tokens,
            max_tokens: limit,
            side,
            includes_special_tokens: limit.is_some() && tokenization.truncation_side.is_some(),
        };
        match &rendered.prompts {
            PromptSource::Tokens(lists) => Ok(lists
                .iter()
                .map(|tokens| BoundedTokens::from_ids(truncate_tokens(tokens, limit, side), budget))
                .collect()),
            PromptSource::Texts(texts) => {
                self.check_special_tokens(rendered.add_special_tokens)?;
                let whole = |text| ResumableText::new(Cow::Borrowed(text), Vec::new());
                texts
                    .iter()
                    .map(|text| self.tokenize_text(&whole(text), truncation, reuse, budget))
                    .collect()
            }
            PromptSource::Chat(text) => {
                let bounded = self.tokenize_text(text, truncation, reuse, budget)?;
                Ok(vec![bounded])
            }
        }
    }

    /// Tokenizes and truncates one text within a budget.
    fn tokenize_text(
        &self,
        text: &ResumableText<'_>,
        truncation: PromptTruncation,
        reuse: Option<PrefixReuse<'_>>,
        budget: &TokenBudget<'_>,
    ) -> Result<BoundedTokens, EncodeError> {
        let frame = self
            .frame
            .as_ref()
            .filter(|_| truncation.add_special_tokens);
        if truncation.add_special_tokens && frame.is_none() {
            return self.tokenize_post_processed(text.text(), truncation, budget);
        }
        let text_limit = match truncation.max_tokens {
            Some(limit) if !truncation.includes_special_tokens => Some(text_token_limit(
                limit,
                frame.map_or(0, SpecialTokenFrame::len),
            )?),
            limit => limit,
        };
        let max_tokens = match text_limit {
            None => budget.max_tokens,
            Some(text_limit) if truncation.side == TruncationSide::Right => {
                text_limit.min(budget.max_tokens)
            }
            // Truncation on the left retains the last tokens, so the whole text is tokenized.
            Some(_) => usize::MAX,
        };
        let mut unframed = self.tokenize_bare(
            text,
            reuse,
            &TokenBudget {
                max_tokens,
                ..*budget
            },
        )?;
        if truncation.side == TruncationSide::Right
            && unframed.stopped == Some(StopReason::TooLong)
            && text_limit.is_some_and(|text_limit| unframed.ids.len() >= text_limit)
        {
            // Truncation would remove all later tokens, so none are missing.
            unframed.stopped = None;
        }
        let stopped = unframed.stopped;
        if stopped.is_some() && text_limit.is_some() && truncation.side == TruncationSide::Left {
            return Ok(BoundedTokens {
                tokens: Vec::new().into(),
                stopped,
            });
        }
        if let Some(text_limit) =
            text_limit.filter(|_| !truncation.includes_special_tokens && stopped.is_none())
        {
            let retained = retained_range(unframed.ids.len(), text_limit, truncation.side);
            unframed.retain_range(retained);
        }
        let tokens = self.add_frame(unframed, frame);
        let tokens = match truncation.max_tokens {
            Some(_) if truncation.includes_special_tokens => {
                truncate_tokens(&tokens, truncation.max_tokens, truncation.side)
                    .to_vec()
                    .into()
            }
            _ => tokens,
        };
        Ok(BoundedTokens { tokens, stopped })
    }

    /// Tokenizes a text without special tokens, reusing cached prefixes if possible.
    fn tokenize_bare(
        &self,
        text: &ResumableText<'_>,
        reuse: Option<PrefixReuse<'_>>,
        budget: &TokenBudget<'_>,
    ) -> Result<LeadingTokens, EncodeError> {
        if let Some(PrefixReuse {
            tokenizer,
            cache_namespace,
        }) = reuse
        {
            match tokenizer.tokenize(&self.tokenizer, text, cache_namespace, budget) {
                Ok(Some(unframed)) => return Ok(unframed),
                Ok(None) => {}
                Err(_) => tokenizer.record_failure(),
            }
        }
        if text.prefix().is_some() {
            return Err(EncodeError::Tokenize(
                "tokenization after the cached prefix failed".to_owned(),
            ));
        }
        pieces::tokenize_pieces(&self.tokenizer, text.text(), budget).map_err(tokenizer_error)
    }

    /// Adds special tokens, and attaches the resume points.
    fn add_frame(
        &self,
        unframed: LeadingTokens,
        frame: Option<&SpecialTokenFrame>,
    ) -> PromptTokens {
        let ids = match frame {
            None => unframed.ids,
            Some(frame) if unframed.stopped.is_some() => frame.prepend_to(&unframed.ids),
            Some(frame) => frame.surround(&unframed.ids),
        };
        match &self.resuming_tokenizer {
            Some(tokenizer) => tokenizer.attach_points(ids, unframed.points, frame),
            None => ids.into(),
        }
    }

    /// Tokenizes a text with an unknown post-processor. The post-processor needs the whole text, so
    /// only short texts are tokenized.
    fn tokenize_post_processed(
        &self,
        text: &str,
        truncation: PromptTruncation,
        budget: &TokenBudget<'_>,
    ) -> Result<BoundedTokens, EncodeError> {
        if text.len() > budget.max_piece_bytes {
            return Ok(BoundedTokens {
                tokens: Vec::new().into(),
                stopped: Some(StopReason::TooLong),
            });
        }
        let PromptTruncation {
            max_tokens, side, ..
        } = truncation;
        let tokens = self.post_processed_ids(text, truncation)?;
        Ok(BoundedTokens::from_ids(
            truncate_tokens(&tokens, max_tokens, side),
            budget,
        ))
    }

    fn post_processed_ids(
        &self,
        text: &str,
        truncation: PromptTruncation,
    ) -> Result<Vec<u32>, EncodeError> {
        let library = self.tokenizer.library();
        let encode = |text, special| library.encode_fast(text, special).map_err(tokenizer_error);
        let encoding = match truncation.max_tokens {
            Some(limit) if !truncation.includes_special_tokens => {
                let text_limit = text_token_limit(limit, encode("", true)?.len())?;
                let bare = truncate_encoding(encode(text, false)?, text_limit, truncation.side);
                library
                    .post_process(bare, None, true)
                    .map_err(tokenizer_error)?
            }
            _ => encode(text, true)?,
        };
        Ok(encoding.get_ids().to_vec())
    }

    fn check_special_tokens(&self, special: bool) -> Result<(), EncodeError> {
        match &self.special_tokens_mismatch {
            Some(mismatch) if special => Err(EncodeError::uncertain(mismatch.as_str())),
            _ => Ok(()),
        }
    }
}
