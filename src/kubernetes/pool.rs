//! Selector and ports of one pool, and its pods as last received.

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU16;

use warmroute_server::fleet::discovery::config::WorkerConfig;
use warmroute_server::fleet::discovery::kubernetes::{PodsConfig, label_selector};

use super::objects::{InferencePool, Pod};
use super::pods::{self, PoolWorkerSpec};
use super::store::{ObjectChange, ObjectStore};

/// Selector and ports that determine the workers of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolMembership {
    pub(super) selector: BTreeMap<String, String>,
    pub(super) ports: Vec<NonZeroU16>,
}

impl PoolMembership {
    /// Returns the membership of an InferencePool, or `None` if it has no selector. An empty
    /// selector would match every pod of the namespace.
    pub(super) fn from_pool(pool: &InferencePool) -> Option<Self> {
        let selector = pool.spec.selector.match_labels.clone();
        let ports = pool
            .spec
            .target_ports
            .iter()
            .filter_map(|port| NonZeroU16::new(port.number))
            .collect();
        (!selector.is_empty()).then_some(Self { selector, ports })
    }

    /// Returns the configured membership, or `None` if an InferencePool is named.
    pub(super) fn from_config(pool: &PodsConfig) -> Option<Self> {
        let configured = || Self {
            selector: pool.selector.clone(),
            ports: pool.ports.clone(),
        };
        pool.name.is_none().then(configured)
    }

    /// Returns the selector in the form of the API server.
    pub(super) fn label_selector(&self) -> String {
        label_selector(&self.selector)
    }
}

/// Pods of one pool.
#[derive(Debug, Default)]
pub(super) struct PoolPods {
    store: ObjectStore<Pod>,
    used_uids: HashSet<String>,
}

impl PoolPods {
    pub(super) fn apply(&mut self, change: ObjectChange<Pod>) {
        self.store.apply(change);
    }

    /// Returns the number of pods.
    pub(super) fn len(&self) -> usize {
        self.store.objects().len() + self.store.unreadable().count()
    }

    /// Returns the pods that accept no requests, with the reason.
    pub(super) fn unready(&self) -> Vec<(String, String)> {
        let pods = self.store.objects().values();
        pods.filter_map(|pod| Some((pods::qualified_name(pod), pods::unready_reason(pod)?)))
            .collect()
    }

    /// Removes all pods after the pool was deleted. Returns whether any of them was a worker.
    pub(super) fn clear(&mut self) -> bool {
        let had_workers = !self.used_uids.is_empty();
        self.store.clear();
        self.used_uids.clear();
        had_workers
    }

    /// Returns the workers, and the errors of unusable pods. Returns `None` before the first list.
    pub(super) fn workers(
        &mut self,
        membership: &PoolMembership,
        pool: &PodsConfig,
    ) -> Option<(Vec<WorkerConfig>, Vec<String>)> {
        if !self.store.is_listed() {
            return None;
        }
        let title = pool.title();
        let spec = PoolWorkerSpec {
            pool: &title,
            ports: &membership.ports,
            template: &pool.worker,
            ids: pool.instance_ids,
        };
        let (workers, mut problems) =
            pods::workers(self.store.objects(), &spec, &mut self.used_uids);
        problems.extend(self.store.unreadable().map(|object| object.describe("pod")));
        Some((workers, problems))
    }
}

#[cfg(test)]
mod tests;
