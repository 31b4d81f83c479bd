//! Metrics of the shared cache and the remote index.

use prometheus_client::metrics::histogram::linear_buckets;

use crate::*;

metrics! {
    /// Metrics of the shared cache and the remote index.
    IndexMetrics {
        /// Share of the prompt's blocks that the shared cache holds, by model. Failed lookups are
        /// not included
        "shared_cache_hit_ratio" shared_cache_hit_ratio: Histograms<ModelLabel> = histograms(|| Histogram::new(linear_buckets(0.0, 0.05, 21)));
        /// Prompt blocks that the shared cache holds beyond those on the device of the worker that
        /// computes the prompt, by model
        "shared_cache_additional_blocks" shared_cache_additional_blocks: Family<ModelLabel, Counter> = Family::default();
        /// Time that a request waited for the shared cache
        "shared_cache_lookup_duration_seconds" shared_cache_lookup_duration_seconds: Histogram = Histogram::new(exponential_buckets(0.0001, 2.0, 12));
        /// Failed lookups in the shared cache, by reason: busy, timeout, connection, status,
        /// too_long, invalid
        "shared_cache_lookup_errors" shared_cache_lookup_errors: Family<ReasonLabel, Counter> = Family::default();
        /// Queries to index servers by outcome: answered, hedge_answered (by the second server,
        /// because the first was slow), timeout, failed, incompatible (the block settings of the
        /// server differ), busy (too many queries in flight), no_server (all servers are excluded
        /// after failures)
        "remote_index_queries" remote_queries: Family<OutcomeLabel, Counter> = outcomes(&["answered", "hedge_answered", "timeout", "failed", "incompatible", "busy", "no_server"]);
        /// Time that a request waited for the index servers
        "remote_index_query_duration_seconds" remote_query_duration_seconds: Histogram = Histogram::new(exponential_buckets(0.0001, 2.0, 12));
    }
}
