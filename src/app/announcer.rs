//! Telling Envoy of the fleet by whatever it listens to, and knowing when it has heard.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use crate::metrics::Metrics;
use crate::worker::Worker;
use crate::xds::config::EnvoyConfig;
use crate::xds::{Envoys, eds_file};

/// How long Envoy may take to read a new list of workers; measured were 4 ms.
const ENVOY_READS: Duration = Duration::from_millis(100);

/// How long Envoys may take to say that they have new endpoints. One that hangs holds nobody up for longer.
const ENVOY_SAYS: Duration = Duration::from_millis(500);

/// All ways to Envoy.
pub(super) struct Announcer {
    file: Option<EndpointsFile>,
    envoys: Option<Arc<Envoys>>,
    metrics: Arc<Metrics>,
}

struct EndpointsFile {
    path: PathBuf,
    cluster: String,
}

/// What was told.
#[must_use]
pub(super) struct Told {
    generation: Option<u64>,
}

impl Announcer {
    pub(super) fn new(
        config: Option<&EnvoyConfig>,
        envoys: Option<Arc<Envoys>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let file = config.and_then(|envoy| {
            let path = envoy.endpoints_file.clone()?;
            Some(EndpointsFile {
                path,
                cluster: envoy.cluster.clone(),
            })
        });
        Self {
            file,
            envoys,
            metrics,
        }
    }

    /// Whether anybody is told.
    pub(super) fn tells(&self) -> bool {
        self.file.is_some() || self.envoys.is_some()
    }

    /// From now on these are the workers.
    pub(super) fn tell<'w>(&self, workers: impl Iterator<Item = &'w Arc<Worker>>) -> Told {
        let workers: Vec<&Worker> = workers.map(AsRef::as_ref).collect();
        if let Some(EndpointsFile { path, cluster }) = &self.file {
            let written = eds_file::render(workers.iter().copied(), cluster)
                .map_err(anyhow::Error::from)
                .and_then(|page| Ok(eds_file::write(path, &page, &self.metrics)?));
            if let Err(error) = written {
                warn!(file = %path.display(), %error, "Envoy's endpoint file cannot be written");
            }
        }
        Told {
            generation: self.envoys.as_ref().map(|envoys| envoys.publish(workers)),
        }
    }

    /// Waits until what was told can be relied upon.
    pub(super) async fn heard(&self, told: Told) {
        let read = async {
            if self.file.is_some() {
                tokio::time::sleep(ENVOY_READS).await;
            }
        };
        let said = async {
            let (Some(envoys), Some(generation)) = (&self.envoys, told.generation) else {
                return;
            };
            if tokio::time::timeout(ENVOY_SAYS, envoys.reached(generation))
                .await
                .is_err()
            {
                envoys.skip_slow(generation);
                warn!(
                    generation,
                    "not every Envoy says that it has the new endpoints; going on without waiting for it"
                );
            }
        };
        tokio::join!(read, said);
    }
}
