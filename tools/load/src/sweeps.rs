//! The sweeps. Each varies one parameter; all others have their defaults.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use bytes::Bytes;
use clap::ValueEnum;
use serde_json::json;
use warmroute_testbed::deployment::ModelFiles;
use warmroute_testbed::ports;

use crate::bodies::{ChatRotation, ChatWriter};
use crate::case::{LoadCase, MeasuredCase, UNKNOWN_MODEL};
use crate::client::{self, LoadPlan, OpenResponses};
use crate::goals;
use crate::idle;
use crate::measure;
use crate::report::LoadReport;
use crate::repository_texts::{NewText, TextRotation};
use crate::setups::{LoadSetup, LoadSetups, SetupKind, SetupSettings};

/// The varied parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SweptParameter {
    /// Bytes of a request, 1 KB to 4 MB; chats of 220 KB over 20 to 150 connections
    Body,
    /// Tokens of a prompt, 1k to 1M
    Prompt,
    /// Worker ranks, 4 to 4,096
    Ranks,
    /// Concurrently open responses, 1 to 10,000
    Streams,
    /// Pieces of a response, 1 to 10,000, with default and with complete observation
    Chunks,
    /// Bytes of a request, 1 KB to 40 MB, in full duplex; conversations with the texts of this
    /// repository, of which a tenth is new
    Texts,
    /// Number of engines, 8 and 1,000, without requests: time to readiness, memory and CPU use
    Idle,
}

impl SweptParameter {
    /// All parameters, in the order of the report.
    pub const ALL: [Self; 7] = [
        Self::Body,
        Self::Prompt,
        Self::Ranks,
        Self::Streams,
        Self::Chunks,
        Self::Texts,
        Self::Idle,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Body => "body",
            Self::Prompt => "prompt",
            Self::Ranks => "ranks",
            Self::Streams => "streams",
            Self::Chunks => "chunks",
            Self::Texts => "texts",
            Self::Idle => "idle",
        }
    }
}

/// Settings of a measurement.
#[derive(Clone, Debug)]
pub struct SweepSettings {
    /// Rounds of each case; every setup runs once in each.
    pub rounds: usize,
    /// Maximum duration of a round of one setup.
    pub round_duration: Duration,
    /// Maximum number of requests of a round of one setup.
    pub requests: usize,
    /// True if only one point of each sweep is measured.
    pub is_short: bool,
    /// Worker threads of each Envoy.
    pub threads: u32,
    /// Seed of the requests.
    pub seed: u64,
    /// True if all requests are routed by load only.
    pub is_load_only: bool,
    /// The warmroute program with its first arguments. If empty, this program runs warmroute.
    pub warmroute: Vec<OsString>,
}

/// Maximum bytes of the bodies generated for one round.
const MAX_BODY_BYTES: usize = 96_000_000;
/// Number of conversations in addition to one per connection, so that a turn is complete before the
/// next one of the same conversation is sent.
const MORE_CHATS: usize = 16;
/// Bytes of a request from which few connections are measured.
const LARGE_TEXT: usize = 10_000_000;
/// Number of ranks in the sweeps that do not vary it.
const WORKERS: usize = 8;
/// Time limit for the warm-up.
const WARM_UP: Duration = Duration::from_secs(60);
/// Time limit for closing the open responses.
const CLOSE: Duration = Duration::from_secs(60);

/// Source of the request bodies.
enum BodySource {
    Cold(Box<ChatWriter>, usize),
    Warm(Box<ChatRotation>),
    Texts(Box<TextRotation>),
}

