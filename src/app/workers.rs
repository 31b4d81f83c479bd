//! Where the fleet comes from, and from where after a reload: a list that only a reload changes, or a file that is
//! followed.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::config::{Config, WorkerSource};
use crate::discovery::config::DiscoveryConfig;
use crate::discovery::{self, ServedModel, file::WorkersFile};
use crate::kv_events::MediaTokens;
use crate::metrics::Metrics;
use crate::worker::{ModelName, Worker};

/// The tokens that stand for media, by model.
pub(super) type Media = HashMap<ModelName, MediaTokens>;

/// What a configuration says of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wanted {
    source: WorkerSource,
    models: Vec<ServedModel>,
    follow: DiscoveryConfig,
    media: Arc<Media>,
}

/// A complete fleet as it is to be.
#[derive(Clone, Debug)]
pub(super) struct Desired {
    pub(super) workers: Vec<Worker>,
    /// How to read the events of newcomers, and of the others if that changed.
    pub(super) media: Arc<Media>,
}

impl From<&Config> for Wanted {
    fn from(config: &Config) -> Self {
        let media = config.models.iter().map(|model| (model.name.clone(), model.media_tokens())).collect();
        Self {
            source: config.worker_source(),
            models: config.served_models(),
            follow: config.discovery.clone(),
            media: Arc::new(media),
        }
    }
}

/// Follows what is wanted until nobody wants anything any more; each fleet goes to `desired`.
pub(super) async fn follow(
    mut wanted: watch::Receiver<Wanted>,
    desired: mpsc::UnboundedSender<Desired>,
    metrics: Arc<Metrics>,
) -> anyhow::Result<()> {
    loop {
        let now = wanted.borrow_and_update().clone();
        tokio::select! {
            never = tell(now, &desired, &metrics) => match never {},
            changed = wanted.changed() => changed?,
        }
    }
}

async fn tell(wanted: Wanted, desired: &mpsc::UnboundedSender<Desired>, metrics: &Arc<Metrics>) -> Infallible {
    let media = wanted.media;
    // Where the keeper is gone everything ends.
    let send = |workers| _ = desired.send(Desired { workers, media: media.clone() });
    match wanted.source {
        WorkerSource::Fixed(workers) => {
            send(workers);
            std::future::pending().await
        }
        WorkerSource::File(path) => {
            let file = WorkersFile { path, models: wanted.models, follow: wanted.follow };
            discovery::file::watch(file, metrics.clone(), send).await
        }
    }
}
