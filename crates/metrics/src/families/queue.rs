//! Metrics of the queue.

use crate::*;

metrics! {
    /// Metrics of the queue.
    QueueMetrics {
        /// Requests waiting in the queue, by class
        "queue_requests" requests: Family<ClassLabel, Gauge> = Family::default();
        /// Prompt tokens of the requests waiting in the queue, by class
        "queue_prompt_tokens" prompt_tokens: Family<ClassLabel, Gauge> = Family::default();
        /// Predicted cached prompt tokens of the requests waiting in the queue, by class
        "queue_cached_tokens" cached_tokens: Family<ClassLabel, Gauge> = Family::default();
        /// Queued requests by class and outcome: admitted, request_limit, prompt_token_limit,
        /// cached_token_limit (refused: a limit of the class is reached), timeout, cancelled
        "queue_outcomes" outcomes: Family<ClassOutcomeLabels, Counter> = Family::default();
    }
}
