//! Words without end: a megabyte of one letter, of spaces, of a genome. Pre-tokenizers leave them whole, and byte pair encoding
//! takes longer for each byte of them the more there are. The `bpe` library does not, but knows only vocabularies whose
//! numbers are the order of their merges; whether it has understood one shows on the hard texts, which have such words.

use std::ops::Range;
use std::sync::OnceLock;

use bpe::byte_pair_encoding::{BytePairEncoding, find_hash_factor_for_dictionary};
use fastokens::Tokenizer;
use tokenizers::ModelWrapper;

/// Bytes from which on a word is endless; more than any token has.
pub(super) const LONG: usize = 512;

/// A vocabulary for endless words.
pub(super) struct Endless {
    /// In the order of their numbers.
    tokens: Vec<Vec<u8>>,
    /// Of the characters by which vocabularies write bytes.
    bytes: Box<[u8]>,
    /// Made of the tokens when it is needed first, which most processes never do.
    made: OnceLock<BytePairEncoding>,
}

/// Whether a text may have such words: whether it has a stretch of one kind of character that is as long.
pub(super) fn is_in(text: &str) -> bool {
    // Such a stretch covers one of these pieces wholly.
    let starts = (0..text.len()).step_by(LONG / 2);
    starts.into_iter().any(|start| is_of_one_kind(text, start..start + LONG / 2))
}

fn is_of_one_kind(text: &str, piece: Range<usize>) -> bool {
    if piece.end > text.len() {
        return false;
    }
    let piece = &text[text.ceil_char_boundary(piece.start)..text.floor_char_boundary(piece.end)];
    let mut kinds = piece.chars().map(kind);
    // Most pieces end after the first word.
    kinds.next().is_some_and(|first| kinds.all(|kind| kind == first))
}

/// What pre-tokenizers tell apart.
fn kind(char: char) -> u8 {
    match char {
        'a'..='z' | 'A'..='Z' => 0,
        _ if char.is_whitespace() => 1,
        _ if char.is_numeric() => 2,
        _ if char.is_alphabetic() => 0,
        _ => 3,
    }
}

impl Endless {
    /// The vocabulary of a tokenizer, where it can be one.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let mut vocabulary: Vec<(u32, String)> = model.get_vocab().into_iter().map(|(token, id)| (id, token)).collect();
        vocabulary.sort_unstable();
        let whole = vocabulary.iter().zip(0..).all(|((id, _), at)| *id == at);
        let bytes = spelling();
        let spelled = |token: &str| token.chars().map(|char| byte_of(&bytes, char)).collect::<Option<Vec<u8>>>();
        let tokens: Vec<Vec<u8>> = vocabulary.iter().map(|(_, token)| spelled(token)).collect::<Option<_>>()?;
        let short = tokens.iter().all(|token| (1..LONG).contains(&token.len()));
        (whole && short).then(|| Self { tokens, bytes, made: OnceLock::new() })
    }

    /// The tokens of a text with such words.
    pub(super) fn ids(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        let mut words = tokenizer.build_pre_tokenized(text);
        tokenizer.pre_tokenizer()?.pre_tokenize(&mut words).ok()?;
        let mut ids = Vec::with_capacity(text.len() / 3);
        for split in words.splits() {
            let word = words.split_text(split);
            match split.token_id {
                Some(id) => ids.push(id),
                None if word.len() > LONG => {
                    let bytes: Option<Vec<u8>> = word.chars().map(|char| byte_of(&self.bytes, char)).collect();
                    ids.extend(self.made().encode_via_backtracking(&bytes?));
                }
                None => tokenizer.model().tokenize_into(word, &mut ids).ok()?,
            }
        }
        Some(ids)
    }

    fn made(&self) -> &BytePairEncoding {
        self.made.get_or_init(|| {
            let factor = find_hash_factor_for_dictionary(self.tokens.iter().cloned());
            BytePairEncoding::from_dictionary(self.tokens.iter().cloned(), Some(factor))
        })
    }
}

/// What each character stands for by which vocabularies write bytes: itself where it can be seen, or one of those that follow
/// the first 256, in order.
fn spelling() -> Box<[u8]> {
    let seen = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    (0..=u8::MAX).chain((0..=u8::MAX).filter(|byte| !seen(byte))).collect()
}

fn byte_of(bytes: &[u8], char: char) -> Option<u8> {
    bytes.get(char as usize).copied()
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
