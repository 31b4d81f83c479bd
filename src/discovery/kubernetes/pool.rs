//! The membership of one pool, and its pods as last received.

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU16;

use super::config::{LabelsConfig, PodsConfig, label_selector};
use super::objects::{InferencePool, Pod};
use super::pods::{self, Likeness};
use super::store::{ObjectChange, ObjectStore};
use crate::discovery::config::WorkerConfig;

/// Which pods are members, and at which ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) selector: BTreeMap<String, String>,
    pub(super) ports: Vec<NonZeroU16>,
}

impl Membership {
    /// As an InferencePool has it. One without selector would have every pod of the namespace, and has none.
    pub(super) fn of(pool: &InferencePool) -> Option<Self> {
        let selector = pool.spec.selector.match_labels.clone();
        let ports = pool
            .spec
            .target_ports
            .iter()
            .filter_map(|port| NonZeroU16::new(port.number))
            .collect();
        (!selector.is_empty()).then_some(Self { selector, ports })
    }

    /// As it is configured, where no InferencePool is named.
    pub(super) fn configured(pool: &PodsConfig) -> Option<Self> {
        let told = || Self {
            selector: pool.selector.clone(),
            ports: pool.ports.clone(),
        };
        pool.name.is_none().then(told)
    }

    /// As the API server takes it.
    pub(super) fn label_selector(&self) -> String {
        label_selector(&self.selector)
    }
}

/// The pods of one pool.
#[derive(Debug, Default)]
pub(super) struct Pods {
    store: ObjectStore<Pod>,
    used: HashSet<String>,
}

impl Pods {
    pub(super) fn apply(&mut self, change: ObjectChange<Pod>) {
        self.store.apply(change);
    }

    /// The number of pods.
    pub(super) fn len(&self) -> usize {
        self.store.objects().len() + self.store.unreadable().count()
    }

    /// The pods that take no requests, and why.
    pub(super) fn unready(&self) -> Vec<(String, String)> {
        let pods = self.store.objects().values();
        pods.filter_map(|pod| Some((pods::name(pod), pods::unready_reason(pod)?)))
            .collect()
    }

    /// There is no such pool, or no longer. Returns whether that removes workers.
    pub(super) fn clear(&mut self) -> bool {
        let had_workers = !self.used.is_empty();
        self.store.clear();
        self.used.clear();
        had_workers
    }

    /// The workers, and the problems of single pods. `None` before the first list.
    pub(super) fn workers(
        &mut self,
        membership: &Membership,
        pool: &PodsConfig,
        labels: &LabelsConfig,
    ) -> Option<(Vec<WorkerConfig>, Vec<String>)> {
        if !self.store.is_listed() {
            return None;
        }
        let title = pool.title();
        let like = Likeness {
            pool: &title,
            ports: &membership.ports,
            template: &pool.worker,
            labels,
            ids: pool.ids,
        };
        let (workers, mut problems) = pods::workers(self.store.objects(), &like, &mut self.used);
        problems.extend(self.store.unreadable().map(|object| object.describe("pod")));
        Some((workers, problems))
    }
}

#[cfg(test)]
mod tests;
