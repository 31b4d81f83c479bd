//! Envoy's configuration as its admin page `/config_dump` tells it, as far as warmroute depends on it. Envoy writes
//! protobuf's JSON: what has its default value is left out, large numbers are text, lengths of time are seconds with an
//! `s`. What is not known here is ignored, because every Envoy has more of it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::parts::{Cluster, Hcm, Listener, RouteConfig};

/// What one Envoy is doing.
#[derive(Clone, Debug, Default)]
pub struct Dump {
    /// The version it says it has.
    pub version: Option<String>,
    /// Every HTTP connection manager, with the listener it belongs to and the routes it uses.
    pub servers: Vec<Server>,
    /// Clusters by name.
    pub clusters: BTreeMap<String, Cluster>,
    /// Endpoints by the name under which a cluster asks for them.
    pub endpoints: BTreeMap<String, Vec<ClusterHost>>,
    /// Numbers of the static runtime layers by their dotted keys.
    pub runtime: BTreeMap<String, u64>,
    /// Whether the node describes itself as a proxy of Istio.
    pub is_istio_proxy: bool,
}

/// One endpoint of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterHost {
    /// Its address.
    pub address: Address,
    /// Its metadata in `envoy.transport_socket_match`, by which Envoy selects the transport socket.
    pub socket_metadata: Value,
}

/// One HTTP connection manager.
#[derive(Clone, Debug)]
pub struct Server {
    /// Name of its listener.
    pub listener: String,
    /// What a connection may hold in memory, where that is said.
    pub connection_buffer: Option<u64>,
    /// Itself.
    pub hcm: Hcm,
    /// Its routes; none where Envoy has not got them.
    pub routes: Option<RouteConfig>,
}

/// Where something listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host, by address or by name, and a port.
    Socket(String, u16),
    /// A unix socket.
    Pipe(String),
}

impl Address {
    /// The address as numbers, where it is written so.
    pub fn numeric(&self) -> Option<SocketAddr> {
        match self {
            Address::Socket(host, port) => Some(SocketAddr::new(
                host.parse::<IpAddr>().ok()?.to_canonical(),
                *port,
            )),
            Address::Pipe(_) => None,
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Socket(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Socket(host, port) => write!(f, "{host}:{port}"),
            Address::Pipe(path) => f.write_str(path),
        }
    }
}

impl Dump {
    /// Reads the page; what is wrong with it where it is not one.
    pub fn read(page: &str) -> Result<Self, String> {
        let page: Value =
            serde_json::from_str(page).map_err(|error| format!("it is no JSON ({error})"))?;
        let sections = page["configs"].as_array().ok_or("it has no `configs`")?;
        let sections = Sections(sections);
        let mut dump = Self {
            version: version(&page),
            ..Self::default()
        };
        for found in sections.items(
            "ClustersConfigDump",
            &["static_clusters", "dynamic_active_clusters"],
        ) {
            let cluster: Cluster = part(&found["cluster"], "a cluster")?;
            dump.clusters.insert(cluster.name.clone(), cluster);
        }
        if let Some(bootstrap) = sections.bootstrap() {
            dump.runtime = runtime(bootstrap);
            dump.is_istio_proxy = bootstrap["node"]["metadata"]["ISTIO_VERSION"].is_string();
        }
        let mut routes = BTreeMap::new();
        for found in sections.items(
            "RoutesConfigDump",
            &["static_route_configs", "dynamic_route_configs"],
        ) {
            let config: RouteConfig = part(&found["route_config"], "a route configuration")?;
            routes.insert(config.name.clone(), config);
        }
        for found in sections.items(
            "EndpointsConfigDump",
            &["static_endpoint_configs", "dynamic_endpoint_configs"],
        ) {
            let (name, endpoints) = endpoints(&found["endpoint_config"]);
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
            // One that is only warming up serves nobody yet.
            if !listener.is_null() {
                dump.servers.extend(servers(
                    &part(listener, "a listener")?,
                    &routes,
                    &extensions,
                )?);
            }
        }
        Ok(dump)
    }

    /// The endpoints of a cluster, where Envoy told them; those that stand in the cluster itself otherwise.
    pub fn endpoints_of(&self, cluster: &Cluster) -> Option<Vec<Address>> {
        Some(
            self.hosts_of(cluster)?
                .into_iter()
                .map(|host| host.address)
                .collect(),
        )
    }

    /// The same with what selects their transport sockets.
    pub fn hosts_of(&self, cluster: &Cluster) -> Option<Vec<ClusterHost>> {
        let told = self
            .endpoints
            .get(cluster.asked_for())
            .or_else(|| self.endpoints.get(&cluster.name));
        told.cloned().or_else(|| {
            let assignment = cluster.load_assignment.as_ref()?;
            Some(endpoints(assignment).1)
        })
    }
}

/// The sections of the page.
struct Sections<'p>(&'p [Value]);

