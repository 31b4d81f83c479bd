//! Registry of loaded tokenizers. Loading one takes about a second of CPU time, so a reload reuses
//! those whose files have not changed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use parking_lot::Mutex;
use tracing::{info, warn};
use warmroute_core::block::BlockWindows;
use warmroute_core::worker::ModelName;
use warmroute_metrics::Metrics;
use warmroute_settings::format_elapsed;
use warmroute_tokens::openai::MessageCache;
use warmroute_tokens::prompt::{
    self, Encoder, LoadError, ModelFingerprint, ModelTraits, PromptCache,
};

use crate::config::{Advice, Config, ModelConfig};
use crate::request::{ConfiguredModel, ModelRegistry};

/// Tokenizers in use, by file fingerprint, and their shared prompt cache.
pub(super) struct EncoderRegistry {
    by_fingerprint: Mutex<HashMap<ModelFingerprint, Arc<Encoder>>>,
    by_model: Mutex<Vec<(ModelName, Arc<Encoder>)>>,
    /// Models without a tokenizer, which are logged once.
    untokenized: Mutex<HashSet<ModelName>>,
    prompt_cache: Arc<PromptCache>,
    message_cache: Arc<MessageCache>,
}

/// Models of a configuration, and their tokenizers, which are committed once the configuration is
/// in use.
pub(super) struct LoadedModels {
    pub(super) models: ModelRegistry,
    encoders: HashMap<ModelFingerprint, Arc<Encoder>>,
    by_model: Vec<(ModelName, Arc<Encoder>)>,
    prompt_cache: usize,
}

impl EncoderRegistry {
    /// Creates an empty registry.
    pub(super) fn new(metrics: &Arc<Metrics>) -> Self {
        let prompt_cache = PromptCache::new(0, metrics.clone());
        Self {
            by_fingerprint: Mutex::default(),
            by_model: Mutex::default(),
            untokenized: Mutex::default(),
            message_cache: Arc::new(MessageCache::new(prompt_cache.clone())),
            prompt_cache,
        }
    }

    /// Returns the cache of the messages of earlier bodies, which all models share.
    pub(super) fn message_cache(&self) -> Arc<MessageCache> {
        self.message_cache.clone()
    }

    /// Returns whether a model lacks a tokenizer and did not lack it at the last load. Each reload
    /// loads all models.
    fn is_new_lack(&self, model: &ModelName, lacks_tokenizer: bool) -> bool {
        let mut untokenized = self.untokenized.lock();
        if lacks_tokenizer {
            untokenized.insert(model.clone())
        } else {
            untokenized.remove(model);
            false
        }
    }

    /// Loads the models of a configuration. Tokenizers that are not loaded yet are loaded
    /// concurrently.
    pub(super) async fn load(&self, config: &Config) -> anyhow::Result<LoadedModels> {
        let known = self.by_fingerprint.lock().clone();
        let loading: Vec<_> = config
            .models
            .iter()
            .map(|model| {
                let name = model.name.clone();
                let files = tokenizer_files(model);
                let known = known.clone();
                let traits = template_traits(model);
                let prompt_cache = self.prompt_cache.clone();
                tokio::task::spawn_blocking(move || {
                    files
                        .map(|files| load_encoder(&name, &files, &traits, &known, prompt_cache))
                        .transpose()
                })
            })
            .collect();
        let mut loaded = LoadedModels {
            models: ModelRegistry::default(),
            encoders: HashMap::new(),
            by_model: Vec::new(),
            prompt_cache: config.requests.limits.prompt_cache_size.bytes(),
        };
        for (model, encoder) in config.models.iter().zip(loading) {
            let found = encoder
                .await?
                .with_context(|| format!("model {} cannot be served exactly", model.name))?;
            let lacks_tokenizer = found.is_none() && model.remote_tokenizer.is_none();
            if self.is_new_lack(&model.name, lacks_tokenizer) {
                warn!(model = %model.name, "no tokenizer configured; requests of this model are routed by load only");
            }
            let windows = BlockWindows::new(model.eagle);
            let encoder = found.as_ref().map(|(_, encoder)| encoder.clone());
            loaded.by_model.extend(
                encoder
                    .iter()
                    .map(|encoder| (model.name.clone(), encoder.clone())),
            );
            let served = ConfiguredModel {
                name: model.name.clone(),
                block_size: model.blocks(),
                windows,
                media: model.media_tokens(),
                encoder,
            };
            if let Some(advice) = missing_template_advice(&served) {
                warn!(of = advice.subject, fix = advice.fix, "{}", advice.finding);
            }
            loaded.models.add(served, &model.aliases, &model.adapters);
            loaded.encoders.extend(found);
        }
        Ok(loaded)
    }

