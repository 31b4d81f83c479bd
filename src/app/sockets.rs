//! The sockets we listen on, and how connections come in by them.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};
use tracing::info;

use super::cut::Cuttable;
use super::unix::{self, Place, SocketFile};
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

/// Streams that a peer may give up at once. A connection carries the exchanges of thousands of clients, and Envoy resets
/// those that took too long or whose client has left, all in one moment where we were busy. The library takes 20 of them for
/// an attack and ends the connection, with every other exchange on it.
const RESETS: usize = 100_000;

/// Bytes of a frame that Envoy may send. With the 16 KiB that are usual a long body comes in dozens of pieces, each of which
/// is read, framed and handed over for itself.
const FRAME: u32 = 256 << 10;

/// Most calls at a time on one connection of a caller that is not Envoy.
const MOST_STREAMS: u32 = 4096;

/// What all listeners have in common.
#[derive(Clone)]
pub(super) struct Sockets {
    pub(super) limits: LimitsConfig,
    /// Whether a process that is leaving has our addresses; then we wait for them, and meanwhile do what we can.
    pub(super) heir: bool,
    /// What they read from files goes in here.
    pub(super) secrets: Secrets,
    pub(super) metrics: Arc<Metrics>,
}

type TcpDoor = Door<Incoming, TcpStream>;
type Incoming = Pin<Box<dyn Stream<Item = io::Result<TcpStream>> + Send>>;
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
            Socket::Unix(_, file) => Some(file.path().to_owned()),
        }
    }

    /// The place of its unix socket, if it is one.
    pub(super) fn place(&self) -> Option<Place> {
        match &self.socket {
            Socket::Tcp(..) => None,
            Socket::Unix(_, file) => Some(file.place()),
        }
    }

    /// Serves until `closing`, and then until the open streams have ended or are cut.
    pub(super) async fn serve(
        self,
        routes: Routes,
        closing: CancellationToken,
        cut: CancellationToken,
    ) -> anyhow::Result<()> {
        let closing = closing.cancelled_owned();
        let server = Server::builder()
            .http2_max_header_list_size(self.header_list)
            .max_concurrent_streams(self.streams)
            .max_frame_size(Some(FRAME))
            .http2_max_pending_accept_reset_streams(Some(RESETS))
            .http2_max_local_error_reset_streams(Some(RESETS));
        match self.socket {
            Socket::Tcp(door, _) => {
                // A peer whose machine has gone says nothing more, and what its streams hold would be held for ever.
                let server = server
                    .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
                    .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
                    .add_routes(routes);
                let incoming = door.into_stream().map_ok(|connection| Cuttable::new(connection, &cut));
                server.serve_with_incoming_shutdown(incoming, closing).await?;
            }
            Socket::Unix(door, file) => {
                let mut server = server;
                let server = server.add_routes(routes);
                let incoming = door.into_stream().map_ok(|connection| Cuttable::new(connection, &cut));
                server.serve_with_incoming_shutdown(incoming, closing).await?;
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
            let bound = unix::bind(path).await;
            let (listener, file) =
                bound.with_context(|| format!("the ext_proc socket {} cannot be bound", path.display()))?;
            let incoming = UnixListenerStream::new(listener);
            let door = Door::new("ext_proc_unix", incoming, None, self.limits.door(), self.metrics.clone());
            listeners.push(self.grpc(Socket::Unix(door, file), self.limits.streams));
        }
        Ok(listeners)
    }

    /// Binds where we say how we are, and nothing else; in the clear, as those who ask expect.
    pub(super) async fn bind_health(&self, address: SocketAddr) -> anyhow::Result<GrpcListener> {
        let (door, address) = self.tcp("health", address, None, Protocol::Grpc).await?;
        Ok(self.grpc(Socket::Tcp(door, address), Some(MOST_STREAMS)))
    }

    /// Binds where callers that are not Envoy reach us.
    pub(super) async fn bind_api(&self, api: &ApiConfig) -> anyhow::Result<GrpcListener> {
        let (door, address) = self.tcp("api", api.listen, api.tls.as_ref(), Protocol::Grpc).await?;
        Ok(self.grpc(Socket::Tcp(door, address), Some(MOST_STREAMS)))
    }

    /// Binds where Envoys are told of the fleet.
    pub(super) async fn bind_xds(&self, address: SocketAddr, tls: Option<&TlsConfig>) -> anyhow::Result<GrpcListener> {
        let (door, address) = self.tcp("xds", address, tls, Protocol::Grpc).await?;
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
        let (incoming, address): (Incoming, SocketAddr) = match TcpListener::bind(address).await {
            Ok(listener) => {
                let address = listener.local_addr()?;
                (Box::pin(connections(listener)), address)
            }
            Err(error) if self.heir && error.kind() == io::ErrorKind::AddrInUse => {
                info!(listener = name, %address, "waiting for this address until the process that is leaving has left it");
                let later = stream::once(unix::bind_when_free(name, address)).map(connections);
                (Box::pin(later.flatten()), address)
            }
            Err(error) => {
                return Err(error).with_context(|| format!("the {name} address {address} cannot be bound"));
            }
        };
        Ok((Door::new(name, incoming, acceptor, self.limits.door(), self.metrics.clone()), address))
    }
}

fn connections(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(KEEPALIVE_INTERVAL))
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