impl<'p> Sections<'p> {
    fn items(
        &self,
        kind: &'static str,
        lists: &'static [&'static str],
    ) -> impl Iterator<Item = &'p Value> + use<'p> {
        let of_kind = self.0.iter().filter(move |section| is(section, kind));
        of_kind.flat_map(move |section| {
            lists
                .iter()
                .filter_map(|list| section[list].as_array())
                .flatten()
        })
    }

    fn bootstrap(&self) -> Option<&'p Value> {
        let section = self
            .0
            .iter()
            .find(|section| is(section, "BootstrapConfigDump"))?;
        Some(&section["bootstrap"])
    }
}

/// The numbers of the static layers. A later layer overrides an earlier one, and the path to a nested value is its key.
fn runtime(bootstrap: &Value) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for layer in bootstrap["layered_runtime"]["layers"]
        .as_array()
        .into_iter()
        .flatten()
    {
        flatten(&layer["static_layer"], "", &mut found);
    }
    found
}

fn flatten(value: &Value, path: &str, found: &mut BTreeMap<String, u64>) {
    if let Some(fields) = value.as_object() {
        for (name, value) in fields {
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            flatten(value, &path, found);
        }
    } else if let Some(number) = integer(value) {
        found.insert(path.to_owned(), number);
    }
}

/// A number of a protobuf `Value`, which may be written as a floating point number or as text.
fn integer(value: &Value) -> Option<u64> {
    let text = |text: &str| text.parse().ok();
    let float = value
        .as_f64()
        .filter(|number| *number >= 0.0 && number.fract() == 0.0);
    value
        .as_u64()
        .or(float.map(|number| number as u64))
        .or_else(|| value.as_str().and_then(text))
}

/// Whether a value says it is of this message type.
pub fn is(value: &Value, kind: &str) -> bool {
    value["@type"]
        .as_str()
        .and_then(|name| name.rsplit(['.', '/']).next())
        == Some(kind)
}

fn version(page: &Value) -> Option<String> {
    let bootstrap = Sections(page["configs"].as_array()?).bootstrap()?;
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

/// One part of the page, read.
pub fn part<T: DeserializeOwned>(value: &Value, what: &str) -> Result<T, String> {
    T::deserialize(value).map_err(|error| format!("{what} in it cannot be read ({error})"))
}

fn servers(
    listener: &Listener,
    routes: &BTreeMap<String, RouteConfig>,
    extensions: &[&Value],
) -> Result<Vec<Server>, String> {
    let chains = listener
        .filter_chains
        .iter()
        .chain(&listener.default_filter_chain);
    let managers = chains
        .flat_map(|chain| &chain.filters)
        .map(|filter| &filter.typed_config);
    let mut servers = Vec::new();
    for config in managers.filter(|config| is(config, "HttpConnectionManager")) {
        let mut hcm: Hcm = part(config, "a connection manager")?;
        for filter in &mut hcm.http_filters {
            // A filter that came by discovery stands elsewhere on the page.
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
        servers.push(Server {
            listener: listener.name.clone(),
            connection_buffer: listener.per_connection_buffer_limit_bytes,
            routes: hcm.route_config.clone().or_else(|| named.cloned()),
            hcm,
        });
    }
    Ok(servers)
}

fn endpoints(assignment: &Value) -> (String, Vec<ClusterHost>) {
    let lists = assignment["endpoints"].as_array().into_iter().flatten();
    let hosts = lists.flat_map(|list| list["lb_endpoints"].as_array().into_iter().flatten());
    let hosts = hosts.filter_map(|host| {
        let socket_metadata =
            host["metadata"]["filter_metadata"]["envoy.transport_socket_match"].clone();
        Some(ClusterHost {
            address: address(&host["endpoint"]["address"])?,
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

fn address(address: &Value) -> Option<Address> {
    if let Some(path) = address["pipe"]["path"].as_str() {
        return Some(Address::Pipe(path.to_owned()));
    }
    let socket = &address["socket_address"];
    let port = u16::try_from(socket["port_value"].as_u64()?).ok()?;
    Some(Address::Socket(
        socket["address"].as_str()?.to_owned(),
        port,
    ))
}

/// A length of time as protobuf writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let seconds = text
            .strip_suffix('s')
            .and_then(|seconds| seconds.parse::<f64>().ok());
        let length = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        length
            .map(Self)
            .ok_or_else(|| serde::de::Error::custom(format!("`{text}` is no length of time")))
    }
}

/// A number that may be written as text.
pub fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::Number(number) => Ok(number.as_u64()),
        Value::String(text) => Ok(text.parse().ok()),
        other => Err(serde::de::Error::custom(format!("{other} is no number"))),
    }
}
