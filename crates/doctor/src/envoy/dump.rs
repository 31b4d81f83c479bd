//! The admin page `/config_dump` of Envoy.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use super::cluster::EnvoyCluster;
use super::config_node::ConfigNode;

/// Configuration of one Envoy.
#[derive(Clone, Debug, Default)]
pub struct ConfigDump {
    /// Reported version.
    pub version: Option<String>,
    /// HTTP connection managers with their listeners and routes.
    pub(super) listeners: Vec<HttpListener>,
    clusters: BTreeMap<String, Value>,
    /// Endpoints by EDS service name.
    endpoints: BTreeMap<String, Vec<ClusterHost>>,
    /// Numeric keys of the static runtime layers.
    pub(super) runtime: BTreeMap<String, u64>,
    /// Whether the node identifies itself as an Istio proxy.
    pub(super) is_istio_proxy: bool,
}

/// One endpoint of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClusterHost {
    pub(super) address: EnvoyAddress,
    /// Metadata in `envoy.transport_socket_match`, which selects the transport socket.
    pub(super) socket_metadata: Value,
}

/// An HTTP connection manager with its listener.
#[derive(Clone, Debug)]
pub(super) struct HttpListener {
    pub(super) name: String,
    /// Buffer limit of a connection in bytes, if set.
    pub(super) connection_buffer: Option<u64>,
    manager: Value,
    routes: Option<Value>,
}

impl HttpListener {
    pub(super) fn manager(&self) -> ConfigNode<'_> {
        ConfigNode(&self.manager)
    }

    /// Returns the routes; `None` if Envoy has not received them.
    pub(super) fn routes(&self) -> Option<ConfigNode<'_>> {
        self.routes.as_ref().map(ConfigNode)
    }

    /// Returns the HTTP filters, each with its name.
    pub(super) fn filters(&self) -> impl Iterator<Item = ConfigNode<'_>> {
        self.manager().items("http_filters")
    }
}

/// Address of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvoyAddress {
    /// IP address or host name, and port.
    Socket(String, u16),
    /// A unix socket.
    Pipe(String),
}

impl EnvoyAddress {
    /// Returns the socket address, unless the host is a name.
    pub fn numeric(&self) -> Option<SocketAddr> {
        let Self::Socket(host, port) = self else {
            return None;
        };
        let ip: IpAddr = host.parse().ok()?;
        Some(SocketAddr::new(ip.to_canonical(), *port))
    }
}

impl std::fmt::Display for EnvoyAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Socket(host, port) => write!(f, "{host}:{port}"),
            Self::Pipe(path) => f.write_str(path),
        }
    }
}

impl ConfigDump {
    /// Parses the page. Returns an error message if it is invalid.
    pub fn parse(page: &str) -> Result<Self, String> {
        let page: Value =
            serde_json::from_str(page).map_err(|error| format!("it is not JSON ({error})"))?;
        if !page["configs"].is_array() {
            return Err("it has no `configs`".to_owned());
        }
        let page = ConfigNode(&page);
        let bootstrap = items(page, "BootstrapConfigDump", &["bootstrap"]).next();
        let bootstrap = bootstrap.unwrap_or(ConfigNode(&Value::Null));
        let mut dump = Self {
            version: read_version(bootstrap),
            is_istio_proxy: bootstrap.at("node.metadata.ISTIO_VERSION").0.is_string(),
            ..Self::default()
        };
        // Later layers override earlier ones.
        for layer in bootstrap.items("layered_runtime.layers") {
            flatten_layer(layer.at("static_layer").0, "", &mut dump.runtime);
        }
        let lists = ["static_clusters", "dynamic_active_clusters"];
        for found in items(page, "ClustersConfigDump", &lists) {
            let (name, cluster) = read_part(found.at("cluster"), "a cluster")?;
            dump.clusters.insert(name, cluster);
        }
        let lists = ["static_endpoint_configs", "dynamic_endpoint_configs"];
        for found in items(page, "EndpointsConfigDump", &lists) {
            let assignment = found.at("endpoint_config");
            let name = assignment.text("cluster_name").to_owned();
            let hosts = dump.endpoints.entry(name).or_default();
            hosts.extend(read_hosts(assignment));
        }
        dump.listeners = read_listeners(page)?;
        Ok(dump)
    }

    /// Returns a cluster.
    pub(super) fn cluster<'d>(&'d self, name: &str) -> Option<EnvoyCluster<'d>> {
        let cluster = ConfigNode(self.clusters.get(name)?);
        Some(EnvoyCluster::new(self, cluster))
    }

    /// Returns all clusters by name.
    pub(super) fn clusters(&self) -> impl Iterator<Item = EnvoyCluster<'_>> {
        let clusters = self.clusters.values();
        clusters.map(|cluster| EnvoyCluster::new(self, ConfigNode(cluster)))
    }

    /// Returns the endpoints of a cluster, from EDS or else from the cluster itself.
    pub(super) fn hosts(&self, cluster: EnvoyCluster<'_>) -> Option<Vec<ClusterHost>> {
        let by_service = self.endpoints.get(cluster.eds_service_name());
        let from_eds = by_service.or_else(|| self.endpoints.get(cluster.name()));
        from_eds.cloned().or_else(|| {
            let assignment = cluster.node.at("load_assignment").present()?;
            Some(read_hosts(assignment))
        })
    }
}

