//! Conversion of a request to exactly the tokens that the engine computes.
//!
//! An [`Encoder`] holds one model's tokenizer and chat template and reproduces the engine's
//! rendering. A wrong token silently changes every block hash after it. Therefore anything that may
//! differ from the engine is an [`EncodeError`], and the caller falls back to load-only routing.

mod bounded_tokens;
mod cached_render;
mod content_format;
mod continuation;
mod conversation;
mod direct;
mod engine;
mod error;
mod fast;
mod inline_systems;
pub mod media;
mod media_renderer;
mod model_files;
mod multimodal;
mod number;
mod pieces;
mod printable;
mod python;
mod python_methods;
mod rebuild;
mod resume;
mod sglang;
mod syntax;
mod template;
mod template_support;
#[cfg(test)]
mod tests;
mod tokenizer_parts;
mod truncation;
mod white_space;

use std::borrow::Cow;
use std::sync::Arc;

use crate::openai::{ApiRequest, PromptInput, TokenizationOptions};

pub use crate::prompt_cache::PromptCache;
pub use bounded_tokens::BoundedTokens;
pub use engine::{
    ContentFormatOption, EngineKind, ModelTraits, RenderOptions, TransformersVersion,
};
pub use error::EncodeError;
use fast::{FastPath, VerifiedTokenizer};
use media::MediaRules;
pub use media::{MediaConfig, MultimodalPrompt};
use model_files::ModelFiles;
pub use model_files::{Config, LoadError, ModelFingerprint};
pub use pieces::{StopReason, TokenBudget};
pub use resume::PromptTokens;
use resume::{ResumableText, ResumingTokenizer};
use template::ChatTemplates;
pub use template::TokenExactness;
use tokenizer_parts::SpecialTokenFrame;

/// Prompts before tokenization: rendered texts, or token ids of the request.
#[derive(Clone, Debug)]
pub struct RenderedPrompt<'r> {
    prompts: PromptSource<'r>,
    tokenization: TokenizationOptions,
    add_special_tokens: bool,
    exactness: TokenExactness,
}

#[derive(Clone, Debug)]
enum PromptSource<'r> {
    Texts(Vec<Cow<'r, str>>),
    Tokens(&'r [Vec<u32>]),
    /// A conversation, or its end after a cached prefix.
    Chat(ResumableText<'static>),
}

impl RenderedPrompt<'_> {
    /// Returns the certainty that the engine renders the same text.
    pub fn exactness(&self) -> TokenExactness {
        self.exactness
    }

    /// Returns the texts; empty if the request already contains token ids, or if the prompt was
    /// rendered with [`Encoder::render_cached`].
    pub fn texts(&self) -> &[Cow<'_, str>] {
        match &self.prompts {
            PromptSource::Texts(texts) => texts,
            PromptSource::Tokens(_) | PromptSource::Chat(_) => &[],
        }
    }

    /// Returns true if only the end of the prompt was rendered.
    pub fn is_resumed(&self) -> bool {
        matches!(&self.prompts, PromptSource::Chat(text) if text.prefix().is_some())
    }
}

/// Tokens of a request, one list per prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// Token ids per prompt.
    pub prompts: Vec<Vec<u32>>,
    /// Certainty that the engine computes the same tokens.
    pub exactness: TokenExactness,
}

/// Renders and tokenizes the requests of one model. Can be shared between threads.
pub struct Encoder {
    /// Models with the same tokenizer share it.
    tokenizer: Arc<VerifiedTokenizer>,
    /// Tokens that the post-processor adds to a text, if they are always the same.
    frame: Option<SpecialTokenFrame>,
    templates: Option<ChatTemplates>,
    special_tokens_mismatch: Option<String>,
    resuming_tokenizer: Option<ResumingTokenizer>,
    engine: EngineKind,
    media_rules: MediaRules,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder")
            .field("templates", &self.templates)
            .finish_non_exhaustive()
    }
}

impl Encoder {
    /// Loads tokenizer and chat template. Fails with the name of the first feature that cannot be
    /// reproduced exactly.
    pub fn load(config: &Config) -> Result<Self, LoadError> {
        Self::load_with_traits(config, &ModelTraits::default())
    }

