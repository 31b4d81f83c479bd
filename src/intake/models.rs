//! The configured models by every name a request may use: their own, their aliases, and their adapters'.

use std::collections::HashMap;
use std::sync::Arc;

use crate::block::{BlockHashes, Content, MediaTokens, Salt, Windows};
use crate::prompt::{Encoder, Tokens};
use crate::worker::{BlockSize, ModelName};

/// One configured model.
pub struct Model {
    /// As the engines serve it.
    pub name: ModelName,
    /// Tokens per block of its workers.
    pub block_size: BlockSize,
    /// How its engines cut prompts into blocks.
    pub windows: Windows,
    /// Placeholder tokens, where its engines' events are read with them.
    pub media: MediaTokens,
    /// How its prompts become tokens; `None` where no tokenizer is configured.
    pub encoder: Option<Arc<Encoder>>,
}

/// What a name in a request stands for.
#[derive(Clone)]
pub struct Named {
    /// The model.
    pub model: Arc<Model>,
    /// The LoRA adapter on top of it.
    pub adapter: Option<String>,
}

/// The configured models.
#[derive(Clone, Default)]
pub struct Models {
    names: HashMap<String, Named>,
    models: Vec<Arc<Model>>,
}

impl Models {
    /// Adds a model under its name, its aliases and the names of its adapters.
    pub fn add(&mut self, model: Model, aliases: &[ModelName], adapters: &[ModelName]) {
        let model = Arc::new(model);
        for adapter in adapters {
            let named = Named {
                model: model.clone(),
                adapter: Some(adapter.as_str().to_owned()),
            };
            self.names.insert(adapter.as_str().to_owned(), named);
        }
        for name in aliases.iter().chain([&model.name]) {
            self.names.insert(
                name.as_str().to_owned(),
                Named {
                    model: model.clone(),
                    adapter: None,
                },
            );
        }
        self.models.push(model);
    }

    /// What a name stands for. Engines that serve one model accept requests that name none.
    pub fn find(&self, name: Option<&str>) -> Option<Named> {
        match (name, self.models.as_slice()) {
            (Some(name), _) => self.names.get(name).cloned(),
            (None, [only]) => Some(Named {
                model: only.clone(),
                adapter: None,
            }),
            (None, _) => None,
        }
    }
}

impl Named {
    /// The blocks of one prompt, as the model's engines cut them.
    pub fn hashes(&self, tokens: &[u32], salt: &Salt) -> BlockHashes {
        BlockHashes::of_content(&self.content(tokens, salt), self.model.block_size)
    }

    /// The same, where earlier prompts may have begun with them.
    pub(super) fn resumed_hashes(&self, tokens: &Tokens, salt: &Salt) -> BlockHashes {
        tokens.hashes(salt, self.model.block_size, self.model.windows)
    }

    pub(super) fn content<'a>(&self, tokens: &'a [u32], salt: &'a Salt) -> Content<'a> {
        Content {
            windows: self.model.windows,
            ..Content::plain(tokens, salt)
        }
    }
}
