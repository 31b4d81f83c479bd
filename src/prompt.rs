//! From a request to exactly the tokens the engine will see. An [`Encoder`] holds one model's tokenizer and chat
//! template and repeats what vLLM does with them. A wrong token changes every block hash after it without anybody
//! noticing, so whatever is not certain to agree with the engine is an [`EncodeError`], and the caller routes by load.

mod continuation;
mod conversation;
mod decode;
mod detect;
mod direct;
mod engine;
mod fast;
mod files;
mod illustrate;
mod inline_systems;
pub mod media;
mod methods;
mod number;
mod pieces;
mod python;
mod rebuild;
mod resume;
mod sglang;
mod stage;
mod support;
mod syntax;
mod template;
#[cfg(test)]
mod tests;
mod unfinished;
mod within;

use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::openai::{Prompt, Request, Side, Tokenization};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokenizers::Encoding;

pub use engine::{Engine, Traits, Transformers};
use fast::Checked;
use files::Loaded;
pub use files::{Fingerprint, LoadError};
use media::Rules;
pub use media::{Illustrated, MediaConfig};
pub use pieces::{StopReason, TokenBudget};
use resume::{Frame, Resumer};
pub use resume::{PromptCache, Tokens};
use template::Templates;
pub use within::BoundedTokens;

/// Where one model's tokenizer and chat template are. Files may be `.json` or `.json.gz`.
#[derive(Deserialize, Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// `tokenizer.json` of the model.
    pub tokenizer: PathBuf,
    /// `tokenizer_config.json`; unset means the one beside the tokenizer, if there is one. The model's `config.json` is looked
    /// for beside it.
    #[serde(default)]
    pub tokenizer_config: Option<PathBuf>,
    /// A chat template to use instead of the model's own, as with the engine's `--chat-template`.
    #[serde(default)]
    pub chat_template: Option<PathBuf>,
}

/// How sure it is that the engine sees the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// The engine sees these tokens.
    Exact,
    /// The template asked for the time, so it holds only while the engine's clock and time zone agree with ours.
    Clock,
}

/// Prompts on the way to tokens: texts as the engine tokenises them, or tokens already.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered<'r> {
    prompts: Source<'r>,
    tokenization: Tokenization,
    add_special_tokens: bool,
    exact: Exactness,
}

#[derive(Clone, Debug, PartialEq)]
enum Source<'r> {
    Texts(Vec<Cow<'r, str>>),
    Tokens(&'r [Vec<u32>]),
}

impl Rendered<'_> {
    /// How sure it is that the engine renders the same text.
    pub fn exact(&self) -> Exactness {
        self.exact
    }

    /// The texts, where the prompts are not tokens already.
    pub fn texts(&self) -> &[Cow<'_, str>] {
        match &self.prompts {
            Source::Texts(texts) => texts,
            Source::Tokens(_) => &[],
        }
    }
}

/// The tokens of a request, one list per prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Tokens per prompt.
    pub prompts: Vec<Vec<u32>>,
    /// How sure it is that the engine sees them.
    pub exact: Exactness,
}

/// Why the tokens of a request are not known. The request may still be good: it is then routed without them.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EncodeError {
    /// A part other than text.
    #[error("the prompt has a part of type {0}")]
    Multimodal(String),
    /// The prompt is made of embeddings.
    #[error("the prompt is made of embeddings")]
    Embeddings,
    /// More prompts than are looked at.
    #[error("the request has more prompts than are looked at")]
    TooMany,
    /// A conversation for a model that has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// A template sent by the client.
    #[error("the request brings its own chat template")]
    RequestTemplate,
    /// The engine refuses such a request.
    #[error("the engine refuses this request: {0}")]
    Rejected(String),
    /// Engines differ, or what they do is not known.
    #[error("the engine's tokens are uncertain: {0}")]
    Uncertain(String),
    /// The template failed.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}")]
    Tokenize(String),
}

