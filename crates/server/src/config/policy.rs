//! `policy` and `weights`: the routing policy of all models or of one model.

use std::fmt;

use schemars::{JsonSchema, Schema, json_schema};
use serde::de::{self, IntoDeserializer as _, MapAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use warmroute_core::policy::{
    PolicyName, PolicySettings, RoutingPolicy, SecondsSettings, StickySettings, Weights,
};
use warmroute_settings::{PathStep, Problem};

/// A policy: its name, or a mapping with its name and settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = allow_bare_name)]
pub struct PolicyConfig {
    /// Name of the policy or of a preset of `linear`.
    pub name: PolicyName,
    /// Policy `seconds`: weight of a second before the first token, 0.1 to 100; 30 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_weight: Option<f64>,
    /// Policy `sticky`: prefill tokens by which the queue of a warm rank may exceed the shortest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_excess_tokens: Option<u64>,
}

/// Allows a policy without settings to be written as its name.
fn allow_bare_name(schema: &mut Schema) {
    let name = schema.get("properties").map(|keys| keys["name"].clone());
    *schema = json_schema!({"anyOf": [name, *schema]});
}

/// Weights that are set. The others come from the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WeightsConfig {
    /// Credit for each block cached on the device. Policy `linear`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_score_credit: Option<f64>,
    /// Decay of that credit with the prefill backlog of a rank above the least loaded one. Policy
    /// `linear`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_score_credit_decay: Option<f64>,
    /// Weight of the prefill term relative to the decode term. Policy `linear`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_load_scale: Option<f64>,
    /// Cost of each running request. Policy `linear`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_active_request_weight: Option<f64>,
    /// Credit for each block cached in host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_cache_hit_weight: Option<f64>,
    /// Credit for each block cached on disk or in external storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_cache_hit_weight: Option<f64>,
    /// Credit for each block in a cache shared by all workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_cache_multiplier: Option<f64>,
    /// Sampling temperature; 0 chooses the minimum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_temperature: Option<f64>,
}

impl PolicyConfig {
    /// Creates a policy with its default settings.
    pub fn named(name: PolicyName) -> Self {
        Self {
            name,
            first_token_weight: None,
            max_excess_tokens: None,
        }
    }

    /// Returns the policy with the configured weights.
    pub fn settings(&self, weights: &WeightsConfig) -> PolicySettings {
        let mut settings = PolicySettings::named(self.name, &Weights::default());
        settings.weights = weights.apply(settings.weights);
        match &mut settings.routing {
            RoutingPolicy::Seconds(SecondsSettings { first_token_weight }) => {
                *first_token_weight = self.first_token_weight.unwrap_or(*first_token_weight);
            }
            RoutingPolicy::Sticky(StickySettings { max_excess_tokens }) => {
                *max_excess_tokens = self.max_excess_tokens.unwrap_or(*max_excess_tokens);
            }
            _ => {}
        }
        settings
    }

    /// Returns the problems of the settings.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let name = self.name.as_str();
        let settings = self.settings(&WeightsConfig::default());
        if let RoutingPolicy::Seconds(seconds) = settings.routing {
            let invalid = seconds.validate().err();
            problems.extend(invalid.map(|(key, text)| Problem::of(key, format!("`{key}` {text}"))));
        }
        let needs = [
            (
                "first_token_weight",
                self.first_token_weight.is_some(),
                PolicyName::Seconds,
            ),
            (
                "max_excess_tokens",
                self.max_excess_tokens.is_some(),
                PolicyName::Sticky,
            ),
        ];
        for (key, is_set, owner) in needs {
            if is_set && self.name != owner {
                let text = format!(
                    "`{key}` is a setting of the policy `{}`, but the policy is `{name}`; remove \
                    one of the two",
                    owner.as_str()
                );
                problems.push(Problem::of(key, text));
            }
        }
        problems
    }

    /// Returns the problem of weights that the policy does not use.
    pub fn weight_conflict(&self, weights: &WeightsConfig) -> Option<Problem> {
        let weight = weights.linear_weight()?;
        let is_linear = self.settings(weights).routing == RoutingPolicy::Linear;
        let name = self.name.as_str();
        let text = format!(
            "the policy `{name}` does not use `routing.weights.{weight}`, which belongs to \
            `linear`; remove one of the two"
        );
        (!is_linear).then(|| Problem::at([] as [PathStep; 0], text))
    }
}

impl Serialize for PolicyConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == Self::named(self.name) {
            return serializer.serialize_str(self.name.as_str());
        }
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for PolicyConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PolicyVisitor)
    }
}

struct PolicyVisitor;

impl<'de> Visitor<'de> for PolicyVisitor {
    type Value = PolicyConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a policy, or a mapping with `name`")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<PolicyConfig, E> {
        PolicyName::deserialize(name.into_deserializer()).map(PolicyConfig::named)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PolicyConfig, A::Error> {
        PolicyConfig::deserialize(MapAccessDeserializer::new(map))
    }
}

impl WeightsConfig {
    /// Replaces the weights that are set.
    pub fn apply(&self, base: Weights) -> Weights {
        Weights {
            overlap_score_credit: self
                .overlap_score_credit
                .unwrap_or(base.overlap_score_credit),
            overlap_score_credit_decay: self
                .overlap_score_credit_decay
                .unwrap_or(base.overlap_score_credit_decay),
            prefill_load_scale: self.prefill_load_scale.unwrap_or(base.prefill_load_scale),
            decode_active_request_weight: self
                .decode_active_request_weight
                .unwrap_or(base.decode_active_request_weight),
            host_cache_hit_weight: self
                .host_cache_hit_weight
                .unwrap_or(base.host_cache_hit_weight),
            disk_cache_hit_weight: self
                .disk_cache_hit_weight
                .unwrap_or(base.disk_cache_hit_weight),
            shared_cache_multiplier: self
                .shared_cache_multiplier
                .unwrap_or(base.shared_cache_multiplier),
            router_temperature: self.router_temperature.unwrap_or(base.router_temperature),
        }
    }

    /// Returns the first weight that only the policy `linear` uses.
    pub(super) fn linear_weight(&self) -> Option<&'static str> {
        let weights = [
            ("overlap_score_credit", self.overlap_score_credit),
            (
                "overlap_score_credit_decay",
                self.overlap_score_credit_decay,
            ),
            ("prefill_load_scale", self.prefill_load_scale),
            (
                "decode_active_request_weight",
                self.decode_active_request_weight,
            ),
        ];
        let is_set = weights.into_iter().find(|(_, weight)| weight.is_some());
        is_set.map(|(name, _)| name)
    }
}
