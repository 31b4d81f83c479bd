//! CPU time of the server process behind a real Envoy: warmroute, and a minimal external processor
//! that replies to every message at once. Each has its own Envoy with the same traffic, in
//! alternating rounds.

#![allow(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench prints its progress and results"
)]

#[path = "support/chats.rs"]
#[expect(dead_code, reason = "the bench uses only the tokenizer")]
mod chats;
#[path = "support/http2_filter.rs"]
mod http2_filter;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use chats::fast_library;
use clap::Parser;
use warmroute_load::case::LoadCase;
use warmroute_load::goals::CHAT_BYTES;
use warmroute_load::helper_programs::ProcessArguments;
use warmroute_load::measure::RoundSample;
use warmroute_load::repository_texts::{NewText, TextRotation, message_texts};
use warmroute_load::setups::{LoadSetups, SetupKind, SetupSettings};
use warmroute_load::sweeps::{self, SweepSettings};
use warmroute_testbed::comparison::{ComparedMeasure, ComparisonTable, measure_cpu, median};
use warmroute_testbed::deployment::ModelFiles;

/// Measures the CPU time of the server.
#[derive(Debug, Parser)]
struct ServerBenchArgs {
    /// Number of rounds; both servers run in each
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Another build of warmroute than the shipped one, with its first arguments
    #[arg(long, num_args = 1.., value_name = "PROGRAM")]
    warmroute: Vec<OsString>,
    /// Write the rows to this file as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run only rows with this text in their names
    filter: Option<String>,
    /// Argument that Cargo passes to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Maximum CPU time relative to the bare server for a request that is not tokenized.
const MAX_LOAD_ONLY_RATIO: f64 = 1.5;
/// Maximum CPU time relative to the bare server for a request of which at most 1 KB is new, in
/// addition to the tokenization of the new text.
const MAX_CONTINUED_RATIO: f64 = 1.3;
/// Number of new texts whose tokenization is measured.
const TOKENIZED_TEXTS: usize = 200;
/// Maximum CPU time relative to the bare server for a piece of a response.
const MAX_PIECE_RATIO: f64 = 1.1;
/// Connections of the client.
const CONNECTIONS: usize = 16;
/// Seed of the requests.
const SEED: u64 = 7;
/// Pieces of a response.
const PIECES: usize = 2_000;

fn main() -> ExitCode {
    let result = ProcessArguments::read().run_helper().unwrap_or_else(|| {
        let args = ServerBenchArgs::parse();
        tokio::runtime::Runtime::new()?.block_on(run(&args))
    });
    result.unwrap_or_else(|error| {
        eprintln!("server: {error:#}");
        ExitCode::FAILURE
    })
}

async fn run(args: &ServerBenchArgs) -> anyhow::Result<ExitCode> {
    let dir = tempfile::Builder::new()
        .prefix("warmroute-server-")
        .tempdir()?;
    let mut table = ComparisonTable::default();
    if args.wants_http2_rows() {
        http2_filter::measure(&mut table, args.rounds);
    }
    let setup_settings = args.setup_settings();
    let sweep_settings = args.sweep_settings();
    measure_requests(
        args,
        &setup_settings,
        &sweep_settings,
        dir.path(),
        &mut table,
    )
    .await?;
    measure_pieces(
        args,
        setup_settings,
        &sweep_settings,
        dir.path(),
        &mut table,
    )
    .await?;
    table.print("bare");
    if let Some(path) = &args.json {
        table.write_json(path)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl ServerBenchArgs {
    /// Returns true if a row is selected. Without a filter, every row is.
    fn wants(&self, name: &str) -> bool {
        self.filter
            .as_ref()
            .is_none_or(|filter| name.contains(filter.as_str()))
    }

    fn wants_http2_rows(&self) -> bool {
        self.filter
            .as_ref()
            .is_none_or(|filter| filter.contains("HTTP/2"))
    }

    /// Returns the program to measure. By default it is the shipped build, which has its own
    /// allocator.
    fn warmroute_command(&self) -> Vec<OsString> {
        if self.warmroute.is_empty() {
            vec![env!("CARGO_BIN_EXE_warmroute").into()]
        } else {
            self.warmroute.clone()
        }
    }

    fn setup_settings(&self) -> SetupSettings {
        SetupSettings {
            workers: 8,
            observes_bodies: false,
            is_full_duplex: false,
            threads: 1,
            warmroute: self.warmroute_command(),
            model: ModelFiles::Complete,
        }
    }

    fn sweep_settings(&self) -> SweepSettings {
        SweepSettings {
            rounds: self.rounds,
            round_duration: Duration::from_secs(2),
            requests: 2_000,
            is_short: false,
            threads: 1,
            seed: SEED,
            is_load_only: false,
            warmroute: self.warmroute_command(),
        }
    }
}

async fn measure_requests(
    args: &ServerBenchArgs,
    setup_settings: &SetupSettings,
    sweep_settings: &SweepSettings,
    dir: &Path,
    table: &mut ComparisonTable,
) -> anyhow::Result<()> {
    for (mode, is_full_duplex) in [("buffered", false), ("full duplex", true)] {
        let cases: Vec<_> = request_cases(mode)
            .into_iter()
            .filter(|(case, _)| args.wants(&case.name))
            .collect();
        if cases.is_empty() {
            continue;
        }
        let setup_settings = SetupSettings {
            is_full_duplex,
            ..setup_settings.clone()
        };
        let setups = LoadSetups::start(&setup_settings, &dir.join(mode.replace(' ', "-"))).await?;
        let rows = RowSource {
            setups: &setups,
            settings: sweep_settings,
        };
        for (case, goal) in cases {
            rows.add_row(table, case, goal, |sample| sample.cpu_server)
                .await?;
        }
    }
    Ok(())
}

/// Maximum of a row.
#[derive(Clone, Copy, Debug)]
enum RowGoal {
    /// The row has no maximum.
    None,
    /// Ratio to the bare server.
    Ratio(f64),
    /// Ratio to the bare server, plus the tokenization of the new text.
    RatioAndTokenization(f64),
}

/// Returns the cases of one body mode with their goals.
fn request_cases(mode: &str) -> Vec<(LoadCase, RowGoal)> {
    let sizes = [
        ("1 KB", 1_000),
        ("32 KB", 32_000),
        ("220 KB", CHAT_BYTES),
        ("400 KB", 400_000),
    ];
    let cases_of_size = |(size, bytes)| {
        let new_case = |prompt, is_warm, new_text| {
            let name = format!("server CPU per request, {size}, {mode}, {prompt}");
            LoadCase::new(name, bytes, is_warm, CONNECTIONS).with_repository_texts(new_text)
        };
        [
            (
                new_case("load-only", false, NewText::Conversation).with_unknown_model(),
                RowGoal::Ratio(MAX_LOAD_ONLY_RATIO),
            ),
            (
                new_case("continued prompt", true, NewText::Message),
                RowGoal::RatioAndTokenization(MAX_CONTINUED_RATIO),
            ),
            (
                new_case("new prompt", false, NewText::Conversation),
                RowGoal::None,
            ),
        ]
    };
    sizes.into_iter().flat_map(cases_of_size).collect()
}

async fn measure_pieces(
    args: &ServerBenchArgs,
    setup_settings: SetupSettings,
    sweep_settings: &SweepSettings,
    dir: &Path,
    table: &mut ComparisonTable,
) -> anyhow::Result<()> {
    let setup_settings = SetupSettings {
        observes_bodies: true,
        is_full_duplex: false,
        ..setup_settings
    };
    let setups = LoadSetups::start(&setup_settings, &dir.join("pieces")).await?;
    let name = "server CPU per chunk of a streamed response".to_owned();
    let case = LoadCase::new(name, 1_000, false, CONNECTIONS)
        .with_unknown_model()
        .with_chunks(PIECES);
    if args.wants(&case.name) {
        let rows = RowSource {
            setups: &setups,
            settings: sweep_settings,
        };
        rows.add_row(table, case, RowGoal::Ratio(MAX_PIECE_RATIO), |sample| {
            sample.cpu_server / sample.messages
        })
        .await?;
    }
    Ok(())
}

/// Setups and settings of several rows.
struct RowSource<'a> {
    setups: &'a LoadSetups,
    settings: &'a SweepSettings,
}

impl RowSource<'_> {
    /// Measures a case and adds a row with one figure.
    async fn add_row(
        &self,
        table: &mut ComparisonTable,
        case: LoadCase,
        goal: RowGoal,
        figure: fn(&RoundSample) -> f64,
    ) -> anyhow::Result<()> {
        let name = case.name.clone();
        let tokenization = match goal {
            RowGoal::RatioAndTokenization(_) => new_text_micros(case.bytes)?,
            RowGoal::None | RowGoal::Ratio(_) => 0.0,
        };
        let measured = sweeps::measure_case(self.setups, case, self.settings).await?;
        let rounds = |kind| -> Vec<f64> { measured.rounds_of(kind).iter().map(figure).collect() };
        let bare = rounds(SetupKind::BareServer);
        let max_ratio = match goal {
            RowGoal::None => None,
            RowGoal::Ratio(ratio) => Some(ratio),
            RowGoal::RatioAndTokenization(ratio) => Some(ratio + tokenization / median(&bare)),
        };
        table.add(
            ComparedMeasure::new(&name, "µs", max_ratio),
            &bare,
            &rounds(SetupKind::Warmroute),
        );
        Ok(())
    }
}

/// Returns the median CPU time of the tokenization of one new message, in microseconds. The word
/// cache of the tokenizer is warm.
fn new_text_micros(bytes: usize) -> anyhow::Result<f64> {
    let library = fast_library();
    let mut texts = TextRotation::open("m", bytes, NewText::Message, SEED)?;
    let mut micros = Vec::new();
    for body in texts.next_bodies(2 * TOKENIZED_TEXTS) {
        let texts = message_texts(&body)?;
        let text = texts.last().context("the body has no text")?;
        micros.push(measure_cpu(|| std::hint::black_box(library.encode(text))) / 1e3);
    }
    Ok(median(&micros[TOKENIZED_TEXTS..]))
}
