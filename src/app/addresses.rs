//! Checks that the TCP addresses of the listeners are free, before any other part is built.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::net::TcpSocket;

use super::unix;
use crate::config::Config;

/// Fails if another process listens at one of the addresses, unless that process is draining: then it returns true. Nothing
/// is left bound: a socket that accepts connections before the service runs would leave every request unanswered.
pub(super) async fn ensure_free(config: &Config) -> anyhow::Result<bool> {
    if let Some(socket) = &config.listen.unix
        && unix::is_left(socket).await
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
        ("health", config.listen.health),
        ("admin", Some(config.admin.listen)),
        ("xds", xds.and_then(|xds| xds.listen)),
        ("ext_proc", config.listen.tcp),
        ("api", config.api.as_ref().map(|api| api.listen)),
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
