//! Another configuration for a running process. Everything that can fail is done first and changes nothing: reading,
//! checking, loading tokenizers, preparing each part. Then all parts are switched, one after the other without a pause.
//! What must stay until a restart is named in the log.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use serde_json::{Value, json};
use tokio::sync::{Mutex, Notify};
use tracing::{error, info, warn};

use super::encoders::{Encoders, Loaded};
use super::parts;
use super::subjects::{self, Subjects};
use crate::config::{Adopted, Config};
use crate::engine_client::EngineClient;
use crate::intake::{Intake, SharedCluster};
use crate::lifecycle::follow::FileWatch;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::prompt::Encoder;
use crate::remote_index::Asker;
use crate::router::Router;
use crate::settings::{ConfigError, Problem, Step};
use crate::worker::ModelName;

/// What parts are prepared from.
pub(super) struct Next {
    pub(super) config: Arc<Config>,
    /// The way in, made anew.
    pub(super) intake: Arc<Intake>,
    /// The way to the engines.
    pub(super) client: EngineClient,
    /// The canaries.
    pub(super) subjects: Arc<Subjects>,
}

/// The second half of a reload; it cannot fail.
pub(super) type Switch = Box<dyn FnOnce() + Send>;

/// The first half: whatever can fail, changing nothing yet.
type Prepare = Box<dyn Fn(&Next) -> anyhow::Result<Switch> + Send + Sync>;

/// Reads the configuration file, with what the command line says over it.
pub type ReadConfig = Box<dyn Fn() -> Result<Config, Vec<ConfigError>> + Send + Sync>;

/// What became of a reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// Another configuration is in use.
    Applied {
        /// The keys that changed.
        changed: Vec<String>,
        /// The keys that were given otherwise and stay until a restart.
        needs_restart: Vec<String>,
    },
    /// Nothing that could change did.
    Unchanged {
        /// The keys that were given otherwise and stay until a restart.
        needs_restart: Vec<String>,
    },
    /// Nothing was changed, for these reasons.
    Invalid(Vec<String>),
}

/// The way to another configuration.
pub struct Reloader {
    pub(super) metrics: Arc<Metrics>,
    router: Arc<Router>,
    /// What a cluster says of requests, which no reload changes.
    pub(super) cluster: SharedCluster,
    /// Those who are asked for the index, whom no reload changes either.
    pub(super) asker: Option<Arc<Asker>>,
    encoders: Encoders,
    client: ArcSwap<EngineClient>,
    subjects: ArcSwap<Subjects>,
    parts: parking_lot::Mutex<Vec<(&'static str, Prepare)>>,
    running: ArcSwap<Config>,
    /// What the pages show.
    shown: Arc<ArcSwap<Value>>,
    /// The number of the configuration in use; held while another one is prepared.
    generation: Mutex<u64>,
}

impl Reloader {
    /// A process that begins with this configuration.
    pub(super) fn new(
        config: Arc<Config>,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let client = ArcSwap::from_pointee(EngineClient::new(&config.engines)?);
        let asker =
            parts::asker(&config, &metrics).context("the servers of the index cannot be asked")?;
        let shown = Arc::new(ArcSwap::from_pointee(page(1, &config, &[])));
        metrics.config_generation.set(1);
        note_valid(&metrics);
        let (encoders, parts) = (Encoders::new(&metrics), parking_lot::Mutex::default());
        Ok(Self {
            metrics,
            router,
            cluster: SharedCluster::default(),
            asker,
            encoders,
            client,
            subjects: ArcSwap::default(),
            parts,
            running: ArcSwap::new(config),
            shown,
            generation: Mutex::new(1),
        })
    }

    /// Adds a part that follows the configuration.
    pub(super) fn part(
        &self,
        name: &'static str,
        prepare: impl Fn(&Next) -> anyhow::Result<Switch> + Send + Sync + 'static,
    ) {
        self.parts.lock().push((name, Box::new(prepare)));
    }

    /// The tokenizers in use, by model.
    pub(super) fn tokenizers(&self) -> Vec<(ModelName, Arc<Encoder>)> {
        self.encoders.named()
    }

    /// The router, which no reload replaces.
    pub(super) fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The configuration in use.
    pub(super) fn running(&self) -> Arc<Config> {
        self.running.load_full()
    }

    /// What the pages show of it.
    pub(super) fn shown(&self) -> Arc<ArcSwap<Value>> {
        self.shown.clone()
    }

    /// The way to the engines.
    pub(super) fn client(&self) -> EngineClient {
        EngineClient::clone(&self.client.load())
    }

    /// The canaries.
    pub(super) fn subjects(&self) -> Arc<Subjects> {
        self.subjects.load_full()
    }

    /// The models of the configuration in use, with their tokenizers; the canaries with them.
    pub(super) async fn load_models(&self) -> anyhow::Result<crate::intake::Models> {
        let config = self.running();
        let loaded = self.encoders.load(&config).await?;
        self.subjects.store(Arc::new(
            subjects::load(&config, &loaded.models, &Subjects::new()).await?,
        ));
        self.encoders.keep(&loaded);
        Ok(loaded.models)
    }

    /// Takes over what was read.
    pub async fn reload(&self, read: Result<Config, Vec<ConfigError>>) -> Reloaded {
        let mut generation = self.generation.lock().await;
        let outcome = match self.attempt(read, *generation + 1).await {
            Ok(reloaded) => {
                note_valid(&self.metrics);
                reloaded
            }
            Err(mistakes) => {
                self.metrics.config_last_reload_successful.set(0);
                Reloaded::Invalid(mistakes)
            }
        };
        if matches!(outcome, Reloaded::Applied { .. }) {
            *generation += 1;
        }
        self.report(&outcome, *generation);
        outcome
    }

