//! Fleets with a faulty worker: it loses its traffic with each policy, and no healthy worker does.

use warmroute_core::policy::PolicyName;
use warmroute_property_tests::is_long_form;

use super::*;
use crate::gpu_timing::LONG_PASSES;
use crate::worker_faults::{FaultMetrics, WorkerFault};

/// Time between two requests. The capacity of two workers suffices.
const INTERVAL_MS: usize = 50;
const FAULT: FaultPeriod = FaultPeriod {
    fault: WorkerFault::Hang,
    start_s: 10.0,
    end_s: 40.0,
};
const END_S: f64 = 75.0;

/// Faults that make a worker useless. The short form uses the first two.
const FAULTS: [WorkerFault; 5] = [
    WorkerFault::ImmediateResponse { status: 404 },
    WorkerFault::Hang,
    WorkerFault::ImmediateResponse { status: 500 },
    WorkerFault::ImmediateResponse { status: 503 },
    WorkerFault::ImmediateResponse { status: 200 },
];

/// Simulates a fleet whose requests take about a second each.
fn fault_metrics(fault: WorkerFault, policy: &str, workers: usize) -> FaultMetrics {
    let period = FaultPeriod { fault, ..FAULT };
    let case = JudgeCase {
        gpu: LONG_PASSES,
        workers,
        end_s: END_S,
        ..test_case(Some(period))
    };
    // Half of the requests continue conversations, and the others are distinct.
    let count = (END_S * 1e3) as usize / INTERVAL_MS;
    let lines = (0..count).map(|number| {
        let conversation = number % 40;
        let first = if conversation % 2 == 0 {
            conversation
        } else {
            number + 100
        };
        trace_line(number * INTERVAL_MS, &[first * 10, first * 10 + 1], 10)
    });
    let workload = workload_of(&case, lines);
    let result = simulation_of(policy, &case, &workload).into_result();
    FaultMetrics::new(period, workers, &result.fault_log)
}

/// Asserts that the broken worker receives at most its fair share while evidence is collected,
/// almost nothing later, and requests again after its repair.
fn assert_faulty_worker_loses_traffic(fault: WorkerFault, policy: &str, workers: usize) {
    let metrics = fault_metrics(fault, policy, workers);
    println!(
        "| {fault:?} | {policy} | {workers} | {:.1} | {:.1} | {} | {:.1} |",
        100.0 * metrics.early_share,
        100.0 * metrics.late_share,
        metrics.healthy_ejections,
        metrics.recovery_s
    );
    let fair_share = 1.0 / workers as f64;
    let context = format!("{fault:?} {policy} {workers} {metrics:?}");
    assert!(metrics.early_share <= fair_share + 0.02, "{context}");
    assert!(metrics.late_share < 0.02, "{context}");
    assert_eq!(metrics.healthy_ejections, 0, "{context}");
    assert!(metrics.recovery_s < 30.0, "{context}");
}

#[test]
fn faulty_worker_loses_traffic_in_every_policy() {
    let (fleets, faults): (&[usize], _) = if is_long_form() {
        (&[2, 4, 16], &FAULTS[..])
    } else {
        (&[4], &FAULTS[..2])
    };
    for policy in PolicyName::ALL {
        for &workers in fleets {
            for &fault in faults {
                assert_faulty_worker_loses_traffic(fault, policy.as_str(), workers);
            }
        }
    }
}

#[test]
fn slow_worker_loses_traffic_without_ejection() {
    let slow = WorkerFault::Slowdown { factor: 8.0 };
    let metrics = fault_metrics(slow, "seconds", 4);
    assert!(metrics.late_share < 0.1, "{metrics:?}");
    assert_eq!(metrics.healthy_ejections, 0, "{metrics:?}");
}

#[test]
fn failing_is_cheap_without_feedback() {
    let fault = WorkerFault::ImmediateResponse { status: 404 };
    let metrics = fault_metrics(fault, "least_loaded+no_ejection", 4);
    assert!(metrics.late_share > 0.5, "{metrics:?}");
}
