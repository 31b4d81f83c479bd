//! Checks that the addresses of the listeners are free, before any other part is built.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::net::TcpSocket;

use super::unix_socket;
use crate::config::Config;

/// Fails if another process listens at one of the addresses or at the unix socket. Returns true if
/// that process is draining.
///
/// No socket stays bound: a socket that accepts connections before the service runs would leave
/// every request unanswered.
pub(super) async fn ensure_free(config: &Config) -> anyhow::Result<bool> {
    if let Some(socket) = &config.listeners.ext_proc.unix_socket
        && unix_socket::is_replaceable(socket)
            .await
            .with_context(|| unix_socket::describe_bind_failure(socket))?
    {
        return Ok(true);
    }
    listeners(config)
        .into_iter()
        .try_for_each(|(name, address)| {
            is_free(address)
                .with_context(|| format!("the {name} address {address} cannot be bound"))
        })?;
    Ok(false)
}

fn listeners(config: &Config) -> Vec<(&'static str, SocketAddr)> {
    let xds = config.envoy.as_ref().and_then(|envoy| envoy.xds.as_ref());
    let listeners = [
        ("health", config.listeners.ext_proc.health_address),
        ("admin", Some(config.listeners.admin.address)),
        ("xds", xds.and_then(|xds| xds.address)),
        ("ext_proc", config.listeners.ext_proc.address),
        ("api", config.listeners.api.as_ref().map(|api| api.address)),
    ];
    listeners
        .into_iter()
        .filter_map(|(name, address)| Some((name, address?)))
        .collect()
}

fn is_free(address: SocketAddr) -> std::io::Result<()> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)
}
