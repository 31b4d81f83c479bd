//! An accepted connection, with timeouts and eviction.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use warmroute_http2_filter::Http2Filter;

use super::connection_table::ConnectionUse;
use super::listener_context::ConnectionSlot;

/// Approximate size of the shortest HTTP/1 request. A client that sends fewer octets has not sent a
/// request.
const HTTP1_GREETING: usize = 16;

/// Maximum time that a write waits for the client. Keepalive does not detect a client that stops
/// reading, because its kernel still responds.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Byte stream of a connection, plain or with TLS.
pub(super) type ConnectionIo<S> = Either<S, Box<TlsStream<S>>>;

/// Maximum time that a connection waits for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionTimeouts {
    /// Limit for the start of a connection, and for the rest of an incomplete header block.
    pub(super) header: Duration,
    /// Limit between requests.
    pub(super) idle: Option<Duration>,
}

/// Protocol of a connection.
pub(super) enum ConnectionProtocol<S> {
    Http2(Box<Http2Filter<ConnectionIo<S>>>),
    Http1 {
        io: ConnectionIo<S>,
        /// Octets received.
        read: usize,
    },
}

/// Client action that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientWait {
    Greeting,
    HeaderBlock,
    Request,
}

/// An incomplete header block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IncompleteBlock {
    began: Instant,
    /// Number of blocks completed before it.
    completed_before: u64,
}

/// An accepted connection. Reads and writes fail when the client exceeds a timeout or the
/// connection is evicted. The same task must poll both.
pub struct AcceptedConnection<S> {
    protocol: ConnectionProtocol<S>,
    timeouts: ConnectionTimeouts,
    slot: ConnectionSlot,
    opened: Instant,
    incomplete_block: Option<IncompleteBlock>,
    timer: Option<Pin<Box<Sleep>>>,
    /// Runs while a write waits for the client.
    write_timer: Option<Pin<Box<Sleep>>>,
    /// Number of reported messages.
    reported: u64,
}

impl<S> AcceptedConnection<S> {
    pub(super) fn new(
        protocol: ConnectionProtocol<S>,
        timeouts: ConnectionTimeouts,
        slot: ConnectionSlot,
    ) -> Self {
        let opened = Instant::now();
        Self {
            protocol,
            timeouts,
            slot,
            opened,
            incomplete_block: None,
            timer: None,
            write_timer: None,
            reported: 0,
        }
    }

    /// Returns the underlying socket.
    pub fn socket(&self) -> &S {
        let io = match &self.protocol {
            ConnectionProtocol::Http2(filter) => filter.get_ref(),
            ConnectionProtocol::Http1 { io, .. } => io,
        };
        match io {
            Either::Left(socket) => socket,
            Either::Right(stream) => stream.get_ref().0,
        }
    }

    fn usage(&self) -> &Arc<ConnectionUse> {
        &self.slot.usage
    }

    /// Updates the connection table if messages arrived since the last call.
    fn report(&mut self) {
        let frames = match &self.protocol {
            ConnectionProtocol::Http2(filter) => filter.streams().frames(),
            ConnectionProtocol::Http1 { read, .. } => *read as u64,
        };
        if frames == self.reported {
            return;
        }
        self.reported = frames;
        if let ConnectionProtocol::Http2(filter) = &self.protocol {
            self.slot.usage.set_open_streams(filter.streams().count());
        }
        self.slot.usage.on_message(self.slot.now());
    }

    /// Returns the next action expected of the client, with its deadline.
    fn deadline(&mut self) -> Option<(ClientWait, Instant)> {
        let has_greeting = match &self.protocol {
            ConnectionProtocol::Http2(filter) => filter.has_preface(),
            ConnectionProtocol::Http1 { read, .. } => *read >= HTTP1_GREETING,
        };
        if !has_greeting {
            return Some((ClientWait::Greeting, self.opened + self.timeouts.header));
        }
        self.update_incomplete_block();
        if let Some(block) = self.incomplete_block {
            return Some((ClientWait::HeaderBlock, block.began + self.timeouts.header));
        }
        let idle = self
            .timeouts
            .idle
            .filter(|_| self.usage().open_streams() == 0)?;
        Some((
            ClientWait::Request,
            self.slot.instant_of(self.usage().last()) + idle,
        ))
    }

    /// Updates the state of the incomplete header block. One poll may complete a block and receive
    /// the start of the next one, which has its own timeout.
    fn update_incomplete_block(&mut self) {
        let completed_before = match &self.protocol {
            ConnectionProtocol::Http2(filter) if filter.is_mid_block() => filter.completed_blocks(),
            _ => {
                self.incomplete_block = None;
                return;
            }
        };
        let is_same = |block: &IncompleteBlock| block.completed_before == completed_before;
        let known = self.incomplete_block.filter(is_same);
        self.incomplete_block = Some(known.unwrap_or_else(|| IncompleteBlock {
            began: Instant::now(),
            completed_before,
        }));
    }

    /// Returns ready when the connection must be closed.
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.slot.poll_evicted(cx).is_ready() {
            return Poll::Ready(evicted());
        }
        let Some((wait, deadline)) = self.deadline() else {
            self.timer = None;
            return Poll::Pending;
        };
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(cx).map(|()| {
            self.slot.on_timeout(match wait {
                ClientWait::Greeting => "greeting_timeout",
                ClientWait::HeaderBlock => "header_timeout",
                ClientWait::Request => "idle",
            });
            io::ErrorKind::TimedOut.into()
        })
    }

    /// Processes the result of a write, and closes a connection whose client does not read. `h2`
    /// and hyper stop reading from such a connection, so eviction cannot rely on reads.
    fn after_write<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        self.report();
        if polled.is_ready() {
            self.write_timer = None;
            return polled;
        }
        if self.slot.poll_evicted(cx).is_ready() {
            return Poll::Ready(Err(evicted()));
        }
        let timer = self
            .write_timer
            .get_or_insert_with(|| Box::pin(sleep(WRITE_TIMEOUT)));
        ready!(timer.as_mut().poll(cx));
        self.slot.on_timeout("write_timeout");
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

fn evicted() -> io::Error {
    io::Error::new(
        io::ErrorKind::ConnectionAborted,
        "evicted for a new connection",
    )
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for AcceptedConnection<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = match &mut this.protocol {
            ConnectionProtocol::Http2(filter) => Pin::new(filter).poll_read(cx, buf),
            ConnectionProtocol::Http1 { io, read } => {
                let polled = Pin::new(io).poll_read(cx, buf);
                *read += buf.filled().len() - before;
                polled
            }
        };
        this.report();
        match polled {
            Poll::Pending => this.poll_close(cx).map(Err),
            ready => ready,
        }
    }
}

/// Calls a method of the underlying connection.
macro_rules! delegate {
    ($connection:ident, $io:ident => $call:expr) => {
        match &mut $connection.protocol {
            ConnectionProtocol::Http2($io) => $call,
            ConnectionProtocol::Http1 { io: $io, .. } => $call,
        }
    };
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for AcceptedConnection<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = delegate!(this, io => Pin::new(io).poll_write(cx, octets));
        this.after_write(cx, polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = delegate!(this, io => Pin::new(io).poll_write_vectored(cx, slices));
        this.after_write(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.protocol {
            ConnectionProtocol::Http2(filter) => filter.is_write_vectored(),
            ConnectionProtocol::Http1 { io, .. } => io.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = delegate!(this, io => Pin::new(io).poll_flush(cx));
        this.after_write(cx, polled)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = delegate!(this, io => Pin::new(io).poll_shutdown(cx));
        this.after_write(cx, polled)
    }
}
