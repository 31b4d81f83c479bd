//! Cache report of a prefill worker: the usage in a response that warmroute receives itself. It
//! describes the cache of the worker that computed the prompt. The usage of the decode worker does
//! not: after a transfer, engines report the value of the prefill worker, their own, or none.

use std::time::Instant;

use warmroute_core::block::BlockHashes;
use warmroute_tokens::openai::usage::TokenUsage;

use super::handoff::PrefillResponse;
use crate::dispatch::audit::{AuditedResponse, CacheAudit, HitForecast, ReportedUsage};

impl PrefillResponse {
    /// Returns the usage that the prefill worker reports; `None` if it reports no prompt tokens.
    pub(super) fn usage(&self) -> Option<TokenUsage> {
        TokenUsage::from_document(self.body()).filter(|usage| usage.prompt_tokens > 0)
    }
}

/// Compares the cache report of a prefill worker with the prediction for it.
pub(super) fn audit_prefill_response(
    audit: &CacheAudit,
    forecast: HitForecast,
    prompts: Vec<BlockHashes>,
    usage: Option<TokenUsage>,
) {
    match usage {
        Some(TokenUsage {
            prompt_tokens,
            cached_tokens: Some(cached),
            ..
        }) => {
            let reported = ReportedUsage {
                prompt_tokens,
                cached_tokens: cached,
            };
            audit.count_delivered_tokens(&forecast, reported);
            audit.record_response(
                AuditedResponse::new(forecast, reported, prompts),
                Instant::now(),
            );
        }
        Some(_) => audit.record_without_report(&forecast.model, true),
        None => audit.record_without_report(&forecast.model, false),
    }
}
