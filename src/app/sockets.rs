//! The sockets we listen on, and how connections come in by them.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};
use tracing::{debug, info};

use super::cut::Cuttable;
use super::unix::{self, Place, SocketFile};
use crate::admin::config::AdminConfig;
use crate::admin::token::{self, Token};
use crate::api::ApiConfig;
use crate::ext_proc::config::{HTTP2_FRAME, LimitsConfig, ListenConfig};
use crate::ext_proc::gateway::GatewayTraits;
use crate::metrics::Metrics;
use crate::tls::{
    AcceptedConnection, Acceptor, LimitedListener, ListenerLimits, ListenerProfile, Protocol,
    Secrets, TlsConfig,
};

/// After how long a silent connection is asked whether it is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// How long the answer may take. Generous: a peer that is only busy must not lose its requests.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// For ext_proc. One connection carries the exchanges of thousands of clients. Envoy resets the streams of requests that time out or
/// are cancelled, many at once if warmroute was busy. The default limit would close the connection and end all other exchanges.
const EXT_PROC_RESETS: ResetLimits = ResetLimits {
    pending: 100_000,
    local_errors: 100_000,
};

/// For all other listeners: the defaults of the h2 crate, against rapid resets (CVE-2023-44487). tonic leaves the second one unbounded.
const RESETS: ResetLimits = ResetLimits {
    pending: 20,
    local_errors: 1024,
};

/// A connection with open streams and no message for this long may be replaced when the listener is full. Clients of the unix socket, and
/// those with a certificate, are trusted: their connections with open streams stay.
const QUIET: Duration = Duration::from_secs(300);

/// How long a connection of the health listener may be idle. Envoy checks at least once a minute (`no_traffic_interval`).
const HEALTH_IDLE: Duration = Duration::from_secs(300);

/// Timeout of the request headers on the admin listener.
const HTTP_HEADER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long admin responses in progress may take after shutdown.
const ADMIN_GRACE: Duration = Duration::from_secs(5);

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

type LimitedTcpListener = LimitedListener<Incoming, TcpStream>;
type Incoming = Pin<Box<dyn Stream<Item = io::Result<TcpStream>> + Send>>;
type LimitedUnixListener = LimitedListener<UnixListenerStream, UnixStream>;

/// A bound socket for gRPC.
pub(super) struct GrpcListener {
    socket: Socket,
    /// Bytes of the headers of a call.
    header_list: u32,
    /// The most streams that one connection may have open, where that is bounded.
    streams: Option<u32>,
    resets: ResetLimits,
}

/// How many streams of a connection may be reset before the connection is closed.
#[derive(Clone, Copy)]
struct ResetLimits {
    /// By the client, while they wait to be accepted.
    pending: usize,
    /// By the server, for errors of the client.
    local_errors: usize,
}

enum Socket {
    Tcp(LimitedTcpListener, SocketAddr),
    Unix(LimitedUnixListener, SocketFile),
}

/// A bound socket for the admin pages.
pub(super) struct AdminListener {
    listener: LimitedTcpListener,
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
            .max_frame_size(Some(HTTP2_FRAME))
            .http2_max_pending_accept_reset_streams(Some(self.resets.pending))
            .http2_max_local_error_reset_streams(Some(self.resets.local_errors));
        match self.socket {
            Socket::Tcp(listener, _) => {
                // A peer whose machine has gone says nothing more, and what its streams hold would be held for ever.
                let server = server
                    .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
                    .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
                    .add_routes(routes);
                let incoming = listener
                    .into_stream()
                    .map_ok(|connection| Cuttable::new(connection, &cut));
                server
                    .serve_with_incoming_shutdown(incoming, closing)
                    .await?;
            }
            Socket::Unix(listener, file) => {
                let mut server = server;
                let server = server.add_routes(routes);
                let incoming = listener
                    .into_stream()
                    .map_ok(|connection| Cuttable::new(connection, &cut));
                server
                    .serve_with_incoming_shutdown(incoming, closing)
                    .await?;
                drop(file);
            }
        }
        Ok(())
    }
}

impl<S> Connected for AcceptedConnection<S> {
    type ConnectInfo = GatewayTraits;

    fn connect_info(&self) -> Self::ConnectInfo {
        GatewayTraits::default()
    }
}

impl Sockets {
    /// Binds the listeners of Envoy's ext_proc calls.
    pub(super) async fn bind(&self, listen: &ListenConfig) -> anyhow::Result<Vec<GrpcListener>> {
        let mut listeners = Vec::new();
        if let Some(address) = listen.tcp {
            let has_client_ca = listen
                .tls
                .as_ref()
                .is_some_and(|tls| tls.client_ca.is_some());
            let limits = self
                .limits
                .listener(None, if has_client_ca { Duration::MAX } else { QUIET });
            let profile = self.profile("ext_proc", Protocol::Grpc, listen.tls.as_ref(), limits)?;
            let (listener, address) = self.tcp(profile, address).await?;
            listeners.push(self.ext_proc(Socket::Tcp(listener, address)));
        }
        if let Some(path) = &listen.unix {
            let bound = unix::bind(path).await;
            let (listener, file) = bound.with_context(|| {
                format!("the ext_proc socket {} cannot be bound", path.display())
            })?;
            let limits = self.limits.listener(None, Duration::MAX);
            let profile = self.profile("ext_proc_unix", Protocol::Grpc, None, limits)?;
            let listener = LimitedListener::new(
                profile,
                UnixListenerStream::new(listener),
                self.metrics.clone(),
            );
            listeners.push(self.ext_proc(Socket::Unix(listener, file)));
        }
        Ok(listeners)
    }

