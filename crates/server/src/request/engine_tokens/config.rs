//! The `models[].remote_tokenizer:` section: tokens from engines.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_engines::engine_client::EngineUrl;
use warmroute_settings::{DurationSetting, Problem};

/// The `models[].remote_tokenizer:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTokensConfig {
    /// Requests for which engines are queried.
    pub mode: EngineTokensTrigger,
    /// API to query.
    pub endpoint: RenderPath,
    /// Render servers. Default: the workers of the model.
    pub urls: Vec<String>,
    /// Timeout of a request. Afterwards, the request is routed by the local tokens, or by load
    /// only.
    pub timeout: DurationSetting,
    /// File with the bearer token. Default: that of `engines`.
    pub token_file: Option<PathBuf>,
    /// Maximum number of concurrent queries. Further requests use the local tokens.
    pub max_concurrency: u32,
}

/// Requests for which engines are queried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineTokensTrigger {
    /// All requests.
    #[default]
    Always,
    /// Requests while parity of the local tokens is broken.
    OnMismatch,
}

/// API for engine tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RenderPath {
    /// `POST /v1/…/render` with the request itself: exact for all requests, including images. vLLM
    /// offers it with `--enable-scale-out`, and `vllm launch render`.
    #[default]
    Render,
    /// `POST /tokenize`: for conversations and single texts, without images and without fields that
    /// `/tokenize` ignores.
    Tokenize,
}

impl Default for EngineTokensConfig {
    fn default() -> Self {
        Self {
            mode: EngineTokensTrigger::Always,
            endpoint: RenderPath::Render,
            urls: Vec::new(),
            timeout: DurationSetting::millis(300),
            token_file: None,
            max_concurrency: 64,
        }
    }
}

impl EngineTokensConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let addresses = self.urls.iter().enumerate().filter_map(|(at, url)| {
            let text = url.parse::<EngineUrl>().err()?;
            Some(Problem::at(["urls".into(), at.into()], text))
        });
        problems.extend(addresses);
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "no result could arrive within 0s; the default is 300ms",
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
        if self.max_concurrency == 0 {
            problems.push(Problem::of(
                "max_concurrency",
                "no query could run; the default is 64",
            ));
        }
        problems
    }
}
