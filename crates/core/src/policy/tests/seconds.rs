use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::super::cost::CostModel;
use super::super::seconds::SecondsModel;
use super::*;

/// Load and cache of one candidate.
#[derive(Clone, Copy, Debug)]
struct CandidateParams {
    requests: u64,
    prefills: u32,
    prefill_tokens: f64,
    context_tokens: f64,
    cached_blocks: u32,
}

fn settings() -> PolicySettings {
    PolicySettings::named(PolicyName::Seconds, &Weights::default())
}

fn rank(facts: CandidateParams) -> Candidate {
    Candidate {
        overlap: TierBlocks {
            device: facts.cached_blocks,
            ..TierBlocks::default()
        },
        load: ActiveLoad {
            active_requests: facts.requests,
            ..ActiveLoad::default()
        },
        timing: RankTiming {
            prefills: facts.prefills,
            prefill_tokens: facts.prefill_tokens,
            prefill_pairs: facts.prefill_tokens * 1_000.0,
            context_tokens: facts.context_tokens,
            ..RankTiming::default()
        },
        ..candidate()
    }
}

fn seconds_input(prompt_tokens: u64) -> PolicyInput {
    PolicyInput {
        estimate: LatencyEstimate {
            request_rate: 8.0,
            prefill_rate: 2.0,
            ..LatencyEstimate::default()
        },
        ..PolicyInput::new(prompt_tokens, BlockSize::new(16).unwrap())
    }
}

fn terms_of(input: &PolicyInput, candidate: &Candidate) -> impl Fn(&str) -> f64 + use<> {
    let weights = Weights::default();
    let model = SecondsModel::new(input, 1, SecondsSettings::default(), &weights);
    let terms = model.terms(0, candidate);
    move |name| terms.get(name).unwrap()
}

fn total_of(input: &PolicyInput, facts: CandidateParams) -> f64 {
    costs(input, &[rank(facts)], &settings())[0].total
}

fn facts() -> impl Strategy<Value = CandidateParams> {
    (
        0..50_u64,
        1..20_u32,
        0..200_000_u32,
        0..1_000_000_u32,
        0..500_u32,
    )
        .prop_map(
            |(requests, prefills, prefill_tokens, context_tokens, cached_blocks)| CandidateParams {
                requests,
                prefills,
                prefill_tokens: f64::from(prefill_tokens),
                context_tokens: f64::from(context_tokens),
                cached_blocks,
            },
        )
}

/// Returns a rank with running requests, booked prefills and a part of the prompt.
fn busy_rank() -> Candidate {
    rank(CandidateParams {
        requests: 3,
        prefills: 2,
        prefill_tokens: 5_000.0,
        context_tokens: 40_000.0,
        cached_blocks: 100,
    })
}

#[test]
fn slower_fleet_scales_all_terms() {
    let input = seconds_input(8_000);
    let mut candidate = busy_rank();
    candidate.timing.prefill_elapsed = 0.1;
    let before = terms_of(&input, &candidate);
    let mut slow = input.clone();
    let coefficients = &mut slow.estimate.coefficients;
    coefficients.prefill_base *= 2.0;
    coefficients.prefill_token *= 2.0;
    coefficients.prefill_pair *= 2.0;
    coefficients.decode_step *= 2.0;
    coefficients.decode_request *= 2.0;
    coefficients.decode_context_token *= 2.0;
    candidate.timing.prefill_elapsed *= 2.0;
    let after = terms_of(&slow, &candidate);
    assert_eq!(after("queue"), 2.0 * before("queue"));
    assert_eq!(after("prefill"), 2.0 * before("prefill"));
    assert_eq!(after("first_token"), 2.0 * before("first_token"));
    assert_eq!(after("decode"), 2.0 * before("decode"));
    assert_eq!(after("running_delay"), 2.0 * before("running_delay"));
    assert_eq!(after("eviction"), 2.0 * before("eviction"));
    // At the same request rate, twice as many requests arrive during the backlog.
    assert_eq!(after("arrival_delay"), 4.0 * before("arrival_delay"));
    assert!(before("queue") > 0.0 && before("arrival_delay") > 0.0);
}

