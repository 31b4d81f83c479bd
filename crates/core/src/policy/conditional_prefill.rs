//! Conditional disaggregation: decides whether a prefill worker or the decode worker runs the
//! prefill of a request. By default, a prefill worker does. The configuration can allow local
//! prefills of short prompts, while the prefill worker is busy, or if their predicted cost is
//! lower. The router chooses the candidate workers first. The functions here are pure.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use super::weights::check_range;
use crate::queue::BusyThreshold;

/// `disaggregation:`: handling of separate prefill workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DisaggregationConfig {
    /// Reject requests (503) while no prefill worker can be chosen, instead of letting the decode
    /// worker prefill. With the header profile `dynamo`, decode workers never prefill; without
    /// `enforce`, such a request gets no routing headers, and the front end chooses both workers.
    pub enforce: bool,
    /// Conditions under which the decode worker prefills although there are prefill workers.
    /// Default: never. Not with the header profile `dynamo`.
    pub conditional: Option<ConditionalPrefillConfig>,
}

/// Conditions of a local prefill.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ConditionalPrefillConfig {
    /// Policy.
    pub policy: ConditionalPrefillPolicy,
    /// Policy `isl_bounding`: maximum number of uncached tokens for a local prefill.
    pub uncached_tokens: u64,
    /// Policy `isl_bounding`: maximum uncached share of the prompt for a local prefill.
    pub uncached_share: f64,
    /// Policy `prefill_load`: share of its batch size above which the prefill worker is busy.
    pub prefill_busy_threshold: Option<f64>,
    /// Share of its blocks above which a decode worker is too busy for a local prefill, whatever
    /// the policy.
    pub decode_busy_threshold: Option<f64>,
}

/// Policies for a local prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ConditionalPrefillPolicy {
    /// The uncached part of the prompt is small, in tokens and as a share.
    #[default]
    IslBounding,
    /// The chosen prefill worker has a long backlog.
    PrefillLoad,
    /// Either of the two.
    IslOrLoad,
    /// A local prefill costs at most as many seconds as a remote one, by the learned latency.
    Learned,
}

impl ConditionalPrefillPolicy {
    fn needs_busy_threshold(self) -> bool {
        matches!(
            self,
            ConditionalPrefillPolicy::PrefillLoad | ConditionalPrefillPolicy::IslOrLoad
        )
    }
}

impl Default for ConditionalPrefillConfig {
    fn default() -> Self {
        Self {
            policy: ConditionalPrefillPolicy::IslBounding,
            uncached_tokens: 2048,
            uncached_share: 0.7,
            prefill_busy_threshold: None,
            decode_busy_threshold: None,
        }
    }
}

/// Inputs of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConditionalPrefillInputs {
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the decode worker has cached.
    pub decode_cached_tokens: u64,
    /// Blocks that the decode worker will hold, including this request.
    pub decode_blocks: u64,
    /// Total blocks of the decode worker.
    pub decode_total_blocks: Option<u64>,
    /// Backlog of the prefill worker, without this request.
    pub prefill_tokens: u64,
    /// Tokens that the prefill worker computes in one step.
    pub prefill_capacity: Option<u64>,
    /// Predicted costs. Only the policy `learned` needs them.
    pub costs: Option<PhaseCosts>,
}

/// Predicted costs of a request with a local and with a remote prefill, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseCosts {
    /// Both phases on one decode worker.
    pub local: f64,
    /// Prefill on a prefill worker, KV transfer, and decode on a decode worker.
    pub remote: f64,
}

impl PhaseCosts {
    /// Returns whether the local prefill costs at most as much. Costs that are not finite are not
    /// comparable, and the prefill is then remote.
    fn is_local_cheaper(&self) -> bool {
        self.local.is_finite() && self.local <= self.remote
    }
}

/// Reason why the decode worker does the prefill although there are prefill workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum LocalPrefillReason {
    /// The uncached part of the prompt is small.
    ShortPrompt,
    /// The prefill worker is busy.
    PrefillBusy,
    /// The local prefill is predicted to cost less time.
    LowerCost,
    /// No decode worker is in reach of the prefill worker.
    TopologyMismatch,
    /// The request cannot be split between two workers.
    NotSplittable,
    /// The prefill workers failed.
    PrefillFailed,
    /// A prefill worker rejected the request.
    PrefillRefused,
    /// The limit of concurrent prefills was reached.
    PrefillConcurrencyLimit,
    /// A prefill worker returned no KV transfer parameters.
    NoHandoff,
}

