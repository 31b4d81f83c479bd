//! Metrics of the process as a whole.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::labels::{PoolLabels, TaskLabel};
use crate::metrics;

metrics! {
    /// Metrics of the process as a whole.
    ProcessMetrics {
        /// Pool of workers that this process serves; always 1
        "pool_info" pool_info: Family<PoolLabels, Gauge> = Family::default();
        /// 1 while a background task runs, 0 while it waits for its restart
        "task_up" task_up: Family<TaskLabel, Gauge> = Family::default();
        /// Restarts of background tasks
        "task_restarts" task_restarts: Family<TaskLabel, Counter> = Family::default();
    }
}