impl BodySource {
    fn new(case: &LoadCase, seed: u64) -> anyhow::Result<Self> {
        if let Some(new_text) = case.repository_texts {
            let texts = TextRotation::open(case.model, case.bytes, new_text, seed)?;
            return Ok(Self::Texts(Box::new(texts)));
        }
        let mut writer = ChatWriter::new(seed).with_model(case.model);
        let system = case.shared_bytes.map(|bytes| writer.system_prompt(bytes));
        if !case.is_warm {
            return Ok(Self::Cold(Box::new(writer), case.bytes));
        }
        let count = case.connections + MORE_CHATS;
        let chats = ChatRotation::open(writer, system.as_deref(), case.bytes, count);
        Ok(Self::Warm(Box::new(chats)))
    }

    /// Returns the requests of the warm-up.
    fn first_bodies(&mut self, connections: usize) -> Vec<Bytes> {
        match self {
            Self::Cold(writer, bytes) => writer.new_chats(*bytes, 2 * connections),
            Self::Warm(chats) => chats.first_bodies(),
            Self::Texts(texts) => texts.first_bodies(),
        }
    }

    fn next_bodies(&mut self, count: usize) -> Vec<Bytes> {
        match self {
            Self::Cold(writer, bytes) => writer.new_chats(*bytes, count),
            Self::Warm(chats) => chats.next_bodies(count),
            Self::Texts(texts) => texts.next_bodies(count),
        }
    }
}

/// Measures one case with all setups, in turns.
pub async fn measure_case(
    setups: &LoadSetups,
    mut case: LoadCase,
    settings: &SweepSettings,
) -> anyhow::Result<MeasuredCase> {
    let http = client::http_client()?;
    if settings.is_load_only {
        case.model = UNKNOWN_MODEL;
        case.name += ", load-only";
    }
    // Each case has another seed, so that no case repeats the content of another.
    let seed = settings.seed
        ^ (case
            .name
            .bytes()
            .fold(0, |sum: u64, byte| sum.wrapping_mul(31) + u64::from(byte))
            << 8);
    let mut source = BodySource::new(&case, seed)?;
    let plan = LoadPlan::new(case.connections, settings.round_duration).with_chunks(case.chunks);
    let first = Arc::new(source.first_bodies(case.connections));
    for setup in &setups.setups {
        // Few requests run at a time: requests rejected because of overload would not be cached
        // afterwards.
        let warm_up = LoadPlan {
            send_for: WARM_UP,
            connections: 2,
            ..plan.clone()
        };
        let round = client::send_all(&http, &setup.url(), &first, &warm_up).await?;
        ensure!(
            round.errors.is_empty(),
            "{}: {}",
            setup.kind.name(),
            round.errors[0]
        );
    }
    let enough = settings
        .requests
        .min((40_000 / case.chunks).max(case.connections));
    let count = (MAX_BODY_BYTES / case.bytes)
        .max(2 * case.connections)
        .min(enough);
    let mut rounds: Vec<_> = SetupKind::ALL
        .iter()
        .map(|kind| (*kind, Vec::new()))
        .collect();
    for _ in 0..settings.rounds {
        let bodies = Arc::new(source.next_bodies(count));
        for (setup, (_, rounds)) in setups.setups.iter().zip(&mut rounds) {
            let open = OpenResponses::open(&setup.url(), &bodies[0], case.open_responses).await?;
            let mut sample = measure::measure_round(&http, setups, setup, &bodies, &plan).await?;
            if case.model == UNKNOWN_MODEL {
                sample.by_prompt = 1.0;
            }
            rounds.push(sample);
            drop(open);
            wait_closed(&http, setup).await?;
        }
    }
    Ok(MeasuredCase { case, rounds })
}

