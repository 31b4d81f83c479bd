//! Fingerprint of a model's files, to detect changes and to share encoders.

use std::path::Path;

use warmroute_settings::read_regular_file;

use super::{Config, LoadError, MAX_MODEL_FILE, MODEL_CONFIG_NAME, find_file};
use crate::prompt::engine::ModelTraits;
use crate::prompt::media::config::MediaConfig;

/// Hash of a model's files and traits. Equal fingerprints produce equal encoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelFingerprint([u8; 32]);

impl ModelFingerprint {
    /// Adds the model's traits to the hash.
    pub fn with_traits(self, traits: &ModelTraits) -> Result<Self, LoadError> {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        // The name matters only for the ids of media items. Other models may share an encoder.
        let name = traits.media.as_ref().map(|_| traits.name.as_str());
        let engine = traits.engine;
        let class = &traits.tokenizer_class;
        hasher.update(
            format!(
                "{name:?} {engine:?} {:?} {class:?} {:?} {:?}",
                traits.transformers, traits.media, traits.render
            )
            .as_bytes(),
        );
        for path in traits.media.iter().flat_map(MediaConfig::files) {
            let bytes =
                read_regular_file(path, MAX_MODEL_FILE).map_err(|source| LoadError::Read {
                    path: path.to_owned(),
                    source,
                })?;
            hasher
                .update(&(bytes.len() as u64).to_le_bytes())
                .update(&bytes);
        }
        Ok(Self(hasher.finalize().into()))
    }
}

impl Config {
    /// Computes the fingerprint of the current files.
    pub fn fingerprint(&self) -> Result<ModelFingerprint, LoadError> {
        let directory = self.tokenizer.parent().unwrap_or(Path::new(""));
        let config = self
            .tokenizer_config
            .clone()
            .or_else(|| find_file(directory, "tokenizer_config.json"));
        let config_directory = config
            .as_deref()
            .and_then(Path::parent)
            .unwrap_or(directory);
        let template = self
            .chat_template
            .clone()
            .or_else(|| find_file(config_directory, "chat_template.jinja"));
        let special_tokens = find_file(config_directory, "special_tokens_map.json");
        let model = find_file(config_directory, MODEL_CONFIG_NAME);
        let mut hasher = blake3::Hasher::new();
        for file in [
            Some(self.tokenizer.clone()),
            config,
            template,
            special_tokens,
            model,
        ] {
            // Absent and empty files differ, and the length prefix separates the files.
            let Some(path) = file else {
                hasher.update(&[0]);
                continue;
            };
            let bytes = read_regular_file(&path, MAX_MODEL_FILE)
                .map_err(|source| LoadError::Read { path, source })?;
            hasher
                .update(&[1])
                .update(&(bytes.len() as u64).to_le_bytes())
                .update(&bytes);
        }
        Ok(ModelFingerprint(hasher.finalize().into()))
    }
}
