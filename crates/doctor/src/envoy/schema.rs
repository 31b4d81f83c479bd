//! Parts of Envoy's configuration that warmroute depends on, under Envoy's names.

mod cluster;
mod ext_proc;
mod routes;

use std::time::Duration;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

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
    pub(crate) stat_prefix: String,
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

/// Duration in protobuf JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProtoDuration(pub(crate) Duration);

impl<'de> Deserialize<'de> for ProtoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let seconds = text
            .strip_suffix('s')
            .and_then(|seconds| seconds.parse::<f64>().ok());
        let length = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        length
            .map(Self)
            .ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not a duration")))
    }
}

/// Deserializes a number that may be a string.
pub(crate) fn deserialize_number<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::Number(number) => Ok(number.as_u64()),
        Value::String(text) => Ok(text.parse().ok()),
        other => Err(serde::de::Error::custom(format!("{other} is not a number"))),
    }
}

/// Returns whether a value has this protobuf message type.
pub(crate) fn has_type(value: &Value, kind: &str) -> bool {
    value["@type"]
        .as_str()
        .and_then(|name| name.rsplit(['.', '/']).next())
        == Some(kind)
}
