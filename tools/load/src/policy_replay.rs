//! Compares routing policies through a real Envoy: the same sessions are sent to simulated engines
//! with each policy, in rotated order. A run starts with cold engines. The client measures times
//! and reads the cached tokens that the engines report.

mod engine_monitor;
mod replay_fault;
pub mod replay_report;
pub mod trace_sessions;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use warmroute_testbed::deployment::{EngineSpec, LocalDeployment, ProgramCommands};
use warmroute_testbed::replay::{self, RequestSample};
use warmroute_testbed::workload::ChatWorkload;
use warmroute_testbed::{envoy, merge_config};

pub use replay_fault::ReplayFault;
use replay_report::PolicyRun;
use trace_sessions::TraceSession;

/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Routing of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayPolicy {
    /// Envoy's round robin without warmroute; `round_robin` on the command line.
    EnvoyRoundRobin,
    /// The default policy of warmroute; `default` on the command line.
    Default,
    /// A policy of warmroute.
    Named(String),
}

impl ReplayPolicy {
    /// Returns the policy of a name.
    pub fn parse(name: &str) -> Self {
        match name {
            "round_robin" => Self::EnvoyRoundRobin,
            "default" => Self::Default,
            name => Self::Named(name.to_owned()),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        match self {
            Self::EnvoyRoundRobin => "round_robin",
            Self::Default => "default",
            Self::Named(name) => name,
        }
    }
}

/// Sessions to send.
#[derive(Clone, Debug)]
pub enum ReplayTraffic {
    /// Chats whose prompts contain the previous answers.
    Chats(ChatWorkload),
    /// Sessions of a trace.
    Trace(Vec<TraceSession>),
}

/// Engines of a run.
#[derive(Clone, Debug)]
pub struct EngineLayout {
    /// Number of engines.
    pub count: u64,
    /// KV blocks of each engine.
    pub blocks: usize,
    /// Microseconds per prompt token.
    pub prefill_us: f64,
    /// False: the engines publish no KV events, and warmroute predicts their caches.
    pub publishes_kv_events: bool,
}

/// Settings of a comparison.
#[derive(Clone, Debug)]
pub struct ReplaySettings {
    /// Policies, in the order of the first round.
    pub policies: Vec<ReplayPolicy>,
    /// Number of rounds. Each policy runs once in each.
    pub rounds: usize,
    /// Sessions to send.
    pub traffic: ReplayTraffic,
    /// Engines.
    pub engines: EngineLayout,
    /// Fault during each run.
    pub fault: Option<ReplayFault>,
    /// Overrides of warmroute's configuration.
    pub config: Value,
}

impl ReplaySettings {
    /// Runs all rounds. Calls `on_run` after each run.
    pub async fn run(
        &self,
        programs: &ProgramCommands,
        dir: &Path,
        mut on_run: impl FnMut(&PolicyRun) -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<PolicyRun>> {
        let mut runs = Vec::new();
        for round in 0..self.rounds {
            let mut policies = self.policies.clone();
            policies.rotate_left(round % self.policies.len().max(1));
            for policy in &policies {
                let run_dir = dir.join(format!("{}-{}", round + 1, policy.name()));
                let deployment = self.start(programs, policy, &run_dir).await?;
                let run = self.run_policy(deployment, policy, round + 1).await?;
                on_run(&run)?;
                runs.push(run);
            }
        }
        Ok(runs)
    }

    async fn start(
        &self,
        programs: &ProgramCommands,
        policy: &ReplayPolicy,
        run_dir: &Path,
    ) -> anyhow::Result<LocalDeployment> {
        let specs: Vec<EngineSpec> = (1..=self.engines.count)
            .map(|id| self.engines.spec(id))
            .collect();
        if *policy != ReplayPolicy::EnvoyRoundRobin {
            let config = self.router_config(policy);
            return LocalDeployment::start(programs, &specs, run_dir, &config).await;
        }
        let mut deployment = LocalDeployment::start_engines(programs, &specs, run_dir).await?;
        let setup = deployment.envoy_setup();
        envoy::write_endpoints(&setup.endpoint_file(), &addresses(&deployment))?;
        let config = envoy::round_robin_config(&setup.standalone_config()?)?;
        deployment.start_envoy(&config).await?;
        Ok(deployment)
    }

    fn router_config(&self, policy: &ReplayPolicy) -> Value {
        let mut config = self.config.clone();
        if let ReplayPolicy::Named(name) = policy {
            merge_config(&mut config, &json!({"routing": {"policy": name}}));
        }
        config
    }

    async fn run_policy(
        &self,
        mut deployment: LocalDeployment,
        policy: &ReplayPolicy,
        round: usize,
    ) -> anyhow::Result<PolicyRun> {
        let (finished_tx, finished_rx) = watch::channel(0);
        let on_request = move || finished_tx.send_modify(|finished| *finished += 1);
        let url = deployment.url("/v1/chat/completions");
        let began = Instant::now();
        let config = self.router_config(policy);
        let (samples, observed) = tokio::join!(self.traffic.send(url, on_request), async {
            match &self.fault {
                Some(fault) => {
                    let context = replay_fault::FaultContext {
                        deployment: &mut deployment,
                        config: &config,
                        began,
                    };
                    fault.apply(context, finished_rx).await.map(Some)
                }
                None => Ok(None),
            }
        });
        let observed = observed.with_context(|| format!("policy {}", policy.name()))?;
        Ok(PolicyRun::new(
            policy.name().to_owned(),
            round,
            &samples,
            began.elapsed(),
            observed.map(|observed| observed.report(&samples)),
        ))
    }
}

impl EngineLayout {
    fn spec(&self, id: u64) -> EngineSpec {
        let blocks = self.blocks.to_string();
        let prefill_us = self.prefill_us.to_string();
        let spec = EngineSpec::new(id).with(&[
            "--num-blocks",
            &blocks,
            "--prefill-us-per-token",
            &prefill_us,
        ]);
        if self.publishes_kv_events {
            return spec;
        }
        spec.with(&["--no-kv-event-sources"])
            .with_worker_fields(json!({"kv_events": null}))
    }
}

/// Returns the addresses of the engines.
fn addresses(deployment: &LocalDeployment) -> Vec<SocketAddr> {
    let engines = deployment.engines.iter();
    engines.map(|engine| engine.address).collect()
}

impl ReplayTraffic {
    /// Returns the number of requests.
    pub fn requests(&self) -> usize {
        match self {
            Self::Chats(chats) => chats.sessions.iter().map(|chat| chat.turns.len()).sum(),
            Self::Trace(sessions) => sessions.iter().map(|session| session.turns.len()).sum(),
        }
    }

