//! Compares aggregated with disaggregated prefill on the same number of engines. The conversations
//! have long prompts and long answers, as those of agents do, so that prompts arrive while other
//! answers are generated. In the disaggregated layout, half of the engines generate all answers.
//! Time per token and throughput are therefore printed next to the time to first token.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use warmroute_testbed::deployment::{
    BLOCK_SIZE, EngineSpec, LocalDeployment, MODEL, ModelFiles, ProgramCommands,
};
use warmroute_testbed::machine::{self, CpuUsage};
use warmroute_testbed::policy_comparison::describe_change;
use warmroute_testbed::ports::FreePort;
use warmroute_testbed::replay::{self, LatencySummary, RequestSample};
use warmroute_testbed::workload::{ChatWorkload, WorkloadShape};

use super::output::{FAILED_REQUESTS, list_item};
use super::{ComparisonPlan, MeasuredRun, Quickstart, QuickstartArgs};

/// Default number of concurrent conversations.
const CONVERSATIONS: usize = 16;

/// Prefill protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PrefillProtocol {
    /// Envoy mirrors the request to both workers (SGLang)
    Mirror,
    /// warmroute calls the prefill worker first (vLLM)
    Call,
}

impl PrefillProtocol {
    fn name(self) -> &'static str {
        match self {
            PrefillProtocol::Mirror => "mirror",
            PrefillProtocol::Call => "call",
        }
    }

    /// Returns the specification of an engine with a role.
    fn engine_with_role(self, role: &str, id: u64) -> anyhow::Result<EngineSpec> {
        let engine = engine(id);
        Ok(match (self, role) {
            (PrefillProtocol::Call, _) => engine
                .with(&["--kv-connector", "nixl"])
                .with_worker_fields(json!({"role": role})),
            (PrefillProtocol::Mirror, "prefill") => {
                let port = FreePort::find()?.release();
                let args = [
                    "--disaggregation-mode",
                    "prefill",
                    "--bootstrap-port",
                    &port.to_string(),
                ];
                engine
                    .with(&args)
                    .with_worker_fields(json!({"role": role, "bootstrap": {"port": port}}))
            }
            (PrefillProtocol::Mirror, _) => engine
                .with(&["--disaggregation-mode", "decode"])
                .with_worker_fields(json!({"role": role})),
        })
    }
}

/// Returns the specification of an engine with the common arguments: 320,000 tokens of cache, and
/// block transfers as fast as 2 MB over 200 Gbit/s.
fn engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--num-blocks", "20000", "--transfer-us-per-block", "80"])
}

/// Duration of one run including the start of its processes, on an idle machine.
const RUN: Duration = Duration::from_secs(30);

/// Assumptions of the comparison.
const ASSUMPTIONS: &str = "\
Assumptions for each engine: a step takes 4.8 ms, plus 70 µs per prompt token and 150 µs per answer in it, and computes at most
2,048 tokens. The transfer of a block of 16 tokens takes 80 µs, without handshakes. Each client sends its next request after
its previous answer has ended, as in benchmarks. If all answers have the same length, answers that the same prompt delayed
end at the same time, and the next prompts of their clients queue. Separate prefill engines avoid this. With --uneven, the
effect is smaller, and the four aggregated engines are faster.";

/// Layout of the two phases on four engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PhaseLayout {
    Aggregated,
    Disaggregated,
}

/// Results of both layouts.
#[derive(Serialize)]
pub(crate) struct DisaggregationReport {
    #[serde(rename = "by")]
    protocol: &'static str,
    envoy_version: String,
    /// Layouts in the order of their runs.
    order: Vec<&'static str>,
    /// Number of requests of each run.
    requests: usize,
    aggregated: LayoutFigures,
    disaggregated: LayoutFigures,
    /// Number of requests with a remote prefill.
    remote_prefills: usize,
    #[serde(skip)]
    first_error: Option<String>,
    /// Warning that the machine was busy.
    #[serde(skip)]
    overload_warning: Option<String>,
}

