//! Metrics of routed requests.

use prometheus_client::metrics::histogram::linear_buckets;

use crate::*;

metrics! {
    /// Metrics of routed requests.
    RequestMetrics {
        /// Requests by model, mode (exact, partial, approximate, load_only, passthrough, query,
        /// rejected) and role of the worker that decodes (none: no worker was chosen)
        "requests" requests: Family<RequestLabels, Counter> = Family::default();
        /// Requests that were not routed in exact mode, by reason
        "degradations" degradations: Family<ReasonLabel, Counter> = Family::default();
        /// Routed requests by plan of their phases: aggregated, remote_prefill, or the reason for
        /// which the decode worker computes the prompt although prefill workers exist
        "phase_plans" phase_plans: Family<PhasePlanLabel, Counter> = Family::default();
        /// Duration of one stage of a routing decision, by stage: parse, render, tokenize, hash,
        /// index, choose, total
        "decision_stage_duration_seconds" decision_stage_duration_seconds: Histograms<StageLabel> = stages(&["parse", "render", "tokenize", "hash", "index", "choose", "total"]);
        /// Predicted share of the prompt's blocks that are cached on the worker rank that computes
        /// the prompt, by model and role of that worker
        "prefix_hit_ratio" prefix_hit_ratio: Histograms<ModelRoleLabels> = histograms(|| Histogram::new(linear_buckets(0.0, 0.05, 21)));
        /// Prompt length in tokens, by model and role of the worker that computes the prompt
        "prompt_tokens" prompt_tokens: Histograms<ModelRoleLabels> = histograms(|| Histogram::new(exponential_buckets(32.0, 2.0, 14)));
        /// Output length in tokens of responses that warmroute observed, by model and role of the
        /// worker
        "output_tokens" output_tokens: Histograms<ModelRoleLabels> = histograms(|| Histogram::new(exponential_buckets(1.0, 2.0, 16)));
        /// Time from the arrival of the request at warmroute to the first token of its response.
        /// For responses that are not streamed, to the response headers
        "time_to_first_token_seconds" time_to_first_token_seconds: Histograms<ModelRoleLabels> = histograms(seconds);
        /// Mean time between the output tokens of one streamed response: from the first token to
        /// the end, divided by the number of tokens after the first
        "inter_token_latency_seconds" inter_token_latency_seconds: Histograms<ModelRoleLabels> = histograms(token_seconds);
        /// Time from the arrival of the request at warmroute to the end of its response
        "request_duration_seconds" request_duration_seconds: Histograms<ModelRoleLabels> = histograms(seconds);
        /// Predicted cached prompt tokens on the best eligible worker rank, by model and role of
        /// the worker that computes the prompt
        "available_cached_tokens" available_cached_tokens: Family<ModelRoleLabels, Counter> = Family::default();
        /// Predicted cached prompt tokens on the worker rank that computes the prompt, by model and
        /// role of that worker
        "predicted_cached_tokens" predicted_cached_tokens: Family<ModelRoleLabels, Counter> = Family::default();
        /// Cached prompt tokens that the engine reported in its response, by model and role of the
        /// worker that computed the prompt
        "reported_cached_tokens" reported_cached_tokens: Family<ModelRoleLabels, Counter> = Family::default();
        /// Requests whose prompt is computed on a worker rank that is not the one with the most
        /// cached blocks, by model and role of the chosen worker
        "non_max_overlap_choices" non_max_overlap_choices: Family<ModelRoleLabels, Counter> = Family::default();
        /// Requests that were routed to a worker rank. A request with a remote prefill is counted for
        /// both of its worker ranks
        "worker_requests" worker_requests: Family<RankLabels, Counter> = Family::default();
        /// Responses by model, class of their status and source: engine (or unknown), envoy (Envoy
        /// generated the response), warmroute (an immediate response)
        "responses" responses: Family<ResponseLabels, Counter> = Family::default();
        /// Requests served by another endpoint than the chosen one, by effect on the reservation:
        /// moved (to the serving worker), released (the serving worker has no reservations),
        /// unknown_endpoint (no worker has this address; the reservation stays)
        "served_endpoint_mismatches" served_endpoint_mismatches: Family<OutcomeLabel, Counter> = outcomes(&["moved", "released", "unknown_endpoint"]);
        /// Requests that were sent to another model than the one they name
        "model_rewrites" model_rewrites: Counter = Counter::default();
    }
}
