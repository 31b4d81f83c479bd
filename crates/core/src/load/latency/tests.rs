use std::time::{Duration, Instant};

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use warmroute_property_tests::property_config;

use super::*;

mod equal_ranks;
mod limits;
mod recovery;

const PREFILL_TOKEN: f64 = 48.8e-6;
const PREFILL_PAIR: f64 = 1.7e-9;
const STEP: f64 = 13e-3;
const REQUEST: f64 = 20e-6;
const CONTEXT_TOKEN: f64 = 60e-9;

/// Draws an exponential delay in seconds.
fn noise(rng: &mut StdRng, mean: f64) -> f64 {
    -rng.random_range(1e-9..1.0_f64).ln() * mean
}

/// Draws the work of a prompt: a few to many tokens, behind a cached prefix.
fn draw_work(rng: &mut StdRng) -> PrefillWork {
    let cached = rng.random_range(0.0..40_000.0_f64);
    let tokens = 10.0_f64.powf(rng.random_range(2.0..4.5));
    PrefillWork::new(cached + tokens, cached)
}

fn draw_batch(rng: &mut StdRng) -> DecodeBatch {
    let requests = rng.random_range(1..64_u32);
    DecodeBatch {
        requests: requests.into(),
        context_tokens: f64::from(requests) * rng.random_range(500.0..4_000.0),
    }
}

fn true_step_seconds(batch: DecodeBatch) -> f64 {
    STEP + REQUEST * batch.requests + CONTEXT_TOKEN * batch.context_tokens
}

/// Compares the ranks, as the load table does from time to time.
fn compare(model: &mut ModelLatency, slowdowns: &mut [RankSlowdown]) {
    model.compare_ranks(&mut slowdowns.iter_mut().collect::<Vec<_>>());
}

fn true_seconds(work: PrefillWork) -> f64 {
    PREFILL_TOKEN * work.tokens + PREFILL_PAIR * work.pairs
}

fn observe(model: &mut ModelLatency, slowdown: &mut RankSlowdown, work: PrefillWork, seconds: f64) {
    let elapsed = Duration::from_secs_f64(seconds);
    let at = Instant::now();
    model.observe_prefill(PrefillObservation { work, elapsed, at }, slowdown);
}

fn coefficients(model: &ModelLatency) -> LatencyCoefficients {
    model.estimate(Instant::now()).coefficients
}

fn assert_near(found: f64, expected: f64, share: f64, name: &str) {
    let error = (found / expected - 1.0).abs();
    assert!(error <= share, "{name}: {found:e}, not {expected:e}");
}

#[test]
fn prefill_coefficients_are_recovered_from_noisy_times() {
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut model = ModelLatency::default();
        let mut slowdown = RankSlowdown::default();
        for _ in 0..50 {
            let work = draw_work(&mut rng);
            // A decode step may run before a chunk of the prefill.
            let step = if rng.random_bool(0.3) { STEP } else { 0.0 };
            let seconds = true_seconds(work) + step + noise(&mut rng, 3e-3);
            observe(&mut model, &mut slowdown, work, seconds);
        }
        // The time of a typical prompt is what decisions use.
        let typical = PrefillWork::new(30_000.0, 10_000.0);
        let learned = coefficients(&model).prefill_seconds(typical);
        assert_near(learned, true_seconds(typical), 0.15, "typical prompt");
    }
}

#[test]
fn decode_coefficients_are_recovered_from_noisy_steps() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut model = ModelLatency::default();
    let mut slowdown = RankSlowdown::default();
    for _ in 0..200 {
        let batch = draw_batch(&mut rng);
        let seconds = true_step_seconds(batch) + noise(&mut rng, 0.3e-3);
        let observation = StepObservation {
            batch,
            steps: 1,
            elapsed: Duration::from_secs_f64(seconds),
            at: Instant::now(),
        };
        model.observe_steps(observation, &mut slowdown);
    }
    let learned = coefficients(&model);
    for requests in [1.0, 16.0, 64.0] {
        let batch = DecodeBatch {
            requests,
            context_tokens: 2_000.0 * requests,
        };
        let expected = true_step_seconds(batch) + 0.3e-3;
        assert_near(learned.step_seconds(batch), expected, 0.05, "step");
    }
}

