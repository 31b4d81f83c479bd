//! Three setups with the same engines and one Envoy each: without an external processor, with one
//! that answers at once, and with warmroute. Only one setup gets requests at a time.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::deployment::{LocalDeployment, ModelFiles, ProgramCommands};
use warmroute_testbed::envoy;
use warmroute_testbed::ports::{self, FreePort, ReadyCheck};

use crate::helper_programs::{AS_BARE_SERVER, AS_INSTANT_ENGINES, AS_WARMROUTE};
use crate::instant_engines;
use crate::process_usage::CpuTimes;

const START: Duration = Duration::from_secs(60);

/// Interval without CPU use after which a server counts as idle.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);

/// The external processor of a setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetupKind {
    /// None.
    EnvoyAlone,
    /// A processor that answers at once.
    BareServer,
    /// warmroute.
    Warmroute,
}

impl SetupKind {
    pub(crate) const ALL: [Self; 3] = [Self::EnvoyAlone, Self::BareServer, Self::Warmroute];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::EnvoyAlone => "Envoy alone",
            Self::BareServer => "bare ext_proc",
            Self::Warmroute => "warmroute",
        }
    }
}

/// Settings of all setups.
#[derive(Clone, Debug)]
pub struct SetupSettings {
    /// Workers, each with one rank.
    pub workers: usize,
    /// True if both servers subscribe to response bodies.
    pub observes_bodies: bool,
    /// True if both servers run with the configuration for gateways, which sends bodies in full
    /// duplex.
    pub is_full_duplex: bool,
    /// Worker threads of each Envoy.
    pub threads: u32,
    /// The warmroute program with its first arguments. If empty, this program runs warmroute.
    pub warmroute: Vec<OsString>,
    /// The model that warmroute loads.
    pub model: ModelFiles,
}

/// One of the setups.
pub(crate) struct LoadSetup {
    pub(crate) kind: SetupKind,
    pub(crate) deployment: LocalDeployment,
    bare_server: Option<ChildProcess>,
}

impl LoadSetup {
    pub(crate) fn envoy_pid(&self) -> u32 {
        self.deployment.envoy().map_or(0, ChildProcess::pid)
    }

    /// Returns the process id of the external processor, if there is one.
    pub(crate) fn server_pid(&self) -> Option<u32> {
        self.bare_server
            .as_ref()
            .or(self.deployment.router().ok())
            .map(ChildProcess::pid)
    }

    pub(crate) fn url(&self) -> String {
        self.deployment.url("/v1/chat/completions")
    }
}

/// All setups.
pub struct LoadSetups {
    pub(crate) setups: Vec<LoadSetup>,
    pub(crate) engines: ChildProcess,
}

impl LoadSetups {
    /// Starts the engines and all setups.
    pub async fn start(settings: &SetupSettings, dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let first = SocketAddr::from(([127, 0, 0, 1], FreePort::find()?.release()));
        let engines = start_engines(&[], first, settings.workers, dir).await?;
        let mut setups = Vec::new();
        for kind in SetupKind::ALL {
            setups.push(LoadSetup::start(kind, settings, first, dir).await?);
        }
        Ok(Self { setups, engines })
    }
}

/// Starts engines with consecutive addresses in one process. `args` are further arguments of
/// [`InstantEngineArgs`](instant_engines::InstantEngineArgs).
pub(crate) async fn start_engines(
    args: &[OsString],
    first: SocketAddr,
    count: usize,
    dir: &Path,
) -> anyhow::Result<ChildProcess> {
    let mut command = helper_command(&[AS_INSTANT_ENGINES, "--first", &first.to_string()])?;
    command.args(["--workers", &count.to_string()]).args(args);
    let engines = ChildProcess::spawn("engines", &command, dir)?;
    ports::wait_ready(
        ReadyCheck::Http(&format!("http://{first}/health")),
        START,
        &engines,
    )
    .await?;
    Ok(engines)
}

