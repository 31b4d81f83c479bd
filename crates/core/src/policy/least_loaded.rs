//! Policy `least_loaded`: the rank with the fewest running requests.

use serde::Serialize;

use super::candidate::Candidate;
use super::cost::{CostModel, CostTerm, CostTerms, TermSum};

/// Terms of the policy `least_loaded`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LeastLoadedTerms {
    /// Running requests, which are the cost.
    pub requests: f64,
}

impl TermSum for LeastLoadedTerms {
    #[inline(always)]
    fn sum(&self) -> f64 {
        self.requests
    }

    fn summands(&self) -> Vec<CostTerm> {
        vec![CostTerm::new("requests", self.requests)]
    }
}

impl From<LeastLoadedTerms> for CostTerms {
    fn from(terms: LeastLoadedTerms) -> Self {
        CostTerms::LeastLoaded(terms)
    }
}

/// Cost function of the policy `least_loaded`.
pub(super) struct LeastLoadedModel;

impl CostModel for LeastLoadedModel {
    type Terms = LeastLoadedTerms;

    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> LeastLoadedTerms {
        LeastLoadedTerms {
            requests: candidate.load.active_requests as f64,
        }
    }
}
