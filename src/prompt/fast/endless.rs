//! Words without end: a megabyte of one letter, of spaces, of a genome. Pre-tokenizers leave them whole, and byte pair encoding
//! takes longer for each byte of them the more there are. The `bpe` library does not, but knows only vocabularies whose
//! numbers are the order of their merges; whether it has understood one shows on words that both can do.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use bpe::byte_pair_encoding::{BytePairEncoding, find_hash_factor_for_dictionary};
use fastokens::Tokenizer;
use icu_properties::CodePointMapData;
use icu_properties::props::{GeneralCategory, GeneralCategoryGroup};
use serde_json::Value;

/// Bytes from which on a word is endless; more than any token has.
pub(super) const LONG: usize = 512;

/// Words that both libraries must have the same tokens for: each of these pieces again and again.
const ALIKE: [&str; 8] = ["a", "ab", " ", "\n", "0", "=", "é中", "qzxjkvb"];

/// A vocabulary for endless words, made when it is needed first, which most processes never do.
pub(super) struct Endless(OnceLock<Option<Linear>>);

/// What takes linear time.
struct Linear {
    encoding: BytePairEncoding,
    /// Of the characters by which vocabularies write bytes.
    bytes: Box<[Option<u8>]>,
}

/// Whether a text may have such words: whether it has a stretch of one kind of character that is as long.
pub(super) fn is_in(text: &str) -> bool {
    // Such a stretch covers one of these pieces wholly.
    let starts = (0..text.len()).step_by(LONG / 2);
    starts
        .into_iter()
        .any(|start| is_of_one_kind(text, start..start + LONG / 2))
}

fn is_of_one_kind(text: &str, piece: Range<usize>) -> bool {
    if piece.end > text.len() {
        return false;
    }
    let piece = &text[text.ceil_char_boundary(piece.start)..text.floor_char_boundary(piece.end)];
    let mut common = ANY;
    // Most pieces end after the first word.
    piece.chars().all(|char| {
        common &= kinds(char);
        common != 0
    })
}

/// What pre-tokenizers tell apart, as bits.
const LETTER: u8 = 1;
const SPACE: u8 = 2;
const NUMBER: u8 = 4;
const OTHER: u8 = 8;
const ANY: u8 = LETTER | SPACE | NUMBER | OTHER;

/// What a character may be a part of. Marks go with letters or with the rest, as a pre-tokenizer likes.
fn kinds(char: char) -> u8 {
    match char {
        'a'..='z' | 'A'..='Z' => return LETTER,
        '0'..='9' => return NUMBER,
        _ if char.is_whitespace() => return SPACE,
        _ if char.is_ascii() => return OTHER,
        _ => {}
    }
    let category = CodePointMapData::<GeneralCategory>::new().get(char);
    let is = |group: GeneralCategoryGroup| group.contains(category);
    match category {
        _ if is(GeneralCategoryGroup::Letter) => LETTER,
        _ if is(GeneralCategoryGroup::Mark) => LETTER | OTHER,
        _ if is(GeneralCategoryGroup::Number) => NUMBER,
        _ => OTHER,
    }
}

/// Whether the numbers of tokens are the order of their merges. More than one merge may make a token.
pub(super) fn in_order(written: &Value, tokenizer: &tokenizers::Tokenizer) -> bool {
    let merges = written.pointer("/model/merges").and_then(Value::as_array);
    let made = |merge: &Value| match merge {
        Value::String(pair) => tokenizer.token_to_id(&pair.replacen(' ', "", 1)),
        Value::Array(pair) => {
            tokenizer.token_to_id(&pair.iter().filter_map(Value::as_str).collect::<String>())
        }
        _ => None,
    };
    merges.is_some_and(|merges| {
        merges
            .iter()
            .map(made)
            .is_sorted_by(|a, b| a.is_some() && a <= b)
    })
}

impl Endless {
    /// One for a vocabulary whose numbers are the order of its merges, or for none.
    pub(super) fn new(in_order: bool) -> Self {
        Self(if in_order {
            OnceLock::new()
        } else {
            OnceLock::from(None)
        })
    }

