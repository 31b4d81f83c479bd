//! Policy `round_robin`: the ranks in turn. The turn is the number of prefills that were booked for
//! the model, so the policy has no state of its own. Requests without prefill tracking do not
//! advance it.

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerms, PolicyTerms};

const TERMS: PolicyTerms = PolicyTerms {
    policy: "round_robin",
    terms: &["distance"],
    summands: 1,
};

/// Cost function of the policy `round_robin`.
pub(super) struct RoundRobinModel {
    /// Position of the next rank.
    next: usize,
    candidates: usize,
}

impl RoundRobinModel {
    pub(super) fn new(input: &PolicyInput, candidates: usize) -> Self {
        let candidates = candidates.max(1);
        Self {
            next: (input.estimate.booked_prefills % candidates as u64) as usize,
            candidates,
        }
    }
}

impl CostModel for RoundRobinModel {
    /// The distance is the number of turns until the rank is next.
    #[inline(always)]
    fn terms(&self, index: usize, _candidate: &Candidate) -> CostTerms {
        let distance = if index >= self.next {
            index - self.next
        } else {
            index + self.candidates - self.next
        };
        CostTerms::new(&TERMS, [distance as f64])
    }
}
