//! The parts of Envoy's configuration that warmroute depends on, under Envoy's names.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::dump::{Span, is, number};
use super::transport::SocketMatch;

/// A listener.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Listener {
    pub(super) name: String,
    #[serde(deserialize_with = "number")]
    pub(super) per_connection_buffer_limit_bytes: Option<u64>,
    pub(super) filter_chains: Vec<FilterChain>,
    pub(super) default_filter_chain: Option<FilterChain>,
}

/// A chain of network filters.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FilterChain {
    pub(super) filters: Vec<Extension>,
}

/// Something with a name and a configuration of its own type.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Extension {
    pub(super) name: String,
    pub(super) typed_config: Value,
    pub(super) disabled: bool,
}

/// An HTTP connection manager.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Hcm {
    pub(super) route_config: Option<RouteConfig>,
    pub(super) rds: Option<Rds>,
    pub(super) http_filters: Vec<Extension>,
    pub(super) stream_idle_timeout: Option<Span>,
    pub(super) early_header_mutation_extensions: Vec<Extension>,
}

/// Where routes come from.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Rds {
    pub(super) route_config_name: String,
}

/// A table of routes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteConfig {
    pub(super) name: String,
    pub(super) virtual_hosts: Vec<VirtualHost>,
    pub(super) request_mirror_policies: Vec<MirrorPolicy>,
    pub(super) request_headers_to_remove: Vec<String>,
    pub(super) typed_per_filter_config: BTreeMap<String, Value>,
}

/// The routes of some domains.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct VirtualHost {
    pub(super) name: String,
    pub(super) routes: Vec<Route>,
    pub(super) retry_policy: Option<RetryPolicy>,
    pub(super) request_mirror_policies: Vec<MirrorPolicy>,
    pub(super) request_headers_to_remove: Vec<String>,
    pub(super) include_request_attempt_count: bool,
    #[serde(deserialize_with = "number")]
    pub(super) request_body_buffer_limit: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) per_request_buffer_limit_bytes: Option<u64>,
    pub(super) typed_per_filter_config: BTreeMap<String, Value>,
}

/// One route.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Route {
    pub(super) name: String,
    #[serde(rename = "match")]
    pub(super) matches: Match,
    pub(super) route: Option<Action>,
    pub(super) request_headers_to_remove: Vec<String>,
    #[serde(deserialize_with = "number")]
    pub(super) request_body_buffer_limit: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) per_request_buffer_limit_bytes: Option<u64>,
    pub(super) typed_per_filter_config: BTreeMap<String, Value>,
}

/// Which requests a route takes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Match {
    pub(super) prefix: Option<String>,
    pub(super) path: Option<String>,
    pub(super) path_separated_prefix: Option<String>,
    pub(super) safe_regex: Option<Value>,
    pub(super) headers: Vec<HeaderMatch>,
}

/// A header that a route asks for.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct HeaderMatch {
    pub(super) name: String,
}

impl Route {
    /// The route in a word.
    pub(super) fn title(&self) -> String {
        let Match {
            prefix,
            path,
            path_separated_prefix,
            ..
        } = &self.matches;
        match [path, path_separated_prefix, prefix]
            .into_iter()
            .flatten()
            .next()
        {
            Some(path) => format!("route {path}"),
            None if !self.name.is_empty() => format!("route {}", self.name),
            None => "a route by pattern".to_owned(),
        }
    }
}

/// What a route does with them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Action {
    pub(super) cluster: Option<String>,
    pub(super) cluster_header: Option<String>,
    pub(super) weighted_clusters: WeightedClusters,
    pub(super) timeout: Option<Span>,
    pub(super) idle_timeout: Option<Span>,
    pub(super) retry_policy: Option<RetryPolicy>,
    pub(super) request_mirror_policies: Vec<MirrorPolicy>,
}

/// Who gets copies.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct MirrorPolicy {
    pub(super) cluster: String,
    pub(super) cluster_header: String,
    /// Which share of the requests.
    pub(super) runtime_fraction: Option<Value>,
}

