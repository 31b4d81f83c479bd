//! Load through the real Envoy: the same requests without an external processor, with one that answers at once, and with
//! warmroute, in turns, to engines that answer at once. Prints what warmroute costs in time, throughput, CPU and memory,
//! and where on the way to many ranks, long prompts and many streams that grows.
//!
//! All other programs run as processes of their own: this one starts itself again under another first argument.

mod answers;
mod bare;
mod bed;
mod bodies;
mod client;
#[allow(
    dead_code,
    unreachable_pub,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "it is of the benches, which print as they go, and each uses its own part of it"
)]
#[path = "../../benches/support/duel.rs"]
mod duel;
mod goals;
mod measure;
mod meter;
mod report;
#[path = "../support/mod.rs"]
mod support;
mod sweeps;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use report::Report;
use support::envoy;
use support::signals::run_until_signal;
use sweeps::{Extent, Sweep};

/// That of the binary: warmroute runs here as it is shipped, and the bare server beside it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Measures Envoy alone, with a bare external processor and with warmroute.
#[derive(Debug, Parser)]
struct Cli {
    /// What is varied; may be repeated [default: one point of each, shortly]
    #[arg(long, value_enum)]
    sweep: Vec<Sweep>,
    /// Rounds, in each of which every side has its turn
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Seconds that a turn takes at most
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Requests that a turn has at most
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
    /// Ask for a model that nobody serves: requests are read and go by load, so that what is left is the server
    #[arg(long)]
    by_load: bool,
    /// Another build of warmroute than this one, with its first arguments
    #[arg(long, num_args = 1.., value_name = "PROGRAM")]
    warmroute: Vec<OsString>,
    /// Write everything as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let (first, args) = bed::called_as();
    let result = bed::be(first.as_deref(), args).unwrap_or_else(|| load(&Cli::parse()));
    result.unwrap_or_else(|error| fail(&error))
}

#[expect(
    clippy::print_stderr,
    reason = "a program tells on standard error why it failed"
)]
fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("load: {error:#}");
    ExitCode::FAILURE
}

fn load(cli: &Cli) -> anyhow::Result<ExitCode> {
    // Ten thousand streams are as many open files, and children inherit the limit.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    )?;
    run_until_signal(run(cli))
}

async fn run(cli: &Cli) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(envoy::binary).await??;
    let dir = tempfile::Builder::new()
        .prefix("warmroute-load-")
        .tempdir()?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let extent = Extent {
        rounds: cli.rounds.into(),
        turn: Duration::try_from_secs_f64(cli.seconds).context("--seconds is no time")?,
        requests: cli.requests.max(1),
        short: cli.short || cli.sweep.is_empty(),
        threads: cli.threads.unwrap_or(u32::try_from(cores)?),
        seed: cli.seed,
        by_load: cli.by_load,
        ours: cli.warmroute.clone(),
    };
    let sweeps = if cli.sweep.is_empty() {
        &Sweep::ALL[..]
    } else {
        &cli.sweep
    };
    let mut report = Report::default();
    Report::head()?;
    for sweep in sweeps {
        if let Err(error) = sweeps::run(*sweep, &extent, dir.path(), &mut report).await {
            anyhow::bail!("{error:#}\nThe logs are in {}", dir.keep().display());
        }
    }
    if !report.table.rows().is_empty() {
        report.table.print("bare");
    }
    if let Some(path) = &cli.json {
        report
            .write_json(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
