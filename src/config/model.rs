//! `models:`: what a model is called and where its tokeniser lies.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ext_proc::config::FailureMode;
use crate::intake::engine_tokens::config::EngineTokensConfig;
use crate::kv_events::MediaTokens;
use crate::prefill::PrefillConfig;
use crate::prompt::{Engine, MediaConfig, Transformers};
use crate::settings::Problem;
use crate::worker::{BlockSize, ModelName};

/// Largest block size. No engine has larger KV blocks, and hardly any prompt would fill one.
const MAX_BLOCK_TOKENS: usize = 1 << 16;

/// One entry of the list of models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Name as the engines serve it.
    pub name: ModelName,
    /// Other names that requests may use.
    #[serde(default)]
    pub aliases: Vec<ModelName>,
    /// `tokenizer.json`, plain or with `.gz`; without one, requests for the model are routed by load only.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    /// `tokenizer_config.json`: special tokens and, usually, the chat template. The model's `config.json` belongs beside it.
    #[serde(default)]
    pub tokenizer_config: Option<PathBuf>,
    /// A Jinja file in place of the template in `tokenizer_config`.
    #[serde(default)]
    pub chat_template: Option<PathBuf>,
    /// Names of LoRA adapters on top of it, as requests use them and as its engines report them.
    #[serde(default)]
    pub adapters: Vec<ModelName>,
    /// Whether its engines key blocks by pairs of tokens, as EAGLE speculative decoding does.
    #[serde(default)]
    pub eagle: bool,
    /// The token that stands for an image in its prompts, where its engines' events are to be read with their images.
    #[serde(default)]
    pub image_token: Option<u32>,
    /// The token that stands for a video.
    #[serde(default)]
    pub video_token: Option<u32>,
    /// What stands for images and the like in its prompts; without it prompts are known up to the first of them.
    #[serde(default)]
    pub media: Option<MediaConfig>,
    /// The engine that serves it.
    #[serde(default)]
    pub engine: Engine,
    /// The version of transformers that its engines run with.
    #[serde(default)]
    pub transformers: Transformers,
    /// The class of its tokenizer in the engines, where its files do not tell: `TokenizersBackend` is `tokenizer.json` as it is.
    #[serde(default)]
    pub tokenizer_class: Option<String>,
    /// The engines' own tokens in place of ours; none: ours only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_tokens: Option<EngineTokensConfig>,
    /// How its prefills are carried out where other workers do them than those that decode; none: they are named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillConfig>,
    /// What becomes of its requests when no worker can be chosen, where that is not as for others.
    #[serde(default)]
    pub failure_mode: Option<FailureMode>,
    /// With what the first token of its engines' answers comes.
    #[serde(default)]
    pub first_token: FirstToken,
    /// Tokens per KV block by which its engines are compared; 16 where it is left out. The blocks of an engine that cuts
    /// others are brought to it, where one size divides the other.
    #[serde(default)]
    pub block_size: Option<BlockSize>,
}

/// With what the first token of an event stream comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstToken {
    /// The first bytes of the body; the headers come before anything is computed.
    #[default]
    Body,
    /// The headers, which the engine holds back so long.
    Headers,
}

fn vllm_default() -> BlockSize {
    const SIXTEEN: std::num::NonZeroU32 = std::num::NonZeroU32::MIN.saturating_add(15);
    BlockSize(SIXTEEN)
}

impl ModelConfig {
    /// Makes the file names independent of the working directory.
    pub(super) fn resolve(&mut self, folder: &Path) {
        let files = [
            self.tokenizer.as_mut(),
            self.tokenizer_config.as_mut(),
            self.chat_template.as_mut(),
        ];
        for file in files.into_iter().flatten() {
            *file = folder.join(&*file);
        }
        if let Some(media) = &mut self.media {
            media.resolve(folder);
        }
        if let Some(tokens) = &mut self.engine_tokens {
            tokens.resolve(folder);
        }
    }

    /// Mistakes of meaning; looks whether the files exist.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let files = [
            ("tokenizer", self.tokenizer.as_ref()),
            ("tokenizer_config", self.tokenizer_config.as_ref()),
            ("chat_template", self.chat_template.as_ref()),
        ];
        let mut problems: Vec<_> = files
            .into_iter()
            .filter_map(|(key, file)| Some((key, file?)))
            .filter(|(_, file)| !file.is_file())
            .map(|(key, file)| Problem::of(key, missing(file)))
            .collect();
        if self.name.as_str().is_empty() {
            problems.push(Problem::of(
                "name",
                "the model has no name; write it as the engines serve it",
            ));
        }
        let media = self.media.iter().flat_map(MediaConfig::problems);
        problems.extend(media.map(|problem| problem.within("media")));
        problems.extend(self.huge_blocks());
        problems.extend(
            self.wrong_video_token()
                .map(|text| Problem::of("video_token", text)),
        );
        let tokens = self
            .engine_tokens
            .iter()
            .flat_map(EngineTokensConfig::problems);
        problems.extend(tokens.map(|problem| problem.within("engine_tokens")));
        let prefill = self.prefill.iter().flat_map(PrefillConfig::problems);
        problems.extend(prefill.map(|problem| problem.within("prefill")));
        for (key, names) in [("aliases", &self.aliases), ("adapters", &self.adapters)] {
            let empty = names
                .iter()
                .enumerate()
                .filter(|(_, name)| name.as_str().is_empty());
            let text = "one of the names is empty; write what requests say, or leave it out";
            problems.extend(empty.map(|(at, _)| Problem::at([key.into(), at.into()], text)));
        }
        problems
    }
}

impl ModelConfig {
    /// Tokens per KV block.
    pub fn blocks(&self) -> BlockSize {
        self.block_size.unwrap_or_else(vllm_default)
    }

    /// The tokens that stand for media.
    pub fn media_tokens(&self) -> MediaTokens {
        MediaTokens {
            image: self.image_token,
            video: self.video_token,
        }
    }

    fn huge_blocks(&self) -> Option<Problem> {
        let size = self
            .block_size
            .filter(|size| size.tokens() > MAX_BLOCK_TOKENS)?;
        let text = format!(
            "{} tokens are more than any engine has in a block; vLLM's --block-size is 16 by default",
            size.0
        );
        Some(Problem::of("block_size", text))
    }

    fn wrong_video_token(&self) -> Option<&'static str> {
        match (self.video_token?, self.image_token) {
            (_, None) => {
                Some("is without effect alone; give `image_token` as well, or leave it out")
            }
            (video, Some(image)) if video == image => {
                Some("is the same as `image_token`; leave it out where one token stands for both")
            }
            _ => None,
        }
    }
}

/// The sentence for a file that should be there.
pub(super) fn missing(file: &Path) -> String {
    let kind = if file.exists() {
        "is not a file"
    } else {
        "does not exist"
    };
    format!(
        "{} {kind}; relative names start at the folder of the file they stand in",
        file.display()
    )
}
