//! `models:`: names, tokenizer files and engine settings of the models.

use std::path::{Component, Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_engines::kv_events::MediaTokens;
use warmroute_settings::{PathStep, Problem, all_within, describe_missing_file};
use warmroute_tokens::prompt::{
    ContentFormatOption, EngineKind, MediaConfig, RenderOptions, TransformersVersion,
};

use super::policy::PolicyConfig;
use crate::ext_proc::config::FailureMode;
use crate::prefill::PrefillConfig;
use crate::request::engine_tokens::config::EngineTokensConfig;

/// Extensions of the files of a model.
const FILE_KINDS: [&str; 3] = ["json", "gz", "jinja"];

/// Largest block size. No engine has larger KV blocks, and few prompts would fill one.
const MAX_BLOCK_TOKENS: usize = 1 << 16;

/// One entry of the list of models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Name as the engines serve it.
    pub name: ModelName,
    /// Other names that requests may use.
    #[serde(default)]
    pub aliases: Vec<ModelName>,
    /// `tokenizer.json`, plain or as `.gz`. Without one, requests for the model are routed
    /// load-only.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    /// `tokenizer_config.json`: special tokens and usually the chat template. The model's
    /// `config.json` is expected in the same directory.
    #[serde(default)]
    pub tokenizer_config: Option<PathBuf>,
    /// Jinja file that replaces the template in `tokenizer_config`.
    #[serde(default)]
    pub chat_template: Option<PathBuf>,
    /// Template variables of requests that do not set them, as the engines' option
    /// `--default-chat-template-kwargs`.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub default_chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// True if the engines run with `--exclude-tools-when-tool-choice-none`.
    #[serde(default)]
    pub exclude_tools_when_tool_choice_none: bool,
    /// Format of message contents, as the engines' option `--chat-template-content-format`.
    #[serde(default)]
    pub chat_template_content_format: ContentFormatOption,
    /// Names of the model's LoRA adapters, as in requests and in the events of its engines.
    #[serde(default)]
    pub adapters: Vec<ModelName>,
    /// True if the hash of each block also covers the next token: SGLang with EAGLE, vLLM 0.33 and
    /// later with EAGLE or MTP. Used until KV events show it. Needed only without KV events or with a
    /// remote index.
    #[serde(default)]
    pub eagle: bool,
    /// Placeholder token of an image. Required to match images in KV events.
    #[serde(default)]
    pub image_token_id: Option<u32>,
    /// Placeholder token of a video.
    #[serde(default)]
    pub video_token_id: Option<u32>,
    /// Placeholders of media in prompts. `None`: a prompt is only known up to its first medium.
    #[serde(default)]
    pub multimodal: Option<MediaConfig>,
    /// Engine that serves the model.
    #[serde(default)]
    pub engine: EngineKind,
    /// Version of the `transformers` library that the engines use.
    #[serde(default)]
    pub transformers_version: TransformersVersion,
    /// Tokenizer class that the engines use, if the files do not name it. With `TokenizersBackend`,
    /// `tokenizer.json` is used without changes.
    #[serde(default)]
    pub tokenizer_class: Option<String>,
    /// Tokenization by the engines. `None`: warmroute tokenizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_tokenizer: Option<EngineTokensConfig>,
    /// Execution of remote prefills. `None`: headers name the prefill worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillConfig>,
    /// Routing policy. `None`: `routing.policy` applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyConfig>,
    /// Handling of requests for which no worker can be chosen. `None`: `gateway.failure.mode`
    /// applies.
    #[serde(default)]
    pub failure_mode: Option<FailureMode>,
    /// Part of a streaming response that signals its first token.
    #[serde(default)]
    pub first_token_signal: FirstToken,
    /// Tokens per KV block of the index; 16 by default. Blocks of engines with another size are
    /// converted if one size divides the other.
    #[serde(default)]
    pub block_size: Option<BlockSize>,
}

/// Part of a streaming response that signals its first token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FirstToken {
    /// The first content of the body. The engine sends the headers before the first token.
    #[default]
    Body,
    /// The headers of chats and completions. The engine sends them with the first token.
    Headers,
}

fn default_block_size() -> BlockSize {
    const SIXTEEN: std::num::NonZeroU32 = std::num::NonZeroU32::MIN.saturating_add(15);
    BlockSize(SIXTEEN)
}

