//! What differs between engines and between models beside their files.

use serde::{Deserialize, Serialize};

use super::MediaConfig;

/// The engine that serves a model.
#[derive(Deserialize, Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
}

/// The version of transformers that the engine runs with, because they differ in how they build tokenizers.
#[derive(Deserialize, Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Transformers {
    /// Version 4: tokenizers are what `tokenizer.json` says.
    V4,
    /// Version 5, with which vLLM comes since 2026.
    #[default]
    V5,
}

/// What of a model is in none of its files.
#[derive(Serialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// Its name, as the engines serve it.
    pub name: String,
    /// The engine that serves it.
    pub engine: Engine,
    /// The version of transformers that it runs with.
    pub transformers: Transformers,
    /// The class of its tokenizer in the engine, where its files do not tell.
    pub tokenizer_class: Option<String>,
    /// What stands for images and the like in its prompts.
    pub media: Option<MediaConfig>,
}
