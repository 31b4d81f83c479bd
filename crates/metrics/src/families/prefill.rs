//! Metrics of remote prefills.

use crate::*;

metrics! {
    /// Metrics of remote prefills.
    PrefillMetrics {
        /// Requests that warmroute sent to prefill workers, by outcome: completed, rejected (by the
        /// prefill worker), busy, concurrency_limit, timeout, failed, cancelled_before_start,
        /// cancelled_after_start (the prefill continues without its client)
        "prefill_calls" calls: Family<OutcomeLabel, Counter> = outcomes(&["completed", "rejected", "busy", "concurrency_limit", "timeout", "failed", "cancelled_before_start", "cancelled_after_start"]);
        /// Duration of requests to prefill workers, by outcome as in prefill_calls. Requests
        /// cancelled before their start are not included
        "prefill_call_duration_seconds" call_duration_seconds: Histograms<OutcomeLabel> = outcome_histograms(&["completed", "rejected", "busy", "concurrency_limit", "timeout", "failed", "cancelled_after_start"]);
        /// Requests to prefill workers in flight, including those of disconnected clients
        "prefill_calls_in_flight" calls_in_flight: Gauge = Gauge::default();
        /// Time from the end of a remote prefill to the first token from the decode worker, by
        /// model
        "prefill_to_first_token_seconds" to_first_token_seconds: Histograms<ModelLabel> = histograms(seconds);
        /// Aborts of mirrored prefills whose clients disconnected, by outcome: accepted (by the
        /// engine), client_request_id (not sent: the client chose the request id, which may name
        /// other requests too), overflow (too many aborts wait for one engine), unreachable,
        /// timeout, status (the engine returned an error status)
        "prefill_aborts" aborts: Family<OutcomeLabel, Counter> = outcomes(&["accepted", "client_request_id", "overflow", "unreachable", "timeout", "status"]);
        /// Retries by Envoy that warmroute observed, by outcome: prefilled_again (another prefill
        /// was started), unchanged (sent as it was: it had no remote prefill), handoff_removed
        /// (fields of a prefill that an earlier process started were removed), no_worker (no worker
        /// is left), cancelled (the client disconnected)
        "prefill_retries" retries: Family<OutcomeLabel, Counter> = outcomes(&["prefilled_again", "unchanged", "handoff_removed", "no_worker", "cancelled"]);
    }
}
