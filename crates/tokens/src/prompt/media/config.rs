//! The setting `multimodal:` of a model: the placeholders of media items in its prompts, and the
//! ids that engines assign to the items.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::Problem;

/// Placeholders of media items. If a modality is not configured, its items are unknown, and a
/// prompt is known only up to the first of them.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct MediaConfig {
    /// Model argument of the engines (`vllm serve MODEL`), which is part of the ids of media
    /// content. By default, it is the value that all engines report, or the model's name if none
    /// reports it. If they report different values, the ids of content are unknown.
    pub model: Option<String>,
    /// Images.
    pub image: Option<MediaItemRule>,
    /// Audio. Its id is known only if the client sends one.
    pub audio: Option<MediaItemRule>,
    /// Video. Its id is known only if the client sends one.
    pub video: Option<MediaItemRule>,
}

/// Placeholder of one modality.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct MediaItemRule {
    /// Text of the repeated token in the tokenizer.
    pub token: String,
    /// Text that the engine inserts for an item if the chat template takes strings instead of lists
    /// of parts. `{i}` is replaced with the number of the item.
    #[serde(default)]
    pub placeholder: Option<String>,
    /// Rule for the number of repetitions.
    pub token_count: TokenCountRule,
    /// Number of repetitions for the rule `fixed`.
    #[serde(default)]
    pub tokens_per_item: Option<NonZeroU32>,
    /// `preprocessor_config.json` of the model, for values that are not set here.
    #[serde(default)]
    pub preprocessor_config: Option<PathBuf>,
    /// Side length of a patch in pixels.
    #[serde(default)]
    pub patch_size: Option<NonZeroU32>,
    /// Side length of a token in patches.
    #[serde(default)]
    pub merge_size: Option<NonZeroU32>,
    /// Minimum number of pixels. Smaller images are enlarged.
    #[serde(default)]
    pub min_pixels: Option<u64>,
    /// Maximum number of pixels. Larger images are reduced.
    #[serde(default)]
    pub max_pixels: Option<u64>,
}

/// Rule for the number of tokens of an item.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum TokenCountRule {
    /// A constant number.
    Fixed,
    /// By image size, as in Qwen2-VL and its successors.
    Qwen2Vl,
}

impl MediaConfig {
    /// Makes relative file names absolute.
    pub fn resolve(&mut self, directory: &Path) {
        for rule in [&mut self.image, &mut self.audio, &mut self.video]
            .into_iter()
            .flatten()
        {
            if let Some(file) = &mut rule.preprocessor_config {
                *file = directory.join(&*file);
            }
        }
    }

    /// Returns the files that the configuration names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let rules = [&self.image, &self.audio, &self.video]
            .into_iter()
            .flatten();
        rules.filter_map(|rule| rule.preprocessor_config.as_deref())
    }

    /// Returns the configuration errors.
    pub fn problems(&self) -> Vec<Problem> {
        let rules = [
            ("image", &self.image),
            ("audio", &self.audio),
            ("video", &self.video),
        ];
        let mut problems: Vec<Problem> = Vec::new();
        for (name, rule) in rules
            .into_iter()
            .filter_map(|(name, rule)| Some((name, rule.as_ref()?)))
        {
            problems.extend(
                rule.problems(name == "image")
                    .into_iter()
                    .map(|problem| problem.within(name)),
            );
        }
        if self.model.as_deref() == Some("") {
            problems.push(Problem::of(
                "model",
                "is empty; write what the engines were started with, or leave it out",
            ));
        }
        problems
    }
}

impl MediaItemRule {
    fn problems(&self, of_images: bool) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.token.is_empty() {
            problems.push(Problem::of(
                "token",
                "is empty; write the token as the tokenizer does, like <|image_pad|>",
            ));
        }
        let sizes = self.patch_size.is_some() && self.merge_size.is_some();
        let pixels = self.min_pixels.is_some() && self.max_pixels.is_some();
        match self.token_count {
            TokenCountRule::Qwen2Vl if !of_images => {
                problems.push(Problem::of(
                    "token_count",
                    "qwen2_vl counts the tokens of images only; write fixed, or leave the entry out",
                ));
            }
            TokenCountRule::Qwen2Vl if self.preprocessor_config.is_none() && !(sizes && pixels) => {
                let text = "needs `preprocessor_config`, or all of `patch_size`, `merge_size`, `min_pixels` and `max_pixels`";
                problems.push(Problem::of("token_count", text));
            }
            TokenCountRule::Fixed if self.tokens_per_item.is_none() => {
                problems.push(Problem::of(
                    "token_count",
                    "needs `tokens_per_item`, the number of tokens of an item",
                ));
            }
            _ => {}
        }
        if let Some(file) = self
            .preprocessor_config
            .as_ref()
            .filter(|file| !file.is_file())
        {
            let text = format!(
                "{} does not exist; relative paths are resolved against the directory of the file that contains them",
                file.display()
            );
            problems.push(Problem::of("preprocessor_config", text));
        }
        problems
    }
}
