//! Routing policies by name.

use anyhow::{Result, bail};
use warmroute_core::policy::Weights;
use warmroute_core::router::RouterSettings;

/// Names of all policies.
pub(crate) const POLICY_NAMES: &[&str] = &["linear", "linear_tuned", "agentic"];

/// Returns the router settings of a policy.
pub(crate) fn router_settings(policy: &str) -> Result<RouterSettings> {
    let weights = match policy {
        "linear" => Weights::UNIT,
        "linear_tuned" => Weights::default(),
        "agentic" => Weights {
            overlap_score_credit: 2.0,
            prefill_load_scale: 4.0,
            decode_active_request_weight: 64.0,
            ..Weights::UNIT
        },
        _ => bail!(
            "unknown policy `{policy}`; known policies: {}",
            POLICY_NAMES.join(", ")
        ),
    };
    Ok(RouterSettings {
        weights,
        ..RouterSettings::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_are_exactly_the_known_ones() {
        for policy in POLICY_NAMES {
            assert!(router_settings(policy).is_ok(), "{policy}");
        }
        let error = router_settings("nearest").unwrap_err().to_string();
        assert!(error.contains("linear_tuned"), "{error}");
    }
}
