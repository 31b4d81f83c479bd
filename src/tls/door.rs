//! Who comes in by a listener. There are so many places; whoever finds none is sent away at once, because a socket that
//! accepts and does not answer holds up requests for longer than one that refuses. TLS handshakes happen in tasks of their
//! own, and whoever says nothing for too long loses his place.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use super::acceptor::Acceptor;
use crate::metrics::{ListenerLabel, ListenerOutcomeLabels, Metrics};

/// Bytes with which every HTTP/2 connection begins; a request of HTTP/1 is longer. Who sends fewer has said nothing.
const GREETING: usize = 24;

/// Rest after a failed accept. It fails again at once where the process has no file descriptors left.
const REST: Duration = Duration::from_millis(100);

/// Who may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorLimits {
    /// Connections at a time.
    pub connections: usize,
    /// How long a handshake may take, and how long a client may then say nothing.
    pub handshake: Duration,
}

/// A listener with its limits.
pub struct Door<L, S> {
    sockets: L,
    desk: Arc<Desk>,
    /// Handshakes that are going on.
    opening: JoinSet<Option<Connection<S>>>,
}

/// What every handshake needs.
struct Desk {
    listener: &'static str,
    limits: DoorLimits,
    tls: Option<Arc<Acceptor>>,
    places: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

impl<L, S> Door<L, S>
where
    L: Stream<Item = io::Result<S>> + Unpin,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    /// Lets in whoever comes by `sockets`; `listener` is its name in logs and metrics.
    pub fn new(
        listener: &'static str,
        sockets: L,
        tls: Option<Arc<Acceptor>>,
        limits: DoorLimits,
        metrics: Arc<Metrics>,
    ) -> Self {
        let places = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
        let desk = Desk { listener, limits, tls, places, metrics };
        Self { sockets, desk: Arc::new(desk), opening: JoinSet::new() }
    }

    /// The next connection that is ready for use; none when the listener has ended. May be cancelled.
    pub async fn next(&mut self) -> Option<Connection<S>> {
        loop {
            tokio::select! {
                Some(opened) = self.opening.join_next() => {
                    if let Ok(Some(connection)) = opened {
                        return Some(connection);
                    }
                }
                socket = self.sockets.next() => match socket? {
                    Ok(socket) => if let Some(connection) = self.welcome(socket) {
                        return Some(connection);
                    },
                    Err(error) if of_one_client(&error) => {}
                    Err(error) => {
                        warn!(listener = self.desk.listener, %error, "cannot accept connections");
                        sleep(REST).await;
                    }
                },
            }
        }
    }

    /// A plain connection is ready at once.
    fn welcome(&mut self, socket: S) -> Option<Connection<S>> {
        let place = self.desk.place()?;
        let Some(acceptor) = &self.desk.tls else {
            return Some(Connection::new(Io::Plain(socket), place, self.desk.limits.handshake));
        };
        let (desk, server) = (self.desk.clone(), acceptor.current());
        self.opening.spawn(async move { desk.shake_hands(socket, server, place).await });
        None
    }

    /// The connections as a stream, which ends its listener by drop.
    pub fn into_stream(self) -> impl Stream<Item = io::Result<Connection<S>>> {
        futures_util::stream::unfold(self, async |mut door| {
            let connection = door.next().await?;
            Some((Ok(connection), door))
        })
    }
}

impl Desk {
    fn place(&self) -> Option<Place> {
        let label = ListenerLabel { listener: self.listener };
        let Ok(permit) = self.places.clone().try_acquire_owned() else {
            let refused = self.metrics.connections_refused.get_or_create(&label).inc();
            if refused.is_multiple_of(REFUSALS_PER_LINE) {
                warn!(listener = self.listener, most = self.limits.connections, "too many connections; refusing more");
            }
            return None;
        };
        let open = self.metrics.connections.get_or_create_owned(&label);
        open.inc();
        Some(Place { _permit: permit, open })
    }

    async fn shake_hands<S>(&self, socket: S, server: Arc<rustls::ServerConfig>, place: Place) -> Option<Connection<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        // As many at a time as there are places: a bound below that would let the silent hold up everybody.
        let shaken = timeout(self.limits.handshake, TlsAcceptor::from(server).accept(socket));
        let (outcome, opened) = match shaken.await {
            Ok(Ok(stream)) => ("done", Some(stream)),
            Ok(Err(error)) => {
                debug!(listener = self.listener, %error, "TLS handshake failed");
                ("failed", None)
            }
            Err(_) => {
                debug!(listener = self.listener, "TLS handshake took too long");
                ("expired", None)
            }
        };
        self.metrics.tls_handshakes.get_or_create(&ListenerOutcomeLabels { listener: self.listener, outcome }).inc();
        opened.map(|stream| Connection::new(Io::Tls(Box::new(stream)), place, self.limits.handshake))
    }
}

/// A warning comes with the first refusal and then with every so many.
const REFUSALS_PER_LINE: u64 = 1000;

/// Errors of the client that was about to come, after which the next may come at once.
fn of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// One of the places of a listener; given back by drop.
struct Place {
    _permit: OwnedSemaphorePermit,
    open: Gauge,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

/// A connection with its place. Reading ends in an error when the client says nothing at all for too long.
pub struct Connection<S> {
    io: Io<S>,
    /// Until its greeting has come.
    silence: Option<Pin<Box<Sleep>>>,
    /// Bytes that have come meanwhile.
    heard: usize,
    _place: Place,
}

enum Io<S> {
    Plain(S),
    Tls(Box<TlsStream<S>>),
}

impl<S> Connection<S> {
    /// The socket below.
    pub fn socket(&self) -> &S {
        match &self.io {
            Io::Plain(socket) => socket,
            Io::Tls(stream) => stream.get_ref().0,
        }
    }

