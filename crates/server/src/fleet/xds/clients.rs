//! The Envoys that are connected by xDS: the current snapshot, and the state of each stream.
//!
//! Each stream sends new snapshots independently. The publisher can wait until all connected Envoys
//! have acknowledged a snapshot.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde::Serialize;
use slab::Slab;
use tokio::sync::watch;
use warmroute_core::worker::Worker;
use warmroute_metrics::{Metrics, count_outcome};

use super::assignments::AssignmentSnapshot;
use super::config::ClusterConfig;

/// Registry of the Envoys that are connected by xDS.
pub struct XdsClients {
    clusters: Vec<ClusterConfig>,
    /// Current snapshot. `None` until the first fleet is known: an empty list would remove all
    /// workers.
    current: watch::Sender<Option<Arc<AssignmentSnapshot>>>,
    streams: Mutex<Slab<XdsClientStatus>>,
    /// Incremented at each change of the state of a stream.
    reports: watch::Sender<u64>,
    metrics: Arc<Metrics>,
}

/// State of one xDS stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct XdsClientStatus {
    /// Node id of the Envoy.
    pub node: String,
    /// Node cluster of the Envoy.
    pub node_cluster: String,
    /// Protocol variant.
    pub variant: &'static str,
    /// Requested clusters.
    pub clusters: Vec<String>,
    /// Requested clusters that are not configured.
    pub unknown: Vec<String>,
    /// Newest acknowledged generation of endpoints; `None` before the first.
    pub generation: Option<u64>,
    /// Error of the last rejected response.
    pub rejection: Option<String>,
    /// True if the Envoy did not acknowledge endpoints in time. The publisher does not wait for it
    /// until it acknowledges the current ones.
    pub is_slow: bool,
}

impl XdsClientStatus {
    fn is_behind(&self, generation: u64) -> bool {
        !self.clusters.is_empty() && self.generation < Some(generation)
    }
}

impl XdsClients {
    /// Creates an empty registry.
    pub fn new(clusters: Vec<ClusterConfig>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            clusters,
            current: watch::Sender::default(),
            streams: Mutex::default(),
            reports: watch::Sender::default(),
            metrics,
        })
    }

    /// Publishes the endpoints of a fleet. Returns their generation, which stays the same if
    /// nothing has changed.
    pub fn publish<'w>(&self, workers: impl IntoIterator<Item = &'w Worker>) -> u64 {
        let before = self.current.borrow().clone();
        let generation = before.as_ref().map_or(1, |before| before.generation + 1);
        let workers: Vec<&Worker> = workers.into_iter().collect();
        let next = AssignmentSnapshot::new(generation, Instant::now(), &self.clusters, &workers);
        if let Some(before) = before.filter(|before| before.version == next.version) {
            return before.generation;
        }
        self.metrics.endpoints.xds_generation.set(generation as i64);
        self.current.send_replace(Some(Arc::new(next)));
        generation
    }

    /// Waits until all connected Envoys have acknowledged or rejected this generation or a newer
    /// one.
    pub async fn wait_acknowledged(&self, generation: u64) {
        let mut reports = self.reports.subscribe();
        loop {
            reports.borrow_and_update();
            if !self
                .streams
                .lock()
                .iter()
                .any(|(_, status)| !status.is_slow && status.is_behind(generation))
            {
                return;
            }
            if reports.changed().await.is_err() {
                return;
            }
        }
    }

    /// Marks the Envoys that have not acknowledged this generation as slow. The publisher does not
    /// wait for them until they acknowledge the current one.
    pub fn skip_slow(&self, generation: u64) {
        let mut streams = self.streams.lock();
        streams
            .iter_mut()
            .for_each(|(_, status)| status.is_slow |= status.is_behind(generation));
    }

    /// Returns the state of all streams.
    pub fn statuses(&self) -> Vec<XdsClientStatus> {
        self.streams
            .lock()
            .iter()
            .map(|(_, status)| status.clone())
            .collect()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Option<Arc<AssignmentSnapshot>>> {
        self.current.subscribe()
    }

    pub(super) fn register(self: &Arc<Self>, variant: &'static str) -> XdsClientGuard {
        let key = self.streams.lock().insert(XdsClientStatus {
            variant,
            ..XdsClientStatus::default()
        });
        self.metrics.endpoints.xds_streams.inc();
        XdsClientGuard {
            key,
            clients: self.clone(),
        }
    }

    /// Records the time from publication to acknowledgment.
    pub(super) fn record_acceptance(&self, since: Instant) {
        self.metrics
            .endpoints
            .xds_ack_duration_seconds
            .observe(since.elapsed().as_secs_f64());
    }

    pub(super) fn count_message(&self, outcome: &'static str) {
        count_outcome(&self.metrics.endpoints.xds_updates, outcome);
    }

    fn notify_waiters(&self) {
        self.reports.send_modify(|reports| *reports += 1);
    }
}

/// Registration of one stream, removed on drop.
pub(super) struct XdsClientGuard {
    key: usize,
    clients: Arc<XdsClients>,
}

impl XdsClientGuard {
    /// Updates the state of the stream.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut XdsClientStatus) -> T) -> T {
        let result = change(&mut self.clients.streams.lock()[self.key]);
        self.clients.notify_waiters();
        result
    }

    pub(super) fn clients(&self) -> &Arc<XdsClients> {
        &self.clients
    }
}

impl Drop for XdsClientGuard {
    fn drop(&mut self) {
        self.clients.streams.lock().try_remove(self.key);
        self.clients.metrics.endpoints.xds_streams.dec();
        self.clients.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn unresponsive_envoy_delays_only_one_change() {
        let envoys = XdsClients::new(Vec::new(), Arc::new(Metrics::new()));
        let [unresponsive, responsive] = [envoys.register("delta"), envoys.register("delta")];
        let acknowledge = |generation| {
            responsive
                .update(|status| (status.is_slow, status.generation) = (false, Some(generation)));
        };
        for client in [&unresponsive, &responsive] {
            client.update(|status| status.clusters = vec!["workers".to_owned()]);
        }
        let is_acknowledged = async |generation| {
            tokio::time::timeout(
                Duration::from_millis(500),
                envoys.wait_acknowledged(generation),
            )
            .await
            .is_ok()
        };
        acknowledge(1);
        assert!(
            !is_acknowledged(1).await,
            "the first change does not wait for the unresponsive Envoy"
        );
        envoys.skip_slow(1);
        assert!(is_acknowledged(1).await);
        assert!(
            !is_acknowledged(2).await,
            "the responsive Envoy is not waited for"
        );
        acknowledge(2);
        assert!(is_acknowledged(2).await);
        unresponsive.update(|status| (status.is_slow, status.generation) = (false, Some(2)));
        acknowledge(3);
        assert!(
            !is_acknowledged(3).await,
            "an Envoy that acknowledged again is not waited for"
        );
    }
}
