//! Tables of transformers and vLLM: the tokenizer class of each model type, and the treatment of
//! `tokenizer.json` by each class.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use serde::Deserialize;

/// The tables, as extracted by `tests/data/tokens/make_classes.py`.
pub(super) static CLASS_TABLE: LazyLock<TokenizerClassTable> = LazyLock::new(|| {
    serde_json::from_str(include_str!("transformers.json"))
        .expect("the file is part of the program, and tests parse it")
});

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TokenizerClassTable {
    #[serde(rename = "transformers")]
    _transformers: String,
    #[serde(rename = "vllm")]
    _vllm: String,
    /// Registered class of each model type.
    models: HashMap<String, String>,
    /// Model types that override the class named in the files.
    forced: HashSet<String>,
    /// Model types whose tokenizers vLLM builds as written without consulting transformers.
    as_written: HashSet<String>,
    /// Behavior of each class: `written`, `python`, or the name of the class that rebuilds.
    classes: HashMap<String, String>,
}

/// Treatment of `tokenizer.json` by a class.
pub(super) enum ClassBehavior {
    AsWritten,
    /// The class is implemented in Python.
    Python,
    /// The class builds the tokenizer from the vocabulary in the same way as this class.
    RebuildsAs(&'static str),
}

impl TokenizerClassTable {
    /// Returns the class for a model type whose files name `named`. `None` means that the tokenizer
    /// is built as written.
    pub(super) fn choose_class<'s>(
        &'static self,
        model_type: &str,
        named: Option<&'s str>,
    ) -> Option<&'s str> {
        let named = named.map(|named| named.strip_suffix("Fast").unwrap_or(named));
        let registered = self.models.get(model_type).map(String::as_str);
        match (registered, named) {
            _ if self.as_written.contains(model_type) => None,
            (Some("TokenizersBackend"), Some(_)) => None,
            (Some(registered), Some(named))
                if registered != named && !self.forced.contains(model_type) =>
            {
                Some(named)
            }
            (Some(registered), _) => Some(registered),
            (None, named) => named,
        }
    }

    /// Returns true if vLLM builds the tokenizers of a model type as written.
    pub(super) fn as_written(&self, model_type: &str) -> bool {
        self.as_written.contains(model_type)
    }

    #[cfg(test)]
    pub(super) fn forced(&self) -> impl Iterator<Item = &str> {
        self.forced.iter().map(String::as_str)
    }

    /// Returns true if transformers has the class.
    pub(super) fn contains_class(&self, class: &str) -> bool {
        self.classes.contains_key(class)
    }

    /// Returns the behavior of a class. transformers replaces an unknown class with the one that
    /// builds tokenizers as written.
    pub(super) fn behavior_of(&'static self, class: &str) -> ClassBehavior {
        match self.classes.get(class).map(String::as_str) {
            None | Some("written") => ClassBehavior::AsWritten,
            Some("python") => ClassBehavior::Python,
            Some(class) => ClassBehavior::RebuildsAs(class),
        }
    }
}