#[test]
fn only_slow_rank_has_higher_factor() {
    let mut rng = StdRng::seed_from_u64(2);
    let mut model = ModelLatency::default();
    let mut slowdowns = vec![RankSlowdown::default(); 4];
    let mut run = |slowdowns: &mut Vec<RankSlowdown>, slow: f64, rounds: usize| {
        for _ in 0..rounds {
            for (rank, slowdown) in slowdowns.iter_mut().enumerate() {
                let work = draw_work(&mut rng);
                let factor = if rank == 0 { slow } else { 1.0 };
                let seconds = factor * true_seconds(work) + noise(&mut rng, 3e-3);
                observe(&mut model, slowdown, work, seconds);
            }
        }
    };
    run(&mut slowdowns, 1.0, 100);
    let factors: Vec<f64> = slowdowns
        .iter()
        .map(|slowdown| slowdown.prefill_factor)
        .collect();
    let most = factors.iter().copied().fold(0.0, f64::max);
    let least = factors.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(most / least < 1.1, "{factors:?}");
    run(&mut slowdowns, 2.0, 60);
    let others = slowdowns[1..]
        .iter()
        .map(|slowdown| slowdown.prefill_factor);
    let mean = others.sum::<f64>() / 3.0;
    assert!(slowdowns[0].prefill_factor > 1.5 * mean, "{slowdowns:?}");
}

/// Learns from typical prompts on ranks with these true factors, in turn.
fn learn_ranks(
    slowdowns: &mut [RankSlowdown],
    true_factors: &[f64],
    rounds: usize,
    rng: &mut StdRng,
) {
    let mut model = ModelLatency::default();
    for _ in 0..rounds {
        for (slowdown, true_factor) in slowdowns.iter_mut().zip(true_factors) {
            let work = draw_work(rng);
            let spread = noise(rng, 0.5) + noise(rng, 0.5);
            let seconds = true_factor * true_seconds(work) * spread;
            observe(&mut model, slowdown, work, seconds);
        }
    }
}

#[test]
fn random_times_are_no_change_of_slowdown() {
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut slowdowns = [RankSlowdown::default(); 4];
        learn_ranks(&mut slowdowns, &[1.0; 4], 1_000, &mut rng);
        let factors = slowdowns.map(|slowdown| slowdown.prefill_factor);
        assert!(
            factors.iter().all(|factor| (0.7..1.4).contains(factor)),
            "{factors:?}"
        );
    }
}

#[test]
fn recovered_rank_is_detected() {
    let mut rng = StdRng::seed_from_u64(5);
    let mut model = ModelLatency::default();
    let mut slowdowns = [RankSlowdown::default(); 4];
    let work = PrefillWork::new(20_000.0, 4_000.0);
    for (round, slow) in [(200, 3.0), (60, 1.0)] {
        for _ in 0..round {
            for (rank, slowdown) in slowdowns.iter_mut().enumerate() {
                let factor = if rank == 0 { slow } else { 1.0 };
                let seconds = factor * true_seconds(work) + noise(&mut rng, 3e-3);
                observe(&mut model, slowdown, work, seconds);
            }
        }
        let relative = slowdowns[0].prefill_factor / slowdowns[1].prefill_factor;
        assert_near(relative, slow, 0.25, "factor");
    }
}

#[test]
fn outliers_hardly_move_prefill_coefficients() {
    let fit = |outliers: bool| {
        let mut rng = StdRng::seed_from_u64(3);
        let mut model = ModelLatency::default();
        let mut slowdowns = vec![RankSlowdown::default(); 8];
        for _ in 0..800 {
            let work = draw_work(&mut rng);
            let is_outlier = rng.random_bool(0.05) && outliers;
            let seconds = true_seconds(work) * if is_outlier { 10.0 } else { 1.0 };
            let rank = rng.random_range(0..slowdowns.len());
            observe(&mut model, &mut slowdowns[rank], work, seconds);
        }
        coefficients(&model).prefill_token
    };
    assert_near(fit(true), fit(false), 0.2, "per token");
}

#[test]
fn lasting_decode_slowdown_is_learned() {
    let mut model = ModelLatency::default();
    let mut slowdowns = [RankSlowdown::default(), RankSlowdown::default()];
    let mut run = |slowdown: f64, rounds: usize| {
        for number in 0..rounds {
            let rank = number % 2;
            let factor = if rank == 1 { slowdown } else { 1.0 };
            let observation = StepObservation {
                batch: DecodeBatch {
                    requests: 4.0,
                    context_tokens: 10_000.0,
                },
                steps: 4,
                elapsed: Duration::from_secs_f64(0.08 * factor),
                at: Instant::now(),
            };
            model.observe_steps(observation, &mut slowdowns[rank]);
        }
        slowdowns[1].decode_factor / slowdowns[0].decode_factor
    };
    assert_near(run(1.0, 400), 1.0, 0.1, "equal ranks");
    assert_near(run(8.0, 60), 1.0, 0.1, "a stall");
    let slow = run(8.0, 2_000);
    assert!(slow > 3.0, "{slow}");
}

#[test]
fn absurd_answer_length_is_limited() {
    let mut model = ModelLatency::default();
    let mut slowdown = RankSlowdown::default();
    model.observe_output(u64::MAX as f64, &mut slowdown);
    for _ in 0..600 {
        model.observe_output(100.0, &mut slowdown);
    }
    let learned = model.estimate(Instant::now()).output_tokens;
    assert_near(learned, 100.0, 0.1, "output tokens");
}

