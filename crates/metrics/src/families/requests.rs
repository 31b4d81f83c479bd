//! Metrics of requests: their routing, tokens, latency, prefills, sessions and API calls.

use prometheus_client::metrics::histogram::linear_buckets;

use crate::*;

metrics! {
    /// Metrics of routed requests.
    RequestMetrics {
        /// Requests by model, mode (exact, partial, approximate, load_only, passthrough, query,
        /// rejected) and role of the worker that decodes (none: no worker was chosen)
        "requests" requests: Family<RequestLabels, Counter>;
        /// Requests that were not routed in exact mode, by reason
        "degradations" degradations: Family<ReasonLabel, Counter>;
        /// Routed requests by plan of their phases: aggregated, remote_prefill, or the reason for
        /// which the decode worker computes the prompt although prefill workers exist
        "phase_plans" phase_plans: Family<PhasePlanLabel, Counter>;
        /// Duration of one stage of a routing decision, by stage: parse, render, tokenize, hash,
        /// index, choose, total
        "decision_stage_duration_seconds" decision_stage_duration_seconds: Histograms<StageLabel> =
            stages(&["parse", "render", "tokenize", "hash", "index", "choose", "total"]);
        /// Predicted share of the prompt's blocks that are cached on the worker rank that computes
        /// the prompt, by model and role of that worker
        "prefix_hit_ratio" prefix_hit_ratio: Histograms<ModelRoleLabels> =
            histograms(|| Histogram::new(linear_buckets(0.0, 0.05, 21)));
        /// Prompt length in tokens, by model and role of the worker that computes the prompt
        "prompt_tokens" prompt_tokens: Histograms<ModelRoleLabels> =
            histograms(|| Histogram::new(exponential_buckets(32.0, 2.0, 14)));
        /// Output length in tokens of responses that warmroute observed, by model and role of the
        /// worker
        "output_tokens" output_tokens: Histograms<ModelRoleLabels> =
            histograms(|| Histogram::new(exponential_buckets(1.0, 2.0, 16)));
        /// Time from the arrival of the request at warmroute to the first token of its response.
        /// For responses that are not streamed, to the response headers
        "time_to_first_token_seconds" time_to_first_token_seconds: Histograms<ModelRoleLabels> =
            histograms(seconds);
        /// Mean time between the output tokens of one streamed response: from the first token to
        /// the end, divided by the number of tokens after the first
        "inter_token_latency_seconds" inter_token_latency_seconds: Histograms<ModelRoleLabels> =
            histograms(token_seconds);
        /// Time from the arrival of the request at warmroute to the end of its response
        "request_duration_seconds" request_duration_seconds: Histograms<ModelRoleLabels> =
            histograms(seconds);
        /// Predicted cached prompt tokens on the best eligible worker rank, by model and role of
        /// the worker that computes the prompt
        "available_cached_tokens" available_cached_tokens: Family<ModelRoleLabels, Counter>;
        /// Predicted cached prompt tokens on the worker rank that computes the prompt, by model and
        /// role of that worker
        "predicted_cached_tokens" predicted_cached_tokens: Family<ModelRoleLabels, Counter>;
        /// Cached prompt tokens that the engine reported in its response, by model and role of the
        /// worker that computed the prompt
        "reported_cached_tokens" reported_cached_tokens: Family<ModelRoleLabels, Counter>;
        /// Requests whose prompt is computed on a worker rank that is not the one with the most
        /// cached blocks, by model and role of the chosen worker
        "non_max_overlap_choices" non_max_overlap_choices: Family<ModelRoleLabels, Counter>;
        /// Requests that were routed to a worker rank. A request with a remote prefill is counted
        /// for both of its worker ranks
        "worker_requests" worker_requests: Family<RankLabels, Counter>;
        /// Responses by model, class of their status and source: engine (or unknown), envoy (Envoy
        /// generated the response), warmroute (an immediate response)
        "responses" responses: Family<ResponseLabels, Counter>;
        /// Requests served by another endpoint than the chosen one, by effect on the reservation:
        /// moved (to the serving worker), released (the serving worker has no reservations),
        /// unknown_endpoint (no worker has this address; the reservation stays)
        "served_endpoint_mismatches" served_endpoint_mismatches: Family<OutcomeLabel, Counter> =
            outcomes(&["moved", "released", "unknown_endpoint"]);
        /// Requests that were sent to another model than the one they name
        "model_rewrites" model_rewrites: Counter;
    }
}