    async fn attempt(
        &self,
        read: Result<Config, Vec<ConfigError>>,
        next: u64,
    ) -> Result<Reloaded, Vec<String>> {
        let read =
            read.map_err(|mistakes| mistakes.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let unfit = |problems: Vec<Problem>| {
            let text = |problem: Problem| {
                let trail: Vec<String> = problem.trail.iter().map(step).collect();
                format!(
                    "with what cannot change before a restart, `{}` would not work: {}",
                    trail.join("."),
                    problem.text
                )
            };
            problems.into_iter().map(text).collect::<Vec<_>>()
        };
        let running = self.running();
        let Adopted {
            config,
            changed,
            needs_restart,
        } = running.adopt(&read).map_err(unfit)?;
        let pending = pending_changes(&needs_restart, &running.to_json(), &read.to_json());
        let config = Arc::new(config);
        let failed = |error: anyhow::Error| vec![format!("{error:#}")];
        let loaded = self.encoders.load(&config).await.map_err(failed)?;
        let other_files = self.encoders.differ(&loaded);
        let wanted = self.next(&config, &loaded).await.map_err(failed)?;
        let switches = self.prepare(&wanted).map_err(failed)?;
        switches.into_iter().for_each(|switch| switch());
        self.encoders.keep(&loaded);
        self.metrics
            .config_pending_restart
            .set(pending.len() as i64);
        if !pending.is_empty() {
            warn!(
                changes = pending.join(", "),
                "configuration read: changes that need a restart are not in use"
            );
        }
        self.client.store(Arc::new(wanted.client));
        self.subjects.store(wanted.subjects);
        if changed.is_empty() && !other_files {
            self.shown
                .store(Arc::new(page(next - 1, &config, &needs_restart)));
            return Ok(Reloaded::Unchanged { needs_restart });
        }
        self.shown
            .store(Arc::new(page(next, &config, &needs_restart)));
        self.running.store(config);
        Ok(Reloaded::Applied {
            changed,
            needs_restart,
        })
    }

    async fn next(&self, config: &Arc<Config>, loaded: &Loaded) -> anyhow::Result<Next> {
        let client = self
            .client
            .load()
            .renewed(&config.engines)
            .context("engines cannot be changed")?;
        let models = loaded.models.clone();
        Ok(Next {
            intake: parts::intake(
                config,
                (models, &self.cluster),
                &client,
                &self.router,
                (&self.metrics, self.asker.clone()),
            )?,
            subjects: Arc::new(
                subjects::load(config, &loaded.models, &self.subjects.load()).await?,
            ),
            config: config.clone(),
            client,
        })
    }

    fn prepare(&self, next: &Next) -> anyhow::Result<Vec<Switch>> {
        let prepared = |(name, prepare): &(&'static str, Prepare)| {
            prepare(next).with_context(|| format!("{name} cannot be changed"))
        };
        self.parts.lock().iter().map(prepared).collect()
    }

    fn report(&self, outcome: &Reloaded, generation: u64) {
        let label = match outcome {
            Reloaded::Applied { changed, .. } => {
                info!(
                    generation,
                    changed = changed.join(" "),
                    "configuration reloaded"
                );
                "applied"
            }
            Reloaded::Unchanged { needs_restart } => {
                if needs_restart.is_empty() {
                    info!(generation, "configuration read again; nothing changed");
                }
                "unchanged"
            }
            Reloaded::Invalid(mistakes) => {
                for mistake in mistakes {
                    error!(
                        generation,
                        "configuration not usable, everything stays as it is: {mistake}"
                    );
                }
                "invalid"
            }
        };
        self.metrics
            .config_generation
            .set(i64::try_from(generation).unwrap_or(i64::MAX));
        self.metrics
            .config_reloads
            .get_or_create(&OutcomeLabel { outcome: label })
            .inc();
    }
}

/// Follows the file for ever, and `asked` beside it.
pub(super) async fn follow(reloader: Arc<Reloader>, file: Arc<ConfigFile>) -> anyhow::Result<()> {
    let watch = FileWatch::new(&file.path);
    let mut asked = false;
    loop {
        let settings = reloader.running().reload.clone();
        let now = tokio::fs::read(&file.path).await.ok();
        let differs =
            settings.watch && std::mem::replace(&mut *file.seen.lock(), now.clone()) != now;
        if asked || differs {
            let reading = file.clone();
            let read = tokio::task::spawn_blocking(move || (reading.read)()).await?;
            reloader.reload(read).await;
        }
        asked = tokio::select! {
            () = file.asked.notified() => true,
            () = watch.changed(settings.poll.get(), settings.debounce.get()), if settings.watch => false,
        };
    }
}

/// The file that a process was configured by.
pub struct ConfigFile {
    /// Where it is.
    pub path: std::path::PathBuf,
    /// Reads and checks it.
    pub read: ReadConfig,
    /// Asks for it to be read again at once.
    pub asked: Arc<Notify>,
    /// Its bytes when it was read last; changes since then are news.
    pub seen: parking_lot::Mutex<Option<Vec<u8>>>,
}

fn step(step: &Step) -> String {
    match step {
        Step::Key(key) => key.clone(),
        Step::At(at) => at.to_string(),
    }
}

/// Records that the last read of the file was valid.
fn note_valid(metrics: &Metrics) {
    metrics.config_last_reload_successful.set(1);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64());
    metrics
        .config_last_reload_success_timestamp_seconds
        .set(now);
}

/// Keys that differ between the running configuration and the file, with both values where these are short.
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

fn page(generation: u64, config: &Config, needs_restart: &[String]) -> Value {
    json!({"generation": generation, "needs_restart": needs_restart, "config": config.to_json()})
}

#[cfg(test)]
mod tests;
