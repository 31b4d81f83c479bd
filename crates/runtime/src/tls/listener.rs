//! A listener with connection limits. At a limit, a new connection replaces the one that has been
//! idle for the longest time. Each TLS handshake runs in a separate task, so a slow one delays no
//! other.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use warmroute_http2_filter::{Http2Filter, Http2Limits};
use warmroute_metrics::Metrics;

use super::connection::{AcceptedConnection, ConnectionIo, ConnectionProtocol, ConnectionTimeouts};
use super::handshake::HandshakeError;
use super::listener_certificate::ListenerProtocol;
use super::listener_context::{ConnectionSlot, ListenerContext, ListenerProfile};

/// A socket with a client address.
pub trait PeerAddress {
    /// Returns the client address, or `None` for unix sockets.
    fn peer_address(&self) -> Option<SocketAddr>;
}

impl PeerAddress for TcpStream {
    fn peer_address(&self) -> Option<SocketAddr> {
        self.peer_addr().ok()
    }
}

impl PeerAddress for UnixStream {
    fn peer_address(&self) -> Option<SocketAddr> {
        None
    }
}

/// A listener with its limits.
pub struct LimitedListener<L, S> {
    sockets: L,
    context: Arc<ListenerContext>,
    /// Handshakes in progress.
    handshakes: JoinSet<Option<AcceptedConnection<S>>>,
}

impl<L, S> LimitedListener<L, S>
where
    L: Stream<Item = io::Result<S>> + Unpin,
    S: AsyncRead + AsyncWrite + PeerAddress + Unpin + Send + 'static,
{
    /// Creates a listener for the connections of `sockets`.
    pub fn new(profile: ListenerProfile, sockets: L, metrics: Arc<Metrics>) -> Self {
        Self {
            sockets,
            context: Arc::new(ListenerContext::new(profile, metrics)),
            handshakes: JoinSet::new(),
        }
    }

    /// Returns the next established connection, or `None` when the listener has ended. Cancel-safe.
    pub async fn next(&mut self) -> Option<AcceptedConnection<S>> {
        loop {
            tokio::select! {
                Some(finished) = self.handshakes.join_next() => {
                    if let Ok(Some(connection)) = finished {
                        return Some(connection);
                    }
                }
                socket = self.sockets.next() => match socket? {
                    Ok(socket) => if let Some(connection) = self.on_socket(socket) {
                        return Some(connection);
                    },
                    Err(error) if is_of_one_client(&error) => {}
                    Err(error) => self.context.on_accept_error(&error).await,
                },
            }
        }
    }

    /// Starts a handshake. A plaintext connection is returned at once.
    fn on_socket(&mut self, socket: S) -> Option<AcceptedConnection<S>> {
        let slot = ListenerContext::admit(&self.context, socket.peer_address())?;
        let Some(acceptor) = &self.context.profile.tls else {
            return Some(slot.into_connection(ConnectionIo::Left(socket)));
        };
        let server = acceptor.current();
        self.handshakes
            .spawn(async move { slot.handshake(socket, server).await });
        None
    }

    /// Converts the listener into a stream of connections. Dropping the stream closes the listener.
    pub fn into_stream(self) -> impl Stream<Item = io::Result<AcceptedConnection<S>>> {
        futures_util::stream::unfold(self, async |mut listener| {
            let connection = listener.next().await?;
            Some((Ok(connection), listener))
        })
    }
}

impl ConnectionSlot {
    fn into_connection<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        io: ConnectionIo<S>,
    ) -> AcceptedConnection<S> {
        let limits = self.context.profile.limits;
        let timeouts = ConnectionTimeouts {
            header: limits.handshake,
            idle: limits.idle,
        };
        let protocol = match self.context.profile.protocol {
            ListenerProtocol::Http => ConnectionProtocol::Http1 { io, read: 0 },
            ListenerProtocol::Grpc => {
                let context = self.context.clone();
                let peer = self.peer;
                let http2 = Http2Limits {
                    max_header_block_bytes: limits.max_header_block_bytes,
                };
                let filter =
                    Http2Filter::new(io, http2, move |sent| context.on_http2_error(sent, peer));
                ConnectionProtocol::Http2(Box::new(filter))
            }
        };
        AcceptedConnection::new(protocol, timeouts, self)
    }

    async fn handshake<S>(
        self,
        socket: S,
        server: Arc<rustls::ServerConfig>,
    ) -> Option<AcceptedConnection<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let context = self.context.clone();
        let accepted = timeout(
            context.profile.limits.handshake,
            TlsAcceptor::from(server).accept(socket),
        );
        let evicted = std::future::poll_fn(|cx| self.usage.poll_evicted(cx));
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = evicted => return None,
        };
        match accepted {
            Ok(Ok(stream)) => {
                context.on_handshake("done");
                Some(self.into_connection(ConnectionIo::Right(Box::new(stream))))
            }
            Ok(Err(error)) => {
                context.on_handshake("failed");
                context.on_handshake_error(HandshakeError::of(&error), self.peer, &error);
                None
            }
            Err(elapsed) => {
                context.on_handshake("expired");
                context.on_handshake_error(HandshakeError::Timeout, self.peer, &elapsed);
                None
            }
        }
    }
}

/// Returns whether an accept error concerns only one client. The next accept may then succeed.
fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset
    )
}

#[cfg(test)]
mod tests;