impl LocalPrefillReason {
    /// Returns the label in metrics and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl ConditionalPrefillConfig {
    /// Returns the reason for a local prefill, or `None` for a remote one.
    pub fn local_prefill_reason(
        &self,
        inputs: &ConditionalPrefillInputs,
    ) -> Option<LocalPrefillReason> {
        if self.is_decode_busy(inputs) {
            return None;
        }
        let short_prompt = || {
            self.is_uncached_part_small(inputs)
                .then_some(LocalPrefillReason::ShortPrompt)
        };
        let prefill_busy = || {
            self.is_prefill_busy(inputs)
                .then_some(LocalPrefillReason::PrefillBusy)
        };
        match self.policy {
            ConditionalPrefillPolicy::IslBounding => short_prompt(),
            ConditionalPrefillPolicy::PrefillLoad => prefill_busy(),
            ConditionalPrefillPolicy::IslOrLoad => short_prompt().or_else(prefill_busy),
            ConditionalPrefillPolicy::Learned => inputs
                .costs
                .filter(PhaseCosts::is_local_cheaper)
                .map(|_| LocalPrefillReason::LowerCost),
        }
    }

    fn is_uncached_part_small(&self, inputs: &ConditionalPrefillInputs) -> bool {
        let uncached = inputs
            .prompt_tokens
            .saturating_sub(inputs.decode_cached_tokens);
        let share = if inputs.prompt_tokens == 0 {
            0.0
        } else {
            uncached as f64 / inputs.prompt_tokens as f64
        };
        uncached < self.uncached_tokens && share < self.uncached_share
    }

    fn is_prefill_busy(&self, inputs: &ConditionalPrefillInputs) -> bool {
        let threshold = BusyThreshold {
            prefill_tokens: None,
            prefill_fraction: self.prefill_busy_threshold,
        };
        threshold.is_exceeded(inputs.prefill_tokens, inputs.prefill_capacity)
    }

    /// Returns whether the decode worker is too busy. A worker of unknown size counts as busy.
    fn is_decode_busy(&self, inputs: &ConditionalPrefillInputs) -> bool {
        let exceeds = |share: f64| match inputs.decode_total_blocks {
            Some(total) => inputs.decode_blocks as f64 > share * total as f64,
            None => true,
        };
        self.decode_busy_threshold.is_some_and(exceeds)
    }
}

impl DisaggregationConfig {
    /// Returns whether the learned latency decides between a local and a remote prefill.
    pub(crate) fn compares_costs(&self) -> bool {
        self.conditional
            .is_some_and(|rule| rule.policy == ConditionalPrefillPolicy::Learned)
    }

