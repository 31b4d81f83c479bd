//! Policy `lmetric`: prefill tokens that would be outstanding, times the requests that would run.

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerms, TermNames};

const TERMS: TermNames = TermNames {
    policy: "lmetric",
    terms: &["prefill_tokens", "requests", "product"],
    summands: 1,
};

/// Cost function of the policy `lmetric`.
pub(super) struct LmetricModel<'a> {
    pub(super) input: &'a PolicyInput,
}

impl CostModel for LmetricModel<'_> {
    /// The tokens are those that would be outstanding, without cached ones, and the requests those
    /// that would run. Their product is the cost.
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
