//! Estimated requests that other replicas have routed but not reported yet. Their number is a
//! Poisson draw around the observed mean. Each is added where a replica with the same knowledge
//! would have sent it. Without this, all replicas would choose the same rank, the last one known to
//! be idle.

use rand::{Rng, RngExt as _};

use super::choose::cheapest_index;
use super::{Candidate, PolicyInput, PolicySettings};
use crate::index::TierBlocks;
use crate::load::PrefillWork;

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
        settings: &PolicySettings,
        rng: &mut impl Rng,
    ) -> u32 {
        // A decision over a subset of the ranks meets a proportional share of the requests.
        let share = (candidates.len() as f64 / self.ranks.max(1) as f64).min(1.0);
        let count = poisson(self.bookings * share, rng);
        if count == 0 || candidates.is_empty() {
            return 0;
        }
        // The prompts of the estimated requests are unknown, so no rank has them cached.
        let mut cold: Vec<Candidate> = candidates.iter().map(without_cache).collect();
        for _ in 0..count {
            let Some(at) = cheapest_index(input, &cold, settings, rng) else {
                return 0;
            };
            self.add_to(&mut cold[at], input);
            self.add_to(&mut candidates[at], input);
        }
        count
    }

    /// Adds one request to the load of a candidate.
    fn add_to(&self, candidate: &mut Candidate, input: &PolicyInput) {
        let load = &mut candidate.load;
        load.active_prefill_tokens = load
            .active_prefill_tokens
            .saturating_add(self.prefill_tokens);
        load.active_blocks = load.active_blocks.saturating_add(self.blocks);
        load.active_requests = load.active_requests.saturating_add(1);
        let context = self.blocks as f64 * input.block_size.tokens() as f64;
        let tokens = self.prefill_tokens as f64;
        let cached = (context - tokens).max(0.0);
        let timing = &mut candidate.timing;
        timing.prefills += 1;
        timing.prefill_tokens += tokens;
        timing.prefill_pairs += PrefillWork::new(cached + tokens, cached).pairs;
        timing.context_tokens += context;
    }
}

fn without_cache(candidate: &Candidate) -> Candidate {
    Candidate {
        overlap: TierBlocks::default(),
        running_blocks: 0,
        additional_blocks: 0,
        ..candidate.clone()
    }
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
    use crate::load::{ActiveLoad, RankTiming};
    use crate::worker::BlockSize;

    fn candidate(active_blocks: u64) -> Candidate {
        let load = ActiveLoad {
            active_blocks,
            ..ActiveLoad::default()
        };
        Candidate {
            overlap: TierBlocks::default(),
            freshness_credit: 1.0,
            running_blocks: 0,
            load,
            timing: RankTiming::default(),
            total_blocks: None,
            free_blocks: 0,
            eviction_value: 1.0,
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
        let count = estimate.add_to_loads(
            &input,
            &mut candidates,
            &PolicySettings::default(),
            &mut rng,
        );
        let found: Vec<_> = candidates
            .iter()
            .map(|candidate| candidate.load.active_requests)
            .collect();
        // Each request costs 154 blocks with the default weights. The second rank starts with 15
        // more, so the two alternate.
        assert!((4..=MAX_BOOKINGS).contains(&count), "{count}");
        let first = u64::from(count.div_ceil(2));
        assert_eq!(found, [first, u64::from(count) - first, 0]);
        assert_eq!(candidates[0].load.active_prefill_tokens, first * 160);
        assert_eq!(
            estimate.add_to_loads(&input, &mut [], &PolicySettings::default(), &mut rng),
            0
        );
    }
}
