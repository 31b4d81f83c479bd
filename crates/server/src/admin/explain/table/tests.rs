use warmroute_core::index::TierBlocks;
use warmroute_core::load::{ActiveLoad, LatencyCoefficients, LatencyEstimate, RankTiming};
use warmroute_core::policy::{Cost, CostTerms, PolicyTerms, Weights};
use warmroute_core::router::{ComputingRank, Mode, Reason};
use warmroute_core::worker::{BlockSize, WorkerRank};

use super::*;

fn rank(id: u64) -> WorkerRank {
    WorkerRank::new(id, 0)
}

const TERMS: PolicyTerms = PolicyTerms {
    policy: "linear",
    terms: &["prefill", "decode"],
    summands: 2,
};

fn worker_explanation(id: u64, total: Option<f64>, excluded: Option<&str>) -> WorkerExplanation {
    let cost = total.map(|total| Cost {
        terms: CostTerms::new(&TERMS, [total - 1.0, 1.0]),
        taint_factor: 1.0,
        total,
    });
    WorkerExplanation {
        rank: rank(id),
        endpoint: format!("10.0.0.{id}:8000").parse().unwrap(),
        role: WorkerRole::Aggregated,
        overlap: TierBlocks {
            device: id as u32,
            ..TierBlocks::default()
        },
        running_blocks: 0,
        source: Default::default(),
        cached_tokens: 16 * id,
        load: ActiveLoad {
            active_blocks: 3,
            active_prefill_tokens: 1234,
            active_requests: 2,
        },
        timing: None,
        prefill_tokens: 1300,
        decode_blocks: 8,
        cost,
        excluded: excluded.map(str::to_owned),
    }
}

fn explanation(phases: Vec<PhaseExplanation>) -> RouteExplanation {
    RouteExplanation {
        requested_model: None,
        model: Some("m".into()),
        class: Some("default".into()),
        busy: true,
        mode: Mode::LoadOnly,
        reason: Some(Reason::IndexCold),
        prompt_tokens: 66,
        prompt_blocks: 4,
        block_size: BlockSize::new(16),
        computed_by: None,
        policy: PolicySettings::linear(Weights::UNIT),
        phases,
        summary: "Because.".to_owned(),
        route: None,
    }
}

/// Returns a phase with a winner, a runner-up, a further candidate and an excluded rank.
fn phase_of_four_ranks() -> PhaseExplanation {
    PhaseExplanation {
        role: WorkerRole::Aggregated,
        used: true,
        winner: Some(rank(10)),
        runner_up: Some(rank(9)),
        margin: Some(0.5),
        ties: 1,
        latency: None,
        workers: vec![
            worker_explanation(7, None, Some("is overloaded")),
            worker_explanation(8, Some(1020.25), None),
            worker_explanation(9, Some(12.5), None),
            worker_explanation(10, Some(12.0), None),
        ],
    }
}

#[test]
fn head_and_first_row_show_all_columns() {
    let expected = "\
route    load_only (index_cold), after waiting, class default
prompt   m, 66 tokens, 4 complete blocks of 16 tokens
policy   linear: device 1, host 0.75, disk 0.25, shared 0, decay 0; prefill 1, request 0; temperature 0

prefill and decode: 3 of 4 worker ranks are candidates; winner 10/0, runner-up 9/0, margin 0.500
                                   blocks:                         cached      live  prefill tokens:             decode blocks:
worker  endpoint       role         device  host  disk  external  tokens  requests           active  with this          active  with this
";
    let table = render(&explanation(vec![phase_of_four_ranks()]));
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(
        lines[..5],
        expected.lines().collect::<Vec<_>>()[..5],
        "{table}"
    );
    let first = |at: usize| lines[at].split_whitespace().collect::<Vec<_>>();
    assert_eq!(first(6)[..3], ["worker", "endpoint", "role"], "{table}");
    let row = [
        "10/0",
        "10.0.0.10:8000",
        "aggregated",
        "10",
        "0",
        "0",
        "0",
        "160",
        "2",
        "1234",
        "1300",
        "3",
        "8",
    ];
    assert_eq!(first(7), row, "{table}");
}

