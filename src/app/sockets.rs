//! The sockets we listen on.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use super::unix::{self, SocketFile};
use crate::ext_proc::config::ListenConfig;

/// After how long a silent connection is asked whether it is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// How long the answer may take. Generous: a peer that is only busy must not lose its requests.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Most calls at a time on one connection of a caller that is not Envoy.
const MOST_STREAMS: u32 = 4096;

/// A bound socket for gRPC.
pub(super) enum GrpcListener {
    /// Beside it the most streams that one connection may have open, where that is bounded.
    Tcp(TcpListener, Option<u32>),
    Unix(UnixListener, SocketFile),
}

impl GrpcListener {
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            GrpcListener::Tcp(listener, _) => listener.local_addr().ok(),
            GrpcListener::Unix(..) => None,
        }
    }

    pub(super) fn path(&self) -> Option<PathBuf> {
        match self {
            GrpcListener::Tcp(..) => None,
            GrpcListener::Unix(_, file) => Some(file.path().to_owned()),
        }
    }

    /// Serves until `closing`, and then until the open streams have ended.
    pub(super) async fn serve(self, routes: Routes, closing: CancellationToken) -> anyhow::Result<()> {
        let mut server = Server::builder();
        match self {
            GrpcListener::Tcp(listener, streams) => {
                // A peer whose machine has gone says nothing more, and what its streams hold would be held for ever.
                let incoming =
                    TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(KEEPALIVE_INTERVAL));
                let server = server
                    .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
                    .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
                    .max_concurrent_streams(streams)
                    .add_routes(routes);
                server.serve_with_incoming_shutdown(incoming, closing.cancelled_owned()).await?;
            }
            GrpcListener::Unix(listener, file) => {
                let incoming = UnixListenerStream::new(listener);
                server.add_routes(routes).serve_with_incoming_shutdown(incoming, closing.cancelled_owned()).await?;
                drop(file);
            }
        }
        Ok(())
    }
}

/// Binds one address for callers that are not Envoy; `what` is for the message where that fails.
pub(super) async fn bind_tcp(what: &str, address: SocketAddr) -> anyhow::Result<GrpcListener> {
    Ok(GrpcListener::Tcp(bind_address(what, address).await?, Some(MOST_STREAMS)))
}

async fn bind_address(what: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.with_context(|| format!("the {what} address {address} cannot be bound"))
}

pub(super) async fn bind(listen: &ListenConfig) -> anyhow::Result<Vec<GrpcListener>> {
    let mut listeners = Vec::new();
    if let Some(address) = listen.tcp {
        // Envoy holds a stream per request on few connections.
        listeners.push(GrpcListener::Tcp(bind_address("ext_proc", address).await?, None));
    }
    if let Some(path) = &listen.unix {
        let bound = unix::bind(path).await;
        let (listener, file) =
            bound.with_context(|| format!("the ext_proc socket {} cannot be bound", path.display()))?;
        listeners.push(GrpcListener::Unix(listener, file));
    }
    Ok(listeners)
}

pub(super) async fn serve_admin(
    listener: TcpListener,
    routes: axum::Router,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await?;
    Ok(())
}
