//! Metrics of the endpoints published to Envoy.

use crate::*;

metrics! {
    /// Metrics of the endpoints published to Envoy.
    EndpointMetrics {
        /// Writes of Envoy's endpoints file, by outcome: written, failed
        "endpoints_file_writes" file_writes: Family<OutcomeLabel, Counter> = outcomes(&["written", "failed"]);
        /// Generation of the endpoints published by xDS; increases with every change
        "xds_generation" xds_generation: Gauge = Gauge::default();
        /// Open xDS streams
        "xds_streams" xds_streams: Gauge = Gauge::default();
        /// Endpoint updates published by xDS, by outcome: sent, acked, nacked, too_many_names (the
        /// stream was ended)
        "xds_updates" xds_updates: Family<OutcomeLabel, Counter> = outcomes(&["sent", "acked", "nacked", "too_many_names"]);
        /// Time from a change of the endpoints to its acknowledgement by an Envoy
        "xds_ack_duration_seconds" xds_ack_duration_seconds: Histogram = Histogram::new(exponential_buckets(0.0005, 2.0, 14));
    }
}
