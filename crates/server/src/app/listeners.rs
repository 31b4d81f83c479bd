//! Listening sockets and their connection settings.

use std::io;
use std::net::SocketAddr;
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
use tonic::transport::server::TcpIncoming;
use tracing::{debug, info};
use warmroute_metrics::Metrics;
use warmroute_runtime::descriptors::DescriptorReserve;
use warmroute_runtime::tls::{
    LimitedListener, ListenerCertificate, ListenerLimits, ListenerProfile, ListenerProtocol,
    ReloadableFiles, TlsConfig,
};

use super::abortable::AbortableConnection;
use super::stream_limit::{MaxStreams, StreamLimit};
use super::unix_socket::{self, SocketFile, SocketIdentity};
use crate::admin::config::AdminConfig;
use crate::admin::token::{self, AdminToken};
use crate::api::ApiConfig;
use crate::ext_proc::config::{
    HTTP2_CONNECTION_WINDOW, HTTP2_FRAME_BYTES, HTTP2_STREAM_WINDOW, ListenConfig,
    ListenerLimitsConfig,
};

/// Time after which a keepalive ping is sent on a silent connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// Timeout of a keepalive ping. It is long, because a busy peer must not lose its requests.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Limits for ext_proc. One connection carries the exchanges of thousands of clients. Envoy resets
/// the streams of requests that time out or are cancelled, many at once if warmroute was busy. With
/// the default limits, that would close the connection and end all other exchanges.
const EXT_PROC_RESETS: ResetLimits = ResetLimits {
    pending: 100_000,
    local_errors: 100_000,
};

/// Limits for all other listeners: the defaults of the h2 crate against rapid resets
/// (CVE-2023-44487). tonic does not limit `local_errors` by default.
const RESETS: ResetLimits = ResetLimits {
    pending: 20,
    local_errors: 1024,
};

/// Time without messages after which a connection with open streams may be evicted when the
/// listener is full. On the ext_proc listener, such a connection stays if clients need a
/// certificate, or on the unix socket, because these clients are trusted.
const QUIET_PERIOD: Duration = Duration::from_secs(300);

/// Maximum idle time of a health connection.
const HEALTH_IDLE: Duration = Duration::from_secs(300);

/// Timeout of the request headers on the admin listener.
const HTTP_HEADER_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for admin responses in progress at shutdown.
const ADMIN_GRACE: Duration = Duration::from_secs(5);

/// Listeners that accept connections with the reserve of file descriptors.
const PROBE_LISTENERS: [&str; 2] = ["health", "admin"];

/// Maximum number of concurrent calls on one API connection.
const MAX_STREAMS: u32 = 4096;

/// Maximum number of concurrent calls on one health connection. All connections together stay below
/// the default of `max_streams`, so that watches do not starve probes.
const MAX_HEALTH_STREAMS: u32 = 16;

/// Creates listeners with shared settings.
#[derive(Clone)]
pub(super) struct ListenerFactory {
    pub(super) limits: ListenerLimitsConfig,
    /// Maximum number of open gRPC streams of each listener.
    pub(super) max_streams: MaxStreams,
    /// Reserve of file descriptors for the listeners of probes.
    pub(super) reserve: DescriptorReserve,
    /// True if a draining process owns the addresses. Then binding waits for them.
    pub(super) wait_for_addresses: bool,
    /// Registry of the listeners' certificates and tokens.
    pub(super) reloadable_files: ReloadableFiles,
    pub(super) metrics: Arc<Metrics>,
}

type LimitedTcpListener = LimitedListener<Incoming, TcpStream>;
type Incoming = Pin<Box<dyn Stream<Item = io::Result<TcpStream>> + Send>>;
type LimitedUnixListener = LimitedListener<UnixListenerStream, UnixStream>;

/// A bound gRPC socket.
pub(super) struct GrpcListener {
    socket: GrpcSocket,
    /// Maximum header list size.
    header_list: u32,
    /// Maximum number of open streams per connection, if limited.
    streams: Option<u32>,
    /// Limit of the open streams of all connections.
    stream_limit: StreamLimit,
    resets: ResetLimits,
}

/// Number of stream resets after which the connection is closed.
#[derive(Clone, Copy)]
struct ResetLimits {
    /// Resets by the client before the stream is accepted.
    pending: usize,
    /// Resets by the server because of client errors.
    local_errors: usize,
}

