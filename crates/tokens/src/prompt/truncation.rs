//! Truncation of prompts to the length that a request permits.

use std::ops::Range;

use tokenizers::Encoding;

use super::error::EncodeError;
use crate::openai::{TokenizationOptions, TruncationSide};

/// Returns the maximum number of prompt tokens, if truncation is requested.
pub(super) fn truncation_limit(
    tokenization: TokenizationOptions,
) -> Result<Option<usize>, EncodeError> {
    match tokenization.truncate_prompt_tokens {
        None => Ok(None),
        Some(-1) => Err(EncodeError::uncertain(
            "truncation to the context length, which only the engine knows",
        )),
        Some(limit) if limit > 0 => Ok(usize::try_from(limit).ok()),
        Some(limit) => Err(EncodeError::uncertain(format!(
            "truncate_prompt_tokens is {limit}"
        ))),
    }
}

pub(super) fn truncate_tokens(
    tokens: &[u32],
    limit: Option<usize>,
    side: TruncationSide,
) -> &[u32] {
    &tokens[retained_range(tokens.len(), limit.unwrap_or(usize::MAX), side)]
}

/// Truncates an encoding. The tokenizer's own truncation also stores the removed part in pieces of
/// the retained length, so a limit of one token would take gigabytes for a long prompt.
pub(super) fn truncate_encoding(
    encoding: Encoding,
    limit: usize,
    side: TruncationSide,
) -> Encoding {
    if limit >= encoding.len() {
        return encoding;
    }
    let range = retained_range(encoding.len(), limit, side);
    Encoding::new(
        encoding.get_ids()[range.clone()].to_vec(),
        encoding.get_type_ids()[range.clone()].to_vec(),
        encoding.get_tokens()[range.clone()].to_vec(),
        encoding.get_word_ids()[range.clone()].to_vec(),
        encoding.get_offsets()[range.clone()].to_vec(),
        encoding.get_special_tokens_mask()[range.clone()].to_vec(),
        encoding.get_attention_mask()[range].to_vec(),
        Vec::new(),
        Default::default(),
    )
}

pub(super) fn retained_range(length: usize, limit: usize, side: TruncationSide) -> Range<usize> {
    let limit = limit.min(length);
    match side {
        TruncationSide::Left => length - limit..length,
        TruncationSide::Right => 0..limit,
    }
}

/// Returns the maximum number of tokens of the text itself.
pub(super) fn text_token_limit(limit: usize, added: usize) -> Result<usize, EncodeError> {
    limit
        .checked_sub(added)
        .ok_or_else(|| EncodeError::uncertain("truncation leaves no room for the special tokens"))
}
