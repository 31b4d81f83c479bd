//! Requests that other routers have sent a moment ago, and of which no word has come yet. Their number is known on the
//! average, so it is drawn; each is put where a router that knows no more than we do would have sent it. Routers that all
//! chose by the loads alone would all send to the rank that was the last to be idle.

use rand::{Rng, RngExt as _};

use super::{Candidate, Question, Weights};

/// Most of them that one decision reckons with.
const MOST: u32 = 16;

/// What is to be reckoned with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Unheard {
    /// How many on the average.
    pub bookings: f64,
    /// Prompt tokens that each leaves to compute, on the average.
    pub prefill_tokens: u64,
    /// Blocks that each holds, on the average.
    pub blocks: u64,
    /// To how many ranks they may go.
    pub ranks: usize,
}

impl Unheard {
    /// Adds them to the loads; says how many.
    pub fn place(
        &self,
        question: &Question,
        candidates: &mut [Candidate],
        weights: &Weights,
        rng: &mut impl Rng,
    ) -> u32 {
        // Whoever can only go to some of the ranks meets only so many of them.
        let share = (candidates.len() as f64 / self.ranks.max(1) as f64).min(1.0);
        let count = poisson(self.bookings * share, rng);
        for _ in 0..count {
            let Some(at) = least_busy(question, candidates, weights, rng) else {
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

/// Where a prompt would go that nobody has cached.
fn least_busy(
    question: &Question,
    candidates: &[Candidate],
    weights: &Weights,
    rng: &mut impl Rng,
) -> Option<usize> {
    let (mut found, mut least, mut ties) = (None, f64::INFINITY, 0);
    let block_size = question.block_size.tokens() as f64;
    for (at, Candidate { load, .. }) in candidates.iter().enumerate() {
        let prefill = if question.track_prefill {
            load.active_prefill_tokens as f64 / block_size
        } else {
            0.0
        };
        let requests = weights.decode_active_request_weight * load.active_requests as f64;
        let cost = weights.prefill_load_scale * prefill + load.active_blocks as f64 + requests;
        if cost < least {
            (found, least, ties) = (Some(at), cost, 1);
        } else if cost == least {
            ties += 1;
            if rng.random_range(0..ties) == 0 {
                found = Some(at);
            }
        }
    }
    found
}

/// A number of independent events, with this many on the average. Draws nothing where none is to be expected.
fn poisson(mean: f64, rng: &mut impl Rng) -> u32 {
    if mean.is_nan() || mean <= 0.0 {
        return 0;
    }
    let (none, mut count, mut product) =
        ((-mean.min(f64::from(MOST))).exp(), 0, rng.random::<f64>());
    while product > none && count < MOST {
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
    use crate::load::Load;
    use crate::worker::BlockSize;

    fn candidate(active_blocks: u64) -> Candidate {
        let load = Load {
            active_blocks,
            ..Load::default()
        };
        Candidate {
            overlap: TierBlocks::default(),
            trust_credit: 1.0,
            load,
            additional_blocks: 0,
            preference: 0.0,
        }
    }

    fn draws(mean: f64) -> Vec<u32> {
        let mut rng = SmallRng::seed_from_u64(7);
        (0..20_000).map(|_| poisson(mean, &mut rng)).collect()
    }

    #[test]
    fn as_many_are_drawn_as_are_to_be_expected_and_no_more_than_can_be() {
        for mean in [0.02, 0.5, 3.0] {
            let draws = draws(mean);
            let found =
                draws.iter().map(|count| f64::from(*count)).sum::<f64>() / draws.len() as f64;
            assert!((found / mean - 1.0).abs() < 0.15, "{found} for {mean}");
        }
        assert!(draws(1e9).iter().all(|count| *count <= MOST));
        for none in [0.0, -1.0, f64::NAN] {
            assert!(draws(none).iter().all(|count| *count == 0));
        }
    }

    #[test]
    fn they_go_where_least_is_done_one_after_the_other() {
        let unheard = Unheard {
            bookings: 1e9,
            prefill_tokens: 160,
            blocks: 10,
            ranks: 3,
        };
        let question = Question::new(100, BlockSize::new(16).unwrap());
        let mut candidates: Vec<_> = [0, 15, 1000].map(candidate).into();
        let mut rng = SmallRng::seed_from_u64(1);
        let count = unheard.place(&question, &mut candidates, &Weights::default(), &mut rng);
        let found: Vec<_> = candidates
            .iter()
            .map(|candidate| candidate.load.active_requests)
            .collect();
        // 20 blocks each, so the second is 15 behind the first, and the two take turns.
        assert!((4..=MOST).contains(&count), "{count}");
        let first = u64::from(count.div_ceil(2));
        assert_eq!(found, [first, u64::from(count) - first, 0]);
        assert_eq!(candidates[0].load.active_prefill_tokens, first * 160);
        assert_eq!(
            unheard.place(&question, &mut [], &Weights::default(), &mut rng),
            0
        );
    }
}