    fn new(io: Io<S>, place: Place, silence: Duration) -> Self {
        Self { io, silence: Some(Box::pin(sleep(silence))), heard: 0, _place: place }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Connection<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = match &mut self.io {
            Io::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        self.heard = self.heard.saturating_add(buf.filled().len() - before);
        let greeted = self.heard >= GREETING;
        if let Some(silence) = &mut self.silence {
            if greeted {
                self.silence = None;
            } else if polled.is_pending() && silence.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Io::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, slices),
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(socket) => socket.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Io::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::UnboundedReceiverStream;

    use super::super::acceptor::Protocol;
    use super::super::config::TlsConfig;
    use super::*;

    type Arriving = mpsc::UnboundedSender<io::Result<DuplexStream>>;
    type TestDoor = Door<UnboundedReceiverStream<io::Result<DuplexStream>>, DuplexStream>;

    fn door(tls: bool, connections: usize) -> (Arriving, TestDoor, Arc<Metrics>) {
        let (arriving, sockets) = mpsc::unbounded_channel();
        let metrics = Arc::new(Metrics::new());
        let config = TlsConfig { self_signed: true, ..TlsConfig::default() };
        let tls = tls.then(|| Acceptor::new("test", &config, Protocol::Grpc, metrics.clone()).unwrap());
        let limits = DoorLimits { connections, handshake: Duration::from_secs(10) };
        let door = Door::new("test", UnboundedReceiverStream::new(sockets), tls, limits, metrics.clone());
        (arriving, door, metrics)
    }

    fn arrive(arriving: &Arriving) -> DuplexStream {
        let (near, far) = duplex(1024);
        arriving.send(Ok(far)).unwrap();
        near
    }

    const LABEL: ListenerLabel = ListenerLabel { listener: "test" };

    #[tokio::test(start_paused = true)]
    async fn whoever_finds_no_place_is_sent_away_and_a_place_is_given_back() {
        let (arriving, mut door, metrics) = door(false, 2);
        let (mut a, _b, mut c) = (arrive(&arriving), arrive(&arriving), arrive(&arriving));
        let mut first = door.next().await.unwrap();
        let second = door.next().await.unwrap();
        assert_eq!(metrics.connections.get_or_create(&LABEL).get(), 2);
        // The third is looked at and dropped while the door waits for another.
        assert!(timeout(Duration::from_secs(1), door.next()).await.is_err());
        assert_eq!(c.read(&mut [0; 1]).await.unwrap(), 0, "it is closed");
        assert_eq!(metrics.connections_refused.get_or_create(&LABEL).get(), 1);
        drop(second);
        let _d = arrive(&arriving);
        let _third = door.next().await.unwrap();
        assert_eq!(metrics.connections.get_or_create(&LABEL).get(), 2);
        // Those inside are not disturbed.
        a.write_all(b"x").await.unwrap();
        assert_eq!(first.read_u8().await.unwrap(), b'x');
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_says_nothing_loses_his_place_and_whoever_spoke_may_be_silent() {
        let (arriving, mut door, _) = door(false, 3);
        let (_silent, mut speaks) = (arrive(&arriving), arrive(&arriving));
        let mut silent_side = door.next().await.unwrap();
        let mut speaking_side = door.next().await.unwrap();
        let mut hums = arrive(&arriving);
        let mut humming_side = door.next().await.unwrap();
        hums.write_all(b"P").await.unwrap();
        assert_eq!(humming_side.read_u8().await.unwrap(), b'P');
        speaks.write_all(&[b'x'; GREETING]).await.unwrap();
        speaking_side.read_exact(&mut [0; GREETING]).await.unwrap();
        let error = silent_side.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let error = humming_side.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "one byte is no greeting");
        assert!(timeout(Duration::from_secs(3600), speaking_side.read_u8()).await.is_err(), "it is still open");
    }

    #[tokio::test(start_paused = true)]
    async fn a_handshake_that_does_not_come_expires_and_holds_up_nobody() {
        let (arriving, mut door, metrics) = door(true, 3);
        let mut silent: Vec<_> = (0..2).map(|_| arrive(&arriving)).collect();
        let mut plain = arrive(&arriving);
        plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let outcome = |outcome| {
            let labels = ListenerOutcomeLabels { listener: "test", outcome };
            metrics.tls_handshakes.get_or_create(&labels).get()
        };
        assert!(timeout(Duration::from_secs(5), door.next()).await.is_err(), "nobody is ready");
        // The refusal of the plain one came at once, its alert too.
        assert_eq!((outcome("failed"), outcome("expired")), (1, 0));
        let mut alert = Vec::new();
        plain.read_to_end(&mut alert).await.unwrap();
        assert_eq!(alert.first(), Some(&21), "a TLS alert: {alert:?}");
        assert!(timeout(Duration::from_secs(6), door.next()).await.is_err());
        assert_eq!((outcome("failed"), outcome("expired"), outcome("done")), (1, 2, 0));
        assert_eq!(silent[0].read(&mut [0; 1]).await.unwrap(), 0, "it is closed");
        assert_eq!(metrics.connections.get_or_create(&LABEL).get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_listener_that_fails_is_asked_again_and_one_that_ended_is_not() {
        let (arriving, mut door, _) = door(false, 2);
        arriving.send(Err(io::ErrorKind::ConnectionReset.into())).unwrap();
        arriving.send(Err(io::Error::other("no file descriptors"))).unwrap();
        let _a = arrive(&arriving);
        drop(arriving);
        assert!(door.next().await.is_some());
        assert!(door.next().await.is_none());
    }
}
