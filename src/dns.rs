//! Discovery by DNS: the addresses or SRV records of configured names.
//!
//! After a failed query, the last answer stays in use.

mod lookup;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use warmroute_core::worker::WorkerId;
use xxhash_rust::xxh3::xxh3_64;

pub use lookup::{resolve_once, watch};

use warmroute_server::fleet::discovery::config::WorkerConfig;
use warmroute_server::fleet::discovery::dns::{DnsConfig, DnsRecord};

/// A DNS query.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DnsQuery {
    /// IPv4 addresses of a name.
    A(String),
    /// IPv6 addresses of a name.
    Aaaa(String),
    /// Targets and ports of a service.
    Srv(String),
}

impl fmt::Display for DnsQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::A(name) => write!(f, "A {name}"),
            Self::Aaaa(name) => write!(f, "AAAA {name}"),
            Self::Srv(name) => write!(f, "SRV {name}"),
        }
    }
}

/// Answer to a [`DnsQuery`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsAnswer {
    /// Addresses, possibly none.
    Addresses(BTreeSet<IpAddr>),
    /// Target names and ports, possibly none.
    Targets(BTreeSet<(String, NonZeroU16)>),
}

/// Last answers to the queries of the configured names.
#[derive(Clone, Debug, Default)]
pub struct DnsAnswers {
    last: BTreeMap<DnsQuery, DnsAnswer>,
}

impl DnsAnswers {
    /// Returns the queries for a name. The SRV targets of the last answer cause further queries for
    /// their addresses.
    pub fn queries(&self, name: &DnsConfig) -> Vec<DnsQuery> {
        match name.record {
            DnsRecord::Address => address_queries(&name.name).to_vec(),
            DnsRecord::Srv => {
                let service = DnsQuery::Srv(name.name.clone());
                let names: BTreeSet<String> = self
                    .targets(&name.name)
                    .map(|(target, _)| target.clone())
                    .collect();
                std::iter::once(service)
                    .chain(names.iter().flat_map(|name| address_queries(name)))
                    .collect()
            }
        }
    }

    /// Stores an answer.
    pub fn insert(&mut self, query: DnsQuery, answer: DnsAnswer) {
        self.last.insert(query, answer);
    }

    /// Returns whether any query was answered.
    pub fn has_any(&self) -> bool {
        !self.last.is_empty()
    }

    /// Removes the answers to queries that are no longer sent.
    pub fn retain(&mut self, names: &[DnsConfig]) {
        let queries: BTreeSet<DnsQuery> =
            names.iter().flat_map(|name| self.queries(name)).collect();
        self.last.retain(|query, _| queries.contains(query));
    }

    /// Returns the workers of the names. If two names resolve to the same address, the first name
    /// determines the worker.
    pub fn workers(&self, names: &[DnsConfig]) -> Vec<WorkerConfig> {
        let mut found = BTreeMap::new();
        for name in names {
            for address in self.addresses(name) {
                found
                    .entry(address)
                    .or_insert_with(|| name.worker.worker(worker_id(address), address, None));
            }
        }
        found.into_values().collect()
    }

    fn addresses(&self, name: &DnsConfig) -> BTreeSet<SocketAddr> {
        let socket_addresses = |name: &str, port: NonZeroU16| {
            let known =
                address_queries(name)
                    .into_iter()
                    .filter_map(|query| match self.last.get(&query) {
                        Some(DnsAnswer::Addresses(addresses)) => Some(addresses.clone()),
                        _ => None,
                    });
            known
                .flatten()
                .map(move |address| SocketAddr::new(address.to_canonical(), port.get()))
                .collect::<Vec<_>>()
        };
        match (name.record, name.port) {
            (DnsRecord::Address, Some(port)) => {
                socket_addresses(&name.name, port).into_iter().collect()
            }
            (DnsRecord::Address, None) => BTreeSet::new(),
            (DnsRecord::Srv, _) => self
                .targets(&name.name)
                .flat_map(|(target, port)| socket_addresses(target, *port))
                .collect(),
        }
    }

    fn targets(&self, name: &str) -> impl Iterator<Item = &(String, NonZeroU16)> {
        let known = match self.last.get(&DnsQuery::Srv(name.to_owned())) {
            Some(DnsAnswer::Targets(targets)) => Some(targets),
            _ => None,
        };
        known.into_iter().flatten()
    }
}

fn address_queries(name: &str) -> [DnsQuery; 2] {
    [
        DnsQuery::A(name.to_owned()),
        DnsQuery::Aaaa(name.to_owned()),
    ]
}

/// Returns the worker id of an address. It is stable across restarts and equal on all replicas.
///
/// An engine that replaces another one at the same address is detected by its KV events. The id is
/// below 2^53, because JSON readers may not represent larger integers.
pub fn worker_id(address: SocketAddr) -> WorkerId {
    WorkerId(xxh3_64(address.to_string().as_bytes()) >> 11)
}

#[cfg(test)]
mod tests;
