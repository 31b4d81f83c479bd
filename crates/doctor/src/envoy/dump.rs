//! The parts of Envoy's configuration that warmroute depends on, from the admin page
//! `/config_dump`. Envoy writes protobuf JSON: default values are omitted, 64-bit numbers are
//! strings, and durations are seconds with an `s`. Unknown fields are ignored.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::schema::{EnvoyCluster, HttpConnectionManager, ListenerConfig, RouteConfig, has_type};

/// Configuration of one Envoy.
#[derive(Clone, Debug, Default)]
pub struct ConfigDump {
    /// Reported version.
    pub version: Option<String>,
    /// HTTP connection managers with their listeners and routes.
    pub listeners: Vec<HttpListener>,
    /// Clusters by name.
    pub clusters: BTreeMap<String, EnvoyCluster>,
    /// Endpoints by EDS service name.
    pub endpoints: BTreeMap<String, Vec<ClusterHost>>,
    /// Numeric keys of the static runtime layers.
    pub runtime: BTreeMap<String, u64>,
    /// Whether the node identifies itself as an Istio proxy.
    pub is_istio_proxy: bool,
}

/// One endpoint of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterHost {
    /// Address.
    pub address: EnvoyAddress,
    /// Metadata in `envoy.transport_socket_match`, which selects the transport socket.
    pub socket_metadata: Value,
}

/// An HTTP connection manager with its listener.
#[derive(Clone, Debug)]
pub struct HttpListener {
    /// Name of the listener.
    pub name: String,
    /// Buffer limit of a connection in bytes, if set.
    pub connection_buffer: Option<u64>,
    /// Connection manager.
    pub hcm: HttpConnectionManager,
    /// Routes; `None` if Envoy has not received them.
    pub routes: Option<RouteConfig>,
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
        match self {
            EnvoyAddress::Socket(host, port) => Some(SocketAddr::new(
                host.parse::<IpAddr>().ok()?.to_canonical(),
                *port,
            )),
            EnvoyAddress::Pipe(_) => None,
        }
    }
}

impl std::fmt::Display for EnvoyAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EnvoyAddress::Socket(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            EnvoyAddress::Socket(host, port) => write!(f, "{host}:{port}"),
            EnvoyAddress::Pipe(path) => f.write_str(path),
        }
    }
}

impl ConfigDump {
    /// Parses the page. Returns an error message if it is invalid.
    pub fn parse(page: &str) -> Result<Self, String> {
        let page: Value =
            serde_json::from_str(page).map_err(|error| format!("it is not JSON ({error})"))?;
        let sections = page["configs"].as_array().ok_or("it has no `configs`")?;
        let sections = DumpSections(sections);
        let mut dump = Self {
            version: read_version(&page),
            ..Self::default()
        };
        for found in sections.items(
            "ClustersConfigDump",
            &["static_clusters", "dynamic_active_clusters"],
        ) {
            let cluster: EnvoyCluster = parse_part(&found["cluster"], "a cluster")?;
            dump.clusters.insert(cluster.name.clone(), cluster);
        }
        if let Some(bootstrap) = sections.bootstrap_config() {
            dump.runtime = read_runtime(bootstrap);
            dump.is_istio_proxy = bootstrap["node"]["metadata"]["ISTIO_VERSION"].is_string();
        }
        let mut routes = BTreeMap::new();
        for found in sections.items(
            "RoutesConfigDump",
            &["static_route_configs", "dynamic_route_configs"],
        ) {
            let config: RouteConfig = parse_part(&found["route_config"], "a route configuration")?;
            routes.insert(config.name.clone(), config);
        }
        for found in sections.items(
            "EndpointsConfigDump",
            &["static_endpoint_configs", "dynamic_endpoint_configs"],
        ) {
            let (name, endpoints) = read_endpoints(&found["endpoint_config"]);
            dump.endpoints.entry(name).or_default().extend(endpoints);
        }
        let extensions = sections.items("EcdsConfigDump", &["ecds_filters"]);
        let extensions: Vec<&Value> = extensions.map(|found| &found["ecds_filter"]).collect();
        for found in sections.items(
            "ListenersConfigDump",
            &["static_listeners", "dynamic_listeners"],
        ) {
            let listener = found
                .get("listener")
                .unwrap_or(&found["active_state"]["listener"]);
            // A listener that is still warming has no active state and serves no requests.
            if !listener.is_null() {
                dump.listeners.extend(read_listeners(
                    &parse_part(listener, "a listener")?,
                    &routes,
                    &extensions,
                )?);
            }
        }
        Ok(dump)
    }

    /// Returns the endpoint addresses of a cluster, from EDS or else from the cluster itself.
    pub fn cluster_addresses(&self, cluster: &EnvoyCluster) -> Option<Vec<EnvoyAddress>> {
        Some(
            self.cluster_hosts(cluster)?
                .into_iter()
                .map(|host| host.address)
                .collect(),
        )
    }

    /// Returns the endpoints of a cluster with their transport socket metadata.
    pub fn cluster_hosts(&self, cluster: &EnvoyCluster) -> Option<Vec<ClusterHost>> {
        let from_eds = self
            .endpoints
            .get(cluster.eds_service_name())
            .or_else(|| self.endpoints.get(&cluster.name));
        from_eds.cloned().or_else(|| {
            let assignment = cluster.load_assignment.as_ref()?;
            Some(read_endpoints(assignment).1)
        })
    }
}

