//! Metrics of the fleet, its discovery and the load of its workers.

use crate::*;

metrics! {
    /// Metrics of the fleet, its discovery and the load of its workers.
    WorkerMetrics {
        /// Workers in the fleet
        "workers" workers: Gauge = Gauge::default();
        /// Properties of a worker; always 1. The label worker is the name of the pod, or the address
        /// of a worker without a name
        "worker_info" info: Family<WorkerLabels, Gauge> = Family::default();
        /// Workers with at least one rank that is ejected because its requests fail
        "ejected_workers" ejected: Gauge = Gauge::default();
        /// Failed requests of a worker rank by kind: unreachable, server_error, rejected (a 4xx),
        /// empty (a 2xx without content), no_output (a stream that reports its end without content),
        /// no_response, no_content (not in the expected time), overloaded, cancelled (by the client, after a long wait)
        "worker_failed_requests" failed_requests: Family<RankFailureLabels, Counter> = Family::default();
        /// Health of a worker rank that is not healthy: 1 suspect, 2 probe_due, 3 probing, 4 ejected
        "worker_health_state" health_state: Family<RankLabels, Gauge> = Family::default();
        /// Generation of the fleet; increases with every change
        "fleet_generation" fleet_generation: Gauge = Gauge::default();
        /// 1 if the last read of the workers file succeeded, 0 while an invalid file is ignored.
        /// Absent if `workers.file` is not
        /// configured
        "workers_file_last_reload_successful" file_last_reload_successful: OptionalGauge = OptionalGauge::default();
        /// Reads of the workers file by outcome: applied, unchanged, invalid
        "workers_file_reloads" file_reloads: Family<OutcomeLabel, Counter> = outcomes(&["applied", "unchanged", "invalid"]);
        /// 1 while a discovery source can be read and watched, 0 otherwise
        "discovery_up" discovery_up: Family<SourceLabel, Gauge> = Family::default();
        /// Unix time of the last success of a discovery source
        "discovery_last_success_timestamp_seconds" discovery_last_success_timestamp_seconds: Family<SourceLabel, FloatGauge> = Family::default();
        /// Distinct KV blocks of the active requests of a worker rank
        "worker_active_decode_blocks" active_decode_blocks: Family<RankLabels, Gauge> = Family::default();
        /// Prompt tokens of the active requests of a worker rank that have not produced their first
        /// token
        "worker_active_prefill_tokens" active_prefill_tokens: Family<RankLabels, Gauge> = Family::default();
        /// Active requests of a worker rank
        "worker_active_requests" active_requests: Family<RankLabels, Gauge> = Family::default();
        /// Requests in the batch of a worker rank, as its engine reports them. This and the
        /// following metrics of engines are absent without a recent report
        "worker_engine_running_requests" engine_running_requests: Family<RankLabels, Gauge> = Family::default();
        /// Requests in the queue of a worker rank, as its engine reports them
        "worker_engine_waiting_requests" engine_waiting_requests: Family<RankLabels, Gauge> = Family::default();
        /// Share of the KV blocks of a worker rank that requests hold, as its engine reports it
        "worker_engine_kv_usage_ratio" engine_kv_usage_ratio: Family<RankLabels, FloatGauge> = Family::default();
        /// Running and waiting requests that the engine of a worker rank reports, minus the active
        /// requests
        "worker_engine_request_drift" engine_request_drift: Family<RankLabels, Gauge> = Family::default();
        /// Requests of a worker rank that are assumed in addition to the active requests, because
        /// its engine reports them persistently
        "worker_unbooked_requests" unbooked_requests: Family<RankLabels, Gauge> = Family::default();
        /// Blocks that a worker rank has cached according to its KV events, by tier. Tiers without
        /// blocks have no series, except device
        "worker_cached_blocks" cached_blocks: Family<RankTierLabels, Gauge> = Family::default();
        /// Maximum number of blocks that the index stores for a worker rank, by tier, for the tiers
        /// of worker_cached_blocks; further events have the outcome index_full
        "worker_cached_blocks_limit" cached_blocks_limit: Family<RankTierLabels, Gauge> = Family::default();
        /// Blocks that a worker rank is assumed to have cached because prompts with them were
        /// routed to it
        "worker_predicted_blocks" predicted_blocks: Family<RankLabels, Gauge> = Family::default();
        /// Workers whose engine reports another value than the configured one, by setting
        "engine_setting_mismatches" engine_setting_mismatches: Family<SettingLabel, Gauge> = Family::default();
        /// Queries to engines for their settings, by outcome: ok, not_offered (the engine has no
        /// such endpoint), unreachable, timeout, status (the engine returned an error status),
        /// unreadable, too_large, busy
        "engine_setting_queries" engine_setting_queries: Family<OutcomeLabel, Counter> = outcomes(&["ok", "not_offered", "unreachable", "timeout", "status", "unreadable", "too_large", "busy"]);
        /// Scrapes of the load gauges of engines, by outcome: ok, no_gauges (the page has none),
        /// not_offered, unreachable, timeout, status, too_large
        "engine_load_scrapes" engine_load_scrapes: Family<OutcomeLabel, Counter> = outcomes(&["ok", "no_gauges", "not_offered", "unreachable", "timeout", "status", "too_large"]);
    }
}
