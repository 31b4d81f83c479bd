//! gRPC health services.
//!
//! `liveness` is always serving. `draining` is serving once shutdown has begun; a successor
//! replaces the unix socket only of such a process. All other names follow readiness, which ends
//! with the stop signal.

use std::sync::Arc;

use tokio::sync::Mutex;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

use warmroute_runtime::lifecycle::Readiness;

/// Service that is always serving.
pub(super) const LIVENESS: &str = "liveness";

/// Service that is serving once shutdown has begun.
pub(super) const DRAINING: &str = "draining";

/// Services that follow readiness: the whole process, the probe names of gateway charts, and the
/// gRPC services.
const READINESS_SERVICES: [&str; 5] = [
    "",
    "inference-extension",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "warmroute.v1.Router",
];

/// Health state by service name. Clones share it.
#[derive(Clone, Default)]
pub(super) struct GrpcHealth {
    reporter: HealthReporter,
    /// Serializes updates, so that the newest state is published last.
    publish_lock: Arc<Mutex<()>>,
}

impl GrpcHealth {
    pub(super) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }

    /// Publishes the current state of every service.
    pub(super) async fn publish(&self, readiness: &Readiness) {
        let _turn = self.publish_lock.lock().await;
        self.reporter
            .set_service_status(LIVENESS, ServingStatus::Serving)
            .await;
        self.reporter
            .set_service_status(DRAINING, status(readiness.is_draining()))
            .await;
        let ready = status(readiness.pending().is_empty());
        for name in READINESS_SERVICES {
            self.reporter.set_service_status(name, ready).await;
        }
    }

    /// Publishes every change of readiness until the process drains.
    pub(super) async fn follow_readiness(self, readiness: Readiness) {
        let mut changes = readiness.subscribe();
        while !readiness.is_draining() {
            self.publish(&readiness).await;
            if changes.changed().await.is_err() {
                break;
            }
        }
    }

    /// Removes all services, which ends their watches.
    pub(super) async fn clear(&self) {
        let mut reporter = self.reporter.clone();
        for name in READINESS_SERVICES.into_iter().chain([LIVENESS, DRAINING]) {
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
