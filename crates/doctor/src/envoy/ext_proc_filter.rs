//! The ext_proc filters of a connection manager.

use serde_json::{Value, json};
use warmroute_core::envoy_names::{FILTER_ROLE, PROBE_FILTER};

use super::config_node::ConfigNode;
use super::dump::{ConfigDump, EnvoyAddress};

pub(super) const BUFFERED: &str = "BUFFERED";
pub(super) const FULL_DUPLEX: &str = "FULL_DUPLEX_STREAMED";

/// Configuration of an ext_proc filter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FilterConfig {
    config: Value,
    /// Attributes in the overrides of a route. Envoy accepts and ignores them.
    pub(super) ignored_attributes: Vec<String>,
}

impl FilterConfig {
    /// Reads the configuration; `None` if it is of another filter.
    fn read(config: ConfigNode<'_>) -> Option<Self> {
        config.has_type("ExternalProcessor").then(|| {
            let mut owned = config.0.clone();
            owned["failure_mode_allow"] = json!(config.flag("failure_mode_allow"));
            Self {
                config: owned,
                ignored_attributes: Vec::new(),
            }
        })
    }

    pub(super) fn node(&self) -> ConfigNode<'_> {
        ConfigNode(&self.config)
    }

    /// Returns a mode of `processing_mode`.
    pub(super) fn mode(&self, name: &str) -> &str {
        match self.node().at("processing_mode").text(name) {
            "" if name.ends_with("_body_mode") => "NONE",
            mode => mode,
        }
    }

    /// Returns whether headers are sent.
    pub(super) fn sends_headers(&self, name: &str) -> bool {
        self.mode(name) != "SKIP"
    }

    /// Returns whether trailers are sent.
    pub(super) fn sends_trailers(&self, name: &str) -> bool {
        self.mode(name) == "SEND"
    }

    /// Returns whether request bodies are streamed in full duplex.
    pub(super) fn is_full_duplex(&self) -> bool {
        self.mode("request_body_mode") == FULL_DUPLEX
    }

    /// Returns whether Envoy buffers request bodies.
    pub(super) fn is_buffered(&self) -> bool {
        self.mode("request_body_mode").starts_with(BUFFERED)
    }

    /// Returns whether the filter sends nothing and so never calls the server. Istio's filter is
    /// idle unless a route overrides it.
    pub(super) fn is_idle(&self) -> bool {
        let sends = |part: &str| {
            self.sends_headers(&format!("{part}_header_mode"))
                || self.mode(&format!("{part}_body_mode")) != "NONE"
                || self.sends_trailers(&format!("{part}_trailer_mode"))
        };
        !sends("request") && !sends("response")
    }

    /// Returns whether Envoy allows requests if the server fails.
    pub(super) fn allows_failure(&self) -> bool {
        self.node().flag("failure_mode_allow")
    }

    /// Returns whether Envoy accepts metadata of a namespace from the server.
    pub(super) fn receives(&self, namespace: &str) -> bool {
        let path = "metadata_options.receiving_namespaces.untyped";
        self.node().contains(path, namespace)
    }

    /// Returns whether Envoy sends metadata of a namespace to the server.
    pub(super) fn forwards(&self, namespace: &str) -> bool {
        let path = "metadata_options.forwarding_namespaces.untyped";
        self.node().contains(path, namespace)
    }

    /// Returns the called gRPC server, if it is configured.
    pub(super) fn service(&self) -> Option<ConfigNode<'_>> {
        self.node().at("grpc_service").present()
    }

    /// Returns the cluster that the filter calls.
    pub(super) fn cluster(&self) -> Option<&str> {
        service_cluster(self.service()?)
    }

    /// Applies the overrides of one level: the route configuration, the virtual host or the route.
    pub(super) fn apply_overrides(&mut self, overrides: ConfigNode<'_>) {
        let config = &mut self.config;
        for key in ["processing_mode", "grpc_service", "failure_mode_allow"] {
            if let Some(given) = overrides.at(key).present() {
                config[key] = given.0.clone();
            }
        }
        let service = &mut config["grpc_service"];
        for pair in overrides.items("grpc_initial_metadata") {
            if service.is_object() {
                set_metadata(&mut service["initial_metadata"], pair);
            }
        }
        // Envoy replaces each list that is present.
        for key in ["forwarding_namespaces", "receiving_namespaces"] {
            let given = overrides.at("metadata_options").at(key);
            if let Some(namespaces) = given.present() {
                config["metadata_options"][key] = namespaces.0.clone();
            }
        }
        for key in ["request_attributes", "response_attributes"] {
            let ignored = overrides.texts(key).map(str::to_owned);
            self.ignored_attributes.extend(ignored);
        }
    }
}

