//! Measures load through a real Envoy: `cargo run --release --example load`. The crate
//! documentation describes the setups.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warmroute_load::helper_programs::{AS_WARMROUTE, ProcessArguments};
use warmroute_load::report::LoadReport;
use warmroute_load::sweeps::{self, SweepSettings, SweptParameter};
use warmroute_testbed::envoy;
use warmroute_testbed::signals::run_until_signal;

/// The allocator of the warmroute binary, because warmroute runs in this program.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Measures Envoy alone, with a bare external processor and with warmroute.
#[derive(Debug, Parser)]
struct LoadArgs {
    /// Parameter to vary; may be repeated [default: one point of each, with few requests]
    #[arg(long, value_enum)]
    sweep: Vec<SweptParameter>,
    /// Rounds; every setup runs once in each
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Maximum duration of a turn in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Maximum number of requests of a turn
    #[arg(long, default_value_t = 4_000)]
    requests: usize,
    /// Only one point of each sweep
    #[arg(long)]
    short: bool,
    /// Worker threads of each Envoy [default: as many as there are cores]
    #[arg(long)]
    threads: Option<u32>,
    /// Seed of the requests
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Request an unknown model, so that requests are parsed and routed by load only. The result is
    /// the cost of the server without tokenization
    #[arg(long)]
    by_load: bool,
    /// Another build of warmroute than this one, with its first arguments
    #[arg(long, num_args = 1.., value_name = "PROGRAM")]
    warmroute: Vec<OsString>,
    /// Write all results as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = ProcessArguments::read();
    if arguments.program.as_deref() == Some(AS_WARMROUTE) {
        return warmroute::cmd::run(warmroute::cmd::cli::Cli::parse_from(arguments.rest));
    }
    let result = arguments
        .run_helper()
        .unwrap_or_else(|| measure(&LoadArgs::parse()));
    result.unwrap_or_else(|error| fail(&error))
}

#[expect(
    clippy::print_stderr,
    reason = "a program prints its error on standard error"
)]
fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("load: {error:#}");
    ExitCode::FAILURE
}

fn measure(args: &LoadArgs) -> anyhow::Result<ExitCode> {
    // Ten thousand streams need as many open files. Child processes inherit the limit.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    )?;
    run_until_signal(run(args))
}

async fn run(args: &LoadArgs) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(envoy::binary).await??;
    let dir = tempfile::Builder::new()
        .prefix("warmroute-load-")
        .tempdir()?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let settings = SweepSettings {
        rounds: args.rounds.into(),
        round_duration: Duration::try_from_secs_f64(args.seconds)
            .context("--seconds is not a duration")?,
        requests: args.requests.max(1),
        is_short: args.short || args.sweep.is_empty(),
        threads: args.threads.unwrap_or(u32::try_from(cores)?),
        seed: args.seed,
        is_load_only: args.by_load,
        warmroute: args.warmroute.clone(),
    };
    let parameters = if args.sweep.is_empty() {
        &SweptParameter::ALL[..]
    } else {
        &args.sweep
    };
    let mut report = LoadReport::default();
    LoadReport::print_head()?;
    for parameter in parameters {
        if let Err(error) = sweeps::run(*parameter, &settings, dir.path(), &mut report).await {
            anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display());
        }
    }
    if !report.table.rows().is_empty() {
        report.table.print("bare");
    }
    if let Some(path) = &args.json {
        report
            .write_json(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