impl EncodeError {
    /// What it is, without a word of the prompt.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Multimodal(_) => "multimodal",
            Self::Embeddings => "embeddings",
            Self::TooMany => "too_many_prompts",
            Self::NoTemplate => "no_template",
            Self::RequestTemplate => "request_template",
            Self::Rejected(_) => "rejected_by_engine",
            Self::Uncertain(_) => "uncertain",
            Self::Render(_) => "template_failed",
            Self::Tokenize(_) => "tokenizer_failed",
        }
    }

    pub(crate) fn uncertain(why: impl Into<String>) -> Self {
        Self::Uncertain(why.into())
    }

    pub(crate) fn rejected(why: impl Into<String>) -> Self {
        Self::Rejected(why.into())
    }
}

/// One model's way from requests to tokens. Shared freely between threads.
pub struct Encoder {
    tokenizer: Checked,
    /// What the post-processor puts around a text, where that is always the same.
    frame: Option<Frame>,
    templates: Option<Templates>,
    special_tokens_doubt: Option<String>,
    resumer: Option<Resumer>,
    engine: Engine,
    rules: Rules,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder")
            .field("templates", &self.templates)
            .finish_non_exhaustive()
    }
}

impl Encoder {
    /// Loads tokenizer and chat template; what cannot be followed exactly is refused here, by name, where it can be.
    pub fn load(config: &Config) -> Result<Self, LoadError> {
        Self::load_with_clock(config, jiff::Zoned::now)
    }

    /// As [`Encoder::load`], with the clock that templates read.
    pub fn load_with_clock(
        config: &Config,
        now: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
    ) -> Result<Self, LoadError> {
        Self::load_whole(config, &Traits::default(), now)
    }

    /// As [`Encoder::load`], for a model that is not the plainest.
    pub fn load_as(config: &Config, traits: &Traits) -> Result<Self, LoadError> {
        Self::load_whole(config, traits, jiff::Zoned::now)
    }

    fn load_whole(
        config: &Config,
        traits: &Traits,
        now: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
    ) -> Result<Self, LoadError> {
        let Loaded {
            tokenizer,
            templates,
            special_tokens,
            special_tokens_doubt,
        } = files::load(config, traits)?;
        let templates = templates
            .map(|sources| Templates::compile(sources, special_tokens, now))
            .transpose()?;
        let templates = templates.map(|templates| templates.of_engine(traits.engine));
        let id_of = |token: &str| tokenizer.token_to_id(token);
        let rules = traits
            .media
            .as_ref()
            .map(|media| Rules::new(media, &traits.name, id_of))
            .transpose();
        let rules = rules.map_err(|problem| LoadError::Content {
            path: config.tokenizer.clone(),
            problem,
        })?;
        let (engine, rules) = (traits.engine, rules.unwrap_or_default());
        let frame = resume::frame(&tokenizer).ok();
        let tokenizer = Checked::new(tokenizer);
        Ok(Self {
            tokenizer,
            frame,
            templates,
            special_tokens_doubt,
            engine,
            rules,
            resumer: None,
        })
    }

    /// Whether conversations can be rendered.
    pub fn has_chat_template(&self) -> bool {
        self.templates.is_some()
    }

    /// The same, which takes over from this cache what prompts have in common; or why its tokenizer cannot.
    pub fn resuming(mut self, cache: Arc<PromptCache>) -> (Self, Result<(), &'static str>) {
        let resumer = Resumer::new(self.tokenizer.library(), cache);
        let outcome = resumer.as_ref().map(drop).map_err(|why| *why);
        self.resumer = resumer.ok();
        (self, outcome)
    }

