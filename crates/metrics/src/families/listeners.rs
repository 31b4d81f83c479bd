//! Metrics of the listeners.

use crate::*;

metrics! {
    /// Metrics of the listeners.
    ListenerMetrics {
        /// Open connections, by listener
        "connections" connections: Family<ListenerLabel, Gauge> = Family::default();
        /// Connections that were closed at once because the limit was reached and no connection was
        /// idle, by listener
        "connections_refused" connections_refused: Family<ListenerLabel, Counter> = Family::default();
        /// Connections that warmroute closed, by listener and reason: evicted (the connection idle
        /// for longest, to accept a new one), idle, greeting_timeout (no request began),
        /// header_timeout (a header block was not completed), write_timeout (the client accepted no
        /// data)
        "connections_closed" connections_closed: Family<ListenerReasonLabels, Counter> = Family::default();
        /// gRPC streams that were refused with UNAVAILABLE because the limit was reached, by listener
        "streams_refused" streams_refused: Family<ListenerLabel, Counter> = Family::default();
        /// HTTP/2 errors sent to clients, by listener, scope (stream: RST_STREAM, connection:
        /// GOAWAY) and error code
        "http2_errors" http2_errors: Family<Http2ErrorLabels, Counter> = Family::default();
        /// Failed TLS handshakes, by listener and reason: server_name (not a DNS name), plaintext,
        /// malformed, no_client_certificate, client_certificate, incompatible, alpn, alert (refused
        /// by the client), closed (by the client), timeout, other
        "tls_handshake_errors" tls_handshake_errors: Family<ListenerReasonLabels, Counter> = Family::default();
        /// TLS handshakes by listener and outcome: done, failed, expired
        "tls_handshakes" tls_handshakes: Family<ListenerOutcomeLabels, Counter> = Family::default();
        /// Reloads of a certificate, its key or the client CA, by listener and outcome: applied,
        /// invalid (the previous one stays in use)
        "tls_reloads" tls_reloads: Family<ListenerOutcomeLabels, Counter> = Family::default();
        /// Unix time at which the certificate in use expires, by listener
        "tls_certificate_expiry_timestamp_seconds" tls_certificate_expiry_timestamp_seconds: Family<ListenerLabel, Gauge> = Family::default();
        /// Reloads of the bearer token of the admin pages, by outcome: applied, invalid (the
        /// previous one stays in use)
        "admin_token_reloads" admin_token_reloads: Family<OutcomeLabel, Counter> = outcomes(&["applied", "invalid"]);
    }
}
