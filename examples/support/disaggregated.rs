//! Prefill and decode on the same engines against the two apart, on conversations with long prompts and long answers, as
//! agents have them: prompts arrive while other answers are generated. Nothing is free: half of the engines generate all
//! answers, so what is paid for an earlier first token is printed beside it.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::support::ports::FreePort;
use super::support::replay::{self, Percentiles, Sample};
use super::support::stack::{BLOCK_SIZE, EngineSpec, MODEL, Programs, Stack, model_file};
use super::support::workload::{Shape, Workload};
use super::{Cli, Progress};

/// Conversations that go on at once, unless others are asked for.
const CONVERSATIONS: usize = 16;

/// How prefills are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum By {
    /// Envoy sends both workers the request (SGLang)
    Mirror,
    /// warmroute asks the prefill worker first (vLLM)
    Call,
}

impl By {
    fn name(self) -> &'static str {
        match self {
            By::Mirror => "mirror",
            By::Call => "call",
        }
    }

    /// What an engine of a role is started with, and how it is listed.
    fn engine(self, role: &str, id: u64) -> anyhow::Result<EngineSpec> {
        let engine = engine(id);
        Ok(match (self, role) {
            (By::Call, _) => engine
                .with(&["--kv-connector", "nixl"])
                .listed(json!({"role": role})),
            (By::Mirror, "prefill") => {
                let port = FreePort::find()?.release();
                let meets = [
                    "--disaggregation-mode",
                    "prefill",
                    "--bootstrap-port",
                    &port.to_string(),
                ];
                engine
                    .with(&meets)
                    .listed(json!({"role": role, "bootstrap": {"port": port}}))
            }
            (By::Mirror, _) => engine
                .with(&["--disaggregation-mode", "decode"])
                .listed(json!({"role": role})),
        })
    }
}

/// The same for all: 320,000 tokens of cache; a transfer of a block takes what 2 MB take over 200 Gbit/s.
fn engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--num-blocks", "20000", "--transfer-us-per-block", "80"])
}

/// What stands and falls with the engines being simulated and the workload being this one.
const ASSUMED: &str = "\
Assumed of each engine: 4.8 ms a step, 70 us for each prompt token and 150 us for each answer in it; 2,048 tokens a step;
80 us for each block of 16 tokens that is handed over, no handshakes. Every client asks again when it has its answer, as
in benchmarks. Where answers are equally long, those that a prompt holds up end together and are followed by prompts that
wait for one another: what two and two avoid. With --uneven there is less of that, and four engines for prompts beat two.";

/// Who does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Aggregated,
    Disaggregated,
}

/// Both ways.
#[derive(Serialize)]
pub(crate) struct Compared {
    by: &'static str,
    envoy_version: String,
    /// In the order in which they ran.
    order: Vec<&'static str>,
    /// In each run.
    requests: usize,
    aggregated: Seen,
    disaggregated: Seen,
    /// Requests whose prefill was another worker's.
    remote_prefills: usize,
    #[serde(skip)]
    first_error: Option<String>,
}

/// What the clients saw in all runs of one way.
#[derive(Serialize)]
struct Seen {
    requests: usize,
    errors: usize,
    ttft_ms: Percentiles,
    /// Between two tokens of an answer, on its average.
    token_ms: Percentiles,
    /// The longest time between two tokens of an answer.
    pause_ms: Percentiles,
    /// Until the end of an answer.
    answer_ms: Percentiles,
    /// Of each run: from its first request to its last answer.
    took_s: Vec<f64>,
    /// Of each run.
    ttft_p50_ms: Vec<f64>,
    answer_tokens_per_s: f64,
    /// Share of all prompt tokens that the engines said they had cached.
    hit_rate: f64,
    requests_per_worker: BTreeMap<String, usize>,
}

/// One replay of the workload.
struct Run {
    samples: Vec<Sample>,
    took: Duration,
}