    /// Tokenises many times as fast from now on, once both ways agree on hard texts; or why it stays with the library for
    /// good. Takes a second the first time, during which requests are tokenised by the library.
    pub fn quicken(&self) -> Result<(), &'static str> {
        self.tokenizer.quicken()
    }

    /// Why the library tokenises for good, instead of the fast way.
    pub fn slow_because(&self) -> Option<&'static str> {
        self.tokenizer.because()
    }

    /// Compares a piece of a prompt that came since the last time with the library; whether the two differed, if one came.
    /// Takes some milliseconds.
    pub fn compare(&self) -> Option<bool> {
        self.tokenizer.compare()
    }

    /// The engine whose tokens these are.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// The tokens of a request: [`Encoder::render`], then [`Encoder::tokenize`].
    pub fn encode(&self, request: &Request) -> Result<Encoded, EncodeError> {
        let rendered = self.render(request)?;
        Ok(Encoded {
            prompts: self.tokenize(&rendered)?,
            exact: rendered.exact,
        })
    }

    /// The texts that the engine will tokenise.
    pub fn render<'r>(&self, request: &'r Request) -> Result<Rendered<'r>, EncodeError> {
        // SGLang has none of these options.
        let tokenization = match self.engine {
            Engine::Vllm => request.tokenization,
            Engine::Sglang => Tokenization::default(),
        };
        let rendered = |prompts, by_default, exact| Rendered {
            prompts,
            tokenization,
            add_special_tokens: tokenization.add_special_tokens.unwrap_or(by_default),
            exact,
        };
        match &request.prompt {
            Prompt::Texts(texts) => {
                let texts = texts
                    .iter()
                    .map(|text| Cow::Borrowed(text.as_str()))
                    .collect();
                Ok(rendered(Source::Texts(texts), true, Exactness::Exact))
            }
            Prompt::Tokens(tokens) => Ok(rendered(Source::Tokens(tokens), true, Exactness::Exact)),
            Prompt::Embeddings => Err(EncodeError::Embeddings),
            Prompt::TooMany => Err(EncodeError::TooMany),
            Prompt::Opaque(_) | Prompt::Nothing => {
                Err(EncodeError::uncertain("only the engine knows its tokens"))
            }
            Prompt::Chat(chat) => {
                let templates = self.templates.as_ref().ok_or(EncodeError::NoTemplate)?;
                let (text, exact) = templates.render(chat)?;
                Ok(rendered(
                    Source::Texts(vec![Cow::Owned(text)]),
                    false,
                    exact,
                ))
            }
        }
    }

    /// The tokens of rendered prompts, of which those that earlier prompts began with are taken over: the same as
    /// [`Encoder::tokenize`] gives. Prompts with different names `apart` (the salt of the engine's cache) take over nothing
    /// from one another, so that nobody learns from the time what others sent.
    pub fn tokenize_resuming(
        &self,
        rendered: &Rendered<'_>,
        apart: Option<&str>,
    ) -> Result<Vec<Tokens>, EncodeError> {
        let all = self.tokenize_within(rendered, apart, &TokenBudget::UNLIMITED)?;
        Ok(all.into_iter().map(|bounded| bounded.tokens).collect())
    }

    /// The tokens of rendered prompts.
    pub fn tokenize(&self, rendered: &Rendered<'_>) -> Result<Vec<Vec<u32>>, EncodeError> {
        let keep = kept_tokens(rendered.tokenization)?;
        let tokenizer_side = rendered.tokenization.tokenizer_side;
        let named_side = rendered.tokenization.truncation_side;
        let side = named_side.unwrap_or(tokenizer_side);
        match &rendered.prompts {
            Source::Tokens(lists) => Ok(lists
                .iter()
                .map(|tokens| truncated(tokens, keep, side).to_vec())
                .collect()),
            Source::Texts(texts) => {
                let special = rendered.add_special_tokens;
                self.refuse_doubt(special)?;
                let tokens = |text: &Cow<'_, str>| match named_side {
                    None => self.tokens_of(text, special, keep, tokenizer_side),
                    // The engine cuts what the tokenizer gave, whatever it is.
                    Some(side) => {
                        let whole = self.tokens_of(text, special, None, side)?;
                        Ok(truncated(&whole, keep, side).to_vec())
                    }
                };
                texts.iter().map(tokens).collect()
            }
        }
    }

    fn refuse_doubt(&self, special: bool) -> Result<(), EncodeError> {
        match &self.special_tokens_doubt {
            Some(doubt) if special => Err(EncodeError::uncertain(doubt.as_str())),
            _ => Ok(()),
        }
    }

    fn tokens_of(
        &self,
        text: &str,
        special: bool,
        keep: Option<usize>,
        side: Side,
    ) -> Result<Vec<u32>, EncodeError> {
        let frame = self.frame.as_ref().filter(|_| special);
        if special && frame.is_none() {
            return self.tokens_in_unknown_frame(text, keep, side);
        }
        let mut ids = self.tokenizer.ids(text).map_err(failed)?;
        if let Some(keep) = keep {
            // Special tokens are counted but never cut off, so the text gives way to them.
            let range = kept_range(ids.len(), room(keep, frame.map_or(0, Frame::len))?, side);
            ids.truncate(range.end);
            ids.drain(..range.start);
        }
        Ok(match frame {
            Some(frame) => frame.around(&ids),
            None => ids,
        })
    }

    /// The tokens of a text with what a post-processor adds that nothing is known of.
    fn tokens_in_unknown_frame(
        &self,
        text: &str,
        keep: Option<usize>,
        side: Side,
    ) -> Result<Vec<u32>, EncodeError> {
        let library = self.tokenizer.library();
        let encode = |text, special| library.encode_fast(text, special).map_err(failed);
        let Some(keep) = keep else {
            return Ok(ids(&encode(text, true)?));
        };
        let bare = cut(
            encode(text, false)?,
            room(keep, encode("", true)?.len())?,
            side,
        );
        library
            .post_process(bare, None, true)
            .map(|encoding| ids(&encoding))
            .map_err(failed)
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the form in which errors are mapped"
)]
fn failed(error: tokenizers::Error) -> EncodeError {
    EncodeError::Tokenize(error.to_string())
}

