//! Metrics of tokenization.

use crate::*;

metrics! {
    /// Metrics of tokenization.
    TokenMetrics {
        /// Prompt cache lookups by outcome: hit, miss, not_resumable (the prompt is too short or
        /// has no special token at which tokenization can resume), failed (the whole prompt was
        /// tokenized instead)
        "prompt_cache_lookups" prompt_cache_lookups: Family<OutcomeLabel, Counter> = outcomes(&["hit", "miss", "not_resumable", "failed"]);
        /// Prompt tokens taken from the prompt cache
        "prompt_cache_hit_tokens" prompt_cache_hit_tokens: Counter = Counter::default();
        /// Prompt tokens of lookups with outcome hit or miss
        "prompt_cache_lookup_tokens" prompt_cache_lookup_tokens: Counter = Counter::default();
        /// Bytes used by the prompt cache
        "prompt_cache_bytes" prompt_cache_bytes: Gauge = Gauge::default();
        /// Entries evicted from the prompt cache to make room
        "prompt_cache_evictions" prompt_cache_evictions: Counter = Counter::default();
        /// Requests tokenized by engines, by model and outcome: ok, refused (by the engine),
        /// no_engine (none is available, or all are in cooldown after failures), busy, unreachable,
        /// timeout, not_offered (the engine has no such endpoint), status (the engine returned an
        /// error status), unreadable, too_large
        "remote_tokenizer_requests" remote_tokenizer_requests: Family<ModelOutcomeLabels, Counter> = Family::default();
        /// Parts of real prompts that both the fast tokenizer and the reference library tokenized,
        /// by model and outcome: agrees, differs (only the library is used from then on)
        "tokenizer_comparisons" tokenizer_comparisons: Family<ModelOutcomeLabels, Counter> = Family::default();
    }
}
