//! Configuration reload.
//!
//! Everything that can fail comes first and changes nothing: reading, checks, loading tokenizers,
//! preparing each participant. Then all participants switch without a pause. Settings that require
//! a restart are logged.

use std::path::PathBuf;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{error, info, warn};
use warmroute_core::router::Router;
use warmroute_core::worker::ModelName;
use warmroute_engines::engine_client::EngineClient;
use warmroute_metrics::{Metrics, count_outcome};
use warmroute_runtime::causes::describe_failure;
use warmroute_runtime::files;
use warmroute_runtime::lifecycle::file_watcher::{FileWatcher, SETTINGS_WATCH};
use warmroute_settings::{ConfigError, MAX_SETTINGS_FILE, PathStep, Problem};
use warmroute_tokens::prompt::Encoder;

use super::encoders::{EncoderRegistry, LoadedModels};
use super::parts::{self, PreprocessorDeps};
use super::self_test::{CanarySuites, load_canary_suites};
use crate::admin::ReloadReport;
use crate::cluster::remote_index::RemoteIndexClient;
use crate::config::{Config, ReloadedConfig, ServeFlags};
use crate::request::{ModelRegistry, RequestPreprocessor, SharedClusterRules};

/// New configuration and the components built from it; the input of the participants.
pub(super) struct ReloadCandidate {
    pub(super) config: Arc<Config>,
    /// Preprocessor of the new configuration.
    pub(super) preprocessor: Arc<RequestPreprocessor>,
    /// Engine client of the new configuration.
    pub(super) client: EngineClient,
    /// Canaries of the new configuration.
    pub(super) suites: Arc<CanarySuites>,
}

/// State of the configuration, for status pages.
#[derive(Clone)]
pub(super) struct ConfigStatus {
    pub(super) generation: u64,
    /// Configuration in use.
    pub(super) config: Arc<Config>,
    /// Changed keys that take effect only after a restart.
    pub(super) needs_restart: Vec<String>,
    pub(super) last_reload: ReloadReport,
}

/// Second half of a reload, which cannot fail.
pub(super) type ReloadCommit = Box<dyn FnOnce() + Send>;

/// First half of a reload, which may fail and changes nothing.
type ReloadPrepare = Box<dyn Fn(&ReloadCandidate) -> anyhow::Result<ReloadCommit> + Send + Sync>;

/// Applies configuration changes to the running process.
pub(super) struct Reloader {
    pub(super) metrics: Arc<Metrics>,
    router: Arc<Router>,
    /// Rules of the Kubernetes cluster, independent of reloads.
    pub(super) cluster: SharedClusterRules,
    /// Client of the remote index, independent of reloads. `None` without a remote index.
    pub(super) index_client: Option<Arc<RemoteIndexClient>>,
    encoders: EncoderRegistry,
    client: ArcSwap<EngineClient>,
    suites: ArcSwap<CanarySuites>,
    participants: parking_lot::Mutex<Vec<ReloadPrepare>>,
    /// State of the configuration.
    status: ArcSwap<ConfigStatus>,
}

impl Reloader {
    /// Creates the reloader with the initial configuration.
    pub(super) fn new(
        config: Arc<Config>,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let client = ArcSwap::from_pointee(EngineClient::new(&config.engines.http)?);
        let index_client = parts::index_client(&config, &metrics)
            .context("remote index client cannot be created")?;
        let status = ArcSwap::from_pointee(ConfigStatus {
            generation: 1,
            config,
            needs_restart: Vec::new(),
            last_reload: record_valid_read(&metrics, "started"),
        });
        metrics.config.generation.set(1);
        let encoders = EncoderRegistry::new(&metrics);
        let participants = parking_lot::Mutex::default();
        Ok(Self {
            metrics,
            router,
            cluster: SharedClusterRules::default(),
            index_client,
            encoders,
            client,
            suites: ArcSwap::default(),
            participants,
            status,
        })
    }

    /// Registers a participant, which prepares and then applies its part of a reload.
    pub(super) fn register(
        &self,
        prepare: impl Fn(&ReloadCandidate) -> anyhow::Result<ReloadCommit> + Send + Sync + 'static,
    ) {
        self.participants.lock().push(Box::new(prepare));
    }

