//! Construction of the library tokenizer and of the fast tokenizer from `tokenizer.json` of a byte
//! pair encoding model.
//!
//! The library deserializes a model through two untyped copies, which takes most of the time and
//! memory of a load. Here, vocabulary and merges are parsed into typed collections, and the library
//! receives them through its builder. Files in other forms are loaded by the library.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::{AddedToken, ModelWrapper, Tokenizer};

use crate::prompt::fast::{BaseFastTokenizer, FastPath, VerifiedTokenizer};

/// A tokenizer and the base of its fast path.
pub(super) struct BuiltTokenizer {
    pub(super) library: Tokenizer,
    /// The fast tokenizer without added tokens. `None` if it is not built yet.
    pub(super) fast_base: Option<BaseFastTokenizer>,
}

impl From<Tokenizer> for BuiltTokenizer {
    fn from(library: Tokenizer) -> Self {
        Self {
            library,
            fast_base: None,
        }
    }
}

impl BuiltTokenizer {
    /// Returns the tokenizer, with its fast path if that was built and agrees with the library.
    pub(super) fn verify(self) -> VerifiedTokenizer {
        let tokenizer = VerifiedTokenizer::new(self.library);
        if let Some(fast_base) = self.fast_base {
            // The tokenizer stores the reason of a failure.
            let _ = tokenizer.enable_base(fast_base);
        }
        tokenizer
    }
}

/// `tokenizer.json`, with vocabulary and merges apart from its other parts.
pub(super) struct BpeFile<'f> {
    /// The tokenizer without vocabulary, merges and added tokens.
    library_base: Tokenizer,
    added: Vec<AddedToken>,
    vocab: Value,
    merges: Value,
    /// Vocabulary and merges as text. They are parsed again, so that both libraries can consume
    /// them.
    raw_model: RawModel<'f>,
}

impl<'f> BpeFile<'f> {
    /// Separates the parts of the file with the content `bytes`. Returns `Err` with the unchanged
    /// content if the model is not byte pair encoding, or is written in an unusual form.
    pub(super) fn split(mut whole: Value, bytes: &'f [u8]) -> Result<Self, Value> {
        // Repeated keys are an error here, while the library takes the last of them.
        let Ok(RawFile { model: raw_model }) = serde_json::from_slice(bytes) else {
            return Err(whole);
        };
        let model = &whole["model"];
        let is_usual = model["type"] == "BPE"
            && model["vocab"].is_object()
            && model["merges"]
                .as_array()
                .is_some_and(|merges| merges.iter().all(is_usual_merge));
        if !is_usual {
            return Err(whole);
        }
        let model = &mut whole["model"];
        let vocab = std::mem::replace(&mut model["vocab"], json!({}));
        let merges = std::mem::replace(&mut model["merges"], json!([]));
        let listed = std::mem::replace(&mut whole["added_tokens"], json!([]));
        match (Tokenizer::deserialize(&whole), parse_added_tokens(&listed)) {
            (Ok(library_base), Some(added)) => Ok(Self {
                library_base,
                added,
                vocab,
                merges,
                raw_model,
            }),
            _ => {
                whole["model"]["vocab"] = vocab;
                whole["model"]["merges"] = merges;
                whole["added_tokens"] = listed;
                Err(whole)
            }
        }
    }

    /// Builds the tokenizer.
    pub(super) fn build(self, fast_path: FastPath) -> tokenizers::Result<BuiltTokenizer> {
        let Self {
            library_base,
            added,
            vocab,
            merges,
            raw_model,
        } = self;
        let written = (fast_path == FastPath::Built)
            .then(|| serialize_base(&library_base, vocab, merges))
            .transpose()?;
        // On one thread, so that the allocator reuses the memory of this step for the next one.
        let fast_base = written.and_then(|written| {
            catch_unwind(AssertUnwindSafe(|| BaseFastTokenizer::new(written)))
                .ok()
                .and_then(Result::ok)
        });
        let mut library = library_base;
        let model = build_model(library.get_model(), &raw_model)?;
        library.with_model(ModelWrapper::BPE(model));
        library.add_tokens(added)?;
        Ok(BuiltTokenizer { library, fast_base })
    }
}

/// Returns the tokenizer without added tokens as the library would write it, so that absent keys
/// have the library's defaults.
fn serialize_base(
    library_base: &Tokenizer,
    vocab: Value,
    merges: Value,
) -> tokenizers::Result<Value> {
    let mut written = serde_json::to_value(library_base)?;
    written["truncation"] = Value::Null;
    written["padding"] = Value::Null;
    written["model"]["vocab"] = vocab;
    written["model"]["merges"] = merges;
    Ok(written)
}

/// Returns true for a pair of tokens, either as an array or as a text with one space. The library
/// skips a line with the version of the file.
fn is_usual_merge(merge: &Value) -> bool {
    match merge {
        Value::String(pair) => !pair.starts_with("#version") && pair.split(' ').count() == 2,
        Value::Array(pair) => pair.len() == 2 && pair.iter().all(Value::is_string),
        _ => false,
    }
}

