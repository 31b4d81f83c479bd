//! Clusters and their load balancing.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::{GrpcService, TypedExtension};
use crate::envoy::schema::{ProtoDuration, deserialize_number, has_type};
use crate::envoy::transport::SocketMatch;

/// `envoy.config.cluster.v3.Cluster`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct EnvoyCluster {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) eds_cluster_config: Option<EdsClusterConfig>,
    pub(crate) circuit_breakers: CircuitBreakers,
    pub(crate) load_assignment: Option<Value>,
    pub(crate) original_dst_lb_config: Option<OriginalDstConfig>,
    pub(crate) load_balancing_policy: LoadBalancingPolicy,
    pub(crate) lb_subset_config: Option<Value>,
    pub(crate) connect_timeout: Option<ProtoDuration>,
    pub(crate) transport_socket: Option<TypedExtension>,
    pub(crate) transport_socket_matches: Vec<SocketMatch>,
    pub(crate) http2_protocol_options: Option<Value>,
    pub(crate) common_http_protocol_options: Value,
    pub(crate) typed_extension_protocol_options: BTreeMap<String, Value>,
}

impl EnvoyCluster {
    /// Returns the name for which the cluster requests endpoints.
    pub(crate) fn eds_service_name(&self) -> &str {
        let other = self
            .eds_cluster_config
            .as_ref()
            .map(|eds| eds.service_name.as_str());
        other.filter(|name| !name.is_empty()).unwrap_or(&self.name)
    }

    /// Returns the HTTP protocol options of the cluster.
    pub(crate) fn http_options(&self) -> Option<&Value> {
        self.typed_extension_protocol_options
            .values()
            .find(|options| has_type(options, "HttpProtocolOptions"))
    }

    /// Returns the configured idle timeout of the connections; `None` for Envoy's default.
    pub(crate) fn idle_timeout(&self) -> Option<Duration> {
        let common =
            self.http_options().map_or(
                &self.common_http_protocol_options,
                |options| &options["common_http_protocol_options"],
            );
        ProtoDuration::deserialize(&common["idle_timeout"])
            .ok()
            .map(|given| given.0)
    }

    /// Returns the HTTP/2 options; `None` if the cluster does not use HTTP/2.
    pub(crate) fn http2_options(&self) -> Option<&Value> {
        let options = self.http_options();
        let is_explicit = |options: &'_ Value| -> bool {
            options["explicit_http_config"]["http2_protocol_options"].is_object()
        };
        match options {
            Some(options) if is_explicit(options) => {
                Some(&options["explicit_http_config"]["http2_protocol_options"])
            }
            Some(options) => ["auto_config", "use_downstream_protocol_config"]
                .into_iter()
                .map(|key| &options[key]["http2_protocol_options"])
                .find(|options| options.is_object()),
            None => self.http2_protocol_options.as_ref(),
        }
    }
}

/// `EdsClusterConfig`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EdsClusterConfig {
    pub(crate) service_name: String,
    pub(crate) eds_config: EdsConfigSource,
}

/// `ConfigSource`: a file or a server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EdsConfigSource {
    pub(crate) path: Option<String>,
    pub(crate) path_config_source: Option<PathConfigSource>,
    pub(crate) api_config_source: Option<ApiConfigSource>,
    pub(crate) ads: Option<Value>,
}

/// `ApiConfigSource`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ApiConfigSource {
    pub(crate) grpc_services: Vec<GrpcService>,
}

/// `PathConfigSource`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PathConfigSource {
    pub(crate) path: String,
    pub(crate) watched_directory: Option<WatchedDirectory>,
}

/// `WatchedDirectory`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct WatchedDirectory {
    pub(crate) path: String,
}

/// `CircuitBreakers`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CircuitBreakers {
    pub(crate) thresholds: Vec<BreakerThreshold>,
}

/// Circuit breaker thresholds of one priority.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct BreakerThreshold {
    pub(crate) priority: String,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) max_connections: Option<u64>,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) max_pending_requests: Option<u64>,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) max_requests: Option<u64>,
}

/// Source of the address in an ORIGINAL_DST cluster.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OriginalDstConfig {
    pub(crate) use_http_header: bool,
    pub(crate) http_header_name: String,
    pub(crate) metadata_key: Option<MetadataKey>,
}

/// `MetadataKey`: path to a metadata value.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct MetadataKey {
    pub(crate) key: String,
    pub(crate) path: Vec<MetadataPathSegment>,
}

/// One segment of the path.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct MetadataPathSegment {
    pub(crate) key: String,
}

impl std::fmt::Display for MetadataKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.key)?;
        self.path
            .iter()
            .try_for_each(|step| write!(f, ": {}", step.key))
    }
}

/// `LoadBalancingPolicy`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LoadBalancingPolicy {
    pub(crate) policies: Vec<PolicyEntry>,
}

/// One load balancing policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PolicyEntry {
    pub(crate) typed_extension_config: TypedExtension,
}

/// `OverrideHost`: the load balancing policy by which a filter selects the host.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OverrideHostPolicy {
    pub(crate) override_host_sources: Vec<OverrideHostSource>,
    pub(crate) selected_host_key: Option<MetadataKey>,
    pub(crate) fallback_policy: LoadBalancingPolicy,
}

/// Source of the selected host.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OverrideHostSource {
    pub(crate) header: Option<String>,
    pub(crate) metadata: Option<MetadataKey>,
}

impl OverrideHostPolicy {
    /// Returns whether the host may come from this metadata.
    pub(crate) fn reads_metadata(&self, key: &MetadataKey) -> bool {
        self.override_host_sources
            .iter()
            .any(|source| source.metadata.as_ref() == Some(key))
    }

    /// Returns whether the host may come from one of these headers.
    pub(crate) fn reads_header(&self, names: &[String]) -> bool {
        self.override_host_sources
            .iter()
            .filter_map(|source| source.header.as_deref())
            .any(|header| names.iter().any(|name| name.eq_ignore_ascii_case(header)))
    }
}
