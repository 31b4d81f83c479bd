//! Routes and virtual hosts.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::TypedExtension;
use crate::envoy::schema::{ProtoDuration, deserialize_number};

/// `RouteConfiguration`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteConfig {
    pub(crate) name: String,
    pub(crate) virtual_hosts: Vec<VirtualHost>,
    pub(crate) request_mirror_policies: Vec<MirrorPolicy>,
    pub(crate) request_headers_to_remove: Vec<String>,
    pub(crate) typed_per_filter_config: BTreeMap<String, Value>,
}

/// `VirtualHost`: the routes of some domains.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct VirtualHost {
    pub(crate) name: String,
    pub(crate) routes: Vec<EnvoyRoute>,
    pub(crate) retry_policy: Option<RetryPolicy>,
    pub(crate) request_mirror_policies: Vec<MirrorPolicy>,
    pub(crate) request_headers_to_remove: Vec<String>,
    pub(crate) include_request_attempt_count: bool,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) request_body_buffer_limit: Option<u64>,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) per_request_buffer_limit_bytes: Option<u64>,
    pub(crate) typed_per_filter_config: BTreeMap<String, Value>,
}

/// `Route`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EnvoyRoute {
    pub(crate) name: String,
    #[serde(rename = "match")]
    pub(crate) matches: RouteMatch,
    pub(crate) route: Option<RouteAction>,
    pub(crate) request_headers_to_remove: Vec<String>,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) request_body_buffer_limit: Option<u64>,
    #[serde(deserialize_with = "deserialize_number")]
    pub(crate) per_request_buffer_limit_bytes: Option<u64>,
    pub(crate) typed_per_filter_config: BTreeMap<String, Value>,
}

/// `RouteMatch`: the requests that a route matches.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct RouteMatch {
    pub(crate) prefix: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) path_separated_prefix: Option<String>,
    pub(crate) safe_regex: Option<Value>,
    pub(crate) headers: Vec<HeaderMatch>,
}

/// A header that a route matches.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct HeaderMatch {
    pub(crate) name: String,
}

impl EnvoyRoute {
    /// Returns a short name of the route.
    pub(crate) fn title(&self) -> String {
        let RouteMatch {
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

/// `RouteAction`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct RouteAction {
    pub(crate) cluster: Option<String>,
    pub(crate) cluster_header: Option<String>,
    pub(crate) weighted_clusters: WeightedClusters,
    pub(crate) timeout: Option<ProtoDuration>,
    pub(crate) idle_timeout: Option<ProtoDuration>,
    pub(crate) retry_policy: Option<RetryPolicy>,
    pub(crate) request_mirror_policies: Vec<MirrorPolicy>,
}

/// `RequestMirrorPolicy`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct MirrorPolicy {
    pub(crate) cluster: String,
    pub(crate) cluster_header: String,
    /// Mirrored fraction of the requests.
    pub(crate) runtime_fraction: Option<Value>,
}

/// Clusters with their weights.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct WeightedClusters {
    pub(crate) clusters: Vec<WeightedCluster>,
}

/// A weighted cluster.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct WeightedCluster {
    pub(crate) name: String,
}

impl RouteAction {
    /// Returns the names of the clusters that it may forward to.
    pub(crate) fn clusters(&self) -> impl Iterator<Item = &str> {
        self.cluster.as_deref().into_iter().chain(
            self.weighted_clusters
                .clusters
                .iter()
                .map(|one| one.name.as_str()),
        )
    }
}

/// `RetryPolicy`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct RetryPolicy {
    pub(crate) retry_on: String,
    pub(crate) retriable_status_codes: Vec<u16>,
    pub(crate) retry_host_predicate: Vec<TypedExtension>,
}
