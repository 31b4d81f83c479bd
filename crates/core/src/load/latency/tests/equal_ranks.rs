//! Latency of equal ranks whose prefills have a fixed part, such as HTTP and scheduling.

use super::*;

/// Fixed parts of a prefill, in seconds.
const FIXED_PARTS: [f64; 5] = [0.0, 0.01, 0.03, 0.06, 0.1];

/// Shares of requests with few uncached tokens behind many cached ones.
const WARM_SHARES: [f64; 3] = [0.0, 0.5, 0.9];

/// Observes prefills, of each rank in turn. Their relative error has a standard deviation of 0.15.
fn learn(
    slowdowns: &mut [RankSlowdown],
    fixed: f64,
    warm_share: f64,
    prefills: usize,
    seed: u64,
) -> ModelLatency {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut model = ModelLatency::default();
    for number in 0..prefills {
        let work = if rng.random_bool(warm_share) {
            let cached = rng.random_range(1_000.0..8_000.0);
            PrefillWork::new(cached + rng.random_range(20.0..200.0), cached)
        } else {
            PrefillWork::new(rng.random_range(500.0..6_000.0), 0.0)
        };
        // The sum of uniform errors is close to a normal distribution with a standard deviation of 1.
        let error: f64 = (0..12).map(|_| rng.random_range(-0.5..0.5)).sum();
        let seconds = (fixed + true_seconds(work)) * (1.0 + 0.15 * error).max(0.3);
        let rank = number % slowdowns.len();
        observe(&mut model, &mut slowdowns[rank], work, seconds);
        if rank == 0 {
            compare(&mut model, slowdowns);
        }
    }
    model
}

#[test]
fn fixed_part_of_prefills_is_learned() {
    let cold = PrefillWork::new(4_000.0, 0.0);
    let warm = PrefillWork::new(4_100.0, 4_000.0);
    for warm_share in WARM_SHARES {
        for fixed in FIXED_PARTS {
            for seed in 0..10 {
                let case = format!("{fixed} s, {warm_share} warm, seed {seed}");
                let mut slowdown = RankSlowdown::default();
                let ranks = std::slice::from_mut(&mut slowdown);
                let model = learn(ranks, fixed, warm_share, 1_500, seed);
                let seconds = |work| coefficients(&model).prefill_seconds(work);
                assert_near(seconds(cold), fixed + true_seconds(cold), 0.15, &case);
                if warm_share > 0.0 {
                    assert_near(seconds(warm), fixed + true_seconds(warm), 0.25, &case);
                }
                assert_near(slowdown.prefill_factor, 1.0, 1e-9, "factor of a lone rank");
            }
        }
    }
}

#[test]
fn equal_ranks_have_factors_near_one() {
    for ranks in [2, 3, 8] {
        for fixed in FIXED_PARTS {
            for seed in 0..10 {
                let mut slowdowns = vec![RankSlowdown::default(); ranks];
                let mut model = learn(&mut slowdowns, fixed, 0.9, 200 * ranks, seed);
                compare(&mut model, &mut slowdowns);
                let factors: Vec<f64> = slowdowns
                    .iter()
                    .map(|slowdown| slowdown.prefill_factor)
                    .collect();
                let are_near = factors.iter().all(|factor| (0.85..1.18).contains(factor));
                assert!(are_near, "{fixed} s, seed {seed}: {factors:?}");
                let product: f64 = factors.iter().product();
                assert_near(product, 1.0, 1e-9, "product of the factors");
            }
        }
    }
}

/// Returns the rank with the lower factor in decisions, or a random one if they are equal.
fn prefer_faster(model: &ModelLatency, slowdowns: &[RankSlowdown; 2], rng: &mut StdRng) -> usize {
    let factors = slowdowns
        .each_ref()
        .map(|slowdown| model.decision_factors(slowdown));
    let [first, second] = factors.map(|factors| factors.prefill);
    if first == second {
        rng.random_range(0..2)
    } else {
        usize::from(second < first)
    }
}

/// Both ranks become three times as fast. One of ten prefills waits for other work of the machine.
#[test]
fn equal_ranks_stay_equal_when_both_become_faster() {
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut model = ModelLatency::default();
        let mut slowdowns = [RankSlowdown::default(); 2];
        for number in 0..600 {
            let is_slow = number < 300;
            let rank = if is_slow {
                number % 2
            } else {
                prefer_faster(&model, &slowdowns, &mut rng)
            };
            let work = PrefillWork::new(rng.random_range(100.0..3_000.0), 0.0);
            let is_delayed = rng.random_bool(0.1);
            let delay = if is_delayed {
                rng.random_range(0.2..1.5)
            } else {
                0.0
            };
            let factor = if is_slow { 3.0 } else { 1.0 };
            let compute = factor * (0.012 + true_seconds(work)) * rng.random_range(0.8..1.4);
            observe(&mut model, &mut slowdowns[rank], work, compute + delay);
            compare(&mut model, &mut slowdowns);
        }
        let factors = slowdowns.map(|slowdown| slowdown.prefill_factor);
        let are_near = factors.iter().all(|factor| (0.85..1.18).contains(factor));
        assert!(are_near, "seed {seed}: {factors:?}");
    }
}
