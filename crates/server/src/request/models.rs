//! The configured models by name, by alias, and by adapter.

use std::collections::HashMap;
use std::sync::Arc;

use warmroute_core::adapters::SharedAdapters;
use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt, MediaTokens, PromptContent};
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_tokens::prompt::{Encoder, PromptTokens};

/// A configured model.
pub struct ConfiguredModel {
    /// Name under which the engines serve it.
    pub name: ModelName,
    /// Tokens per block of its workers.
    pub block_size: BlockSize,
    /// Window rules by which its engines hash prompts.
    pub windows: BlockWindows,
    /// Placeholder tokens for media in the events of its engines.
    pub media: MediaTokens,
    /// Tokenizer and templates; `None` if no tokenizer is configured.
    pub encoder: Option<Arc<Encoder>>,
}

/// Model to which a requested name refers.
#[derive(Clone)]
pub struct ResolvedModel {
    /// The model.
    pub model: Arc<ConfiguredModel>,
    /// The LoRA adapter, if the name is that of an adapter.
    pub adapter: Option<String>,
}

/// The configured models.
#[derive(Clone, Default)]
pub struct ModelRegistry {
    names: HashMap<String, ResolvedModel>,
    models: Vec<Arc<ConfiguredModel>>,
    /// Adapters of the workers, which need not be configured.
    adapters: SharedAdapters,
}

impl ModelRegistry {
    /// Adds a model under its name, its aliases and the names of its adapters.
    pub fn add(&mut self, model: ConfiguredModel, aliases: &[ModelName], adapters: &[ModelName]) {
        let model = Arc::new(model);
        for adapter in adapters {
            let resolved = ResolvedModel {
                model: model.clone(),
                adapter: Some(adapter.as_str().to_owned()),
            };
            self.names.insert(adapter.as_str().to_owned(), resolved);
        }
        for name in aliases.iter().chain([&model.name]) {
            self.names.insert(
                name.as_str().to_owned(),
                ResolvedModel {
                    model: model.clone(),
                    adapter: None,
                },
            );
        }
        self.models.push(model);
    }

    /// Adds the adapters of the workers. Configured names precede them.
    #[must_use]
    pub fn with_adapters(self, adapters: SharedAdapters) -> Self {
        Self { adapters, ..self }
    }

    /// Returns whether a worker has loaded an adapter of this name.
    pub(super) fn is_loaded_adapter(&self, name: &str) -> bool {
        self.adapters.load().base_model(name).is_some()
    }

    fn resolve_adapter(&self, name: &str) -> Option<ResolvedModel> {
        let adapters = self.adapters.load();
        let base = self.names.get(adapters.base_model(name)?.as_str())?;
        Some(ResolvedModel {
            model: base.model.clone(),
            adapter: Some(name.to_owned()),
        })
    }

    /// Resolves a requested name. Like engines, it accepts a request without a name if there is
    /// only one model.
    pub fn resolve(&self, name: Option<&str>) -> Option<ResolvedModel> {
        match (name, self.models.as_slice()) {
            (Some(name), _) => {
                let configured = self.names.get(name).cloned();
                configured.or_else(|| self.resolve_adapter(name))
            }
            (None, [only]) => Some(ResolvedModel {
                model: only.clone(),
                adapter: None,
            }),
            (None, _) => None,
        }
    }
}

/// A resolved model, with the salt of one request.
pub(super) struct SaltedModel {
    pub(super) resolved: ResolvedModel,
    pub(super) salt: CacheSalt,
}

impl SaltedModel {
    /// Combines a model with the cache salt of a request.
    pub(super) fn new(resolved: ResolvedModel, cache: Option<String>) -> Self {
        let salt = CacheSalt {
            lora: resolved.adapter.clone(),
            cache,
        };
        Self { resolved, salt }
    }

    /// Returns the block hashes of one prompt.
    pub(super) fn block_hashes(&self, tokens: &[u32]) -> BlockHashes {
        BlockHashes::from_content(&self.content(tokens), self.resolved.model.block_size)
    }

    /// Returns the block hashes of one prompt, continued from those of a cached prompt.
    pub(super) fn resumed_block_hashes(&self, tokens: &PromptTokens) -> BlockHashes {
        let model = &self.resolved.model;
        tokens.block_hashes(&self.salt, model.block_size, model.windows)
    }

    pub(super) fn content<'a>(&'a self, tokens: &'a [u32]) -> PromptContent<'a> {
        PromptContent {
            windows: self.resolved.model.windows,
            ..PromptContent::text(tokens, &self.salt)
        }
    }
}
