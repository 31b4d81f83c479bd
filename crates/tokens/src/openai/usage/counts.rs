//! Token counts of a response, by their names in the APIs.

use serde::Deserialize;
use serde::de::Deserializer;
use serde_json::value::RawValue;

use super::TokenUsage;

/// Token counts by their names in the APIs. A later count replaces an earlier one, unless it is
/// absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct UsageCounts {
    prompt_tokens: OptionalCount,
    completion_tokens: OptionalCount,
    #[serde(deserialize_with = "object_or_default")]
    prompt_tokens_details: TokenDetails,
    /// Prompt tokens in the Responses and Messages APIs.
    input_tokens: OptionalCount,
    output_tokens: OptionalCount,
    #[serde(deserialize_with = "object_or_default")]
    input_tokens_details: TokenDetails,
    /// The Messages API reports these in addition to `input_tokens`.
    cache_read_input_tokens: OptionalCount,
    cache_creation_input_tokens: OptionalCount,
    /// Cached tokens in SGLang's native API.
    cached_tokens: OptionalCount,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct TokenDetails {
    cached_tokens: OptionalCount,
}

/// A count that may be absent or not a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OptionalCount(Option<u64>);

impl UsageCounts {
    /// Replaces the counts that are present in a later event.
    pub(super) fn merge(&mut self, mut later: Self) {
        for (count, later) in self.counts_mut().into_iter().zip(later.counts_mut()) {
            count.0 = later.0.or(count.0);
        }
    }

    /// Returns true if the engine has reported output tokens.
    pub(super) fn has_output(&self) -> bool {
        [self.completion_tokens, self.output_tokens]
            .iter()
            .any(|count| count.0.is_some_and(|tokens| tokens > 0))
    }

    /// Adds the counts of another response to the same request.
    pub(super) fn add(&mut self, mut other: Self) {
        for (count, other) in self.counts_mut().into_iter().zip(other.counts_mut()) {
            count.0 = count.0.map_or(other.0, |sum| {
                Some(sum.saturating_add(other.0.unwrap_or(0)))
            });
        }
    }

    fn counts_mut(&mut self) -> [&mut OptionalCount; 9] {
        [
            &mut self.prompt_tokens,
            &mut self.completion_tokens,
            &mut self.prompt_tokens_details.cached_tokens,
            &mut self.input_tokens,
            &mut self.output_tokens,
            &mut self.input_tokens_details.cached_tokens,
            &mut self.cache_read_input_tokens,
            &mut self.cache_creation_input_tokens,
            &mut self.cached_tokens,
        ]
    }

    /// Returns the usage in the names of the OpenAI APIs.
    pub(super) fn into_usage(self) -> TokenUsage {
        let additional = [
            self.cache_read_input_tokens,
            self.cache_creation_input_tokens,
        ];
        let input = additional
            .into_iter()
            .fold(self.input_tokens.0.unwrap_or(0), |sum, count| {
                sum.saturating_add(count.0.unwrap_or(0))
            });
        let details = self
            .prompt_tokens_details
            .cached_tokens
            .0
            .or(self.input_tokens_details.cached_tokens.0);
        TokenUsage {
            prompt_tokens: self.prompt_tokens.0.unwrap_or(input),
            completion_tokens: self
                .completion_tokens
                .0
                .or(self.output_tokens.0)
                .unwrap_or(0),
            cached_tokens: details
                .or(self.cache_read_input_tokens.0)
                .or(self.cached_tokens.0),
        }
    }
}

/// Parses a value if it is an object.
pub(super) fn parse_object<'a, T: Deserialize<'a>>(json: &'a RawValue) -> Option<T> {
    let text = json.get();
    text.starts_with('{')
        .then(|| serde_json::from_str(text).ok())?
}

/// Deserializes an object, or returns the default for any other value.
pub(super) fn object_or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    <&RawValue>::deserialize(deserializer).map(|raw| parse_object(raw).unwrap_or_default())
}

impl<'de> Deserialize<'de> for OptionalCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(raw.get().parse().ok()))
    }
}
