//! Tokenization of a text in pieces, so that it can stop at a number of tokens or at a deadline.
//! The result is a prefix of the tokens of the whole text.
//!
//! # Correctness
//! A text is split at *joints* only. A joint is the position before a separator (a space, or a
//! Chinese or Japanese comma or full stop) between two letters ([`is_letter`]). The concatenated
//! tokens of both sides are those of the whole text for tokenizers with all of these properties
//! ([`supports_joints`]):
//!
//! * No added token has a separator at such a position, strips one, or depends on a word boundary
//!   that the split changes. Added tokens are therefore found in each side as in the whole text.
//! * The normalizer changes a character without regard to anything but adjacent combining marks. It
//!   maps separators to separators and letters to letters, and neither combines with a preceding
//!   character.
//! * Each pre-tokenizer is a pattern in [`DIVIDING_PATTERNS`] or [`PASSING_PATTERNS`], or separates
//!   digits; the last one may be byte-level. A pattern matches from left to right, without
//!   look-behind or anchors, and looks ahead only after white space. No alternative of a dividing
//!   pattern continues from a letter to a separator, and all match letters, so one match ends at
//!   the joint and the next begins there. A passing pattern matches no separator, so a later
//!   pattern divides its remainder.
//! * The model is a function of each piece that the pre-tokenizers produce.
//!
//! A long stretch without joints, or any text of another tokenizer, is one piece, up to a maximum
//! length in bytes.

use std::ops::Range;

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::fast::VerifiedTokenizer;
use super::tokenizer_parts::check_parts;

/// Usual length of a piece in bytes. The deadline is checked between pieces.
const PIECE_BYTES: usize = 64 << 10;
/// Maximum length of a piece in bytes.
const MAX_PIECE_BYTES: usize = 1 << 20;

/// Limits of tokenization.
#[derive(Clone, Copy)]
pub struct TokenBudget<'b> {
    /// Maximum number of tokens per prompt.
    pub max_tokens: usize,
    /// Function that returns true when the deadline has passed.
    pub is_expired: &'b dyn Fn() -> bool,
    pub(super) piece_bytes: usize,
    pub(super) max_piece_bytes: usize,
}

impl<'b> TokenBudget<'b> {
    /// No limits.
    pub const UNLIMITED: TokenBudget<'static> = TokenBudget {
        max_tokens: usize::MAX,
        is_expired: &|| false,
        piece_bytes: usize::MAX,
        max_piece_bytes: usize::MAX,
    };

    /// Creates a budget of `max_tokens` tokens per prompt, until the deadline.
    pub fn new(max_tokens: usize, is_expired: &'b dyn Fn() -> bool) -> Self {
        Self {
            max_tokens,
            is_expired,
            piece_bytes: PIECE_BYTES,
            max_piece_bytes: MAX_PIECE_BYTES,
        }
    }

    /// Returns the budget that remains after `tokens` tokens.
    pub(super) fn remaining_after(self, tokens: usize) -> Self {
        Self {
            max_tokens: self.max_tokens.saturating_sub(tokens),
            ..self
        }
    }
}

/// Reason why a prompt was not tokenized completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The prompt exceeds the number of tokens, or one of its pieces is too long.
    TooLong,
    /// The deadline passed.
    Deadline,
}

/// First tokens of a text without special tokens, and its resume points.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LeadingTokens {
    pub(super) ids: Vec<u32>,
    /// Reason why tokens are missing; `None` if the text is complete.
    pub(super) stopped: Option<StopReason>,
    /// Hash of each resume point and the number of tokens before it.
    pub(super) points: Vec<(u128, usize)>,
}

impl LeadingTokens {
    /// Retains only the tokens in a range.
    pub(super) fn retain_range(&mut self, Range { start, end }: Range<usize>) {
        if start > 0 {
            self.points.clear();
        }
        self.points.retain(|(_, tokens)| *tokens <= end);
        self.ids.truncate(end);
        self.ids.drain(..start);
    }
}

/// Tokenizes a text within a budget.
pub(super) fn tokenize_pieces(
    tokenizer: &VerifiedTokenizer,
    text: &str,
    budget: &TokenBudget<'_>,
) -> tokenizers::Result<LeadingTokens> {
    let mut ids: Vec<u32> = Vec::new();
    let mut from = 0;
    let mut stopped = None;
    while from < text.len() {
        let end = if (budget.is_expired)() {
            Err(StopReason::Deadline)
        } else if ids.len() >= budget.max_tokens {
            Err(StopReason::TooLong)
        } else {
            end_of_piece(tokenizer.has_joints(), text, from, budget).ok_or(StopReason::TooLong)
        };
        let end = match end {
            Ok(end) => end,
            Err(stop) => {
                stopped = Some(stop);
                break;
            }
        };
        let piece = tokenizer.ids(&text[from..end])?;
        if from == 0 {
            ids = piece;
        } else {
            ids.extend(piece);
        }
        from = end;
    }
    let stopped =
        stopped.or_else(|| (ids.len() > budget.max_tokens).then_some(StopReason::TooLong));
    ids.truncate(budget.max_tokens);
    Ok(LeadingTokens {
        ids,
        stopped,
        points: Vec::new(),
    })
}

