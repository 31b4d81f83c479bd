use super::*;
use crate::cases::{CacheSource, CaseLoad, FleetSpeed, ObservationDelay};
use crate::gpu_timing::QWEN_32B_H100;
use crate::policies::router_settings;
use crate::traces::{RecordedTrace, TraceHalf};
use crate::worker_faults::FaultPeriod;

mod faults;

fn test_case(fault: Option<FaultPeriod>) -> JudgeCase {
    JudgeCase {
        name: "test",
        load: CaseLoad::Arrivals {
            speed: 1.0,
            burst_copies: 0,
        },
        gpu: QWEN_32B_H100,
        workers: 3,
        prefill_workers: 0,
        speed: FleetSpeed::Uniform,
        cache_source: CacheSource::Events,
        fault,
        delay: ObservationDelay {
            min_event_ms: 5.0,
            max_event_ms: 50.0,
            mean_token_ms: 3.0,
        },
        warmup_s: 0.0,
        end_s: 1_000.0,
    }
}

/// Creates conversations of four requests, one request per 100 ms.
fn test_workload(case: &JudgeCase) -> ReplayWorkload {
    let lines = (0..80).map(|number| {
        let conversation = number % 20;
        let blocks = (0..4 + number / 20).map(|at| conversation * 10 + at);
        trace_line(number * 100, &blocks.collect::<Vec<_>>(), 100)
    });
    workload_of(case, lines)
}

/// Returns a line of a Mooncake trace. Each block has 512 tokens.
fn trace_line(time_ms: usize, blocks: &[usize], output_tokens: usize) -> String {
    format!(
        "{{\"timestamp\": {time_ms}, \"input_length\": {}, \"output_length\": {output_tokens}, \"hash_ids\": {blocks:?}}}\n",
        blocks.len() * 512 + 10,
    )
}

fn workload_of(case: &JudgeCase, lines: impl Iterator<Item = String>) -> ReplayWorkload {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines.collect::<String>()).unwrap();
    let trace = RecordedTrace::load(file.path()).unwrap();
    case.workload(&trace, TraceHalf::All, 1).unwrap()
}

fn finished_simulation<'w>(
    case: &'w JudgeCase,
    workload: &'w ReplayWorkload,
) -> FleetSimulation<'w> {
    simulation_of("linear", case, workload)
}

fn simulation_of<'w>(
    policy: &str,
    case: &'w JudgeCase,
    workload: &'w ReplayWorkload,
) -> FleetSimulation<'w> {
    let settings = router_settings(policy).unwrap();
    let mut simulation = FleetSimulation::new(case, workload, settings, 1).unwrap();
    simulation.run().unwrap();
    simulation
}

fn assert_no_load(simulation: &FleetSimulation<'_>) {
    let loads = simulation.driver.router().load().snapshot();
    assert_eq!(loads.len(), 3);
    for load in loads {
        let sum = load.active_blocks + load.active_prefill_tokens + load.active_requests;
        assert_eq!(sum, 0, "{load:?}");
    }
}

#[test]
fn completed_requests_release_their_load() {
    let case = test_case(None);
    let workload = test_workload(&case);
    let simulation = finished_simulation(&case, &workload);
    assert_no_load(&simulation);
    let result = simulation.into_result();
    assert_eq!(result.completed.len(), 80);
    assert!(result.unfinished.is_empty());
    assert!(result.completed.iter().all(|one| one.output_tokens == 100));
    assert!(result.completed.iter().any(|one| one.cached_tokens > 0));
}

#[test]
fn lost_worker_leaves_no_booking() {
    let case = test_case(Some(FaultPeriod {
        fault: WorkerFault::Loss,
        start_s: 5.0,
        end_s: 8.0,
    }));
    let workload = test_workload(&case);
    let simulation = finished_simulation(&case, &workload);
    assert_no_load(&simulation);
    let result = simulation.into_result();
    assert_eq!(result.completed.len(), 80);
    // Interrupted requests are routed twice.
    assert!(result.decisions.count > 80);
}

#[test]
fn index_contains_the_prompts_of_engines() {
    let case = test_case(None);
    let workload = test_workload(&case);
    let simulation = finished_simulation(&case, &workload);
    let ReplayWorkload::Arrivals(requests) = &workload else {
        panic!("wrong workload")
    };
    let prompt = requests[79].tokens();
    assert_eq!(
        simulation.driver.cached_tokens(&prompt),
        (prompt.len() / 64 * 64) as u64
    );
}

#[test]
fn equal_seeds_give_equal_results() {
    let case = test_case(None);
    let workload = test_workload(&case);
    let run = || finished_simulation(&case, &workload).into_result();
    assert_eq!(run().completed, run().completed);
}

#[test]
fn remote_prefills_complete_and_release_their_load() {
    let case = JudgeCase {
        prefill_workers: 1,
        ..test_case(None)
    };
    let workload = test_workload(&case);
    let simulation = simulation_of("seconds", &case, &workload);
    assert_no_load(&simulation);
    assert!(simulation.workers[0].last_transfer_ms > 0.0);
    let model = "simulated".into();
    let load = simulation.driver.router().load();
    let estimate = load.read(|view| view.estimate(&model));
    let per_token = QWEN_32B_H100.per_transferred_token;
    // The observed time includes the delay of tokens and waits for other transfers.
    let ratio = estimate.transfer_token / per_token;
    assert!((1.0..4.0).contains(&ratio), "{estimate:?}");
    // A prompt of which nothing is cached, of four blocks.
    let learned = estimate.coefficients;
    let tokens = 2058.0;
    let per_token = learned.prefill_token + learned.prefill_pair * tokens / 2.0;
    let ratio = (learned.prefill_base + per_token * tokens) / (48.8e-6 * tokens);
    assert!((0.5..2.0).contains(&ratio), "{estimate:?}");
    let result = simulation.into_result();
    assert_eq!(result.completed.len(), 80);
    assert!(result.completed.iter().all(|one| one.output_tokens == 100));
    assert!(result.completed.iter().any(|one| one.cached_tokens > 0));
}

#[test]
fn learned_rule_prefills_some_prompts_locally() {
    let case = JudgeCase {
        prefill_workers: 1,
        ..test_case(None)
    };
    let workload = test_workload(&case);
    let simulation = simulation_of("seconds+learned", &case, &workload);
    assert_no_load(&simulation);
    let result = simulation.into_result();
    assert_eq!(result.completed.len(), 80);
    // A remote prefill has two decisions.
    assert!(
        (81..160).contains(&result.decisions.count),
        "{:?}",
        result.decisions
    );
}
