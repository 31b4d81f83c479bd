//! Metrics of the fleet, the index and its event sources, the listeners and the process.

use prometheus_client::metrics::histogram::linear_buckets;

use crate::*;

metrics! {
    /// Metrics of the fleet, its discovery and the load of its workers.
    WorkerMetrics {
        /// Workers in the fleet
        "workers" workers: Gauge;
        /// Properties of a worker; always 1. The label worker is the name of the pod, or the
        /// address of a worker without a name
        "worker_info" info: Family<WorkerLabels, Gauge>;
        /// Workers with at least one rank that is ejected because its requests fail
        "ejected_workers" ejected: Gauge;
        /// Failed requests of a worker rank by kind: unreachable, server_error, rejected (a 4xx),
        /// empty (a 2xx without content), no_output (a stream that reports its end without
        /// content), no_response, no_content (not in the expected time), overloaded, cancelled (by
        /// the client, after a long wait)
        "worker_failed_requests" failed_requests: Family<RankFailureLabels, Counter>;
        /// Health of a worker rank that is not healthy: 1 suspect, 2 probe_due, 3 probing, 4
        /// ejected
        "worker_health_state" health_state: Family<RankLabels, Gauge>;
        /// Generation of the fleet; increases with every change
        "fleet_generation" fleet_generation: Gauge;
        /// 1 if the last read of the workers file succeeded, 0 while an invalid file is ignored.
        /// Absent if `workers.file` is not configured
        "workers_file_last_reload_successful" file_last_reload_successful: OptionalGauge;
        /// Reads of the workers file by outcome: applied, unchanged, invalid
        "workers_file_reloads" file_reloads: Family<OutcomeLabel, Counter> =
            outcomes(&["applied", "unchanged", "invalid"]);
        /// 1 while a discovery source can be read and watched, 0 otherwise
        "discovery_up" discovery_up: Family<SourceLabel, Gauge>;
        /// Unix time of the last success of a discovery source
        "discovery_last_success_timestamp_seconds" discovery_last_success_timestamp_seconds: Family<SourceLabel, FloatGauge>;
        /// Distinct KV blocks of the active requests of a worker rank
        "worker_active_decode_blocks" active_decode_blocks: Family<RankLabels, Gauge>;
        /// Prompt tokens of the active requests of a worker rank that have not produced their first
        /// token
        "worker_active_prefill_tokens" active_prefill_tokens: Family<RankLabels, Gauge>;
        /// Active requests of a worker rank
        "worker_active_requests" active_requests: Family<RankLabels, Gauge>;
        /// Requests in the batch of a worker rank, as its engine reports them. This and the
        /// following metrics of engines are absent without a recent report
        "worker_engine_running_requests" engine_running_requests: Family<RankLabels, Gauge>;
        /// Requests in the queue of a worker rank, as its engine reports them
        "worker_engine_waiting_requests" engine_waiting_requests: Family<RankLabels, Gauge>;
        /// Share of the KV blocks of a worker rank that requests hold, as its engine reports it
        "worker_engine_kv_usage_ratio" engine_kv_usage_ratio: Family<RankLabels, FloatGauge>;
        /// Running and waiting requests that the engine of a worker rank reports, minus the active
        /// requests
        "worker_engine_request_drift" engine_request_drift: Family<RankLabels, Gauge>;
        /// Requests of a worker rank that are assumed in addition to the active requests, because
        /// its engine reports them persistently
        "worker_unbooked_requests" unbooked_requests: Family<RankLabels, Gauge>;
        /// Blocks that a worker rank has cached according to its KV events, by tier. Tiers without
        /// blocks have no series, except device
        "worker_cached_blocks" cached_blocks: Family<RankTierLabels, Gauge>;
        /// Maximum number of blocks that the index stores for a worker rank, by tier, for the tiers
        /// of worker_cached_blocks; further events have the outcome index_full
        "worker_cached_blocks_limit" cached_blocks_limit: Family<RankTierLabels, Gauge>;
        /// Blocks that a worker rank is assumed to have cached because prompts with them were
        /// routed to it
        "worker_predicted_blocks" predicted_blocks: Family<RankLabels, Gauge>;
        /// Workers whose engine reports another value than the configured one, by setting
        "engine_setting_mismatches" engine_setting_mismatches: Family<SettingLabel, Gauge>;
        /// Queries to engines for their settings, by outcome: ok, not_offered (the engine has no
        /// such endpoint), unreachable, timeout, status (the engine returned an error status),
        /// unreadable, too_large, busy
        "engine_setting_queries" engine_setting_queries: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "ok", "not_offered", "unreachable", "timeout", "status", "unreadable", "too_large",
                "busy",
            ]);
        /// Scrapes of the load gauges of engines, by outcome: ok, no_gauges (the page has none),
        /// not_offered, unreachable, timeout, status, too_large
        "engine_load_scrapes" engine_load_scrapes: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "ok", "no_gauges", "not_offered", "unreachable", "timeout", "status", "too_large",
            ]);
    }
}

