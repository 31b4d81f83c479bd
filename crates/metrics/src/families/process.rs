//! Metrics of the process as a whole.

use crate::*;

metrics! {
    /// Metrics of the process as a whole.
    ProcessMetrics {
        /// Version and commit of the program; always 1
        "build_info" build_info: Family<BuildLabels, Gauge> = Family::default();
        /// 1 while the process is ready, 0 while a startup step is pending or the process drains
        "ready" ready: Gauge = Gauge::default();
        /// Pool of workers that this process serves; always 1
        "pool_info" pool_info: Family<PoolLabels, Gauge> = Family::default();
        /// 1 while a background task runs, 0 while it waits for its restart. Tasks of a worker rank
        /// (kv_events) have a series only while they wait; the labels worker_id and dp_rank are
        /// empty for all others
        "task_up" task_up: Family<TaskLabels, Gauge> = Family::default();
        /// Restarts of background tasks. Tasks of a worker rank have a series after the first one
        "task_restarts" task_restarts: Family<TaskLabels, Counter> = Family::default();
    }
}