/// Conversations of four long turns each, all of which begin at once.
fn workload(cli: &Cli) -> Workload {
    let shape = Shape {
        groups: cli.groups.unwrap_or(CONVERSATIONS),
        sessions_per_group: cli.sessions,
        turns: 4..=4,
        system_words: 100..=100,
        user_words: 3000..=4000,
        max_tokens: if cli.uneven { 400..=1200 } else { 800..=800 },
        think: Duration::ZERO..=Duration::ZERO,
        sessions_per_second: 1e3,
    };
    Workload::new(cli.seed, &shape)
}

/// Replays the same workload against four engines that do both phases, and against two and two, in turn: each run with
/// engines that start cold, and neither way always first. What ran last, which is always the two and two, is left running.
pub(crate) async fn compare(
    by: By,
    cli: &Cli,
    (programs, envoy_version): (&Programs, String),
    dir: &Path,
    bar: &Progress,
) -> anyhow::Result<(Compared, Stack)> {
    let workload = workload(cli);
    let (mut aggregated, mut disaggregated, mut order) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = None;
    for (at, way) in ways(cli.rounds).into_iter().enumerate() {
        // The engines of the run before have ended when the next ones start.
        drop(last.take());
        let dir = dir.join(format!("{at}-{}", way.name()));
        bar.say("starting 4 engines, warmroute and Envoy");
        let stack = way.start(by, programs, &dir).await?;
        let began = Instant::now();
        let samples = super::replay(&stack, &workload, bar, way.name()).await;
        let run = Run {
            samples,
            took: began.elapsed(),
        };
        match way {
            Way::Aggregated => aggregated.push(run),
            Way::Disaggregated => disaggregated.push(run),
        }
        order.push(way.name());
        last = Some(stack);
    }
    bar.say("done");
    let samples = || {
        aggregated
            .iter()
            .chain(&disaggregated)
            .flat_map(|run| &run.samples)
    };
    let compared = Compared {
        by: by.name(),
        envoy_version,
        order,
        requests: workload
            .sessions
            .iter()
            .map(|session| session.turns.len())
            .sum(),
        first_error: samples().find_map(|sample| sample.error.clone()),
        remote_prefills: samples()
            .filter(|sample| sample.prefilled_by.is_some())
            .count(),
        aggregated: Seen::of(&aggregated),
        disaggregated: Seen::of(&disaggregated),
    };
    let stack = last.ok_or_else(|| anyhow::anyhow!("there was no round"))?;
    Ok((compared, stack))
}

/// The runs of so many rounds: each way once in each, the order turned around from round to round.
fn ways(rounds: u8) -> Vec<Way> {
    let round = |left: usize| match left % 2 {
        0 => [Way::Aggregated, Way::Disaggregated],
        _ => [Way::Disaggregated, Way::Aggregated],
    };
    (0..usize::from(rounds)).rev().flat_map(round).collect()
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Aggregated => "aggregated",
            Way::Disaggregated => "2 + 2",
        }
    }

    async fn start(self, by: By, programs: &Programs, dir: &Path) -> anyhow::Result<Stack> {
        if self == Way::Aggregated {
            let engines: Vec<EngineSpec> = (1..=4).map(engine).collect();
            return Stack::start(programs, &engines, dir, &json!({})).await;
        }
        let roles = [("prefill", 1), ("prefill", 2), ("decode", 3), ("decode", 4)];
        let engines = roles
            .into_iter()
            .map(|(role, id)| by.engine(role, id))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let mut stack = Stack::engines(programs, &engines, dir).await?;
        stack.write_workers()?;
        stack.start_router(&configuration(by)).await?;
        let envoy = stack
            .standalone()
            .config_of(&format!("disaggregated-{}", by.name()), &[])?;
        stack.start_envoy(&envoy).await?;
        Ok(stack)
    }
}

