//! Detection of lasting changes of a factor by a cumulative sum (CUSUM, Page 1954).

use super::totals::TimeSums;

/// Ratio of an observation to the expectation, above which it is evidence for a slower rank. A rank
/// of half the speed has the ratio 2.
const SLOWER_RATIO: f64 = 1.5;

/// Ratio below which an observation is evidence for a faster rank. A rank of twice the speed has the
/// ratio 0.5.
const FASTER_RATIO: f64 = 0.7;

/// An observation counts with at most this ratio, because a single one may be an outlier.
const MAX_RATIO: f64 = 3.0;

/// Sums of evidence above which a change counts as detected. A rank of half the speed exceeds the
/// first one after about ten long prefills. A rank of twice the speed exceeds the second one later,
/// and the only rank in use never exceeds it.
const SLOWER_EVIDENCE: f64 = 5.0;
const FASTER_EVIDENCE: f64 = 8.0;

/// Direction of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeDirection {
    Slower,
    Faster,
}

/// Detector of a change in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ChangeDetector {
    direction: ChangeDirection,
    evidence: f64,
    /// Factor before the possible change.
    factor: f64,
    /// Observations since the possible change.
    candidate_sums: TimeSums,
}

impl ChangeDetector {
    /// Creates a detector of a rank that becomes slower.
    pub(super) fn slower() -> Self {
        Self::new(ChangeDirection::Slower)
    }

    /// Creates a detector of a rank that becomes faster.
    pub(super) fn faster() -> Self {
        Self::new(ChangeDirection::Faster)
    }

    fn new(direction: ChangeDirection) -> Self {
        Self {
            direction,
            evidence: 0.0,
            factor: 1.0,
            candidate_sums: TimeSums::default(),
        }
    }

    /// Divides the factor and the observed times by a mean of factors. The caller multiplies the
    /// expected times of the model by it.
    pub(super) fn normalize(&mut self, mean: f64) {
        self.factor /= mean;
        self.candidate_sums.observed /= mean;
    }

    /// Adds an observation of a rank whose estimated factor is `factor`. Returns the observations
    /// since the change as soon as the change counts as detected.
    pub(super) fn add(&mut self, sums: TimeSums, factor: f64) -> Option<TimeSums> {
        if self.evidence <= 0.0 {
            *self = Self {
                factor,
                ..Self::new(self.direction)
            };
        }
        let expected = sums.expected * self.factor;
        let observed = sums.observed.min(MAX_RATIO * expected);
        // Evidence is counted in observations at the factor before the change.
        let evidence = match self.direction {
            ChangeDirection::Slower => observed - SLOWER_RATIO * expected,
            ChangeDirection::Faster => FASTER_RATIO * expected - observed,
        };
        self.evidence += evidence / self.factor;
        self.candidate_sums.add(sums);
        let limit = match self.direction {
            ChangeDirection::Slower => SLOWER_EVIDENCE,
            ChangeDirection::Faster => FASTER_EVIDENCE,
        };
        (self.evidence > limit).then_some(self.candidate_sums)
    }
}