/// Waits until no response is open.
async fn wait_closed(http: &reqwest::Client, setup: &LoadSetup) -> anyhow::Result<()> {
    let url = setup
        .deployment
        .envoy_setup()
        .admin_url("/stats?filter=http.ingress.downstream_rq_active");
    let is_closed = async || match http.get(&url).send().await {
        Ok(page) => page
            .text()
            .await
            .is_ok_and(|text| text.trim_end().ends_with(": 0")),
        Err(_) => false,
    };
    ensure!(
        ports::until(CLOSE, is_closed).await,
        "{}: requests are still open after {CLOSE:?}",
        setup.kind.name()
    );
    if setup.kind == SetupKind::Warmroute {
        let url = setup.deployment.admin_url("/metrics");
        let is_closed = async || match http.get(&url).send().await {
            Ok(page) => page
                .text()
                .await
                .is_ok_and(|text| text.contains("warmroute_open_exchanges 0\n")),
            Err(_) => false,
        };
        ensure!(
            ports::until(CLOSE, is_closed).await,
            "exchanges are still open after {CLOSE:?}"
        );
    }
    Ok(())
}

/// Runs one sweep and adds its results.
pub async fn run(
    parameter: SweptParameter,
    settings: &SweepSettings,
    dir: &Path,
    report: &mut LoadReport,
) -> anyhow::Result<()> {
    let setup_settings = SetupSettings {
        workers: WORKERS,
        observes_bodies: false,
        is_full_duplex: parameter == SweptParameter::Texts,
        threads: settings.threads,
        warmroute: settings.warmroute.clone(),
        model: ModelFiles::Complete,
    };
    let dir = dir.join(parameter.name());
    match parameter {
        SweptParameter::Body => {
            let setups = LoadSetups::start(&setup_settings, &dir).await?;
            measure_all(&setups, body_cases(settings), settings, report).await?;
            let chats = measure_all(&setups, chat_cases(settings), settings, report).await?;
            goals::add_goals(&chats, report);
        }
        SweptParameter::Prompt => {
            let setups = LoadSetups::start(&setup_settings, &dir).await?;
            measure_all(&setups, prompt_cases(settings), settings, report).await?;
        }
        SweptParameter::Ranks => {
            for ranks in points(settings, &[4, 64, 512, 2_048, 4_096], 64) {
                let setup_settings = SetupSettings {
                    workers: ranks,
                    ..setup_settings.clone()
                };
                let dir = dir.join(ranks.to_string());
                let setups = LoadSetups::start(&setup_settings, &dir).await?;
                measure_all(&setups, vec![rank_case(ranks)], settings, report).await?;
            }
        }
        SweptParameter::Streams => {
            let setups = LoadSetups::start(&setup_settings, &dir).await?;
            measure_all(&setups, stream_cases(settings), settings, report).await?;
        }
        SweptParameter::Chunks => {
            for observes_bodies in [false, true] {
                let setup_settings = SetupSettings {
                    observes_bodies,
                    ..setup_settings.clone()
                };
                let dir = dir.join(observes_bodies.to_string());
                let setups = LoadSetups::start(&setup_settings, &dir).await?;
                let cases = chunk_cases(settings, observes_bodies);
                measure_all(&setups, cases, settings, report).await?;
            }
        }
        SweptParameter::Texts => {
            let setups = LoadSetups::start(&setup_settings, &dir).await?;
            measure_all(&setups, text_cases(settings), settings, report).await?;
        }
        SweptParameter::Idle => idle::run(settings, &setup_settings, &dir, report).await?,
    }
    Ok(())
}

async fn measure_all(
    setups: &LoadSetups,
    cases: Vec<LoadCase>,
    settings: &SweepSettings,
    report: &mut LoadReport,
) -> anyhow::Result<Vec<MeasuredCase>> {
    let mut all = Vec::new();
    for case in cases {
        let measured = measure_case(setups, case, settings).await?;
        report.add_point(&measured)?;
        all.push(measured);
    }
    Ok(all)
}

/// Returns all points of a sweep, or only one of them if the measurement is short.
fn points(
    settings: &SweepSettings,
    all: &'static [usize],
    short_point: usize,
) -> impl Iterator<Item = usize> + use<> {
    let is_short = settings.is_short;
    all.iter()
        .copied()
        .filter(move |point| !is_short || *point == short_point)
}

