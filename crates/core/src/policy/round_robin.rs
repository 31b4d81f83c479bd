//! Policy `round_robin`: the ranks in turn. The turn is the number of prefills that were booked for
//! the model, so the policy has no state of its own. Requests without prefill tracking do not
//! advance it.

use serde::Serialize;

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerm, CostTerms, TermSum};

/// Terms of the policy `round_robin`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RoundRobinTerms {
    /// Number of turns until this rank is next, which is the cost.
    pub distance: f64,
}

impl TermSum for RoundRobinTerms {
    #[inline(always)]
    fn sum(&self) -> f64 {
        self.distance
    }

    fn summands(&self) -> Vec<CostTerm> {
        vec![CostTerm::new("distance", self.distance)]
    }
}

impl From<RoundRobinTerms> for CostTerms {
    fn from(terms: RoundRobinTerms) -> Self {
        CostTerms::RoundRobin(terms)
    }
}

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
    type Terms = RoundRobinTerms;

    #[inline(always)]
    fn terms(&self, index: usize, _candidate: &Candidate) -> RoundRobinTerms {
        let distance = if index >= self.next {
            index - self.next
        } else {
            index + self.candidates - self.next
        };
        RoundRobinTerms {
            distance: distance as f64,
        }
    }
}
