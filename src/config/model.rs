//! `models:`: what a model is called and where its tokeniser lies.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::settings::Problem;
use crate::worker::{BlockSize, ModelName};

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
    /// `tokenizer_config.json`: special tokens and, usually, the chat template.
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
    /// Tokens per KV block of its engines.
    #[serde(default = "vllm_default")]
    pub block_size: BlockSize,
}

fn vllm_default() -> BlockSize {
    const SIXTEEN: std::num::NonZeroU32 = std::num::NonZeroU32::MIN.saturating_add(15);
    BlockSize(SIXTEEN)
}

impl ModelConfig {
    /// Makes the file names independent of the working directory.
    pub(super) fn resolve(&mut self, folder: &Path) {
        let files = [self.tokenizer.as_mut(), self.tokenizer_config.as_mut(), self.chat_template.as_mut()];
        for file in files.into_iter().flatten() {
            *file = folder.join(&*file);
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
            problems.push(Problem::of("name", "the model has no name; write it as the engines serve it"));
        }
        for (key, names) in [("aliases", &self.aliases), ("adapters", &self.adapters)] {
            let empty = names.iter().enumerate().filter(|(_, name)| name.as_str().is_empty());
            let text = "one of the names is empty; write what requests say, or leave it out";
            problems.extend(empty.map(|(at, _)| Problem::at([key.into(), at.into()], text)));
        }
        problems
    }
}

/// The sentence for a file that should be there.
pub(super) fn missing(file: &Path) -> String {
    let kind = if file.exists() { "is not a file" } else { "does not exist" };
    format!("{} {kind}; relative names start at the folder of the file they stand in", file.display())
}
