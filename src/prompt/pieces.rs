//! Tokenizes a text piece by piece, so that it can stop at a number of tokens or at a deadline. The result is the first
//! tokens of the whole text.
//!
//! # Why it is exact
//! A text is cut at *joints* only. A joint is the place before a separator (a space, or a comma or full stop of Chinese and
//! Japanese) that stands between two letters ([`is_letter`]). The tokens of both sides together are those of the whole, for
//! tokenizers of which all of this holds ([`are_known`]):
//!
//! * No added token has a separator at such a place, strips one that is there, or needs a word boundary that the cut changes.
//!   So added tokens are found in each side as in the whole.
//! * The normalizer is one of those that change characters without regard to what is further away than a combining mark,
//!   and keep a separator and a letter what they are. Neither a letter nor a separator combines with what stands before it.
//! * Each pre-tokenizer is a pattern in [`DIVIDING`] or [`PASSING`], or separates digits, and the last one may be the bytes'
//!   own. A pattern is matched from left to right; it has no look-behind and no anchor, and looks ahead of its match only
//!   behind white space. No alternative of a dividing pattern goes on from a letter to a separator, and all match letters, so
//!   one match ends at the joint, and the next begins there. A passing pattern matches no separator, so what it leaves is
//!   divided by the next.
//! * The model is a function of each piece that the pre-tokenizers make.
//!
//! Where there is no joint for long, or the tokenizer is not of this kind, a text is one piece, up to a length in bytes.

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::fast::Checked;
use super::resume::parts;

/// Bytes after which tokenization searches for a joint and checks the deadline.
const STEP: usize = 64 << 10;
/// Bytes of the longest piece.
const LONGEST: usize = 1 << 20;

/// How much of a text is tokenized.
#[derive(Clone, Copy)]
pub struct TokenBudget<'b> {
    /// Most tokens of one prompt.
    pub tokens: usize,
    /// Whether the deadline has passed.
    pub is_over: &'b dyn Fn() -> bool,
    pub(super) step: usize,
    pub(super) longest: usize,
}

impl<'b> TokenBudget<'b> {
    /// All of it.
    pub const UNLIMITED: TokenBudget<'static> = TokenBudget {
        tokens: usize::MAX,
        is_over: &|| false,
        step: usize::MAX,
        longest: usize::MAX,
    };

    /// This many tokens, until the deadline.
    pub fn new(tokens: usize, is_over: &'b dyn Fn() -> bool) -> Self {
        Self {
            tokens,
            is_over,
            step: STEP,
            longest: LONGEST,
        }
    }

    /// The budget that remains after this many tokens.
    pub(super) fn after(self, tokens: usize) -> Self {
        Self {
            tokens: self.tokens.saturating_sub(tokens),
            ..self
        }
    }
}

/// The reason why a prompt was not tokenized to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It exceeds the number of tokens, or a piece of it is too long.
    TooLong,
    /// The deadline passed.
    Deadline,
}

/// The first tokens of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FirstTokens {
    pub(super) ids: Vec<u32>,
    /// The reason why the text has more; `None` if these are all.
    pub(super) stopped: Option<StopReason>,
}

