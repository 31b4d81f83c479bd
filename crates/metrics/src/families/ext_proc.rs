//! Metrics of the exchanges with Envoy.

use crate::*;

metrics! {
    /// Metrics of the exchanges with Envoy.
    ExtProcMetrics {
        /// Finished exchanges by outcome: completed, response_not_observed (the response began;
        /// warmroute did not receive its end), cancelled, immediate_response (rejected, or a query)
        "exchanges" exchanges: Family<OutcomeLabel, Counter> = outcomes(&["completed", "response_not_observed", "cancelled", "immediate_response"]);
        /// Exchanges in progress
        "open_exchanges" open_exchanges: Gauge = Gauge::default();
        /// Messages from Envoy that could not be decoded or exceeded the size limit. Each ends its
        /// stream with an error, except a buffered request body above the limit, which is routed by
        /// its headers
        "invalid_messages" invalid_messages: Counter = Counter::default();
        /// Bytes of request bodies that are buffered until their requests are routed
        "buffered_body_bytes" buffered_body_bytes: Gauge = Gauge::default();
        /// Streams of the filter that observes first tokens, by outcome: observed, unmatched (no
        /// exchange waits for it), no_token
        "first_token_streams" first_token_streams: Family<OutcomeLabel, Counter> = outcomes(&["observed", "unmatched", "no_token"]);
    }
}
