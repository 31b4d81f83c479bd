//! Compares the choice with its definition: the minimum of all costs, and each of several equal
//! candidates with the same chance.

use proptest::collection::vec;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use warmroute_property_tests::property_config;

use super::*;

/// Returns the cheapest candidate and the number of candidates with equal cost.
fn choose_by_definition(
    input: &PolicyInput,
    candidates: &[Candidate],
    settings: &PolicySettings,
    rng: &mut StdRng,
) -> Option<(usize, usize)> {
    let costs = costs(input, candidates, settings);
    let totals = costs.iter().map(|cost| {
        if cost.total.is_nan() {
            f64::INFINITY
        } else {
            cost.total
        }
    });
    let mut best: Option<(usize, f64, usize)> = None;
    for (index, total) in totals.enumerate() {
        best = match best {
            Some((_, least, _)) if total > least => best,
            Some((kept, least, ties)) if total == least => {
                let keep = rng.random_range(0..ties + 1) != 0;
                Some((if keep { kept } else { index }, least, ties + 1))
            }
            _ => Some((index, total, 1)),
        };
    }
    best.map(|(index, _, ties)| (index, ties))
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let few = |most: u64| prop_oneof![Just(0_u64), 0..most, 0..1_000_000_u64];
    let cached = || prop_oneof![4 => Just(0_u32), 2 => 0..5_u32, 1 => 0..5_000_u32];
    let overlap = (cached(), cached(), cached(), cached());
    let preference = prop_oneof![4 => Just(0.0), 1 => Just(0.5), 1 => -2.0..2.0];
    let load = (few(4), few(64), few(3));
    vec(
        (
            overlap,
            load,
            few(4),
            cached(),
            timings(),
            preference,
            prop_oneof![Just(1.0), Just(0.5), Just(0.0)],
        ),
        0..12,
    )
    .prop_map(|facts| {
        let candidate = |facts| {
            let (
                overlap,
                load,
                additional_blocks,
                running_blocks,
                timing,
                preference,
                freshness_credit,
            ) = facts;
            let (device, host, disk, external) = overlap;
            let (active_blocks, active_prefill_tokens, active_requests) = load;
            Candidate {
                overlap: TierBlocks {
                    device,
                    host,
                    disk,
                    external,
                },
                load: ActiveLoad {
                    active_blocks,
                    active_prefill_tokens,
                    active_requests,
                },
                additional_blocks,
                running_blocks,
                timing,
                total_blocks: None,
                free_blocks: 0,
                eviction_value: 1.0,
                taint_preference: preference,
                freshness_credit,
            }
        };
        facts.into_iter().map(candidate).collect()
    })
}

fn timings() -> impl Strategy<Value = RankTiming> {
    let count = || prop_oneof![Just(0_u32), 0..8_u32, any::<u32>()];
    let amount = || prop_oneof![Just(0_u64), 0..100_000_u64, 0..1_u64 << 60];
    let factor = || prop_oneof![3 => Just(1.0), 1 => 0.1..10.0];
    (count(), amount(), amount(), amount(), factor(), factor()).prop_map(
        |(prefills, tokens, pairs, context, prefill_factor, decode_factor)| RankTiming {
            prefills,
            prefill_tokens: tokens as f64,
            prefill_pairs: pairs as f64,
            prefill_elapsed: (tokens % 1000) as f64 / 10.0,
            delay: (pairs % 7) as f64,
            context_tokens: context as f64,
            prefill_factor,
            decode_factor,
        },
    )
}

fn estimates() -> impl Strategy<Value = LatencyEstimate> {
    let seconds = || prop_oneof![Just(0.0), Just(1e-4), 0.0..1.0];
    let coefficients =
        (seconds(), seconds(), seconds(), seconds()).prop_map(|(token, pair, step, context)| {
            LatencyCoefficients {
                prefill_base: step,
                prefill_token: token,
                prefill_pair: pair * 1e-4,
                decode_step: step,
                decode_request: context * 1e-2,
                decode_context_token: context * 1e-3,
            }
        });
    let transfer = 0.0..1e-3;
    (coefficients, 0.0..1e5, transfer, 0.0..1e4, 0.0..1e4).prop_map(
        |(coefficients, output_tokens, transfer_token, request_rate, prefill_rate)| {
            LatencyEstimate {
                coefficients,
                output_tokens,
                transfer_token,
                request_rate,
                prefill_rate,
                booked_prefills: 1,
            }
        },
    )
}

