//! Parts of Envoy's configuration that warmroute depends on, under Envoy's names.

mod cluster;
mod ext_proc;
mod routes;

use serde::Deserialize;
use serde_json::Value;

use super::dump::{ProtoDuration, deserialize_number};

pub(super) use cluster::{
    BreakerThreshold, EnvoyCluster, MetadataKey, MetadataPathSegment, OverrideHostPolicy,
    OverrideHostSource, PathConfigSource,
};
pub(super) use ext_proc::{
    EnvoyGrpc, ExtProcOverrides, ExtProcPerRoute, ExternalProcessor, GrpcService, KeyValue,
    ProcessingMode, body_mode, shows_headers, shows_trailers,
};
pub(super) use routes::{
    EnvoyRoute, MirrorPolicy, RetryPolicy, RouteAction, RouteConfig, RouteMatch, VirtualHost,
};

/// `envoy.config.listener.v3.Listener`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ListenerConfig {
    pub(crate) name: String,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) per_connection_buffer_limit_bytes: Option<u64>,
    pub(crate) filter_chains: Vec<FilterChain>,
    pub(crate) default_filter_chain: Option<FilterChain>,
}

/// A chain of network filters.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct FilterChain {
    pub(crate) filters: Vec<TypedExtension>,
}

/// A named extension with its typed configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct TypedExtension {
    pub(crate) name: String,
    pub(crate) typed_config: Value,
    pub(crate) disabled: bool,
}

/// `HttpConnectionManager`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct HttpConnectionManager {
    pub(crate) route_config: Option<RouteConfig>,
    pub(crate) rds: Option<RdsConfig>,
    pub(crate) http_filters: Vec<TypedExtension>,
    pub(crate) stream_idle_timeout: Option<ProtoDuration>,
    pub(crate) early_header_mutation_extensions: Vec<TypedExtension>,
}

/// Source of routes by RDS.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RdsConfig {
    pub(crate) route_config_name: String,
}
