//! Properties of engines and models that the model files do not contain.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::media::config::MediaConfig;

/// Template variables that clients may not set, because they control rendering in engine-specific
/// ways.
pub(super) const RESERVED_VARIABLES: [&str; 13] = [
    "chat_template",
    "tokenize",
    "conversation",
    "messages",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
    "self",
];

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

/// Content of messages that the engine passes to the chat template.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormatOption {
    /// The format that the template reads.
    #[default]
    Auto,
    /// One string.
    String,
    /// A list of parts.
    Openai,
}

/// Options of vLLM that change the rendering of conversations, with vLLM's names.
#[derive(Deserialize, Serialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderOptions {
    /// Template variables of requests that do not set them.
    pub default_chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// True if the prompt contains no tools if `tool_choice` is `none`.
    pub exclude_tools_when_tool_choice_none: bool,
    /// Format of the content of messages.
    pub chat_template_content_format: ContentFormatOption,
}

impl RenderOptions {
    /// Returns the first default whose effect on the prompt cannot be reproduced.
    pub fn unsupported_default(&self) -> Option<&str> {
        let mut names = self.default_chat_template_kwargs.keys();
        names
            .find(|name| *name == "tools" || RESERVED_VARIABLES.contains(&name.as_str()))
            .map(String::as_str)
    }
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
    /// Rendering options of the engine.
    pub render: RenderOptions,
}
