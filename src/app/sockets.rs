//! The sockets we listen on, and how connections come in by them. A unix socket that a dead process left behind is replaced,
//! one that answers is not.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};

use crate::admin::config::AdminConfig;
use crate::admin::token::{self, Token};
use crate::api::ApiConfig;
use crate::ext_proc::config::{LimitsConfig, ListenConfig};
use crate::metrics::Metrics;
use crate::tls::{Acceptor, Connection, Door, Protocol, Secrets, TlsConfig};

/// After how long a silent connection is asked whether it is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// How long the answer may take. Generous: a peer that is only busy must not lose its requests.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Most calls at a time on one connection of a caller that is not Envoy.
const MOST_STREAMS: u32 = 4096;

/// What all listeners have in common.
#[derive(Clone)]
pub(super) struct Sockets {
    pub(super) limits: LimitsConfig,
    /// What they read from files goes in here.
    pub(super) secrets: Secrets,
    pub(super) metrics: Arc<Metrics>,
}

type TcpDoor = Door<TcpIncoming, TcpStream>;
type UnixDoor = Door<UnixListenerStream, UnixStream>;

/// A bound socket for gRPC.
pub(super) struct GrpcListener {
    socket: Socket,
    /// Bytes of the headers of a call.
    header_list: u32,
    /// The most streams that one connection may have open, where that is bounded.
    streams: Option<u32>,
}

enum Socket {
    Tcp(TcpDoor, SocketAddr),
    Unix(UnixDoor, SocketFile),
}

/// A bound socket for the admin pages.
pub(super) struct AdminListener {
    door: TcpDoor,
    pub(super) address: SocketAddr,
    token: Option<Arc<Token>>,
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
        match &self.socket {
            Socket::Tcp(_, address) => Some(*address),
            Socket::Unix(..) => None,
        }
    }

    pub(super) fn path(&self) -> Option<PathBuf> {
        match &self.socket {
            Socket::Tcp(..) => None,
            Socket::Unix(_, file) => Some(file.0.clone()),
        }
    }

    /// Serves until `closing`, and then until the open streams have ended.
    pub(super) async fn serve(self, routes: Routes, closing: CancellationToken) -> anyhow::Result<()> {
        let server =
            Server::builder().http2_max_header_list_size(self.header_list).max_concurrent_streams(self.streams);
        match self.socket {
            Socket::Tcp(door, _) => {
                // A peer whose machine has gone says nothing more, and what its streams hold would be held for ever.
                let server = server
                    .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
                    .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
                    .add_routes(routes);
                server.serve_with_incoming_shutdown(door.into_stream(), closing.cancelled_owned()).await?;
            }
            Socket::Unix(door, file) => {
                let mut server = server;
                let server = server.add_routes(routes);
                server.serve_with_incoming_shutdown(door.into_stream(), closing.cancelled_owned()).await?;
                drop(file);
            }
        }
        Ok(())
    }
}

impl<S: Connected> Connected for Connection<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.socket().connect_info()
    }
}

impl Sockets {
    /// Binds where Envoy reaches us.
    pub(super) async fn bind(&self, listen: &ListenConfig) -> anyhow::Result<Vec<GrpcListener>> {
        let mut listeners = Vec::new();
        if let Some(address) = listen.tcp {
            let (door, address) = self.tcp("ext_proc", address, listen.tls.as_ref(), Protocol::Grpc).await?;
            listeners.push(self.grpc(Socket::Tcp(door, address), self.limits.streams));
        }
        if let Some(path) = &listen.unix {
            let listener = bind_unix(path).await;
            let listener =
                listener.with_context(|| format!("the ext_proc socket {} cannot be bound", path.display()))?;
            let incoming = UnixListenerStream::new(listener);
            let door = Door::new("ext_proc_unix", incoming, None, self.limits.door(), self.metrics.clone());
            listeners.push(self.grpc(Socket::Unix(door, SocketFile(path.clone())), self.limits.streams));
        }
        Ok(listeners)
    }

    /// Binds where callers that are not Envoy reach us.
    pub(super) async fn bind_api(&self, api: &ApiConfig) -> anyhow::Result<GrpcListener> {
        let (door, address) = self.tcp("api", api.listen, api.tls.as_ref(), Protocol::Grpc).await?;
        Ok(self.grpc(Socket::Tcp(door, address), Some(MOST_STREAMS)))
    }

    /// Binds where operators reach us.
    pub(super) async fn bind_admin(&self, admin: &AdminConfig) -> anyhow::Result<AdminListener> {
        let token = admin.token_file.clone().map(|file| Token::load(file, self.metrics.clone()));
        let token = token.transpose().map_err(anyhow::Error::msg).context("the token of the admin pages")?;
        if let Some(token) = &token {
            self.secrets.add(token.clone());
        }
        let (door, address) = self.tcp("admin", admin.listen, admin.tls.as_ref(), Protocol::Http).await?;
        Ok(AdminListener { door, address, token })
    }

    fn grpc(&self, socket: Socket, streams: Option<u32>) -> GrpcListener {
        let header_list = u32::try_from(self.limits.header_list.0).unwrap_or(u32::MAX);
        GrpcListener { socket, header_list, streams }
    }

    async fn tcp(
        &self,
        name: &'static str,
        address: SocketAddr,
        tls: Option<&TlsConfig>,
        protocol: Protocol,
    ) -> anyhow::Result<(TcpDoor, SocketAddr)> {
        let acceptor = tls.map(|tls| Acceptor::new(name, tls, protocol, self.metrics.clone()));
        let acceptor = acceptor.transpose().with_context(|| format!("the certificate of {name} cannot be used"))?;
        if let Some(acceptor) = &acceptor {
            self.secrets.add(acceptor.clone());
        }
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("the {name} address {address} cannot be bound"))?;
        let address = listener.local_addr()?;
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(KEEPALIVE_INTERVAL));
        Ok((Door::new(name, incoming, acceptor, self.limits.door(), self.metrics.clone()), address))
    }
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

impl AdminListener {
    /// Serves the pages until `stop`.
    pub(super) async fn serve(self, routes: axum::Router, stop: CancellationToken) -> anyhow::Result<()> {
        let routes = match &self.token {
            Some(token) => token::protect(routes, token.clone()),
            None => routes,
        };
        axum::serve(self, routes).with_graceful_shutdown(stop.cancelled_owned()).await?;
        Ok(())
    }
}

impl axum::serve::Listener for AdminListener {
    type Io = Connection<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.door.next().await {
            Some(connection) => (connection, self.address),
            // A listener does not end before it is dropped.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_successor_keeps_its_socket_when_the_predecessor_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ext_proc.sock");
        let listen = ListenConfig { tcp: None, unix: Some(path.clone()), tls: None };
        let sockets =
            Sockets { limits: LimitsConfig::default(), secrets: Secrets::default(), metrics: Arc::new(Metrics::new()) };
        let Some(Socket::Unix(listener, old_file)) =
            sockets.bind(&listen).await.unwrap().pop().map(|bound| bound.socket)
        else {
            panic!("no socket")
        };
        assert!(sockets.bind(&listen).await.is_err(), "a socket that answers is not replaced");
        // Draining: nobody listens any more, but the file is still held.
        drop(listener);
        let successor = sockets.bind(&listen).await.unwrap();
        drop(old_file);
        assert!(UnixStream::connect(&path).await.is_ok(), "the successor's socket is gone");
        drop(successor);
        assert!(!path.exists(), "the last one tidies up");
    }
}