enum GrpcSocket {
    Tcp(LimitedTcpListener, SocketAddr),
    Unix(LimitedUnixListener, SocketFile),
}

/// A bound admin socket.
pub(super) struct AdminListener {
    listener: LimitedTcpListener,
    pub(super) address: SocketAddr,
    token: Option<Arc<AdminToken>>,
}

impl GrpcListener {
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match &self.socket {
            GrpcSocket::Tcp(_, address) => Some(*address),
            GrpcSocket::Unix(..) => None,
        }
    }

    /// Returns the identity of the unix socket, if it is one.
    pub(super) fn socket_identity(&self) -> Option<SocketIdentity> {
        match &self.socket {
            GrpcSocket::Tcp(..) => None,
            GrpcSocket::Unix(_, file) => Some(file.identity()),
        }
    }

    /// Serves until `closing`, then until the open streams have ended or `abort` is cancelled.
    pub(super) async fn serve(
        self,
        routes: Routes,
        closing: CancellationToken,
        abort: CancellationToken,
    ) -> anyhow::Result<()> {
        let closing = closing.cancelled_owned();
        let routes = self.stream_limit.limit(routes);
        let server = Server::builder()
            .http2_max_header_list_size(self.header_list)
            .max_concurrent_streams(self.streams)
            .max_frame_size(Some(HTTP2_FRAME_BYTES))
            .initial_stream_window_size(HTTP2_STREAM_WINDOW)
            .initial_connection_window_size(HTTP2_CONNECTION_WINDOW)
            .http2_max_pending_accept_reset_streams(Some(self.resets.pending))
            .http2_max_local_error_reset_streams(Some(self.resets.local_errors));
        match self.socket {
            GrpcSocket::Tcp(listener, _) => {
                // A peer on a failed host sends nothing, and without keepalive its streams would
                // hold their resources without limit.
                let server = server
                    .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
                    .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
                    .add_routes(routes);
                let incoming = listener
                    .into_stream()
                    .map_ok(|connection| AbortableConnection::new(connection, &abort));
                server
                    .serve_with_incoming_shutdown(incoming, closing)
                    .await?;
            }
            GrpcSocket::Unix(listener, file) => {
                let mut server = server;
                let server = server.add_routes(routes);
                let incoming = listener
                    .into_stream()
                    .map_ok(|connection| AbortableConnection::new(connection, &abort));
                server
                    .serve_with_incoming_shutdown(incoming, closing)
                    .await?;
                drop(file);
            }
        }
        Ok(())
    }
}

impl ListenerFactory {
    /// Binds the listeners of Envoy's ext_proc calls.
    pub(super) async fn bind(&self, listen: &ListenConfig) -> anyhow::Result<Vec<GrpcListener>> {
        let mut listeners = Vec::new();
        if let Some(address) = listen.address {
            let has_client_ca = listen
                .tls
                .as_ref()
                .is_some_and(|tls| tls.client_ca.is_some());
            let limits = self.limits.listener_limits(
                None,
                if has_client_ca {
                    Duration::MAX
                } else {
                    QUIET_PERIOD
                },
            );
            let profile = self.profile(
                "ext_proc",
                ListenerProtocol::Grpc,
                listen.tls.as_ref(),
                limits,
            )?;
            let (listener, address) = self.tcp(profile, address).await?;
            listeners.push(self.ext_proc("ext_proc", GrpcSocket::Tcp(listener, address)));
        }
        if let Some(path) = &listen.unix_socket {
            let bound = unix_socket::bind(path).await;
            let (listener, file) =
                bound.with_context(|| unix_socket::describe_bind_failure(path))?;
            let limits = self.limits.listener_limits(None, Duration::MAX);
            let profile = self.profile("ext_proc_unix", ListenerProtocol::Grpc, None, limits)?;
            let listener = LimitedListener::new(
                profile,
                UnixListenerStream::new(listener),
                self.metrics.clone(),
            );
            listeners.push(self.ext_proc("ext_proc_unix", GrpcSocket::Unix(listener, file)));
        }
        Ok(listeners)
    }

    /// Binds the dedicated gRPC health listener, in plaintext as probes expect. It never rejects a
    /// connection, because health clients reconnect when a watch ends.
    pub(super) async fn bind_health(&self, address: SocketAddr) -> anyhow::Result<GrpcListener> {
        let limits = self
            .limits
            .listener_limits(Some(HEALTH_IDLE), Duration::ZERO);
        let profile = self.profile("health", ListenerProtocol::Grpc, None, limits)?;
        let listener = self.grpc(profile, address).await?;
        Ok(GrpcListener {
            streams: Some(MAX_HEALTH_STREAMS),
            ..listener
        })
    }

