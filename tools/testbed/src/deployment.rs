//! A deployment on loopback: simulated engines, warmroute and a real Envoy with the shipped
//! configuration, each a separate process. The files that a user would write (configuration and
//! workers file) are generated in one run directory, so that a failed run can be inspected.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::child_process::ChildProcess;
use crate::envoy::{self, EnvoySetup};
use crate::ports::{self, FreePort, PATIENCE, ReadyCheck};
use crate::programs::environment;

/// Model name that the simulated engines serve.
pub const MODEL: &str = "qwen2.5";
/// Tokens per block of the simulated engines.
pub const BLOCK_SIZE: usize = 16;
/// Time limit for clearing a prefix cache. It exceeds the time for which an engine holds blocks for
/// another engine.
const CLEAR: Duration = Duration::from_secs(30);

/// The programs of a deployment, each with its first arguments.
#[derive(Clone, Debug)]
pub struct ProgramCommands {
    /// The router.
    pub warmroute: Vec<OsString>,
    /// The engine simulator.
    pub engine: Vec<OsString>,
    /// The model that both load.
    pub model: ModelFiles,
}

/// Directory of a tokenizer and its configuration. `WARMROUTE_MODEL_DIR` overrides it.
#[derive(Clone, Copy, Debug)]
pub enum ModelFiles {
    /// The complete vocabulary.
    Complete,
    /// A reduced vocabulary for tests. It loads ten times faster, and every process of a test loads
    /// it.
    Reduced,
}

impl ModelFiles {
    /// Returns the path of a file.
    pub fn path(self, name: &str) -> PathBuf {
        let directory = match self {
            Self::Complete => "examples/models/qwen2.5",
            Self::Reduced => "tests/data/models/qwen2.5-small",
        };
        environment("WARMROUTE_MODEL_DIR")
            .map_or_else(|| crate::repository().join(directory), PathBuf::from)
            .join(name)
    }
}

/// Specification of one engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Worker id.
    pub id: u64,
    /// True if it has a replay endpoint.
    pub replay: bool,
    /// Further arguments of the simulator.
    pub args: Vec<String>,
    /// Additional keys of its workers file entry.
    pub worker_fields: Value,
}

impl EngineSpec {
    /// Returns an engine with default arguments.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            replay: true,
            args: Vec::new(),
            worker_fields: json!({}),
        }
    }

    /// Appends arguments of the simulator.
    pub fn with(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Sets additional keys of its workers file entry, such as its role.
    pub fn with_worker_fields(mut self, fields: Value) -> Self {
        self.worker_fields = fields;
        self
    }
}

/// One running engine.
pub struct EngineProcess {
    /// Its specification.
    pub spec: EngineSpec,
    /// Its HTTP address.
    pub address: SocketAddr,
    events_port: u16,
    replay_port: u16,
    child: Option<ChildProcess>,
}

impl EngineProcess {
    /// Starts an engine on free ports and waits until it responds.
    pub async fn start(
        programs: &ProgramCommands,
        spec: EngineSpec,
        run_dir: &Path,
    ) -> anyhow::Result<Self> {
        let [http_port, events_port, replay_port] =
            [FreePort::find()?, FreePort::find()?, FreePort::find()?].map(FreePort::release);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, http_port));
        let mut engine = Self {
            spec,
            address,
            events_port,
            replay_port,
            child: None,
        };
        engine.restart(programs, run_dir).await?;
        Ok(engine)
    }

    /// Restarts the engine on the same ports with an empty cache.
    pub async fn restart(
        &mut self,
        programs: &ProgramCommands,
        run_dir: &Path,
    ) -> anyhow::Result<()> {
        self.child = None;
        let mut command = command(&programs.engine);
        command.arg("--listen").arg(self.address.to_string());
        command.arg("--id").arg(self.spec.id.to_string());
        command.args(["--model", MODEL, "--block-size", &BLOCK_SIZE.to_string()]);
        command
            .arg("--tokenizer")
            .arg(programs.model.path("tokenizer.json.gz"));
        command
            .arg("--tokenizer-config")
            .arg(programs.model.path("tokenizer_config.json"));
        command
            .arg("--events-endpoint")
            .arg(format!("tcp://127.0.0.1:{}", self.events_port));
        if self.spec.replay {
            command
                .arg("--replay-endpoint")
                .arg(format!("tcp://127.0.0.1:{}", self.replay_port));
        }
        command.args(&self.spec.args);
        let child = ChildProcess::spawn(&format!("engine-{}", self.spec.id), &command, run_dir)?;
        ports::wait_ready(ReadyCheck::Http(&self.url("/health")), PATIENCE, &child).await?;
        self.child = Some(child);
        Ok(())
    }

    /// Returns a URL of the engine.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Clears the prefix cache. Retries while requests hold blocks.
    pub async fn clear_cache(&self) -> anyhow::Result<()> {
        let client = warmroute_runtime::tls::http_client_builder().build()?;
        let url = self.url("/reset_prefix_cache");
        let cleared = async || {
            let Ok(response) = client.post(&url).send().await else {
                return false;
            };
            let body: Value = response.json().await.unwrap_or_default();
            body["reset"] == json!([true])
        };
        ensure!(
            ports::until(CLEAR, cleared).await,
            "engine {} does not clear its prefix cache",
            self.spec.id
        );
        Ok(())
    }

    /// Kills the engine.
    pub fn kill9(&mut self) {
        if let Some(child) = &self.child {
            child.kill9();
        }
        self.child = None;
    }

    /// Returns the process id, if the engine runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(ChildProcess::pid)
    }

    /// Stops the process, if it runs.
    pub fn freeze(&self) {
        self.child.as_ref().inspect(|child| child.freeze());
    }

    /// Continues the process.
    pub fn thaw(&self) {
        self.child.as_ref().inspect(|child| child.thaw());
    }

    /// Returns its workers file entry.
    pub fn worker_entry(&self) -> Value {
        let mut events =
            json!({"endpoint": format!("tcp://127.0.0.1:{}", self.events_port), "topic": ""});
        if self.spec.replay {
            events["replay_endpoint"] = json!(format!("tcp://127.0.0.1:{}", self.replay_port));
        }
        let mut entry =
            json!({"id": self.spec.id, "endpoint": self.address.to_string(), "kv_events": events});
        if let (Some(entry), Some(fields)) =
            (entry.as_object_mut(), self.spec.worker_fields.as_object())
        {
            entry.extend(fields.clone());
        }
        entry
    }
}