metrics! {
    /// Metrics of the shared cache and the remote index.
    IndexMetrics {
        /// Share of the prompt's blocks that the shared cache holds, by model. Failed lookups are
        /// not included
        "shared_cache_hit_ratio" shared_cache_hit_ratio: Histograms<ModelLabel> =
            histograms(|| Histogram::new(linear_buckets(0.0, 0.05, 21)));
        /// Prompt blocks that the shared cache holds beyond those on the device of the worker that
        /// computes the prompt, by model
        "shared_cache_additional_blocks" shared_cache_additional_blocks: Family<ModelLabel, Counter>;
        /// Time that a request waited for the shared cache
        "shared_cache_lookup_duration_seconds" shared_cache_lookup_duration_seconds: Histogram =
            Histogram::new(exponential_buckets(0.0001, 2.0, 12));
        /// Failed lookups in the shared cache, by reason: busy, timeout, connection, status,
        /// too_long, invalid
        "shared_cache_lookup_errors" shared_cache_lookup_errors: Family<ReasonLabel, Counter>;
        /// Queries to index servers by outcome: answered, hedge_answered (by the second server,
        /// because the first was slow), timeout, failed, incompatible (the block settings of the
        /// server differ), busy (too many queries in flight), no_server (all servers are excluded
        /// after failures)
        "remote_index_queries" remote_queries: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "answered", "hedge_answered", "timeout", "failed", "incompatible", "busy",
                "no_server",
            ]);
        /// Time that a request waited for the index servers
        "remote_index_query_duration_seconds" remote_query_duration_seconds: Histogram =
            Histogram::new(exponential_buckets(0.0001, 2.0, 12));
    }
}

metrics! {
    /// Metrics of KV events and their sources.
    KvEventMetrics {
        /// KV events by kind (stored, removed, cleared, ignored, unknown) and outcome
        "kv_events" events: Family<EventLabels, Counter>;
        /// KV event batches by outcome: applied, stale, undecodable, too_large, malformed_frames,
        /// other_rank
        "kv_event_batches" batches: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "applied", "stale", "undecodable", "too_large", "malformed_frames", "other_rank",
            ]);
        /// KV event batches that exceed a limit and are lost, by limit: message
        /// (engines.kv_events.max_message_size), frames, events, hashes, tokens, extra_keys
        "kv_event_batches_too_large" batches_too_large: Family<ReasonLabel, Counter> =
            reasons(&["message", "frames", "events", "hashes", "tokens", "extra_keys"]);
        /// Failed or refused connections of KV event sources, by reason: closed,
        /// closed_in_handshake, connect_timeout, handshake_timeout, heartbeat_timeout, too_large,
        /// protocol, io, endpoint, too_many_publishers, too_many_handshakes, replaced
        "kv_event_connection_errors" connection_errors: Family<ReasonLabel, Counter> =
            reasons(&[
                "closed", "closed_in_handshake", "connect_timeout", "handshake_timeout",
                "heartbeat_timeout", "too_large", "protocol", "io", "endpoint",
                "too_many_publishers", "too_many_handshakes", "replaced",
            ]);
        /// Frames, elements and fields of KV event batches that this version does not know and
        /// skips
        "kv_event_unknown_fields" unknown_fields: Counter;
        /// Gaps in the batch numbers of engines, by outcome: replayed, partly_replayed, lost
        "kv_event_gaps" gaps: Family<OutcomeLabel, Counter> =
            outcomes(&["replayed", "partly_replayed", "lost"]);
        /// Engine restarts, detected by batch numbers that decrease
        "kv_event_engine_restarts" engine_restarts: Counter;
        /// Freshness of the KV events of a worker rank. The only series of a rank has the value 1
        /// and the current state: exact, incomplete (the events are correct, but some may be
        /// missing), catching_up, stale, absent
        "kv_event_source_freshness" source_freshness: Family<RankFreshnessLabels, Gauge>;
        /// Time between the timestamp of the last batch of a worker rank and its arrival. Negative
        /// if the engine's clock is ahead
        "kv_event_source_lag_seconds" source_lag_seconds: Family<RankLabels, FloatGauge>;
        /// Time since the last batch of a worker rank arrived
        "kv_event_source_last_event_age_seconds" source_last_event_age_seconds: Family<RankLabels, FloatGauge>;
        /// Gaps in the batch numbers of a worker rank since its source was first connected,
        /// replayed or not
        "kv_event_source_gaps" source_gaps: Family<RankLabels, Counter>;
        /// Batches of a worker rank that are permanently lost. One gap counts at most 1048576
        "kv_event_source_lost_batches" source_lost_batches: Family<RankLabels, Counter>;
        /// Blocks of a worker rank that the engine may have removed, because events were lost
        "kv_event_source_stale_blocks" source_stale_blocks: Family<RankLabels, Gauge>;
    }
}

