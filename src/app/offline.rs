//! The parts of a process that never runs: the way in and the router as the configuration describes them, with the
//! configured fleet, nothing cached and nobody busy. For commands that only look.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;

use super::encoders::Encoders;
use super::parts;
use crate::config::{Advice, Config, ModelConfig, WorkerSource};
use crate::discovery;
use crate::engine_client::EngineClient;
use crate::entrance::Entrance;
use crate::intake::{Intake, Model, SharedCluster};
use crate::metrics::Metrics;
use crate::prompt::LoadError;
use crate::settings::Problem;
use crate::shared_cache::HttpSharedCache;
use crate::worker::Worker;

/// The way in and the way to the router.
pub struct Offline {
    /// From a body to a question.
    pub intake: Arc<Intake>,
    /// From a question to an answer.
    pub entrance: Arc<Entrance>,
}

impl Offline {
    /// Builds the parts and puts the configured fleet in its place.
    pub async fn new(config: &Config) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let models = Encoders::new(&metrics).load(config).await?.models;
        let entrance = parts::entrance(config, rand::random());
        let router = entrance.router();
        let client = EngineClient::new(&config.engines)?;
        let intake = parts::intake(
            config,
            (models, &SharedCluster::default()),
            &client,
            router,
            (&metrics, None),
        )?;
        let change = router.fleet().reconcile(workers(config).await?);
        for member in &change.added {
            router.load().open(member.slot, member.rank);
            router.predictions().open(member);
        }
        router.publish(Arc::new(change.fleet));
        Ok(Self { intake, entrance })
    }
}

/// The problems found while loading the parts of a configuration.
#[derive(Debug, Default)]
pub struct LoadReport {
    /// Reasons for which `serve` would not start.
    pub problems: Vec<Problem>,
    /// Warnings about models that work only in part, for example without a chat template.
    pub warnings: Vec<Advice>,
}

/// Loads what `serve` loads before it binds its sockets.
pub async fn try_load(config: &Config) -> LoadReport {
    let mut report = LoadReport::default();
    for (at, settings) in config.models.iter().enumerate() {
        match model(config, settings).await {
            Ok(loaded) => report
                .warnings
                .extend(loaded.and_then(|model| without_template(&model))),
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

/// A warning for a model whose tokenizer has no chat template.
pub fn without_template(model: &Model) -> Option<Advice> {
    let lacks = model
        .encoder
        .as_ref()
        .is_some_and(|encoder| !encoder.has_chat_template());
    lacks.then(|| Advice {
        subject: format!("model {}", model.name),
        seen: "it has no chat template (none in tokenizer_config.json, no chat_template.jinja beside it), so every chat request \
               is routed by load only"
            .to_owned(),
        mend: "copy chat_template.jinja from the model, or set `chat_template` of the model".to_owned(),
    })
}

/// The reason why a tokenizer cannot be loaded, at the key of the file that caused it.
fn tokenizer_problem(settings: &ModelConfig, error: &anyhow::Error) -> Problem {
    let Some(error) = error.downcast_ref::<LoadError>() else {
        return Problem::of("tokenizer", format!("{error:#}"));
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
    let of = |key: &'static str| move |error: anyhow::Error| Problem::of(key, format!("{error:#}"));
    EngineClient::new(&config.engines)
        .map_err(|error| Problem::of("engines", error.to_string()))?;
    parts::asker(config, &metrics).map_err(of("use_remote_index"))?;
    let shared = config
        .shared_cache
        .as_ref()
        .map(HttpSharedCache::new)
        .transpose();
    shared.map_err(|error| Problem::of("shared_cache", error.to_string()))?;
    Ok(())
}

/// One model with its tokenizer, where it has one.
pub async fn model(config: &Config, model: &ModelConfig) -> anyhow::Result<Option<Arc<Model>>> {
    let only = Config {
        models: vec![model.clone()],
        ..config.clone()
    };
    let models = Encoders::new(&Arc::new(Metrics::new()))
        .load(&only)
        .await?
        .models;
    Ok(models.find(None).map(|named| named.model))
}

/// The workers, as they are listed or found now.
pub async fn workers(config: &Config) -> anyhow::Result<Vec<Worker>> {
    match config.worker_source() {
        WorkerSource::Dns(names) => discovery::dns::look(&names, &config.served_models()).await,
        WorkerSource::Kubernetes(pools) => {
            discovery::kubernetes::look(&pools, &config.served_models()).await
        }
        WorkerSource::Fixed(_) | WorkerSource::File(_) => listed(config),
    }
}

/// The workers as they are listed now, without asking anybody: of those that are found, one of each kind.
pub fn listed(config: &Config) -> anyhow::Result<Vec<Worker>> {
    let path = match config.worker_source() {
        WorkerSource::Fixed(workers) => return Ok(workers),
        WorkerSource::File(path) => path,
        WorkerSource::Dns(_) | WorkerSource::Kubernetes(_) => return Ok(config.typical_workers()),
    };
    let bytes = std::fs::read(&path)
        .with_context(|| format!("the workers file {} cannot be read", path.display()))?;
    discovery::parse(&path, &bytes, &config.served_models()).map_err(|mistakes| {
        let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("{}", mistakes.join("\n"))
    })
}
