//! Whether the prefill of a request goes to another worker than its decode. Where prefill workers exist it does, unless
//! the operator allows the decode worker to keep what is cheaper done in place: a short rest of the prompt, or a prefill
//! pool that is busy. Pure; who the two workers are is decided by the router before this is asked.

use serde::{Deserialize, Serialize};

/// Tokens a prefill worker is taken to compute in one step where it does not say; so large that only an outright absurd
/// backlog counts as busy.
const UNKNOWN_CAPACITY: u64 = 10_000_000;

/// `disaggregation:`: what happens where prefill workers exist, or ought to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Disaggregation {
    /// Refuse requests (503) while no prefill worker can be chosen, instead of letting the decode worker do the prefill.
    pub enforce: bool,
    /// When the decode worker may do the prefill itself although prefill workers are there; none: never.
    pub conditional: Option<Conditional>,
}

/// When a remote prefill is not worth it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Conditional {
    /// Which rule.
    pub policy: Rule,
    /// Rule `isl_bounding`: fewer uncached tokens than this stay on the decode worker.
    pub uncached_tokens: u64,
    /// Rule `isl_bounding`: and less than this share of the prompt.
    pub uncached_share: f64,
    /// Rule `prefill_load`: the prefill worker is busy beyond this share of its batch size.
    pub prefill_busy_threshold: Option<f64>,
    /// Beyond this share of its blocks a decode worker is too busy to do a prefill, whatever the rule says.
    pub decode_busy_threshold: Option<f64>,
}

/// The rules by their names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// What is left to compute is little, in tokens and as a share of the prompt.
    #[default]
    IslBounding,
    /// The chosen prefill worker has a long backlog.
    PrefillLoad,
    /// Either of the two.
    IslOrLoad,
}

impl Default for Conditional {
    fn default() -> Self {
        Self {
            policy: Rule::IslBounding,
            uncached_tokens: 2048,
            uncached_share: 0.7,
            prefill_busy_threshold: None,
            decode_busy_threshold: None,
        }
    }
}

/// What the rule looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// What the decode worker has cached of it.
    pub decode_cached_tokens: u64,
    /// Blocks the decode worker will hold, this request included.
    pub decode_blocks: u64,
    /// Blocks the decode worker has.
    pub decode_total_blocks: Option<u64>,
    /// Prefill backlog of the prefill worker, without this request.
    pub prefill_tokens: u64,
    /// Tokens the prefill worker takes in one step.
    pub prefill_capacity: Option<u64>,
}

/// Why the decode worker does the prefill although a prefill worker was at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bypass {
    /// Little is left to compute.
    LittleToCompute,
    /// The prefill worker is busy.
    PrefillBusy,
    /// No decode worker stands where the prefill worker could hand over to.
    OutOfReach,
    /// Requests of this kind cannot be handed from one worker to another.
    NotHandedOver,
    /// Prefill workers were asked and did not do it.
    PrefillFailed,
    /// A prefill worker found the request wrong.
    PrefillRefused,
    /// As many prefills were under way as are allowed.
    PrefillsFull,
    /// A prefill worker computed it and handed nothing over.
    NothingHandedOver,
}

impl Bypass {
    /// The name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Bypass::LittleToCompute => "little_to_compute",
            Bypass::PrefillBusy => "prefill_busy",
            Bypass::OutOfReach => "out_of_reach",
            Bypass::NotHandedOver => "not_handed_over",
            Bypass::PrefillFailed => "prefill_failed",
            Bypass::PrefillRefused => "prefill_refused",
            Bypass::PrefillsFull => "prefills_full",
            Bypass::NothingHandedOver => "nothing_handed_over",
        }
    }
}

impl Conditional {
    /// Whether the decode worker had better do the prefill itself.
    pub fn bypass(&self, facts: &Facts) -> Option<Bypass> {
        if self.decode_is_busy(facts) {
            return None;
        }
        let little = || self.is_little(facts).then_some(Bypass::LittleToCompute);
        let busy = || self.prefill_is_busy(facts).then_some(Bypass::PrefillBusy);
        match self.policy {
            Rule::IslBounding => little(),
            Rule::PrefillLoad => busy(),
            Rule::IslOrLoad => little().or_else(busy),
        }
    }

    fn is_little(&self, facts: &Facts) -> bool {
        let uncached = facts
            .prompt_tokens
            .saturating_sub(facts.decode_cached_tokens);
        let share = if facts.prompt_tokens == 0 {
            0.0
        } else {
            uncached as f64 / facts.prompt_tokens as f64
        };
        uncached < self.uncached_tokens && share < self.uncached_share
    }

    fn prefill_is_busy(&self, facts: &Facts) -> bool {
        let capacity = facts.prefill_capacity.unwrap_or(UNKNOWN_CAPACITY) as f64;
        self.prefill_busy_threshold
            .is_some_and(|share| facts.prefill_tokens as f64 > share * capacity)
    }

