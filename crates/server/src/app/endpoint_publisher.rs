//! Publishes endpoints to Envoy, by file and by xDS, and waits until Envoy uses them.
//!
//! Decision 0010.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;
use warmroute_core::worker::Worker;
use warmroute_metrics::Metrics;

use crate::fleet::xds::config::EnvoyConfig;
use crate::fleet::xds::{XdsClients, eds_file};

/// Upper bound of the time that Envoy needs to read a new endpoint file; 4 ms were measured.
const FILE_READ_DELAY: Duration = Duration::from_millis(100);

/// Timeout for xDS acknowledgments, so that an unresponsive Envoy delays publication only once.
const ACK_TIMEOUT: Duration = Duration::from_millis(500);

/// Publisher to all configured targets.
pub(super) struct EndpointPublisher {
    file: Option<EndpointsFile>,
    envoys: Option<Arc<XdsClients>>,
    metrics: Arc<Metrics>,
}

struct EndpointsFile {
    path: PathBuf,
    cluster: String,
}

/// Receipt of a publication.
#[must_use]
pub(super) struct PublishReceipt {
    generation: Option<u64>,
}

impl EndpointPublisher {
    pub(super) fn new(
        config: Option<&EnvoyConfig>,
        envoys: Option<Arc<XdsClients>>,
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

    /// Returns whether any target is configured.
    pub(super) fn is_enabled(&self) -> bool {
        self.file.is_some() || self.envoys.is_some()
    }

    /// Publishes the workers.
    pub(super) fn publish<'w>(
        &self,
        workers: impl Iterator<Item = &'w Arc<Worker>>,
    ) -> PublishReceipt {
        let workers: Vec<&Worker> = workers.map(AsRef::as_ref).collect();
        if let Some(EndpointsFile { path, cluster }) = &self.file {
            let written = eds_file::render(workers.iter().copied(), cluster)
                .map_err(anyhow::Error::from)
                .and_then(|page| Ok(eds_file::write(path, &page, &self.metrics)?));
            if let Err(error) = written {
                warn!(file = %path.display(), %error, "endpoint file cannot be written");
            }
        }
        PublishReceipt {
            generation: self.envoys.as_ref().map(|envoys| envoys.publish(workers)),
        }
    }

    /// Waits until Envoy uses the published endpoints.
    pub(super) async fn wait_applied(&self, receipt: PublishReceipt) {
        let read = async {
            if self.file.is_some() {
                tokio::time::sleep(FILE_READ_DELAY).await;
            }
        };
        let acknowledged = async {
            let (Some(envoys), Some(generation)) = (&self.envoys, receipt.generation) else {
                return;
            };
            if tokio::time::timeout(ACK_TIMEOUT, envoys.wait_acknowledged(generation))
                .await
                .is_err()
            {
                envoys.skip_slow(generation);
                warn!(
                    generation,
                    "some Envoys did not acknowledge the new endpoints in time; continuing without \
                    them"
                );
            }
        };
        tokio::join!(read, acknowledged);
    }
}