/// Clusters by their shares.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct WeightedClusters {
    pub(super) clusters: Vec<Named>,
}

/// A name.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Named {
    pub(super) name: String,
}

impl Action {
    /// The clusters it may send to, by name.
    pub(super) fn clusters(&self) -> impl Iterator<Item = &str> {
        self.cluster.as_deref().into_iter().chain(
            self.weighted_clusters
                .clusters
                .iter()
                .map(|one| one.name.as_str()),
        )
    }
}

/// When a request is sent again.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RetryPolicy {
    pub(super) retry_on: String,
    pub(super) retriable_status_codes: Vec<u16>,
    pub(super) retry_host_predicate: Vec<Extension>,
}

/// A filter that asks a server outside.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct ExternalProcessing {
    pub(super) grpc_service: Option<Grpc>,
    pub(super) failure_mode_allow: bool,
    pub(super) processing_mode: Modes,
    pub(super) message_timeout: Option<Span>,
    pub(super) max_message_timeout: Option<Span>,
    pub(super) allow_mode_override: bool,
    pub(super) observability_mode: bool,
    pub(super) disable_clear_route_cache: bool,
    pub(super) route_cache_action: String,
    pub(super) request_attributes: Vec<String>,
    pub(super) response_attributes: Vec<String>,
    pub(super) metadata_options: MetadataOptions,
    pub(super) allow_content_length_header: bool,
    /// Attributes of the route's overrides, which Envoy ignores.
    #[serde(skip)]
    pub(super) ignored_attributes: Vec<String>,
}

/// Who is asked.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Grpc {
    pub(super) envoy_grpc: Option<EnvoyGrpc>,
    pub(super) google_grpc: Option<GoogleGrpc>,
    pub(super) initial_metadata: Vec<KeyValue>,
}

/// By a cluster.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct EnvoyGrpc {
    pub(super) cluster_name: String,
    pub(super) authority: String,
}

impl EnvoyGrpc {
    /// The `:authority` of its calls. Envoy sends the name of the cluster if none is configured.
    pub(super) fn sent_authority(&self) -> &str {
        if self.authority.is_empty() {
            &self.cluster_name
        } else {
            &self.authority
        }
    }
}

/// By an address.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct GoogleGrpc {
    pub(super) target_uri: String,
}

/// A header of the stream.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    pub(super) key: String,
    pub(super) value: String,
}

/// What is shown of an exchange. An empty text is the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Modes {
    pub(super) request_header_mode: String,
    pub(super) response_header_mode: String,
    pub(super) request_body_mode: String,
    pub(super) response_body_mode: String,
    pub(super) request_trailer_mode: String,
    pub(super) response_trailer_mode: String,
}

/// A mode of bodies by its name.
pub(super) fn body_mode(mode: &str) -> &str {
    if mode.is_empty() { "NONE" } else { mode }
}

/// Whether headers are shown.
pub(super) fn shows_headers(mode: &str) -> bool {
    mode != "SKIP"
}

/// Whether trailers are shown.
pub(super) fn shows_trailers(mode: &str) -> bool {
    mode == "SEND"
}

/// Which metadata pass.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct MetadataOptions {
    pub(super) forwarding_namespaces: Namespaces,
    pub(super) receiving_namespaces: Namespaces,
}

/// Names of metadata.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Namespaces {
    pub(super) untyped: Vec<String>,
}

impl Namespaces {
    pub(super) fn has(&self, name: &str) -> bool {
        self.untyped.iter().any(|one| one == name)
    }
}

/// What a route says of a filter.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PerRoute {
    pub(super) disabled: bool,
    pub(super) overrides: Option<Overrides>,
}

/// What a route changes of a filter.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Overrides {
    pub(super) processing_mode: Option<Modes>,
    pub(super) grpc_service: Option<Grpc>,
    pub(super) grpc_initial_metadata: Vec<KeyValue>,
    pub(super) metadata_options: Option<MetadataOverride>,
    pub(super) failure_mode_allow: Option<bool>,
    /// Envoy 1.40 accepts these attributes and ignores them.
    pub(super) response_attributes: Vec<String>,
    /// Envoy 1.40 accepts these attributes and ignores them.
    pub(super) request_attributes: Vec<String>,
}