fn configuration(by: By) -> Value {
    json!({
        "response": {"worker_header": true},
        "models": [{
            "name": MODEL,
            "tokenizer": model_file("tokenizer.json.gz"),
            "tokenizer_config": model_file("tokenizer_config.json"),
            "block_size": BLOCK_SIZE,
            "prefill": {"by": by.name()},
        }],
    })
}

impl Seen {
    fn of(runs: &[Run]) -> Self {
        let samples: Vec<Sample> = runs
            .iter()
            .flat_map(|run| run.samples.iter().cloned())
            .collect();
        let good = || samples.iter().filter(|sample| sample.error.is_none());
        let ms = |of: fn(&Sample) -> Option<f64>| {
            Percentiles::of(good().filter_map(of).map(|s| s * 1e3).collect())
        };
        let took: Vec<f64> = runs.iter().map(|run| run.took.as_secs_f64()).collect();
        let tokens: u64 = good().map(|sample| sample.completion_tokens).sum();
        let figures = replay::figures(&samples);
        Self {
            requests: samples.len(),
            errors: samples.len() - good().count(),
            token_ms: ms(|sample| {
                let gaps = sample
                    .completion_tokens
                    .checked_sub(1)
                    .filter(|gaps| *gaps > 0)?;
                Some((sample.took - sample.ttft).as_secs_f64() / gaps as f64)
            }),
            pause_ms: ms(|sample| Some(sample.longest_pause.as_secs_f64())),
            answer_ms: ms(|sample| Some(sample.took.as_secs_f64())),
            ttft_p50_ms: runs
                .iter()
                .map(|run| replay::figures(&run.samples).ttft_ms.p50)
                .collect(),
            answer_tokens_per_s: tokens as f64 / took.iter().sum::<f64>(),
            took_s: took,
            ttft_ms: figures.ttft_ms,
            hit_rate: figures.hit_rate,
            requests_per_worker: figures.requests_per_worker,
        }
    }
}

impl Compared {
    /// Why it is not worth much.
    pub(crate) fn flaw(&self) -> Option<String> {
        let errors = self.aggregated.errors + self.disaggregated.errors;
        if let Some(first) = &self.first_error {
            return Some(format!("{errors} requests failed, the first with: {first}"));
        }
        let (remote, all) = (self.remote_prefills, self.disaggregated.requests);
        (remote != all).then(|| format!("only {remote} of {all} prefills were another worker's"))
    }

    /// Prints it.
    pub(crate) fn show(&self, as_json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if as_json {
            return writeln!(out, "{}", serde_json::to_string(self)?);
        }
        let (left, right) = (&self.aggregated, &self.disaggregated);
        let Self {
            by,
            envoy_version,
            requests,
            remote_prefills,
            ..
        } = self;
        let order = self.order.join(", ");
        writeln!(
            out,
            "Envoy {envoy_version}, {requests} requests in each run; runs: {order}"
        )?;
        writeln!(out, "{remote_prefills} prefills by another worker ({by})\n")?;
        writeln!(out, "{:<28}{:>18}{:>18}", "", "4 aggregated", "2 + 2")?;
        for [name, left, right] in rows(left, right) {
            writeln!(out, "{name:<28}{left:>18}{right:>18}")?;
        }
        writeln!(out, "\n{ASSUMED}")
    }
}

fn rows(left: &Seen, right: &Seen) -> Vec<[String; 3]> {
    let row = |name: &str, of: &dyn Fn(&Seen) -> String| [name.to_owned(), of(left), of(right)];
    let mut rows = Vec::new();
    for (name, of, digits) in [
        (
            "time to first token",
            (|seen| &seen.ttft_ms) as fn(&Seen) -> &Percentiles,
            0,
        ),
        ("time per further token", |seen| &seen.token_ms, 1),
        ("longest pause in an answer", |seen| &seen.pause_ms, 0),
        ("time to the last token", |seen| &seen.answer_ms, 0),
    ] {
        for (share, at) in [
            ("p50", (|of| of.p50) as fn(&Percentiles) -> f64),
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
    let balance = |seen: &Seen| {
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
