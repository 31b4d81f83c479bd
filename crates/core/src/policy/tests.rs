use rand::SeedableRng;
use rand::rngs::StdRng;

use super::*;
use crate::index::TierBlocks;
use crate::load::{ActiveLoad, LatencyCoefficients, LatencyEstimate, RankTiming};
use crate::worker::{BlockSize, WorkerRole};

mod oracle;
mod seconds;

fn candidate() -> Candidate {
    Candidate {
        freshness_credit: 1.0,
        overlap: TierBlocks::default(),
        running_blocks: 0,
        load: ActiveLoad::default(),
        timing: RankTiming::default(),
        total_blocks: None,
        free_blocks: 0,
        eviction_value: 1.0,
        additional_blocks: 4,
        taint_preference: 0.0,
    }
}

fn input() -> PolicyInput {
    PolicyInput::new(64, BlockSize::new(16).unwrap())
}

fn chosen_index(input: &PolicyInput, candidates: &[Candidate], settings: &PolicySettings) -> usize {
    let mut rng = StdRng::seed_from_u64(1);
    choose(input, candidates, settings, &mut rng).unwrap().index
}

/// Returns the number of times that each candidate is chosen.
fn counts(candidates: &[Candidate], weights: &Weights, draws: usize) -> Vec<usize> {
    let settings = PolicySettings::linear(*weights);
    let mut rng = StdRng::seed_from_u64(7);
    let mut counts = vec![0; candidates.len()];
    for _ in 0..draws {
        counts[choose(&input(), candidates, &settings, &mut rng)
            .unwrap()
            .index] += 1;
    }
    counts
}

fn with_requests(requests: [u64; 4]) -> Vec<Candidate> {
    let loaded = |active_requests| Candidate {
        load: ActiveLoad {
            active_requests,
            ..ActiveLoad::default()
        },
        ..candidate()
    };
    requests.into_iter().map(loaded).collect()
}

#[test]
fn no_candidates_yield_no_choice() {
    let mut rng = StdRng::seed_from_u64(1);
    for router_temperature in [0.0, 1.0] {
        let weights = Weights {
            router_temperature,
            ..Weights::default()
        };
        assert_eq!(
            choose(&input(), &[], &PolicySettings::linear(weights), &mut rng),
            None
        );
    }
}

#[test]
fn tiny_temperature_selects_cheapest() {
    let candidates = with_requests([3, 1, 2, 4]);
    for (router_temperature, weight) in [(f64::MIN_POSITIVE, 1.0), (5e-324, 1.0), (5e-324, 0.1)] {
        let weights = Weights {
            router_temperature,
            decode_active_request_weight: weight,
            ..Weights::default()
        };
        assert_eq!(
            counts(&candidates, &weights, 50),
            [0, 50, 0, 0],
            "{router_temperature:e} {weight}"
        );
    }
}

#[test]
fn cost_is_finite_for_any_prompt_length() {
    let input = PolicyInput::new(u64::MAX, BlockSize::new(1).unwrap());
    let mut candidate = candidate();
    candidate.load.active_prefill_tokens = 100;
    candidate.overlap.device = 10;
    let choice = choose(
        &input,
        &[candidate],
        &PolicySettings::linear(Weights::default()),
        &mut StdRng::seed_from_u64(1),
    )
    .unwrap();
    assert!(choice.cost.total.is_finite());
}

#[test]
fn exact_ties_are_shared_evenly() {
    let mut candidates = vec![candidate(); 4];
    candidates[1].additional_blocks = 5;
    let counts = counts(&candidates, &Weights::default(), 3000);
    assert_eq!(counts[1], 0);
    assert!(
        counts
            .iter()
            .enumerate()
            .all(|(at, count)| at == 1 || (900..1100).contains(count)),
        "{counts:?}"
    );
    let choice = choose(
        &input(),
        &candidates,
        &PolicySettings::linear(Weights::default()),
        &mut StdRng::seed_from_u64(1),
    )
    .unwrap();
    assert_eq!(choice.ties, 3);
}

#[test]
fn temperature_samples_by_relative_cost() {
    let candidates = with_requests([0, 1, 2, 4]);
    let share = |cost: f64| (-cost / 4.0).exp();
    let sum: f64 = [0.0, 1.0, 2.0, 4.0].map(share).iter().sum();
    for scale in [1.0, 1e6, 1e300] {
        let weights = Weights {
            router_temperature: 1.0,
            decode_active_request_weight: scale,
            ..Weights::default()
        };
        let counts = counts(&candidates, &weights, 20_000);
        for (cost, count) in [0.0, 1.0, 2.0, 4.0].into_iter().zip(counts) {
            let expected = 20_000.0 * share(cost) / sum;
            assert!(
                (count as f64 - expected).abs() < 400.0,
                "scale {scale} cost {cost}: {count} against {expected}"
            );
        }
    }
}