    /// Binds the listener of the router API.
    pub(super) async fn bind_api(&self, api: &ApiConfig) -> anyhow::Result<GrpcListener> {
        let limits = self.limits.listener_limits(None, QUIET_PERIOD);
        let profile = self.profile("api", ListenerProtocol::Grpc, api.tls.as_ref(), limits)?;
        self.grpc(profile, api.address).await
    }

    /// Binds the listener of xDS.
    pub(super) async fn bind_xds(
        &self,
        address: SocketAddr,
        tls: Option<&TlsConfig>,
    ) -> anyhow::Result<GrpcListener> {
        let limits = self.limits.listener_limits(None, QUIET_PERIOD);
        let profile = self.profile("xds", ListenerProtocol::Grpc, tls, limits)?;
        self.grpc(profile, address).await
    }

    /// Binds the listener of the admin pages. The HTTP server limits idle connections itself.
    pub(super) async fn bind_admin(&self, admin: &AdminConfig) -> anyhow::Result<AdminListener> {
        let token = admin
            .token_file
            .clone()
            .map(|file| AdminToken::load(file, self.metrics.clone()));
        let token = token
            .transpose()
            .map_err(anyhow::Error::msg)
            .context("the token of the admin pages cannot be loaded")?;
        if let Some(token) = &token {
            self.reloadable_files.add(token.clone());
        }
        let limits = self.limits.listener_limits(None, Duration::ZERO);
        let profile = self.profile("admin", ListenerProtocol::Http, admin.tls.as_ref(), limits)?;
        let (listener, address) = self.tcp(profile, admin.address).await?;
        Ok(AdminListener {
            listener,
            address,
            token,
        })
    }

    fn ext_proc(&self, name: &'static str, socket: GrpcSocket) -> GrpcListener {
        GrpcListener {
            socket,
            header_list: self.header_list(),
            streams: None,
            stream_limit: self.stream_limit(name),
            resets: EXT_PROC_RESETS,
        }
    }

    async fn grpc(
        &self,
        profile: ListenerProfile,
        address: SocketAddr,
    ) -> anyhow::Result<GrpcListener> {
        let stream_limit = self.stream_limit(profile.name);
        let (listener, address) = self.tcp(profile, address).await?;
        let socket = GrpcSocket::Tcp(listener, address);
        Ok(GrpcListener {
            socket,
            header_list: self.header_list(),
            streams: Some(MAX_STREAMS),
            stream_limit,
            resets: RESETS,
        })
    }

    fn stream_limit(&self, name: &'static str) -> StreamLimit {
        StreamLimit::new(name, self.max_streams.clone(), &self.metrics)
    }

    fn header_list(&self) -> u32 {
        u32::try_from(self.limits.max_header_list_size.0).unwrap_or(u32::MAX)
    }

    fn profile(
        &self,
        name: &'static str,
        protocol: ListenerProtocol,
        tls: Option<&TlsConfig>,
        limits: ListenerLimits,
    ) -> anyhow::Result<ListenerProfile> {
        let acceptor =
            tls.map(|tls| ListenerCertificate::new(name, tls, protocol, self.metrics.clone()));
        let tls = acceptor
            .transpose()
            .with_context(|| format!("the certificate of {name} cannot be used"))?;
        if let Some(acceptor) = &tls {
            self.reloadable_files.add(acceptor.clone());
        }
        Ok(ListenerProfile {
            name,
            protocol,
            tls,
            limits,
            reserve: self.reserve.clone(),
            serves_probes: PROBE_LISTENERS.contains(&name),
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
            Err(error) if self.wait_for_addresses && error.kind() == io::ErrorKind::AddrInUse => {
                info!(listener = name, %address, "address in use by a draining process; waiting");
                let later =
                    stream::once(unix_socket::bind_when_free(name, address)).map(connections);
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
    /// Serves the admin pages until `stop`.
    pub(super) async fn serve(
        mut self,
        routes: axum::Router,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let routes = match &self.token {
            Some(token) => token::require_token(routes, token.clone()),
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
        // Responses in progress are completed, up to the timeout.
        let _expired = tokio::time::timeout(ADMIN_GRACE, graceful.shutdown()).await;
        Ok(())
    }
}