    /// The tokens of a text with such words; nothing where only others can say.
    pub(super) fn ids(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        let linear = self
            .0
            .get_or_init(|| {
                catch_unwind(AssertUnwindSafe(|| Linear::of(tokenizer)))
                    .ok()
                    .flatten()
            })
            .as_ref()?;
        let mut words = tokenizer.build_pre_tokenized(text);
        tokenizer.pre_tokenizer()?.pre_tokenize(&mut words).ok()?;
        let mut ids = Vec::with_capacity(text.len() / 3);
        for split in words.splits() {
            let word = words.split_text(split);
            match split.token_id {
                Some(id) => ids.push(id),
                None if word.len() > LONG => ids.extend(linear.ids(word)?),
                None => tokenizer.model().tokenize_into(word, &mut ids).ok()?,
            }
        }
        Some(ids)
    }
}

impl Linear {
    /// The vocabulary of a tokenizer, where it can be one.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let (model, bytes) = (tokenizer.model(), spelling());
        let spelled = |id: u32| -> Option<Vec<u8>> {
            model
                .id_to_token(id)?
                .chars()
                .map(|char| byte_of(&bytes, char))
                .collect()
        };
        let tokens: Vec<Vec<u8>> = (0..u32::try_from(model.vocab_size()).ok()?)
            .map(spelled)
            .collect::<Option<_>>()?;
        if !tokens.iter().all(|token| (1..LONG).contains(&token.len())) {
            return None;
        }
        let factor = find_hash_factor_for_dictionary(tokens.iter().cloned());
        let linear = Self {
            encoding: BytePairEncoding::from_dictionary(tokens, Some(factor)),
            bytes,
        };
        linear.agrees(tokenizer).then_some(linear)
    }

    fn agrees(&self, tokenizer: &Tokenizer) -> bool {
        let mut written = vec!['\0'; 256];
        (0_u32..).zip(&self.bytes).for_each(|(code, byte)| {
            byte.iter().for_each(|byte| {
                written[usize::from(*byte)] = char::from_u32(code).unwrap_or_default()
            });
        });
        ALIKE.iter().all(|piece| {
            let word = piece.repeat(2 * LONG / piece.len());
            let word: String = word
                .bytes()
                .map(|byte| written[usize::from(byte)])
                .collect();
            let known = tokenizer.model().tokenize(&word).ok();
            known.is_some() && known == self.ids(&word)
        })
    }

    /// The tokens of a word as vocabularies write it.
    fn ids(&self, word: &str) -> Option<Vec<u32>> {
        let bytes: Vec<u8> = word
            .chars()
            .map(|char| byte_of(&self.bytes, char))
            .collect::<Option<_>>()?;
        Some(self.encoding.encode_via_backtracking(&bytes))
    }
}

/// What each character stands for by which vocabularies write bytes: itself where it can be seen, or one of those that follow
/// the first 256, in order.
fn spelling() -> Box<[Option<u8>]> {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let bytes = 0..=u8::MAX;
    bytes
        .clone()
        .map(|byte| seen(byte).then_some(byte))
        .chain(bytes.filter(|byte| !seen(*byte)).map(Some))
        .collect()
}

fn byte_of(bytes: &[Option<u8>], char: char) -> Option<u8> {
    *bytes.get(char as usize)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_with_a_long_stretch_of_one_kind_are_found() {
        for (text, expected) in [
            ("a".repeat(LONG), true),
            (format!("some words {} and more", " ".repeat(LONG)), true),
            (format!("é{}", "é中".repeat(LONG)), true),
            ("=".repeat(2 * LONG), true),
            (" \u{3000}\t".repeat(LONG), true),
            ("!。".repeat(LONG), true),
            ("Ⓐ!".repeat(LONG), true),
            ("e\u{301}".repeat(LONG), true),
            ("!\u{301}".repeat(LONG), true),
            ("हिन्दी".repeat(LONG), true),
            ("½٣Ⅷ".repeat(LONG), true),
            ("一句话，然后是另一句话。".repeat(LONG), false),
            ("a b".repeat(LONG), false),
            ("word ".repeat(4 * LONG), false),
            ("a".repeat(LONG / 2 - 1), false),
            (String::new(), false),
        ] {
            assert_eq!(is_in(&text), expected, "{}", text.len());
        }
    }
}