    /// Binds the listener of gRPC health alone; in plaintext, as probes expect. It never refuses a connection: health clients connect again
    /// when a watch ends.
    pub(super) async fn bind_health(&self, address: SocketAddr) -> anyhow::Result<GrpcListener> {
        let limits = self.limits.listener(Some(HEALTH_IDLE), Duration::ZERO);
        let profile = self.profile("health", Protocol::Grpc, None, limits)?;
        self.grpc(profile, address).await
    }

    /// Binds the listener of callers that are not Envoy.
    pub(super) async fn bind_api(&self, api: &ApiConfig) -> anyhow::Result<GrpcListener> {
        let limits = self.limits.listener(None, QUIET);
        let profile = self.profile("api", Protocol::Grpc, api.tls.as_ref(), limits)?;
        self.grpc(profile, api.listen).await
    }

    /// Binds the listener of xDS.
    pub(super) async fn bind_xds(
        &self,
        address: SocketAddr,
        tls: Option<&TlsConfig>,
    ) -> anyhow::Result<GrpcListener> {
        let limits = self.limits.listener(None, QUIET);
        let profile = self.profile("xds", Protocol::Grpc, tls, limits)?;
        self.grpc(profile, address).await
    }

    /// Binds the listener of the admin pages. The HTTP server limits idle connections itself.
    pub(super) async fn bind_admin(&self, admin: &AdminConfig) -> anyhow::Result<AdminListener> {
        let token = admin
            .token_file
            .clone()
            .map(|file| Token::load(file, self.metrics.clone()));
        let token = token
            .transpose()
            .map_err(anyhow::Error::msg)
            .context("the token of the admin pages")?;
        if let Some(token) = &token {
            self.secrets.add(token.clone());
        }
        let limits = self.limits.listener(None, Duration::ZERO);
        let profile = self.profile("admin", Protocol::Http, admin.tls.as_ref(), limits)?;
        let (listener, address) = self.tcp(profile, admin.listen).await?;
        Ok(AdminListener {
            listener,
            address,
            token,
        })
    }

    fn ext_proc(&self, socket: Socket) -> GrpcListener {
        GrpcListener {
            socket,
            header_list: self.header_list(),
            streams: self.limits.streams,
            resets: EXT_PROC_RESETS,
        }
    }

    async fn grpc(
        &self,
        profile: ListenerProfile,
        address: SocketAddr,
    ) -> anyhow::Result<GrpcListener> {
        let (listener, address) = self.tcp(profile, address).await?;
        let socket = Socket::Tcp(listener, address);
        Ok(GrpcListener {
            socket,
            header_list: self.header_list(),
            streams: Some(MOST_STREAMS),
            resets: RESETS,
        })
    }

    fn header_list(&self) -> u32 {
        u32::try_from(self.limits.header_list.0).unwrap_or(u32::MAX)
    }

    fn profile(
        &self,
        name: &'static str,
        protocol: Protocol,
        tls: Option<&TlsConfig>,
        limits: ListenerLimits,
    ) -> anyhow::Result<ListenerProfile> {
        let acceptor = tls.map(|tls| Acceptor::new(name, tls, protocol, self.metrics.clone()));
        let tls = acceptor
            .transpose()
            .with_context(|| format!("the certificate of {name} cannot be used"))?;
        if let Some(acceptor) = &tls {
            self.secrets.add(acceptor.clone());
        }
        Ok(ListenerProfile {
            name,
            protocol,
            tls,
            limits,
        })
    }

    async fn tcp(
        &self,
        profile: ListenerProfile,
        address: SocketAddr,
    ) -> anyhow::Result<(LimitedTcpListener, SocketAddr)> {
        let name = profile.name;
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
                return Err(error)
                    .with_context(|| format!("the {name} address {address} cannot be bound"));
            }
        };
        Ok((
            LimitedListener::new(profile, incoming, self.metrics.clone()),
            address,
        ))
    }
}

fn connections(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener)
        .with_nodelay(Some(true))
        .with_keepalive(Some(KEEPALIVE_INTERVAL))
}

impl AdminListener {
    /// Serves the pages until `stop`.
    pub(super) async fn serve(
        mut self,
        routes: axum::Router,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let routes = match &self.token {
            Some(token) => token::protect(routes, token.clone()),
            None => routes,
        };
        let mut server = http1::Builder::new();
        server
            .timer(TokioTimer::new())
            .header_read_timeout(HTTP_HEADER_TIMEOUT);
        let graceful = GracefulShutdown::new();
        while let Some(Some(connection)) = stop.run_until_cancelled(self.listener.next()).await {
            let service = TowerToHyperService::new(routes.clone());
            let serving =
                graceful.watch(server.serve_connection(TokioIo::new(connection), service));
            tokio::spawn(async move {
                if let Err(error) = serving.await {
                    debug!(listener = "admin", %error, "connection closed");
                }
            });
        }
        // Responses in progress are completed.
        let _expired = tokio::time::timeout(ADMIN_GRACE, graceful.shutdown()).await;
        Ok(())
    }
}