#[test]
fn arrival_delay_is_proportional_to_prefill_factor() {
    let input = seconds_input(8_000);
    let mut candidate = busy_rank();
    let before = terms_of(&input, &candidate);
    candidate.timing.prefill_factor *= 2.0;
    let after = terms_of(&input, &candidate);
    assert_eq!(after("first_token"), 2.0 * before("first_token"));
    // Each request is delayed twice as long and half as many arrive per second, but the backlog
    // lasts twice as long.
    assert_eq!(after("arrival_delay"), 2.0 * before("arrival_delay"));
    assert!(before("arrival_delay") > 0.0);
}

/// Returns a rank whose running requests hold 400 blocks, for a prompt of 100 more.
fn full_rank(requests: u64) -> Candidate {
    let mut candidate = rank(CandidateParams {
        requests,
        prefills: 0,
        prefill_tokens: 0.0,
        context_tokens: 6_400.0,
        cached_blocks: 0,
    });
    candidate.load.active_blocks = 400;
    candidate.additional_blocks = 100;
    candidate
}

#[test]
fn missing_kv_blocks_delay_the_first_token() {
    let input = seconds_input(1_600);
    let candidate = full_rank(4);
    let answer = 0.5 * input.output_tokens / 16.0;
    let wait = |total| {
        let candidate = Candidate {
            total_blocks: Some(total),
            ..candidate.clone()
        };
        terms_of(&input, &candidate)
    };
    let enough = wait(500 + answer.ceil() as u64);
    assert_eq!(enough("kv_wait"), 0.0);
    // One of four requests, or all of them, must end first.
    let one = wait(450 + answer as u64);
    let all = wait(100);
    let one_answers = one("kv_wait") / one("decode");
    let all_answers = all("kv_wait") / all("decode");
    assert!((one_answers * 4.0 - 1.0).abs() < 0.1, "{one_answers}");
    let exact = 1.0 / 4.0 + 1.0 / 3.0 + 1.0 / 2.0 + 1.0;
    assert!((all_answers / exact - 1.0).abs() < 0.1, "{all_answers}");
    let later = one("first_token") - enough("first_token");
    let weight = SecondsSettings::default().first_token_weight;
    assert!((later - weight * one("kv_wait")).abs() < 1e-9, "{later}");
}

#[test]
fn single_running_request_holds_blocks_for_mean_answer() {
    let mut candidate = full_rank(1);
    candidate.total_blocks = Some(450);
    let terms = terms_of(&seconds_input(1_600), &candidate);
    let answers = terms("kv_wait") / terms("decode");
    assert!((answers - 1.0).abs() < 0.1, "{answers}");
}

#[test]
fn phases_price_only_their_own_work() {
    let facts = CandidateParams {
        requests: 4,
        prefills: 2,
        prefill_tokens: 6_000.0,
        context_tokens: 50_000.0,
        cached_blocks: 10,
    };
    let mut input = seconds_input(4_000);
    input.role = WorkerRole::Prefill;
    let prefill = terms_of(&input, &rank(facts));
    assert_eq!(prefill("decode"), 0.0);
    let compute = prefill("prefill") - input.estimate.coefficients.prefill_base;
    assert!((prefill("running_delay") - 2.0 * compute).abs() < 1e-12);
    input.role = WorkerRole::Decode;
    input.track_prefill = false;
    let decode = terms_of(&input, &rank(facts));
    assert_eq!(
        (decode("queue"), decode("prefill"), decode("arrival_delay")),
        (0.0, 0.0, 0.0)
    );
    let transferred = (4_000.0 - 160.0) * input.estimate.transfer_token;
    assert_eq!(decode("transfer"), transferred);
    let weight = SecondsSettings::default().first_token_weight;
    assert_eq!(decode("first_token"), weight * transferred);
    assert!(decode("decode") > 0.0 && decode("running_delay") > 0.0);
}

