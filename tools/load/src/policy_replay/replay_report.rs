//! Figures of the runs, and the table of their medians.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::time::Duration;

use serde::Serialize;
use warmroute_testbed::comparison::median;
use warmroute_testbed::replay::{self, RequestSample};

use super::replay_fault::FaultReport;

/// Figures of one run, as measured by the client.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyRun {
    /// Name of the policy.
    pub policy: String,
    /// Number of the round, from 1.
    pub round: usize,
    /// Number of requests.
    pub requests: usize,
    /// Number of failed requests.
    pub errors: usize,
    /// The first error.
    pub first_error: Option<String>,
    /// Mean time to first token.
    pub ttft_mean_ms: f64,
    /// Median time to first token.
    pub ttft_p50_ms: f64,
    /// 99th percentile of the time to first token.
    pub ttft_p99_ms: f64,
    /// Mean time to the end of the answer.
    pub e2e_mean_ms: f64,
    /// 99th percentile of the time to the end of the answer.
    pub e2e_p99_ms: f64,
    /// Share of all prompt tokens that the engines reported as cached.
    pub cached_share: f64,
    /// Mean number of prompt tokens.
    pub prompt_tokens_mean: f64,
    /// Time from the first request to the last answer.
    pub duration_s: f64,
    /// Number of answers by engine.
    pub requests_per_engine: BTreeMap<String, usize>,
    /// Runnable processes of the machine over the last minute, at the end of the run.
    pub load_average: f64,
    /// Effect of the fault during the run.
    pub fault: Option<FaultReport>,
}

impl PolicyRun {
    pub(super) fn new(
        policy: String,
        round: usize,
        samples: &[RequestSample],
        duration: Duration,
        fault: Option<FaultReport>,
    ) -> Self {
        let summary = replay::summarize(samples);
        let errors = || samples.iter().filter_map(|sample| sample.error.as_ref());
        let prompt_tokens: u64 = samples.iter().map(|sample| sample.prompt_tokens).sum();
        Self {
            policy,
            round,
            requests: samples.len(),
            errors: errors().count(),
            first_error: errors().next().cloned(),
            ttft_mean_ms: summary.ttft_ms.mean,
            ttft_p50_ms: summary.ttft_ms.p50,
            ttft_p99_ms: summary.ttft_ms.p99,
            e2e_mean_ms: summary.e2e_ms.mean,
            e2e_p99_ms: summary.e2e_ms.p99,
            cached_share: summary.hit_rate,
            prompt_tokens_mean: prompt_tokens as f64 / samples.len().max(1) as f64,
            duration_s: duration.as_secs_f64(),
            requests_per_engine: summary.requests_per_worker,
            load_average: load_average(),
            fault,
        }
    }

    fn figures(&self) -> [f64; 7] {
        [
            self.ttft_mean_ms,
            self.ttft_p50_ms,
            self.ttft_p99_ms,
            self.e2e_mean_ms,
            self.e2e_p99_ms,
            self.cached_share * 100.0,
            self.duration_s,
        ]
    }
}

/// Returns the load average of the machine over one minute; 0 if it is unknown.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().and_then(|first| first.parse().ok());
    first.unwrap_or(0.0)
}

/// Prints one line for a run.
pub fn print_run(run: &PolicyRun) -> io::Result<()> {
    let round = run.round.to_string();
    print_row(
        [&run.policy, &round],
        run.requests,
        run.errors,
        run.figures(),
    )
}

/// Prints the header of the runs.
pub fn print_header() -> io::Result<()> {
    writeln!(
        io::stdout().lock(),
        "{:<24}{:>7}{:>10}{:>8}{:>11}{:>10}{:>10}{:>10}{:>10}{:>9}{:>9}",
        "policy",
        "round",
        "requests",
        "errors",
        "TTFT mean",
        "p50",
        "p99 ms",
        "e2e mean",
        "p99 ms",
        "cached",
        "seconds"
    )
}

fn print_row(
    [policy, round]: [&str; 2],
    requests: usize,
    errors: usize,
    figures: [f64; 7],
) -> io::Result<()> {
    let [ttft, ttft_p50, ttft_p99, e2e, e2e_p99, cached, seconds] = figures;
    writeln!(
        io::stdout().lock(),
        "{policy:<24}{round:>7}{requests:>10}{errors:>8}{ttft:>11.0}{ttft_p50:>10.0}{ttft_p99:>10.0}{e2e:>10.0}{e2e_p99:>10.0}{cached:>7.1} %{seconds:>9.1}"
    )
}

/// Prints one line per policy: the medians of the figures over all rounds, and the totals of
/// requests and errors.
pub fn print_medians(runs: &[PolicyRun]) -> io::Result<()> {
    let mut policies: Vec<&str> = Vec::new();
    for run in runs {
        if !policies.contains(&run.policy.as_str()) {
            policies.push(&run.policy);
        }
    }
    for policy in policies {
        let runs: Vec<&PolicyRun> = runs.iter().filter(|run| run.policy == policy).collect();
        let figure = |number: usize| {
            let values: Vec<f64> = runs.iter().map(|run| run.figures()[number]).collect();
            median(&values)
        };
        print_row(
            [policy, "median"],
            runs.iter().map(|run| run.requests).sum(),
            runs.iter().map(|run| run.errors).sum(),
            std::array::from_fn(figure),
        )?;
    }
    Ok(())
}

/// Prints the effect of the fault during a run as JSON.
pub fn print_fault(fault: &FaultReport) -> io::Result<()> {
    writeln!(io::stdout().lock(), "  {}", serde_json::to_string(fault)?)
}
