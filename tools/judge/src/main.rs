//! Judges routing policies of `warmroute-core` on simulated engines in virtual time. The decisions
//! are those of the real router. Seeds make the results repeatable.
//!
//! `cargo run --release -p judge -- --trace FILE [--policies linear,linear_tuned] [--seeds N]
//! [--json FILE] [--cases SUBSTRING] [--half first|second|all] [--subject POLICY]`

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

mod cases;
mod gpu_timing;
mod metrics;
mod policies;
mod report;
mod router_driver;
mod simulated_engine;
mod simulated_request;
mod simulation;
mod traces;
mod virtual_clock;
mod worker_faults;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;

use cases::{JudgeCase, TraceCases, cases_for};
use metrics::RunMetrics;
use report::{ResultRow, case_table, summary_table};
use simulation::FleetSimulation;
use traces::{RecordedTrace, TraceHalf};

/// Compares routing policies on simulated engines.
#[derive(Parser)]
struct JudgeArgs {
    /// Trace in Mooncake's format or of coding agents, plain or compressed with gzip
    #[arg(long)]
    trace: PathBuf,
    /// Policies to compare. `POLICY+RULE` also allows local prefills by a rule of
    /// `routing.disaggregation.conditional`, for example `seconds+learned`. `POLICY+no_ejection`
    /// ignores the outcomes of requests
    #[arg(long, value_delimiter = ',', default_values_t = policies::policy_names())]
    policies: Vec<String>,
    /// Number of seeds
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// File for the results of each case, policy and seed
    #[arg(long)]
    json: Option<PathBuf>,
    /// Runs only cases whose names contain one of these texts; `pd-` selects the fleets with
    /// prefill and decode workers, and aggregated fleets of the same size; `fault-` selects the
    /// fleets with a faulty worker
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Part of the trace; by default the second half of requests, or all sessions
    #[arg(long)]
    half: Option<TraceHalf>,
    /// Policy that the summary compares with the others
    #[arg(long, default_value = "seconds")]
    subject: String,
}

impl JudgeArgs {
    /// Returns the selected cases.
    fn select_cases(&self, cases: Vec<JudgeCase>) -> Result<Vec<JudgeCase>> {
        let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
        let names = names.join(", ");
        let is_selected = |case: &JudgeCase| case.is_selected(&self.cases);
        let selected: Vec<JudgeCase> = cases.into_iter().filter(is_selected).collect();
        if selected.is_empty() {
            bail!("no case of this trace matches; cases: {names}");
        }
        Ok(selected)
    }
}

/// Inputs of all simulations.
struct JudgeInputs {
    policies: Vec<String>,
    trace: RecordedTrace,
    half: TraceHalf,
}

impl JudgeInputs {
    /// Simulates all policies with the same requests.
    fn run(&self, case: &JudgeCase, seed: u64) -> Result<Vec<ResultRow>> {
        let workload = case.workload(&self.trace, self.half, seed);
        let workload = workload.context("the case needs another trace format")?;
        let rows = self.policies.iter().map(|policy| {
            let settings = policies::router_settings(policy)?;
            let mut simulation = FleetSimulation::new(case, &workload, settings, seed)?;
            simulation.run()?;
            Ok(ResultRow {
                case: case.name.into(),
                policy: policy.clone(),
                seed,
                metrics: RunMetrics::new(case, &simulation.into_result()),
            })
        });
        rows.collect()
    }
}

fn main() -> Result<()> {
    let args = JudgeArgs::parse();
    for policy in &args.policies {
        policies::router_settings(policy)?;
    }
    let trace = RecordedTrace::load(&args.trace)?;
    let TraceCases { cases, half } = cases_for(&trace);
    let cases = args.select_cases(cases)?;
    let inputs = JudgeInputs {
        policies: args.policies,
        trace,
        half: args.half.unwrap_or(half),
    };
    let mut rows = Vec::new();
    for case in cases {
        for seed in 1..=args.seeds {
            rows.extend(inputs.run(&case, seed)?);
        }
        print!("{}", case_table(&rows, case.name));
        // Written after each case, so that an interrupted run leaves results.
        if let Some(json) = &args.json {
            fs::write(json, serde_json::to_string_pretty(&rows)?)
                .with_context(|| json.display().to_string())?;
        }
    }
    print!("{}", summary_table(&rows, &args.subject));
    Ok(())
}