/// The tokens of a text, as far as the budget goes.
pub(super) fn tokens(
    tokenizer: &Checked,
    text: &str,
    budget: &TokenBudget<'_>,
) -> tokenizers::Result<FirstTokens> {
    let mut ids: Vec<u32> = Vec::new();
    let mut from = 0;
    let mut stopped = None;
    while from < text.len() {
        let end = if (budget.is_over)() {
            Err(StopReason::Deadline)
        } else if ids.len() >= budget.tokens {
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
    let stopped = stopped.or_else(|| (ids.len() > budget.tokens).then_some(StopReason::TooLong));
    ids.truncate(budget.tokens);
    Ok(FirstTokens { ids, stopped })
}

/// The last joint within a step, else the first one behind it, else the end of the text, within the longest piece.
fn end_of_piece(
    has_joints: bool,
    text: &str,
    from: usize,
    budget: &TokenBudget<'_>,
) -> Option<usize> {
    let left = text.len() - from;
    if left <= budget.step {
        return Some(text.len());
    }
    let step = from + budget.step;
    let longest = from.saturating_add(budget.longest).min(text.len());
    let joint = || {
        let within = (from + 1..=step).rev().find(|at| is_joint(text, *at));
        within.or_else(|| (step + 1..=longest).find(|at| is_joint(text, *at)))
    };
    let joint = if has_joints { joint() } else { None };
    joint.or_else(|| (left <= budget.longest).then_some(text.len()))
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

/// Letters of Latin without marks, ideographs, and kana: for every pattern and every known normalizer they are letters.
fn is_letter(char: char) -> bool {
    matches!(char, 'a'..='z' | 'A'..='Z' | '\u{4e00}'..='\u{9fa5}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}')
}

/// Patterns that divide a text at every joint, by the models that have them.
const DIVIDING: [&str; 9] = [
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

/// Patterns that match no separator.
const PASSING: [&str; 3] = [r"\p{N}{1,3}", r"\p{N}", "[一-龥぀-ゟ゠-ヿ]+"];

/// Whether a tokenizer is one whose texts can be cut at joints.
pub(super) fn are_known(tokenizer: &Tokenizer) -> bool {
    let written =
        |part: Option<serde_json::Result<Value>>| part.map_or(Some(Value::Null), Result::ok);
    let normalizer = written(tokenizer.get_normalizer().map(serde_json::to_value));
    let pre_tokenizer = written(tokenizer.get_pre_tokenizer().map(serde_json::to_value));
    parts(tokenizer).is_ok()
        && tokenizer
            .get_added_tokens_decoder()
            .values()
            .all(|token| !touches_joints(token))
        && normalizer
            .is_some_and(|part| flat(&part, "normalizers").iter().all(|part| is_local(part)))
        && pre_tokenizer.is_some_and(|part| divides(&flat(&part, "pretokenizers")))
}

/// The parts of a sequence, or the one part.
fn flat<'p>(part: &'p Value, parts: &str) -> Vec<&'p Value> {
    match part.get(parts).and_then(Value::as_array) {
        Some(all) => all.iter().flat_map(|part| flat(part, parts)).collect(),
        None if part.is_null() => Vec::new(),
        None => vec![part],
    }
}

fn is_local(normalizer: &Value) -> bool {
    matches!(
        normalizer["type"].as_str(),
        Some("NFC" | "NFKC" | "Lowercase")
    )
}

/// Whether these pre-tokenizers divide every text at its joints.
fn divides(pre_tokenizers: &[&Value]) -> bool {
    let mut divided = false;
    for (at, part) in pre_tokenizers.iter().enumerate() {
        let known = match part["type"].as_str() {
            Some("Digits") => true,
            Some("ByteLevel") => {
                divided |= part["use_regex"] != false;
                // What comes behind it would see bytes.
                part["add_prefix_space"] == false && at + 1 == pre_tokenizers.len()
            }
            Some("Split") => {
                let pattern = part["pattern"]["Regex"].as_str().unwrap_or_default();
                let pattern = pattern.replace('\r', r"\r").replace('\n', r"\n");
                let divides = DIVIDING.contains(&pattern.as_str());
                divided |= divides;
                let isolated = part["behavior"] == "Isolated" && part["invert"] == false;
                isolated && (divides || PASSING.contains(&pattern.as_str()))
            }
            _ => false,
        };
        if !known {
            return false;
        }
    }
    divided
}

/// Whether an added token may be found otherwise where a text is cut at a joint. Further separators count, because a
/// normalizer may make one of the known ones of them.
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
    // A token that counts only as a word of its own looks at both its neighbours.
    covers || strips || token.single_word && chars.first().is_some_and(|char| is_separator(*char))
}

#[cfg(test)]
mod tests;
