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
    pub image: Option<ImageRule>,
    /// Audio. Its id is known only if the client sends one.
    pub audio: Option<MediaItemRule>,
    /// Video. Its id is known only if the client sends one.
    pub video: Option<MediaItemRule>,
}

/// Placeholder of images. Exactly one of `tokens_per_item` and `preprocessor_config` is set.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ImageRule {
    /// Text of the repeated token in the tokenizer.
    pub token: String,
    /// Text that the engine inserts for an image if the chat template takes strings instead of
    /// lists of parts. `{i}` is replaced with the number of the image.
    #[serde(default)]
    pub placeholder: Option<String>,
    /// Number of repetitions, if it is constant.
    #[serde(default)]
    pub tokens_per_item: Option<NonZeroU32>,
    /// `preprocessor_config.json` of the model, if the number of repetitions depends on the size of
    /// the image, as in Qwen2-VL and its successors. If the engine runs with other limits of pixels,
    /// a copy with these limits.
    #[serde(default)]
    pub preprocessor_config: Option<PathBuf>,
}

/// Placeholder of audio or video.
#[derive(Deserialize, JsonSchema, Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct MediaItemRule {
    /// Text of the repeated token in the tokenizer.
    pub token: String,
    /// Text that the engine inserts for an item if the chat template takes strings instead of lists
    /// of parts. `{i}` is replaced with the number of the item.
    #[serde(default)]
    pub placeholder: Option<String>,
    /// Number of repetitions.
    pub tokens_per_item: NonZeroU32,
}

impl MediaConfig {
    /// Returns the files that the configuration names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let images = self.image.iter();
        images.filter_map(|image| image.preprocessor_config.as_deref())
    }

    /// Returns the configuration errors.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        let tokens = [
            ("image", self.image.as_ref().map(|rule| &rule.token)),
            ("audio", self.audio.as_ref().map(|rule| &rule.token)),
            ("video", self.video.as_ref().map(|rule| &rule.token)),
        ];
        for (name, _) in tokens
            .iter()
            .filter(|(_, token)| token.is_some_and(String::is_empty))
        {
            let text = "is empty; write the token as the tokenizer does, like <|image_pad|>";
            problems.push(Problem::of("token", text).within(*name));
        }
        if let Some(image) = &self.image
            && image.tokens_per_item.is_some() == image.preprocessor_config.is_some()
        {
            let text = "needs either `tokens_per_item`, the number of tokens of an image, or \
                `preprocessor_config`";
            problems.push(Problem::of("image", text));
        }
        for file in self.files().filter(|file| !file.is_file()) {
            let text = format!(
                "{} does not exist; relative paths are resolved against the directory of the file \
                that contains them",
                file.display()
            );
            problems.push(Problem::of("preprocessor_config", text).within("image"));
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