#[test]
fn constant_prompt_length_keeps_coefficients_bounded() {
    let mut model = ModelLatency::default();
    let mut slowdown = RankSlowdown::default();
    let work = PrefillWork::new(4_000.0, 0.0);
    (0..500).for_each(|_| observe(&mut model, &mut slowdown, work, true_seconds(work)));
    let learned = coefficients(&model);
    let found = slowdown.prefill_factor * learned.prefill_seconds(work);
    assert_near(found, true_seconds(work), 0.05, "seen");
    assert!(learned.prefill_pair < 10.0 * PREFILL_PAIR, "{learned:?}");
}

/// An engine may complete two prefills in one step, so the second one takes no time.
#[test]
fn prefills_of_one_step_are_unbiased() {
    let mut rng = StdRng::seed_from_u64(4);
    let mut model = ModelLatency::default();
    let mut slowdown = RankSlowdown::default();
    let mut draw = || PrefillWork::new(rng.random_range(4_000.0..8_000.0), 4_000.0);
    let mut observed = 0.0;
    let mut expected = 0.0;
    for round in 0..400 {
        let pair = [draw(), draw()];
        let seconds: f64 = pair.iter().map(|work| true_seconds(*work)).sum();
        if round >= 100 {
            let learned = coefficients(&model);
            let price =
                |work: &PrefillWork| slowdown.prefill_factor * learned.prefill_seconds(*work);
            expected += pair.iter().map(price).sum::<f64>();
            observed += seconds;
        }
        observe(&mut model, &mut slowdown, pair[0], seconds);
        observe(&mut model, &mut slowdown, pair[1], 0.0);
    }
    assert_near(expected, observed, 0.1, "sum of all prefills");
}

#[test]
fn young_traffic_estimate_is_unbiased() {
    let start = Instant::now();
    let mut traffic = traffic::TrafficRate::default();
    for second in 0..=300_u32 {
        let now = start + Duration::from_secs(second.into());
        traffic.add(0.25, now);
        traffic.add(0.25, now);
        if second >= 10 {
            let rates = traffic.snapshot(now);
            assert_near(rates.requests, 2.0, 0.25, "requests");
            assert_near(rates.prefill_seconds, 0.5, 0.25, "prefill");
        }
    }
    let idle = traffic.snapshot(start + Duration::from_secs(900));
    assert!(idle.requests < 1e-3, "{idle:?}");
}

proptest! {
    #![proptest_config(property_config(2_000))]

    #[test]
    fn any_observations_keep_the_model_finite(
        prefills in prop::collection::vec((any::<u32>(), any::<u32>(), 0..u64::MAX / 2), 0..60),
        steps in prop::collection::vec((any::<u32>(), any::<u64>(), 0..u64::MAX / 2), 0..60),
        outputs in prop::collection::vec(any::<u32>(), 0..10),
    ) {
        let mut model = ModelLatency::default();
        let mut slowdown = RankSlowdown::default();
        for (tokens, cached, nanos) in prefills {
            let cached = f64::from(cached);
            let work = PrefillWork::new(cached + f64::from(tokens), cached);
            let elapsed = Duration::from_nanos(nanos);
            let at = Instant::now();
            model.observe_prefill(PrefillObservation { work, elapsed, at }, &mut slowdown);
            model.on_booked(work, &slowdown, Instant::now());
        }
        for (context, steps, nanos) in steps {
            let elapsed = Duration::from_nanos(nanos);
            let batch = DecodeBatch { requests: 1.0, context_tokens: f64::from(context) };
            let at = Instant::now();
            model.observe_steps(StepObservation { batch, steps, elapsed, at }, &mut slowdown);
            model.observe_duration(elapsed, batch, &mut slowdown);
            compare(&mut model, std::slice::from_mut(&mut slowdown));
        }
        outputs.iter().for_each(|tokens| model.observe_output(f64::from(*tokens), &mut slowdown));
        let estimate = model.estimate(Instant::now());
        let found = estimate.coefficients;
        let coefficients = [found.prefill(), found.decode()].concat();
        prop_assert!(coefficients.iter().all(|seconds| *seconds > 0.0), "{:?}", found);
        prop_assert!(coefficients.iter().all(|seconds| seconds.is_finite()), "{:?}", found);
        let numbers = [
            estimate.output_tokens,
            estimate.request_rate,
            estimate.prefill_rate,
            slowdown.prefill_factor,
            slowdown.decode_factor,
        ];
        prop_assert!(numbers.iter().all(|number| number.is_finite() && *number >= 0.0), "{:?}", numbers);
    }
}
