//! Configuration of discovery by DNS.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::worker::WorkerId;
use warmroute_settings::{ADDRESS_PATTERN, DurationSetting, Problem};

use crate::fleet::discovery::config::WorkerConfig;
use crate::fleet::discovery::template::TemplateConfig;

/// Entry of `workers.dns`: a DNS name and the template of its workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DnsConfig {
    /// DNS name, for example of a headless service.
    pub name: String,
    /// Record type.
    #[serde(default)]
    pub record: DnsRecord,
    /// Port of the workers; required for address records, which contain no port.
    #[serde(default)]
    pub port: Option<NonZeroU16>,
    /// Template of the workers.
    #[serde(default)]
    pub worker: TemplateConfig,
    /// Query interval.
    #[serde(default = "refresh_interval")]
    pub refresh_interval: DurationSetting,
    /// Resolver address; the system resolvers if omitted.
    #[serde(default)]
    #[schemars(extend("pattern" = ADDRESS_PATTERN))]
    pub resolver: Option<SocketAddr>,
}

fn refresh_interval() -> DurationSetting {
    DurationSetting::seconds(5)
}

/// Record type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DnsRecord {
    /// A and AAAA records.
    #[default]
    Address,
    /// SRV records, then the A and AAAA records of their targets.
    Srv,
}

impl DnsConfig {
    /// Returns a worker of the template at a placeholder address.
    pub fn sample_worker(&self) -> WorkerConfig {
        let port = self.port.map_or(80, NonZeroU16::get);
        self.worker.worker(
            WorkerId(0),
            (Ipv4Addr::new(192, 0, 2, 1), port).into(),
            None,
        )
    }

    /// Returns semantic errors.
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
                let text = "address records contain no port; set `port`, or query SRV records with \
                    `record: srv`";
                problems.push(Problem::of("name", text));
            }
            (DnsRecord::Srv, Some(_)) => {
                problems.push(Problem::of(
                    "port",
                    "SRV records contain the port; remove it",
                ));
            }
            _ => {}
        }
        if self.refresh_interval.get().is_zero() {
            problems.push(Problem::of(
                "refresh_interval",
                "an interval of 0s would query without pause; the default is 5s",
            ));
        }
        problems
    }
}
