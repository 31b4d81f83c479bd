//! `models[].engine_tokens:`: when and where engines are asked for their own tokens.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::engine_client::EngineUrl;
use crate::settings::{Period, Problem};

/// `models[].engine_tokens:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTokensConfig {
    /// When.
    pub when: When,
    /// How.
    pub path: RenderPath,
    /// Render servers; none: the workers of the model.
    pub urls: Vec<String>,
    /// How long a request waits; then it is routed by our own tokens, or by load.
    pub deadline: Period,
    /// After so long without an answer a second one is asked beside the first.
    pub hedge_after: Period,
    /// A file with the token they ask for, where it is not that of `engines`.
    pub token_file: Option<PathBuf>,
    /// Questions under way at once; further requests go without.
    pub in_flight: u32,
    /// Failures in a row after which one of them is left alone.
    pub failures: u32,
    /// For so long, before one request may try it.
    pub rest: Period,
}

/// When engines are asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// For every request.
    #[default]
    Always,
    /// While our own tokens are known to differ.
    Mismatch,
}

/// How engines are asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RenderPath {
    /// `POST /v1/…/render` with the request itself: exact for all requests, images too. vLLM offers it with
    /// `--enable-scale-out`, and `vllm launch render`.
    #[default]
    Render,
    /// `POST /tokenize`: for conversations and single texts, without images and without what it does not read.
    Tokenize,
}

impl Default for EngineTokensConfig {
    fn default() -> Self {
        Self {
            when: When::Always,
            path: RenderPath::Render,
            urls: Vec::new(),
            deadline: Period::millis(300),
            hedge_after: Period::millis(100),
            token_file: None,
            in_flight: 64,
            failures: 3,
            rest: Period::seconds(5),
        }
    }
}

impl EngineTokensConfig {
    /// Makes file names begin at the folder of the configuration.
    pub fn resolve(&mut self, folder: &Path) {
        if let Some(file) = &mut self.token_file {
            *file = folder.join(&*file);
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let addresses = self.urls.iter().enumerate().filter_map(|(at, url)| {
            let text = url.parse::<EngineUrl>().err()?;
            Some(Problem::at(["urls".into(), at.into()], text))
        });
        problems.extend(addresses);
        if self.deadline.get().is_zero() {
            problems.push(Problem::of(
                "deadline",
                "no answer could come within 0s; the default is 300ms",
            ));
        }
        if let Some(Err(error)) = self.token_file.as_ref().map(std::fs::metadata) {
            let path = self
                .token_file
                .as_deref()
                .unwrap_or(Path::new(""))
                .display();
            problems.push(Problem::of(
                "token_file",
                format!("{path} cannot be read: {error}"),
            ));
        }
        if self.in_flight == 0 {
            problems.push(Problem::of(
                "in_flight",
                "nobody would ever be asked; the default is 64",
            ));
        }
        if self.failures == 0 {
            problems.push(Problem::of(
                "failures",
                "nobody rests without having failed; the default is 3",
            ));
        }
        problems
    }
}