/// Returns the end of the piece that starts at `from`: the last joint within `piece_bytes`, else
/// the first joint after it, else the end of the text. Returns `None` if it is not within
/// `max_piece_bytes`.
fn end_of_piece(
    has_joints: bool,
    text: &str,
    from: usize,
    budget: &TokenBudget<'_>,
) -> Option<usize> {
    let left = text.len() - from;
    if left <= budget.piece_bytes {
        return Some(text.len());
    }
    let step = from + budget.piece_bytes;
    let longest = from.saturating_add(budget.max_piece_bytes).min(text.len());
    let joint = || {
        let within = (from + 1..=step).rev().find(|at| is_joint(text, *at));
        within.or_else(|| (step + 1..=longest).find(|at| is_joint(text, *at)))
    };
    let joint = if has_joints { joint() } else { None };
    joint.or_else(|| (left <= budget.max_piece_bytes).then_some(text.len()))
}

const SEPARATORS: [char; 4] = [' ', '、', '。', '，'];

fn is_joint(text: &str, at: usize) -> bool {
    let begins = text
        .as_bytes()
        .get(at)
        .is_some_and(|byte| matches!(byte, b' ' | 0xe3 | 0xef));
    if !begins || !text.is_char_boundary(at) {
        return false;
    }
    let mut after = text[at..].chars();
    after.next().is_some_and(|char| SEPARATORS.contains(&char))
        && after.next().is_some_and(is_letter)
        && text[..at].chars().next_back().is_some_and(is_letter)
}

/// Returns true for Latin letters without diacritics, ideographs and kana. All patterns and
/// supported normalizers treat them as letters.
fn is_letter(char: char) -> bool {
    let other_letters = [
        '\u{4e00}'..='\u{9fa5}',
        '\u{3041}'..='\u{3096}',
        '\u{30a1}'..='\u{30fa}',
    ];
    char.is_ascii_alphabetic() || other_letters.iter().any(|range| range.contains(&char))
}

/// Patterns that divide a text at every joint. The comments name the models that use them.
const DIVIDING_PATTERNS: [&str; 9] = [
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // Llama 3, GLM 4.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 3.5.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // cl100k.
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    // gpt-oss.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Mistral.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek V3.
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// Patterns that match no separator. Their remainder is divided by a later pattern.
const PASSING_PATTERNS: [&str; 3] = [r"\p{N}{1,3}", r"\p{N}", "[一-龥぀-ゟ゠-ヿ]+"];

/// Returns true if texts of this tokenizer can be split at joints.
pub(super) fn supports_joints(tokenizer: &Tokenizer) -> bool {
    let written =
        |part: Option<serde_json::Result<Value>>| part.map_or(Some(Value::Null), Result::ok);
    let normalizer = written(tokenizer.get_normalizer().map(serde_json::to_value));
    let pre_tokenizer = written(tokenizer.get_pre_tokenizer().map(serde_json::to_value));
    check_parts(tokenizer).is_ok()
        && tokenizer
            .get_added_tokens_decoder()
            .values()
            .all(|token| !touches_joints(token))
        && normalizer.is_some_and(|part| {
            flatten_parts(&part, "normalizers")
                .iter()
                .all(|part| is_local_normalizer(part))
        })
        && pre_tokenizer
            .is_some_and(|part| divides_at_joints(&flatten_parts(&part, "pretokenizers")))
}

/// Returns the parts of a sequence, nested ones included, or the single part.
fn flatten_parts<'p>(part: &'p Value, parts: &str) -> Vec<&'p Value> {
    match part.get(parts).and_then(Value::as_array) {
        Some(all) => all
            .iter()
            .flat_map(|part| flatten_parts(part, parts))
            .collect(),
        None if part.is_null() => Vec::new(),
        None => vec![part],
    }
}

fn is_local_normalizer(normalizer: &Value) -> bool {
    matches!(
        normalizer["type"].as_str(),
        Some("NFC" | "NFKC" | "Lowercase")
    )
}

/// Returns true if these pre-tokenizers divide every text at its joints.
fn divides_at_joints(pre_tokenizers: &[&Value]) -> bool {
    let mut divided = false;
    for (at, part) in pre_tokenizers.iter().enumerate() {
        let known = match part["type"].as_str() {
            Some("Digits") => true,
            Some("ByteLevel") => {
                divided |= part["use_regex"] != false;
                // A pre-tokenizer after this one would receive bytes.
                part["add_prefix_space"] == false && at + 1 == pre_tokenizers.len()
            }
            Some("Split") => {
                let pattern = part["pattern"]["Regex"].as_str().unwrap_or_default();
                let pattern = pattern.replace('\r', r"\r").replace('\n', r"\n");
                let divides = DIVIDING_PATTERNS.contains(&pattern.as_str());
                divided |= divides;
                let isolated = part["behavior"] == "Isolated" && part["invert"] == false;
                isolated && (divides || PASSING_PATTERNS.contains(&pattern.as_str()))
            }
            _ => false,
        };
        if !known {
            return false;
        }
    }
    divided
}

/// Returns true if a split at a joint may change the matches of an added token. Characters that a
/// normalizer may map to a separator count as separators.
fn touches_joints(token: &AddedToken) -> bool {
    let chars: Vec<char> = token.content.chars().collect();
    let is_separator = |char: char| {
        char.is_whitespace() || matches!(char, ',' | '.') || SEPARATORS.contains(&char)
    };
    let alphabetic = |char: Option<&char>| char.is_none_or(|char| char.is_alphabetic());
    let covers = chars.iter().enumerate().any(|(at, char)| {
        let before = at.checked_sub(1).and_then(|at| chars.get(at));
        is_separator(*char) && alphabetic(before) && alphabetic(chars.get(at + 1))
    });
    let strips =
        token.lstrip && alphabetic(chars.first()) || token.rstrip && alphabetic(chars.last());
    // A token with `single_word` depends on both neighboring characters.
    covers || strips || token.single_word && chars.first().is_some_and(|char| is_separator(*char))
}

#[cfg(test)]
mod tests;
