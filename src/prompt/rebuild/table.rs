//! What transformers and vLLM have in their lists: the classes of tokenizers by the type of the model, and what each class
//! does with `tokenizer.json`.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use serde::Deserialize;

/// The lists, as `tests/data/tokens/make_classes.py` took them out.
pub(super) static TABLE: LazyLock<Table> = LazyLock::new(|| {
    serde_json::from_str(include_str!("transformers.json"))
        .expect("a test reads the same file at build time")
});

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    #[serde(rename = "transformers")]
    _transformers: String,
    #[serde(rename = "vllm")]
    _vllm: String,
    /// The registered class of each type of model.
    models: HashMap<String, String>,
    /// Types of models of which the registered class is taken, whatever the files name.
    forced: HashSet<String>,
    /// Types of models that vLLM takes as written before transformers is asked.
    as_written: HashSet<String>,
    /// What each class does: `written`, `python`, or the name of the class that builds anew.
    classes: HashMap<String, String>,
}

/// What a class does with `tokenizer.json`.
pub(super) enum Does {
    AsWritten,
    /// It is no tokenizer of the library that we have.
    Python,
    /// It builds around the vocabulary as this class.
    Rebuilds(&'static str),
}

impl Table {
    /// The class that is taken for a type of model whose files name this one; none is `tokenizer.json` as written.
    pub(super) fn chosen<'s>(
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

    /// Whether vLLM takes the tokenizers of a type as written.
    pub(super) fn as_written(&self, model_type: &str) -> bool {
        self.as_written.contains(model_type)
    }

    #[cfg(test)]
    pub(super) fn forced(&self) -> impl Iterator<Item = &str> {
        self.forced.iter().map(String::as_str)
    }

    /// Whether transformers has such a class.
    pub(super) fn knows(&self, class: &str) -> bool {
        self.classes.contains_key(class)
    }

    /// A class that transformers does not know is replaced by the one that takes `tokenizer.json` as it is.
    pub(super) fn does(&'static self, class: &str) -> Does {
        match self.classes.get(class).map(String::as_str) {
            None | Some("written") => Does::AsWritten,
            Some("python") => Does::Python,
            Some(class) => Does::Rebuilds(class),
        }
    }
}
