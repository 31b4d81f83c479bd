//! What the server costs behind a real Envoy, in CPU time of its process: warmroute beside the least that an external
//! processor can be, which answers every message at once. Both hear the same from Envoys of their own, in turns.

#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "what it shares with the load program is more than it needs"
)]
#![allow(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench prints as it goes"
)]

#[path = "../examples/load/answers.rs"]
mod answers;
#[path = "../examples/load/bare.rs"]
mod bare;
#[path = "../examples/load/bed.rs"]
mod bed;
#[path = "../examples/load/bodies.rs"]
mod bodies;
#[path = "../examples/load/client.rs"]
mod client;
#[path = "support/duel.rs"]
mod duel;
#[path = "../examples/load/goals.rs"]
mod goals;
#[path = "support/http2_filter.rs"]
mod http2_filter;
#[path = "../examples/load/measure.rs"]
mod measure;
#[path = "../examples/load/meter.rs"]
mod meter;
#[path = "../examples/load/report.rs"]
mod report;
#[path = "../examples/support/mod.rs"]
mod support;
#[path = "../examples/load/sweeps.rs"]
mod sweeps;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use bed::{Bed, Setting, Side};
use duel::Table;
use goals::CHAT;
use measure::Sample;
use sweeps::{Case, Extent, UNKNOWN};

/// Measures the CPU time of the server.
#[derive(Debug, Parser)]
struct Cli {
    /// Rounds, in each of which both servers have their turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Another build of warmroute than the shipped one, with its first arguments
    #[arg(long, num_args = 1.., value_name = "PROGRAM")]
    warmroute: Vec<OsString>,
    /// Write the rows as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Only rows with this in their names
    filter: Option<String>,
    /// What Cargo says to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// At most so much of the bare server's CPU time for a request, and for a piece of an answer.
const REQUEST: f64 = 1.5;
const PIECE: f64 = 1.1;
/// Pieces of an answer.
const PIECES: usize = 2_000;

fn main() -> ExitCode {
    let (first, args) = bed::called_as();
    let result = bed::be(first.as_deref(), args).unwrap_or_else(|| {
        let cli = Cli::parse();
        tokio::runtime::Runtime::new()?.block_on(run(&cli))
    });
    result.unwrap_or_else(|error| {
        eprintln!("server: {error:#}");
        ExitCode::FAILURE
    })
}

async fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    let dir = tempfile::Builder::new()
        .prefix("warmroute-server-")
        .tempdir()?;
    // As it is shipped, with its own allocator.
    let shipped = || vec![env!("CARGO_BIN_EXE_warmroute").into()];
    let ours = if cli.warmroute.is_empty() {
        shipped()
    } else {
        cli.warmroute.clone()
    };
    let setting = Setting {
        workers: 8,
        watch: false,
        threads: 1,
        ours: ours.clone(),
    };
    let (rounds, turn) = (cli.rounds, Duration::from_secs(2));
    let extent = Extent {
        rounds,
        turn,
        requests: 2_000,
        short: false,
        threads: 1,
        seed: 7,
        by_load: false,
        ours,
    };
    let mut table = Table::default();
    if cli
        .filter
        .as_ref()
        .is_none_or(|filter| filter.contains("HTTP/2"))
    {
        http2_filter::measure(&mut table, rounds);
    }

    let bed = Bed::start(&setting, &dir.path().join("requests")).await?;
    for (name, bytes, goal) in [
        ("1 KB", 1_000, Some(REQUEST)),
        ("32 KB", 32_000, Some(REQUEST)),
        ("220 KB", CHAT, None),
    ] {
        let case = |prompt, warm| {
            Case::of(
                format!("server CPU per request, {name}, {prompt}"),
                (bytes, warm),
                16,
            )
        };
        let alone = Case {
            model: UNKNOWN,
            ..case("by load", false)
        };
        for (case, goal) in [
            (alone, goal),
            (case("warm prompt", true), goal),
            (case("new prompt", false), None),
        ] {
            if wanted(cli, &case) {
                enter(&mut table, (&bed, &extent), case, goal, |sample| {
                    sample.cpu_server
                })
                .await?;
            }
        }
    }
    drop(bed);

    let bed = Bed::start(
        &Setting {
            watch: true,
            ..setting
        },
        &dir.path().join("pieces"),
    )
    .await?;
    let case = Case::of(
        "server CPU per piece of a streamed answer".into(),
        (1_000, false),
        16,
    );
    let case = Case {
        model: UNKNOWN,
        chunks: PIECES,
        ..case
    };
    if wanted(cli, &case) {
        enter(&mut table, (&bed, &extent), case, Some(PIECE), |sample| {
            sample.cpu_server / sample.messages
        })
        .await?;
    }
    drop(bed);

    table.print("bare");
    if let Some(path) = &cli.json {
        table.write_json(path)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn wanted(cli: &Cli, case: &Case) -> bool {
    cli.filter
        .as_ref()
        .is_none_or(|filter| case.name.contains(filter.as_str()))
}

async fn enter(
    table: &mut Table,
    (bed, extent): (&Bed, &Extent),
    case: Case,
    goal: Option<f64>,
    of: fn(&Sample) -> f64,
) -> anyhow::Result<()> {
    let name = case.name.clone();
    let measured = sweeps::measure(bed, case, extent).await?;
    let rounds = |side| measured.of(side).iter().map(of).collect::<Vec<_>>();
    table.enter(
        (&name, "µs", goal),
        &rounds(Side::Bare),
        &rounds(Side::Ours),
    );
    Ok(())
}
