//! Policy `lmetric`: prefill tokens that would be outstanding, times the requests that would run.

use serde::Serialize;

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerm, CostTerms, TermSum};

/// Terms of the policy `lmetric`. The cost is `prefill_tokens * requests`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LmetricTerms {
    /// Prefill tokens that would be outstanding, without cached ones.
    pub prefill_tokens: f64,
    /// Requests that would run.
    pub requests: f64,
    /// Product of the two.
    pub product: f64,
}

impl TermSum for LmetricTerms {
    #[inline(always)]
    fn sum(&self) -> f64 {
        self.product
    }

    fn summands(&self) -> Vec<CostTerm> {
        vec![CostTerm::new("product", self.product)]
    }

    fn figures(&self) -> Vec<CostTerm> {
        vec![
            CostTerm::new("prefill_tokens", self.prefill_tokens),
            CostTerm::new("requests", self.requests),
            CostTerm::new("product", self.product),
        ]
    }
}

impl From<LmetricTerms> for CostTerms {
    fn from(terms: LmetricTerms) -> Self {
        CostTerms::Lmetric(terms)
    }
}

/// Cost function of the policy `lmetric`.
pub(super) struct LmetricModel<'a> {
    pub(super) input: &'a PolicyInput,
}

impl CostModel for LmetricModel<'_> {
    type Terms = LmetricTerms;

    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> LmetricTerms {
        let prefill_tokens =
            candidate.load.active_prefill_tokens as f64 + self.input.uncached_tokens(candidate);
        let requests = candidate.load.active_requests as f64 + 1.0;
        LmetricTerms {
            prefill_tokens,
            requests,
            product: prefill_tokens * requests,
        }
    }
}
