//! Encoding of very long words, such as a megabyte of one letter or of spaces. Pre-tokenizers do
//! not split them, and ordinary byte pair encoding takes superlinear time. The `bpe` library takes
//! linear time, but requires that token ids are ordered by merge. To check whether it supports a
//! vocabulary, its tokens are compared with those of `fastokens` on some words.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use bpe::byte_pair_encoding::{BytePairEncoding, find_hash_factor_for_dictionary};
use fastokens::Tokenizer;
use icu_properties::CodePointMapData;
use icu_properties::props::{GeneralCategory, GeneralCategoryGroup};
use serde_json::Value;

/// Minimum length of a long word in bytes. No token is that long.
pub(super) const LONG_WORD_BYTES: usize = 512;

/// Repeated pieces of the words on which both libraries must agree.
const COMPARED_WORDS: [&str; 8] = ["a", "ab", " ", "\n", "0", "=", "é中", "qzxjkvb"];

/// Encoder for long words, built on first use, because most processes never need it.
pub(super) struct LongWordEncoder(OnceLock<Option<LinearBpe>>);

/// Encoder with linear running time.
struct LinearBpe {
    encoding: BytePairEncoding,
    /// The byte that each character of a byte-level vocabulary represents.
    bytes: Box<[Option<u8>]>,
}

/// Returns true if a text may contain a long word: a long stretch of characters of one kind.
pub(super) fn has_long_word(text: &str) -> bool {
    // A long word covers at least one of these pieces completely.
    let starts = (0..text.len()).step_by(LONG_WORD_BYTES / 2);
    starts
        .into_iter()
        .any(|start| has_one_char_kind(text, start..start + LONG_WORD_BYTES / 2))
}

fn has_one_char_kind(text: &str, piece: Range<usize>) -> bool {
    if piece.end > text.len() {
        return false;
    }
    let piece = &text[text.ceil_char_boundary(piece.start)..text.floor_char_boundary(piece.end)];
    let mut common = ANY;
    // In most pieces, the check ends at the first change of the character kind.
    piece.chars().all(|char| {
        common &= char_kinds(char);
        common != 0
    })
}

/// Character kinds that pre-tokenizers distinguish, as bits.
const LETTER: u8 = 1;
const SPACE: u8 = 2;
const NUMBER: u8 = 4;
const OTHER: u8 = 8;
const ANY: u8 = LETTER | SPACE | NUMBER | OTHER;

/// Returns the possible kinds of a character. Marks belong to letters or other characters,
/// depending on the pre-tokenizer.
fn char_kinds(char: char) -> u8 {
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

/// Returns true if the token ids of a serialized tokenizer are ordered by merge. Several merges may
/// produce the same token.
pub(super) fn has_ordered_merges(written: &Value) -> bool {
    let model = &written["model"];
    let mut token = String::new();
    let made = |merge: &Value| {
        token.clear();
        match merge {
            Value::String(pair) => token.extend(pair.splitn(2, ' ')),
            Value::Array(pair) => token.extend(pair.iter().filter_map(Value::as_str)),
            _ => return None,
        }
        model["vocab"].get(token.as_str())?.as_u64()
    };
    model["merges"].as_array().is_some_and(|merges| {
        merges
            .iter()
            .map(made)
            .is_sorted_by(|a, b| a.is_some() && a <= b)
    })
}

impl LongWordEncoder {
    /// Creates the encoder. If merges are not in order, it supports no text.
    pub(super) fn new(in_order: bool) -> Self {
        Self(if in_order {
            OnceLock::new()
        } else {
            OnceLock::from(None)
        })
    }

    /// Returns the tokens of a text with long words, or `None` if it is unsupported.
    pub(super) fn ids(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        let linear = self
            .0
            .get_or_init(|| {
                catch_unwind(AssertUnwindSafe(|| LinearBpe::from_tokenizer(tokenizer)))
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
                None if word.len() > LONG_WORD_BYTES => ids.extend(linear.ids(word)?),
                None => tokenizer.model().tokenize_into(word, &mut ids).ok()?,
            }
        }
        Some(ids)
    }
}

impl LinearBpe {
    /// Builds the encoder for a tokenizer. Returns `None` if its vocabulary is not supported.
    fn from_tokenizer(tokenizer: &Tokenizer) -> Option<Self> {
        let model = tokenizer.model();
        let bytes = byte_chars();
        let spelled = |id: u32| -> Option<Vec<u8>> {
            model
                .id_to_token(id)?
                .chars()
                .map(|char| byte_of_char(&bytes, char))
                .collect()
        };
        let tokens: Vec<Vec<u8>> = (0..u32::try_from(model.vocab_size()).ok()?)
            .map(spelled)
            .collect::<Option<_>>()?;
        if !tokens
            .iter()
            .all(|token| (1..LONG_WORD_BYTES).contains(&token.len()))
        {
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
        COMPARED_WORDS.iter().all(|piece| {
            let word = piece.repeat(2 * LONG_WORD_BYTES / piece.len());
            let word: String = word
                .bytes()
                .map(|byte| written[usize::from(byte)])
                .collect();
            let known = tokenizer.model().tokenize(&word).ok();
            known.is_some() && known == self.ids(&word)
        })
    }

    /// Returns the tokens of a word that is written in the characters of the vocabulary.
    fn ids(&self, word: &str) -> Option<Vec<u32>> {
        let bytes: Vec<u8> = word
            .chars()
            .map(|char| byte_of_char(&self.bytes, char))
            .collect::<Option<_>>()?;
        Some(self.encoding.encode_via_backtracking(&bytes))
    }
}

/// Returns the byte of each character in byte-level vocabularies: printable bytes represent
/// themselves, and the others use the characters from 256 in order.
fn byte_chars() -> Box<[Option<u8>]> {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let bytes = 0..=u8::MAX;
    bytes
        .clone()
        .map(|byte| seen(byte).then_some(byte))
        .chain(bytes.filter(|byte| !seen(*byte)).map(Some))
        .collect()
}

fn byte_of_char(bytes: &[Option<u8>], char: char) -> Option<u8> {
    *bytes.get(char as usize)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_detected_in_texts() {
        for (text, expected) in [
            ("a".repeat(LONG_WORD_BYTES), true),
            (
                format!("some words {} and more", " ".repeat(LONG_WORD_BYTES)),
                true,
            ),
            (format!("é{}", "é中".repeat(LONG_WORD_BYTES)), true),
            ("=".repeat(2 * LONG_WORD_BYTES), true),
            (" \u{3000}\t".repeat(LONG_WORD_BYTES), true),
            ("!。".repeat(LONG_WORD_BYTES), true),
            ("Ⓐ!".repeat(LONG_WORD_BYTES), true),
            ("e\u{301}".repeat(LONG_WORD_BYTES), true),
            ("!\u{301}".repeat(LONG_WORD_BYTES), true),
            ("हिन्दी".repeat(LONG_WORD_BYTES), true),
            ("½٣Ⅷ".repeat(LONG_WORD_BYTES), true),
            ("一句话，然后是另一句话。".repeat(LONG_WORD_BYTES), false),
            ("a b".repeat(LONG_WORD_BYTES), false),
            ("word ".repeat(4 * LONG_WORD_BYTES), false),
            ("a".repeat(LONG_WORD_BYTES / 2 - 1), false),
            (String::new(), false),
        ] {
            assert_eq!(has_long_word(&text), expected, "{}", text.len());
        }
    }
}
