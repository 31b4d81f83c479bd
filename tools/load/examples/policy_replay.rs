//! Compares routing policies through a real Envoy with simulated engines:
//! `cargo run --release --example policy_replay -- --trace FILE`. Without a trace, it sends the chats
//! of the quickstart to four engines.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use warmroute_load::helper_programs::{AS_WARMROUTE, ProcessArguments};
use warmroute_load::policy_replay::replay_report::{self, PolicyRun};
use warmroute_load::policy_replay::trace_sessions::{self, TraceScale};
use warmroute_load::policy_replay::{
    EngineLayout, ReplayFault, ReplayPolicy, ReplaySettings, ReplayTraffic,
};
use warmroute_testbed::comparison;
use warmroute_testbed::deployment::{ModelFiles, ProgramCommands};
use warmroute_testbed::envoy;
use warmroute_testbed::signals::run_until_signal;
use warmroute_testbed::workload::{CHAT_PRODUCT_BLOCKS, ChatWorkload, WorkloadShape};

/// The allocator of the warmroute binary, because warmroute runs in this program.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// First argument of an engine.
const AS_ENGINE: &str = "as-engine";

/// Sends the same sessions with each routing policy and compares latency and cache use. A recorded
/// block of 64 tokens becomes 16 words, which are about 16 tokens, so a prompt has a quarter of its
/// recorded length.
#[derive(Debug, Parser)]
struct PolicyReplayArgs {
    /// Trace of coding-agent sessions, optionally compressed with gzip [default: the chats of the
    /// quickstart]
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Policies; round_robin is Envoy's own without warmroute, and default is the default of
    /// warmroute
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "round_robin,linear,linear_tuned,seconds"
    )]
    policies: Vec<String>,
    /// Rounds; each policy runs once in each, in rotated order
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Engines [default: 8 for a trace, 4 for the chats]
    #[arg(long)]
    engines: Option<u64>,
    /// KV blocks of 16 tokens of each engine [default: 4096 for a trace, 2000 for the chats]
    #[arg(long)]
    blocks: Option<usize>,
    /// Time of an engine for one prompt token, in microseconds [default: 280 for a trace, 70 for
    /// the chats]
    #[arg(long)]
    prefill_us: Option<f64>,
    /// Tokens of each answer of a trace
    #[arg(long, default_value_t = 8, requires = "trace")]
    answer_tokens: u32,
    /// Sessions of the trace
    #[arg(long, default_value_t = 40, requires = "trace")]
    sessions: usize,
    /// The engines publish no KV events; warmroute predicts their caches
    #[arg(long)]
    no_events: bool,
    /// Requests after which the first engine becomes slower
    #[arg(long, conflicts_with = "restart_after")]
    slow_after: Option<usize>,
    /// Factor on the step duration of the slow engine
    #[arg(long, default_value_t = 2.0, requires = "slow_after")]
    slow_factor: f64,
    /// Requests after which warmroute is killed and started again
    #[arg(long)]
    restart_after: Option<usize>,
    /// Configuration of warmroute as JSON, merged into the generated one
    #[arg(long, default_value = "{}", value_parser = |text: &str| serde_json::from_str::<Value>(text))]
    config: Value,
    /// Seed of the chats
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Write all runs as JSON, after each run
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Arguments of an engine process.
#[derive(Debug, Parser)]
struct ReplayEngineArgs {
    #[command(flatten)]
    engine: warmroute_engine_sim::EngineConfig,
    #[arg(long)]
    listen: SocketAddr,
}

fn main() -> ExitCode {
    let arguments = ProcessArguments::read();
    let result = match arguments.program.as_deref() {
        Some(AS_WARMROUTE) => {
            return warmroute::cmd::run(warmroute::cmd::cli::Cli::parse_from(arguments.rest));
        }
        Some(AS_ENGINE) => run_engine(arguments.rest),
        _ => run_until_signal(compare(PolicyReplayArgs::parse())),
    };
    result.unwrap_or_else(|error| fail(&error))
}

