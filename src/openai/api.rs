//! The APIs that engines serve, and what a request of each is for routing: the one place that knows which of them have a
//! prompt, which only make work, and which make none.

use std::sync::LazyLock;

use super::paths::{Paths, PathsConfig};

/// An API of vLLM, SGLang or Dynamo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
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

/// What a request is for routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// It has a prompt of tokens, which is hashed.
    Prompt,
    /// It makes work, but its tokens cannot be known.
    LoadOnly,
    /// It makes no work for the cache or the accelerator.
    NoPrompt,
}

impl Api {
    /// The API of a path where nothing else is configured.
    pub fn of_path(path: &str) -> Option<Self> {
        static USUAL: LazyLock<Paths> = LazyLock::new(|| Paths::new(&PathsConfig::default()));
        USUAL.find(path)
    }

    /// What a request of this API is for routing.
    pub fn shape(self) -> Shape {
        match self {
            Self::ChatCompletions
            | Self::Completions
            | Self::Embeddings
            | Self::Pooling
            | Self::Classify
            | Self::Responses
            | Self::Messages
            | Self::SglangGenerate
            | Self::VllmGenerate => Shape::Prompt,
            Self::Score
            | Self::Rerank
            | Self::Transcriptions
            | Self::Translations
            | Self::Speech
            | Self::ImageGenerations
            | Self::ImageEdits
            | Self::ImageVariations => Shape::LoadOnly,
            Self::CountTokens
            | Self::Conversations
            | Self::Tokenize
            | Self::Detokenize
            | Self::Render
            | Self::Models => Shape::NoPrompt,
        }
    }

    /// Whether routing reads the body: at least for the model that it names.
    pub fn wants_body(self) -> bool {
        !matches!(self, Self::Models | Self::Conversations)
    }

    /// Whether the bytes of the body are about text, so that their number says something about tokens.
    pub(crate) fn is_text(self) -> bool {
        !matches!(
            self,
            Self::Transcriptions | Self::Translations | Self::ImageEdits | Self::ImageVariations
        )
    }
}
