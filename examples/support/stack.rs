//! A whole deployment on loopback: simulated engines, warmroute and a real Envoy with the shipped configuration, each a
//! process of its own. What a user would write by hand, the configuration and the workers file, is written here into one
//! run directory, so that a failed run can be looked at.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::child::Child;
use super::envoy::{self, Standalone};
use super::ports::{self, FreePort, Ready};

/// The name under which the simulated engines serve.
pub(crate) const MODEL: &str = "qwen2.5";
/// Tokens per block of the simulated engines.
pub(crate) const BLOCK_SIZE: usize = 16;
/// How long any part may take from start to ready; a busy machine loads a tokenizer in seconds.
const START: Duration = Duration::from_secs(60);

/// The programs, each with the arguments that come before all others.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    pub(crate) warmroute: Vec<OsString>,
    pub(crate) engine: Vec<OsString>,
}

/// One engine as it is to be.
#[derive(Clone, Debug)]
pub(crate) struct EngineSpec {
    pub(crate) id: u64,
    /// Whether it keeps a replay endpoint.
    pub(crate) replay: bool,
    /// Further arguments of the simulator.
    pub(crate) args: Vec<String>,
    /// What its entry in the workers file says beyond where it is.
    pub(crate) more: Value,
}

impl EngineSpec {
    pub(crate) fn new(id: u64) -> Self {
        Self {
            id,
            replay: true,
            args: Vec::new(),
            more: json!({}),
        }
    }

    pub(crate) fn with(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Adds keys to its entry in the workers file, such as its role.
    pub(crate) fn listed(mut self, more: Value) -> Self {
        self.more = more;
        self
    }
}

/// One running engine.
pub(crate) struct Engine {
    pub(crate) spec: EngineSpec,
    pub(crate) address: SocketAddr,
    events: u16,
    replay: u16,
    child: Option<Child>,
}

impl Engine {
    /// Starts an engine on free ports and waits until it answers.
    pub(crate) async fn start(
        programs: &Programs,
        spec: EngineSpec,
        run_dir: &Path,
    ) -> anyhow::Result<Self> {
        let [http, events, replay] =
            [FreePort::find()?, FreePort::find()?, FreePort::find()?].map(FreePort::release);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, http));
        let mut engine = Self {
            spec,
            address,
            events,
            replay,
            child: None,
        };
        engine.restart(programs, run_dir).await?;
        Ok(engine)
    }

    /// Starts it again, on the same ports and with an empty cache.
    pub(crate) async fn restart(
        &mut self,
        programs: &Programs,
        run_dir: &Path,
    ) -> anyhow::Result<()> {
        self.child = None;
        let mut command = command(&programs.engine);
        command.arg("--listen").arg(self.address.to_string());
        command.arg("--id").arg(self.spec.id.to_string());
        command.args(["--model", MODEL, "--block-size", &BLOCK_SIZE.to_string()]);
        command
            .arg("--tokenizer")
            .arg(model_file("tokenizer.json.gz"));
        command
            .arg("--tokenizer-config")
            .arg(model_file("tokenizer_config.json"));
        command
            .arg("--events-endpoint")
            .arg(format!("tcp://127.0.0.1:{}", self.events));
        if self.spec.replay {
            command
                .arg("--replay-endpoint")
                .arg(format!("tcp://127.0.0.1:{}", self.replay));
        }
        command.args(&self.spec.args);
        let child = Child::spawn(&format!("engine-{}", self.spec.id), &command, run_dir)?;
        ports::wait_ready(Ready::Http(&self.url("/health")), START, &child).await?;
        self.child = Some(child);
        Ok(())
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Ends it without asking.
    pub(crate) fn kill9(&mut self) {
        if let Some(child) = &self.child {
            child.kill9();
        }
        self.child = None;
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::pid)
    }

    /// Stops it where it is, if it runs.
    pub(crate) fn freeze(&self) {
        self.child.as_ref().inspect(|child| child.freeze());
    }

    /// Lets it go on.
    pub(crate) fn thaw(&self) {
        self.child.as_ref().inspect(|child| child.thaw());
    }

    /// Its entry in the workers file.
    pub(crate) fn entry(&self) -> Value {
        let mut events =
            json!({"endpoint": format!("tcp://127.0.0.1:{}", self.events), "topic": ""});
        if self.spec.replay {
            events["replay"] = json!(format!("tcp://127.0.0.1:{}", self.replay));
        }
        let mut entry =
            json!({"id": self.spec.id, "endpoint": self.address.to_string(), "kv_events": events});
        if let (Some(entry), Some(more)) = (entry.as_object_mut(), self.spec.more.as_object()) {
            entry.extend(more.clone());
        }
        entry
    }
}

