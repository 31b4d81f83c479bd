//! The pods of one pool as they were told of last. While a list is being read anew, after a restart of the watch or with another
//! selector, the old one holds until the new one is whole.

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU16;

use kube::runtime::watcher::Event;

use super::config::{LabelsConfig, PodsConfig, label_selector};
use super::objects::{InferencePool, Pod};
use super::pods::{self, Likeness};
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
        let ports = pool.spec.target_ports.iter().filter_map(|port| NonZeroU16::new(port.number)).collect();
        (!selector.is_empty()).then_some(Self { selector, ports })
    }

    /// As it is configured, where no InferencePool is named.
    pub(super) fn configured(pool: &PodsConfig) -> Option<Self> {
        let told = || Self { selector: pool.selector.clone(), ports: pool.ports.clone() };
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
    known: BTreeMap<String, Pod>,
    /// Those of a list that is not whole yet.
    listed: Option<BTreeMap<String, Pod>>,
    /// Whether a list was whole once.
    is_known: bool,
    used: HashSet<String>,
}

impl Pods {
    /// Takes what was told; whether the pods may be others now.
    pub(super) fn take(&mut self, event: Event<Pod>) -> bool {
        let uid = |pod: &Pod| pod.metadata.uid.clone().unwrap_or_default();
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(pod) => drop(self.listed.get_or_insert_default().insert(uid(&pod), pod)),
            Event::InitDone => {
                self.known = self.listed.take().unwrap_or_default();
                self.is_known = true;
                return true;
            }
            Event::Apply(pod) => {
                self.known.insert(uid(&pod), pod);
                return true;
            }
            Event::Delete(pod) => return self.known.remove(&uid(&pod)).is_some(),
        }
        false
    }

    /// There is no such pool, or no longer. One that never was is not known to be empty.
    pub(super) fn forget(&mut self) {
        *self = Self { is_known: self.is_known, ..Self::default() };
    }

    /// The workers, and what is odd; `None`: nothing was told yet.
    pub(super) fn workers(
        &mut self,
        membership: &Membership,
        pool: &PodsConfig,
        labels: &LabelsConfig,
    ) -> Option<(Vec<WorkerConfig>, Vec<String>)> {
        let title = pool.title();
        let like = Likeness { pool: &title, ports: &membership.ports, template: &pool.worker, labels, ids: pool.ids };
        self.is_known.then(|| pods::workers(&self.known, &like, &mut self.used))
    }
}

#[cfg(test)]
mod tests;
