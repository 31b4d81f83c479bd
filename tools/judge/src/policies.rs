//! Routing policies by name, with an optional rule after a `+`: a rule for local prefills, or
//! `no_ejection`.

use anyhow::{Result, bail};
use warmroute_core::health::HealthRules;
use warmroute_core::policy::{
    ConditionalPrefillConfig, ConditionalPrefillPolicy, DisaggregationConfig, PolicyName,
    PolicySettings, Weights,
};
use warmroute_core::router::RouterSettings;

/// Backlog at which a prefill worker is busy: one full step.
const PREFILL_BUSY_THRESHOLD: f64 = 1.0;

/// Rules for local prefills.
const RULES: [(&str, ConditionalPrefillPolicy); 4] = [
    ("isl_bounding", ConditionalPrefillPolicy::IslBounding),
    ("prefill_load", ConditionalPrefillPolicy::PrefillLoad),
    ("isl_or_load", ConditionalPrefillPolicy::IslOrLoad),
    ("learned", ConditionalPrefillPolicy::Learned),
];

/// Rule that ignores the outcomes of requests, like routers without feedback.
const NO_EJECTION: &str = "no_ejection";

/// Returns the names of all policies.
pub(crate) fn policy_names() -> Vec<String> {
    let names = PolicyName::ALL.iter().map(|name| name.as_str().to_owned());
    names.collect()
}

/// Returns the router settings of a policy.
pub(crate) fn router_settings(policy: &str) -> Result<RouterSettings> {
    let mut health = HealthRules::default();
    let (policy, conditional) = match policy.split_once('+') {
        Some((policy, NO_EJECTION)) => {
            health.consecutive_failures = 0;
            (policy, None)
        }
        Some((policy, rule)) => (policy, Some(conditional_prefill(rule)?)),
        None => (policy, None),
    };
    let Ok(name) = policy.parse::<PolicyName>() else {
        let known = policy_names().join(", ");
        bail!("unknown policy `{policy}`; known policies: {known}");
    };
    Ok(RouterSettings {
        policy: PolicySettings::named(name, &Weights::default()),
        disaggregation: DisaggregationConfig {
            conditional,
            ..DisaggregationConfig::default()
        },
        health,
        ..RouterSettings::default()
    })
}

fn conditional_prefill(rule: &str) -> Result<ConditionalPrefillConfig> {
    let Some((_, policy)) = RULES.into_iter().find(|(name, _)| *name == rule) else {
        let known = RULES.map(|(name, _)| name).join(", ");
        bail!("unknown rule `{rule}`; known rules: {known}, {NO_EJECTION}");
    };
    Ok(ConditionalPrefillConfig {
        policy,
        prefill_busy_threshold: Some(PREFILL_BUSY_THRESHOLD),
        ..ConditionalPrefillConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_policies_are_accepted_and_others_rejected() {
        for policy in PolicyName::ALL {
            assert!(router_settings(policy.as_str()).is_ok(), "{policy:?}");
        }
        let error = router_settings("nearest").unwrap_err().to_string();
        assert!(error.contains("linear_tuned"), "{error}");
        let learned = router_settings("linear+learned").unwrap();
        let rule = learned.disaggregation.conditional.unwrap();
        assert_eq!(rule.policy, ConditionalPrefillPolicy::Learned);
        let without_ejection = router_settings("linear+no_ejection").unwrap();
        assert_eq!(without_ejection.health.consecutive_failures, 0);
        let error = router_settings("linear+always").unwrap_err().to_string();
        assert!(error.contains("isl_bounding"), "{error}");
    }
}