metrics! {
    /// Metrics of the exchanges with Envoy.
    ExtProcMetrics {
        /// Finished exchanges by outcome: completed, response_not_observed (the response began;
        /// warmroute did not receive its end), cancelled, immediate_response (rejected, or a query)
        "exchanges" exchanges: Family<OutcomeLabel, Counter> =
            outcomes(&["completed", "response_not_observed", "cancelled", "immediate_response"]);
        /// Exchanges in progress
        "open_exchanges" open_exchanges: Gauge;
        /// Messages from Envoy that could not be decoded or exceeded the size limit. Each ends its
        /// stream with an error, except a buffered request body above the limit, which is routed by
        /// its headers
        "invalid_messages" invalid_messages: Counter;
        /// Bytes of request bodies that are buffered until their requests are routed
        "buffered_body_bytes" buffered_body_bytes: Gauge;
        /// Streams of the filter that observes first tokens, by outcome: observed, unmatched (no
        /// exchange waits for it), no_token
        "first_token_streams" first_token_streams: Family<OutcomeLabel, Counter> =
            outcomes(&["observed", "unmatched", "no_token"]);
    }
}

/// Counter of seconds.
type SecondsCounter = Counter<f64, AtomicU64>;

/// Bounds of the ratio of an observed to a predicted time.
const RATIO_BOUNDS: [f64; 13] = [
    0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0,
];

metrics! {
    /// Metrics of the learned latency.
    LatencyMetrics {
        /// Learned time of one unit of work, by model and coefficient: prefill_base (fixed part of
        /// a prefill); prefill_token (uncached prompt token); prefill_pair (pair of an uncached
        /// token and a token before it); decode_step (fixed part of a decode step); decode_request
        /// (running request, per decode step); decode_context_token (token in the context of the
        /// running requests, per decode step); transfer_token (prompt token that a prefill worker
        /// transfers)
        "latency_coefficient_seconds" coefficient_seconds: Family<ModelCoefficientLabels, FloatGauge>;
        /// Learned mean length of an answer in tokens
        "latency_output_tokens" output_tokens: Family<ModelLabel, FloatGauge>;
        /// Requests per second over the last minute, over all replicas
        "latency_request_rate" request_rate: Family<ModelLabel, FloatGauge>;
        /// Expected seconds of prefill, without the fixed part, per second over the last minute,
        /// over all worker ranks
        "latency_prefill_rate" prefill_rate: Family<ModelLabel, FloatGauge>;
        /// Observed time to first token divided by the predicted one. The prediction includes the
        /// prefills that were outstanding on the worker rank
        "time_to_first_token_prediction_ratio" first_token_ratio: Histograms<ModelLabel> =
            histograms(|| Histogram::new(RATIO_BOUNDS));
        /// Learned latency of a worker rank relative to its model, by phase: prefill, decode. The
        /// geometric mean over the observed ranks of a model is 1. Above it, the rank is slower
        "worker_latency_factor" factor: Family<RankPhaseLabels, FloatGauge>;
        /// Observations from which the latency factor of a worker rank was learned, by phase
        "worker_latency_observations" observations: Family<RankPhaseLabels, Counter>;
        /// Sum of the predicted times to first token of a worker rank
        "worker_predicted_first_token_seconds" predicted_first_token_seconds: Family<RankLabels, SecondsCounter>;
        /// Sum of the observed times to first token of a worker rank, over the same requests as
        /// worker_predicted_first_token_seconds
        "worker_observed_first_token_seconds" observed_first_token_seconds: Family<RankLabels, SecondsCounter>;
    }
}