    /// Registers a participant that cannot fail. `select` prepares a value, which `apply` uses.
    pub(super) fn follow<T: Send + 'static>(
        &self,
        select: impl Fn(&ReloadCandidate) -> T + Send + Sync + 'static,
        apply: impl Fn(T) + Send + Sync + 'static,
    ) {
        let apply = Arc::new(apply);
        self.register(move |next| {
            let value = select(next);
            let apply = apply.clone();
            Ok(Box::new(move || apply(value)))
        });
    }

    /// Returns a receiver of a value. Each reload that changes the value sends it.
    pub(super) fn watch<T: PartialEq + Send + Sync + 'static>(
        &self,
        initial: T,
        select: impl Fn(&ReloadCandidate) -> T + Send + Sync + 'static,
    ) -> watch::Receiver<T> {
        let (value_tx, value_rx) = watch::channel(initial);
        self.follow(select, move |next| {
            value_tx.send_if_modified(|running| {
                let is_changed = *running != next;
                *running = next;
                is_changed
            });
        });
        value_rx
    }

    /// Returns the tokenizers in use, by model.
    pub(super) fn tokenizers(&self) -> Vec<(ModelName, Arc<Encoder>)> {
        self.encoders.by_model()
    }

    /// Returns the router, which is independent of reloads.
    pub(super) fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Returns the configuration in use.
    pub(super) fn running(&self) -> Arc<Config> {
        self.status.load().config.clone()
    }

    /// Returns the state of the configuration.
    pub(super) fn status(&self) -> Arc<ConfigStatus> {
        self.status.load_full()
    }

    /// Returns the engine client.
    pub(super) fn client(&self) -> EngineClient {
        EngineClient::clone(&self.client.load())
    }

    /// Returns the canaries.
    pub(super) fn suites(&self) -> Arc<CanarySuites> {
        self.suites.load_full()
    }

    /// Loads the models of the initial configuration, with their tokenizers and canaries.
    pub(super) async fn load_models(&self) -> anyhow::Result<ModelRegistry> {
        let config = self.running();
        let loaded = self.encoders.load(&config).await?;
        self.suites.store(Arc::new(
            load_canary_suites(&config, &loaded.models, &CanarySuites::new()).await?,
        ));
        self.encoders.commit(&loaded);
        Ok(loaded.models)
    }

    /// Applies a configuration, or records why it could not be read.
    async fn reload(&self, read: Result<Config, Vec<ConfigError>>) {
        let Err(mistakes) = self.try_reload(read).await else {
            return;
        };
        let mut status = ConfigStatus::clone(&self.status());
        for mistake in &mistakes {
            error!(
                generation = status.generation,
                "config reload rejected: {mistake}"
            );
        }
        self.metrics.config.last_reload_successful.set(0);
        count_outcome(&self.metrics.config.reloads, "invalid");
        status.last_reload = ReloadReport::new("rejected", mistakes);
        self.status.store(Arc::new(status));
    }

    async fn try_reload(&self, read: Result<Config, Vec<ConfigError>>) -> Result<(), Vec<String>> {
        let read =
            read.map_err(|mistakes| mistakes.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let running = self.running();
        let ReloadedConfig {
            config,
            changed,
            needs_restart,
        } = running
            .apply_reload(&read)
            .map_err(|problems| problems.iter().map(describe_conflict).collect::<Vec<_>>())?;
        let pending = pending_changes(&needs_restart, &running.to_json(), &read.to_json());
        let config = Arc::new(config);
        let failed = |error: anyhow::Error| vec![describe_failure(&error)];
        let loaded = self.encoders.load(&config).await.map_err(failed)?;
        let other_files = self.encoders.differs_from(&loaded);
        let candidate = self
            .build_candidate(&config, &loaded)
            .await
            .map_err(failed)?;
        let commits = self.prepare(&candidate).map_err(failed)?;
        commits.into_iter().for_each(|commit| commit());
        self.encoders.commit(&loaded);
        self.report_pending(&pending);
        self.client.store(Arc::new(candidate.client));
        self.suites.store(candidate.suites);
        let is_changed = other_files || !changed.is_empty();
        let generation = self.status().generation + u64::from(is_changed);
        let outcome = if is_changed {
            let changed = changed.join(" ");
            info!(generation, changed, "config reload applied");
            "applied"
        } else {
            if needs_restart.is_empty() {
                info!(generation, "config reload: nothing changed");
            }
            "unchanged"
        };
        let metrics = &self.metrics.config;
        metrics.generation.set(generation as i64);
        count_outcome(&metrics.reloads, outcome);
        self.status.store(Arc::new(ConfigStatus {
            generation,
            config,
            needs_restart,
            last_reload: record_valid_read(&self.metrics, outcome),
        }));
        Ok(())
    }

    fn report_pending(&self, pending: &[String]) {
        let metrics = &self.metrics.config;
        metrics.pending_restart_keys.set(pending.len() as i64);
        if !pending.is_empty() {
            let changes = pending.join(", ");
            warn!(changes, "config reload: some changes need a restart");
        }
    }

    async fn build_candidate(
        &self,
        config: &Arc<Config>,
        loaded: &LoadedModels,
    ) -> anyhow::Result<ReloadCandidate> {
        let client = self
            .client
            .load()
            .with_config(&config.engines.http)
            .context("engine client cannot be created")?;
        Ok(ReloadCandidate {
            preprocessor: self.build_preprocessor(config, loaded.models.clone(), &client)?,
            suites: Arc::new(
                load_canary_suites(config, &loaded.models, &self.suites.load()).await?,
            ),
            config: config.clone(),
            client,
        })
    }

    /// Creates the preprocessor of a configuration.
    pub(super) fn build_preprocessor(
        &self,
        config: &Config,
        models: ModelRegistry,
        client: &EngineClient,
    ) -> anyhow::Result<Arc<RequestPreprocessor>> {
        let deps = PreprocessorDeps {
            cluster: &self.cluster,
            client,
            router: &self.router,
            metrics: &self.metrics,
            message_cache: Some(self.encoders.message_cache()),
            remote_index: self.index_client.clone(),
        };
        parts::preprocessor(config, models, deps)
    }

    fn prepare(&self, next: &ReloadCandidate) -> anyhow::Result<Vec<ReloadCommit>> {
        let participants = self.participants.lock();
        participants.iter().map(|prepare| prepare(next)).collect()
    }
}

