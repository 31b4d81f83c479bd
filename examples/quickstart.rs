//! The main job in one command: four simulated engines, a real Envoy, and a multi-turn chat workload with real tokens;
//! first balanced by Envoy's round robin alone, then routed by warmroute. Prints what a user would notice.
//!
//! The engines and warmroute run as processes of their own: this program starts itself again under another first
//! argument, so that nothing but Cargo, Python and what Cargo builds is needed.

#[path = "support/disaggregated.rs"]
mod disaggregated;
#[path = "engine_sim/engine.rs"]
mod engine;
#[path = "support/mod.rs"]
mod support;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use support::envoy;
use support::replay::{self, Figures, Prediction, Sample};
use support::signals::run_until_signal;
use support::stack::{EngineSpec, MODEL, Programs, Stack};
use support::workload::{Shape, Workload};
use warmroute::audit::Totals;

/// The allocator of the warmroute binary, so that the measured memory is that of a deployment.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Instance ids of the engines; the last one shows that an id may be any u64.
const ENGINES: [u64; 4] = [1, 2, 3, u64::MAX];

/// KV blocks of each engine: about 32,000 tokens, some ten conversations.
const ENGINE_BLOCKS: usize = 2_000;

/// Compares Envoy's round robin with warmroute on one workload.
#[derive(Debug, Parser)]
struct Cli {
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Leave everything running afterwards and print a request to try; Ctrl-C ends it
    #[arg(long)]
    keep: bool,
    /// Groups of users; each shares a system prompt [default: 60, or 16 with --disaggregated]
    #[arg(long)]
    groups: Option<usize>,
    /// Conversations in each group
    #[arg(long, default_value_t = 1)]
    sessions: usize,
    /// Seed of the workload
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Compare four engines that do both phases with two for prefills and two for decodes, on long prompts
    #[arg(long, value_enum)]
    disaggregated: Option<disaggregated::By>,
    /// How often each of the two ways of --disaggregated runs; which is first alternates
    #[arg(long, default_value_t = 2, requires = "disaggregated", value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Answers of 400 to 1,200 tokens for --disaggregated instead of 800 each
    #[arg(long, requires = "disaggregated")]
    uneven: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    envoy_version: String,
    /// In each of the two runs.
    requests: usize,
    /// In both runs.
    errors: usize,
    round_robin: Figures,
    warmroute: Figures,
    /// As the clients saw it.
    prediction: Prediction,
    /// As warmroute sees it, with causes.
    audit: Totals,
}

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let (own, first) = (args.next(), args.next());
    let rest = own.into_iter().chain(args);
    match first.as_ref().and_then(|first| first.to_str()) {
        Some(AS_ENGINE) => end(be_engine(rest)),
        Some(AS_WARMROUTE) => end(be_warmroute(rest)),
        _ => end(quickstart(&Cli::parse())),
    }
}

const AS_ENGINE: &str = "as-engine";
const AS_WARMROUTE: &str = "as-warmroute";

#[expect(
    clippy::print_stderr,
    reason = "a program tells on standard error why it failed"
)]
fn end(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("quickstart: {error:#}");
        ExitCode::FAILURE
    })
}

#[derive(Debug, Parser)]
struct EngineCli {
    #[command(flatten)]
    engine: engine::EngineConfig,
    #[arg(long)]
    listen: SocketAddr,
}

#[tokio::main]
async fn be_engine(args: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let cli = EngineCli::parse_from(args);
    let listener = tokio::net::TcpListener::bind(cli.listen).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        ended = engine::run(cli.engine, listener) => ended?,
        _ = terminate.recv() => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn be_warmroute(args: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    Ok(warmroute::cmd::main(warmroute::cli::Cli::parse_from(args)))
}

fn quickstart(cli: &Cli) -> anyhow::Result<ExitCode> {
    match run_until_signal(run(cli)) {
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::from(141)),
        result => result,
    }
}

/// Whether nobody reads standard output any longer, as after `| head -1`: not worth a message.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

