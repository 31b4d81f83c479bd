//! What Envoy is told of each address: whose it is. Envoy takes an endpoint once per address, so where workers share one
//! each label is a list. Ids are text: a number would never match, and 2^64 does not fit Envoy's numbers.

use std::collections::{BTreeMap, BTreeSet};

use crate::worker::{Endpoint, Worker};

/// What a subset of hosts may be made of, below `envoy.lb`; several values are matched one by one with `list_as_any`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Labels {
    /// Ids of the workers.
    pub(super) worker_id: BTreeSet<String>,
    /// What they do of a request.
    pub(super) role: BTreeSet<String>,
    /// Their data-parallel ranks.
    pub(super) rank: BTreeSet<u32>,
    /// Whether anybody there takes new requests.
    pub(super) open: bool,
}

impl Labels {
    /// Name and values of each.
    pub(super) fn named(&self) -> [(&'static str, Vec<String>); 3] {
        let texts = |texts: &BTreeSet<String>| texts.iter().cloned().collect();
        let ranks = self.rank.iter().map(u32::to_string).collect();
        [
            ("worker_id", texts(&self.worker_id)),
            ("role", texts(&self.role)),
            ("rank", ranks),
        ]
    }
}

/// The hosts of some workers, in the order of their addresses.
pub(super) fn hosts<'w>(
    workers: impl IntoIterator<Item = &'w Worker>,
) -> BTreeMap<Endpoint, Labels> {
    let mut hosts: BTreeMap<Endpoint, Labels> = BTreeMap::new();
    for worker in workers {
        let labels = hosts.entry(worker.endpoint).or_default();
        labels.worker_id.insert(worker.id.to_string());
        labels.role.insert(worker.role.to_string());
        labels.rank.extend(worker.ranks.iter().map(|rank| rank.0));
        labels.open |= !worker.draining;
    }
    hosts
}