    /// Loads an encoder like [`Encoder::load`], with the traits of the model and its engine.
    pub fn load_with_traits(config: &Config, traits: &ModelTraits) -> Result<Self, LoadError> {
        Self::load_files(config, traits, FastPath::Deferred)
    }

    /// Loads an encoder like [`Encoder::load_with_traits`] and enables its fast path, if the
    /// tokenizer supports it. This takes less time and memory than enabling it later.
    pub fn load_with_fast_path(config: &Config, traits: &ModelTraits) -> Result<Self, LoadError> {
        Self::load_files(config, traits, FastPath::Built)
    }

    fn load_files(
        config: &Config,
        traits: &ModelTraits,
        fast_path: FastPath,
    ) -> Result<Self, LoadError> {
        let ModelFiles {
            tokenizer,
            templates,
            special_tokens,
            special_tokens_mismatch,
        } = model_files::load(config, traits, fast_path)?;
        let library = tokenizer.library();
        let templates = templates
            .map(|sources| ChatTemplates::compile(sources, special_tokens, jiff::Zoned::now))
            .transpose()?;
        let templates =
            templates.map(|templates| templates.with_engine(traits.engine, &traits.render));
        let id_of = |token: &str| library.token_to_id(token);
        let media_rules = traits
            .media
            .as_ref()
            .map(|media| MediaRules::new(media, &traits.name, id_of))
            .transpose();
        let media_rules =
            media_rules.map_err(|problem| LoadError::content(&config.tokenizer, problem))?;
        let media_rules = media_rules.unwrap_or_default();
        Ok(Self {
            frame: tokenizer_parts::find_frame(library).ok(),
            tokenizer,
            templates,
            special_tokens_mismatch,
            engine: traits.engine,
            media_rules,
            resuming_tokenizer: None,
        })
    }

    /// Returns true if the model has a chat template, which conversations require.
    pub fn has_chat_template(&self) -> bool {
        self.templates.is_some()
    }

    /// Enables reuse of common prompt prefixes through `cache`. The error is the reason why the
    /// tokenizer does not support it.
    pub fn with_prompt_cache(
        mut self,
        cache: Arc<PromptCache>,
    ) -> (Self, Result<(), &'static str>) {
        let resumer = ResumingTokenizer::new(self.tokenizer.library(), cache);
        let outcome = resumer.as_ref().map(drop).map_err(|reason| *reason);
        self.resuming_tokenizer = resumer.ok();
        (self, outcome)
    }