#[test]
fn rows_are_ordered_and_columns_aligned() {
    let table = render(&explanation(vec![phase_of_four_ranks()]));
    let lines: Vec<&str> = table.lines().collect();
    let order: Vec<&str> = lines[14..18]
        .iter()
        .map(|line| line.split_whitespace().next().unwrap())
        .collect();
    assert_eq!(order, ["10/0", "9/0", "8/0", "7/0"], "{table}");
    let verdicts = [
        "winner",
        "runner-up",
        "candidate",
        "excluded: is overloaded",
    ];
    assert!(
        lines[14..18]
            .iter()
            .zip(verdicts)
            .all(|(line, verdict)| line.ends_with(verdict)),
        "{table}"
    );
    assert!(
        lines[17].contains("  -  "),
        "an excluded rank has no cost: {table}"
    );
    let ends = |number: &str| {
        lines[14..17]
            .iter()
            .find_map(|line| Some(line.find(number)? + number.len()))
    };
    assert_eq!(
        (ends(" 1020.250"), ends(" 12.500")),
        (ends(" 12.000"), ends(" 12.000")),
        "{table}"
    );
    assert_eq!(lines[19], "Because.", "{table}");
    assert!(
        lines
            .iter()
            .all(|line| line.len() <= 160 && !line.ends_with(' ')),
        "{table}"
    );
}

#[test]
fn phases_without_winner_or_effect_are_marked() {
    let phase = |role, winner: Option<u64>| PhaseExplanation {
        role,
        used: false,
        winner: winner.map(rank),
        runner_up: None,
        margin: None,
        ties: 1,
        latency: None,
        workers: vec![worker_explanation(1, winner.map(|_| 2.0), None)],
    };
    let table = render(&explanation(vec![
        phase(WorkerRole::Prefill, Some(1)),
        phase(WorkerRole::Decode, None),
    ]));
    let has_line = |text: &str| table.lines().any(|line| line == text);
    assert!(
        has_line("prefill: 1 of 1 worker ranks are candidates; winner 1/0; not used"),
        "{table}"
    );
    assert!(
        has_line("decode: 1 of 1 worker ranks are candidates; no worker is chosen"),
        "{table}"
    );
    assert!(
        table
            .lines()
            .any(|line| line.starts_with("1/0") && line.ends_with("eligible")),
        "{table}"
    );
}

#[test]
fn prediction_names_the_worker_that_computes_the_prompt() {
    let mut prefill = worker_explanation(1, Some(2.0), None);
    prefill.role = WorkerRole::Prefill;
    let phase = PhaseExplanation {
        role: WorkerRole::Prefill,
        used: true,
        winner: Some(rank(1)),
        runner_up: None,
        margin: None,
        ties: 1,
        latency: None,
        workers: vec![prefill],
    };
    let computed_by = ComputingRank {
        rank: rank(1),
        overlap: TierBlocks {
            device: 2,
            ..TierBlocks::default()
        },
        cached_tokens: 32,
        best_cached_tokens: 32,
        chance_cached_tokens: 16,
    };
    let table = render(&RouteExplanation {
        computed_by: Some(computed_by),
        ..explanation(vec![phase])
    });
    let expected = "cached   32 tokens predicted on 1/0 (prefill), which computes the prompt";
    assert!(table.lines().any(|line| line == expected), "{table}");
}

#[test]
fn learned_latency_is_one_line_per_phase() {
    let latency = LatencyEstimate {
        coefficients: LatencyCoefficients {
            prefill_base: 9e-3,
            prefill_token: 48.8e-6,
            prefill_pair: 1.7e-9,
            decode_step: 13e-3,
            decode_request: 20e-6,
            decode_context_token: 60e-9,
        },
        output_tokens: 343.0,
        transfer_token: 5e-6,
        request_rate: 6.8,
        prefill_rate: 1.64,
        booked_prefills: 412,
    };
    let mut phase = PhaseExplanation {
        latency: Some(latency),
        ..phase_of_four_ranks()
    };
    for worker in &mut phase.workers {
        worker.timing = Some(RankTiming {
            prefill_factor: 1.25,
            ..RankTiming::default()
        });
    }
    let table = render(&explanation(vec![phase]));
    let expected = "learned: prefill 9.0 ms + 48.8 us per token + 1.70 ns per pair, decode step \
        13.00 ms + 20.0 us per request + 60.0 ns per token, answers of 343 tokens; 6.8 requests/s, prefill 41 % busy";
    assert!(table.lines().any(|line| line == expected), "{table}");
    let row = table
        .lines()
        .rfind(|line| line.starts_with("10/0"))
        .unwrap();
    assert!(row.contains("1.250   1.000"), "{row}");
}
