//! Metrics of the comparison between predicted and reported cache hits.

use crate::*;

metrics! {
    /// Metrics of the comparison between predicted and reported cache hits.
    AuditMetrics {
        /// Responses compared with the prediction, by model and outcome: equal; fewer (cached
        /// tokens than predicted); more; other_prompt_length (as many, but the prompt length
        /// differs); not_predicted (routed by load only); no_usage; no_cached_tokens (the usage
        /// does not report cached tokens); undecided (another worker computed the prompt, and
        /// warmroute receives no report of its cache)
        "audit_responses" responses: Family<ModelOutcomeLabels, Counter> = Family::default();
        /// Prompt tokens of responses that report their cached tokens, by model and kind: prompt,
        /// available (predicted on the best candidate); captured (predicted on the chosen
        /// candidate); by_chance (expected on a random candidate); delivered (reported by the
        /// engine)
        "audit_tokens" tokens: Family<ModelTokensLabels, Counter> = Family::default();
        /// Prompt tokens that the engine had not cached, by model and cause: block_alignment;
        /// not_cached (no worker had cached them); load_balancing (another worker was chosen for
        /// its load); evicted (the events of the worker report the eviction); dropped_block (the
        /// engine recomputes the last matched block, and warmroute had not learned it yet);
        /// stale_index (the events do not explain the difference); unknown (evicted or stale_index: too many events
        /// have arrived since, or a remote server keeps the index); token_mismatch (the engine
        /// computes other tokens); served_elsewhere (another worker served the request);
        /// approximate (the cache was predicted without events); load_only (the request was routed
        /// by load only)
        "audit_missed_tokens" missed_tokens: Family<CauseLabels, Counter> = Family::default();
        /// Responses with more or fewer cached tokens than predicted, by model and cause: the
        /// causes of missed tokens, stored_meanwhile (by another request), block_rounding (the
        /// engine's blocks are smaller than block_size)
        "audit_mispredictions" mispredictions: Family<CauseLabels, Counter> = Family::default();
        /// Blocks predicted as cached that the engine had to compute, for each response with fewer
        /// cached tokens than predicted
        "audit_over_predicted_blocks" over_predicted_blocks: Histograms<ModelLabel> = histograms(error_blocks);
        /// Blocks cached by the engine beyond the prediction, for each response with more cached
        /// tokens than predicted
        "audit_under_predicted_blocks" under_predicted_blocks: Histograms<ModelLabel> = histograms(error_blocks);
    }
}