    /// A decode worker of unknown size may be full for all we know.
    fn decode_is_busy(&self, facts: &Facts) -> bool {
        let beyond = |share: f64| match facts.decode_total_blocks {
            Some(total) => facts.decode_blocks as f64 > share * total as f64,
            None => true,
        };
        self.decode_busy_threshold.is_some_and(beyond)
    }
}

impl Disaggregation {
    /// Refuses values outside their range: the key below `conditional` and what is wrong with it.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let Some(rule) = &self.conditional else {
            return Ok(());
        };
        let shares = [
            ("uncached_share", Some(rule.uncached_share)),
            ("prefill_busy_threshold", rule.prefill_busy_threshold),
            ("decode_busy_threshold", rule.decode_busy_threshold),
        ];
        for (name, share) in shares {
            let most = if name == "prefill_busy_threshold" {
                f64::INFINITY
            } else {
                1.0
            };
            if let Some(share) =
                share.filter(|share| !(share.is_finite() && (0.0..=most).contains(share)))
            {
                let range = if most == 1.0 {
                    "from 0 to 1"
                } else {
                    "finite and at least 0"
                };
                return Err((name, format!("is {share}, but must be {range}")));
            }
        }
        if rule.policy != Rule::IslBounding && rule.prefill_busy_threshold.is_none() {
            let text = "is needed by this policy; give the share of a prefill worker's batch size, 1.0 for one full step";
            return Err(("prefill_busy_threshold", text.to_owned()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        prompt_tokens: 4000,
        decode_cached_tokens: 3000,
        decode_blocks: 80,
        decode_total_blocks: Some(100),
        prefill_tokens: 9000,
        prefill_capacity: Some(8192),
    };

    fn rule(policy: Rule) -> Conditional {
        Conditional {
            policy,
            prefill_busy_threshold: Some(1.0),
            ..Conditional::default()
        }
    }

    #[test]
    fn the_three_rules_tell_when_a_remote_prefill_is_not_worth_it() {
        let long = Facts {
            decode_cached_tokens: 0,
            ..FACTS
        };
        let idle = Facts {
            prefill_tokens: 8192,
            ..FACTS
        };
        let cases = [
            (Rule::IslBounding, FACTS, Some(Bypass::LittleToCompute)),
            (
                Rule::IslBounding,
                Facts {
                    decode_cached_tokens: 1952,
                    ..FACTS
                },
                None,
            ),
            (
                Rule::IslBounding,
                Facts {
                    prompt_tokens: 100,
                    decode_cached_tokens: 30,
                    ..FACTS
                },
                None,
            ),
            (
                Rule::IslBounding,
                Facts {
                    prompt_tokens: 100,
                    decode_cached_tokens: 31,
                    ..FACTS
                },
                Some(Bypass::LittleToCompute),
            ),
            (Rule::IslBounding, long, None),
            (Rule::PrefillLoad, FACTS, Some(Bypass::PrefillBusy)),
            (Rule::PrefillLoad, idle, None),
            (
                Rule::PrefillLoad,
                Facts {
                    prefill_capacity: None,
                    ..FACTS
                },
                None,
            ),
            (Rule::IslOrLoad, long, Some(Bypass::PrefillBusy)),
            (Rule::IslOrLoad, idle, Some(Bypass::LittleToCompute)),
            (
                Rule::IslOrLoad,
                Facts {
                    prefill_tokens: 0,
                    ..long
                },
                None,
            ),
        ];
        for (policy, facts, expected) in cases {
            assert_eq!(
                rule(policy).bypass(&facts),
                expected,
                "{policy:?} {facts:?}"
            );
        }
    }

    #[test]
    fn a_busy_decode_worker_or_one_of_unknown_size_keeps_no_prefill() {
        let careful = Conditional {
            decode_busy_threshold: Some(0.8),
            ..rule(Rule::IslBounding)
        };
        assert_eq!(careful.bypass(&FACTS), Some(Bypass::LittleToCompute));
        assert_eq!(
            careful.bypass(&Facts {
                decode_blocks: 81,
                ..FACTS
            }),
            None
        );
        assert_eq!(
            careful.bypass(&Facts {
                decode_total_blocks: None,
                ..FACTS
            }),
            None
        );
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let with = |conditional| Disaggregation {
            enforce: false,
            conditional: Some(conditional),
        };
        let bad = [
            (
                "uncached_share",
                Conditional {
                    uncached_share: 1.5,
                    ..Conditional::default()
                },
            ),
            (
                "decode_busy_threshold",
                Conditional {
                    decode_busy_threshold: Some(-0.1),
                    ..Conditional::default()
                },
            ),
            (
                "prefill_busy_threshold",
                Conditional {
                    prefill_busy_threshold: Some(f64::NAN),
                    ..Conditional::default()
                },
            ),
            (
                "prefill_busy_threshold",
                Conditional {
                    policy: Rule::PrefillLoad,
                    ..Conditional::default()
                },
            ),
        ];
        for (name, conditional) in bad {
            assert_eq!(with(conditional).validate().unwrap_err().0, name);
        }
        assert!(with(rule(Rule::IslOrLoad)).validate().is_ok());
        assert!(Disaggregation::default().validate().is_ok());
    }
}