async fn run(cli: &Cli) -> anyhow::Result<()> {
    let bar = Progress::new(cli.json);
    bar.say("looking for Envoy");
    let binary = tokio::task::spawn_blocking(envoy::binary).await??;
    let envoy_version = envoy::version(&binary)?;
    let dir = tempfile::Builder::new().prefix("warmroute-").tempdir()?;
    let own = std::env::current_exe()?.into_os_string();
    let programs = Programs {
        warmroute: vec![own.clone(), AS_WARMROUTE.into()],
        engine: vec![own, AS_ENGINE.into()],
    };
    if let Some(by) = cli.disaggregated {
        let compared =
            disaggregated::compare(by, cli, (&programs, envoy_version), dir.path(), &bar).await;
        let (compared, stack) = match compared {
            Ok(compared) => compared,
            Err(error) => anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display()),
        };
        compared.show(cli.json)?;
        if let Some(flaw) = compared.flaw() {
            anyhow::bail!("{flaw}\nThe logs are in {}", dir.keep().display());
        }
        return stay(cli, &stack).await;
    }
    let result = compare(cli, &programs, dir.path(), &bar).await;
    let (round_robin, routed, audit, stack) = match result {
        Ok(result) => result,
        Err(error) => anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display()),
    };
    let report = Report {
        envoy_version,
        requests: routed.len(),
        errors: round_robin
            .iter()
            .chain(&routed)
            .filter(|sample| sample.error.is_some())
            .count(),
        round_robin: replay::figures(&round_robin),
        warmroute: replay::figures(&routed),
        prediction: replay::prediction(&routed),
        audit,
    };
    show(cli, &report)?;
    if let Some(error) = round_robin
        .iter()
        .chain(&routed)
        .find_map(|sample| sample.error.as_ref())
    {
        anyhow::bail!("{} requests failed, the first with: {error}", report.errors);
    }
    stay(cli, &stack).await
}

/// Leaves everything running where that is wanted.
async fn stay(cli: &Cli, stack: &Stack) -> anyhow::Result<()> {
    if cli.keep {
        keep(cli, stack)?;
        std::future::pending::<()>().await;
    }
    Ok(())
}

/// Both runs, each with engines that start cold.
async fn compare(
    cli: &Cli,
    programs: &Programs,
    dir: &Path,
    bar: &Progress,
) -> anyhow::Result<(Vec<Sample>, Vec<Sample>, Totals, Stack)> {
    let workload = Workload::new(cli.seed, &shape(cli));
    let blocks = ENGINE_BLOCKS.to_string();
    let spec = |id| EngineSpec::new(id).with(&["--num-blocks", &blocks]);
    let specs: Vec<EngineSpec> = ENGINES.into_iter().map(spec).collect();

    bar.say("starting 4 engines and Envoy");
    let mut stack = Stack::engines(programs, &specs, &dir.join("round_robin")).await?;
    let addresses: Vec<SocketAddr> = stack.engines.iter().map(|engine| engine.address).collect();
    envoy::write_endpoints(&stack.standalone().endpoint_file(), &addresses)?;
    let config = envoy::round_robin(&stack.standalone().config()?)?;
    stack.start_envoy(&config).await?;
    let round_robin = replay(&stack, &workload, bar, "round robin").await;
    drop(stack);

    bar.say("starting 4 engines, warmroute and Envoy");
    let more = json!({"response": {"prediction_header": true}, "observe": "usage"});
    let stack = Stack::start(programs, &specs, &dir.join("warmroute"), &more).await?;
    let routed = replay(&stack, &workload, bar, "warmroute").await;
    bar.say("looking for causes");
    let audit = audit(&stack, routed.len() as u64).await?;
    bar.say("done");
    Ok((round_robin, routed, audit, stack))
}

