//! Runs cases concurrently, and prints a table of observations, durations and verdicts.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::future::LocalBoxFuture;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinSet, LocalSet};

use crate::control_plane::TestControlPlane;
use crate::install::SuitePrograms;

/// Time limit of a case.
const CASE_LIMIT: Duration = Duration::from_secs(110);
/// Maximum number of concurrent cases on one API server.
const MAX_CONCURRENT_CASES: usize = 8;

/// Text of the column `seen`, or the error of a failed case.
pub(crate) type CaseResult = anyhow::Result<String>;

/// Control plane that a case runs against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaneKind {
    /// The case stays in its own namespace.
    Shared,
    /// The case installs and deletes custom resource definitions.
    Definitions,
    /// The case stops or restarts the API server or etcd.
    Faults,
}

/// One row of the table.
pub(crate) struct TestCase {
    pub(crate) name: &'static str,
    pub(crate) plane: PlaneKind,
    pub(crate) run: fn(Arc<TestControlPlane>) -> LocalBoxFuture<'static, CaseResult>,
}

/// A finished case.
struct CaseReport {
    name: &'static str,
    took: Duration,
    result: CaseResult,
}

/// Runs the cases. Returns the exit code that libtest would return.
pub(crate) fn run(cases: Vec<TestCase>, programs: SuitePrograms) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            println!("no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let began = Instant::now();
    let count = cases.len();
    println!(
        "\nrunning {count} cases against a real API server\n\n| case | seen | time | verdict |\n|---|---|--:|---|"
    );
    let failed = LocalSet::new().block_on(&runtime, run_all(cases, Arc::new(programs)));
    runtime.shutdown_timeout(Duration::from_secs(5));
    for report in &failed {
        if let Err(error) = &report.result {
            println!("\n---- {} ----\n{error:#}", report.name);
        }
    }
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    let passed = count - failed.len();
    if !failed.is_empty() {
        println!("\nfailures:");
        failed
            .iter()
            .for_each(|report| println!("    {}", report.name));
    }
    println!(
        "\ntest result: {verdict}. {passed} passed; {} failed; finished in {:.1}s",
        failed.len(),
        began.elapsed().as_secs_f64()
    );
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(101)
    }
}

async fn run_all(cases: Vec<TestCase>, programs: Arc<SuitePrograms>) -> Vec<CaseReport> {
    let (reports_tx, mut reports) = mpsc::unbounded_channel();
    let mut planes = JoinSet::new();
    for kind in [PlaneKind::Faults, PlaneKind::Definitions, PlaneKind::Shared] {
        let own: Vec<_> = cases
            .iter()
            .filter(|case| case.plane == kind)
            .map(|case| (case.name, case.run))
            .collect();
        if !own.is_empty() {
            planes.spawn_local(run_plane(kind, own, programs.clone(), reports_tx.clone()));
        }
    }
    drop(reports_tx);
    let mut failed = Vec::new();
    while let Some(report) = reports.recv().await {
        print_row(&report);
        if report.result.is_err() {
            failed.push(report);
        }
    }
    planes.join_all().await;
    failed
}

type NamedRun = (
    &'static str,
    fn(Arc<TestControlPlane>) -> LocalBoxFuture<'static, CaseResult>,
);

async fn run_plane(
    kind: PlaneKind,
    cases: Vec<NamedRun>,
    programs: Arc<SuitePrograms>,
    reports_tx: mpsc::UnboundedSender<CaseReport>,
) {
    let began = Instant::now();
    let plane = match TestControlPlane::start(&programs, kind != PlaneKind::Definitions).await {
        Ok(plane) => Arc::new(plane),
        Err(error) => {
            println!("the control plane did not start: {error:#}");
            for (name, _) in cases {
                _ = reports_tx.send(CaseReport {
                    name,
                    took: began.elapsed(),
                    result: Err(anyhow::anyhow!("the control plane did not start")),
                });
            }
            return;
        }
    };
    let permits = Arc::new(Semaphore::new(if kind == PlaneKind::Shared {
        MAX_CONCURRENT_CASES
    } else {
        1
    }));
    let mut running = JoinSet::new();
    for (name, run) in cases {
        let Ok(permit) = permits.clone().acquire_owned().await else {
            return;
        };
        if kind != PlaneKind::Shared
            && let Err(error) = plane.recover().await
        {
            _ = reports_tx.send(CaseReport {
                name,
                took: Duration::ZERO,
                result: Err(error),
            });
            continue;
        }
        let plane = plane.clone();
        let reports_tx = reports_tx.clone();
        running.spawn_local(async move {
            let began = Instant::now();
            // The inner task turns a panic into an error.
            let finished =
                tokio::task::spawn_local(tokio::time::timeout(CASE_LIMIT, run(plane))).await;
            let result = match finished {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err(anyhow::anyhow!(
                    "the case did not end within {CASE_LIMIT:?}"
                )),
                Err(panic) => Err(anyhow::Error::from(panic)).context("the case panicked"),
            };
            _ = reports_tx.send(CaseReport {
                name,
                took: began.elapsed(),
                result,
            });
            drop(permit);
        });
    }
    running.join_all().await;
}

fn print_row(report: &CaseReport) {
    let time = format!("{:.1} s", report.took.as_secs_f64());
    match &report.result {
        Ok(seen) => println!("| `{}` | {seen} | {time} | ok |", report.name),
        Err(error) => {
            let text = error.to_string();
            let first: String = text
                .lines()
                .next()
                .unwrap_or_default()
                .chars()
                .take(160)
                .collect();
            println!("| `{}` | {first} | {time} | **FAILED** |", report.name);
        }
    }
}
