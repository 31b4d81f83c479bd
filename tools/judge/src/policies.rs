//! Routing policies by name.

use anyhow::{Result, bail};
use warmroute_core::policy::{PolicyName, PolicySettings, Weights};
use warmroute_core::router::RouterSettings;

/// Returns the router settings of a policy.
pub(crate) fn router_settings(policy: &str) -> Result<RouterSettings> {
    let Some(name) = PolicyName::parse(policy) else {
        let known = PolicyName::ALL.map(PolicyName::as_str).join(", ");
        bail!("unknown policy `{policy}`; known policies: {known}");
    };
    Ok(RouterSettings {
        policy: PolicySettings::named(name, &Weights::default()),
        ..RouterSettings::default()
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
    }
}
