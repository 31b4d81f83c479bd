//! Requests to Envoy's admin interface, and connections to the listeners of warmroute.

use std::path::Path;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};

use warmroute_runtime::causes::join_causes;
use warmroute_server::config::Config;

/// Returns Envoy's `/config_dump`.
pub(super) async fn fetch_config_dump(
    url: &str,
    ca_file: Option<&Path>,
    timeout: Duration,
) -> Result<String, String> {
    let url = format!("{}/config_dump?include_eds", url.trim_end_matches('/'));
    let client = crate::cmd::admin_client::client_builder(&url, ca_file)
        .map_err(|error| format!("{error:#}"))?;
    let client = client
        .timeout(timeout)
        .build()
        .map_err(|error| error.to_string())?;
    let answer = client
        .get(&url)
        .send()
        .await
        .map_err(|error| format!("{url}: {}", join_causes(&error)))?;
    let status = answer.status();
    if !status.is_success() {
        return Err(format!("{url} returned {status}"));
    }
    answer
        .text()
        .await
        .map_err(|error| format!("{url}: {}", join_causes(&error)))
}

/// Returns the configured ext_proc addresses, and whether each accepts connections.
pub(super) async fn probe_listeners(
    config: &Config,
    timeout: Duration,
) -> Vec<(String, Option<bool>)> {
    let mut addresses = Vec::new();
    if let Some(path) = &config.listeners.ext_proc.unix_socket {
        let listens = tokio::time::timeout(timeout, UnixStream::connect(path))
            .await
            .is_ok_and(|socket| socket.is_ok());
        addresses.push((path.display().to_string(), Some(listens)));
    }
    if let Some(mut address) = config.listeners.ext_proc.address {
        if address.ip().is_unspecified() {
            address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        let listens = tokio::time::timeout(timeout, TcpStream::connect(address))
            .await
            .is_ok_and(|socket| socket.is_ok());
        addresses.push((address.to_string(), Some(listens)));
    }
    addresses
}
