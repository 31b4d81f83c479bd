//! Cost of a candidate, as all policies report it.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::candidate::Candidate;

/// Maximum number of terms of a policy.
const MAX_TERMS: usize = 10;

/// Cost, term by term; lower is better.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Terms of the policy.
    #[serde(flatten)]
    pub terms: CostTerms,
    /// Factor from the preferred taints.
    pub taint_factor: f64,
    /// Sum of the summands, times the taint factor.
    pub total: f64,
}

/// Name and terms of a policy, and which terms are added up.
///
/// Policies declare it as a `const`. The compiler then knows the number of summands and computes
/// only these, which a `static` prevents: decisions take up to 13 % longer with one.
#[derive(Debug, PartialEq)]
pub struct PolicyTerms {
    /// Name of the policy.
    pub policy: &'static str,
    /// Names of the terms: first those that only explain the cost, then those that are added up.
    pub terms: &'static [&'static str],
    /// Number of terms that are added up.
    pub summands: usize,
}

/// Values of the terms of a policy for one candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostTerms {
    names: &'static PolicyTerms,
    values: [f64; MAX_TERMS],
}

/// Named part of a cost, in the unit of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostTerm {
    /// Name of the term.
    pub name: &'static str,
    /// Value.
    pub value: f64,
}

impl CostTerms {
    /// Creates the terms with these values.
    #[inline(always)]
    pub fn new<const N: usize>(names: &'static PolicyTerms, values: [f64; N]) -> Self {
        const { assert!(N <= MAX_TERMS) };
        debug_assert_eq!(names.terms.len(), N);
        let mut terms = Self {
            names,
            values: [0.0; MAX_TERMS],
        };
        terms.values[..N].copy_from_slice(&values);
        terms
    }

    /// Returns the name of the policy.
    pub fn policy(&self) -> &'static str {
        self.names.policy
    }

    /// Iterates over all terms.
    pub fn iter(&self) -> impl Iterator<Item = CostTerm> + '_ {
        let terms = self.names.terms.iter().zip(&self.values);
        terms.map(|(&name, &value)| CostTerm { name, value })
    }

    /// Iterates over the terms that are added up, in the order of their addition.
    pub fn summands(&self) -> impl Iterator<Item = CostTerm> + '_ {
        let explaining_terms = self.names.terms.len() - self.names.summands;
        self.iter().skip(explaining_terms)
    }

    /// Returns the value of a term, if the policy has it.
    pub fn get(&self, name: &str) -> Option<f64> {
        let term = self.iter().find(|term| term.name == name);
        term.map(|term| term.value)
    }

    #[inline(always)]
    pub(super) fn sum(&self) -> f64 {
        let end = self.names.terms.len();
        self.values[end - self.names.summands..end].iter().sum()
    }
}

impl Serialize for CostTerms {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("policy", self.policy())?;
        for term in self.iter() {
            map.serialize_entry(term.name, &term.value)?;
        }
        map.end()
    }
}

/// Cost function of one policy for one choice. It is created from all candidates, so terms that
/// they share are computed once.
pub(super) trait CostModel {
    /// Computes all terms of the candidate at a position.
    fn terms(&self, index: usize, candidate: &Candidate) -> CostTerms;

    /// Returns the sum of the terms that are added up.
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

/// Operation on the cost function of a choice, compiled once for each policy.
pub(super) trait CostModelVisitor {
    type Output;

    fn visit(self, model: &impl CostModel) -> Self::Output;
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
        terms,
        taint_factor,
        total: terms.sum() * taint_factor,
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