fn body_cases(settings: &SweepSettings) -> Vec<LoadCase> {
    let sizes = points(
        settings,
        &[1_000, 4_000, 32_000, 128_000, 1_000_000, 4_000_000],
        4_000,
    );
    let cases = |bytes: usize| {
        [false, true].map(|is_warm| {
            let name = format!("{} KB, c = 16", bytes / 1_000);
            let point = json!({"bytes": bytes, "connections": 16, "warm": is_warm});
            LoadCase::new(name, bytes, is_warm, 16).at_point(SweptParameter::Body.name(), point)
        })
    };
    sizes.flat_map(cases).collect()
}

fn chat_cases(settings: &SweepSettings) -> Vec<LoadCase> {
    let bytes = goals::CHAT_BYTES;
    let cases = |connections: usize| {
        [false, true].map(|is_warm| {
            let name = format!("220 KB chat, c = {connections}");
            let point = json!({"bytes": bytes, "connections": connections, "warm": is_warm});
            LoadCase::new(name, bytes, is_warm, connections)
                .at_point(SweptParameter::Body.name(), point)
        })
    };
    points(settings, &goals::CONNECTIONS, 20)
        .flat_map(cases)
        .collect()
}

/// Approximate bytes per token of these chats.
const BYTES_PER_TOKEN: f64 = 5.0;

fn prompt_cases(settings: &SweepSettings) -> Vec<LoadCase> {
    let lengths = points(
        settings,
        &[1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000],
        16_000,
    );
    let cases = |tokens: usize| {
        let bytes = (tokens as f64 * BYTES_PER_TOKEN) as usize;
        [false, true].map(|is_warm| {
            let name = format!("{tokens} tokens, c = 2");
            let point = json!({"tokens": tokens, "warm": is_warm});
            LoadCase::new(name, bytes, is_warm, 2).at_point(SweptParameter::Prompt.name(), point)
        })
    };
    lengths.flat_map(cases).collect()
}

fn rank_case(ranks: usize) -> LoadCase {
    let case = LoadCase::new(format!("{ranks} ranks"), 8_000, true, 16);
    LoadCase {
        shared_bytes: Some(4_000),
        ..case.at_point(SweptParameter::Ranks.name(), json!({"ranks": ranks}))
    }
}

fn stream_cases(settings: &SweepSettings) -> Vec<LoadCase> {
    let case = |streams: usize| {
        let case = LoadCase::new(format!("{streams} answers open"), 1_000, false, 8);
        LoadCase {
            open_responses: streams,
            ..case.at_point(SweptParameter::Streams.name(), json!({"streams": streams}))
        }
    };
    points(settings, &[1, 10, 100, 1_000, 5_000, 10_000], 1_000)
        .map(case)
        .collect()
}

fn chunk_cases(settings: &SweepSettings, observes_bodies: bool) -> Vec<LoadCase> {
    let seen = if observes_bodies { "all" } else { "first" };
    let case = |chunks: usize| {
        let point = json!({"chunks": chunks, "seen": seen});
        LoadCase::new(format!("{chunks} pieces, {seen} seen"), 1_000, false, 8)
            .at_point(SweptParameter::Chunks.name(), point)
            .with_chunks(chunks)
    };
    points(settings, &[1, 10, 100, 1_000, 10_000], 100)
        .map(case)
        .collect()
}

fn text_cases(settings: &SweepSettings) -> Vec<LoadCase> {
    let case = |bytes: usize| {
        let connections = if bytes < LARGE_TEXT { 16 } else { 2 };
        let name = format!("{} KB of text, c = {connections}", bytes / 1_000);
        let point = json!({"bytes": bytes, "connections": connections});
        LoadCase::new(name, bytes, true, connections)
            .with_repository_texts(NewText::Tenth)
            .at_point(SweptParameter::Texts.name(), point)
    };
    const SIZES: [usize; 6] = [1_000, 32_000, 220_000, 400_000, 20_000_000, 40_000_000];
    points(settings, &SIZES, 220_000).map(case).collect()
}
