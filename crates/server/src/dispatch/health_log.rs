//! Log lines about the health of workers.

use tracing::{info, warn};
use warmroute_core::health::HealthChange;
use warmroute_core::router::Router;
use warmroute_core::worker::WorkerId;
use warmroute_settings::DurationSetting;

/// Logs a change of a worker's health. `status` is the HTTP status that caused it, if there was a
/// response.
pub fn log_health_change(
    router: &Router,
    worker: WorkerId,
    change: HealthChange,
    status: Option<u16>,
) {
    let name = router.fleet().display_name(worker);
    match change {
        HealthChange::Ejected(period) => {
            warn!(%worker, name, status, period = %DurationSetting(period), "worker ejected")
        }
        HealthChange::EjectionExtended(period) => {
            info!(%worker, name, status, period = %DurationSetting(period), "worker ejection extended")
        }
        HealthChange::Readmitted => info!(%worker, name, status, "worker readmitted"),
    }
}
