//! `media:` of a model: what stands for images and the like in its prompts, and how its engines name them.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::settings::Problem;

/// What stands for images and the like. What is not described here is not known, and a prompt is then known up to the
/// first such item.
#[derive(Deserialize, Serialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct MediaConfig {
    /// What the engines were started with (`vllm serve THIS`), because it enters the names they give to content; unset
    /// means what they say alike, and the name of the model where they say nothing. Where they say different things, content
    /// has no name that is known.
    pub model: Option<String>,
    /// Images.
    pub image: Option<ItemRule>,
    /// Sound; its name is known only where the client gives it one.
    pub audio: Option<ItemRule>,
    /// Moving images; their name is known only where the client gives them one.
    pub video: Option<ItemRule>,
}

/// What stands for an item of one modality.
#[derive(Deserialize, Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ItemRule {
    /// The token that is repeated, as the tokenizer writes it.
    pub token: String,
    /// What the engine writes into the prompt for an item where the chat template takes strings and no lists of parts;
    /// `{i}` is the item's number.
    #[serde(default)]
    pub placeholder: Option<String>,
    /// How the repetitions are counted.
    pub rule: Rule,
    /// Repetitions, where they are always the same.
    #[serde(default)]
    pub tokens: Option<NonZeroU32>,
    /// `preprocessor_config.json` of the model, for all that is not said here.
    #[serde(default)]
    pub preprocessor: Option<PathBuf>,
    /// Pixels along the side of a patch.
    #[serde(default)]
    pub patch_size: Option<NonZeroU32>,
    /// Patches along the side of a token.
    #[serde(default)]
    pub merge_size: Option<NonZeroU32>,
    /// Smaller images are enlarged to so many pixels.
    #[serde(default)]
    pub min_pixels: Option<u64>,
    /// Larger images are reduced to so many pixels.
    #[serde(default)]
    pub max_pixels: Option<u64>,
}

/// How the tokens of an item are counted.
#[derive(Deserialize, Serialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Always the same number.
    Fixed,
    /// By the size of the image, as Qwen2-VL and its successors do.
    Qwen2Vl,
}

impl MediaConfig {
    /// Makes the file names independent of the working directory.
    pub fn resolve(&mut self, folder: &Path) {
        for rule in [&mut self.image, &mut self.audio, &mut self.video]
            .into_iter()
            .flatten()
        {
            if let Some(file) = &mut rule.preprocessor {
                *file = folder.join(&*file);
            }
        }
    }

    /// The files it names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let rules = [&self.image, &self.audio, &self.video]
            .into_iter()
            .flatten();
        rules.filter_map(|rule| rule.preprocessor.as_deref())
    }

    /// Mistakes of meaning.
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

impl ItemRule {
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
        match self.rule {
            Rule::Qwen2Vl if !of_images => {
                problems.push(Problem::of(
                    "rule",
                    "qwen2_vl counts the tokens of images only; write fixed, or leave the entry out",
                ));
            }
            Rule::Qwen2Vl if self.preprocessor.is_none() && !(sizes && pixels) => {
                let text = "needs `preprocessor`, or all of `patch_size`, `merge_size`, `min_pixels` and `max_pixels`";
                problems.push(Problem::of("rule", text));
            }
            Rule::Fixed if self.tokens.is_none() => {
                problems.push(Problem::of(
                    "rule",
                    "needs `tokens`, the number of tokens of an item",
                ));
            }
            _ => {}
        }
        if let Some(file) = self.preprocessor.as_ref().filter(|file| !file.is_file()) {
            let text = format!(
                "{} does not exist; relative names start at the folder of the file they stand in",
                file.display()
            );
            problems.push(Problem::of("preprocessor", text));
        }
        problems
    }
}
