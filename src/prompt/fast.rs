//! Byte pair encoding of most tokenizers, many times as fast as the library that the engines use, and the same to the token.
//! It is a library too (`fastokens`), for ordinary texts; words without end, which cost it more the longer they are, go to one
//! that takes time in proportion to their length (`bpe`). The engines' library remains the judge: by hard texts before it
//! is used, and by a sample of real ones for as long as it is ([`checked`]).

mod alone;
mod checked;
mod endless;
pub(in crate::prompt) mod hard;

use tokenizers::{ModelWrapper, Tokenizer};

pub(super) use checked::Checked;
use endless::Endless;

/// A tokenizer as the fast library has it.
pub(super) struct Fast {
    tokenizer: fastokens::Tokenizer,
    endless: Endless,
}

impl Fast {
    /// The same as this tokenizer; or why it cannot be had.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
            return Err("it truncates or pads");
        }
        if tokenizer.get_encode_special_tokens() {
            return Err("special tokens are taken for text");
        }
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Err("it is no byte pair encoding");
        };
        let empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return Err("it drops merges by chance");
        }
        if !empty(&model.continuing_subword_prefix) || !empty(&model.end_of_word_suffix) {
            return Err("its tokens are marked as parts of words");
        }
        let written = serde_json::to_value(tokenizer).map_err(|_| "it cannot be written down")?;
        let in_order = endless::in_order(&written, tokenizer);
        let made = alone::run(move || fastokens::Tokenizer::from_json(written));
        let tokenizer = made
            .and_then(Result::ok)
            .ok_or("the fast library does not take it")?;
        if !alone::is_so() {
            return Err("the fast library has threads of its own");
        }
        Ok(Self {
            tokenizer,
            endless: Endless::new(in_order),
        })
    }

    /// The tokens of a text without what the post-processor adds; nothing where that is not for it.
    pub(super) fn ids(&self, text: &str) -> Option<Vec<u32>> {
        if endless::is_in(text) {
            return self.endless.ids(&self.tokenizer, text);
        }
        self.tokenizer.encode_with_special_tokens(text, false).ok()
    }
}

#[cfg(test)]
pub(in crate::prompt) mod tests;