/// Metadata options of a route. Envoy replaces each list that is present.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct MetadataOverride {
    pub(super) forwarding_namespaces: Option<Namespaces>,
    pub(super) receiving_namespaces: Option<Namespaces>,
}

/// A cluster.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cluster {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) eds_cluster_config: Option<Eds>,
    pub(super) circuit_breakers: CircuitBreakers,
    pub(super) load_assignment: Option<Value>,
    pub(super) original_dst_lb_config: Option<OriginalDst>,
    pub(super) load_balancing_policy: LoadBalancing,
    pub(super) lb_subset_config: Option<Value>,
    pub(super) connect_timeout: Option<Span>,
    pub(super) transport_socket: Option<Extension>,
    pub(super) transport_socket_matches: Vec<SocketMatch>,
    pub(super) http2_protocol_options: Option<Value>,
    pub(super) typed_extension_protocol_options: BTreeMap<String, Value>,
}

impl Cluster {
    /// Under which name its endpoints are asked for.
    pub(super) fn asked_for(&self) -> &str {
        let other = self
            .eds_cluster_config
            .as_ref()
            .map(|eds| eds.service_name.as_str());
        other.filter(|name| !name.is_empty()).unwrap_or(&self.name)
    }

    /// The options of every HTTP towards it.
    pub(super) fn http(&self) -> Option<&Value> {
        self.typed_extension_protocol_options
            .values()
            .find(|options| is(options, "HttpProtocolOptions"))
    }

    /// The options of HTTP/2 towards it; none where it speaks another HTTP.
    pub(super) fn http2(&self) -> Option<&Value> {
        let options = self.http();
        let asked = |options: &'_ Value| -> bool {
            options["explicit_http_config"]["http2_protocol_options"].is_object()
        };
        match options {
            Some(options) if asked(options) => {
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

/// Where endpoints come from.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Eds {
    pub(super) service_name: String,
    pub(super) eds_config: ConfigSource,
}

/// A file or a server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ConfigSource {
    pub(super) path: Option<String>,
    pub(super) path_config_source: Option<PathSource>,
    pub(super) api_config_source: Option<ApiSource>,
    pub(super) ads: Option<Value>,
}

/// A server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ApiSource {
    pub(super) grpc_services: Vec<Grpc>,
}

/// A file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PathSource {
    pub(super) path: String,
    pub(super) watched_directory: Option<Folder>,
}

/// A folder.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Folder {
    pub(super) path: String,
}

/// How much a cluster takes at a time.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CircuitBreakers {
    pub(super) thresholds: Vec<Threshold>,
}

/// How much of one priority.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Threshold {
    pub(super) priority: String,
    #[serde(deserialize_with = "number")]
    pub(super) max_connections: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) max_pending_requests: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) max_requests: Option<u64>,
}

/// Where an ORIGINAL_DST cluster takes the address from.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OriginalDst {
    pub(super) use_http_header: bool,
    pub(super) http_header_name: String,
    pub(super) metadata_key: Option<MetadataKey>,
}

/// A place in the metadata.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct MetadataKey {
    pub(super) key: String,
    pub(super) path: Vec<Segment>,
}

/// A step to it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Segment {
    pub(super) key: String,
}

impl std::fmt::Display for MetadataKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.key)?;
        self.path
            .iter()
            .try_for_each(|step| write!(f, ": {}", step.key))
    }
}

/// How a host is picked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LoadBalancing {
    pub(super) policies: Vec<Policy>,
}

/// One way to pick.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Policy {
    pub(super) typed_extension_config: Extension,
}

/// The policy that lets a filter name the host.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OverrideHost {
    pub(super) override_host_sources: Vec<HostSource>,
    pub(super) selected_host_key: Option<MetadataKey>,
    pub(super) fallback_policy: LoadBalancing,
}

/// Where the host is named.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct HostSource {
    pub(super) header: Option<String>,
    pub(super) metadata: Option<MetadataKey>,
}