fn set_metadata(metadata: &mut Value, pair: ConfigNode<'_>) {
    if !metadata.is_array() {
        *metadata = json!([]);
    }
    if let Some(metadata) = metadata.as_array_mut() {
        metadata.retain(|known| known["key"] != pair.0["key"]);
        metadata.push(pair.0.clone());
    }
}

/// Returns the cluster of a gRPC server.
pub(super) fn service_cluster(service: ConfigNode<'_>) -> Option<&str> {
    let grpc = service.at("envoy_grpc").present()?;
    Some(grpc.text("cluster_name"))
}

/// Returns the addresses of a gRPC server.
pub(super) fn service_addresses(service: ConfigNode<'_>, dump: &ConfigDump) -> Vec<EnvoyAddress> {
    if let Some(by_address) = service.at("google_grpc").present() {
        let target = parse_target_uri(by_address.text("target_uri"));
        return target.into_iter().collect();
    }
    let cluster = service_cluster(service).and_then(|name| dump.cluster(name));
    let addresses = cluster.and_then(|cluster| cluster.addresses());
    addresses.unwrap_or_default()
}

fn parse_target_uri(target: &str) -> Option<EnvoyAddress> {
    if let Some(path) = target.strip_prefix("unix:") {
        return Some(EnvoyAddress::Pipe(path.trim_start_matches("//").to_owned()));
    }
    let (host, port) = target.rsplit('/').next()?.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']).to_owned();
    Some(EnvoyAddress::Socket(host, port.parse().ok()?))
}

/// An ext_proc filter.
#[derive(Clone, Debug)]
pub(super) struct ExtProcFilter {
    /// Filter name.
    pub(super) name: String,
    /// Index in the list of filters.
    pub(super) index: usize,
    /// Whether it is disabled unless a route enables it.
    pub(super) is_disabled: bool,
    /// Configuration without route overrides.
    pub(super) config: FilterConfig,
}

impl ExtProcFilter {
    /// Reads a filter with the configuration `config`; `None` if it is another filter.
    pub(super) fn read(
        index: usize,
        filter: ConfigNode<'_>,
        config: ConfigNode<'_>,
    ) -> Option<Self> {
        Some(Self {
            name: filter.text("name").to_owned(),
            index,
            is_disabled: filter.flag("disabled"),
            config: FilterConfig::read(config)?,
        })
    }

    /// Returns the filter role that its initial metadata declares.
    pub(super) fn declared_role(&self) -> Option<&str> {
        let mut metadata = self.config.service()?.items("initial_metadata");
        let role = metadata.find(|pair| pair.text("key") == FILTER_ROLE)?;
        Some(role.text("value"))
    }

    /// Returns whether it is a first-token probe.
    pub(super) fn is_probe(&self) -> bool {
        let modes = &self.config;
        match self.declared_role() {
            Some(role) => role == PROBE_FILTER,
            None => {
                !modes.sends_headers("request_header_mode")
                    && !modes.sends_headers("response_header_mode")
                    && modes.mode("response_body_mode") == "STREAMED"
            }
        }
    }

    /// Returns the addresses that the filter calls.
    pub(super) fn addresses(&self, dump: &ConfigDump) -> Vec<EnvoyAddress> {
        let service = self.config.service();
        let addresses = service.map(|service| service_addresses(service, dump));
        addresses.unwrap_or_default()
    }
}
