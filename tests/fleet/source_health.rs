//! Health metric of discovery sources.

use warmroute_metrics::{Metrics, SourceLabel};
use warmroute_testbed::ports::until;

use crate::support::deployment::PATIENCE;

/// Waits until the health metric of a source has a value.
pub(crate) async fn wait_source_up(metrics: &Metrics, source: &str, up: i64) {
    let label = SourceLabel {
        source: source.into(),
    };
    let is_up = async || metrics.workers.discovery_up.get_or_create(&label).get() == up;
    assert!(until(PATIENCE, is_up).await, "{source} is not {up}");
}
