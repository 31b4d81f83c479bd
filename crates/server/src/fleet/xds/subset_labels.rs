//! Subset labels of each endpoint address.
//!
//! Envoy accepts each address only once, so if workers share one, each label is a list. Worker ids
//! are text: Envoy would never match a number, and its numbers cannot represent 64-bit ids.

use std::collections::{BTreeMap, BTreeSet};

use warmroute_core::worker::{Worker, WorkerEndpoint};

/// Labels for subset load balancing, in the metadata namespace `envoy.lb`; lists are matched with
/// `list_as_any`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct SubsetLabels {
    /// Worker ids.
    pub(super) worker_id: BTreeSet<String>,
    /// Roles.
    pub(super) role: BTreeSet<String>,
    /// Data-parallel ranks.
    pub(super) rank: BTreeSet<u32>,
    /// True if any worker at the address accepts new requests.
    pub(super) accepts_requests: bool,
}

impl SubsetLabels {
    /// Returns the name and the values of each label.
    pub(super) fn entries(&self) -> [(&'static str, Vec<String>); 3] {
        let texts = |texts: &BTreeSet<String>| texts.iter().cloned().collect();
        let ranks = self.rank.iter().map(u32::to_string).collect();
        [
            ("worker_id", texts(&self.worker_id)),
            ("role", texts(&self.role)),
            ("rank", ranks),
        ]
    }
}

/// Returns the hosts of the workers by address.
pub(super) fn hosts<'w>(
    workers: impl IntoIterator<Item = &'w Worker>,
) -> BTreeMap<WorkerEndpoint, SubsetLabels> {
    let mut hosts: BTreeMap<WorkerEndpoint, SubsetLabels> = BTreeMap::new();
    for worker in workers {
        let labels = hosts.entry(worker.endpoint).or_default();
        labels.worker_id.insert(worker.id.to_string());
        labels.role.insert(worker.role.to_string());
        labels.rank.extend(worker.ranks.iter().map(|rank| rank.0));
        labels.accepts_requests |= !worker.draining;
    }
    hosts
}
