//! The tokenizers that are loaded. Each takes half a second of one core, so one whose files say the same as before is used
//! again when the configuration is reloaded.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::offline::without_template;
use crate::block::Windows;
use crate::config::{Config, ModelConfig};
use crate::intake::{Model, Models};
use crate::metrics::Metrics;
use crate::prompt::{self, Encoder, Fingerprint, LoadError, PromptCache, Traits};
use crate::worker::ModelName;

/// What is in use, by what the files say, and what all of them keep of earlier prompts.
pub(super) struct Encoders {
    kept: Mutex<HashMap<Fingerprint, Arc<Encoder>>>,
    named: Mutex<Vec<(ModelName, Arc<Encoder>)>>,
    prompts: Arc<PromptCache>,
}

/// The models of a configuration, and their tokenizers to be kept once it is in use.
pub(super) struct Loaded {
    pub(super) models: Models,
    encoders: HashMap<Fingerprint, Arc<Encoder>>,
    named: Vec<(ModelName, Arc<Encoder>)>,
    prompt_cache: usize,
}

impl Encoders {
    /// None yet.
    pub(super) fn new(metrics: &Arc<Metrics>) -> Self {
        Self {
            kept: Mutex::default(),
            named: Mutex::default(),
            prompts: PromptCache::new(0, metrics.clone()),
        }
    }

    /// Loads what is not there yet, all at once.
    pub(super) async fn load(&self, config: &Config) -> anyhow::Result<Loaded> {
        let known = self.kept.lock().clone();
        let loading: Vec<_> = config
            .models
            .iter()
            .map(|model| {
                let (name, files, known) = (model.name.clone(), files_of(model), known.clone());
                let (traits, prompts) = (traits_of(model), self.prompts.clone());
                tokio::task::spawn_blocking(move || {
                    files
                        .map(|files| encoder(&name, (&files, &traits), &known, prompts))
                        .transpose()
                })
            })
            .collect();
        let mut loaded = Loaded {
            models: Models::default(),
            encoders: HashMap::new(),
            named: Vec::new(),
            prompt_cache: config.limits.prompt_cache.bytes(),
        };
        for (model, encoder) in config.models.iter().zip(loading) {
            let found = encoder
                .await?
                .with_context(|| format!("model {} cannot be served exactly", model.name))?;
            if found.is_none() && model.engine_tokens.is_none() {
                warn!(model = %model.name, "no tokenizer is configured: requests are routed by load only");
            }
            let windows = if model.eagle {
                Windows::Eagle
            } else {
                Windows::Plain
            };
            let encoder = found.as_ref().map(|(_, encoder)| encoder.clone());
            loaded.named.extend(
                encoder
                    .iter()
                    .map(|encoder| (model.name.clone(), encoder.clone())),
            );
            let (name, block_size, media) =
                (model.name.clone(), model.blocks(), model.media_tokens());
            let served = Model {
                name,
                block_size,
                windows,
                media,
                encoder,
            };
            if let Some(advice) = without_template(&served) {
                warn!(of = advice.subject, fix = advice.mend, "{}", advice.seen);
            }
            loaded.models.add(served, &model.aliases, &model.adapters);
            loaded.encoders.extend(found);
        }
        Ok(loaded)
    }

    /// Those in use, by model.
    pub(super) fn named(&self) -> Vec<(ModelName, Arc<Encoder>)> {
        self.named.lock().clone()
    }

    /// Whether other ones were loaded than are kept.
    pub(super) fn differ(&self, loaded: &Loaded) -> bool {
        let kept = self.kept.lock();
        kept.len() != loaded.encoders.len()
            || loaded
                .encoders
                .keys()
                .any(|fingerprint| !kept.contains_key(fingerprint))
    }

    /// Keeps these, and no others.
    pub(super) fn keep(&self, loaded: &Loaded) {
        self.kept.lock().clone_from(&loaded.encoders);
        self.named.lock().clone_from(&loaded.named);
        self.prompts.resize(loaded.prompt_cache);
    }
}

fn files_of(model: &ModelConfig) -> Option<prompt::Config> {
    let tokenizer = model.tokenizer.clone()?;
    let (tokenizer_config, chat_template) =
        (model.tokenizer_config.clone(), model.chat_template.clone());
    Some(prompt::Config {
        tokenizer,
        tokenizer_config,
        chat_template,
    })
}

fn traits_of(model: &ModelConfig) -> Traits {
    let name = model.name.as_str().to_owned();
    let (engine, transformers) = (model.engine, model.transformers);
    let (tokenizer_class, media) = (model.tokenizer_class.clone(), model.media.clone());
    Traits {
        name,
        engine,
        transformers,
        tokenizer_class,
        media,
    }
}

fn encoder(
    model: &ModelName,
    (files, traits): (&prompt::Config, &Traits),
    known: &HashMap<Fingerprint, Arc<Encoder>>,
    prompts: Arc<PromptCache>,
) -> Result<(Fingerprint, Arc<Encoder>), LoadError> {
    let started = Instant::now();
    // Before the loading: should the files change meanwhile, the next reload sees it.
    let fingerprint = files.fingerprint()?.with(traits)?;
    if let Some(encoder) = known.get(&fingerprint) {
        return Ok((fingerprint, encoder.clone()));
    }
    let (encoder, resumes) = Encoder::load_as(files, traits)?.resuming(prompts);
    if let Err(because) = resumes {
        info!(%model, because, "every prompt of this tokenizer is tokenised from its beginning");
    }
    info!(%model, took = ?started.elapsed(), "tokenizer loaded");
    Ok((fingerprint, Arc::new(encoder)))
}
