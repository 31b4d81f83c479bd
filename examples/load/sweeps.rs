//! What is varied: one thing at a time, everything else as it is by default.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use bytes::Bytes;
use clap::ValueEnum;
use serde_json::{Value, json};

use crate::bed::{Bed, Setting, Side, Way};
use crate::bodies::{Sessions, Writer};
use crate::client::{self, Held, Plan};
use crate::measure;
use crate::report::{Measured, Report};
use crate::support::ports;
use crate::support::stack::MODEL;

/// What is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sweep {
    /// Bytes of a request, 1 KB to 4 MB; chats of 220 KB over 20 to 150 connections
    Body,
    /// Tokens of a prompt, 1k to 1M
    Prompt,
    /// Worker ranks, 4 to 4,096
    Ranks,
    /// Answers that are open meanwhile, 1 to 10,000
    Streams,
    /// Pieces of an answer, 1 to 10,000; seen as by default, and all of them
    Chunks,
}

impl Sweep {
    pub(crate) const ALL: [Self; 5] = [
        Self::Body,
        Self::Prompt,
        Self::Ranks,
        Self::Streams,
        Self::Chunks,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Body => "body",
            Self::Prompt => "prompt",
            Self::Ranks => "ranks",
            Self::Streams => "streams",
            Self::Chunks => "chunks",
        }
    }
}

/// How much is done.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    /// Rounds of each case, in each of which every side has its turn.
    pub(crate) rounds: usize,
    /// How long a turn takes at most.
    pub(crate) turn: Duration,
    /// How many requests it has at most.
    pub(crate) requests: usize,
    /// Whether only one point of each sweep is measured.
    pub(crate) short: bool,
    pub(crate) threads: u32,
    pub(crate) seed: u64,
    /// Whether no request is to be routed by its prompt.
    pub(crate) by_load: bool,
    /// Another warmroute than this one.
    pub(crate) ours: Vec<OsString>,
}

/// One point of a sweep.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) sweep: &'static str,
    pub(crate) name: String,
    /// Where on the curve.
    pub(crate) at: Value,
    pub(crate) bytes: usize,
    pub(crate) warm: bool,
    /// The model that is asked for.
    pub(crate) model: &'static str,
    /// Bytes of a system prompt that all sessions share.
    pub(crate) shared: Option<usize>,
    pub(crate) connections: usize,
    pub(crate) chunks: usize,
    pub(crate) held: usize,
}

/// A model that nobody serves.
pub(crate) const UNKNOWN: &str = "nobody-serves-this";
/// Most bytes of bodies that are made for one round.
const MOST_BYTES: usize = 96_000_000;
/// Sessions beyond one per connection, so that a turn is over when the next one is sent.
const MORE_SESSIONS: usize = 16;
/// As many ranks as the sweeps that do not vary them have.
const WORKERS: usize = 8;
/// How long it may take until everything is warm.
const WARM_UP: Duration = Duration::from_secs(60);
/// How long what was open may take to close.
const CLOSE: Duration = Duration::from_secs(60);

impl Case {
    fn new(
        sweep: Sweep,
        (name, at): (String, Value),
        (bytes, warm): (usize, bool),
        connections: usize,
    ) -> Self {
        let name = format!("{name}, {}", if warm { "warm" } else { "cold" });
        Self {
            sweep: sweep.name(),
            at,
            ..Self::of(name, (bytes, warm), connections)
        }
    }

    /// A case of its own.
    pub(crate) fn of(name: String, (bytes, warm): (usize, bool), connections: usize) -> Self {
        let (sweep, at) = ("", Value::Null);
        Self {
            sweep,
            name,
            at,
            bytes,
            warm,
            model: MODEL,
            shared: None,
            connections,
            chunks: 1,
            held: 0,
        }
    }
}

/// Where requests come from.
enum Source {
    Cold(Box<Writer>, usize),
    Warm(Box<Sessions>),
}

impl Source {
    fn of(case: &Case, seed: u64) -> Self {
        let mut writer = Writer::new(seed).asking_for(case.model);
        let system = case.shared.map(|bytes| writer.system(bytes));
        match case.warm {
            false => Self::Cold(Box::new(writer), case.bytes),
            true => {
                let count = case.connections + MORE_SESSIONS;
                Self::Warm(Box::new(Sessions::open(
                    writer,
                    system.as_deref(),
                    (case.bytes, count),
                )))
            }
        }
    }

