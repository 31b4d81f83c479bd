//! The `gateway:` section: routing headers, the observation of responses, the response to a client
//! if no worker can be chosen, and added response headers.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_settings::{Problem, all_within, header_name_problems};

use crate::ext_proc::routing_headers::{HeaderNames, HeaderProfile, RoutingHeaders};

/// Body modes for a gateway that does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AssumedBodies {
    /// The request body is buffered, and the response body is not sent.
    #[default]
    Buffered,
    /// Both bodies are in full-duplex mode.
    FullDuplex,
}

/// The `gateway:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    /// Header profiles of the route.
    pub header_profiles: Vec<HeaderProfile>,
    /// Header names that replace those of the profiles.
    pub header_names: HeaderNames,
    /// Let Envoy select its route again with the routing headers.
    pub clear_route_cache: bool,
    /// Number of fallback endpoints after the chosen one, in the same header and metadata. Some
    /// gateways accept only one endpoint.
    pub fallback_endpoints: u32,
    /// Add the score of every candidate to the metadata.
    pub candidate_scores: bool,
    /// Body modes for a gateway that does not report them.
    pub default_body_mode: AssumedBodies,
    /// Support the conformance tests of the Gateway API inference extension.
    pub conformance: bool,
    /// Part of each response that Envoy sends to warmroute.
    pub observe: ObserveMode,
    /// Response to requests for which no worker can be chosen.
    pub failure: FailureConfig,
    /// Headers that warmroute adds to responses.
    pub response_headers: ResponseConfig,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            header_profiles: HeaderProfile::DEFAULT.to_vec(),
            header_names: HeaderNames::default(),
            clear_route_cache: true,
            fallback_endpoints: 0,
            candidate_scores: false,
            default_body_mode: AssumedBodies::default(),
            conformance: false,
            observe: ObserveMode::default(),
            failure: FailureConfig::default(),
            response_headers: ResponseConfig::default(),
        }
    }
}

impl GatewayConfig {
    /// Maximum number of endpoints after the chosen one.
    const MAX_FALLBACKS: u32 = 16;

    /// Returns the headers of the configured profiles and names.
    pub fn routing_headers(&self) -> RoutingHeaders {
        RoutingHeaders::new(&self.header_profiles, &self.header_names)
    }

    /// Returns whether Dynamo's front ends read the routing headers.
    pub fn is_dynamo(&self) -> bool {
        self.header_profiles.contains(&HeaderProfile::Dynamo)
    }

    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (field, names) in self.header_names.overrides() {
            let found = header_name_problems(field, names, "x-worker-instance-id");
            problems.extend(all_within("header_names", found));
        }
        if self.fallback_endpoints > Self::MAX_FALLBACKS {
            let text = format!(
                "more than {} endpoints are useless; the default is 0",
                Self::MAX_FALLBACKS
            );
            problems.push(Problem::of("fallback_endpoints", text));
        }
        problems
    }
}

/// `gateway.observe:`: observation of responses. Each observed piece of a response costs Envoy and
/// warmroute some microseconds.
#[derive(Clone, Copy, Debug, PartialEq, JsonSchema)]
#[schemars(rename_all = "snake_case")]
pub enum ObserveMode {
    /// Nothing. A prefill is assumed to end with the response headers.
    Off,
    /// The time of the first token.
    FirstToken,
    /// The whole body, for the token counts of the engine.
    Usage,
    /// The whole body for this share of the requests, otherwise the first token:
    /// `sampled(SHARE)`.
    #[schemars(with = "String", untagged, extend("pattern" = r"^sampled\([0-9.e+-]+\)$"))]
    Sampled(f64),
}

/// Share of the responses whose whole body is observed by default, for the audit and the learned
/// latency.
const DEFAULT_SAMPLED_SHARE: f64 = 0.05;

impl Default for ObserveMode {
    fn default() -> Self {
        Self::Sampled(DEFAULT_SAMPLED_SHARE)
    }
}

impl ObserveMode {
    /// Returns whether to observe the whole body of a response; `random` is in 0..1.
    pub fn is_sampled(self, random: f64) -> bool {
        matches!(self, ObserveMode::Sampled(share) if random < share)
    }
}

impl fmt::Display for ObserveMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ObserveMode::Off => f.write_str("off"),
            ObserveMode::FirstToken => f.write_str("first_token"),
            ObserveMode::Usage => f.write_str("usage"),
            ObserveMode::Sampled(share) => write!(f, "sampled({share})"),
        }
    }
}

/// Error of an invalid `observe` value.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is none of off, first_token, usage and sampled(SHARE) with a share between 0 and 1")]
pub struct ParseObserveModeError(String);

impl FromStr for ObserveMode {
    type Err = ParseObserveModeError;

    fn from_str(text: &str) -> Result<Self, ParseObserveModeError> {
        let share = || {
            text.strip_prefix("sampled(")?
                .strip_suffix(')')?
                .trim()
                .parse::<f64>()
                .ok()
        };
        match text {
            "off" => Ok(ObserveMode::Off),
            "first_token" => Ok(ObserveMode::FirstToken),
            "usage" => Ok(ObserveMode::Usage),
            _ => match share() {
                Some(share) if (0.0..=1.0).contains(&share) => Ok(ObserveMode::Sampled(share)),
                _ => Err(ParseObserveModeError(text.to_owned())),
            },
        }
    }
}

impl Serialize for ObserveMode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ObserveMode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObserveModeVisitor;

        impl serde::de::Visitor<'_> for ObserveModeVisitor {
            type Value = ObserveMode;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("off, first_token, usage or sampled(SHARE)")
            }

            // An error returned here carries the position in the file.
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ObserveMode, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(ObserveModeVisitor)
    }
}

/// Handling of a request for which no worker can be chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureMode {
    /// Envoy's own load balancer chooses.
    #[default]
    FailOpen,
    /// The client receives a 503.
    FailClosed,
}

/// The `gateway.failure:` section.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FailureConfig {
    /// Handling of a request for which no worker can be chosen. Models can override it.
    pub mode: FailureMode,
    /// Reject requests for an unknown model with 404, instead of sending them to any worker.
    pub strict_models: bool,
    /// Reject unreadable bodies with 400, instead of leaving that to the engine.
    pub strict_bodies: bool,
    /// Reject bodies above `requests.limits.max_body_size` with 413, instead of routing them by
    /// load only.
    pub strict_size: bool,
}

/// The `gateway.response_headers:` section: response headers that warmroute adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseConfig {
    /// Report the routing mode.
    pub mode: bool,
    /// Report the chosen worker rank. Disabled by default, because it shows clients the layout of
    /// the fleet.
    pub worker: bool,
    /// Report the predicted number of cached prompt tokens. Disabled by default, for the same
    /// reason.
    pub prediction: bool,
    /// Report a short explanation of the choice. Disabled by default, for the same reason.
    pub why: bool,
}

impl Default for ResponseConfig {
    fn default() -> Self {
        Self {
            mode: true,
            worker: false,
            prediction: false,
            why: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn observe_mode_round_trips_through_text() {
        for text in ["off", "first_token", "usage", "sampled(0.25)", "sampled(1)"] {
            assert_eq!(text.parse::<ObserveMode>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "on",
            "sampled",
            "sampled()",
            "sampled(2)",
            "sampled(-1)",
            "sampled(NaN)",
            "sampled(x)",
        ] {
            assert!(text.parse::<ObserveMode>().is_err(), "{text}");
        }
    }
}
