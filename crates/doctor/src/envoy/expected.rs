//! Input of the checks of Envoy: the settings of warmroute that Envoy's configuration must match.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use warmroute_core::worker::{ModelName, Worker};
use warmroute_tokens::openai::paths::ApiPaths;

use super::dump::EnvoyAddress;

/// Settings of warmroute that Envoy's configuration must match.
#[derive(Clone, Debug)]
pub struct ExpectedEnvoy {
    /// TCP address of ext_proc.
    pub tcp: Option<SocketAddr>,
    /// Whether the TCP listener uses TLS.
    pub tls: bool,
    /// Unix socket of ext_proc.
    pub unix: Option<PathBuf>,
    /// Maximum body size in bytes.
    pub body_limit: u64,
    /// Deadline for tokenizing and routing.
    pub exchange_deadline: Duration,
    /// Maximum wait of a request in the queue, for its session or for its prefill, with a margin.
    /// `None` if requests never wait.
    pub longest_wait: Option<Duration>,
    /// Maximum wait for the new prefill of a retry, with a margin. `None` without sequential
    /// prefills.
    pub prefill_retry_wait: Option<Duration>,
    /// Envoy clusters of prefill workers that receive mirrored requests, with the models of these
    /// requests.
    pub mirror_clusters: BTreeMap<String, BTreeSet<ModelName>>,
    /// API paths.
    pub paths: ApiPaths,
    /// Whether requests get status 503 if no worker can be chosen.
    pub fail_closed: bool,
    /// Whether replies clear Envoy's route cache.
    pub clear_route_cache: bool,
    /// Number of fallback endpoints for retries.
    pub fallbacks: u32,
    /// Whether several replicas of warmroute run.
    pub replicas: bool,
    /// Pools by the service that the authority of a call names.
    pub authority_pools: BTreeMap<String, Arc<str>>,
    /// Headers that warmroute sets.
    pub headers: Vec<String>,
    /// Those of these headers that carry the worker's endpoint.
    pub endpoint_headers: Vec<String>,
    /// Headers that clients must not set.
    pub reserved_headers: Vec<String>,
    /// Endpoints file for Envoy, and its cluster.
    pub endpoints_file: Option<(PathBuf, String)>,
    /// xDS server, if configured.
    pub xds: Option<XdsServer>,
    /// Workers that may receive requests.
    pub workers: Vec<Worker>,
}

/// Settings of the xDS server.
#[derive(Clone, Debug)]
pub struct XdsServer {
    /// Listen address; `None` if it shares the ext_proc listener.
    pub listen: Option<SocketAddr>,
    /// Published clusters; the first has all workers.
    pub clusters: Vec<String>,
}

impl XdsServer {
    /// Returns whether the xDS server listens at an address. Host names always match.
    pub fn listens_at(&self, expected: &ExpectedEnvoy, address: &EnvoyAddress) -> bool {
        match (self.listen, address) {
            (None, _) => expected.is_ours(address),
            (Some(listen), EnvoyAddress::Socket(_, port)) => listens_at(listen, *port, address),
            (Some(_), EnvoyAddress::Pipe(_)) => false,
        }
    }
}

/// Returns whether an address is a listen address. Host names always match.
fn listens_at(ours: SocketAddr, port: u16, address: &EnvoyAddress) -> bool {
    let named = address.numeric();
    port == ours.port()
        && named.is_none_or(|named| ours.ip().is_unspecified() || named.ip() == ours.ip())
}

impl ExpectedEnvoy {
    /// Returns whether warmroute listens at an address. Host names always match.
    pub fn is_ours(&self, address: &EnvoyAddress) -> bool {
        match (address, self.tcp, &self.unix) {
            (EnvoyAddress::Pipe(path), _, Some(unix)) => unix.as_os_str() == path.as_str(),
            (EnvoyAddress::Socket(_, port), Some(ours), _) => listens_at(ours, *port, address),
            _ => false,
        }
    }

    /// Formats the listen addresses, and one of them as an Envoy endpoint.
    pub fn listen_text(&self) -> (String, String) {
        let pipe = self.unix.as_ref().map(|path| {
            let path = path.display().to_string();
            let endpoint = format!("address: {{pipe: {{path: {path}}}}}");
            (path, endpoint)
        });
        let socket = self.tcp.map(|tcp| {
            let ip = tcp.ip();
            let port = tcp.port();
            let endpoint =
                format!("address: {{socket_address: {{address: {ip}, port_value: {port}}}}}");
            (tcp.to_string(), endpoint)
        });
        let all = [pipe, socket].into_iter().flatten();
        let (addresses, endpoints): (Vec<String>, Vec<String>) = all.unzip();
        let endpoint = endpoints.into_iter().next();
        (addresses.join(" and "), endpoint.unwrap_or_default())
    }
}
