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

/// The file of a unix socket; removed by drop.
pub(super) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Gone already is as good as removed.
        let _removed = std::fs::remove_file(&self.0);
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

pub(super) async fn bind(listen: &ListenConfig) -> anyhow::Result<Vec<GrpcListener>> {
    let mut listeners = Vec::new();
    if let Some(address) = listen.tcp {
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("the ext_proc address {address} cannot be bound"))?;
        listeners.push(GrpcListener::Tcp(listener));
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
