//! `gateway:`, `observe:` and `failure:`: what is agreed with the gateway, what is seen of answers, and what clients get
//! where nothing can be chosen.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ext_proc::contract::{Contract, Names, Profile};
use crate::settings::{Problem, is_header_name};

/// How bodies travel where the gateway does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AssumedBodies {
    /// The request's whole, in one message; the answer's not at all.
    #[default]
    Buffered,
    /// Both chunk by chunk, and sent back by us.
    FullDuplex,
}

/// `gateway:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    /// Which groups of headers name the way.
    pub profiles: Vec<Profile>,
    /// Names in place of those of the profiles.
    pub names: Names,
    /// Let Envoy look for the route again with the headers we set.
    pub clear_route_cache: bool,
    /// Further endpoints to try after the chosen one, in its header and metadata. Some gateways take one only.
    pub fallbacks: u32,
    /// Put the score of every candidate into the metadata.
    pub scores: bool,
    /// How bodies travel where the gateway does not tell.
    pub assume: AssumedBodies,
    /// Do what the conformance tests of the Gateway API inference extension ask of an endpoint picker, too.
    pub conformance: bool,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            profiles: Profile::DEFAULT.to_vec(),
            names: Names::default(),
            clear_route_cache: true,
            fallbacks: 0,
            scores: false,
            assume: AssumedBodies::default(),
            conformance: false,
        }
    }
}

impl GatewayConfig {
    /// Most endpoints that are listed after the chosen one.
    const MOST_FALLBACKS: u32 = 16;

    /// The headers agreed on.
    pub fn contract(&self) -> Contract {
        Contract::new(&self.profiles, &self.names)
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (field, names) in self.names.given() {
            for (at, name) in names
                .iter()
                .enumerate()
                .filter(|(_, name)| !is_header_name(name))
            {
                let text = format!(
                    "`{name}` is not the name of a header; write for example x-worker-instance-id"
                );
                problems.push(Problem::at(["names".into(), field.into(), at.into()], text));
            }
        }
        if self.fallbacks > Self::MOST_FALLBACKS {
            let text = format!(
                "more than {} endpoints help nobody; the default is 0",
                Self::MOST_FALLBACKS
            );
            problems.push(Problem::of("fallbacks", text));
        }
        problems
    }
}

/// `observe:`: what is seen of answers. More costs more: each piece of an answer that is shown costs Envoy and us some
/// microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Observe {
    /// Nothing; a prefill ends with the answer's headers.
    Off,
    /// When the first token comes.
    #[default]
    FirstToken,
    /// All of it, for the tokens that the engine counted.
    Usage,
    /// All of it for this share of the requests, and else the first token.
    Sampled(f64),
}

impl Observe {
    /// Whether all of an answer is looked at; `random` is in 0..1.
    pub fn samples(self, random: f64) -> bool {
        matches!(self, Observe::Sampled(share) if random < share)
    }
}

impl fmt::Display for Observe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Observe::Off => f.write_str("off"),
            Observe::FirstToken => f.write_str("first_token"),
            Observe::Usage => f.write_str("usage"),
            Observe::Sampled(share) => write!(f, "sampled({share})"),
        }
    }
}

/// What `observe` may be.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is none of off, first_token, usage and sampled(SHARE) with a share between 0 and 1")]
pub struct NotObservable(String);

impl FromStr for Observe {
    type Err = NotObservable;

    fn from_str(text: &str) -> Result<Self, NotObservable> {
        let share = || {
            text.strip_prefix("sampled(")?
                .strip_suffix(')')?
                .trim()
                .parse::<f64>()
                .ok()
        };
        match text {
            "off" => Ok(Observe::Off),
            "first_token" => Ok(Observe::FirstToken),
            "usage" => Ok(Observe::Usage),
            _ => match share() {
                Some(share) if (0.0..=1.0).contains(&share) => Ok(Observe::Sampled(share)),
                _ => Err(NotObservable(text.to_owned())),
            },
        }
    }
}

impl Serialize for Observe {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Observe {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl serde::de::Visitor<'_> for Text {
            type Value = Observe;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("off, first_token, usage or sampled(SHARE)")
            }

            // An error from in here is one of this place in the file.
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Observe, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// What becomes of a request for which no worker can be chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureMode {
    /// Envoy's own load balancer chooses.
    #[default]
    FailOpen,
    /// The client gets 503.
    FailClosed,
}

/// `failure:`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FailureConfig {
    /// What becomes of a request for which no worker can be chosen; models may say otherwise.
    pub mode: FailureMode,
    /// A request for a model that is not configured gets 404 instead of any worker.
    pub strict_models: bool,
    /// A body that cannot be read gets 400 here instead of in the engine.
    pub strict_bodies: bool,
    /// A body above `limits.body` gets 413 instead of being routed by load.
    pub strict_size: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_observed_is_written_as_it_is_read() {
        for text in ["off", "first_token", "usage", "sampled(0.25)", "sampled(1)"] {
            assert_eq!(text.parse::<Observe>().unwrap().to_string(), text);
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
            assert!(text.parse::<Observe>().is_err(), "{text}");
        }
    }
}
