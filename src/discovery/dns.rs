//! Workers by DNS: whoever a name stands for, by its addresses or by its SRV records. An answer that nobody is there is an
//! answer; no answer changes nothing, so each question keeps its last one.

mod ask;
mod config;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use xxhash_rust::xxh3::xxh3_64;

pub use ask::{look, watch};
pub use config::{DnsConfig, DnsRecord};

use super::config::WorkerConfig;
use crate::worker::WorkerId;

/// A question to a resolver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Question {
    /// The IPv4 addresses of a name.
    V4(String),
    /// The IPv6 addresses of a name.
    V6(String),
    /// Where a service is.
    Service(String),
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(name) => write!(f, "A {name}"),
            Self::V6(name) => write!(f, "AAAA {name}"),
            Self::Service(name) => write!(f, "SRV {name}"),
        }
    }
}

/// What was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Addresses, or none.
    Addresses(BTreeSet<IpAddr>),
    /// Names and ports, or none.
    Targets(BTreeSet<(String, NonZeroU16)>),
}

/// The last answers to the questions that follow from the configured names.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    last: BTreeMap<Question, Answer>,
}

impl Answers {
    /// What has to be asked of a name, given what is known: the targets of a service are names themselves.
    pub fn questions(&self, name: &DnsConfig) -> Vec<Question> {
        match name.record {
            DnsRecord::Address => addresses_of(&name.name).to_vec(),
            DnsRecord::Srv => {
                let service = Question::Service(name.name.clone());
                let names: BTreeSet<String> = self
                    .targets(&name.name)
                    .map(|(target, _)| target.clone())
                    .collect();
                std::iter::once(service)
                    .chain(names.iter().flat_map(|name| addresses_of(name)))
                    .collect()
            }
        }
    }

    /// Takes an answer; an error keeps the one before.
    pub fn take(&mut self, question: Question, answer: Answer) {
        self.last.insert(question, answer);
    }

    /// Whether anything was answered yet.
    pub fn has_any(&self) -> bool {
        !self.last.is_empty()
    }

    /// Forgets what nobody asks any more.
    pub fn keep(&mut self, names: &[DnsConfig]) {
        let asked: BTreeSet<Question> =
            names.iter().flat_map(|name| self.questions(name)).collect();
        self.last.retain(|question, _| asked.contains(question));
    }

    /// The workers that the names stand for. Two names for one address are one worker, the first one's.
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
        let at = |name: &str, port: NonZeroU16| {
            let known = addresses_of(name).into_iter().filter_map(|question| {
                match self.last.get(&question) {
                    Some(Answer::Addresses(addresses)) => Some(addresses.clone()),
                    _ => None,
                }
            });
            known
                .flatten()
                .map(move |address| SocketAddr::new(address.to_canonical(), port.get()))
                .collect::<Vec<_>>()
        };
        match (name.record, name.port) {
            (DnsRecord::Address, Some(port)) => at(&name.name, port).into_iter().collect(),
            (DnsRecord::Address, None) => BTreeSet::new(),
            (DnsRecord::Srv, _) => self
                .targets(&name.name)
                .flat_map(|(target, port)| at(target, *port))
                .collect(),
        }
    }

    fn targets(&self, name: &str) -> impl Iterator<Item = &(String, NonZeroU16)> {
        let known = match self.last.get(&Question::Service(name.to_owned())) {
            Some(Answer::Targets(targets)) => Some(targets),
            _ => None,
        };
        known.into_iter().flatten()
    }
}

fn addresses_of(name: &str) -> [Question; 2] {
    [Question::V4(name.to_owned()), Question::V6(name.to_owned())]
}

/// DNS knows no worker but by its address, so that is who it is: the same after a restart of ours, on every replica, and when
/// it comes back. That the engine there is another one its events tell. Below 2^53, so that no reader of JSON changes it.
pub fn worker_id(address: SocketAddr) -> WorkerId {
    WorkerId(xxh3_64(address.to_string().as_bytes()) >> 11)
}

#[cfg(test)]
mod tests;