/// What warmroute says of its own foresight, once it has looked into every answer.
async fn audit(stack: &Stack, answers: u64) -> anyhow::Result<Totals> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let totals: Totals = serde_json::from_value(stack.debug("audit").await?)?;
        let heard: u64 = totals
            .models
            .values()
            .map(|sums| sums.answers + sums.no_usage + sums.no_details)
            .sum();
        // A request that failed has no answer, and is told as an error.
        if totals.waiting == 0 && heard >= answers || tokio::time::Instant::now() > deadline {
            return Ok(totals);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Assistants with a system prompt each, and conversations in which users paste text: what a chat product sees. All of it
/// together is several times what one engine can keep.
fn shape(cli: &Cli) -> Shape {
    Shape {
        groups: cli.groups.unwrap_or(60),
        sessions_per_group: cli.sessions,
        turns: 4..=7,
        system_words: 100..=300,
        user_words: 100..=300,
        max_tokens: 8..=32,
        think: Duration::from_millis(300)..=Duration::from_millis(1500),
        sessions_per_second: 3.0,
    }
}

async fn replay(
    stack: &Stack,
    workload: &Workload,
    bar: &Progress,
    name: &'static str,
) -> Vec<Sample> {
    let requests: usize = workload
        .sessions
        .iter()
        .map(|session| session.turns.len())
        .sum();
    let bar = bar.of(name, requests);
    let step = bar.clone();
    let samples = replay::run(
        stack.url("/v1/chat/completions"),
        workload.clone(),
        move |_| step.inc(1),
    )
    .await;
    bar.finish_and_clear();
    samples
}

/// Prints the report; an error where nobody reads it, which the macros for printing would panic at.
fn show(cli: &Cli, report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if cli.json {
        return writeln!(out, "{}", serde_json::to_string(report)?);
    }
    let Report {
        round_robin,
        warmroute,
        prediction,
        audit,
        ..
    } = report;
    let percent = |figures: &Figures| format!("{:.1} %", figures.hit_rate * 100.0);
    let balance = |figures: &Figures| {
        let counts: Vec<String> = figures
            .requests_per_worker
            .values()
            .map(ToString::to_string)
            .collect();
        counts.join("/")
    };
    let mut rows = vec![
        ["".into(), "round robin".into(), "warmroute".into()],
        [
            "prefix hit rate".into(),
            percent(round_robin),
            percent(warmroute),
        ],
    ];
    for (name, at) in [
        (
            "time to first token p50",
            (|figures| figures.ttft_ms.p50) as fn(&Figures) -> f64,
        ),
        ("                    p95", |figures| figures.ttft_ms.p95),
        ("                    p99", |figures| figures.ttft_ms.p99),
    ] {
        rows.push([
            name.to_owned(),
            format!("{:.0} ms", at(round_robin)),
            format!("{:.0} ms", at(warmroute)),
        ]);
    }
    rows.push([
        "requests per worker".into(),
        balance(round_robin),
        balance(warmroute),
    ]);
    writeln!(
        out,
        "Envoy {}, {} requests each, {} errors\n",
        report.envoy_version, report.requests, report.errors
    )?;
    for [name, left, right] in rows {
        writeln!(out, "{name:<28}{left:>16}{right:>16}")?;
    }
    let Prediction {
        requests,
        exact,
        mean_abs_error_tokens,
        ..
    } = prediction;
    let share = if *requests == 0 {
        0.0
    } else {
        *exact as f64 / *requests as f64 * 100.0
    };
    writeln!(
        out,
        "\ncached tokens predicted exactly for {exact} of {requests} requests ({share:.1} %),"
    )?;
    writeln!(
        out,
        "mean error {mean_abs_error_tokens:.2} tokens; as warmroute itself accounts for it (`warmroute audit`):\n"
    )?;
    write!(out, "{}", warmroute::cmd::audit::render(audit, None))
}

/// Says what can be tried; on standard error where standard output is for a program.
fn keep(cli: &Cli, stack: &Stack) -> io::Result<()> {
    let mut out: Box<dyn io::Write> = if cli.json {
        Box::new(io::stderr())
    } else {
        Box::new(io::stdout())
    };
    let body =
        json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "hello"}]});
    let chat = stack.url("/v1/chat/completions");
    writeln!(out, "\nEverything is running; Ctrl-C ends it. Try:")?;
    writeln!(
        out,
        "  curl -iN {chat} -H 'content-type: application/json' -d '{body}'"
    )?;
    writeln!(out, "  curl {}", stack.admin_url("/metrics"))?;
    writeln!(out, "  curl {}", stack.admin_url("/debug/load"))?;
    writeln!(
        out,
        "The configuration and the logs are in {}",
        stack.run_dir.display()
    )
}

/// What is going on, on standard error; nothing where the output is for a program.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(quiet: bool) -> Self {
        let bar = if quiet {
            ProgressBar::hidden()
        } else {
            ProgressBar::new_spinner()
        };
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar }
    }

    fn say(&self, what: &'static str) {
        self.bar.set_message(what);
    }

    fn of(&self, name: &'static str, requests: usize) -> ProgressBar {
        if self.bar.is_hidden() {
            return ProgressBar::hidden();
        }
        self.bar.set_message("");
        let style = ProgressStyle::with_template("{msg:<12} {wide_bar} {pos}/{len} requests").ok();
        let bar = ProgressBar::new(requests as u64).with_message(name);
        if let Some(style) = style {
            bar.with_style(style)
        } else {
            bar
        }
    }
}
