//! Three ways to the same engines, each with an Envoy of its own: without an external processor, with one that answers at
//! once, and with warmroute. Only one of them is driven at a time.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::answers;
use crate::meter::Cpu;
use crate::support::child::Child;
use crate::support::envoy;
use crate::support::ports::{self, FreePort, Ready};
use crate::support::stack::{Programs, Stack};

/// The first argument under which the own program is each of the others.
pub(crate) const AS_ANSWERS: &str = "as-answers";
pub(crate) const AS_BARE: &str = "as-bare";
pub(crate) const AS_WARMROUTE: &str = "as-warmroute";

const START: Duration = Duration::from_secs(60);

/// A server rests that did hardly anything for so long.
const LOOK: Duration = Duration::from_millis(500);

/// Who is asked on a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Alone,
    Bare,
    Ours,
}

impl Side {
    pub(crate) const ALL: [Self; 3] = [Self::Alone, Self::Bare, Self::Ours];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alone => "Envoy alone",
            Self::Bare => "bare ext_proc",
            Self::Ours => "warmroute",
        }
    }
}

/// What is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Workers, each with one rank.
    pub(crate) workers: usize,
    /// Whether the bodies of answers are shown to both servers.
    pub(crate) watch: bool,
    /// Worker threads of each Envoy.
    pub(crate) threads: u32,
    /// The program that is warmroute, with its first arguments; this one if there is none.
    pub(crate) ours: Vec<OsString>,
}

/// One of the ways.
pub(crate) struct Way {
    pub(crate) side: Side,
    pub(crate) stack: Stack,
    bare: Option<Child>,
}

impl Way {
    pub(crate) fn envoy(&self) -> u32 {
        self.stack.envoy().map_or(0, Child::pid)
    }

    /// The external processor, where there is one.
    pub(crate) fn server(&self) -> Option<u32> {
        self.bare
            .as_ref()
            .or(self.stack.router().ok())
            .map(Child::pid)
    }

    pub(crate) fn url(&self) -> String {
        self.stack.url("/v1/chat/completions")
    }
}

/// All of them.
pub(crate) struct Bed {
    pub(crate) ways: Vec<Way>,
    pub(crate) engines: Child,
}

impl Bed {
    pub(crate) async fn start(setting: &Setting, dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let first = SocketAddr::from(([127, 0, 0, 1], FreePort::find()?.release()));
        let workers = setting.workers.to_string();
        let engines = again(&[
            AS_ANSWERS,
            "--first",
            &first.to_string(),
            "--workers",
            &workers,
        ])?;
        let engines = Child::spawn("answers", &engines, dir)?;
        ports::wait_ready(
            Ready::Http(&format!("http://{first}/health")),
            START,
            &engines,
        )
        .await?;
        let mut ways = Vec::new();
        for side in Side::ALL {
            ways.push(way(side, setting, first, dir).await?);
        }
        Ok(Self { ways, engines })
    }
}

async fn way(side: Side, setting: &Setting, first: SocketAddr, dir: &Path) -> anyhow::Result<Way> {
    let dir = dir.join(format!("{side:?}").to_lowercase());
    let own = vec![
        std::env::current_exe()?.into_os_string(),
        AS_WARMROUTE.into(),
    ];
    let ours = Some(&setting.ours)
        .filter(|ours| !ours.is_empty())
        .unwrap_or(&own);
    let programs = Programs {
        warmroute: ours.clone(),
        engine: Vec::new(),
    };
    let mut stack = Stack::engines(&programs, &[], &dir).await?;
    let endpoints: Vec<_> = answers::addresses(first, setting.workers).collect();
    let mut config = stack.standalone().config()?;
    let mut bare = None;
    if side == Side::Ours {
        let entry = |(id, endpoint): (usize, &SocketAddr)| json!({"id": id + 1, "endpoint": endpoint.to_string()});
        stack.write_worker_entries(&endpoints.iter().enumerate().map(entry).collect())?;
        stack.start_router(&further(setting)).await?;
    } else {
        envoy::write_endpoints(&stack.standalone().endpoint_file(), &endpoints)?;
    }
    if side == Side::Bare {
        let (first, workers) = (first.to_string(), setting.workers.to_string());
        let socket = stack.standalone().ext_proc_socket();
        let mut command = again(&[AS_BARE, "--first", &first, "--workers", &workers])?;
        command
            .arg("--socket")
            .arg(&socket)
            .args(setting.watch.then_some("--watch"));
        let child = Child::spawn("bare", &command, &dir)?;
        ports::wait_ready(Ready::Unix(&socket), START, &child).await?;
        bare = Some(child);
    }
    if side == Side::Alone {
        config = envoy::round_robin(&config)?;
    }
    stack.start_wide_envoy(&config, setting.threads).await?;
    let way = Way { side, stack, bare };
    if let Some(server) = way.server() {
        rests(server).await?;
    }
    Ok(way)
}

/// Waits until a server has made ready what it makes beside its first requests; that is nobody's share of a request.
async fn rests(server: u32) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + START;
    while tokio::time::Instant::now() < deadline {
        let before = Cpu::of(server);
        tokio::time::sleep(LOOK).await;
        if Cpu::of(server).micros_since(&before) < LOOK.as_micros() as f64 / 20.0 {
            return Ok(());
        }
    }
    anyhow::bail!("process {server} has not come to rest")
}

/// The defaults, but that engines without a model are not asked what they are.
fn further(setting: &Setting) -> Value {
    let observe = if setting.watch {
        "usage"
    } else {
        "first_token"
    };
    json!({"learn": {"enabled": false}, "self_test": {"enabled": false}, "observe": observe})
}

fn again(args: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args);
    Ok(command)
}

/// Whether the program was started to be one of the others: its first argument, and the rest.
pub(crate) fn called_as() -> (Option<String>, Vec<OsString>) {
    let mut args = std::env::args_os();
    let (own, first) = (args.next(), args.next());
    let first = first.and_then(|first| first.into_string().ok());
    (first, own.into_iter().chain(args).collect())
}

/// Becomes another of the programs, if the first argument says so.
pub(crate) fn be(
    first: Option<&str>,
    args: Vec<OsString>,
) -> Option<anyhow::Result<std::process::ExitCode>> {
    use clap::Parser as _;
    let run = |work| -> anyhow::Result<std::process::ExitCode> {
        block_on(work)?;
        Ok(std::process::ExitCode::SUCCESS)
    };
    match first? {
        AS_ANSWERS => Some(run(Work::Answers(answers::AnswersCli::parse_from(args)))),
        AS_BARE => Some(run(Work::Bare(crate::bare::BareCli::parse_from(args)))),
        AS_WARMROUTE => Some(Ok(warmroute::cmd::main(warmroute::cli::Cli::parse_from(
            args,
        )))),
        _ => None,
    }
}

enum Work {
    Answers(answers::AnswersCli),
    Bare(crate::bare::BareCli),
}

fn block_on(work: Work) -> anyhow::Result<()> {
    match work {
        // One thread does for what does nothing.
        Work::Answers(cli) => tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(answers::serve(cli)),
        // As warmroute has it.
        Work::Bare(cli) => tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?
            .block_on(crate::bare::serve(cli)),
    }
}
