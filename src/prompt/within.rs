//! Tokenizes prompts within a budget of tokens and time. The result may be only the first tokens of a prompt.

use super::pieces::{self, StopReason, TokenBudget};
use super::resume::{Bare, Frame};
use super::{
    EncodeError, Encoder, Rendered, Side, Source, Tokens, failed, kept_range, kept_tokens, room,
    truncated,
};

/// The tokens of one prompt, as far as a budget goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundedTokens {
    /// The first tokens of the prompt, or all of them.
    pub tokens: Tokens,
    /// The reason why it has more; `None` if these are all.
    pub stopped: Option<StopReason>,
}

impl BoundedTokens {
    /// As many of a list as the budget has.
    fn of(tokens: &[u32], budget: &TokenBudget<'_>) -> Self {
        let stopped = (tokens.len() > budget.tokens).then_some(StopReason::TooLong);
        Self {
            tokens: tokens[..tokens.len().min(budget.tokens)].to_vec().into(),
            stopped,
        }
    }
}

/// How a prompt is truncated.
#[derive(Clone, Copy)]
struct PromptTruncation {
    /// Whether special tokens are added.
    special: bool,
    keep: Option<usize>,
    side: Side,
    /// Whether the tokens around the text are truncated as well: the engine then truncates the whole output of the tokenizer.
    after_framing: bool,
}

impl Encoder {
    /// The tokens of rendered prompts as [`Encoder::tokenize_resuming`] makes them, as far as the budget goes.
    pub fn tokenize_within(
        &self,
        rendered: &Rendered<'_>,
        apart: Option<&str>,
        budget: &TokenBudget<'_>,
    ) -> Result<Vec<BoundedTokens>, EncodeError> {
        let tokenization = rendered.tokenization;
        let keep = kept_tokens(tokenization)?;
        let named_side = tokenization.truncation_side.filter(|_| keep.is_some());
        let side = named_side.unwrap_or(tokenization.tokenizer_side);
        match &rendered.prompts {
            Source::Tokens(lists) => Ok(lists
                .iter()
                .map(|tokens| BoundedTokens::of(truncated(tokens, keep, side), budget))
                .collect()),
            Source::Texts(texts) => {
                let special = rendered.add_special_tokens;
                self.refuse_doubt(special)?;
                let kept = PromptTruncation {
                    special,
                    keep,
                    side,
                    after_framing: named_side.is_some(),
                };
                texts
                    .iter()
                    .map(|text| self.begin(text, kept, apart, budget))
                    .collect()
            }
        }
    }

    /// The tokens of one text, cut off as asked, as far as the budget goes.
    fn begin(
        &self,
        text: &str,
        kept: PromptTruncation,
        apart: Option<&str>,
        budget: &TokenBudget<'_>,
    ) -> Result<BoundedTokens, EncodeError> {
        let frame = self.frame.as_ref().filter(|_| kept.special);
        if kept.special && frame.is_none() {
            return self.begin_in_unknown_frame(text, kept, budget);
        }
        let room = match kept.keep {
            Some(keep) if !kept.after_framing => Some(room(keep, frame.map_or(0, Frame::len))?),
            keep => keep,
        };
        let most = match room {
            None => budget.tokens,
            Some(room) if kept.side == Side::Right => room.min(budget.tokens),
            // What is kept is known only at the end.
            Some(_) => usize::MAX,
        };
        let mut bare = self.bare(
            text,
            apart,
            &TokenBudget {
                tokens: most,
                ..*budget
            },
        )?;
        if kept.side == Side::Right
            && bare.stopped == Some(StopReason::TooLong)
            && room.is_some_and(|room| bare.ids.len() >= room)
        {
            // Nothing behind it is kept.
            bare.stopped = None;
        }
        let stopped = bare.stopped;
        if stopped.is_some() && room.is_some() && kept.side == Side::Left {
            return Ok(BoundedTokens {
                tokens: Vec::new().into(),
                stopped,
            });
        }
        if let Some(room) = room.filter(|_| !kept.after_framing && stopped.is_none()) {
            bare.keep(|length| Ok::<_, EncodeError>(kept_range(length, room, kept.side)))?;
        }
        let tokens = self.framed(bare, frame);
        let tokens = match kept.keep {
            Some(_) if kept.after_framing => {
                truncated(&tokens, kept.keep, kept.side).to_vec().into()
            }
            _ => tokens,
        };
        Ok(BoundedTokens { tokens, stopped })
    }

    /// The tokens of a text without what the post-processor adds, resumed where that can be.
    fn bare(
        &self,
        text: &str,
        apart: Option<&str>,
        budget: &TokenBudget<'_>,
    ) -> Result<Bare, EncodeError> {
        if let Some(resumer) = &self.resumer {
            match resumer.tokens(&self.tokenizer, text, apart, budget) {
                Ok(Some(bare)) => return Ok(bare),
                Ok(None) => {}
                Err(_) => resumer.count_failed(),
            }
        }
        pieces::tokens(&self.tokenizer, text, budget)
            .map(Bare::from)
            .map_err(failed)
    }

    fn framed(&self, bare: Bare, frame: Option<&Frame>) -> Tokens {
        match (&self.resumer, frame) {
            (Some(resumer), _) => resumer.framed(bare, frame.is_some()),
            (None, None) => bare.ids.into(),
            (None, Some(frame)) if bare.stopped.is_some() => frame.before(&bare.ids).into(),
            (None, Some(frame)) => frame.around(&bare.ids).into(),
        }
    }

    /// An unknown post-processor needs the whole text, so only a short text is tokenized.
    fn begin_in_unknown_frame(
        &self,
        text: &str,
        kept: PromptTruncation,
        budget: &TokenBudget<'_>,
    ) -> Result<BoundedTokens, EncodeError> {
        if text.len() > budget.longest {
            return Ok(BoundedTokens {
                tokens: Vec::new().into(),
                stopped: Some(StopReason::TooLong),
            });
        }
        let PromptTruncation {
            keep,
            side,
            after_framing,
            ..
        } = kept;
        let tokens = self.tokens_in_unknown_frame(text, keep.filter(|_| !after_framing), side)?;
        Ok(BoundedTokens::of(truncated(&tokens, keep, side), budget))
    }
}
