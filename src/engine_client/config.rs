//! `engines:`: how engines are asked over HTTP, for learning their settings, for testing tokens against them, and for
//! tokens of their own.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::EngineUrl;
use crate::settings::{Period, Problem, Size};
use crate::worker::Endpoint;

/// `engines:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnginesConfig {
    /// How workers are spoken to at their endpoints.
    pub scheme: Scheme,
    /// A file with the token that workers ask for (`vllm serve --api-key`); it is read again when it changes.
    pub token_file: Option<PathBuf>,
    /// Whether requests that we pass on for clients get this token where they bring none; else nobody computes with it but us.
    pub lend_token: bool,
    /// Certificates, as PEM, of who may vouch for engines by TLS; none: whom this system trusts.
    pub ca_file: Option<PathBuf>,
    /// How long a call takes at most.
    pub deadline: Period,
    /// Calls under way at once.
    pub in_flight: u32,
    /// Longest answer that is read.
    pub answer: Size,
}

/// How workers are spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Plain.
    #[default]
    Http,
    /// By TLS; whether it is HTTP/2 is agreed upon.
    Https,
    /// Plain, and always HTTP/2.
    H2c,
}

impl Default for EnginesConfig {
    fn default() -> Self {
        Self {
            scheme: Scheme::Http,
            token_file: None,
            lend_token: false,
            ca_file: None,
            deadline: Period::seconds(2),
            in_flight: 64,
            answer: Size::mib(16),
        }
    }
}

impl EnginesConfig {
    /// Where a worker is asked.
    pub fn url(&self, endpoint: Endpoint) -> EngineUrl {
        match self.scheme {
            Scheme::Http | Scheme::H2c => EngineUrl::http(endpoint),
            Scheme::Https => EngineUrl::https(endpoint),
        }
    }

    /// Makes file names begin at the folder of the configuration.
    pub fn resolve(&mut self, folder: &Path) {
        for file in [&mut self.token_file, &mut self.ca_file]
            .into_iter()
            .flatten()
        {
            *file = folder.join(&*file);
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (key, file) in [("token_file", &self.token_file), ("ca_file", &self.ca_file)] {
            if let Some(Err(error)) = file.as_ref().map(std::fs::metadata) {
                let path = file.as_deref().unwrap_or(Path::new("")).display();
                problems.push(Problem::of(key, format!("{path} cannot be read: {error}")));
            }
        }
        if self.lend_token && self.token_file.is_none() {
            problems.push(Problem::of(
                "lend_token",
                "there is no token to lend; name it in `token_file`",
            ));
        }
        if self.deadline.get().is_zero() {
            problems.push(Problem::of(
                "deadline",
                "no answer could come within 0s; the default is 2s",
            ));
        }
        if self.in_flight == 0 {
            problems.push(Problem::of(
                "in_flight",
                "no call could be made; the default is 64",
            ));
        }
        if self.answer.0 == 0 {
            problems.push(Problem::of(
                "answer",
                "no answer fits a limit of 0; the default is 16MiB",
            ));
        }
        problems
    }
}
