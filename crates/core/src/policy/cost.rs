//! Cost of a candidate, as all policies report it.

use serde::Serialize;

use super::candidate::Candidate;
use super::least_loaded::LeastLoadedTerms;
use super::linear::LinearTerms;
use super::lmetric::LmetricTerms;
use super::round_robin::RoundRobinTerms;
use super::seconds::SecondsTerms;
use super::settings::PolicyName;
use super::sticky::StickyTerms;

/// Cost, term by term; lower is better.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Terms of the policy.
    #[serde(flatten)]
    pub terms: CostTerms,
    /// Factor from the preferred taints.
    pub taint_factor: f64,
    /// Sum of the terms times the taint factor.
    pub total: f64,
}

/// Terms of one policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "policy", rename_all = "snake_case")]
pub enum CostTerms {
    /// Terms of `seconds`.
    Seconds(SecondsTerms),
    /// Terms of `linear`.
    Linear(LinearTerms),
    /// Terms of `lmetric`.
    Lmetric(LmetricTerms),
    /// Terms of `sticky`.
    Sticky(StickyTerms),
    /// Terms of `least_loaded`.
    LeastLoaded(LeastLoadedTerms),
    /// Terms of `round_robin`.
    RoundRobin(RoundRobinTerms),
}

/// Named part of a cost, in the unit of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CostTerm {
    /// Name of the term.
    pub name: &'static str,
    /// Value.
    pub value: f64,
}

impl CostTerms {
    fn as_term_sum(&self) -> &dyn TermSum {
        match self {
            CostTerms::Seconds(terms) => terms,
            CostTerms::Linear(terms) => terms,
            CostTerms::Lmetric(terms) => terms,
            CostTerms::Sticky(terms) => terms,
            CostTerms::LeastLoaded(terms) => terms,
            CostTerms::RoundRobin(terms) => terms,
        }
    }

    /// Returns the name of the policy.
    pub fn policy(&self) -> &'static str {
        let name = match self {
            CostTerms::Seconds(_) => PolicyName::Seconds,
            CostTerms::Linear(_) => PolicyName::Linear,
            CostTerms::Lmetric(_) => PolicyName::Lmetric,
            CostTerms::Sticky(_) => PolicyName::Sticky,
            CostTerms::LeastLoaded(_) => PolicyName::LeastLoaded,
            CostTerms::RoundRobin(_) => PolicyName::RoundRobin,
        };
        name.as_str()
    }
}

impl CostTerm {
    pub(super) fn new(name: &'static str, value: f64) -> Self {
        Self { name, value }
    }
}

/// Terms whose sum is compared.
pub(super) trait TermSum {
    /// Returns the sum of [`TermSum::summands`], added in their order.
    fn sum(&self) -> f64;

    /// Returns the parts of the sum.
    fn summands(&self) -> Vec<CostTerm>;

    /// Returns all numbers that explain the sum.
    fn figures(&self) -> Vec<CostTerm> {
        self.summands()
    }
}

/// Cost function of one policy for one choice. It is created from all candidates, so terms that
/// they share are computed once.
pub(super) trait CostModel {
    type Terms: TermSum + Into<CostTerms>;

    /// Computes all terms of the candidate at a position.
    fn terms(&self, index: usize, candidate: &Candidate) -> Self::Terms;

    /// Returns the sum of the terms.
    #[inline(always)]
    fn sum(&self, index: usize, candidate: &Candidate) -> f64 {
        self.terms(index, candidate).sum()
    }

    /// Returns a number that the sum is certainly not below, at less cost than the sum.
    #[inline(always)]
    fn lower_bound(&self, _candidate: &Candidate) -> f64 {
        f64::NEG_INFINITY
    }
}

/// Returns the total cost that is compared. NaN counts as infinity, so it is never chosen over a
/// number.
#[inline(always)]
pub(super) fn total(model: &impl CostModel, index: usize, candidate: &Candidate) -> f64 {
    let total = model.sum(index, candidate) * taint_factor(candidate);
    if total.is_nan() { f64::INFINITY } else { total }
}

/// Returns the cost with its terms.
pub(super) fn cost(model: &impl CostModel, index: usize, candidate: &Candidate) -> Cost {
    let terms = model.terms(index, candidate);
    let taint_factor = taint_factor(candidate);
    Cost {
        total: terms.sum() * taint_factor,
        terms: terms.into(),
        taint_factor,
    }
}

#[inline]
fn taint_factor(candidate: &Candidate) -> f64 {
    if candidate.taint_preference == 0.0 {
        1.0
    } else {
        (-candidate.taint_preference.tanh()).exp()
    }
}

impl Cost {
    /// Returns the parts that add up to the total before the taint factor, in the order of their
    /// addition.
    pub fn summands(&self) -> Vec<CostTerm> {
        self.terms.as_term_sum().summands()
    }

    /// Returns all numbers that explain the total, without the taint factor.
    pub fn figures(&self) -> Vec<CostTerm> {
        self.terms.as_term_sum().figures()
    }

    /// Returns the terms of the policy `linear`, if it computed the cost.
    pub fn linear(&self) -> Option<&LinearTerms> {
        match &self.terms {
            CostTerms::Linear(terms) => Some(terms),
            _ => None,
        }
    }

    /// Returns the terms of the policy `seconds`, if it computed the cost.
    #[cfg(test)]
    pub(super) fn seconds(&self) -> Option<&SecondsTerms> {
        match &self.terms {
            CostTerms::Seconds(terms) => Some(terms),
            _ => None,
        }
    }
}