/// Minimum time between the starts of two reloads, so that a flood of signals costs little.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// Reloads the configuration when its file changes or a reload is requested. At most one reload runs
/// and at most one request waits.
pub(super) async fn follow(reloader: Arc<Reloader>, file: Arc<ConfigFile>) -> anyhow::Result<()> {
    let watcher = FileWatcher::new(slice::from_ref(&file.path));
    let mut requested = false;
    let mut last_reload = None;
    loop {
        let is_watched = reloader.running().process.reload.watch;
        let now = files::read(&file.path, MAX_SETTINGS_FILE).await.ok();
        let differs =
            is_watched && std::mem::replace(&mut *file.last_bytes.lock(), now.clone()) != now;
        if requested || differs {
            last_reload = Some(Instant::now());
            let reading = file.clone();
            let read = move || Config::load_with(&reading.path, &reading.flags);
            let read = tokio::task::spawn_blocking(read).await?;
            reloader.reload(read).await;
        }
        requested = tokio::select! {
            () = file.reload_requested.notified() => true,
            () = watcher.changed(SETTINGS_WATCH), if is_watched => false,
        };
        if requested {
            // Requests that arrive in this time are served by one reload.
            if let Some(last_reload) = last_reload {
                sleep_until(last_reload + RELOAD_INTERVAL).await;
            }
            info!("config reload requested");
        }
    }
}

/// Configuration file of the process.
pub struct ConfigFile {
    /// Path.
    pub path: PathBuf,
    /// Flags that override the file.
    pub flags: ServeFlags,
    /// Notified to request a reload.
    pub reload_requested: Arc<Notify>,
    /// Bytes of the last read, to detect changes.
    pub last_bytes: parking_lot::Mutex<Option<Vec<u8>>>,
}

/// Describes a conflict of the new settings with those that stay in use.
fn describe_conflict(problem: &Problem) -> String {
    let step = |step: &PathStep| match step {
        PathStep::Key(key) => key.clone(),
        PathStep::At(at) => at.to_string(),
    };
    let path: Vec<String> = problem.path.iter().map(step).collect();
    format!(
        "`{}` does not work with settings that only a restart changes: {}",
        path.join("."),
        problem.text
    )
}

/// Records in the metrics that a valid configuration was read, and returns the report of the read.
fn record_valid_read(metrics: &Metrics, outcome: &'static str) -> ReloadReport {
    let report = ReloadReport::new(outcome, Vec::new());
    metrics.config.last_reload_successful.set(1);
    metrics
        .config
        .last_reload_success_timestamp_seconds
        .set(report.time.as_unix_seconds());
    report
}

/// Describes the keys that require a restart: with the running and the new value, if these are
/// scalars.
fn pending_changes(keys: &[String], running: &Value, file: &Value) -> Vec<String> {
    let value_at = |config: &Value, key: &str| {
        let value = config
            .pointer(&format!("/{}", key.replace('.', "/")))
            .unwrap_or(&Value::Null);
        (!value.is_object() && !value.is_array()).then(|| {
            value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned)
        })
    };
    let described = |key: &String| match (value_at(running, key), value_at(file, key)) {
        (Some(running), Some(file)) => format!("{key} (running {running}, file {file})"),
        _ => key.clone(),
    };
    keys.iter().map(described).collect()
}

#[cfg(test)]
mod tests;