metrics! {
    /// Metrics of the comparison between predicted and reported cache hits.
    AuditMetrics {
        /// Responses compared with the prediction, by model and outcome: equal; fewer (cached
        /// tokens than predicted); more; other_prompt_length (as many, but the prompt length
        /// differs); not_predicted (routed by load only); no_usage; no_cached_tokens (the usage
        /// does not report cached tokens); undecided (another worker computed the prompt, and
        /// warmroute receives no report of its cache)
        "audit_responses" responses: Family<ModelOutcomeLabels, Counter>;
        /// Prompt tokens of responses that report their cached tokens, by model and kind: prompt,
        /// available (predicted on the best candidate); captured (predicted on the chosen
        /// candidate); by_chance (expected on a random candidate); delivered (reported by the
        /// engine)
        "audit_tokens" tokens: Family<ModelTokensLabels, Counter>;
        /// Prompt tokens that the engine had not cached, by model and cause: block_alignment;
        /// not_cached (no worker had cached them); load_balancing (another worker was chosen for
        /// its load); evicted (the events of the worker report the eviction); dropped_block (the
        /// engine recomputes the last matched block, and warmroute had not learned it yet);
        /// stale_index (the events do not explain the difference); unknown (evicted or stale_index:
        /// too many events have arrived since, or a remote server keeps the index); token_mismatch
        /// (the engine computes other tokens); served_elsewhere (another worker served the
        /// request); approximate (the cache was predicted without events); load_only (the request
        /// was routed by load only)
        "audit_missed_tokens" missed_tokens: Family<CauseLabels, Counter>;
        /// Responses with more or fewer cached tokens than predicted, by model and cause: the
        /// causes of missed tokens, stored_meanwhile (by another request), block_rounding (the
        /// engine's blocks are smaller than block_size)
        "audit_mispredictions" mispredictions: Family<CauseLabels, Counter>;
        /// Blocks predicted as cached that the engine had to compute, for each response with fewer
        /// cached tokens than predicted
        "audit_over_predicted_blocks" over_predicted_blocks: Histograms<ModelLabel> =
            histograms(error_blocks);
        /// Blocks cached by the engine beyond the prediction, for each response with more cached
        /// tokens than predicted
        "audit_under_predicted_blocks" under_predicted_blocks: Histograms<ModelLabel> =
            histograms(error_blocks);
    }
}

metrics! {
    /// Metrics of tokenization.
    TokenMetrics {
        /// Prompt cache lookups by outcome: hit, miss, not_resumable (the prompt is too short or
        /// has no special token at which tokenization can resume), failed (the whole prompt was
        /// tokenized instead)
        "prompt_cache_lookups" prompt_cache_lookups: Family<OutcomeLabel, Counter> =
            outcomes(&["hit", "miss", "not_resumable", "failed"]);
        /// Prompt tokens taken from the prompt cache
        "prompt_cache_hit_tokens" prompt_cache_hit_tokens: Counter;
        /// Prompt tokens of lookups with outcome hit or miss
        "prompt_cache_lookup_tokens" prompt_cache_lookup_tokens: Counter;
        /// Bytes used by the prompt cache
        "prompt_cache_bytes" prompt_cache_bytes: Gauge;
        /// Entries evicted from the prompt cache to make room
        "prompt_cache_evictions" prompt_cache_evictions: Counter;
        /// Requests tokenized by engines, by model and outcome: ok, refused (by the engine),
        /// no_engine (none is available, or all are in cooldown after failures), busy, unreachable,
        /// timeout, not_offered (the engine has no such endpoint), status (the engine returned an
        /// error status), unreadable, too_large
        "remote_tokenizer_requests" remote_tokenizer_requests: Family<ModelOutcomeLabels, Counter>;
        /// Parts of real prompts that both the fast tokenizer and the reference library tokenized,
        /// by model and outcome: agrees, differs (only the library is used from then on)
        "tokenizer_comparisons" tokenizer_comparisons: Family<ModelOutcomeLabels, Counter>;
    }
}