    /// What is sent before anything counts.
    fn first(&mut self, connections: usize) -> Vec<Bytes> {
        match self {
            Self::Cold(writer, bytes) => writer.colds(*bytes, 2 * connections),
            Self::Warm(sessions) => sessions.first(),
        }
    }

    fn next(&mut self, count: usize) -> Vec<Bytes> {
        match self {
            Self::Cold(writer, bytes) => writer.colds(*bytes, count),
            Self::Warm(sessions) => sessions.turns(count),
        }
    }
}

/// Measures one case, the sides in turns.
pub(crate) async fn measure(
    bed: &Bed,
    mut case: Case,
    extent: &Extent,
) -> anyhow::Result<Measured> {
    let http = client::client()?;
    if extent.by_load {
        case.model = UNKNOWN;
        case.name += ", by load";
    }
    // Another case must not send what this one has sent.
    let seed = extent.seed
        ^ (case
            .name
            .bytes()
            .fold(0, |sum: u64, byte| sum.wrapping_mul(31) + u64::from(byte))
            << 8);
    let mut source = Source::of(&case, seed);
    let plan = Plan::new(case.connections, extent.turn).chunks(case.chunks);
    let first = Arc::new(source.first(case.connections));
    for way in &bed.ways {
        // Gently: what was refused for being too much at once would not be known afterwards.
        let all = Plan {
            most: WARM_UP,
            connections: 2,
            ..plan.clone()
        };
        let round = client::drive(&http, &way.url(), &first, &all).await?;
        ensure!(
            round.errors.is_empty(),
            "{}: {}",
            way.side.name(),
            round.errors[0]
        );
    }
    let enough = extent
        .requests
        .min((40_000 / case.chunks).max(case.connections));
    let count = (MOST_BYTES / case.bytes)
        .max(2 * case.connections)
        .min(enough);
    let mut rounds: Vec<_> = Side::ALL.iter().map(|side| (*side, Vec::new())).collect();
    for _ in 0..extent.rounds {
        let bodies = Arc::new(source.next(count));
        for (way, (_, rounds)) in bed.ways.iter().zip(&mut rounds) {
            let held = Held::open(&way.url(), &bodies[0], case.held).await?;
            let mut sample = measure::round(&http, (bed, way), &bodies, &plan).await?;
            if case.model == UNKNOWN {
                sample.by_prompt = 1.0;
            }
            rounds.push(sample);
            drop(held);
            quiet(&http, way).await?;
        }
    }
    Ok(Measured { case, rounds })
}

/// Waits until nothing is open any longer.
async fn quiet(http: &reqwest::Client, way: &Way) -> anyhow::Result<()> {
    let url = way
        .stack
        .standalone()
        .admin_url("/stats?filter=http.ingress.downstream_rq_active");
    let ended = async || match http.get(&url).send().await {
        Ok(page) => page
            .text()
            .await
            .is_ok_and(|text| text.trim_end().ends_with(": 0")),
        Err(_) => false,
    };
    ensure!(
        ports::until(CLOSE, ended).await,
        "{}: requests are open for {CLOSE:?} after their end",
        way.side.name()
    );
    if way.side == Side::Ours {
        let url = way.stack.admin_url("/metrics");
        let left = async || match http.get(&url).send().await {
            Ok(page) => page
                .text()
                .await
                .is_ok_and(|text| text.contains("warmroute_exchanges_open 0\n")),
            Err(_) => false,
        };
        ensure!(
            ports::until(CLOSE, left).await,
            "exchanges are open {CLOSE:?} after their requests' end"
        );
    }
    Ok(())
}

