//! Requests to Envoy's admin interface, and connections to the listeners of warmroute.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};

use warmroute_doctor::envoy::counters::{COUNTER_FILTER, CounterSamples, EnvoyCounters};
use warmroute_doctor::envoy::dump::ConfigDump;
use warmroute_runtime::causes::join_causes;
use warmroute_server::config::Config;

/// Time between two samples of Envoy's counters.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Client of Envoy's admin interface.
pub(super) struct EnvoyAdminClient {
    url: String,
    http: reqwest::Client,
}

impl EnvoyAdminClient {
    /// Creates a client for the admin address `url`.
    pub(super) fn new(
        url: &str,
        ca_file: Option<&Path>,
        timeout: Duration,
    ) -> Result<Self, String> {
        let url = url.trim_end_matches('/').to_owned();
        let client = crate::cmd::admin_client::client_builder(&url, ca_file)
            .map_err(|error| format!("{error:#}"))?;
        let http = client
            .timeout(timeout)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { url, http })
    }

    /// Returns the configuration and the counters of Envoy.
    pub(super) async fn fetch_state(&self) -> Result<(ConfigDump, CounterSamples), String> {
        let page = self.get("/config_dump?include_eds").await?;
        let dump = ConfigDump::parse(&page)
            .map_err(|problem| format!("{}/config_dump: {problem}", self.url))?;
        let first = self.fetch_counters().await?;
        tokio::time::sleep(SAMPLE_INTERVAL).await;
        let last = self.fetch_counters().await?;
        Ok((dump, CounterSamples { first, last }))
    }

    async fn fetch_counters(&self) -> Result<EnvoyCounters, String> {
        let page = self.get(&format!("/stats?filter={COUNTER_FILTER}")).await?;
        Ok(EnvoyCounters::parse(&page))
    }

    async fn get(&self, path: &str) -> Result<String, String> {
        let url = format!("{}{path}", self.url);
        let describe = |error: reqwest::Error| format!("{url}: {}", join_causes(&error));
        let answer = self.http.get(&url).send().await.map_err(describe)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(format!("{url} returned {status}"));
        }
        answer.text().await.map_err(describe)
    }
}

/// Returns the address at which a listener of this machine is reachable.
pub(super) fn reachable_address(mut listener: SocketAddr) -> SocketAddr {
    if listener.ip().is_unspecified() {
        listener.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    listener
}

/// Returns the configured ext_proc addresses, and whether each accepts connections.
pub(super) async fn probe_listeners(config: &Config, timeout: Duration) -> Vec<(String, bool)> {
    let ext_proc = &config.listeners.ext_proc;
    let mut addresses = Vec::new();
    if let Some(path) = &ext_proc.unix_socket {
        let connected = tokio::time::timeout(timeout, UnixStream::connect(path)).await;
        addresses.push((path.display().to_string(), matches!(connected, Ok(Ok(_)))));
    }
    if let Some(address) = ext_proc.address.map(reachable_address) {
        let connected = tokio::time::timeout(timeout, TcpStream::connect(address)).await;
        addresses.push((address.to_string(), matches!(connected, Ok(Ok(_)))));
    }
    addresses
}
