//! Registry of tokenizers. Models with equal tokenizer files and settings share one.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::LoadError;
use super::bpe_file::{BpeFile, BuiltTokenizer};
use crate::prompt::fast::{FastPath, VerifiedTokenizer};
use crate::prompt::rebuild::{self, AddedTokens, TokenizerClass, TokenizerMetadata};

/// A tokenizer in use. The lock is held while it is loaded.
type TokenizerSlot = Arc<Mutex<Weak<VerifiedTokenizer>>>;

/// Tokenizers in use, by the hash of their source.
static LOADED: LazyLock<Mutex<HashMap<[u8; 32], TokenizerSlot>>> = LazyLock::new(Mutex::default);

/// Everything that a tokenizer depends on.
pub(super) struct TokenizerSource<'s> {
    /// Path of `tokenizer.json`.
    pub(super) path: &'s Path,
    /// Content of `tokenizer.json`.
    pub(super) bytes: &'s [u8],
    /// Content of `tokenizer_config.json`.
    pub(super) settings: &'s Map<String, Value>,
    pub(super) class: TokenizerClass,
    pub(super) metadata: &'s TokenizerMetadata<'s>,
    /// True if special tokens in a text are encoded as text.
    pub(super) encodes_special_tokens: bool,
}

impl TokenizerSource<'_> {
    /// Returns the tokenizer. It is built unless another model uses it.
    pub(super) fn load(&self, fast_path: FastPath) -> Result<Arc<VerifiedTokenizer>, LoadError> {
        let slot = {
            let mut loaded = LOADED.lock();
            loaded.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.lock().strong_count() > 0);
            loaded.entry(self.hash()).or_default().clone()
        };
        // A model with the same tokenizer waits here until it is built.
        let mut slot = slot.lock();
        let tokenizer = match slot.upgrade() {
            Some(tokenizer) => tokenizer,
            None => Arc::new(self.build(fast_path)?.verify()),
        };
        *slot = Arc::downgrade(&tokenizer);
        if fast_path == FastPath::Built {
            // The tokenizer stores the reason of a failure.
            let _ = tokenizer.enable_fast_path();
        }
        Ok(tokenizer)
    }

    fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&(self.bytes.len() as u64).to_le_bytes())
            .update(self.bytes);
        for (key, value) in self.settings {
            // Models with different templates may share a tokenizer.
            if key != "chat_template" {
                hasher.update(format!("{key:?}: {value}, ").as_bytes());
            }
        }
        let Self {
            class,
            metadata,
            encodes_special_tokens,
            ..
        } = self;
        hasher.update(format!("{class:?} {metadata:?} {encodes_special_tokens}").as_bytes());
        hasher.finalize().into()
    }

    fn build(&self, fast_path: FastPath) -> Result<BuiltTokenizer, LoadError> {
        let mut whole: Value =
            serde_json::from_slice(self.bytes).map_err(|error| self.content(error.to_string()))?;
        if self.metadata.lacks_model_type() {
            self.metadata
                .check_without_model_type(&whole)
                .map_err(|problem| self.content(problem))?;
        }
        let listed = match self.class {
            TokenizerClass::AsWritten => &Value::Null,
            _ => &whole,
        };
        let added = AddedTokens::new(self.class, self.settings, listed);
        rebuild::rebuild(&mut whole, self.class, self.metadata)
            .map_err(|problem| self.content(problem))?;
        let built = match BpeFile::split(whole, self.bytes) {
            Ok(file) => file.build(fast_path),
            Err(whole) => self.build_by_library(&whole).map(BuiltTokenizer::from),
        };
        built
            .and_then(|mut built| {
                let tokenizer = &mut built.library;
                added.add_to(tokenizer)?;
                tokenizer.with_truncation(None)?;
                tokenizer.with_padding(None);
                tokenizer.set_encode_special_tokens(self.encodes_special_tokens);
                Ok(built)
            })
            .map_err(|error| self.content(error.to_string()))
    }

    fn build_by_library(&self, whole: &Value) -> tokenizers::Result<Tokenizer> {
        match self.class {
            TokenizerClass::AsWritten => Tokenizer::from_bytes(self.bytes),
            _ => Tokenizer::from_bytes(serde_json::to_vec(whole)?),
        }
    }

    fn content(&self, problem: String) -> LoadError {
        LoadError::content(self.path, problem)
    }
}
