//! Clusters of Envoy and their host selection.

use std::time::Duration;

use warmroute_core::envoy_names::LB_NAMESPACE;

use super::config_node::{ConfigNode, has_header};
use super::dump::{ClusterHost, ConfigDump, EnvoyAddress};

/// A cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct EnvoyCluster<'d> {
    dump: &'d ConfigDump,
    pub(super) node: ConfigNode<'d>,
}

/// Host selection of a cluster.
#[derive(Clone, Debug)]
pub(super) enum HostSelection<'d> {
    /// `override_host`.
    Override(OverridePolicy<'d>),
    /// Subset load balancing.
    Subset(ConfigNode<'d>),
    /// `ORIGINAL_DST` with the address in this header.
    OriginalDst(String),
    /// The cluster's own load balancing policy.
    ClusterPolicy,
}

impl<'d> EnvoyCluster<'d> {
    pub(super) fn new(dump: &'d ConfigDump, node: ConfigNode<'d>) -> Self {
        Self { dump, node }
    }

    pub(super) fn name(self) -> &'d str {
        self.node.text("name")
    }

    pub(super) fn kind(self) -> &'d str {
        self.node.text("type")
    }

    /// Returns the name for which the cluster requests endpoints.
    pub(super) fn eds_service_name(self) -> &'d str {
        match self.node.text("eds_cluster_config.service_name") {
            "" => self.name(),
            other => other,
        }
    }

    pub(super) fn hosts(self) -> Option<Vec<ClusterHost>> {
        self.dump.hosts(self)
    }

    /// Returns the addresses of the endpoints; `None` if Envoy has no list of endpoints.
    pub(super) fn addresses(self) -> Option<Vec<EnvoyAddress>> {
        let hosts = self.hosts()?.into_iter();
        Some(hosts.map(|host| host.address).collect())
    }

    /// Returns the `HttpProtocolOptions`.
    pub(super) fn http_options(self) -> Option<ConfigNode<'d>> {
        let options = self.node.at("typed_extension_protocol_options").0;
        let mut options = options.as_object()?.values().map(ConfigNode);
        options.find(|options| options.has_type("HttpProtocolOptions"))
    }

    /// Returns the configured idle timeout of the connections; `None` for Envoy's default.
    pub(super) fn idle_timeout(self) -> Option<Duration> {
        let options = self.http_options().unwrap_or(self.node);
        options.duration("common_http_protocol_options.idle_timeout")
    }

    /// Returns the HTTP/2 options; `None` if the cluster does not use HTTP/2.
    pub(super) fn http2_options(self) -> Option<ConfigNode<'d>> {
        let Some(options) = self.http_options() else {
            return self.node.at("http2_protocol_options").present();
        };
        let keys = [
            "explicit_http_config",
            "auto_config",
            "use_downstream_protocol_config",
        ];
        let mut found = keys.map(|key| options.at(key)).into_iter();
        found.find_map(|config| config.at("http2_protocol_options").present())
    }

    /// Returns a circuit breaker threshold of the default priority; `None` for Envoy's default. A
    /// runtime key overrides the configuration.
    pub(super) fn breaker_limit(self, name: &str) -> Option<u64> {
        let key = format!("circuit_breakers.{}.default.{name}", self.name());
        let runtime = self.dump.runtime.get(&key).copied();
        runtime.or_else(|| {
            let mut thresholds = self.node.items("circuit_breakers.thresholds");
            let default = thresholds.find(|one| matches!(one.text("priority"), "" | "DEFAULT"));
            default?.number(name)
        })
    }

    /// Returns the host selection.
    pub(super) fn host_selection(self) -> HostSelection<'d> {
        let original = self.node.at("original_dst_lb_config");
        if self.kind() == "ORIGINAL_DST" && original.flag("use_http_header") {
            return HostSelection::OriginalDst(match original.text("http_header_name") {
                "" => "x-envoy-original-dst-host".to_owned(),
                name => name.to_ascii_lowercase(),
            });
        }
        if let Some(legacy) = self.node.at("lb_subset_config").present() {
            return HostSelection::Subset(legacy);
        }
        match first_policy(self.node.at("load_balancing_policy")) {
            Some(config) if config.has_type("OverrideHost") => {
                HostSelection::Override(OverridePolicy(config))
            }
            Some(config) if config.has_type("Subset") => HostSelection::Subset(config),
            _ => HostSelection::ClusterPolicy,
        }
    }

    /// Returns the policy of `override_host`, if the cluster uses it.
    pub(super) fn override_policy(self) -> Option<OverridePolicy<'d>> {
        match self.host_selection() {
            HostSelection::Override(policy) => Some(policy),
            _ => None,
        }
    }
}

/// Returns the first policy of a list, which Envoy uses if it supports it.
fn first_policy(policies: ConfigNode<'_>) -> Option<ConfigNode<'_>> {
    let first = policies.items("policies").next()?;
    Some(first.at("typed_extension_config.typed_config"))
}

/// `OverrideHost`: the load balancing policy by which a filter selects the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverridePolicy<'d>(ConfigNode<'d>);

impl<'d> OverridePolicy<'d> {
    fn sources(self) -> impl Iterator<Item = ConfigNode<'d>> {
        self.0.items("override_host_sources")
    }

    /// Returns whether the host may come from this key of warmroute's metadata.
    pub(super) fn reads_metadata(self, key: &str) -> bool {
        self.sources()
            .any(|source| is_lb_key(source.at("metadata"), key))
    }

    /// Returns the headers from which the host may come.
    pub(super) fn headers(self) -> impl Iterator<Item = &'d str> {
        self.sources()
            .filter_map(|source| source.given_text("header"))
    }

    /// Returns whether the host may come from one of these headers.
    pub(super) fn reads_header(self, names: &[String]) -> bool {
        self.headers().any(|header| has_header(names, header))
    }

    /// Returns whether Envoy writes the selected host to this key of warmroute's metadata.
    pub(super) fn writes_metadata(self, key: &str) -> bool {
        is_lb_key(self.0.at("selected_host_key"), key)
    }

    /// Returns the policy for requests without a host.
    pub(super) fn fallback(self) -> Option<ConfigNode<'d>> {
        first_policy(self.0.at("fallback_policy"))
    }

    /// Describes the sources of the host.
    pub(super) fn describe_sources(self) -> impl Iterator<Item = String> {
        self.sources().map(|source| {
            let metadata = source.at("metadata").present();
            match (metadata, source.given_text("header")) {
                (Some(key), _) => {
                    let steps = key.items("path").map(|step| step.text("key"));
                    let path: Vec<&str> = [key.text("key")].into_iter().chain(steps).collect();
                    format!("the metadata {}", path.join(": "))
                }
                (None, Some(header)) => format!("the header {header}"),
                (None, None) => "nothing".to_owned(),
            }
        })
    }
}

/// Returns whether a `MetadataKey` is a key of warmroute for Envoy's load balancers.
fn is_lb_key(node: ConfigNode<'_>, key: &str) -> bool {
    let path = node.items("path").map(|step| step.text("key"));
    node.text("key") == LB_NAMESPACE && path.eq([key])
}

/// Formats an entry of `override_host_sources`.
pub(super) fn metadata_source_yaml(key: &str) -> String {
    format!("- metadata: {{key: {LB_NAMESPACE}, path: [{{key: {key}}}]}}")
}
