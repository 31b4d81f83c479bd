//! gRPC health, under the names that gateways and charts ask for. Whether the process answers at all is `liveness`; all
//! other names follow readiness, which ends with the signal to stop. `draining` is there for a successor: only a process
//! that says so gives up its unix socket.

use std::sync::Arc;

use tokio::sync::Mutex;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

use crate::lifecycle::Readiness;

/// Serving as long as the process answers.
pub(super) const LIVENESS: &str = "liveness";

/// Serving from the signal to stop on.
pub(super) const DRAINING: &str = "draining";

/// Serving while new requests are welcome: the whole process, the names of the probes in the charts of gateways, and our
/// services.
const READY: [&str; 5] = [
    "",
    "inference-extension",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "warmroute.v1.Router",
];

/// What is told to those who ask, by name. A clone is the same.
#[derive(Clone, Default)]
pub(super) struct Health {
    reporter: HealthReporter,
    /// So that of two who tell, the last one tells the last.
    turn: Arc<Mutex<()>>,
}

impl Health {
    pub(super) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }

    /// Sets every name to what holds now.
    pub(super) async fn tell(&self, readiness: &Readiness) {
        let _turn = self.turn.lock().await;
        self.reporter
            .set_service_status(LIVENESS, ServingStatus::Serving)
            .await;
        self.reporter
            .set_service_status(DRAINING, status(readiness.is_draining()))
            .await;
        let ready = status(readiness.pending().is_empty());
        for name in READY {
            self.reporter.set_service_status(name, ready).await;
        }
    }

    /// Keeps every name in step with readiness until the end begins.
    pub(super) async fn follow(self, readiness: Readiness) {
        let mut changes = readiness.changes();
        while !readiness.is_draining() {
            self.tell(&readiness).await;
            if changes.changed().await.is_err() {
                break;
            }
        }
        std::future::pending().await
    }

    /// Says nothing more: whoever watches a name is let go.
    pub(super) async fn forget(&self) {
        let mut reporter = self.reporter.clone();
        for name in READY.into_iter().chain([LIVENESS, DRAINING]) {
            reporter.clear_service_status(name).await;
        }
    }
}

fn status(serving: bool) -> ServingStatus {
    if serving {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    }
}
