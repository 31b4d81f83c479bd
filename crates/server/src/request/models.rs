//! The configured models by name, by alias, and by adapter.

use std::collections::HashMap;
use std::sync::Arc;

use warmroute_core::adapters::SharedAdapters;
use warmroute_core::block::fingerprint::hash_fingerprint;
use warmroute_core::block::{BlockWindows, MediaTokens};
use warmroute_core::router::SharedWindows;
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_tokens::prompt::Encoder;

/// A configured model.
pub struct ConfiguredModel {
    /// Name under which the engines serve it.
    pub name: ModelName,
    /// Tokens per block of its workers.
    pub block_size: BlockSize,
    /// Configured tokens that the hash of each block covers, used until the events of its engines show it.
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
    /// Tokens that the hash of each block covers by its engines.
    pub windows: BlockWindows,
}

impl ResolvedModel {
    fn new(model: Arc<ConfiguredModel>, adapter: Option<String>) -> Self {
        Self {
            windows: model.windows,
            model,
            adapter,
        }
    }

    /// Returns the fingerprint of the block hashing, computed from a fixed prompt.
    pub fn hash_fingerprint(&self) -> u64 {
        hash_fingerprint(self.model.block_size, self.windows, self.model.media)
    }
}

/// The configured models.
#[derive(Clone, Default)]
pub struct ModelRegistry {
    names: HashMap<String, ResolvedModel>,
    models: Vec<Arc<ConfiguredModel>>,
    /// Adapters of the workers, which need not be configured.
    adapters: SharedAdapters,
    /// Learned tokens that the hash of each block covers.
    windows: SharedWindows,
}

impl ModelRegistry {
    /// Adds a model under its name, its aliases and the names of its adapters.
    pub fn add(&mut self, model: ConfiguredModel, aliases: &[ModelName], adapters: &[ModelName]) {
        let model = Arc::new(model);
        for adapter in adapters {
            let name = adapter.as_str().to_owned();
            let resolved = ResolvedModel::new(model.clone(), Some(name.clone()));
            self.names.insert(name, resolved);
        }
        for name in aliases.iter().chain([&model.name]) {
            self.names.insert(
                name.as_str().to_owned(),
                ResolvedModel::new(model.clone(), None),
            );
        }
        self.models.push(model);
    }

    /// Adds the adapters of the workers. Configured names precede them.
    #[must_use]
    pub fn with_adapters(self, adapters: SharedAdapters) -> Self {
        Self { adapters, ..self }
    }

    /// Adds the tokens that the hash of each block covers that the events show. It precedes the configured
    /// one.
    #[must_use]
    pub fn with_windows(self, windows: SharedWindows) -> Self {
        Self { windows, ..self }
    }

    /// Returns whether a worker has loaded an adapter of this name.
    pub(super) fn is_loaded_adapter(&self, name: &str) -> bool {
        self.adapters.load().base_model(name).is_some()
    }

    fn resolve_adapter(&self, name: &str) -> Option<ResolvedModel> {
        let adapters = self.adapters.load();
        let base = self.names.get(adapters.base_model(name)?.as_str())?;
        Some(ResolvedModel::new(
            base.model.clone(),
            Some(name.to_owned()),
        ))
    }

    /// Resolves a requested name. Like engines, it accepts a request without a name if there is
    /// only one model.
    pub fn resolve(&self, name: Option<&str>) -> Option<ResolvedModel> {
        let mut resolved = match (name, self.models.as_slice()) {
            (Some(name), _) => {
                let configured = self.names.get(name).cloned();
                configured.or_else(|| self.resolve_adapter(name))?
            }
            (None, [only]) => ResolvedModel::new(only.clone(), None),
            (None, _) => return None,
        };
        if let Some(windows) = self.windows.load().get(&resolved.model.name) {
            resolved.windows = *windows;
        }
        Some(resolved)
    }
}
