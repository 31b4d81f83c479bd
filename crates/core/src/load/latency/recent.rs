//! Recent observed and predicted times of the ranks of a model. If all ranks become faster, for
//! example because other work on their machine ends, only ranks in use show it. Their factors must
//! not change, because one of several equal ranks would then get all requests.

use super::totals::TimeSums;

/// Factor by which each observation of the model reduces the weight of all earlier ones, so that
/// about the last 20 count.
const RECENT_RETENTION: f64 = 0.95;

/// Variance of the factors of equal ranks, relative to the variance of an observation.
const FACTOR_VARIANCE: f64 = 0.15;

/// Variance of the speed of all ranks that is added per weight of one observation, in the same unit.
const CHANGE_VARIANCE: f64 = 0.1;

/// Precision of the assumption that the ranks are as fast as predicted, in observations.
const PRIOR_PRECISION: f64 = 0.1;

/// Minimum common ratio.
const MIN_RATIO: f64 = 0.1;

/// Sums of the recent times of a rank or of a model, weighted as in the average of a factor. Observed
/// times are divided by the factor of the rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RecentTimes {
    sums: TimeSums,
    /// Weight of the observations of this rank since the last one of another rank.
    streak_weight: f64,
    /// Number of observations of the model at the last update.
    updated_at: u64,
}

impl RecentTimes {
    /// Adds the times of a rank to those of the rank and of its model.
    pub(super) fn add(&mut self, times: TimeSums, model_recent: &mut Self) {
        self.streak_weight = self.weight_since_others(model_recent) + times.expected;
        let observations = model_recent.updated_at + 1;
        for recent in [self, model_recent] {
            recent.sums = recent.weighted(observations);
            recent.sums.add(times);
            recent.updated_at = observations;
        }
    }

    /// Returns the ratio of observed to predicted times that all ranks are assumed to have now, at
    /// most 1. It is the mean of the ratios of the other ranks and of this rank, weighted by their
    /// precision. Ranks are not assumed to be slower than predicted: one slow rank would raise the
    /// mean, and if all are slower, the other ranks get the next requests and show it.
    pub(super) fn common_ratio(&self, model_recent: &Self) -> f64 {
        let own = self.weighted(model_recent.updated_at);
        let others = TimeSums {
            observed: (model_recent.sums.observed - own.observed).max(0.0),
            expected: (model_recent.sums.expected - own.expected).max(0.0),
        };
        let change = CHANGE_VARIANCE * self.weight_since_others(model_recent);
        let others_precision = precision(others.expected, change);
        let own_precision = precision(own.expected, FACTOR_VARIANCE);
        let ratios = PRIOR_PRECISION
            + others_precision * others.ratio()
            + own_precision * own.ratio().min(1.0);
        let ratio = ratios / (PRIOR_PRECISION + others_precision + own_precision);
        ratio.clamp(MIN_RATIO, 1.0)
    }

    /// Removes the times of a rank whose factor has changed, also from those of its model.
    pub(super) fn remove_from(&mut self, model_recent: &mut Self) {
        let times = self.weighted(model_recent.updated_at);
        model_recent.sums.add(times.scaled(-1.0));
        self.sums = TimeSums::default();
    }

    /// Returns the sums with their weight after this number of observations of the model.
    fn weighted(&self, observations: u64) -> TimeSums {
        let age = observations.saturating_sub(self.updated_at);
        self.sums.scaled(RECENT_RETENTION.powf(age as f64))
    }

    fn weight_since_others(&self, model_recent: &Self) -> f64 {
        if self.updated_at == model_recent.updated_at {
            self.streak_weight
        } else {
            0.0
        }
    }
}

/// Returns the precision of a mean of observations with this total weight. `variance` is added to
/// that of the mean.
fn precision(weight: f64, variance: f64) -> f64 {
    weight / (1.0 + variance * weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the common ratio for the first rank after prefills of each rank in turn, with these
    /// ratios of observed to predicted times.
    fn common_ratio<const RANKS: usize>(ratios: [f64; RANKS]) -> f64 {
        let mut model = RecentTimes::default();
        let mut ranks = [RecentTimes::default(); RANKS];
        for _ in 0..50 {
            for (rank, observed) in ranks.iter_mut().zip(ratios) {
                let expected = 1.0;
                rank.add(TimeSums { observed, expected }, &mut model);
            }
        }
        ranks[0].common_ratio(&model)
    }

    #[test]
    fn common_ratio_is_mainly_that_of_others() {
        assert_eq!(
            RecentTimes::default().common_ratio(&RecentTimes::default()),
            1.0
        );
        assert!((common_ratio([1.0, 0.5, 0.5, 0.5]) - 0.6).abs() < 0.05);
        assert!((common_ratio([3.0, 1.0, 1.0, 1.0]) - 1.0).abs() < 1e-9);
        assert_eq!(common_ratio([1.0, 2.0, 2.0, 2.0]), 1.0);
    }

    #[test]
    fn lone_rank_shows_only_higher_speed() {
        assert!((common_ratio([0.5]) - 0.5).abs() < 0.05);
        assert!((common_ratio([2.0]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn removed_times_do_not_affect_other_ranks() {
        let mut model = RecentTimes::default();
        let mut ranks = [RecentTimes::default(); 2];
        for (rank, observed) in ranks.iter_mut().zip([5.0, 1.0]) {
            let expected = 1.0;
            rank.add(TimeSums { observed, expected }, &mut model);
        }
        ranks[0].remove_from(&mut model);
        assert!((ranks[1].common_ratio(&model) - 1.0).abs() < 1e-9);
    }
}
