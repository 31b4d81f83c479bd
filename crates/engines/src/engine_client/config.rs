//! `engines:`: HTTP calls to engines, for engine settings, tokenizer parity tests and engine-side
//! tokenization.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::EngineUrl;
use warmroute_core::worker::WorkerEndpoint;
use warmroute_settings::{ByteSize, DurationSetting, Problem};

/// Section `engines:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EnginesConfig {
    /// Protocol of the workers' endpoints.
    pub scheme: EngineScheme,
    /// File with the token that workers require (`vllm serve --api-key`). It is reloaded after a
    /// change.
    pub token_file: Option<PathBuf>,
    /// Adds the token to forwarded client requests that have none. Otherwise only warmroute's own
    /// calls use it.
    pub forward_token: bool,
    /// CA certificates (PEM) for engines with TLS. Default: the system's.
    pub ca_file: Option<PathBuf>,
    /// Maximum duration of a call.
    pub timeout: DurationSetting,
    /// Maximum number of concurrent calls.
    pub max_concurrency: u32,
    /// Maximum size of a response.
    pub max_response_size: ByteSize,
}

/// Protocol of workers' endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineScheme {
    /// Plain HTTP/1.1.
    #[default]
    Http,
    /// TLS; HTTP/2 if both sides support it.
    Https,
    /// Plain HTTP/2 with prior knowledge.
    H2c,
}

impl Default for EnginesConfig {
    fn default() -> Self {
        Self {
            scheme: EngineScheme::Http,
            token_file: None,
            forward_token: false,
            ca_file: None,
            timeout: DurationSetting::seconds(2),
            max_concurrency: 64,
            max_response_size: ByteSize::mib(16),
        }
    }
}

impl EnginesConfig {
    /// Returns the base URL of a worker.
    pub fn url(&self, endpoint: WorkerEndpoint) -> EngineUrl {
        match self.scheme {
            EngineScheme::Http | EngineScheme::H2c => EngineUrl::http(endpoint),
            EngineScheme::Https => EngineUrl::https(endpoint),
        }
    }

    /// Returns semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (key, file) in [("token_file", &self.token_file), ("ca_file", &self.ca_file)] {
            if let Some(Err(error)) = file.as_ref().map(std::fs::metadata) {
                let path = file.as_deref().unwrap_or(Path::new("")).display();
                problems.push(Problem::of(key, format!("{path} cannot be read: {error}")));
            }
        }
        if self.forward_token && self.token_file.is_none() {
            problems.push(Problem::of(
                "forward_token",
                "there is no token to forward; name its file in `token_file`",
            ));
        }
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "every request would time out after 0s; the default is 2s",
            ));
        }
        if self.max_concurrency == 0 {
            problems.push(Problem::of(
                "max_concurrency",
                "no call could be made; the default is 64",
            ));
        }
        if self.max_response_size.0 == 0 {
            problems.push(Problem::of(
                "max_response_size",
                "no answer fits a limit of 0; the default is 16MiB",
            ));
        }
        problems
    }
}