#[test]
fn temperature_over_equal_costs_is_uniform() {
    let candidates = vec![candidate(); 4];
    let weights = Weights {
        router_temperature: 0.5,
        ..Weights::default()
    };
    let counts = counts(&candidates, &weights, 4000);
    assert!(
        counts.iter().all(|count| (850..1150).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn huge_costs_still_order_candidates() {
    let mut candidates = with_requests([0, 1, 0, 0]);
    candidates[0].taint_preference = -1000.0;
    let weights = Weights {
        router_temperature: 0.01,
        decode_active_request_weight: f64::MAX,
        ..Weights::default()
    };
    let counts = counts(&candidates, &weights, 100);
    assert_eq!((counts[1], counts.iter().sum::<usize>()), (0, 100));
}

#[test]
fn default_weights_prefer_busy_worker_with_long_prefix() {
    let input = PolicyInput::new(104 * 16, BlockSize::new(16).unwrap());
    let busy = ActiveLoad {
        active_blocks: 240,
        active_prefill_tokens: 0,
        active_requests: 2,
    };
    let warm = Candidate {
        overlap: TierBlocks {
            device: 100,
            ..TierBlocks::default()
        },
        load: busy,
        ..candidate()
    };
    let idle = Candidate {
        additional_blocks: 104,
        ..candidate()
    };
    let candidates = [warm, idle];
    let chosen =
        |weights: &Weights| chosen_index(&input, &candidates, &PolicySettings::linear(*weights));
    assert_eq!(
        (chosen(&Weights::default()), chosen(&Weights::UNIT)),
        (0, 1)
    );
}

#[test]
fn cost_terms_add_up_to_total() {
    let weights = Weights {
        decode_active_request_weight: 0.5,
        shared_cache_multiplier: 0.5,
        ..Weights::UNIT
    };
    let mut input = input();
    input.shared = vec![0..1, 2..4];
    let candidates = [Candidate {
        overlap: TierBlocks {
            device: 1,
            host: 1,
            disk: 1,
            external: 0,
        },
        load: ActiveLoad {
            active_blocks: 7,
            active_prefill_tokens: 160,
            active_requests: 3,
        },
        taint_preference: 0.5,
        ..candidate()
    }];
    let settings = PolicySettings::linear(weights);
    let choice = choose(
        &input,
        &candidates,
        &settings,
        &mut StdRng::seed_from_u64(1),
    )
    .unwrap();
    let term = |name| choice.cost.terms.get(name).unwrap();
    let credits = [
        "device_credit",
        "host_credit",
        "disk_credit",
        "shared_credit",
    ]
    .map(term);
    assert_eq!(credits, [1.0, 0.75, 0.25, 1.0]);
    assert_eq!(term("prefill"), term("prefill_blocks") - 3.0);
    assert_eq!((term("decode"), term("requests")), (11.0, 1.5));
    assert_eq!(choice.cost.taint_factor, (-0.5f64.tanh()).exp());
    assert_eq!(
        choice.cost.total,
        (term("prefill") + 11.0 + 1.5) * choice.cost.taint_factor
    );
    assert_eq!(
        (
            choice.cached_tokens,
            choice.required_blocks,
            choice.potential_decode_blocks
        ),
        (32, 4, 11)
    );
}

#[test]
fn invalid_weights_are_rejected_by_name() {
    type Change = fn(&mut Weights);
    let wrong: [(&str, Change); 8] = [
        ("overlap_score_credit", |w| w.overlap_score_credit = -0.1),
        ("overlap_score_credit_decay", |w| {
            w.overlap_score_credit_decay = f64::NAN
        }),
        ("prefill_load_scale", |w| {
            w.prefill_load_scale = f64::INFINITY
        }),
        ("decode_active_request_weight", |w| {
            w.decode_active_request_weight = -1.0
        }),
        ("host_cache_hit_weight", |w| w.host_cache_hit_weight = 1.1),
        ("disk_cache_hit_weight", |w| w.disk_cache_hit_weight = -0.1),
        ("shared_cache_multiplier", |w| {
            w.shared_cache_multiplier = 2.0
        }),
        ("router_temperature", |w| w.router_temperature = -1.0),
    ];
    assert_eq!(Weights::default().validate(), Ok(()));
    for (name, change) in wrong {
        let mut weights = Weights::default();
        change(&mut weights);
        assert_eq!(weights.validate().unwrap_err().0, name);
    }
}

#[test]
fn unknown_weight_is_rejected_and_missing_one_defaults() {
    let read = |text: &str| serde_json::from_str::<Weights>(text);
    assert_eq!(read("{}").unwrap(), Weights::default());
    assert_eq!(
        read(r#"{"router_temperature": 2}"#)
            .unwrap()
            .router_temperature,
        2.0
    );
    assert!(read(r#"{"overlap_weight": 1}"#).is_err());
}

#[test]
fn preference_has_no_effect_at_zero_cost() {
    let mut input = input();
    input.track_prefill = false;
    let idle = |preference| Candidate {
        additional_blocks: 0,
        taint_preference: preference,
        ..candidate()
    };
    let choice = choose(
        &input,
        &[idle(0.0), idle(1.0)],
        &PolicySettings::linear(Weights::default()),
        &mut StdRng::seed_from_u64(1),
    )
    .unwrap();
    assert_eq!((choice.cost.total, choice.ties), (0.0, 2));
}

#[test]
fn decode_cost_is_not_negative() {
    let mut input = input();
    input.track_prefill = false;
    input.role = WorkerRole::Decode;
    let holds = |device| Candidate {
        overlap: TierBlocks {
            device,
            ..TierBlocks::default()
        },
        ..candidate()
    };
    let candidates = [holds(4), holds(9), holds(3)];
    let choice = choose(
        &input,
        &candidates,
        &PolicySettings::linear(Weights::default()),
        &mut StdRng::seed_from_u64(1),
    )
    .unwrap();
    assert_eq!((choice.cost.total, choice.ties), (0.0, 2));
    let none = Weights {
        overlap_score_credit: 0.0,
        ..Weights::default()
    };
    let none = PolicySettings::linear(none);
    let choice = choose(&input, &candidates, &none, &mut StdRng::seed_from_u64(1)).unwrap();
    assert_eq!(
        (choice.cost.terms.get("decode"), choice.ties),
        (Some(4.0), 3),
        "without credit only the blocks count"
    );
}