metrics! {
    /// Metrics of remote prefills.
    PrefillMetrics {
        /// Requests that warmroute sent to prefill workers, by outcome: completed, rejected (by the
        /// prefill worker), busy, concurrency_limit, timeout, failed, cancelled_before_start,
        /// cancelled_after_start (the prefill continues without its client)
        "prefill_calls" calls: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "completed", "rejected", "busy", "concurrency_limit", "timeout", "failed",
                "cancelled_before_start", "cancelled_after_start",
            ]);
        /// Duration of requests to prefill workers, by outcome as in prefill_calls. Requests
        /// cancelled before their start are not included
        "prefill_call_duration_seconds" call_duration_seconds: Histograms<OutcomeLabel> =
            outcome_histograms(&[
                "completed", "rejected", "busy", "concurrency_limit", "timeout", "failed",
                "cancelled_after_start",
            ]);
        /// Requests to prefill workers in flight, including those of disconnected clients
        "prefill_calls_in_flight" calls_in_flight: Gauge;
        /// Time from the end of a remote prefill to the first token from the decode worker, by
        /// model
        "prefill_to_first_token_seconds" to_first_token_seconds: Histograms<ModelLabel> =
            histograms(seconds);
        /// Aborts of mirrored prefills whose clients disconnected, by outcome: accepted (by the
        /// engine), client_request_id (not sent: the client chose the request id, which may name
        /// other requests too), overflow (too many aborts wait for one engine), unreachable,
        /// timeout, status (the engine returned an error status)
        "prefill_aborts" aborts: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "accepted", "client_request_id", "overflow", "unreachable", "timeout", "status",
            ]);
        /// Retries by Envoy that warmroute observed, by outcome: prefilled_again (another prefill
        /// was started), unchanged (sent as it was: it had no remote prefill), handoff_removed
        /// (fields of a prefill that an earlier process started were removed), no_worker (no worker
        /// is left), cancelled (the client disconnected)
        "prefill_retries" retries: Family<OutcomeLabel, Counter> =
            outcomes(&[
                "prefilled_again", "unchanged", "handoff_removed", "no_worker", "cancelled",
            ]);
    }
}

metrics! {
    /// Metrics of the queue.
    QueueMetrics {
        /// Requests waiting in the queue, by class
        "queue_requests" requests: Family<ClassLabel, Gauge>;
        /// Prompt tokens of the requests waiting in the queue, by class
        "queue_prompt_tokens" prompt_tokens: Family<ClassLabel, Gauge>;
        /// Predicted cached prompt tokens of the requests waiting in the queue, by class
        "queue_cached_tokens" cached_tokens: Family<ClassLabel, Gauge>;
        /// Queued requests by class and outcome: admitted, request_limit, prompt_token_limit,
        /// cached_token_limit (refused: a limit of the class is reached), timeout, cancelled
        "queue_outcomes" outcomes: Family<ClassOutcomeLabels, Counter>;
    }
}

metrics! {
    /// Metrics of sessions.
    SessionMetrics {
        /// Sessions in the session table
        "sessions" sessions: Gauge;
        /// Requests in progress that belong to a session
        "session_requests" requests: Gauge;
        /// Responses that an engine stores and whose worker rank is known
        "stored_responses" stored_responses: Gauge;
        /// Sessions that warmroute has opened on engines
        "engine_sessions" engine_sessions: Gauge;
        /// Requests that open and close sessions on engines, by call (open, close) and outcome: ok,
        /// busy, unreachable, timeout, not_offered (the engine has no such endpoint), status (the
        /// engine returned an error status), overflow (too many requests wait)
        "engine_session_calls" engine_calls: Family<EngineSessionLabels, Counter>;
    }
}

metrics! {
    /// Metrics of the router API.
    ApiMetrics {
        /// Calls of the router API by method and gRPC status code. A stream is counted when it
        /// begins
        "api_calls" calls: Family<ApiCallLabels, Counter>;
        /// Requests that callers of the router API have booked
        "api_bookings" bookings: Gauge;
        /// Bookings of the router API that were released because their callers sent no update in
        /// time
        "api_expired_bookings" expired_bookings: Counter;
    }
}
