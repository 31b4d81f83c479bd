//! The sockets we listen on. A unix socket that a dead process left behind is replaced, one that answers is not.

use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

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

/// The file of a unix socket; removed by drop, unless a successor has put its own in its place while we drained. Dropped
/// after the listener, so that whoever answers is somebody else. Inodes would not tell: their numbers are used again.
pub(super) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_socket = std::fs::symlink_metadata(&self.0).is_ok_and(|found| found.file_type().is_socket());
        if is_socket && std::os::unix::net::UnixStream::connect(&self.0).is_err() {
            // Gone already is as good as removed.
            let _removed = std::fs::remove_file(&self.0);
        }
    }
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
            GrpcListener::Unix(_, file) => Some(file.0.clone()),
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
        let listener = bind_unix(path).await;
        let listener = listener.with_context(|| format!("the ext_proc socket {} cannot be bound", path.display()))?;
        listeners.push(GrpcListener::Unix(listener, SocketFile(path.clone())));
    }
    Ok(listeners)
}

async fn bind_unix(path: &Path) -> anyhow::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    if UnixStream::connect(path).await.is_ok() {
        bail!("another process answers on it");
    }
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            bail!("there is a file that is not a socket");
        }
        std::fs::remove_file(path)?;
    }
    Ok(UnixListener::bind(path)?)
}

pub(super) async fn serve_admin(
    listener: TcpListener,
    routes: axum::Router,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_successor_keeps_its_socket_when_the_predecessor_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ext_proc.sock");
        let listen = ListenConfig { tcp: None, unix: Some(path.clone()) };
        let Some(GrpcListener::Unix(listener, old_file)) = bind(&listen).await.unwrap().pop() else {
            panic!("no socket")
        };
        assert!(bind(&listen).await.is_err(), "a socket that answers is not replaced");
        // Draining: nobody listens any more, but the file is still held.
        drop(listener);
        let successor = bind(&listen).await.unwrap();
        drop(old_file);
        assert!(UnixStream::connect(&path).await.is_ok(), "the successor's socket is gone");
        drop(successor);
        assert!(!path.exists(), "the last one tidies up");
    }
}