/// A deployment.
pub(crate) struct Stack {
    pub(crate) run_dir: PathBuf,
    pub(crate) engines: Vec<Engine>,
    pub(crate) programs: Programs,
    port: u16,
    admin_port: u16,
    envoy_admin_port: u16,
    router: Option<Child>,
    envoy: Option<Child>,
}

impl Stack {
    /// Starts the engines; warmroute and Envoy come with [`Stack::start_router`] and [`Stack::start_envoy`].
    pub(crate) async fn engines(
        programs: &Programs,
        specs: &[EngineSpec],
        run_dir: &Path,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(run_dir)?;
        let starting = specs
            .iter()
            .map(|spec| Engine::start(programs, spec.clone(), run_dir));
        let engines = futures_util::future::try_join_all(starting).await?;
        let ports = [FreePort::find()?, FreePort::find()?, FreePort::find()?];
        let [port, admin_port, envoy_admin_port] = ports.map(FreePort::release);
        let (run_dir, programs) = (run_dir.to_owned(), programs.clone());
        Ok(Self {
            run_dir,
            engines,
            programs,
            port,
            admin_port,
            envoy_admin_port,
            router: None,
            envoy: None,
        })
    }

    /// Starts everything with the shipped Envoy configuration; `more` is laid over warmroute's configuration.
    pub(crate) async fn start(
        programs: &Programs,
        specs: &[EngineSpec],
        run_dir: &Path,
        more: &Value,
    ) -> anyhow::Result<Self> {
        let mut stack = Self::engines(programs, specs, run_dir).await?;
        stack.write_workers()?;
        stack.start_router(more).await?;
        let config = stack.standalone().config()?;
        stack.start_envoy(&config).await?;
        Ok(stack)
    }

