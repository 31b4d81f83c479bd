//! Policy `sticky`: the fewest prefill tokens, queued and uncached, among the warm ranks. If the
//! queue of every warm rank is much longer than the shortest queue, all ranks are compared.

use serde::{Deserialize, Serialize};

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerms, PolicyTerms};

/// A warm rank holds at least this share of the longest cached prefix, and
const MIN_SHARE_OF_BEST: f64 = 0.8;

/// at least this share of the prompt.
const MIN_SHARE_OF_PROMPT: f64 = 0.5;

/// Cost of a running request, in tokens. It decides only between ranks with equal prefill tokens.
const REQUEST_TOKENS: f64 = 1e-3;

/// Settings of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StickySettings {
    /// Prefill tokens by which the queue of a warm rank may exceed the shortest queue.
    pub max_excess_tokens: u64,
}

impl Default for StickySettings {
    fn default() -> Self {
        Self {
            max_excess_tokens: 286_720,
        }
    }
}

/// Penalty of a cold rank: more tokens than any queue has.
const COLD_TOKENS: f64 = (1_u64 << 62) as f64;

const TERMS: PolicyTerms = PolicyTerms {
    policy: "sticky",
    terms: &["queue", "uncached", "requests", "cold"],
    summands: 4,
};

/// Cost function of the policy `sticky`.
pub(super) struct StickyModel<'a> {
    input: &'a PolicyInput,
    /// Minimum cached tokens of a warm rank, if warm ranks are preferred.
    warm_tokens: Option<f64>,
}

impl<'a> StickyModel<'a> {
    pub(super) fn new(
        input: &'a PolicyInput,
        candidates: &[Candidate],
        settings: StickySettings,
    ) -> Self {
        let cached = |candidate: &Candidate| input.cached_tokens(candidate);
        let most = candidates.iter().map(cached).fold(0.0, f64::max);
        let warm_tokens =
            (MIN_SHARE_OF_BEST * most).max(MIN_SHARE_OF_PROMPT * input.prompt_tokens as f64);
        let queue = |candidate: &Candidate| candidate.load.active_prefill_tokens;
        let shortest = candidates.iter().map(queue).min();
        let is_warm = |candidate: &&Candidate| cached(candidate) >= warm_tokens;
        let shortest_warm = candidates.iter().filter(is_warm).map(queue).min();
        let excess = shortest_warm
            .zip(shortest)
            .map(|(warm, any)| warm.saturating_sub(any));
        let is_preferred =
            most > 0.0 && excess.is_some_and(|excess| excess <= settings.max_excess_tokens);
        Self {
            input,
            warm_tokens: is_preferred.then_some(warm_tokens),
        }
    }
}

impl CostModel for StickyModel<'_> {
    /// All terms are in tokens. `cold` is the penalty of a rank that is not warm while a warm one is
    /// preferred.
    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> CostTerms {
        let is_cold = self
            .warm_tokens
            .is_some_and(|warm| self.input.cached_tokens(candidate) < warm);
        CostTerms::new(
            &TERMS,
            [
                candidate.load.active_prefill_tokens as f64,
                self.input.uncached_tokens(candidate),
                REQUEST_TOKENS * candidate.load.active_requests as f64,
                if is_cold { COLD_TOKENS } else { 0.0 },
            ],
        )
    }
}