fn parse_added_tokens(listed: &Value) -> Option<Vec<AddedToken>> {
    if listed.is_null() {
        return Some(Vec::new());
    }
    listed
        .as_array()?
        .iter()
        .map(|token| {
            let has_id = token["id"]
                .as_u64()
                .is_some_and(|id| u32::try_from(id).is_ok());
            has_id
                .then(|| AddedToken::deserialize(token).ok())
                .flatten()
        })
        .collect()
}

#[derive(Deserialize)]
struct RawFile<'f> {
    #[serde(borrow)]
    model: RawModel<'f>,
}

#[derive(Deserialize)]
struct RawModel<'f> {
    #[serde(borrow)]
    vocab: &'f RawValue,
    #[serde(borrow)]
    merges: &'f RawValue,
}

/// Builds the library's model with the settings of `settings`, which has no vocabulary.
fn build_model(settings: &ModelWrapper, raw: &RawModel<'_>) -> tokenizers::Result<BPE> {
    let ModelWrapper::BPE(settings) = settings else {
        return Err("the model is not byte pair encoding".into());
    };
    let vocab: Vocab = serde_json::from_str(raw.vocab.get())?;
    let merges = parse_merges(raw.merges.get())?;
    let mut builder = BpeBuilder::new()
        .vocab_and_merges(vocab, merges)
        .fuse_unk(settings.fuse_unk)
        .byte_fallback(settings.byte_fallback)
        .ignore_merges(settings.ignore_merges);
    if let Some(dropout) = settings.dropout {
        builder = builder.dropout(dropout);
    }
    if let Some(token) = &settings.unk_token {
        builder = builder.unk_token(token.clone());
    }
    if let Some(prefix) = &settings.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(prefix.clone());
    }
    if let Some(suffix) = &settings.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix.clone());
    }
    builder.build()
}

/// Parses the merges, which are either texts with one space or arrays.
fn parse_merges(text: &str) -> tokenizers::Result<Vec<(String, String)>> {
    let Ok(pairs) = serde_json::from_str::<Vec<String>>(text) else {
        return Ok(serde_json::from_str(text)?);
    };
    pairs
        .iter()
        .map(|pair| {
            let (left, right) = pair.split_once(' ').ok_or("a merge is not a pair")?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::fast::hard_texts::PIECES;
    use crate::prompt::fast::tests::qwen_file;

    /// Asserts that the library builds the same tokenizer from the same content.
    fn assert_same_as_library(whole: &Value) {
        let bytes = serde_json::to_vec(whole).unwrap();
        let known = Tokenizer::from_bytes(&bytes).unwrap();
        let file = BpeFile::split(whole.clone(), &bytes).ok().unwrap();
        let built = file.build(FastPath::Built).unwrap();
        assert_eq!(built.library.get_model(), known.get_model());
        assert_eq!(
            built.library.get_added_tokens_decoder(),
            known.get_added_tokens_decoder()
        );
        let parts = |tokenizer: &Tokenizer| {
            serde_json::json!([
                tokenizer.get_normalizer(),
                tokenizer.get_pre_tokenizer(),
                tokenizer.get_post_processor(),
                tokenizer.get_decoder(),
            ])
        };
        assert_eq!(parts(&built.library), parts(&known));
        let verified = built.verify();
        assert!(verified.has_fast_path() && verified.disabled_reason().is_none());
        for text in [PIECES.concat(), PIECES.join(" ")] {
            let known = known.encode_fast(text.as_str(), false).unwrap();
            assert_eq!(verified.ids(&text).unwrap(), known.get_ids());
        }
    }

    #[test]
    fn built_tokenizer_equals_that_of_library() {
        let file = qwen_file();
        assert_same_as_library(&file);
        let mut pairs = file;
        let model = &mut pairs["model"];
        model["ignore_merges"] = json!(true);
        for merge in model["merges"].as_array_mut().unwrap() {
            *merge = merge.as_str().unwrap().split(' ').collect();
        }
        assert_same_as_library(&pairs);
    }

    #[test]
    fn unusual_file_is_left_to_library() {
        let file = json!({"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a a"]}});
        let unigram = json!({"model": {"type": "Unigram", "vocab": [], "unk_id": null}});
        for whole in [file, unigram, json!([1]), json!({"model": "x"})] {
            let bytes = serde_json::to_vec(&whole).unwrap();
            assert_eq!(BpeFile::split(whole.clone(), &bytes).err(), Some(whole));
        }
        // The library takes the last of the repeated keys.
        let repeated = br#"{"added_tokens": [], "model": {"type": "BPE", "vocab": {"b": 0}, "vocab": {"a": 0}, "merges": []}}"#;
        let whole: Value = serde_json::from_slice(repeated).unwrap();
        assert_eq!(BpeFile::split(whole.clone(), repeated).err(), Some(whole));
    }
}
