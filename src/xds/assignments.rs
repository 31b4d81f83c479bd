//! What Envoys are told at an instant: per cluster its hosts, ready to be sent. Versions come from the contents, so that an
//! Envoy that comes back, to us or to another replica, is not told again what it knows.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash as _, Hasher as _};
use std::time::Instant;

use envoy_types::pb::envoy::config::core::v3::address::Address as AddressKind;
use envoy_types::pb::envoy::config::core::v3::socket_address::PortSpecifier;
use envoy_types::pb::envoy::config::core::v3::{Address, HealthStatus, Metadata, SocketAddress};
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{
    ClusterLoadAssignment, Endpoint as EnvoyEndpoint, LbEndpoint, LocalityLbEndpoints,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Any, ListValue, Struct, Value};
use prost::{Message as _, Name as _};
use xxhash_rust::xxh3::Xxh3Default;

use super::config::ClusterConfig;
use super::hosts::{Labels, hosts};
use crate::worker::{Endpoint, Worker};

/// The contents of something, told apart from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version(u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The hosts of a cluster.
#[derive(Clone, Debug)]
pub(super) struct Assignment {
    pub(super) version: Version,
    pub(super) resource: Any,
}

/// The clusters that we know of.
#[derive(Clone, Debug)]
pub(super) struct Assignments {
    /// Counts those that differed from the ones before.
    pub(super) generation: u64,
    /// Since when they hold.
    pub(super) since: Instant,
    /// Of all of it.
    pub(super) version: Version,
    pub(super) clusters: BTreeMap<String, Assignment>,
}

impl Assignments {
    pub(super) fn new(
        generation: u64,
        since: Instant,
        clusters: &[ClusterConfig],
        workers: &[&Worker],
    ) -> Self {
        let assigned = |cluster: &ClusterConfig| {
            let members = workers.iter().copied().filter(|worker| cluster.has(worker));
            (
                cluster.name.clone(),
                Assignment::new(&cluster.name, &hosts(members)),
            )
        };
        let clusters: BTreeMap<_, _> = clusters.iter().map(assigned).collect();
        let mut hasher = Xxh3Default::new();
        clusters
            .iter()
            .for_each(|(name, assignment)| (name, assignment.version.0).hash(&mut hasher));
        Self {
            generation,
            since,
            version: Version(hasher.finish()),
            clusters,
        }
    }
}

impl Assignment {
    fn new(cluster: &str, hosts: &BTreeMap<Endpoint, Labels>) -> Self {
        // Not of the bytes, in which the labels come in any order.
        let mut hasher = Xxh3Default::new();
        hosts.hash(&mut hasher);
        let lb_endpoints = hosts
            .iter()
            .map(|(endpoint, labels)| host(*endpoint, labels))
            .collect();
        let assignment = ClusterLoadAssignment {
            cluster_name: cluster.to_owned(),
            endpoints: vec![LocalityLbEndpoints {
                lb_endpoints,
                ..Default::default()
            }],
            ..Default::default()
        };
        let type_url = ClusterLoadAssignment::type_url();
        Self {
            version: Version(hasher.finish()),
            resource: Any {
                type_url,
                value: assignment.encode_to_vec(),
            },
        }
    }
}

fn host(endpoint: Endpoint, labels: &Labels) -> LbEndpoint {
    let address = SocketAddress {
        address: endpoint.0.ip().to_string(),
        port_specifier: Some(PortSpecifier::PortValue(endpoint.0.port().into())),
        ..Default::default()
    };
    let address = Address {
        address: Some(AddressKind::SocketAddress(address)),
    };
    let fields = labels
        .named()
        .into_iter()
        .map(|(name, values)| (name.to_owned(), one_or_list(values)))
        .collect();
    let health = if labels.open {
        HealthStatus::Unknown
    } else {
        HealthStatus::Draining
    };
    LbEndpoint {
        health_status: health.into(),
        metadata: Some(Metadata {
            filter_metadata: [("envoy.lb".to_owned(), Struct { fields })].into(),
            ..Default::default()
        }),
        host_identifier: Some(HostIdentifier::Endpoint(EnvoyEndpoint {
            address: Some(address),
            ..Default::default()
        })),
        ..Default::default()
    }
}

fn one_or_list(values: Vec<String>) -> Value {
    let text = |text: String| Value {
        kind: Some(Kind::StringValue(text)),
    };
    let mut values: Vec<Value> = values.into_iter().map(text).collect();
    match values.len() {
        1 => values.remove(0),
        _ => Value {
            kind: Some(Kind::ListValue(ListValue { values })),
        },
    }
}
