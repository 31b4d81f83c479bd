//! Metrics of sessions.

use crate::*;

metrics! {
    /// Metrics of sessions.
    SessionMetrics {
        /// Sessions in the session table
        "sessions" sessions: Gauge = Gauge::default();
        /// Requests in progress that belong to a session
        "session_requests" requests: Gauge = Gauge::default();
        /// Responses that an engine stores and whose worker rank is known
        "stored_responses" stored_responses: Gauge = Gauge::default();
        /// Sessions that warmroute has opened on engines
        "engine_sessions" engine_sessions: Gauge = Gauge::default();
        /// Requests that open and close sessions on engines, by call (open, close) and outcome: ok,
        /// busy, unreachable, timeout, not_offered (the engine has no such endpoint), status (the
        /// engine returned an error status), overflow (too many requests wait)
        "engine_session_calls" engine_calls: Family<EngineSessionLabels, Counter> = Family::default();
    }
}