    /// Checks the ranges of the values. The error has the key below `conditional` and a
    /// description.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let Some(rule) = &self.conditional else {
            return Ok(());
        };
        let shares = [
            ("uncached_share", Some(rule.uncached_share), 1.0),
            (
                "prefill_busy_threshold",
                rule.prefill_busy_threshold,
                f64::INFINITY,
            ),
            ("decode_busy_threshold", rule.decode_busy_threshold, 1.0),
        ];
        for (name, value, most) in shares {
            if let Some(value) = value {
                check_range(name, value, most)?;
            }
        }
        if rule.policy.needs_busy_threshold() && rule.prefill_busy_threshold.is_none() {
            let text = "is required by this policy; set the share of a prefill worker's batch \
                size, 1.0 for one full step";
            return Err(("prefill_busy_threshold", text.to_owned()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: ConditionalPrefillInputs = ConditionalPrefillInputs {
        prompt_tokens: 4000,
        decode_cached_tokens: 3000,
        decode_blocks: 80,
        decode_total_blocks: Some(100),
        prefill_tokens: 9000,
        prefill_capacity: Some(8192),
        costs: None,
    };

    fn rule(policy: ConditionalPrefillPolicy) -> ConditionalPrefillConfig {
        ConditionalPrefillConfig {
            policy,
            prefill_busy_threshold: Some(1.0),
            ..ConditionalPrefillConfig::default()
        }
    }

    /// Returns inputs for a prompt of 100 tokens, of which the decode worker has cached this
    /// number.
    fn short_prompt(decode_cached_tokens: u64) -> ConditionalPrefillInputs {
        ConditionalPrefillInputs {
            prompt_tokens: 100,
            decode_cached_tokens,
            ..FACTS
        }
    }

    #[test]
    fn isl_bounding_keeps_short_prefills_local() {
        let cached = |decode_cached_tokens| ConditionalPrefillInputs {
            decode_cached_tokens,
            ..FACTS
        };
        let rule = rule(ConditionalPrefillPolicy::IslBounding);
        for (inputs, is_local) in [
            (FACTS, true),
            (cached(1952), false),
            (short_prompt(30), false),
            (short_prompt(31), true),
            (cached(0), false),
        ] {
            let expected = is_local.then_some(LocalPrefillReason::ShortPrompt);
            assert_eq!(rule.local_prefill_reason(&inputs), expected, "{inputs:?}");
        }
    }

    #[test]
    fn prefill_load_decides_local_prefill() {
        let long = ConditionalPrefillInputs {
            decode_cached_tokens: 0,
            ..FACTS
        };
        let idle = ConditionalPrefillInputs {
            prefill_tokens: 8192,
            ..FACTS
        };
        let cases = [
            (
                ConditionalPrefillPolicy::PrefillLoad,
                FACTS,
                Some(LocalPrefillReason::PrefillBusy),
            ),
            (ConditionalPrefillPolicy::PrefillLoad, idle, None),
            (
                ConditionalPrefillPolicy::PrefillLoad,
                ConditionalPrefillInputs {
                    prefill_capacity: None,
                    ..FACTS
                },
                None,
            ),
            (
                ConditionalPrefillPolicy::IslOrLoad,
                long,
                Some(LocalPrefillReason::PrefillBusy),
            ),
            (
                ConditionalPrefillPolicy::IslOrLoad,
                idle,
                Some(LocalPrefillReason::ShortPrompt),
            ),
            (
                ConditionalPrefillPolicy::IslOrLoad,
                ConditionalPrefillInputs {
                    prefill_tokens: 0,
                    ..long
                },
                None,
            ),
        ];
        for (policy, inputs, expected) in cases {
            assert_eq!(
                rule(policy).local_prefill_reason(&inputs),
                expected,
                "{policy:?} {inputs:?}"
            );
        }
    }

    #[test]
    fn learned_policy_compares_costs() {
        let rule = rule(ConditionalPrefillPolicy::Learned);
        for (local, remote, is_local) in [
            (1.0, 2.0, true),
            (1.0, 1.0, true),
            (2.0, 1.0, false),
            (1.0, f64::INFINITY, true),
            (f64::INFINITY, f64::INFINITY, false),
            (f64::NAN, 1.0, false),
            (1.0, f64::NAN, false),
        ] {
            let inputs = ConditionalPrefillInputs {
                costs: Some(PhaseCosts { local, remote }),
                ..FACTS
            };
            let expected = is_local.then_some(LocalPrefillReason::LowerCost);
            assert_eq!(rule.local_prefill_reason(&inputs), expected, "{inputs:?}");
        }
        assert_eq!(rule.local_prefill_reason(&FACTS), None, "unknown costs");
    }

    #[test]
    fn busy_or_unknown_decode_worker_never_prefills() {
        let config = ConditionalPrefillConfig {
            decode_busy_threshold: Some(0.8),
            ..rule(ConditionalPrefillPolicy::IslBounding)
        };
        assert_eq!(
            config.local_prefill_reason(&FACTS),
            Some(LocalPrefillReason::ShortPrompt)
        );
        assert_eq!(
            config.local_prefill_reason(&ConditionalPrefillInputs {
                decode_blocks: 81,
                ..FACTS
            }),
            None
        );
        assert_eq!(
            config.local_prefill_reason(&ConditionalPrefillInputs {
                decode_total_blocks: None,
                ..FACTS
            }),
            None
        );
    }

    #[test]
    fn settings_out_of_range_are_rejected_by_name() {
        let with = |conditional| DisaggregationConfig {
            enforce: false,
            conditional: Some(conditional),
        };
        let bad = [
            (
                "uncached_share",
                ConditionalPrefillConfig {
                    uncached_share: 1.5,
                    ..ConditionalPrefillConfig::default()
                },
            ),
            (
                "decode_busy_threshold",
                ConditionalPrefillConfig {
                    decode_busy_threshold: Some(-0.1),
                    ..ConditionalPrefillConfig::default()
                },
            ),
            (
                "prefill_busy_threshold",
                ConditionalPrefillConfig {
                    prefill_busy_threshold: Some(f64::NAN),
                    ..ConditionalPrefillConfig::default()
                },
            ),
            (
                "prefill_busy_threshold",
                ConditionalPrefillConfig {
                    policy: ConditionalPrefillPolicy::PrefillLoad,
                    ..ConditionalPrefillConfig::default()
                },
            ),
        ];
        for (name, conditional) in bad {
            assert_eq!(with(conditional).validate().unwrap_err().0, name);
        }
        assert!(
            with(rule(ConditionalPrefillPolicy::IslOrLoad))
                .validate()
                .is_ok()
        );
        let learned = ConditionalPrefillConfig {
            policy: ConditionalPrefillPolicy::Learned,
            ..ConditionalPrefillConfig::default()
        };
        assert!(with(learned).validate().is_ok());
        assert!(DisaggregationConfig::default().validate().is_ok());
    }
}
