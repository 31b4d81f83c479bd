//! Properties of engines and models that the model files do not contain.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::MediaConfig;

/// Engine that serves a model.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
}

/// Major version of the engine's transformers library. The versions build tokenizers differently.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum TransformersVersion {
    /// Version 4: tokenizers follow `tokenizer.json`.
    V4,
    /// Version 5, used by vLLM since 2026.
    #[default]
    V5,
}

/// Properties of a model that its files do not contain.
#[derive(Serialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelTraits {
    /// Served model name.
    pub name: String,
    /// Engine that serves the model.
    pub engine: EngineKind,
    /// Transformers version of the engine.
    pub transformers: TransformersVersion,
    /// Tokenizer class in the engine, if the files do not name it.
    pub tokenizer_class: Option<String>,
    /// Rules for the placeholders of media items in prompts.
    pub media: Option<MediaConfig>,
}