    /// Sends all sessions and returns a sample of each request.
    async fn send(
        &self,
        url: String,
        on_request: impl Fn() + Send + Sync + 'static,
    ) -> Vec<RequestSample> {
        match self {
            Self::Chats(chats) => replay::run(url, chats.clone(), move |_| on_request()).await,
            Self::Trace(sessions) => send_trace(&url, sessions, Arc::new(on_request)).await,
        }
    }
}

/// Sends the sessions of a trace. A session continues after a failed request, because its prompts do
/// not depend on the answers.
async fn send_trace(
    url: &str,
    sessions: &[TraceSession],
    on_request: Arc<impl Fn() + Send + Sync + 'static>,
) -> Vec<RequestSample> {
    // On loopback, a proxy from the environment must not be used.
    let client = warmroute_runtime::tls::http_client_builder()
        .timeout(REQUEST_TIMEOUT)
        .build()
        .unwrap_or_default();
    let began = Instant::now();
    let mut running = JoinSet::new();
    for session in sessions.iter().cloned() {
        let client = client.clone();
        let url = url.to_owned();
        let on_request = on_request.clone();
        running.spawn(async move {
            tokio::time::sleep(session.start_offset.saturating_sub(began.elapsed())).await;
            let mut samples = Vec::new();
            for turn in &session.turns {
                tokio::time::sleep(turn.pause).await;
                let body = turn.request();
                let sent = began.elapsed();
                let sample = replay::chat(&client, &url, &body).await;
                samples.push(RequestSample { sent, ..sample });
                on_request();
            }
            samples
        });
    }
    running.join_all().await.into_iter().flatten().collect()
}
