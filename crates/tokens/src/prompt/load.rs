//! Loading of encoders.

use super::engine::ModelTraits;
use super::fast::FastPath;
use super::media::MediaRules;
use super::model_files::{self, Config, LoadError, ModelFiles};
use super::template::ChatTemplates;
use super::{Encoder, tokenizer_parts};

impl Encoder {
    /// Loads tokenizer and chat template. Fails with the name of the first feature that cannot be
    /// reproduced exactly.
    pub fn load(config: &Config) -> Result<Self, LoadError> {
        Self::load_with_traits(config, &ModelTraits::default())
    }

    /// Loads an encoder like [`Encoder::load`], with the traits of the model and its engine.
    pub fn load_with_traits(config: &Config, traits: &ModelTraits) -> Result<Self, LoadError> {
        Self::load_files(config, traits, FastPath::Deferred)
    }

    /// Loads an encoder like [`Encoder::load_with_traits`] and enables its fast path, if the
    /// tokenizer supports it. This takes less time and memory than enabling it later.
    pub fn load_with_fast_path(config: &Config, traits: &ModelTraits) -> Result<Self, LoadError> {
        Self::load_files(config, traits, FastPath::Built)
    }

    fn load_files(
        config: &Config,
        traits: &ModelTraits,
        fast_path: FastPath,
    ) -> Result<Self, LoadError> {
        let ModelFiles {
            tokenizer,
            templates,
            special_tokens,
            special_tokens_mismatch,
        } = model_files::load(config, traits, fast_path)?;
        let library = tokenizer.library();
        let templates = templates
            .map(|sources| ChatTemplates::compile(sources, special_tokens, jiff::Zoned::now))
            .transpose()?;
        let templates =
            templates.map(|templates| templates.with_engine(traits.engine, &traits.render));
        let id_of = |token: &str| library.token_to_id(token);
        let media_rules = traits
            .media
            .as_ref()
            .map(|media| MediaRules::new(media, &traits.name, id_of))
            .transpose();
        let media_rules =
            media_rules.map_err(|problem| LoadError::content(&config.tokenizer, problem))?;
        let media_rules = media_rules.unwrap_or_default();
        Ok(Self {
            frame: tokenizer_parts::find_frame(library).ok(),
            tokenizer,
            templates,
            special_tokens_mismatch,
            engine: traits.engine,
            media_rules,
            resuming_tokenizer: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn models_with_equal_tokenizers_share_it() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let files = Config {
            tokenizer: root.join("examples/models/qwen2.5/tokenizer.json.gz"),
            tokenizer_config: None,
            chat_template: None,
        };
        let traits = |name: &str, class: Option<&str>| ModelTraits {
            name: name.to_owned(),
            tokenizer_class: class.map(str::to_owned),
            ..ModelTraits::default()
        };
        let first = Encoder::load_with_traits(&files, &traits("first", None)).unwrap();
        assert!(!first.tokenizer.has_fast_path());
        let second = Encoder::load_with_fast_path(&files, &traits("second", None)).unwrap();
        assert!(Arc::ptr_eq(&first.tokenizer, &second.tokenizer));
        assert!(first.tokenizer.has_fast_path());
        let other = traits("other", Some("TokenizersBackend"));
        let other = Encoder::load_with_traits(&files, &other).unwrap();
        assert!(!Arc::ptr_eq(&first.tokenizer, &other.tokenizer));
    }
}
