//! Estimated requests that other replicas have routed but not reported yet. Their number is a
//! Poisson draw around the observed mean. Each is added where a replica with the same knowledge
//! would have sent it. Without this, all replicas would choose the same rank, the last one known to
//! be idle.

use rand::{Rng, RngExt as _};

use super::{Candidate, PolicyInput, Weights};

/// Maximum number of estimated requests per decision.
const MAX_BOOKINGS: u32 = 16;

/// Mean load of the unreported requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InFlightEstimate {
    /// Mean number of requests.
    pub bookings: f64,
    /// Mean prompt tokens that each leaves to compute.
    pub prefill_tokens: u64,
    /// Mean blocks that each holds.
    pub blocks: u64,
    /// Number of ranks that may receive them.
    pub ranks: usize,
}

impl InFlightEstimate {
    /// Adds the drawn requests to the loads. Returns their number.
    pub fn add_to_loads(
        &self,
        input: &PolicyInput,
        candidates: &mut [Candidate],
        weights: &Weights,
        rng: &mut impl Rng,
    ) -> u32 {
        // A decision over a subset of the ranks meets a proportional share of the requests.
        let share = (candidates.len() as f64 / self.ranks.max(1) as f64).min(1.0);
        let count = poisson(self.bookings * share, rng);
        for _ in 0..count {
            let Some(at) = least_busy(input, candidates, weights, rng) else {
                return 0;
            };
            let load = &mut candidates[at].load;
            load.active_prefill_tokens = load
                .active_prefill_tokens
                .saturating_add(self.prefill_tokens);
            load.active_blocks = load.active_blocks.saturating_add(self.blocks);
            load.active_requests = load.active_requests.saturating_add(1);
        }
        count
    }
}

/// Returns the candidate that a prompt without cached blocks would go to.
fn least_busy(
    input: &PolicyInput,
    candidates: &[Candidate],
    weights: &Weights,
    rng: &mut impl Rng,
) -> Option<usize> {
    let mut found = None;
    let mut min_cost = f64::INFINITY;
    let mut ties = 0;
    let block_size = input.block_size.tokens() as f64;
    for (at, Candidate { load, .. }) in candidates.iter().enumerate() {
        let prefill = if input.track_prefill {
            load.active_prefill_tokens as f64 / block_size
        } else {
            0.0
        };
        let requests = weights.decode_active_request_weight * load.active_requests as f64;
        let cost = weights.prefill_load_scale * prefill + load.active_blocks as f64 + requests;
        if cost < min_cost {
            found = Some(at);
            min_cost = cost;
            ties = 1;
        } else if cost == min_cost {
            ties += 1;
            if rng.random_range(0..ties) == 0 {
                found = Some(at);
            }
        }
    }
    found
}

/// Draws from a Poisson distribution by Knuth's method, at most `MAX_BOOKINGS`. Consumes no
/// randomness if the mean is not positive.
fn poisson(mean: f64, rng: &mut impl Rng) -> u32 {
    if mean.is_nan() || mean <= 0.0 {
        return 0;
    }
    let limit = (-mean.min(f64::from(MAX_BOOKINGS))).exp();
    let mut count = 0;
    let mut product = rng.random::<f64>();
    while product > limit && count < MAX_BOOKINGS {
        count += 1;
        product *= rng.random::<f64>();
    }
    count
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand::rngs::SmallRng;

    use super::*;
    use crate::index::TierBlocks;
    use crate::load::ActiveLoad;
    use crate::worker::BlockSize;

    fn candidate(active_blocks: u64) -> Candidate {
        let load = ActiveLoad {
            active_blocks,
            ..ActiveLoad::default()
        };
        Candidate {
            overlap: TierBlocks::default(),
            freshness_credit: 1.0,
            load,
            additional_blocks: 0,
            taint_preference: 0.0,
        }
    }

    fn draws(mean: f64) -> Vec<u32> {
        let mut rng = SmallRng::seed_from_u64(7);
        (0..20_000).map(|_| poisson(mean, &mut rng)).collect()
    }

    #[test]
    fn poisson_draws_match_mean_and_limit() {
        for mean in [0.02, 0.5, 3.0] {
            let draws = draws(mean);
            let found =
                draws.iter().map(|count| f64::from(*count)).sum::<f64>() / draws.len() as f64;
            assert!((found / mean - 1.0).abs() < 0.15, "{found} for {mean}");
        }
        assert!(draws(1e9).iter().all(|count| *count <= MAX_BOOKINGS));
        for none in [0.0, -1.0, f64::NAN] {
            assert!(draws(none).iter().all(|count| *count == 0));
        }
    }

    #[test]
    fn estimated_request_uses_least_loaded_rank() {
        let estimate = InFlightEstimate {
            bookings: 1e9,
            prefill_tokens: 160,
            blocks: 10,
            ranks: 3,
        };
        let input = PolicyInput::new(100, BlockSize::new(16).unwrap());
        let mut candidates: Vec<_> = [0, 15, 1000].map(candidate).into();
        let mut rng = SmallRng::seed_from_u64(1);
        let count = estimate.add_to_loads(&input, &mut candidates, &Weights::default(), &mut rng);
        let found: Vec<_> = candidates
            .iter()
            .map(|candidate| candidate.load.active_requests)
            .collect();
        // Each request counts 20 blocks. The second rank starts 15 blocks behind, so the two
        // alternate.
        assert!((4..=MAX_BOOKINGS).contains(&count), "{count}");
        let first = u64::from(count.div_ceil(2));
        assert_eq!(found, [first, u64::from(count) - first, 0]);
        assert_eq!(candidates[0].load.active_prefill_tokens, first * 160);
        assert_eq!(
            estimate.add_to_loads(&input, &mut [], &Weights::default(), &mut rng),
            0
        );
    }
}