/// Runs one sweep and enters what it shows.
pub(crate) async fn run(
    sweep: Sweep,
    extent: &Extent,
    dir: &Path,
    report: &mut Report,
) -> anyhow::Result<()> {
    let ours = extent.ours.clone();
    let setting = Setting {
        workers: WORKERS,
        watch: false,
        threads: extent.threads,
        ours,
    };
    let dir = dir.join(sweep.name());
    match sweep {
        Sweep::Body => {
            let bed = Bed::start(&setting, &dir).await?;
            each(&bed, sizes(extent), extent, report).await?;
            let chats = each(&bed, chats(extent), extent, report).await?;
            crate::goals::enter(&chats, report);
        }
        Sweep::Prompt => {
            let bed = Bed::start(&setting, &dir).await?;
            each(&bed, prompts(extent), extent, report).await?;
        }
        Sweep::Ranks => {
            for ranks in points(extent, &[4, 64, 512, 2_048, 4_096], 64) {
                let bed = Bed::start(
                    &Setting {
                        workers: ranks,
                        ..setting.clone()
                    },
                    &dir.join(ranks.to_string()),
                )
                .await?;
                let at = (format!("{ranks} ranks"), json!({"ranks": ranks}));
                let case = Case {
                    shared: Some(4_000),
                    ..Case::new(sweep, at, (8_000, true), 16)
                };
                each(&bed, vec![case], extent, report).await?;
            }
        }
        Sweep::Streams => {
            let bed = Bed::start(&setting, &dir).await?;
            let case = |held| {
                let at = (format!("{held} answers open"), json!({"streams": held}));
                Case {
                    held,
                    ..Case::new(sweep, at, (1_000, false), 8)
                }
            };
            let cases = points(extent, &[1, 10, 100, 1_000, 5_000, 10_000], 1_000)
                .map(case)
                .collect();
            each(&bed, cases, extent, report).await?;
        }
        Sweep::Chunks => {
            for watch in [false, true] {
                let (dir, seen) = (
                    dir.join(watch.to_string()),
                    if watch { "all" } else { "first" },
                );
                let bed = Bed::start(
                    &Setting {
                        watch,
                        ..setting.clone()
                    },
                    &dir,
                )
                .await?;
                let case = |chunks| {
                    let at = (
                        format!("{chunks} pieces, {seen} seen"),
                        json!({"chunks": chunks, "seen": seen}),
                    );
                    Case {
                        chunks,
                        ..Case::new(sweep, at, (1_000, false), 8)
                    }
                };
                let cases = points(extent, &[1, 10, 100, 1_000, 10_000], 100)
                    .map(case)
                    .collect();
                each(&bed, cases, extent, report).await?;
            }
        }
    }
    Ok(())
}

async fn each(
    bed: &Bed,
    cases: Vec<Case>,
    extent: &Extent,
    report: &mut Report,
) -> anyhow::Result<Vec<Measured>> {
    let mut all = Vec::new();
    for case in cases {
        let measured = measure(bed, case, extent).await?;
        report.point(&measured)?;
        all.push(measured);
    }
    Ok(all)
}

fn points(
    extent: &Extent,
    all: &'static [usize],
    one: usize,
) -> impl Iterator<Item = usize> + use<> {
    let short = extent.short;
    all.iter()
        .copied()
        .filter(move |point| !short || *point == one)
}

fn sizes(extent: &Extent) -> Vec<Case> {
    let sizes = points(
        extent,
        &[1_000, 4_000, 32_000, 128_000, 1_000_000, 4_000_000],
        4_000,
    );
    let case = |bytes: usize| {
        [false, true].map(|warm| {
            let at = (
                format!("{} KB, c = 16", bytes / 1_000),
                json!({"bytes": bytes, "connections": 16, "warm": warm}),
            );
            Case::new(Sweep::Body, at, (bytes, warm), 16)
        })
    };
    sizes.flat_map(case).collect()
}

fn chats(extent: &Extent) -> Vec<Case> {
    let case = |connections: usize| {
        [false, true].map(|warm| {
            let at = json!({"bytes": crate::goals::CHAT, "connections": connections, "warm": warm});
            let at = (format!("220 KB chat, c = {connections}"), at);
            Case::new(Sweep::Body, at, (crate::goals::CHAT, warm), connections)
        })
    };
    points(extent, &crate::goals::CONNECTIONS, 20)
        .flat_map(case)
        .collect()
}

/// Bytes of a token of these chats, about.
const BYTES_PER_TOKEN: f64 = 5.0;

fn prompts(extent: &Extent) -> Vec<Case> {
    let tokens = points(
        extent,
        &[1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000],
        16_000,
    );
    let case = |tokens: usize| {
        [false, true].map(|warm| {
            let at = (
                format!("{tokens} tokens, c = 2"),
                json!({"tokens": tokens, "warm": warm}),
            );
            Case::new(
                Sweep::Prompt,
                at,
                ((tokens as f64 * BYTES_PER_TOKEN) as usize, warm),
                2,
            )
        })
    };
    tokens.flat_map(case).collect()
}
