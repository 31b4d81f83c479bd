//! The Envoys that are told of the fleet: what they are to know, who listens, and how far each one is. A stream follows what
//! is to be known by itself; whoever publishes can wait until all that listen have it.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde::Serialize;
use slab::Slab;
use tokio::sync::watch;

use super::assignments::Assignments;
use super::config::ClusterConfig;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::worker::Worker;

/// The Envoys that listen to us.
pub struct Envoys {
    clusters: Vec<ClusterConfig>,
    /// `None`: no fleet is known yet, and nobody is told that there is none.
    now: watch::Sender<Option<Arc<Assignments>>>,
    streams: Mutex<Slab<Listener>>,
    /// Counts what listeners report.
    reports: watch::Sender<u64>,
    metrics: Arc<Metrics>,
}

/// One that listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Listener {
    /// Its node id.
    pub node: String,
    /// The cluster of its node.
    pub node_cluster: String,
    /// Which variant of the protocol it speaks.
    pub variant: &'static str,
    /// The clusters that it asked for.
    pub clusters: Vec<String>,
    /// Those of them that we do not know.
    pub unknown: Vec<String>,
    /// The newest generation of endpoints that it has in use; none: none yet.
    pub generation: Option<u64>,
    /// Why it could not use what it was told last.
    pub refused: Option<String>,
    /// Whether it did not acknowledge endpoints in time. Changes do not wait for it until it does.
    pub is_slow: bool,
}

impl Listener {
    fn is_behind(&self, generation: u64) -> bool {
        !self.clusters.is_empty() && self.generation < Some(generation)
    }
}

impl Envoys {
    /// Nobody listens, and there is nothing to tell.
    pub fn new(clusters: Vec<ClusterConfig>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            clusters,
            now: watch::Sender::default(),
            streams: Mutex::default(),
            reports: watch::Sender::default(),
            metrics,
        })
    }

    /// From now on the fleet is this. The generation of the endpoints, which is the old one where they are the same.
    pub fn publish<'w>(&self, workers: impl IntoIterator<Item = &'w Worker>) -> u64 {
        let before = self.now.borrow().clone();
        let generation = before.as_ref().map_or(1, |before| before.generation + 1);
        let workers: Vec<&Worker> = workers.into_iter().collect();
        let next = Assignments::new(generation, Instant::now(), &self.clusters, &workers);
        if let Some(before) = before.filter(|before| before.version == next.version) {
            return before.generation;
        }
        self.metrics.xds_generation.set(generation as i64);
        self.now.send_replace(Some(Arc::new(next)));
        generation
    }

    /// Waits until everybody who listens has endpoints of this generation or newer, or has refused them.
    pub async fn reached(&self, generation: u64) {
        let mut reports = self.reports.subscribe();
        loop {
            reports.borrow_and_update();
            if !self
                .streams
                .lock()
                .iter()
                .any(|(_, listener)| !listener.is_slow && listener.is_behind(generation))
            {
                return;
            }
            if reports.changed().await.is_err() {
                return;
            }
        }
    }

    /// Stops waiting for the Envoys that have not acknowledged this generation, until they do.
    pub fn skip_slow(&self, generation: u64) {
        let mut streams = self.streams.lock();
        streams
            .iter_mut()
            .for_each(|(_, listener)| listener.is_slow |= listener.is_behind(generation));
    }

    /// Who listens.
    pub fn listeners(&self) -> Vec<Listener> {
        self.streams
            .lock()
            .iter()
            .map(|(_, listener)| listener.clone())
            .collect()
    }

    pub(super) fn follow(&self) -> watch::Receiver<Option<Arc<Assignments>>> {
        self.now.subscribe()
    }

    pub(super) fn join(self: &Arc<Self>, variant: &'static str) -> Seat {
        let key = self.streams.lock().insert(Listener {
            variant,
            ..Listener::default()
        });
        self.metrics.xds_streams.inc();
        Seat {
            key,
            envoys: self.clone(),
        }
    }

    /// That endpoints are in use now which were there since then.
    pub(super) fn accepted(&self, since: Instant) {
        self.metrics
            .xds_acceptance_seconds
            .observe(since.elapsed().as_secs_f64());
    }

    pub(super) fn count(&self, outcome: &'static str) {
        self.metrics
            .xds_updates
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    fn report(&self) {
        self.reports.send_modify(|reports| *reports += 1);
    }
}

/// That somebody listens; dropping it says that he does not any more.
pub(super) struct Seat {
    key: usize,
    envoys: Arc<Envoys>,
}

impl Seat {
    /// Says how it is with the listener now.
    pub(super) fn tell<T>(&self, change: impl FnOnce(&mut Listener) -> T) -> T {
        let told = change(&mut self.envoys.streams.lock()[self.key]);
        self.envoys.report();
        told
    }

    pub(super) fn envoys(&self) -> &Arc<Envoys> {
        &self.envoys
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.envoys.streams.lock().try_remove(self.key);
        self.envoys.metrics.xds_streams.dec();
        self.envoys.report();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn envoy_that_never_acknowledges_delays_one_change_only() {
        let envoys = Envoys::new(Vec::new(), Arc::new(Metrics::new()));
        let [silent, good] = [envoys.join("delta"), envoys.join("delta")];
        let acknowledge = |generation| {
            good.tell(|listener| {
                (listener.is_slow, listener.generation) = (false, Some(generation))
            });
        };
        for seat in [&silent, &good] {
            seat.tell(|listener| listener.clusters = vec!["workers".to_owned()]);
        }
        let reached = async |generation| {
            tokio::time::timeout(Duration::from_millis(500), envoys.reached(generation))
                .await
                .is_ok()
        };
        acknowledge(1);
        assert!(!reached(1).await, "the first change waits for both");
        envoys.skip_slow(1);
        assert!(reached(1).await);
        assert!(!reached(2).await, "the other one is still waited for");
        acknowledge(2);
        assert!(reached(2).await);
        silent.tell(|listener| (listener.is_slow, listener.generation) = (false, Some(2)));
        acknowledge(3);
        assert!(
            !reached(3).await,
            "once it acknowledges it is waited for again"
        );
    }
}