impl ModelConfig {
    /// Returns the repository of Hugging Face that the key `tokenizer` may name instead of a file:
    /// OWNER/NAME. Relative paths begin in `directory`.
    fn hub_repository(&self, directory: &Path) -> Option<String> {
        let path = self.tokenizer.as_deref()?.strip_prefix(directory).ok()?;
        let is_file = path
            .extension()
            .is_some_and(|kind| FILE_KINDS.iter().any(|known| kind == *known));
        let parts: Vec<_> = path.components().collect();
        match parts[..] {
            [Component::Normal(owner), Component::Normal(name)]
                if !is_file && !directory.join(path).exists() =>
            {
                Some(format!("{}/{}", owner.to_str()?, name.to_str()?))
            }
            _ => None,
        }
    }

    /// Checks the values and the existence of the files.
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
            .map(|(key, file)| Problem::of(key, describe_missing_file(file)))
            .collect();
        if self.name.as_str().is_empty() {
            problems.push(Problem::of(
                "name",
                "the model has no name; write it as the engines serve it",
            ));
        }
        problems.extend(self.unsupported_render_option());
        let media = self.multimodal.iter().flat_map(MediaConfig::problems);
        problems.extend(all_within("multimodal", media));
        problems.extend(self.huge_blocks());
        problems.extend(
            self.wrong_video_token()
                .map(|text| Problem::of("video_token_id", text)),
        );
        let tokens = self
            .remote_tokenizer
            .iter()
            .flat_map(EngineTokensConfig::problems);
        problems.extend(all_within("remote_tokenizer", tokens));
        let prefill = self.prefill.iter().flat_map(PrefillConfig::problems);
        problems.extend(all_within("prefill", prefill));
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
    /// Returns the tokens per KV block of the index.
    pub fn blocks(&self) -> BlockSize {
        self.block_size.unwrap_or_else(default_block_size)
    }

    /// Returns the rendering options of the engines.
    pub fn render_options(&self) -> RenderOptions {
        RenderOptions {
            default_chat_template_kwargs: self.default_chat_template_kwargs.clone(),
            exclude_tools_when_tool_choice_none: self.exclude_tools_when_tool_choice_none,
            chat_template_content_format: self.chat_template_content_format,
        }
    }

    fn unsupported_render_option(&self) -> Option<Problem> {
        let options = self.render_options();
        if let Some(name) = options.unsupported_default() {
            let text = format!(
                "`{name}` is no template variable that engines accept as a default; leave it out"
            );
            return Some(Problem::of("default_chat_template_kwargs", text));
        }
        let defaults = RenderOptions::default();
        let key = match () {
            () if self.engine == EngineKind::Vllm => return None,
            () if options.default_chat_template_kwargs != defaults.default_chat_template_kwargs => {
                "default_chat_template_kwargs"
            }
            () if options.exclude_tools_when_tool_choice_none => {
                "exclude_tools_when_tool_choice_none"
            }
            () if options != defaults => "chat_template_content_format",
            () => return None,
        };
        let text = "is an option of vLLM; leave it out, or set `engine: vllm`";
        Some(Problem::of(key, text))
    }

    /// Returns the placeholder tokens of media.
    pub fn media_tokens(&self) -> MediaTokens {
        MediaTokens {
            image: self.image_token_id,
            video: self.video_token_id,
        }
    }

    fn huge_blocks(&self) -> Option<Problem> {
        let size = self
            .block_size
            .filter(|size| size.tokens() > MAX_BLOCK_TOKENS)?;
        let text = format!(
            "{} tokens are more than any engine has in a block; vLLM's --block-size is 16 by \
            default",
            size.0
        );
        Some(Problem::of("block_size", text))
    }

    fn wrong_video_token(&self) -> Option<&'static str> {
        match (self.video_token_id?, self.image_token_id) {
            (_, None) => {
                Some("is without effect alone; give `image_token_id` as well, or leave it out")
            }
            (video, Some(image)) if video == image => Some(
                "is the same as `image_token_id`; leave it out where one token stands for both",
            ),
            _ => None,
        }
    }
}

/// Adds to the problem of a missing tokenizer how to download a model of Hugging Face.
pub(super) fn add_download_hints(
    problems: &mut [Problem],
    models: &[ModelConfig],
    directory: &Path,
) {
    for problem in problems {
        if let [
            PathStep::Key(section),
            PathStep::At(index),
            PathStep::Key(key),
        ] = &problem.path[..]
            && section == "models"
            && key == "tokenizer"
            && let Some(model) = models.get(*index)
            && let Some(repository) = model.hub_repository(directory)
            && let Some((_, name)) = repository.split_once('/')
        {
            problem.text.push_str(&format!(
                "; models are not downloaded by name, so run `hf download {repository} \
                tokenizer.json tokenizer_config.json config.json --local-dir models/{name}`"
            ));
        }
    }
}
