//! Log lines about the health and the speed of worker ranks.

use tracing::{info, warn};
use warmroute_core::health::{
    DeliveryTransition, FailingPeerGroup, HealthChange, HealthTransition,
};
use warmroute_core::load::{SpeedChange, SpeedTransition};
use warmroute_core::router::{Router, TickChanges};
use warmroute_settings::format_elapsed;

/// Logs the changes that the passage of time has revealed.
pub fn log_tick_changes(router: &Router, changes: TickChanges) {
    log_health_changes(router, changes.health);
    changes.deliveries.iter().for_each(log_delivery_change);
    for SpeedTransition {
        rank,
        change,
        speed,
    } in changes.speeds
    {
        let name = router.fleet().display_name(rank.worker);
        let phase = speed.phase.as_str();
        let [factor, median] = [speed.factor, speed.median].map(|factor| format!("{factor:.2}"));
        match change {
            SpeedChange::Slowed => {
                warn!(rank = %rank, name, phase, factor, median, "worker is slow; it gets fewer requests")
            }
            SpeedChange::Recovered => {
                info!(rank = %rank, name, phase, factor, median, "worker is no longer slow")
            }
        }
    }
}

fn log_delivery_change(change: &DeliveryTransition) {
    match change {
        DeliveryTransition::Stopped(FailingPeerGroup {
            group,
            ranks,
            unreachable,
            failures,
        }) => {
            warn!(model = %group.model, phase = group.phase(), ranks, unreachable, %failures, "no worker of the model delivers answers")
        }
        DeliveryTransition::Resumed(group, elapsed) => {
            info!(model = %group.model, phase = group.phase(), seconds = elapsed.as_secs(), "workers of the model deliver answers again")
        }
    }
}

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
                warn!(rank = %rank, name, %evidence, "worker suspect; avoided until others respond")
            }
            HealthChange::Cleared => {
                info!(rank = %rank, name, %evidence, "worker no longer suspect")
            }
            HealthChange::Ejected(period) => {
                warn!(rank = %rank, name, %evidence, period = format_elapsed(period), "worker ejected")
            }
            HealthChange::EjectionExtended(period) => {
                info!(rank = %rank, name, %evidence, period = format_elapsed(period), "worker ejection extended")
            }
            HealthChange::Readmitted => {
                info!(rank = %rank, name, %evidence, "worker readmitted")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use warmroute_core::index::PrefixIndex;
    use warmroute_core::load::LoadTracker;
    use warmroute_core::router::RouterSettings;
    use warmroute_core::worker::WorkerRank;

    use super::*;

    #[test]
    fn ejection_periods_are_logged_in_seconds() {
        let router = Router::new(
            PrefixIndex::new(),
            LoadTracker::new(Instant::now),
            RouterSettings::default(),
            1,
        );
        let rank = WorkerRank::new(1, 0);
        let period = Duration::from_nanos(15_771_143_600);
        let transition = |change| HealthTransition {
            rank,
            change,
            evidence: Default::default(),
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = file.reopen().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || log.try_clone().unwrap())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let changes = [
                HealthChange::Ejected(period),
                HealthChange::EjectionExtended(period),
            ];
            log_health_changes(&router, changes.map(transition).to_vec());
        });
        let log = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(log.matches("15.8s").count(), 2, "{log}");
    }
}
