//! Fast byte pair encoding with the same tokens as the library that engines use.
//!
//! Ordinary texts are tokenized by `fastokens`. Its cost per byte grows with the length of a word,
//! so very long words are tokenized by `bpe`, which takes linear time. Both are compared with the
//! engines' library: on difficult texts before the fast path is used, and on samples of real texts
//! afterwards ([`verified`]).
//!
//! Decision 0009.

pub(crate) mod hard_texts;
mod long_s;
mod long_words;
mod verified;

use fastokens::NewToken;
use serde_json::Value;
use tokenizers::{AddedToken, ModelWrapper, Tokenizer};

use long_s::LongSPosition;
use long_words::LongWordEncoder;
pub(super) use verified::VerifiedTokenizer;

/// When the fast tokenizer is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FastPath {
    /// It is built and verified with the encoder.
    Built,
    /// It is built by [`VerifiedTokenizer::enable_fast_path`].
    Deferred,
}

/// Reason for a tokenizer that the fast library rejects.
const UNSUPPORTED: &str = "the fast library does not support the tokenizer";

/// A tokenizer of the fast library.
pub(super) struct FastTokenizer {
    tokenizer: fastokens::Tokenizer,
    long_words: LongWordEncoder,
    unsupported_long_s: LongSPosition,
}

/// A fast tokenizer without added tokens.
pub(super) struct BaseFastTokenizer(FastTokenizer);

impl BaseFastTokenizer {
    /// Builds the tokenizer from its serialized form. The error is the reason why it is unsupported.
    pub(super) fn new(written: Value) -> Result<Self, &'static str> {
        if !limit_to_one_core() {
            return Err("the fast library uses its own threads");
        }
        let long_words = LongWordEncoder::new(long_words::has_ordered_merges(&written));
        let tokenizer = fastokens::Tokenizer::from_json(written).map_err(|_| UNSUPPORTED)?;
        Ok(Self(FastTokenizer {
            tokenizer,
            long_words,
            unsupported_long_s: LongSPosition::Anywhere,
        }))
    }

    /// Adds the added tokens of the library's tokenizer. The error is the reason why it is
    /// unsupported.
    fn complete(self, library: &Tokenizer) -> Result<FastTokenizer, &'static str> {
        check_supported(library)?;
        let Self(mut fast) = self;
        fast.unsupported_long_s = LongSPosition::for_normalizer(library.get_normalizer());
        let decoder = library.get_added_tokens_decoder();
        let mut added: Vec<_> = decoder.iter().collect();
        added.sort_by_key(|(id, _)| **id);
        let tokens: Vec<NewToken> = added.iter().map(|(_, token)| new_token(token)).collect();
        fast.tokenizer
            .add_tokens(&tokens)
            .map_err(|_| UNSUPPORTED)?;
        let configs = fast.tokenizer.added_token_configs();
        let agrees = configs.len() == decoder.len()
            && configs.iter().all(|config| {
                decoder
                    .get(&config.id)
                    .is_some_and(|token| token.content == config.content)
            });
        agrees
            .then_some(fast)
            .ok_or("the fast library assigns other ids to added tokens")
    }
}

fn new_token(token: &AddedToken) -> NewToken {
    NewToken {
        content: token.content.clone(),
        single_word: token.single_word,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        normalized: token.normalized,
        special: token.special,
    }
}

/// Rejects tokenizers with properties that the fast path does not reproduce.
fn check_supported(tokenizer: &Tokenizer) -> Result<(), &'static str> {
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
    Ok(())
}

impl FastTokenizer {
    /// Converts a tokenizer, or returns the reason why it is unsupported.
    pub(super) fn new(library: &Tokenizer) -> Result<Self, &'static str> {
        check_supported(library)?;
        let written =
            serde_json::to_value(library).map_err(|_| "the tokenizer cannot be serialized")?;
        BaseFastTokenizer::new(written)?.complete(library)
    }

    /// Returns the tokens of a text without special tokens, or `None` if the text is unsupported.
    pub(super) fn ids(&self, text: &str) -> Option<Vec<u32>> {
        if self.unsupported_long_s.is_in(text) {
            return None;
        }
        if long_words::has_long_word(text) {
            return self.long_words.ids(&self.tokenizer, text);
        }
        self.tokenizer.encode_with_special_tokens(text, false).ok()
    }
}

/// Prevents the fast library from starting threads. Returns false if that is not possible. By
/// default, the library distributes long texts over spinning threads, one for each available core,
/// although the cores are busy with other requests. It reads the number of cores only once, so the
/// first call runs on a thread that is pinned to one core.
fn limit_to_one_core() -> bool {
    std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            pin_to_one_core();
            // The first call reads the number of cores, and the library caches it.
            fastokens::fanout::threads()
        });
        // After a panic, the call below reads the number of all cores.
        let _ = pinned.join();
    });
    fastokens::fanout::threads() <= 1
}

#[cfg(target_os = "linux")]
fn pin_to_one_core() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(all) = sched_getaffinity(None) else {
        return;
    };
    if let Some(first) = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)) {
        let mut one = CpuSet::new();
        one.set(first);
        // If pinning is not permitted, the fast library is not used.
        let _ = sched_setaffinity(None, &one);
    }
}

#[cfg(not(target_os = "linux"))]
fn pin_to_one_core() {}

#[cfg(test)]
pub(crate) mod tests;
