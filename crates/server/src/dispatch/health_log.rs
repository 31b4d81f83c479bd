//! Log lines about the health of worker ranks.

use tracing::{info, warn};
use warmroute_core::health::{HealthChange, HealthTransition};
use warmroute_core::router::Router;
use warmroute_settings::DurationSetting;

/// Logs changes of the health of ranks, with the evidence.
pub fn log_health_changes(router: &Router, transitions: Vec<HealthTransition>) {
    for HealthTransition {
        rank,
        change,
        evidence,
    } in transitions
    {
        let name = router.fleet().display_name(rank.worker);
        match change {
            HealthChange::Suspected => {
                warn!(worker = %rank, name, %evidence, "worker suspect; avoided until others respond")
            }
            HealthChange::Cleared => {
                info!(worker = %rank, name, %evidence, "worker no longer suspect")
            }
            HealthChange::Ejected(period) => {
                warn!(worker = %rank, name, %evidence, period = %DurationSetting(period), "worker ejected")
            }
            HealthChange::EjectionExtended(period) => {
                info!(worker = %rank, name, %evidence, period = %DurationSetting(period), "worker ejection extended")
            }
            HealthChange::Readmitted => {
                info!(worker = %rank, name, %evidence, "worker readmitted")
            }
        }
    }
}