    /// Returns the tokenizers in use, by model.
    pub(super) fn by_model(&self) -> Vec<(ModelName, Arc<Encoder>)> {
        self.by_model.lock().clone()
    }

    /// Returns whether `loaded` differs from the tokenizers in use.
    pub(super) fn differs_from(&self, loaded: &LoadedModels) -> bool {
        let current = self.by_fingerprint.lock();
        current.len() != loaded.encoders.len()
            || loaded
                .encoders
                .keys()
                .any(|fingerprint| !current.contains_key(fingerprint))
    }

    /// Replaces the tokenizers in use.
    pub(super) fn commit(&self, loaded: &LoadedModels) {
        self.by_fingerprint.lock().clone_from(&loaded.encoders);
        self.by_model.lock().clone_from(&loaded.by_model);
        self.prompt_cache.resize(loaded.prompt_cache);
    }
}

fn tokenizer_files(model: &ModelConfig) -> Option<prompt::Config> {
    Some(prompt::Config {
        tokenizer: model.tokenizer.clone()?,
        tokenizer_config: model.tokenizer_config.clone(),
        chat_template: model.chat_template.clone(),
    })
}

fn template_traits(model: &ModelConfig) -> ModelTraits {
    ModelTraits {
        name: model.name.as_str().to_owned(),
        engine: model.engine,
        transformers: model.transformers_version,
        tokenizer_class: model.tokenizer_class.clone(),
        media: model.multimodal.clone(),
        render: model.render_options(),
    }
}

fn load_encoder(
    model: &ModelName,
    files: &prompt::Config,
    traits: &ModelTraits,
    known: &HashMap<ModelFingerprint, Arc<Encoder>>,
    cache: Arc<PromptCache>,
) -> Result<(ModelFingerprint, Arc<Encoder>), LoadError> {
    let started = Instant::now();
    // Computed before loading, so that the next reload detects a change in the meantime.
    let fingerprint = files.fingerprint()?.with_traits(traits)?;
    if let Some(encoder) = known.get(&fingerprint) {
        return Ok((fingerprint, encoder.clone()));
    }
    let (encoder, prompt_cache) =
        Encoder::load_with_fast_path(files, traits)?.with_prompt_cache(cache);
    if let Err(reason) = prompt_cache {
        info!(%model, reason, "tokenizer cannot resume prompts; every prompt is tokenized from the start");
    }
    info!(%model, took = format_elapsed(started.elapsed()), "tokenizer loaded");
    Ok((fingerprint, Arc::new(encoder)))
}

/// Returns a warning if the tokenizer of a model has no chat template.
pub(super) fn missing_template_advice(model: &ConfiguredModel) -> Option<Advice> {
    let lacks_template = model
        .encoder
        .as_ref()
        .is_some_and(|encoder| !encoder.has_chat_template());
    lacks_template.then(|| Advice {
        subject: format!("model {}", model.name),
        finding: "it has no chat template (none in tokenizer_config.json, no chat_template.jinja \
            beside it), so every chat request is routed by load only"
            .to_owned(),
        fix: "copy chat_template.jinja from the model, or set `chat_template` of the \
            model"
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tokenizer_is_reported_once() {
        let registry = EncoderRegistry::new(&Arc::new(Metrics::new()));
        let model = ModelName::from("m");
        let reports = [true, true, false, true].map(|lacks| registry.is_new_lack(&model, lacks));
        assert_eq!(reports, [true, false, false, true]);
    }
}