#[test]
fn slower_tier_costs_between_device_and_prefill() {
    let input = seconds_input(1_600);
    let held = |overlap| {
        let candidate = Candidate {
            overlap,
            ..rank(CandidateParams {
                requests: 0,
                prefills: 0,
                prefill_tokens: 0.0,
                context_tokens: 0.0,
                cached_blocks: 0,
            })
        };
        terms_of(&input, &candidate)("prefill")
    };
    let none = TierBlocks::default();
    let device = held(TierBlocks { device: 90, ..none });
    let host = held(TierBlocks { host: 90, ..none });
    let disk = held(TierBlocks { disk: 90, ..none });
    let cold = held(none);
    assert!(device < host && host < disk && disk < cold);
}

#[test]
fn blocks_of_running_requests_count_as_cached() {
    let input = seconds_input(3_200);
    for name in PolicyName::ALL {
        let settings = PolicySettings::named(*name, &Weights::default());
        let cold = Candidate {
            additional_blocks: 200,
            ..candidate()
        };
        let shared = Candidate {
            running_blocks: 190,
            ..cold.clone()
        };
        let found = costs(&input, &[cold, shared], &settings);
        let ignores_caches = matches!(name, PolicyName::LeastLoaded | PolicyName::RoundRobin);
        assert_eq!(
            found[1].total < found[0].total,
            !ignores_caches,
            "{name:?}: {found:?}"
        );
    }
}

#[test]
fn round_robin_takes_candidates_in_turn() {
    let settings = PolicySettings::named(PolicyName::RoundRobin, &Weights::default());
    let candidates = with_requests([5, 0, 3, 1]);
    let chosen: Vec<usize> = (0..8)
        .map(|booked_prefills| {
            let mut input = input();
            input.estimate.booked_prefills = booked_prefills;
            chosen_index(&input, &candidates, &settings)
        })
        .collect();
    assert_eq!(chosen, [0, 1, 2, 3, 0, 1, 2, 3]);
}

#[test]
fn sticky_leaves_warm_rank_for_much_shorter_queue() {
    let input = seconds_input(1_600);
    let settings = PolicySettings::named(PolicyName::Sticky, &Weights::default());
    let chosen = |queue: u64| {
        let mut warm = candidate();
        warm.overlap.device = 95;
        warm.load.active_prefill_tokens = queue;
        chosen_index(&input, &[candidate(), warm], &settings)
    };
    assert_eq!((chosen(286_720), chosen(286_721)), (1, 0));
}

proptest! {
    #![proptest_config(property_config(5_000))]

    #[test]
    fn cost_rises_with_load_and_falls_with_cache(
        facts in facts(),
        prompt in 1..100_000_u64,
        more in 1..1_000_u32,
    ) {
        let input = seconds_input(prompt);
        let base = total_of(&input, facts);
        let queued = CandidateParams { prefill_tokens: facts.prefill_tokens + f64::from(more), ..facts };
        let long_contexts = CandidateParams { context_tokens: facts.context_tokens + f64::from(more), ..facts };
        let busy = CandidateParams { requests: facts.requests + 1, ..facts };
        let cached = CandidateParams { cached_blocks: facts.cached_blocks + more, ..facts };
        prop_assert!(total_of(&input, queued) >= base);
        prop_assert!(total_of(&input, long_contexts) > base);
        prop_assert!(total_of(&input, busy) > base);
        prop_assert!(total_of(&input, cached) <= base);
        let longer = seconds_input(prompt + u64::from(more));
        prop_assert!(total_of(&longer, facts) > base);
    }

    #[test]
    fn compared_phase_costs_are_finite(
        facts in facts(),
        prompt in 0..u64::from(u32::MAX),
        ranks in 0..100_usize,
    ) {
        let candidates = [rank(facts)];
        for policy in PolicyName::ALL {
            let settings = PolicySettings::named(*policy, &Weights::default());
            for role in [WorkerRole::Aggregated, WorkerRole::Prefill, WorkerRole::Decode] {
                let input = PolicyInput {
                    role,
                    track_prefill: role != WorkerRole::Decode,
                    prefill_ranks: Some(ranks),
                    ..seconds_input(prompt)
                };
                let cost = seconds_cost(&input, &candidates, &settings, 0);
                prop_assert!(cost.is_finite() && cost >= 0.0, "{policy:?} {role:?}: {cost}");
                if *policy == PolicyName::Seconds {
                    prop_assert_eq!(cost, costs(&input, &candidates, &settings)[0].total);
                }
            }
        }
    }
}
