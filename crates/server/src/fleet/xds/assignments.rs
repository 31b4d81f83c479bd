//! Cluster load assignments of one fleet, encoded for xDS.
//!
//! Versions are hashes of the contents. An Envoy that reconnects, to this or to another replica,
//! does therefore not receive unchanged resources again.

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
use warmroute_core::worker::{Worker, WorkerEndpoint};
use xxhash_rust::xxh3::Xxh3Default;

use super::config::ClusterConfig;
use super::subset_labels::{SubsetLabels, hosts};

/// Version of a resource: a hash of its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResourceVersion(u64);

impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Encoded load assignment of one cluster.
#[derive(Clone, Debug)]
pub(super) struct ClusterAssignment {
    pub(super) version: ResourceVersion,
    pub(super) resource: Any,
}

/// Load assignments of all clusters.
#[derive(Clone, Debug)]
pub(super) struct AssignmentSnapshot {
    /// Number of the snapshot, which increases with each change.
    pub(super) generation: u64,
    /// Time of publication.
    pub(super) since: Instant,
    /// Version over all clusters.
    pub(super) version: ResourceVersion,
    pub(super) clusters: BTreeMap<String, ClusterAssignment>,
}

impl AssignmentSnapshot {
    pub(super) fn new(
        generation: u64,
        since: Instant,
        clusters: &[ClusterConfig],
        workers: &[&Worker],
    ) -> Self {
        let assigned = |cluster: &ClusterConfig| {
            let members = workers
                .iter()
                .copied()
                .filter(|worker| cluster.includes(worker));
            (
                cluster.name.clone(),
                ClusterAssignment::new(&cluster.name, &hosts(members)),
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
            version: ResourceVersion(hasher.finish()),
            clusters,
        }
    }
}

impl ClusterAssignment {
    fn new(cluster: &str, hosts: &BTreeMap<WorkerEndpoint, SubsetLabels>) -> Self {
        // The encoded bytes are not hashed, because the order of labels in them varies.
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
            version: ResourceVersion(hasher.finish()),
            resource: Any {
                type_url,
                value: assignment.encode_to_vec(),
            },
        }
    }
}

fn host(endpoint: WorkerEndpoint, labels: &SubsetLabels) -> LbEndpoint {
    let address = SocketAddress {
        address: endpoint.0.ip().to_string(),
        port_specifier: Some(PortSpecifier::PortValue(endpoint.0.port().into())),
        ..Default::default()
    };
    let address = Address {
        address: Some(AddressKind::SocketAddress(address)),
    };
    let fields = labels
        .entries()
        .into_iter()
        .map(|(name, values)| (name.to_owned(), one_or_list(values)))
        .collect();
    let health = if labels.accepts_requests {
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
