//! Fast byte pair encoding with the same tokens as the library that engines use.
//!
//! Ordinary texts are tokenized by `fastokens`. Its cost per byte grows with the length of a word,
//! so very long words are tokenized by `bpe`, which takes linear time. Both are compared with the
//! engines' library: on difficult texts before the fast path is used, and on samples of real texts
//! afterwards ([`verified`]).

pub(in crate::prompt) mod hard_texts;
mod long_words;
mod single_core;
mod verified;

use memchr::memmem;
use tokenizers::{ModelWrapper, Tokenizer};

use long_words::LongWordEncoder;
pub(super) use verified::VerifiedTokenizer;

/// Characters that disable the fast path: U+017F (long s), and U+1E9B, whose NFD form contains it.
/// The engines' `tokenizers` library folds the long s to `s`, so `'ſ` matches `(?i:'s)`.
/// `fastokens` accepts only ASCII letters there.
const UNSUPPORTED_CHARS: [&str; 2] = ["\u{17f}", "\u{1e9b}"];

/// A tokenizer of the fast library.
pub(super) struct FastTokenizer {
    tokenizer: fastokens::Tokenizer,
    long_words: LongWordEncoder,
}

impl FastTokenizer {
    /// Converts a tokenizer, or returns the reason why it is unsupported.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
            return Err("the tokenizer truncates or pads");
        }
        if tokenizer.get_encode_special_tokens() {
            return Err("special tokens are encoded as text");
        }
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Err("the model is not byte pair encoding");
        };
        let empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return Err("the tokenizer uses BPE dropout");
        }
        if !empty(&model.continuing_subword_prefix) || !empty(&model.end_of_word_suffix) {
            return Err("the tokens are marked as parts of words");
        }
        let written =
            serde_json::to_value(tokenizer).map_err(|_| "the tokenizer cannot be serialized")?;
        let in_order = long_words::has_ordered_merges(&written, tokenizer);
        let made = single_core::run_on_one_core(move || fastokens::Tokenizer::from_json(written));
        let tokenizer = made
            .and_then(Result::ok)
            .ok_or("the fast library does not support the tokenizer")?;
        if !single_core::is_single_threaded() {
            return Err("the fast library uses its own threads");
        }
        Ok(Self {
            tokenizer,
            long_words: LongWordEncoder::new(in_order),
        })
    }

    /// Returns the tokens of a text without special tokens, or `None` if the text is unsupported.
    pub(super) fn ids(&self, text: &str) -> Option<Vec<u32>> {
        if has_unsupported_char(text) {
            return None;
        }
        if long_words::has_long_word(text) {
            return self.long_words.ids(&self.tokenizer, text);
        }
        self.tokenizer.encode_with_special_tokens(text, false).ok()
    }
}

fn has_unsupported_char(text: &str) -> bool {
    UNSUPPORTED_CHARS
        .iter()
        .any(|char| memmem::find(text.as_bytes(), char.as_bytes()).is_some())
}

#[cfg(test)]
pub(in crate::prompt) mod tests;
