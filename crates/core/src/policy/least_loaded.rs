//! Policy `least_loaded`: the rank with the fewest running requests.

use super::candidate::Candidate;
use super::cost::{CostModel, CostTerms, PolicyTerms};

const TERMS: PolicyTerms = PolicyTerms {
    policy: "least_loaded",
    terms: &["requests"],
    summands: 1,
};

/// Cost function of the policy `least_loaded`.
pub(super) struct LeastLoadedModel;

impl CostModel for LeastLoadedModel {
    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> CostTerms {
        CostTerms::new(&TERMS, [candidate.load.active_requests as f64])
    }
}