fn policies() -> impl Strategy<Value = RoutingPolicy> {
    let named = prop::sample::select(PolicyName::ALL)
        .prop_map(|name| PolicySettings::named(name, &Weights::default()).routing);
    prop_oneof![
        6 => named,
        2 => (0.1..100.0).prop_map(|first_token_weight| {
            RoutingPolicy::Seconds(SecondsSettings { first_token_weight })
        }),
        1 => any::<u64>().prop_map(|max_excess_tokens| {
            RoutingPolicy::Sticky(StickySettings { max_excess_tokens })
        }),
    ]
}

fn settings() -> impl Strategy<Value = PolicySettings> {
    (policies(), weights()).prop_map(|(routing, weights)| PolicySettings { routing, weights })
}

fn weights() -> impl Strategy<Value = Weights> {
    let weight = || prop_oneof![Just(0.0), Just(1.0), Just(0.5), 0.0..1.0, Just(0.1)];
    let any = || prop_oneof![3 => weight(), 1 => Just(f64::INFINITY), 1 => 0.0..1e6];
    ((any(), any(), any(), any()), (weight(), weight(), weight())).prop_map(
        |((credit, decay, scale, requests), (host, disk, shared))| Weights {
            overlap_score_credit: credit,
            overlap_score_credit_decay: decay,
            prefill_load_scale: scale,
            decode_active_request_weight: requests,
            host_cache_hit_weight: host,
            disk_cache_hit_weight: disk,
            shared_cache_multiplier: shared,
            router_temperature: 0.0,
        },
    )
}

fn inputs() -> impl Strategy<Value = PolicyInput> {
    let tokens = prop_oneof![
        0..300_u64,
        0..200_000_u64,
        Just(u64::MAX),
        Just((1 << 53) + 1)
    ];
    let size = prop_oneof![Just(16), Just(1), Just(3), Just(100), Just(64)];
    let role = prop_oneof![
        Just(WorkerRole::Aggregated),
        Just(WorkerRole::Decode),
        Just(WorkerRole::Prefill)
    ];
    let shared = prop_oneof![3 => Just(Vec::new()), 1 => Just(vec![0..3, 5..900])];
    (tokens, size, role, any::<bool>(), shared, estimates()).prop_map(
        |(tokens, size, role, track_prefill, shared, estimate)| PolicyInput {
            role,
            track_prefill,
            shared,
            output_tokens: estimate.output_tokens,
            estimate,
            ..PolicyInput::new(tokens, BlockSize::new(size).unwrap())
        },
    )
}

proptest! {
    #![proptest_config(property_config(20_000))]

    #[test]
    fn choice_has_minimum_cost(
        (input, candidates, settings) in (inputs(), candidates(), settings()),
        seed in any::<u64>(),
    ) {
        let rng = || StdRng::seed_from_u64(seed);
        let expected = choose_by_definition(&input, &candidates, &settings, &mut rng());
        let choice = choose(&input, &candidates, &settings, &mut rng());
        prop_assert_eq!(choice.as_ref().map(|choice| (choice.index, choice.ties)), expected);
        // As text, because NaN is not equal to itself.
        let chosen = choice.map(|choice| (choice.cost, costs(&input, &candidates, &settings)[choice.index]));
        prop_assert!(chosen.is_none_or(|(chosen, of)| format!("{chosen:?}") == format!("{of:?}")), "{:?}", chosen);
    }

    #[test]
    fn explained_terms_add_up_to_compared_cost(
        (input, candidates, settings) in (inputs(), candidates(), settings()),
    ) {
        for cost in costs(&input, &candidates, &settings) {
            let summands = cost.terms.summands().map(|term| term.value);
            let sum = summands.reduce(|sum, value| sum + value).unwrap();
            prop_assert_eq!((sum * cost.taint_factor).to_bits(), cost.total.to_bits());
        }
    }

    #[test]
    fn costs_of_seconds_are_finite(
        (input, candidates) in (inputs(), candidates()),
        first_token_weight in 0.1..100.0,
    ) {
        let routing = RoutingPolicy::Seconds(SecondsSettings { first_token_weight });
        let settings = PolicySettings { routing, weights: Weights::default() };
        for cost in costs(&input, &candidates, &settings) {
            prop_assert!(cost.total.is_finite() && cost.total >= 0.0, "{:?}", cost);
        }
    }
}