/// Sections of the page.
struct DumpSections<'p>(&'p [Value]);

impl<'p> DumpSections<'p> {
    fn items(
        &self,
        kind: &'static str,
        lists: &'static [&'static str],
    ) -> impl Iterator<Item = &'p Value> + use<'p> {
        let of_kind = self.0.iter().filter(move |section| has_type(section, kind));
        of_kind.flat_map(move |section| {
            lists
                .iter()
                .filter_map(|list| section[list].as_array())
                .flatten()
        })
    }

    fn bootstrap_config(&self) -> Option<&'p Value> {
        let section = self
            .0
            .iter()
            .find(|section| has_type(section, "BootstrapConfigDump"))?;
        Some(&section["bootstrap"])
    }
}

/// Returns the numeric keys of the static layers. Later layers override earlier ones; nested keys
/// are joined by dots.
fn read_runtime(bootstrap: &Value) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for layer in bootstrap["layered_runtime"]["layers"]
        .as_array()
        .into_iter()
        .flatten()
    {
        flatten_layer(&layer["static_layer"], "", &mut found);
    }
    found
}

fn flatten_layer(value: &Value, path: &str, found: &mut BTreeMap<String, u64>) {
    if let Some(fields) = value.as_object() {
        for (name, value) in fields {
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            flatten_layer(value, &path, found);
        }
    } else if let Some(number) = parse_integer(value) {
        found.insert(path.to_owned(), number);
    }
}

/// Parses a number of a protobuf `Value`, which may be a float or a string.
fn parse_integer(value: &Value) -> Option<u64> {
    let text = |text: &str| text.parse().ok();
    let float = value
        .as_f64()
        .filter(|number| *number >= 0.0 && number.fract() == 0.0);
    value
        .as_u64()
        .or(float.map(|number| number as u64))
        .or_else(|| value.as_str().and_then(text))
}

fn read_version(page: &Value) -> Option<String> {
    let bootstrap = DumpSections(page["configs"].as_array()?).bootstrap_config()?;
    let version = &bootstrap["node"]["user_agent_build_version"]["version"];
    let number = |key: &str| version[key].as_u64().unwrap_or_default();
    version.is_object().then(|| {
        format!(
            "{}.{}.{}",
            number("major_number"),
            number("minor_number"),
            number("patch")
        )
    })
}

/// Parses one part of the page.
pub fn parse_part<T: DeserializeOwned>(value: &Value, name: &str) -> Result<T, String> {
    T::deserialize(value).map_err(|error| format!("{name} in it cannot be parsed ({error})"))
}

fn read_listeners(
    listener: &ListenerConfig,
    routes: &BTreeMap<String, RouteConfig>,
    extensions: &[&Value],
) -> Result<Vec<HttpListener>, String> {
    let chains = listener
        .filter_chains
        .iter()
        .chain(&listener.default_filter_chain);
    let managers = chains
        .flat_map(|chain| &chain.filters)
        .map(|filter| &filter.typed_config);
    let mut servers = Vec::new();
    for config in managers.filter(|config| has_type(config, "HttpConnectionManager")) {
        let mut hcm: HttpConnectionManager = parse_part(config, "a connection manager")?;
        for filter in &mut hcm.http_filters {
            // A filter configuration from ECDS is in a separate section.
            let found = extensions
                .iter()
                .find(|found| filter.typed_config.is_null() && found["name"] == filter.name);
            if let Some(found) = found {
                filter.typed_config = found["typed_config"].clone();
            }
        }
        let named = hcm
            .rds
            .as_ref()
            .and_then(|rds| routes.get(&rds.route_config_name));
        servers.push(HttpListener {
            name: listener.name.clone(),
            connection_buffer: listener.per_connection_buffer_limit_bytes,
            routes: hcm.route_config.clone().or_else(|| named.cloned()),
            hcm,
        });
    }
    Ok(servers)
}

fn read_endpoints(assignment: &Value) -> (String, Vec<ClusterHost>) {
    let lists = assignment["endpoints"].as_array().into_iter().flatten();
    let hosts = lists.flat_map(|list| list["lb_endpoints"].as_array().into_iter().flatten());
    let hosts = hosts.filter_map(|host| {
        let socket_metadata =
            host["metadata"]["filter_metadata"]["envoy.transport_socket_match"].clone();
        Some(ClusterHost {
            address: read_address(&host["endpoint"]["address"])?,
            socket_metadata,
        })
    });
    (
        assignment["cluster_name"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
        hosts.collect(),
    )
}

fn read_address(address: &Value) -> Option<EnvoyAddress> {
    if let Some(path) = address["pipe"]["path"].as_str() {
        return Some(EnvoyAddress::Pipe(path.to_owned()));
    }
    let socket = &address["socket_address"];
    let port = u16::try_from(socket["port_value"].as_u64()?).ok()?;
    Some(EnvoyAddress::Socket(
        socket["address"].as_str()?.to_owned(),
        port,
    ))
}