/// Returns the items of lists in the sections of one kind. An item may also be a single object.
fn items<'p>(
    page: ConfigNode<'p>,
    kind: &'static str,
    lists: &'p [&'static str],
) -> impl Iterator<Item = ConfigNode<'p>> {
    let sections = page.items("configs");
    let sections = sections.filter(move |section| section.has_type(kind));
    sections.flat_map(move |section| {
        lists.iter().flat_map(move |list| {
            let single = section.at(list).present();
            let single = single.filter(|node| node.0.is_object());
            section.items(list).chain(single)
        })
    })
}

/// Returns the name and the content of a part of the page.
fn read_part(node: ConfigNode<'_>, kind: &str) -> Result<(String, Value), String> {
    if !node.0.is_object() {
        return Err(format!("{kind} in it cannot be parsed"));
    }
    Ok((node.text("name").to_owned(), node.0.clone()))
}

/// Adds the numeric keys of a runtime layer. Nested keys are joined by dots.
fn flatten_layer(value: &Value, path: &str, found: &mut BTreeMap<String, u64>) {
    if let Some(fields) = value.as_object() {
        for (name, value) in fields {
            let separator = if path.is_empty() { "" } else { "." };
            flatten_layer(value, &format!("{path}{separator}{name}"), found);
        }
    } else if let Some(number) = parse_integer(value) {
        found.insert(path.to_owned(), number);
    }
}

/// Parses a number of a protobuf `Value`, which may be a float or a string.
fn parse_integer(value: &Value) -> Option<u64> {
    let float = value.as_f64();
    let float = float.filter(|number| *number >= 0.0 && number.fract() == 0.0);
    let number = value.as_u64().or(float.map(|number| number as u64));
    number.or_else(|| value.as_str()?.parse().ok())
}

fn read_version(bootstrap: ConfigNode<'_>) -> Option<String> {
    let version = bootstrap.at("node.user_agent_build_version.version");
    let number = |key| version.number(key).unwrap_or_default();
    version.0.is_object().then(|| {
        let parts = ["major_number", "minor_number", "patch"].map(number);
        parts.map(|part| part.to_string()).join(".")
    })
}

fn read_listeners(page: ConfigNode<'_>) -> Result<Vec<HttpListener>, String> {
    let mut routes = BTreeMap::new();
    let lists = ["static_route_configs", "dynamic_route_configs"];
    for found in items(page, "RoutesConfigDump", &lists) {
        let (name, config) = read_part(found.at("route_config"), "a route configuration")?;
        routes.insert(name, config);
    }
    let extensions: Vec<ConfigNode<'_>> = items(page, "EcdsConfigDump", &["ecds_filters"])
        .map(|found| found.at("ecds_filter"))
        .collect();
    let mut listeners = Vec::new();
    for found in items(
        page,
        "ListenersConfigDump",
        &["static_listeners", "dynamic_listeners"],
    ) {
        let listener = found.at("listener").present();
        let listener = listener.or(found.at("active_state.listener").present());
        // A listener that is still warming has no active state and serves no requests.
        let Some(listener) = listener else {
            continue;
        };
        let (name, _) = read_part(listener, "a listener")?;
        let chains = listener.items("filter_chains");
        let chains = chains.chain([listener.at("default_filter_chain")]);
        let configs = chains.flat_map(|chain| chain.items("filters"));
        let configs = configs.map(|filter| filter.at("typed_config"));
        for manager in configs.filter(|config| config.has_type("HttpConnectionManager")) {
            let by_rds = routes.get(manager.text("rds.route_config_name"));
            let own = manager.at("route_config").present();
            listeners.push(HttpListener {
                name: name.clone(),
                connection_buffer: listener.number("per_connection_buffer_limit_bytes"),
                manager: with_extensions(manager.0.clone(), &extensions),
                routes: own.map(|routes| routes.0).or(by_rds).cloned(),
            });
        }
    }
    Ok(listeners)
}

/// Adds the configurations of filters from ECDS, which are in a separate section.
fn with_extensions(mut manager: Value, extensions: &[ConfigNode<'_>]) -> Value {
    let filters = manager["http_filters"].as_array_mut();
    for filter in filters.into_iter().flatten() {
        let found = extensions
            .iter()
            .find(|found| filter["typed_config"].is_null() && found.0["name"] == filter["name"]);
        if let Some(found) = found {
            filter["typed_config"] = found.0["typed_config"].clone();
        }
    }
    manager
}

fn read_hosts(assignment: ConfigNode<'_>) -> Vec<ClusterHost> {
    let hosts = assignment.items("endpoints");
    let hosts = hosts.flat_map(|list| list.items("lb_endpoints"));
    hosts
        .filter_map(|host| {
            let metadata = host.at("metadata.filter_metadata");
            Some(ClusterHost {
                address: read_address(host.at("endpoint.address"))?,
                socket_metadata: metadata.field("envoy.transport_socket_match").0.clone(),
            })
        })
        .collect()
}

fn read_address(address: ConfigNode<'_>) -> Option<EnvoyAddress> {
    if let Some(path) = address.given_text("pipe.path") {
        return Some(EnvoyAddress::Pipe(path.to_owned()));
    }
    let host = address.given_text("socket_address.address")?;
    let port = address.number("socket_address.port_value")?;
    Some(EnvoyAddress::Socket(host.to_owned(), port.try_into().ok()?))
}
