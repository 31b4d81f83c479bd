//! Routing policies by name, with an optional rule for local prefills after a `+`.

use anyhow::{Result, bail};
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

/// Returns the router settings of a policy.
pub(crate) fn router_settings(policy: &str) -> Result<RouterSettings> {
    let (policy, rule) = match policy.split_once('+') {
        Some((policy, rule)) => (policy, Some(conditional_prefill(rule)?)),
        None => (policy, None),
    };
    let Some(name) = PolicyName::parse(policy) else {
        let known = PolicyName::ALL.map(PolicyName::as_str).join(", ");
        bail!("unknown policy `{policy}`; known policies: {known}");
    };
    Ok(RouterSettings {
        policy: PolicySettings::named(name, &Weights::default()),
        disaggregation: DisaggregationConfig {
            conditional: rule,
            ..DisaggregationConfig::default()
        },
        ..RouterSettings::default()
    })
}

fn conditional_prefill(rule: &str) -> Result<ConditionalPrefillConfig> {
    let Some((_, policy)) = RULES.into_iter().find(|(name, _)| *name == rule) else {
        let known = RULES.map(|(name, _)| name).join(", ");
        bail!("unknown rule `{rule}` of local prefills; known rules: {known}");
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
        let error = router_settings("linear+always").unwrap_err().to_string();
        assert!(error.contains("isl_bounding"), "{error}");
    }
}