fn ids(encoding: &Encoding) -> Vec<u32> {
    encoding.get_ids().to_vec()
}

/// How many tokens of the text itself are kept.
fn room(keep: usize, added: usize) -> Result<usize, EncodeError> {
    keep.checked_sub(added)
        .ok_or_else(|| EncodeError::uncertain("truncation leaves no room for the special tokens"))
}

/// How many tokens truncation keeps, if it is asked for.
fn kept_tokens(tokenization: Tokenization) -> Result<Option<usize>, EncodeError> {
    match tokenization.truncate_prompt_tokens {
        None => Ok(None),
        Some(-1) => Err(EncodeError::uncertain(
            "truncation to the model's length, which only the engine knows",
        )),
        Some(keep) if keep > 0 => Ok(usize::try_from(keep).ok()),
        Some(keep) => Err(EncodeError::uncertain(format!(
            "truncate_prompt_tokens is {keep}"
        ))),
    }
}

fn truncated(tokens: &[u32], keep: Option<usize>, side: Side) -> &[u32] {
    &tokens[kept_range(tokens.len(), keep.unwrap_or(usize::MAX), side)]
}

/// An encoding without what truncation cuts off. The tokenizer's own truncation would keep that as well, in pieces of the
/// length of what stays: a request that keeps one token of a long prompt would take gigabytes.
fn cut(encoding: Encoding, keep: usize, side: Side) -> Encoding {
    if keep >= encoding.len() {
        return encoding;
    }
    let range = kept_range(encoding.len(), keep, side);
    Encoding::new(
        encoding.get_ids()[range.clone()].to_vec(),
        encoding.get_type_ids()[range.clone()].to_vec(),
        encoding.get_tokens()[range.clone()].to_vec(),
        encoding.get_word_ids()[range.clone()].to_vec(),
        encoding.get_offsets()[range.clone()].to_vec(),
        encoding.get_special_tokens_mask()[range.clone()].to_vec(),
        encoding.get_attention_mask()[range].to_vec(),
        Vec::new(),
        Default::default(),
    )
}

fn kept_range(length: usize, keep: usize, side: Side) -> Range<usize> {
    let keep = keep.min(length);
    match side {
        Side::Left => length - keep..length,
        Side::Right => 0..keep,
    }
}