metrics! {
    /// Metrics of the comparison between the tokens of warmroute and those of the engines.
    ParityMetrics {
        /// Workers by model and result of the comparison of their tokens with those of warmroute:
        /// untested, agrees, differs (their requests are routed by load only),
        /// generation_prompt_differs (only the generation prompt differs), cannot_test
        "parity_workers" workers: Family<ModelOutcomeLabels, Gauge>;
        /// 1 while the tokens of warmroute are not used for a model, because they differ from those
        /// of an engine and no engine confirms them
        "parity_tokens_disabled" tokens_disabled: Family<ModelLabel, Gauge>;
        /// Comparisons of the tokens of a worker with those of warmroute, by model and outcome:
        /// agrees, differs, generation_prompt_differs, cannot_test
        "parity_checks" checks: Family<ModelOutcomeLabels, Counter>;
        /// Token mismatches detected by canaries or KV events, by model
        "parity_mismatches" mismatches: Family<ModelLabel, Counter>;
        /// Requests whose blocks were compared with the KV events of their engine, by model and
        /// outcome: confirmed, unconfirmed, unknown (no event has arrived, or the source does not
        /// report every block)
        "parity_event_checks" event_checks: Family<ModelOutcomeLabels, Counter>;
    }
}

metrics! {
    /// Metrics of the endpoints published to Envoy.
    EndpointMetrics {
        /// Writes of Envoy's endpoints file, by outcome: written, failed
        "endpoints_file_writes" file_writes: Family<OutcomeLabel, Counter> =
            outcomes(&["written", "failed"]);
        /// Generation of the endpoints published by xDS; increases with every change
        "xds_generation" xds_generation: Gauge;
        /// Open xDS streams
        "xds_streams" xds_streams: Gauge;
        /// Endpoint updates published by xDS, by outcome: sent, acked, nacked, too_many_names (the
        /// stream was ended)
        "xds_updates" xds_updates: Family<OutcomeLabel, Counter> =
            outcomes(&["sent", "acked", "nacked", "too_many_names"]);
        /// Time from a change of the endpoints to its acknowledgement by an Envoy
        "xds_ack_duration_seconds" xds_ack_duration_seconds: Histogram =
            Histogram::new(exponential_buckets(0.0005, 2.0, 14));
    }
}

metrics! {
    /// Metrics of the replicas.
    ReplicaMetrics {
        /// 1 while the NATS connection to the other replicas is up, 0 otherwise. Absent if
        /// `replicas` is not configured
        "replica_connected" connected: OptionalGauge;
        /// Other replicas that sent a message within `replicas.lease`
        "replica_peers" peers: Gauge;
        /// Reservations of other replicas that count as load here
        "replica_reservations" reservations: Gauge;
        /// Messages between replicas by outcome: sent, lost (NATS was not connected), received, gap
        /// (messages were missed), snapshot_sent, snapshot_received, malformed
        "replica_messages" messages: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "sent", "lost", "received", "gap", "snapshot_sent", "snapshot_received",
                "malformed",
            ]);
    }
}