/// Client-side figures of all runs of one layout.
#[derive(Serialize)]
struct LayoutFigures {
    requests: usize,
    errors: usize,
    ttft_ms: LatencySummary,
    /// Mean time between two tokens of an answer.
    token_ms: LatencySummary,
    /// Longest time between two tokens of an answer.
    pause_ms: LatencySummary,
    /// Time to the end of an answer.
    answer_ms: LatencySummary,
    /// Duration of each run, from the first request to the last answer.
    took_s: Vec<f64>,
    /// Median time to first token of each run.
    ttft_p50_ms: Vec<f64>,
    answer_tokens_per_s: f64,
    /// Share of all prompt tokens that the engines reported as cached.
    hit_rate: f64,
    requests_per_worker: BTreeMap<String, usize>,
}

/// Returns conversations of four long turns each, which all begin at the same time.
fn workload(args: &QuickstartArgs) -> ChatWorkload {
    let shape = WorkloadShape {
        groups: args.groups.unwrap_or(CONVERSATIONS),
        sessions_per_group: args.sessions,
        turns: 4..=4,
        system_words: 100..=100,
        user_words: 3000..=4000,
        max_tokens: if args.uneven { 400..=1200 } else { 800..=800 },
        think: Duration::ZERO..=Duration::ZERO,
        sessions_per_second: 1e3,
    };
    ChatWorkload::new(args.seed, &shape)
}

/// Returns the description and the duration of the comparison.
pub(crate) fn plan(args: &QuickstartArgs) -> ComparisonPlan {
    let requests = workload(args).requests();
    let runs = layouts(args.rounds).len();
    ComparisonPlan {
        text: format!(
            "This program sends the same {requests} chat requests with long prompts to four engines {runs} times. It\n\
             alternates between aggregated engines, which compute prefill and decode, and two prefill and two decode engines (2 + 2)."
        ),
        duration: RUN * runs as u32,
    }
}

/// Replays the same workload on four engines for both phases and on two engines per phase. The order
/// alternates, and the last run is always the disaggregated one. Prints the report and returns
/// the running deployment of the last run.
pub(crate) async fn compare(
    protocol: PrefillProtocol,
    quickstart: &Quickstart<'_>,
) -> anyhow::Result<LocalDeployment> {
    let workload = workload(quickstart.args);
    let mut aggregated = Vec::new();
    let mut disaggregated = Vec::new();
    let mut order = Vec::new();
    let mut last = None;
    let layouts = layouts(quickstart.args.rounds);
    for (run, layout) in (1..).zip(&layouts) {
        // The engines of the previous run must end before the next ones start.
        drop(last.take());
        let name = layout.name();
        let dir = quickstart.dir.join(format!("{run}-{name}"));
        let runs = layouts.len();
        quickstart.progress.print_step(&format!(
            "run {run} of {runs}, {name}: starting 4 engines, warmroute and Envoy"
        ));
        let deployment = layout.start(protocol, &quickstart.programs, &dir).await?;
        quickstart.progress.print_step(&format!("{name}: warm-up"));
        quickstart.warm_up(&deployment).await?;
        let run = quickstart.measure(&deployment, &workload, name).await;
        match layout {
            PhaseLayout::Aggregated => aggregated.push(run),
            PhaseLayout::Disaggregated => disaggregated.push(run),
        }
        order.push(name);
        last = Some(deployment);
    }
    let runs = || aggregated.iter().chain(&disaggregated);
    let samples = || runs().flat_map(|run| &run.samples);
    let usage: Vec<CpuUsage> = runs().map(|run| run.cpu).collect();
    let report = DisaggregationReport {
        protocol: protocol.name(),
        envoy_version: quickstart.envoy_version.clone(),
        order,
        requests: workload.requests(),
        first_error: samples().find_map(|sample| sample.error.clone()),
        remote_prefills: samples()
            .filter(|sample| sample.prefilled_by.is_some())
            .count(),
        aggregated: LayoutFigures::new(&aggregated),
        disaggregated: LayoutFigures::new(&disaggregated),
        overload_warning: machine::overload_warning(&usage),
    };
    quickstart.output.write(&report, &report.render()?)?;
    if let Some(flaw) = report.flaw() {
        anyhow::bail!(flaw);
    }
    last.ok_or_else(|| anyhow::anyhow!("there was no round"))
}

