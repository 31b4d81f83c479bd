//! The cache report of a prefill worker: the usage in a response that warmroute receives itself. It describes the cache of
//! the worker that computed the prompt. The usage of the decode worker does not: after a transfer an engine may report what
//! the prefill worker found, what it holds itself, or nothing.

use std::time::Instant;

use super::handover::HandedOver;
use crate::audit::{Answered, Audit, Foreseen, Said};
use crate::block::BlockHashes;
use crate::openai::usage::Usage;

impl HandedOver {
    /// The usage that the prefill worker reports; `None` if it reports no prompt tokens.
    pub(super) fn usage(&self) -> Option<Usage> {
        Usage::of_document(self.body()).filter(|usage| usage.prompt_tokens > 0)
    }
}

/// Compares the cache report of a prefill worker with the prediction for it.
pub(super) fn audit_prefill_response(
    audit: &Audit,
    foreseen: Foreseen,
    prompts: Vec<BlockHashes>,
    usage: Option<Usage>,
) {
    match usage {
        Some(Usage {
            prompt_tokens,
            cached_tokens: Some(cached),
            ..
        }) => {
            let said = Said {
                prompt: prompt_tokens,
                cached,
            };
            audit.count_delivered_tokens(&foreseen, said);
            audit.answered(Answered::new(foreseen, said, prompts), Instant::now());
        }
        Some(_) => audit.silent(&foreseen.model, true),
        None => audit.silent(&foreseen.model, false),
    }
}
