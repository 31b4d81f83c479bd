//! Components of a process that does not serve, for commands: preprocessor and router with the
//! configured fleet, an empty cache and no load.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use warmroute_core::worker::Worker;
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::shared_cache::SharedCacheClient;
use warmroute_metrics::Metrics;
use warmroute_runtime::causes::describe_failure;
use warmroute_settings::{MAX_SETTINGS_FILE, Problem, read_regular_file};
use warmroute_tokens::prompt::LoadError;

use super::encoders::{EncoderRegistry, missing_template_advice};
use super::parts::{self, PreprocessorDeps};
use crate::config::{Advice, Config, ModelConfig, WorkerSource};
use crate::dispatch::Dispatcher;
use crate::fleet::discovery;
use crate::request::{ConfiguredModel, RequestPreprocessor, SharedClusterRules};

/// Preprocessor and router of a configuration.
pub struct OfflineRouter {
    /// Turns a request body into a route request.
    pub preprocessor: Arc<RequestPreprocessor>,
    /// Routes a request.
    pub dispatcher: Arc<Dispatcher>,
}

impl OfflineRouter {
    /// Builds the components and publishes a fleet of these workers.
    pub async fn new(config: &Config, workers: Vec<Worker>) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let models = EncoderRegistry::new(&metrics).load(config).await?.models;
        let dispatcher = parts::dispatcher(config, rand::random(), &Arc::default());
        let router = dispatcher.router();
        let client = EngineClient::new(&config.engines.http)?;
        let deps = PreprocessorDeps {
            cluster: &SharedClusterRules::default(),
            client: &client,
            router,
            metrics: &metrics,
            message_cache: None,
            remote_index: None,
        };
        let preprocessor = parts::preprocessor(config, models, deps)?;
        router.set_workers(workers);
        Ok(Self {
            preprocessor,
            dispatcher,
        })
    }
}

/// Problems found while loading the components of a configuration.
#[derive(Debug, Default)]
pub struct LoadReport {
    /// Errors with which `serve` would not start.
    pub problems: Vec<Problem>,
    /// Warnings about models with reduced functionality, for example without a chat template.
    pub warnings: Vec<Advice>,
}

/// Loads everything that `serve` loads before it binds its sockets.
pub async fn try_load(config: &Config) -> LoadReport {
    let mut report = LoadReport::default();
    for (at, settings) in config.models.iter().enumerate() {
        match load_model(config, settings).await {
            Ok(loaded) => report
                .warnings
                .extend(loaded.and_then(|model| missing_template_advice(&model))),
            Err(error) => report.problems.push(
                tokenizer_problem(settings, &error)
                    .within(at)
                    .within("models"),
            ),
        }
    }
    report.problems.extend(try_clients(config).err());
    report
}

/// Returns the error of a tokenizer at the configuration key of the file that caused it.
fn tokenizer_problem(settings: &ModelConfig, error: &anyhow::Error) -> Problem {
    let Some(error) = error.downcast_ref::<LoadError>() else {
        return Problem::of("tokenizer", describe_failure(error));
    };
    let of_file = |file: &Option<PathBuf>| file.as_deref() == Some(error.path());
    let key = match settings {
        ModelConfig {
            chat_template: file,
            ..
        } if of_file(file) => "chat_template",
        ModelConfig {
            tokenizer_config: file,
            ..
        } if of_file(file) => "tokenizer_config",
        _ => "tokenizer",
    };
    Problem::of(key, error.to_string())
}

fn try_clients(config: &Config) -> Result<(), Problem> {
    let metrics = Arc::new(Metrics::new());
    let problem_of =
        |key: &'static str| move |error: anyhow::Error| Problem::of(key, describe_failure(&error));
    EngineClient::new(&config.engines.http)
        .map_err(|error| Problem::of("http", error.to_string()).within("engines"))?;
    parts::index_client(config, &metrics).map_err(problem_of("index.remote"))?;
    let shared = config
        .index
        .shared_cache
        .as_ref()
        .map(SharedCacheClient::new)
        .transpose();
    shared.map_err(|error| Problem::of("shared_cache", error.to_string()).within("index"))?;
    Ok(())
}

/// Loads one model with its tokenizer, if configured.
pub async fn load_model(
    config: &Config,
    model: &ModelConfig,
) -> anyhow::Result<Option<Arc<ConfiguredModel>>> {
    let only = Config {
        models: vec![model.clone()],
        ..config.clone()
    };
    let models = EncoderRegistry::new(&Arc::new(Metrics::new()))
        .load(&only)
        .await?
        .models;
    Ok(models.resolve(None).map(|named| named.model))
}

/// Returns the listed workers, or one sample worker for each entry of a discovery source. Needs no
/// network access.
pub fn listed_workers(config: &Config) -> anyhow::Result<Vec<Worker>> {
    let path = match config.worker_source() {
        WorkerSource::Fixed(workers) => return Ok(workers),
        WorkerSource::File(path) => path,
        WorkerSource::Dns(_) | WorkerSource::Kubernetes(_) => return Ok(config.typical_workers()),
    };
    let bytes = read_regular_file(&path, MAX_SETTINGS_FILE)
        .with_context(|| format!("the workers file {} cannot be read", path.display()))?;
    discovery::parse(&path, &bytes, &config.served_models()).map_err(|mistakes| {
        let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("{}", mistakes.join("\n"))
    })
}