metrics! {
    /// Metrics of the listeners.
    ListenerMetrics {
        /// Open connections, by listener
        "connections" connections: Family<ListenerLabel, Gauge>;
        /// Connections that were closed at once because the limit was reached and no connection was
        /// idle, by listener
        "connections_refused" connections_refused: Family<ListenerLabel, Counter>;
        /// Connections that warmroute closed, by listener and reason: evicted (the connection idle
        /// for longest, to accept a new one), idle, greeting_timeout (no request began),
        /// header_timeout (a header block was not completed), write_timeout (the client accepted no
        /// data)
        "connections_closed" connections_closed: Family<ListenerReasonLabels, Counter>;
        /// gRPC streams that were refused with UNAVAILABLE because the limit was reached, by
        /// listener
        "streams_refused" streams_refused: Family<ListenerLabel, Counter>;
        /// HTTP/2 errors sent to clients, by listener, scope (stream: RST_STREAM, connection:
        /// GOAWAY) and error code
        "http2_errors" http2_errors: Family<Http2ErrorLabels, Counter>;
        /// Failed TLS handshakes, by listener and reason: server_name (not a DNS name), plaintext,
        /// malformed, no_client_certificate, client_certificate, incompatible, alpn, alert (refused
        /// by the client), closed (by the client), timeout, other
        "tls_handshake_errors" tls_handshake_errors: Family<ListenerReasonLabels, Counter>;
        /// TLS handshakes by listener and outcome: done, failed, expired
        "tls_handshakes" tls_handshakes: Family<ListenerOutcomeLabels, Counter>;
        /// Reloads of a certificate, its key or the client CA, by listener and outcome: applied,
        /// invalid (the previous one stays in use)
        "tls_reloads" tls_reloads: Family<ListenerOutcomeLabels, Counter>;
        /// Unix time at which the certificate in use expires, by listener
        "tls_certificate_expiry_timestamp_seconds" tls_certificate_expiry_timestamp_seconds: Family<ListenerLabel, Gauge>;
        /// Reloads of the bearer token of the admin pages, by outcome: applied, invalid (the
        /// previous one stays in use)
        "admin_token_reloads" admin_token_reloads: Family<OutcomeLabel, Counter> =
            outcomes(&["applied", "invalid"]);
    }
}

metrics! {
    /// Metrics of the configuration file.
    ConfigMetrics {
        /// Generation of the configuration in use: 1 at startup, one more after each applied reload
        "config_generation" generation: Gauge;
        /// 1 if the last read of the configuration file succeeded, 0 while an invalid file is
        /// ignored
        "config_last_reload_successful" last_reload_successful: Gauge;
        /// Unix time of the last successful read of the configuration file
        "config_last_reload_success_timestamp_seconds" last_reload_success_timestamp_seconds: FloatGauge;
        /// Keys of the configuration file whose new values take effect only after a restart
        "config_pending_restart_keys" pending_restart_keys: Gauge;
        /// Reads of the configuration file after startup, by outcome: applied, unchanged, invalid
        "config_reloads" reloads: Family<OutcomeLabel, Counter> =
            outcomes(&["applied", "unchanged", "invalid"]);
    }
}

metrics! {
    /// Metrics of the process as a whole.
    ProcessMetrics {
        /// Version and commit of the program; always 1
        "build_info" build_info: Family<BuildLabels, Gauge>;
        /// 1 while the process is ready, 0 while a startup step is pending or the process drains
        "ready" ready: Gauge;
        /// Pool of workers that this process serves; always 1
        "pool_info" pool_info: Family<PoolLabels, Gauge>;
        /// 1 while a background task runs, 0 while it waits for its restart. Tasks of a worker rank
        /// (kv_events) have a series only while they wait; the labels worker_id and dp_rank are
        /// empty for all others
        "task_up" task_up: Family<TaskLabels, Gauge>;
        /// Restarts of background tasks. Tasks of a worker rank have a series after the first one
        "task_restarts" task_restarts: Family<TaskLabels, Counter>;
    }
}