/// Returns the layouts of all runs. Each round has every layout once, and the order is reversed
/// from round to round.
fn layouts(rounds: u8) -> Vec<PhaseLayout> {
    let round = |remaining: usize| match remaining % 2 {
        0 => [PhaseLayout::Aggregated, PhaseLayout::Disaggregated],
        _ => [PhaseLayout::Disaggregated, PhaseLayout::Aggregated],
    };
    (0..usize::from(rounds)).rev().flat_map(round).collect()
}

impl PhaseLayout {
    fn name(self) -> &'static str {
        match self {
            PhaseLayout::Aggregated => "aggregated",
            PhaseLayout::Disaggregated => "2 + 2",
        }
    }

    async fn start(
        self,
        protocol: PrefillProtocol,
        programs: &ProgramCommands,
        dir: &Path,
    ) -> anyhow::Result<LocalDeployment> {
        if self == PhaseLayout::Aggregated {
            let engines: Vec<EngineSpec> = (1..=4).map(engine).collect();
            return LocalDeployment::start(programs, &engines, dir, &json!({})).await;
        }
        let roles = [("prefill", 1), ("prefill", 2), ("decode", 3), ("decode", 4)];
        let engines = roles
            .into_iter()
            .map(|(role, id)| protocol.engine_with_role(role, id))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let mut deployment = LocalDeployment::start_engines(programs, &engines, dir).await?;
        deployment.write_workers()?;
        deployment
            .start_router(&configuration(protocol, programs.model))
            .await?;
        let envoy = deployment
            .envoy_setup()
            .shipped_config(&format!("disaggregated-{}", protocol.name()), &[])?;
        deployment.start_envoy(&envoy).await?;
        Ok(deployment)
    }
}

fn configuration(protocol: PrefillProtocol, model: ModelFiles) -> Value {
    json!({
        "gateway": {"response_headers": {"worker": true}},
        "models": [
            {
                "name": MODEL,
                "tokenizer": model.path("tokenizer.json.gz"),
                "tokenizer_config": model.path("tokenizer_config.json"),
                "block_size": BLOCK_SIZE,
                "prefill": {"mode": protocol.name()},
            },
        ],
    })
}

impl LayoutFigures {
    fn new(runs: &[MeasuredRun]) -> Self {
        let samples: Vec<RequestSample> = runs
            .iter()
            .flat_map(|run| run.samples.iter().cloned())
            .collect();
        let good = || samples.iter().filter(|sample| sample.error.is_none());
        let ms = |figure: fn(&RequestSample) -> Option<f64>| {
            LatencySummary::of(good().filter_map(figure).map(|s| s * 1e3).collect())
        };
        let took_s: Vec<f64> = runs.iter().map(|run| run.duration.as_secs_f64()).collect();
        let tokens: u64 = good().map(|sample| sample.completion_tokens).sum();
        let summary = replay::summarize(&samples);
        Self {
            requests: samples.len(),
            errors: samples.len() - good().count(),
            token_ms: summary.token_ms,
            pause_ms: ms(|sample| Some(sample.longest_pause.as_secs_f64())),
            answer_ms: ms(|sample| Some(sample.duration.as_secs_f64())),
            ttft_p50_ms: runs
                .iter()
                .map(|run| replay::summarize(&run.samples).ttft_ms.p50)
                .collect(),
            answer_tokens_per_s: tokens as f64 / took_s.iter().sum::<f64>(),
            took_s,
            ttft_ms: summary.ttft_ms,
            hit_rate: summary.hit_rate,
            requests_per_worker: summary.requests_per_worker,
        }
    }
}

impl DisaggregationReport {
    /// Returns the reason why the result is not meaningful, if there is one.
    pub(crate) fn flaw(&self) -> Option<String> {
        let errors = self.aggregated.errors + self.disaggregated.errors;
        if let Some(first) = &self.first_error {
            return Some(format!("failed requests: {errors}; first error: {first}"));
        }
        let remote = self.remote_prefills;
        let all = self.disaggregated.requests;
        (remote != all).then(|| format!("only {remote} of {all} prefills were remote"))
    }