/// Engines, warmroute and Envoy, each a process.
pub struct LocalDeployment {
    /// Directory of configurations and logs.
    pub run_dir: PathBuf,
    /// The engines.
    pub engines: Vec<EngineProcess>,
    /// The programs that it starts.
    pub programs: ProgramCommands,
    port: u16,
    admin_port: u16,
    envoy_admin_port: u16,
    router: Option<ChildProcess>,
    envoy: Option<ChildProcess>,
}

impl LocalDeployment {
    /// Starts the engines. [`LocalDeployment::start_router`] and [`LocalDeployment::start_envoy`]
    /// add warmroute and Envoy.
    pub async fn start_engines(
        programs: &ProgramCommands,
        specs: &[EngineSpec],
        run_dir: &Path,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(run_dir)?;
        let starting = specs
            .iter()
            .map(|spec| EngineProcess::start(programs, spec.clone(), run_dir));
        let engines = futures_util::future::try_join_all(starting).await?;
        let ports = [FreePort::find()?, FreePort::find()?, FreePort::find()?];
        let [port, admin_port, envoy_admin_port] = ports.map(FreePort::release);
        Ok(Self {
            run_dir: run_dir.to_owned(),
            engines,
            programs: programs.clone(),
            port,
            admin_port,
            envoy_admin_port,
            router: None,
            envoy: None,
        })
    }

    /// Starts everything with the shipped Envoy configuration. `overrides` are merged into
    /// warmroute's configuration.
    pub async fn start(
        programs: &ProgramCommands,
        specs: &[EngineSpec],
        run_dir: &Path,
        overrides: &Value,
    ) -> anyhow::Result<Self> {
        let mut deployment = Self::start_engines(programs, specs, run_dir).await?;
        deployment.write_workers()?;
        deployment.start_router(overrides).await?;
        let config = deployment.envoy_setup().standalone_config()?;
        deployment.start_envoy(&config).await?;
        Ok(deployment)
    }

