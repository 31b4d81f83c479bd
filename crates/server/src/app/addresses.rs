//! Addresses of the listeners: a check that they are free, before any other part is built, and the
//! number of connections that fit into the limit of file descriptors.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::net::TcpSocket;
use tracing::warn;
use warmroute_core::worker::Worker;
use warmroute_runtime::descriptors::{self, DescriptorDemand};

use super::{listed_workers, unix_socket};
use crate::config::{Config, WorkerSource};
use crate::ext_proc::config::ListenerLimitsConfig;

/// Minimum number of worker ranks for which descriptors are kept if discovery finds the workers.
const DISCOVERED_RANKS: u64 = 256;

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

/// Returns the descriptors that a process with this configuration may need.
pub fn descriptor_demand(config: &Config, workers: &[Worker]) -> DescriptorDemand {
    let unix_sockets = u64::from(config.listeners.ext_proc.unix_socket.is_some());
    let ranks = workers
        .iter()
        .map(|worker| u64::from(worker.ranks.size.get()))
        .sum();
    DescriptorDemand {
        listeners: listeners(config).len() as u64 + unix_sockets,
        max_connections: u64::from(config.listeners.limits.max_connections),
        ranks: match config.worker_source() {
            WorkerSource::Fixed(_) | WorkerSource::File(_) => ranks,
            WorkerSource::Dns(_) | WorkerSource::Kubernetes(_) => DISCOVERED_RANKS.max(ranks),
        },
    }
}

/// Returns the limits of the listeners, with fewer connections if the limit of file descriptors
/// is too low for the configured number.
pub(super) fn fitting_limits(config: &Config) -> ListenerLimitsConfig {
    let limits = config.listeners.limits.clone();
    // An unreadable workers file is reported by the task that watches it.
    let demand = descriptor_demand(config, &listed_workers(config).unwrap_or_default());
    let limit = descriptors::current_limit();
    let fitting = demand.max_connections_within(limit);
    if limit.is_some_and(|limit| limit < demand.total()) {
        warn!(
            limit,
            needed = demand.total(),
            listeners = demand.listeners,
            ranks = demand.ranks,
            max_connections = demand.max_connections,
            reduced_to = fitting,
            fix = demand.fix(),
            "limit of file descriptors is too low; listeners accept fewer connections"
        );
    }
    limits.scale_connections(u32::try_from(fitting).unwrap_or(u32::MAX))
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
