//! Policy `lmetric`: prefill tokens that would be outstanding, times the requests that would run.

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerms, PolicyTerms};

const TERMS: PolicyTerms = PolicyTerms {
    policy: "lmetric",
    terms: &["prefill_tokens", "requests", "product"],
    summands: 1,
};

/// Cost function of the policy `lmetric`.
pub(super) struct LmetricModel<'a> {
    pub(super) input: &'a PolicyInput,
}

impl CostModel for LmetricModel<'_> {
    /// `prefill_tokens` counts the uncached prompt tokens that would be outstanding, and `requests`
    /// the requests that would run. `product` is the cost.
    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> CostTerms {
        let prefill_tokens =
            candidate.load.active_prefill_tokens as f64 + self.input.uncached_tokens(candidate);
        let requests = candidate.load.active_requests as f64 + 1.0;
        CostTerms::new(
            &TERMS,
            [prefill_tokens, requests, prefill_tokens * requests],
        )
    }
}
