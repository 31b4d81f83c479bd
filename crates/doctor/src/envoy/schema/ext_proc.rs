//! The ext_proc filter and its overrides on routes.

use serde::Deserialize;

use crate::envoy::schema::ProtoDuration;

/// `ExternalProcessor`: configuration of the ext_proc filter.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct ExternalProcessor {
    pub(crate) grpc_service: Option<GrpcService>,
    pub(crate) failure_mode_allow: bool,
    pub(crate) stat_prefix: String,
    pub(crate) processing_mode: ProcessingMode,
    pub(crate) message_timeout: Option<ProtoDuration>,
    pub(crate) max_message_timeout: Option<ProtoDuration>,
    pub(crate) allow_mode_override: bool,
    pub(crate) observability_mode: bool,
    pub(crate) disable_clear_route_cache: bool,
    pub(crate) route_cache_action: String,
    pub(crate) request_attributes: Vec<String>,
    pub(crate) response_attributes: Vec<String>,
    pub(crate) metadata_options: MetadataOptions,
    pub(crate) allow_content_length_header: bool,
    /// Attributes in the overrides of a route. Envoy ignores them.
    #[serde(skip)]
    pub(crate) ignored_attributes: Vec<String>,
}

/// `GrpcService`: the gRPC server that the filter calls.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct GrpcService {
    pub(crate) envoy_grpc: Option<EnvoyGrpc>,
    pub(crate) google_grpc: Option<GoogleGrpc>,
    pub(crate) initial_metadata: Vec<KeyValue>,
}

/// gRPC server in a cluster.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct EnvoyGrpc {
    pub(crate) cluster_name: String,
    pub(crate) authority: String,
}

impl EnvoyGrpc {
    /// Returns the `:authority` of its calls. Without a configured authority, Envoy sends the
    /// cluster name.
    pub(crate) fn sent_authority(&self) -> &str {
        if self.authority.is_empty() {
            &self.cluster_name
        } else {
            &self.authority
        }
    }
}

/// gRPC server by address.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct GoogleGrpc {
    pub(crate) target_uri: String,
}

/// A header of the gRPC stream.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct KeyValue {
    pub(crate) key: String,
    pub(crate) value: String,
}

/// `ProcessingMode`. An empty string is the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct ProcessingMode {
    pub(crate) request_header_mode: String,
    pub(crate) response_header_mode: String,
    pub(crate) request_body_mode: String,
    pub(crate) response_body_mode: String,
    pub(crate) request_trailer_mode: String,
    pub(crate) response_trailer_mode: String,
}

/// Returns the body mode. An empty string is replaced by the default.
pub(crate) fn body_mode(mode: &str) -> &str {
    if mode.is_empty() { "NONE" } else { mode }
}

/// Returns whether headers are sent.
pub(crate) fn shows_headers(mode: &str) -> bool {
    mode != "SKIP"
}

/// Returns whether trailers are sent.
pub(crate) fn shows_trailers(mode: &str) -> bool {
    mode == "SEND"
}

/// `MetadataOptions`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct MetadataOptions {
    pub(crate) forwarding_namespaces: MetadataNamespaces,
    pub(crate) receiving_namespaces: MetadataNamespaces,
}

/// Metadata namespaces.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct MetadataNamespaces {
    pub(crate) untyped: Vec<String>,
}

impl MetadataNamespaces {
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.untyped.iter().any(|one| one == name)
    }
}

/// `ExtProcPerRoute`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ExtProcPerRoute {
    pub(crate) disabled: bool,
    pub(crate) overrides: Option<ExtProcOverrides>,
}

/// `ExtProcOverrides`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ExtProcOverrides {
    pub(crate) processing_mode: Option<ProcessingMode>,
    pub(crate) grpc_service: Option<GrpcService>,
    pub(crate) grpc_initial_metadata: Vec<KeyValue>,
    pub(crate) metadata_options: Option<MetadataOptionsOverride>,
    pub(crate) failure_mode_allow: Option<bool>,
    /// Attributes that Envoy 1.40 accepts but ignores.
    pub(crate) response_attributes: Vec<String>,
    /// Attributes that Envoy 1.40 accepts but ignores.
    pub(crate) request_attributes: Vec<String>,
}

/// Metadata options of a route. Envoy replaces each list that is present.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MetadataOptionsOverride {
    pub(crate) forwarding_namespaces: Option<MetadataNamespaces>,
    pub(crate) receiving_namespaces: Option<MetadataNamespaces>,
}