    /// Switches to the fast tokenizer after verifying it on difficult texts. The error is the
    /// reason why the library tokenizer stays in use. The first call takes about a second, unless
    /// the encoder was loaded with its fast path; requests use the library tokenizer meanwhile.
    pub fn enable_fast_path(&self) -> Result<(), &'static str> {
        self.tokenizer.enable_fast_path()
    }

    /// Returns the reason why the fast tokenizer is disabled, if it is.
    pub fn fast_path_disabled_reason(&self) -> Option<&'static str> {
        self.tokenizer.disabled_reason()
    }

    /// Compares the fast tokenizer with the library on a piece of a recent prompt. Returns whether
    /// they differ, or `None` if there was no new prompt. Takes some milliseconds.
    pub fn verify_sample(&self) -> Option<bool> {
        self.tokenizer.verify_sample()
    }

    /// Returns the engine whose tokens are reproduced.
    pub fn engine(&self) -> EngineKind {
        self.engine
    }

    /// Returns the rendering options of the engine. A model without a chat template has none.
    pub fn render_options(&self) -> Option<&RenderOptions> {
        self.templates.as_ref().map(ChatTemplates::options)
    }

    /// Returns the tokens of a request: [`Encoder::render`], then [`Encoder::tokenize`].
    pub fn encode(&self, request: &ApiRequest) -> Result<EncodedPrompt, EncodeError> {
        self.encode_with_templates(self.templates.as_ref(), request)
    }

    /// Returns the tokens of a request in an engine with other rendering options.
    pub fn encode_with_options(
        &self,
        request: &ApiRequest,
        options: &RenderOptions,
    ) -> Result<EncodedPrompt, EncodeError> {
        let templates = self.templates.clone();
        let templates = templates.map(|templates| templates.with_engine(self.engine, options));
        self.encode_with_templates(templates.as_ref(), request)
    }

    fn encode_with_templates(
        &self,
        templates: Option<&ChatTemplates>,
        request: &ApiRequest,
    ) -> Result<EncodedPrompt, EncodeError> {
        let rendered = self.render_with_templates(templates, request)?;
        Ok(EncodedPrompt {
            prompts: self.tokenize(&rendered)?,
            exactness: rendered.exactness,
        })
    }

    /// Renders the texts that the engine tokenizes.
    pub fn render<'r>(&self, request: &'r ApiRequest) -> Result<RenderedPrompt<'r>, EncodeError> {
        self.render_with_templates(self.templates.as_ref(), request)
    }

    fn render_with_templates<'r>(
        &self,
        templates: Option<&ChatTemplates>,
        request: &'r ApiRequest,
    ) -> Result<RenderedPrompt<'r>, EncodeError> {
        // SGLang has no tokenization options.
        let tokenization = match self.engine {
            EngineKind::Vllm => request.tokenization,
            EngineKind::Sglang => TokenizationOptions::default(),
        };
        let rendered = |prompts, by_default, exactness| RenderedPrompt {
            prompts,
            tokenization,
            add_special_tokens: tokenization.add_special_tokens.unwrap_or(by_default),
            exactness,
        };
        match &request.prompt {
            PromptInput::Texts(texts) => {
                let texts = texts
                    .iter()
                    .map(|text| Cow::Borrowed(text.as_str()))
                    .collect();
                Ok(rendered(
                    PromptSource::Texts(texts),
                    true,
                    TokenExactness::Exact,
                ))
            }
            PromptInput::Tokens(tokens) => Ok(rendered(
                PromptSource::Tokens(tokens),
                true,
                TokenExactness::Exact,
            )),
            PromptInput::Embeddings => Err(EncodeError::Embeddings),
            PromptInput::OverLimit => Err(EncodeError::TooManyPrompts),
            PromptInput::Unknown(_) | PromptInput::NoPrompt => {
                Err(EncodeError::uncertain("only the engine knows its tokens"))
            }
            PromptInput::Chat(chat) => {
                let templates = templates.ok_or(EncodeError::NoTemplate)?;
                let (text, exact) = templates.render(chat)?;
                Ok(rendered(
                    PromptSource::Texts(vec![Cow::Owned(text)]),
                    false,
                    exact,
                ))
            }
        }
    }

    /// Decodes tokens to text, including special tokens. Ids that the tokenizer does not know are
    /// printed as numbers.
    pub fn decode_tokens(&self, ids: &[u32]) -> String {
        self.tokenizer
            .library()
            .decode(ids, false)
            .unwrap_or_else(|_| format!("{ids:?}"))
    }

    /// Tokenizes rendered prompts, reusing the tokens of prefixes shared with earlier prompts. The
    /// result equals that of [`Encoder::tokenize`]. Prompts with different `cache_namespace` (the
    /// engine's cache salt) share nothing, so timing does not reveal other tenants' prompts.
    pub fn tokenize_cached(
        &self,
        rendered: &RenderedPrompt<'_>,
        cache_namespace: Option<&str>,
    ) -> Result<Vec<PromptTokens>, EncodeError> {
        let all = self.tokenize_bounded(rendered, cache_namespace, &TokenBudget::UNLIMITED)?;
        Ok(all.into_iter().map(|bounded| bounded.tokens).collect())
    }

    /// Tokenizes rendered prompts without the prompt cache.
    pub fn tokenize(&self, rendered: &RenderedPrompt<'_>) -> Result<Vec<Vec<u32>>, EncodeError> {
        let all = self.tokenize_with(rendered, None, &TokenBudget::UNLIMITED)?;
        let ids = all.into_iter().map(|bounded| bounded.tokens.into_ids());
        Ok(ids.collect())
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the signature that `map_err` needs"
)]
fn tokenizer_error(error: tokenizers::Error) -> EncodeError {
    EncodeError::Tokenize(error.to_string())
}
