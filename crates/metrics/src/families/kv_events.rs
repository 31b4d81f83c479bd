//! Metrics of KV events and their sources.

use crate::*;

metrics! {
    /// Metrics of KV events and their sources.
    KvEventMetrics {
        /// KV events by kind (stored, removed, cleared, ignored, unknown) and outcome
        "kv_events" events: Family<EventLabels, Counter> = Family::default();
        /// KV event batches by outcome: applied, stale, undecodable, too_large, malformed_frames,
        /// other_rank
        "kv_event_batches" batches: Family<OutcomeLabel, Counter> = outcomes(&["applied", "stale", "undecodable", "too_large", "malformed_frames", "other_rank"]);
        /// KV event batches that exceed a limit and are lost, by limit: message
        /// (engines.kv_events.max_message_size), frames, events, hashes, tokens, extra_keys
        "kv_event_batches_too_large" batches_too_large: Family<ReasonLabel, Counter> = reasons(&["message", "frames", "events", "hashes", "tokens", "extra_keys"]);
        /// Failed or refused connections of KV event sources, by reason: closed,
        /// closed_in_handshake, connect_timeout, handshake_timeout, heartbeat_timeout, too_large,
        /// protocol, io, endpoint, too_many_publishers, too_many_handshakes, replaced
        "kv_event_connection_errors" connection_errors: Family<ReasonLabel, Counter> = reasons(&["closed", "closed_in_handshake", "connect_timeout", "handshake_timeout", "heartbeat_timeout", "too_large", "protocol", "io", "endpoint", "too_many_publishers", "too_many_handshakes", "replaced"]);
        /// Frames, elements and fields of KV event batches that this version does not know and skips
        "kv_event_unknown_fields" unknown_fields: Counter = Counter::default();
        /// Gaps in the batch numbers of engines, by outcome: replayed, partly_replayed, lost
        "kv_event_gaps" gaps: Family<OutcomeLabel, Counter> = outcomes(&["replayed", "partly_replayed", "lost"]);
        /// Engine restarts, detected by batch numbers that decrease
        "kv_event_engine_restarts" engine_restarts: Counter = Counter::default();
        /// Freshness of the KV events of a worker rank. The only series of a rank has the value 1
        /// and the current state: exact, incomplete (the events are correct, but some may be
        /// missing), catching_up, stale, absent
        "kv_event_source_freshness" source_freshness: Family<RankFreshnessLabels, Gauge> = Family::default();
        /// Time between the timestamp of the last batch of a worker rank and its arrival. Negative
        /// if the engine's clock is ahead
        "kv_event_source_lag_seconds" source_lag_seconds: Family<RankLabels, FloatGauge> = Family::default();
        /// Time since the last batch of a worker rank arrived
        "kv_event_source_last_event_age_seconds" source_last_event_age_seconds: Family<RankLabels, FloatGauge> = Family::default();
        /// Gaps in the batch numbers of a worker rank since its source was first connected,
        /// replayed or not
        "kv_event_source_gaps" source_gaps: Family<RankLabels, Counter> = Family::default();
        /// Batches of a worker rank that are permanently lost. One gap counts at most 1048576
        "kv_event_source_lost_batches" source_lost_batches: Family<RankLabels, Counter> = Family::default();
        /// Blocks of a worker rank that the engine may have removed, because events were lost
        "kv_event_source_stale_blocks" source_stale_blocks: Family<RankLabels, Gauge> = Family::default();
    }
}
