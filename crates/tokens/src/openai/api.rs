//! The APIs that engines serve and the workload of their requests. Only this module distinguishes
//! APIs with a prompt, APIs that only create load, and APIs that create no load.

use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::paths::ApiPaths;

/// An API of vLLM, SGLang or Dynamo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(
    rename_all = "snake_case",
    expecting = "an API, as in `talk/v2: chat_completions`"
)]
pub enum ApiKind {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`
    Embeddings,
    /// vLLM's `/pooling`
    Pooling,
    /// vLLM's `/classify`
    Classify,
    /// `/v1/responses`
    Responses,
    /// Anthropic's `/v1/messages`
    Messages,
    /// Anthropic's `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/conversations`
    Conversations,
    /// vLLM's `/score`
    Score,
    /// `/v1/rerank`
    Rerank,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
    /// vLLM's `/render` under the APIs with prompts
    Render,
    /// `/v1/models`
    Models,
    /// `/v1/audio/transcriptions`
    Transcriptions,
    /// `/v1/audio/translations`
    Translations,
    /// `/v1/audio/speech`
    Speech,
    /// `/v1/images/generations`
    ImageGenerations,
    /// `/v1/images/edits`
    ImageEdits,
    /// `/v1/images/variations`
    ImageVariations,
    /// SGLang's `/generate`
    SglangGenerate,
    /// vLLM's `/inference/v1/generate`
    VllmGenerate,
}

/// Workload that a request creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ApiWorkload {
    /// The request has a prompt of tokens, which is hashed into blocks.
    Prompt,
    /// The request creates load, but its tokens cannot be known.
    LoadOnly,
    /// The request creates no load on cache or accelerator.
    None,
}

impl ApiKind {
    /// Returns the API of a path with the default path configuration.
    pub fn from_path(path: &str) -> Option<Self> {
        static DEFAULT_PATHS: LazyLock<ApiPaths> = LazyLock::new(ApiPaths::default);
        DEFAULT_PATHS.find_api(path)
    }

    /// Returns the workload of a request of this API.
    pub fn workload(self) -> ApiWorkload {
        match self {
            Self::ChatCompletions
            | Self::Completions
            | Self::Embeddings
            | Self::Pooling
            | Self::Classify
            | Self::Responses
            | Self::Messages
            | Self::SglangGenerate
            | Self::VllmGenerate => ApiWorkload::Prompt,
            Self::Score
            | Self::Rerank
            | Self::Transcriptions
            | Self::Translations
            | Self::Speech
            | Self::ImageGenerations
            | Self::ImageEdits
            | Self::ImageVariations => ApiWorkload::LoadOnly,
            Self::CountTokens
            | Self::Conversations
            | Self::Tokenize
            | Self::Detokenize
            | Self::Render
            | Self::Models => ApiWorkload::None,
        }
    }

    /// Returns true if routing reads the body, at least for the model name.
    pub fn wants_body(self) -> bool {
        !matches!(self, Self::Models | Self::Conversations)
    }

    /// Returns true if some engines send the headers of a stream of this API with its first token.
    /// The first events of the other APIs precede the computation.
    pub fn may_delay_stream_headers(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions)
    }

    /// Returns true if the number of tokens can be estimated from the body size in bytes.
    pub fn has_text_body(self) -> bool {
        !matches!(
            self,
            Self::Transcriptions | Self::Translations | Self::ImageEdits | Self::ImageVariations
        )
    }
}
