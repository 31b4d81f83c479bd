//! Limits of the influence of one rank on its model.

use super::*;
use crate::load::latency::limits::{MAX_MEDIAN_RATIO, MAX_PRIOR_RATIO};

/// Number of observations between two comparisons of the ranks.
const COMPARISON_INTERVAL: usize = 4;

/// Ratio between equal ranks that the noise of their own values can cause.
const NOISE_RATIO: f64 = 2.0;

/// One answer of an engine under the control of the test.
#[derive(Clone, Copy, Debug)]
struct HostileAnswer {
    prompt_tokens: u32,
    cached_tokens: u32,
    prefill: Duration,
    step: Duration,
    output_tokens: u64,
}

fn hostile_answers() -> impl Strategy<Value = Vec<HostileAnswer>> {
    let tokens = || prop_oneof![1..100_u32, 1..200_000_u32];
    let nanos = || prop_oneof![Just(0_u64), 0..1_000_000_000_u64, 0..3_600_000_000_000_u64];
    let time = move || nanos().prop_map(Duration::from_nanos);
    let output = prop_oneof![0..1_000_u64, any::<u64>()];
    let answer = (tokens(), tokens(), time(), time(), output).prop_map(
        |(prompt_tokens, cached_tokens, prefill, step, output_tokens)| HostileAnswer {
            prompt_tokens,
            cached_tokens,
            prefill,
            step,
            output_tokens,
        },
    );
    let constant = (answer.clone(), 1..400_usize).prop_map(|(answer, count)| vec![answer; count]);
    prop_oneof![constant, prop::collection::vec(answer, 1..200)]
}

fn learn_hostile(model: &mut ModelLatency, slowdown: &mut RankSlowdown, answer: HostileAnswer) {
    let cached = f64::from(answer.cached_tokens);
    let work = PrefillWork::new(cached + f64::from(answer.prompt_tokens), cached);
    let at = Instant::now();
    let elapsed = answer.prefill;
    model.observe_prefill(PrefillObservation { work, elapsed, at }, slowdown);
    let batch = DecodeBatch {
        requests: 1.0,
        context_tokens: f64::from(answer.prompt_tokens),
    };
    let transfer = TransferObservation {
        tokens: batch.context_tokens,
        batch,
        elapsed,
    };
    model.observe_transfer(transfer, slowdown);
    let steps = StepObservation {
        batch,
        steps: 1,
        elapsed: answer.step,
        at,
    };
    model.observe_steps(steps, slowdown);
    model.observe_output(answer.output_tokens as f64, slowdown);
}

/// Teaches a model the times of equal ranks.
fn learn_equal(model: &mut ModelLatency, slowdowns: &mut [RankSlowdown], rng: &mut StdRng) {
    for _ in 0..200 {
        for slowdown in slowdowns.iter_mut() {
            let work = draw_work(rng);
            observe(model, slowdown, work, true_seconds(work) + noise(rng, 3e-3));
            let batch = draw_batch(rng);
            let steps = StepObservation {
                batch,
                steps: 1,
                elapsed: Duration::from_secs_f64(true_step_seconds(batch)),
                at: Instant::now(),
            };
            model.observe_steps(steps, slowdown);
            model.observe_output(noise(rng, 250.0), slowdown);
            let transfer = TransferObservation {
                tokens: 20_000.0,
                batch,
                elapsed: Duration::from_secs_f64(0.15),
            };
            model.observe_transfer(transfer, slowdown);
        }
        compare(model, slowdowns);
    }
}

/// Returns all values that a model learned.
fn values(model: &ModelLatency) -> [f64; 8] {
    let estimate = model.estimate(Instant::now());
    let coefficients = estimate.coefficients;
    [
        coefficients.prefill_base,
        coefficients.prefill_token,
        coefficients.prefill_pair,
        coefficients.decode_step,
        coefficients.decode_request,
        coefficients.decode_context_token,
        estimate.output_tokens,
        estimate.transfer_token,
    ]
}

proptest! {
    #![proptest_config(property_config(400))]

    #[test]
    fn one_rank_hardly_moves_its_model(
        seed in any::<u64>(),
        count in 3..6_usize,
        answers in hostile_answers(),
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut model = ModelLatency::default();
        let mut slowdowns = vec![RankSlowdown::default(); count];
        learn_equal(&mut model, &mut slowdowns, &mut rng);
        let before = values(&model);
        for (number, answer) in answers.iter().enumerate() {
            learn_hostile(&mut model, &mut slowdowns[0], *answer);
            if number % COMPARISON_INTERVAL == 0 {
                compare(&mut model, &mut slowdowns);
            }
        }
        let after = values(&model);
        let max_ratio = MAX_MEDIAN_RATIO * NOISE_RATIO;
        for (before, after) in before.into_iter().zip(after) {
            let ratio = after / before;
            prop_assert!((1.0 / max_ratio..=max_ratio).contains(&ratio), "{before:e} to {after:e}");
        }
    }

    #[test]
    fn lone_rank_stays_near_prior(answers in hostile_answers()) {
        let mut model = ModelLatency::default();
        let prior = values(&model);
        let mut slowdown = RankSlowdown::default();
        for answer in answers {
            learn_hostile(&mut model, &mut slowdown, answer);
        }
        let limit = MAX_PRIOR_RATIO * (1.0 + 1e-9);
        for (prior, learned) in prior.into_iter().zip(values(&model)) {
            let ratio = learned / prior;
            prop_assert!((1.0 / limit..=limit).contains(&ratio), "{prior:e} to {learned:e}");
        }
    }
}