    /// Returns the ports and the directory of its Envoy.
    pub fn envoy_setup(&self) -> EnvoySetup<'_> {
        EnvoySetup {
            run_dir: &self.run_dir,
            port: self.port,
            admin_port: self.envoy_admin_port,
        }
    }

    /// Writes the workers file of the engines. The file is replaced by a rename.
    pub fn write_workers(&self) -> anyhow::Result<()> {
        let entries: Vec<Value> = self
            .engines
            .iter()
            .map(EngineProcess::worker_entry)
            .collect();
        self.write_worker_entries(&json!(entries))
    }

    /// Replaces the workers file by a rename.
    pub fn write_worker_entries(&self, entries: &Value) -> anyhow::Result<()> {
        let new = tempfile::NamedTempFile::new_in(&self.run_dir)?;
        // JSON is YAML.
        fs::write(&new, serde_json::to_string_pretty(entries)?)?;
        new.persist(self.run_dir.join("workers.yaml"))?;
        Ok(())
    }

    /// Starts warmroute and waits until it is ready. It may have run before.
    pub async fn start_router(&mut self, overrides: &Value) -> anyhow::Result<()> {
        self.spawn_router(overrides)?;
        let router = self.router.as_ref().context("warmroute was just started")?;
        ports::wait_ready(
            ReadyCheck::Http(&self.admin_url("/readyz")),
            PATIENCE,
            router,
        )
        .await
    }

    /// Starts warmroute without waiting.
    pub fn spawn_router(&mut self, overrides: &Value) -> anyhow::Result<()> {
        self.router = None;
        let model = self.programs.model;
        let mut config = json!({
            "listeners": {
                "ext_proc": {"unix_socket": self.envoy_setup().ext_proc_socket()},
                "admin": {"address": format!("127.0.0.1:{}", self.admin_port)},
            },
            "models": [{
                "name": MODEL,
                "tokenizer": model.path("tokenizer.json.gz"),
                "tokenizer_config": model.path("tokenizer_config.json"),
                "block_size": BLOCK_SIZE,
            }],
            "workers": {"file": "workers.yaml"},
            // Examples and tests skip the grace period unless they set one.
            "process": {"drain": {"grace_period": "0s"}},
            // The default observes a random sample of responses completely. Tests need the same
            // observation for all.
            "gateway": {"observe": "first_token"},
            "envoy": {"endpoints_file": self.envoy_setup().endpoint_file()},
        });
        crate::merge_config(&mut config, overrides);
        let file = self.run_dir.join("warmroute.yaml");
        fs::write(&file, serde_json::to_string_pretty(&config)?)?;
        let mut command = command(&self.programs.warmroute);
        command.arg("serve").arg("--config").arg(&file);
        self.router = Some(ChildProcess::spawn("warmroute", &command, &self.run_dir)?);
        Ok(())
    }

    /// Starts Envoy, replacing a running one, and waits until it is ready.
    pub async fn start_envoy(&mut self, config: &str) -> anyhow::Result<()> {
        self.start_envoy_with_threads(config, 1).await
    }

    /// Starts Envoy with a number of worker threads, replacing a running one, and waits until it is
    /// ready.
    pub async fn start_envoy_with_threads(
        &mut self,
        config: &str,
        threads: u32,
    ) -> anyhow::Result<()> {
        self.envoy = None;
        let envoy = envoy::start(config, &self.run_dir, threads).await?;
        ports::wait_ready(
            ReadyCheck::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))),
            PATIENCE,
            &envoy,
        )
        .await?;
        self.envoy = Some(envoy);
        Ok(())
    }

    /// Returns the process of warmroute.
    pub fn router(&self) -> anyhow::Result<&ChildProcess> {
        self.router.as_ref().context("warmroute is not running")
    }

    /// Returns the process of Envoy.
    pub fn envoy(&self) -> anyhow::Result<&ChildProcess> {
        self.envoy.as_ref().context("Envoy is not running")
    }

    /// Starts another warmroute on the same addresses while the current one is shutting down, and
    /// waits until it is ready. Returns the old process.
    pub async fn replace_router(&mut self, overrides: &Value) -> anyhow::Result<ChildProcess> {
        let old = self.router.take().context("warmroute is not running")?;
        old.terminate();
        // Without this check, the old process could answer the readiness check.
        let page = self.admin_url("/readyz");
        let client = warmroute_runtime::tls::http_client_builder().build()?;
        let ready = async || {
            client
                .get(&page)
                .send()
                .await
                .is_ok_and(|answer| answer.status().is_success())
        };
        ensure!(
            ports::until(PATIENCE, async || !ready().await).await,
            "the old process stays ready:\n{}",
            old.log_tail()
        );
        self.start_router(overrides).await?;
        Ok(old)
    }

    /// Kills warmroute.
    pub fn kill9_router(&mut self) {
        if let Some(router) = self.router.take() {
            router.kill9();
        }
    }

    /// Returns a URL through Envoy.
    pub fn url(&self, path: &str) -> String {
        self.envoy_setup().url(path)
    }

    /// Returns a URL of warmroute's admin pages.
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.admin_port)
    }

    /// Fetches one of warmroute's debug pages.
    pub async fn debug_page(&self, page: &str) -> anyhow::Result<Value> {
        let client = warmroute_runtime::tls::http_client_builder().build()?;
        let response = client
            .get(self.admin_url(&format!("/debug/{page}")))
            .send()
            .await?;
        ensure!(
            response.status().is_success(),
            "/debug/{page} answers {}",
            response.status()
        );
        Ok(response.json().await?)
    }

    /// Returns the ids of all running processes.
    pub fn pids(&self) -> Vec<u32> {
        let parts = [self.router.as_ref(), self.envoy.as_ref()];
        parts
            .into_iter()
            .flatten()
            .map(ChildProcess::pid)
            .chain(self.engines.iter().filter_map(EngineProcess::pid))
            .collect()
    }
}

fn command(program: &[OsString]) -> Command {
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]);
    command
}