    /// Renders the table, the assumptions and the findings.
    fn render(&self) -> anyhow::Result<String> {
        let left = &self.aggregated;
        let right = &self.disaggregated;
        let mut text = format!(
            "\nEnvoy {}, {} requests in each run; runs: {}\n{} prefills by another worker ({})\n\n{:<28}{:>18}{:>18}\n",
            self.envoy_version,
            self.requests,
            self.order.join(", "),
            self.remote_prefills,
            self.protocol,
            "",
            "4 aggregated",
            "2 + 2"
        );
        for [name, left, right] in rows(left, right) {
            writeln!(text, "{name:<28}{left:>18}{right:>18}")?;
        }
        writeln!(text, "\n{ASSUMPTIONS}\n\nFindings:")?;
        let compared = |name: &str, of: fn(&LayoutFigures) -> &LatencySummary| {
            format!(
                "With separate prefill engines, the median {name} is {}, and the 95th percentile is {}.",
                describe_change(of(left).p50, of(right).p50),
                describe_change(of(left).p95, of(right).p95)
            )
        };
        let figures = [
            compared("time to first token", |layout| &layout.ttft_ms),
            compared("time per further token", |layout| &layout.token_ms),
            compared("time to the last token", |layout| &layout.answer_ms),
        ];
        let findings = match self.first_error {
            None => figures.to_vec(),
            Some(_) => vec![FAILED_REQUESTS.to_owned()],
        };
        for finding in self.overload_warning.iter().chain(&findings) {
            text += &list_item(finding);
        }
        writeln!(
            text,
            "\nNext: docs/prefill-decode.md describes prefill and decode on different workers."
        )?;
        Ok(text)
    }
}

fn rows(left: &LayoutFigures, right: &LayoutFigures) -> Vec<[String; 3]> {
    let row = |name: &str, cell: &dyn Fn(&LayoutFigures) -> String| {
        [name.to_owned(), cell(left), cell(right)]
    };
    let mut rows = Vec::new();
    for (name, of, digits) in [
        (
            "time to first token",
            (|seen| &seen.ttft_ms) as fn(&LayoutFigures) -> &LatencySummary,
            0,
        ),
        ("time per further token", |seen| &seen.token_ms, 1),
        ("longest pause in an answer", |seen| &seen.pause_ms, 0),
        ("time to the last token", |seen| &seen.answer_ms, 0),
    ] {
        for (share, at) in [
            ("p50", (|of| of.p50) as fn(&LatencySummary) -> f64),
            ("p95", |of| of.p95),
            ("p99", |of| of.p99),
        ] {
            let name = if share == "p50" {
                format!("{name} p50")
            } else {
                format!("{:1$}{share}", "", name.len() + 1)
            };
            rows.push(row(&name, &|seen| format!("{:.digits$} ms", at(of(seen)))));
        }
    }
    let each = |values: &[f64], unit: &str, digits: usize| {
        let values: Vec<String> = values
            .iter()
            .map(|value| format!("{value:.digits$}"))
            .collect();
        format!("{} {unit}", values.join(" / "))
    };
    rows.push(row("first token p50, each run", &|seen| {
        each(&seen.ttft_p50_ms, "ms", 0)
    }));
    rows.push(row("duration of each run", &|seen| {
        each(&seen.took_s, "s", 1)
    }));
    rows.push(row("tokens per second", &|seen| {
        format!("{:.0}", seen.answer_tokens_per_s)
    }));
    rows.push(row("prefix hit rate", &|seen| {
        format!("{:.1} %", seen.hit_rate * 100.0)
    }));
    let balance = |seen: &LayoutFigures| {
        let counts: Vec<String> = seen
            .requests_per_worker
            .values()
            .map(ToString::to_string)
            .collect();
        counts.join("/")
    };
    rows.push(row("answers per worker", &balance));
    rows.push(row("errors", &|seen| seen.errors.to_string()));
    rows
}
