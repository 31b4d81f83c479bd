//! The parts of a process that never runs: the way in and the router as the configuration describes them, with the
//! configured fleet, nothing cached and nobody busy. For commands that only look.

use std::sync::Arc;

use anyhow::Context as _;

use super::encoders::Encoders;
use super::parts;
use crate::config::{Config, ModelConfig, WorkerSource};
use crate::discovery;
use crate::engine_client::EngineClient;
use crate::entrance::Entrance;
use crate::intake::{Intake, Model, SharedCluster};
use crate::metrics::Metrics;
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
        let intake = parts::intake(config, (models, &SharedCluster::default()), &client, router, (&metrics, None))?;
        let change = router.fleet().reconcile(workers(config).await?);
        for member in &change.added {
            router.load().open(member.slot, member.rank);
            router.predictions().open(member);
        }
        router.publish(Arc::new(change.fleet));
        Ok(Self { intake, entrance })
    }
}

/// One model with its tokenizer, where it has one.
pub async fn model(config: &Config, model: &ModelConfig) -> anyhow::Result<Option<Arc<Model>>> {
    let only = Config { models: vec![model.clone()], ..config.clone() };
    let models = Encoders::new(&Arc::new(Metrics::new())).load(&only).await?.models;
    Ok(models.find(None).map(|named| named.model))
}

/// The workers, as they are listed or found now.
pub async fn workers(config: &Config) -> anyhow::Result<Vec<Worker>> {
    match config.worker_source() {
        WorkerSource::Dns(names) => discovery::dns::look(&names, &config.served_models()).await,
        WorkerSource::Kubernetes(pools) => discovery::kubernetes::look(&pools, &config.served_models()).await,
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
    let bytes = std::fs::read(&path).with_context(|| format!("the workers file {} cannot be read", path.display()))?;
    discovery::parse(&path, &bytes, &config.served_models()).map_err(|mistakes| {
        let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("{}", mistakes.join("\n"))
    })
}
