//! Settings of discovery by DNS.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use crate::discovery::config::WorkerConfig;
use crate::discovery::template::TemplateConfig;
use crate::settings::{Period, Problem};
use crate::worker::WorkerId;

/// An entry of `dns:`: a name, and what the workers are like that it stands for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsConfig {
    /// The name, as of a headless service.
    pub name: String,
    /// What is asked for.
    #[serde(default)]
    pub record: DnsRecord,
    /// The workers' port, where the records do not tell it.
    #[serde(default)]
    pub port: Option<NonZeroU16>,
    /// What the workers are like.
    #[serde(default)]
    pub worker: TemplateConfig,
    /// How often it is asked.
    #[serde(default = "every")]
    pub every: Period,
    /// Who is asked; those of the system where left out.
    #[serde(default)]
    pub resolver: Option<SocketAddr>,
}

fn every() -> Period {
    Period::seconds(5)
}

/// What is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DnsRecord {
    /// Addresses, A and AAAA.
    #[default]
    Address,
    /// Names and ports, SRV, and then their addresses.
    Srv,
}

impl DnsConfig {
    /// A worker as it would be found, at an address that is nobody's.
    pub fn sample(&self) -> WorkerConfig {
        let port = self.port.map_or(80, NonZeroU16::get);
        self.worker.worker(
            WorkerId(0),
            (Ipv4Addr::new(192, 0, 2, 1), port).into(),
            None,
        )
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.name.is_empty() {
            problems.push(Problem::of(
                "name",
                "the name is empty; write that of the workers' service",
            ));
        }
        match (self.record, self.port) {
            (DnsRecord::Address, None) => {
                let text = "addresses tell no port; give the workers' `port`, or ask for SRV records with `record: srv`";
                problems.push(Problem::of("name", text));
            }
            (DnsRecord::Srv, Some(_)) => {
                problems.push(Problem::of(
                    "port",
                    "SRV records tell the port; leave it out",
                ));
            }
            _ => {}
        }
        if self.every.get().is_zero() {
            problems.push(Problem::of(
                "every",
                "asking every 0s would never rest; the default is 5s",
            ));
        }
        problems
    }
}