#[expect(
    clippy::print_stderr,
    reason = "a program prints its error on standard error"
)]
fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("policy_replay: {error:#}");
    ExitCode::FAILURE
}

#[tokio::main]
async fn run_engine(args: Vec<OsString>) -> anyhow::Result<ExitCode> {
    let args = ReplayEngineArgs::parse_from(args);
    let listener = TcpListener::bind(args.listen).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = warmroute_engine_sim::run(args.engine, listener) => result?,
        _ = terminate.recv() => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn compare(args: PolicyReplayArgs) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(envoy::binary).await??;
    let settings = settings(&args)?;
    let own = std::env::current_exe()?.into_os_string();
    let programs = ProgramCommands {
        warmroute: vec![own.clone(), AS_WARMROUTE.into()],
        engine: vec![own, AS_ENGINE.into()],
        model: ModelFiles::Complete,
    };
    let dir = tempfile::Builder::new()
        .prefix("warmroute-policies-")
        .tempdir()?;
    replay_report::print_header()?;
    let mut all: Vec<PolicyRun> = Vec::new();
    let on_run = |run: &PolicyRun| {
        all.push(run.clone());
        report_run(run, &all, args.json.as_deref())
    };
    match settings.run(&programs, dir.path(), on_run).await {
        Ok(runs) => replay_report::print_medians(&runs)?,
        Err(error) => anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display()),
    }
    Ok(())
}

fn report_run(run: &PolicyRun, all: &[PolicyRun], json: Option<&Path>) -> anyhow::Result<()> {
    replay_report::print_run(run)?;
    if let Some(fault) = &run.fault {
        replay_report::print_fault(fault)?;
    }
    if let Some(path) = json {
        comparison::write_json(&all, path)?;
    }
    Ok(())
}

fn settings(args: &PolicyReplayArgs) -> anyhow::Result<ReplaySettings> {
    let (traffic, engines, blocks, prefill_us) = match &args.trace {
        Some(path) => {
            let sessions = trace_sessions::load(path, &trace_scale(args))?;
            (ReplayTraffic::Trace(sessions), 8, 4096, 280.0)
        }
        None => {
            let chats = ChatWorkload::new(args.seed, &WorkloadShape::chat_product());
            (ReplayTraffic::Chats(chats), 4, CHAT_PRODUCT_BLOCKS, 70.0)
        }
    };
    let slow = args.slow_after.map(|after| ReplayFault::SlowEngine {
        after,
        factor: args.slow_factor,
    });
    let restart = args.restart_after;
    let policies: Vec<ReplayPolicy> = args
        .policies
        .iter()
        .map(|name| ReplayPolicy::parse(name))
        .collect();
    anyhow::ensure!(
        restart.is_none() || !policies.contains(&ReplayPolicy::EnvoyRoundRobin),
        "--restart-after restarts warmroute, which `round_robin` does not use; remove it from --policies"
    );
    Ok(ReplaySettings {
        policies,
        rounds: args.rounds.into(),
        traffic,
        engines: EngineLayout {
            count: args.engines.unwrap_or(engines),
            blocks: args.blocks.unwrap_or(blocks),
            prefill_us: args.prefill_us.unwrap_or(prefill_us),
            publishes_kv_events: !args.no_events,
        },
        fault: slow.or_else(|| restart.map(|after| ReplayFault::RouterRestart { after })),
        config: args.config.clone(),
    })
}

/// Returns the scale of the trace: sessions of 10 to 20 requests up to 96,000 recorded tokens, and
/// 3 % of the recorded pauses, at most 2 s. With 40 sessions, these are 755 requests, and eight
/// engines of 4096 blocks hold a fifth less than all sessions need.
fn trace_scale(args: &PolicyReplayArgs) -> TraceScale {
    TraceScale {
        sessions: args.sessions,
        max_turns: 20,
        min_turns: 10,
        max_recorded_tokens: 96_000,
        pause_factor: 0.03,
        max_pause: Duration::from_secs(2),
        start_interval: Duration::from_millis(100),
        answer_tokens: args.answer_tokens,
    }
}