impl LoadSetup {
    /// Starts one setup in front of engines with consecutive addresses.
    async fn start(
        kind: SetupKind,
        settings: &SetupSettings,
        first_engine: SocketAddr,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let dir = dir.join(format!("{kind:?}").to_lowercase());
        let programs = ProgramCommands {
            warmroute: settings.warmroute_command()?,
            engine: Vec::new(),
            model: settings.model,
        };
        let mut deployment = LocalDeployment::start_engines(&programs, &[], &dir).await?;
        let endpoints: Vec<_> =
            instant_engines::addresses(first_engine, settings.workers).collect();
        let mut config = match settings.is_full_duplex && kind != SetupKind::EnvoyAlone {
            true => deployment
                .envoy_setup()
                .shipped_config("gateway-api", &[])?,
            false => deployment.envoy_setup().standalone_config()?,
        };
        let mut bare_server = None;
        if kind == SetupKind::Warmroute {
            deployment.write_worker_entries(&worker_entries(&endpoints))?;
            deployment.start_router(&warmroute_config(settings)).await?;
        } else {
            envoy::write_endpoints(&deployment.envoy_setup().endpoint_file(), &endpoints)?;
        }
        if kind == SetupKind::BareServer {
            let socket = deployment.envoy_setup().ext_proc_socket();
            let command = bare_server_command(settings, first_engine, &socket)?;
            let child = ChildProcess::spawn("bare", &command, &dir)?;
            ports::wait_ready(ReadyCheck::Unix(&socket), START, &child).await?;
            bare_server = Some(child);
        }
        if kind == SetupKind::EnvoyAlone {
            config = envoy::round_robin_config(&config)?;
        }
        deployment
            .start_envoy_with_threads(&config, settings.threads)
            .await?;
        let setup = Self {
            kind,
            deployment,
            bare_server,
        };
        if let Some(server) = setup.server_pid() {
            wait_idle(server).await?;
        }
        Ok(setup)
    }
}

impl SetupSettings {
    pub(crate) fn warmroute_command(&self) -> anyhow::Result<Vec<OsString>> {
        if !self.warmroute.is_empty() {
            return Ok(self.warmroute.clone());
        }
        let own = std::env::current_exe()?.into_os_string();
        Ok(vec![own, AS_WARMROUTE.into()])
    }
}

fn worker_entries(endpoints: &[SocketAddr]) -> Value {
    (1..)
        .zip(endpoints)
        .map(|(id, endpoint): (u64, _)| json!({"id": id, "endpoint": endpoint.to_string()}))
        .collect()
}

fn bare_server_command(
    settings: &SetupSettings,
    first_engine: SocketAddr,
    socket: &Path,
) -> anyhow::Result<Command> {
    let first = first_engine.to_string();
    let workers = settings.workers.to_string();
    let mut command = helper_command(&[AS_BARE_SERVER, "--first", &first, "--workers", &workers])?;
    command
        .arg("--socket")
        .arg(socket)
        .args(settings.observes_bodies.then_some("--watch"));
    Ok(command)
}

/// Waits until a server has finished the background work that follows its first requests. This work
/// is not part of a request's cost.
async fn wait_idle(server: u32) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + START;
    while tokio::time::Instant::now() < deadline {
        let before = CpuTimes::read(server);
        tokio::time::sleep(IDLE_INTERVAL).await;
        if CpuTimes::read(server).micros_since(&before) < IDLE_INTERVAL.as_micros() as f64 / 20.0 {
            return Ok(());
        }
    }
    anyhow::bail!("process {server} still uses CPU after {START:?}")
}

/// Returns warmroute's configuration. It is the default one without engine discovery, because these
/// engines have no model.
fn warmroute_config(settings: &SetupSettings) -> Value {
    let observe = if settings.observes_bodies {
        "usage"
    } else {
        "first_token"
    };
    json!({
        "engines": {"discovery": {"enabled": false}, "parity_check": {"enabled": false}},
        "gateway": {"observe": observe},
    })
}

fn helper_command(args: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args);
    Ok(command)
}
