//! Request fields that control the engine, apart from the prompt.

use serde::Deserialize;
use serde::de::IgnoredAny;

/// Parameters of a generation request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct GenerationRequest {
    pub(crate) model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    max_output_tokens: Option<usize>,
    n: Option<usize>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) session_id: Option<String>,
    return_token_ids: Option<bool>,
    prompt_logprobs: Option<IgnoredAny>,
    echo: Option<bool>,
    logprobs: Option<IgnoredAny>,
    messages: Option<IgnoredAny>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// vLLM's default for completions. It is used for chats too, because a simulated model never stops
/// by itself.
const DEFAULT_MAX_TOKENS: usize = 16;
const MAX_CHOICES: usize = 128;

impl GenerationRequest {
    pub(crate) fn read(body: &[u8]) -> Result<Self, String> {
        let request: Self = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        if request.max_tokens() == 0 {
            return Err("max_tokens must be at least 1".into());
        }
        if !(1..=MAX_CHOICES).contains(&request.choices()) {
            return Err(format!("n must be from 1 to {MAX_CHOICES}"));
        }
        if request.cache_salt.as_deref() == Some("") {
            return Err("cache_salt must not be empty".into());
        }
        Ok(request)
    }

    pub(crate) fn streams(&self) -> bool {
        self.stream.unwrap_or_default()
    }

    pub(crate) fn wants_usage(&self) -> bool {
        self.stream_options
            .as_ref()
            .and_then(|options| options.include_usage)
            .unwrap_or_default()
    }

    pub(crate) fn max_tokens(&self) -> usize {
        self.max_completion_tokens
            .or(self.max_output_tokens)
            .or(self.max_tokens)
            .unwrap_or(DEFAULT_MAX_TOKENS)
    }

    /// Returns whether the prompt may be found in the cache. As in vLLM, log probabilities of
    /// prompt tokens require that all of them are computed. With `echo`, a chat has them always,
    /// and a completion if it has log probabilities at all.
    pub(crate) fn reads_prefix_cache(&self) -> bool {
        let is_echoed = self.echo.unwrap_or_default();
        let has_echoed_logprobs = self.messages.or(self.logprobs).is_some();
        self.prompt_logprobs.is_none() && !(is_echoed && has_echoed_logprobs)
    }

    pub(crate) fn choices(&self) -> usize {
        self.n.unwrap_or(1)
    }

    pub(crate) fn wants_token_ids(&self) -> bool {
        self.return_token_ids.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_and_null_fields_use_defaults() {
        for body in [
            "{}",
            r#"{"stream": null, "max_tokens": null, "n": null, "stream_options": null}"#,
        ] {
            let request = GenerationRequest::read(body.as_bytes()).unwrap();
            assert_eq!(
                (
                    request.streams(),
                    request.max_tokens(),
                    request.choices(),
                    request.wants_usage()
                ),
                (false, 16, 1, false)
            );
        }
        let request = GenerationRequest::read(
            br#"{"max_completion_tokens": 3, "max_tokens": 9, "ignore_eos": true}"#,
        )
        .unwrap();
        assert_eq!(request.max_tokens(), 3);
    }

    #[test]
    fn prompt_logprobs_bypass_the_cache() {
        let reads_prefix_cache = |body: &str| {
            let request = GenerationRequest::read(body.as_bytes()).unwrap();
            request.reads_prefix_cache()
        };
        for body in [
            r#"{"prompt": "a", "prompt_logprobs": 0}"#,
            r#"{"prompt": "a", "echo": true, "logprobs": 1}"#,
            r#"{"messages": [], "echo": true}"#,
        ] {
            assert!(!reads_prefix_cache(body), "{body}");
        }
        for body in [
            r#"{"prompt": "a", "echo": true}"#,
            r#"{"prompt": "a", "logprobs": 1}"#,
            r#"{"messages": [], "echo": false, "logprobs": true}"#,
        ] {
            assert!(reads_prefix_cache(body), "{body}");
        }
    }

    #[test]
    fn impossible_requests_are_rejected() {
        for body in [
            r#"{"max_tokens": 0}"#,
            r#"{"n": 0}"#,
            r#"{"cache_salt": ""}"#,
            r#"{"stream": 1}"#,
            "[",
        ] {
            assert!(GenerationRequest::read(body.as_bytes()).is_err(), "{body}");
        }
    }
}
