//! Metrics of the learned latency.

use crate::*;

/// Counter of seconds.
type SecondsCounter = Counter<f64, AtomicU64>;

/// Bounds of the ratio of an observed to a predicted time.
const RATIO_BOUNDS: [f64; 13] = [
    0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0,
];

metrics! {
    /// Metrics of the learned latency.
    LatencyMetrics {
        /// Learned time of one unit of work, by model and coefficient: prefill_base (fixed part of a
        /// prefill); prefill_token (uncached prompt token); prefill_pair (pair of an uncached token
        /// and a token before it); decode_step (fixed part of a decode step); decode_request
        /// (running request, per decode step); decode_context_token (token in the context of the
        /// running requests, per decode step); transfer_token (prompt token that a prefill
        /// worker transfers)
        "latency_coefficient_seconds" coefficient_seconds: Family<ModelCoefficientLabels, FloatGauge> = Family::default();
        /// Learned mean length of an answer in tokens
        "latency_output_tokens" output_tokens: Family<ModelLabel, FloatGauge> = Family::default();
        /// Requests per second over the last minute, over all replicas
        "latency_request_rate" request_rate: Family<ModelLabel, FloatGauge> = Family::default();
        /// Expected seconds of prefill, without the fixed part, per second over the last minute, over
        /// all worker ranks
        "latency_prefill_rate" prefill_rate: Family<ModelLabel, FloatGauge> = Family::default();
        /// Observed time to first token divided by the predicted one. The prediction includes the
        /// prefills that were outstanding on the worker rank
        "time_to_first_token_prediction_ratio" first_token_ratio: Histograms<ModelLabel> = histograms(|| Histogram::new(RATIO_BOUNDS));
        /// Learned latency of a worker rank relative to its model, by phase: prefill, decode. The
        /// geometric mean over the observed ranks of a model is 1. Above it, the rank is slower
        "worker_latency_factor" factor: Family<RankPhaseLabels, FloatGauge> = Family::default();
        /// Observations from which the latency factor of a worker rank was learned, by phase
        "worker_latency_observations" observations: Family<RankPhaseLabels, Counter> = Family::default();
        /// Sum of the predicted times to first token of a worker rank
        "worker_predicted_first_token_seconds" predicted_first_token_seconds: Family<RankLabels, SecondsCounter> = Family::default();
        /// Sum of the observed times to first token of a worker rank, over the same requests as
        /// worker_predicted_first_token_seconds
        "worker_observed_first_token_seconds" observed_first_token_seconds: Family<RankLabels, SecondsCounter> = Family::default();
    }
}