    pub(crate) fn standalone(&self) -> Standalone<'_> {
        Standalone {
            run_dir: &self.run_dir,
            port: self.port,
            admin_port: self.envoy_admin_port,
        }
    }

    /// Writes the workers file from the engines, by a rename.
    pub(crate) fn write_workers(&self) -> anyhow::Result<()> {
        let entries: Vec<Value> = self.engines.iter().map(Engine::entry).collect();
        self.write_worker_entries(&json!(entries))
    }

    pub(crate) fn write_worker_entries(&self, entries: &Value) -> anyhow::Result<()> {
        let new = tempfile::NamedTempFile::new_in(&self.run_dir)?;
        // JSON is YAML.
        fs::write(&new, serde_json::to_string_pretty(entries)?)?;
        new.persist(self.run_dir.join("workers.yaml"))?;
        Ok(())
    }

    /// Starts warmroute, again where it was ended, and waits until it is ready.
    pub(crate) async fn start_router(&mut self, more: &Value) -> anyhow::Result<()> {
        self.spawn_router(more)?;
        let router = self.router.as_ref().context("warmroute was just started")?;
        ports::wait_ready(Ready::Http(&self.admin_url("/readyz")), START, router).await
    }

    /// Starts warmroute without waiting.
    pub(crate) fn spawn_router(&mut self, more: &Value) -> anyhow::Result<()> {
        self.router = None;
        let mut config = json!({
            "listen": {"unix": self.standalone().ext_proc_socket()},
            "admin": {"listen": format!("127.0.0.1:{}", self.admin_port)},
            "models": [{
                "name": MODEL,
                "tokenizer": model_file("tokenizer.json.gz"),
                "tokenizer_config": model_file("tokenizer_config.json"),
                "block_size": BLOCK_SIZE,
            }],
            "workers_file": "workers.yaml",
            // Nobody is to wait at the end of an example or a test that does not ask for it.
            "drain": {"grace": "0s"},
            "envoy": {"endpoints_file": self.standalone().endpoint_file()},
        });
        if let (Some(config), Some(more)) = (config.as_object_mut(), more.as_object()) {
            config.extend(more.clone());
        }
        let file = self.run_dir.join("warmroute.yaml");
        fs::write(&file, serde_json::to_string_pretty(&config)?)?;
        let mut command = command(&self.programs.warmroute);
        command.arg("serve").arg("--config").arg(&file);
        self.router = Some(Child::spawn("warmroute", &command, &self.run_dir)?);
        Ok(())
    }

    /// Starts Envoy, again where it runs, and waits until it is ready.
    pub(crate) async fn start_envoy(&mut self, config: &str) -> anyhow::Result<()> {
        self.start_wide_envoy(config, 1).await
    }

    /// The same with so many worker threads.
    pub(crate) async fn start_wide_envoy(
        &mut self,
        config: &str,
        threads: u32,
    ) -> anyhow::Result<()> {
        self.envoy = None;
        let envoy = envoy::start(config, &self.run_dir, threads).await?;
        ports::wait_ready(
            Ready::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))),
            START,
            &envoy,
        )
        .await?;
        self.envoy = Some(envoy);
        Ok(())
    }

    pub(crate) fn router(&self) -> anyhow::Result<&Child> {
        self.router.as_ref().context("warmroute is not running")
    }

    pub(crate) fn envoy(&self) -> anyhow::Result<&Child> {
        self.envoy.as_ref().context("Envoy is not running")
    }

    /// Starts another warmroute on the same addresses beside one that was told to end, and waits until it is ready; the old
    /// one is returned.
    pub(crate) async fn succeed_router(&mut self, more: &Value) -> anyhow::Result<Child> {
        let old = self.router.take().context("warmroute is not running")?;
        old.terminate();
        // Or it would be the old one that says it is ready.
        let page = self.admin_url("/readyz");
        let client = warmroute::tls::client().build()?;
        let ready = async || {
            client
                .get(&page)
                .send()
                .await
                .is_ok_and(|answer| answer.status().is_success())
        };
        ensure!(
            ports::until(START, async || !ready().await).await,
            "the end is not noticed:\n{}",
            old.log_tail()
        );
        self.start_router(more).await?;
        Ok(old)
    }

    /// Ends warmroute without asking.
    pub(crate) fn kill9_router(&mut self) {
        if let Some(router) = self.router.take() {
            router.kill9();
        }
    }

    /// A URL through Envoy.
    pub(crate) fn url(&self, path: &str) -> String {
        self.standalone().url(path)
    }

    /// A URL of warmroute's admin pages.
    pub(crate) fn admin_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.admin_port)
    }

    /// One of warmroute's debug pages.
    pub(crate) async fn debug(&self, page: &str) -> anyhow::Result<Value> {
        let client = warmroute::tls::client().build()?;
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

    /// Process ids of everything that runs.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let parts = [self.router.as_ref(), self.envoy.as_ref()];
        parts
            .into_iter()
            .flatten()
            .map(Child::pid)
            .chain(self.engines.iter().filter_map(Engine::pid))
            .collect()
    }
}

/// A file of the model that the engines serve.
pub(crate) fn model_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/models/qwen2.5")
        .join(name)
}

fn command(program: &[OsString]) -> Command {
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]);
    command
}
