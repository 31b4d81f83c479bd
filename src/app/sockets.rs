//! The sockets we listen on. A unix socket that a dead process left behind is replaced, one that answers is not.

use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::ext_proc::config::ListenConfig;

/// A bound socket for gRPC.
pub(super) enum GrpcListener {
    Tcp(TcpListener),
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
            GrpcListener::Tcp(listener) => listener.local_addr().ok(),
            GrpcListener::Unix(..) => None,
        }
    }

    pub(super) fn path(&self) -> Option<PathBuf> {
        match self {
            GrpcListener::Tcp(_) => None,
            GrpcListener::Unix(_, file) => Some(file.0.clone()),
        }
    }

    /// Serves until `closing`, and then until the open streams have ended.
    pub(super) async fn serve(self, routes: Routes, closing: CancellationToken) -> anyhow::Result<()> {
        let server = Server::builder().add_routes(routes);
        match self {
            GrpcListener::Tcp(listener) => {
                let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                server.serve_with_incoming_shutdown(incoming, closing.cancelled_owned()).await?;
            }
            GrpcListener::Unix(listener, file) => {
                let incoming = UnixListenerStream::new(listener);
                server.serve_with_incoming_shutdown(incoming, closing.cancelled_owned()).await?;
                drop(file);
            }
        }
        Ok(())
    }
}

/// Binds one address; `what` is for the message where that fails.
pub(super) async fn bind_tcp(what: &str, address: SocketAddr) -> anyhow::Result<GrpcListener> {
    let listener = TcpListener::bind(address).await;
    Ok(GrpcListener::Tcp(listener.with_context(|| format!("the {what} address {address} cannot be bound"))?))
}

pub(super) async fn bind(listen: &ListenConfig) -> anyhow::Result<Vec<GrpcListener>> {
    let mut listeners = Vec::new();
    if let Some(address) = listen.tcp {
        listeners.push(bind_tcp("ext_proc", address).await?);
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
