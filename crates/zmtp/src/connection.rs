//! A session on a stream: reads, writes, heartbeats and timeouts.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, sleep_until, timeout};

use crate::SocketConfig;
use crate::endpoint::ZmtpEndpoint;
use crate::error::ZmtpError;
use crate::session::{SessionEvent, SocketRole, ZmtpSession};
use crate::transport::{self, TransportStream};

/// Bytes of one read. The session leaves at most a part of a greeting or of a frame header before
/// the next read, so the buffer does not grow.
const READ_SIZE: usize = 16 * 1024;

/// Timeouts and intervals of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTiming {
    /// Longest time to establish the transport connection.
    pub connect: Duration,
    /// Longest time of the ZMTP handshake.
    pub handshake: Duration,
    /// Interval of heartbeats to peers that support them.
    pub heartbeat: Duration,
    /// Time after which a peer that accepts no data is disconnected. A peer that supports
    /// heartbeats is also disconnected if it sends nothing for this long.
    pub idle_timeout: Duration,
}

impl Default for ConnectionTiming {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            handshake: Duration::from_secs(5),
            heartbeat: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(30),
        }
    }
}

/// One connection that has completed its handshake.
pub struct ZmtpConnection<S> {
    stream: S,
    session: ZmtpSession,
    input: BytesMut,
    timing: ConnectionTiming,
    received_at: Instant,
    next_heartbeat: Instant,
}

/// A connected DEALER socket. It reads only while a caller waits for a reply, and does not
/// reconnect.
pub type DealerSocket = ZmtpConnection<TransportStream>;

impl DealerSocket {
    /// Connects and completes the handshake.
    pub async fn connect(endpoint: &ZmtpEndpoint, config: SocketConfig) -> Result<Self, ZmtpError> {
        let stream = transport::connect(endpoint, config.timing.connect).await?;
        let session = ZmtpSession::new(SocketRole::Dealer, config.limits);
        Self::handshake(stream, session, config.timing).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ZmtpConnection<S> {
    /// Performs the handshake on a stream.
    pub async fn handshake(
        stream: S,
        session: ZmtpSession,
        timing: ConnectionTiming,
    ) -> Result<Self, ZmtpError> {
        let now = Instant::now();
        let mut connection = Self {
            stream,
            session,
            input: BytesMut::new(),
            timing,
            received_at: now,
            next_heartbeat: now + timing.heartbeat,
        };
        let greeted = timeout(timing.handshake, async {
            // The first event of a session is always `SessionEvent::Ready`.
            connection.next_event().await?;
            // Sends the subscription, which the session queued when it became ready.
            connection.flush().await
        });
        match greeted.await {
            Ok(Ok(())) => Ok(connection),
            Ok(Err(ZmtpError::Closed)) => Err(ZmtpError::ClosedInHandshake),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ZmtpError::HandshakeTimeout(timing.handshake)),
        }
    }

    /// Waits for the next message. May be cancelled without loss.
    pub async fn next_event(&mut self) -> Result<SessionEvent, ZmtpError> {
        loop {
            let event = self.session.process(&mut self.input)?;
            // Replies to heartbeats are sent before the next read, so they cannot accumulate if the
            // peer does not read.
            if !self.session.output().is_empty() && event.is_none() {
                self.flush().await?;
            }
            if let Some(event) = event {
                return Ok(event);
            }
            self.input.reserve(READ_SIZE);
            tokio::select! {
                biased;
                read = self.stream.read_buf(&mut self.input) => {
                    if read? == 0 {
                        return Err(ZmtpError::Closed);
                    }
                    self.received_at = Instant::now();
                }
                () = sleep_until(self.next_heartbeat) => {
                    if self.ping() && self.received_at.elapsed() >= self.timing.idle_timeout {
                        return Err(ZmtpError::HeartbeatTimeout(self.timing.idle_timeout));
                    }
                }
            }
        }
    }

    /// Sends a message. May be cancelled; the next call of any method sends the rest.
    pub async fn send(&mut self, frames: &[Bytes]) -> Result<(), ZmtpError> {
        self.session.send(frames);
        self.flush().await
    }

    /// Waits for `busy` without reading. Heartbeats are still sent, so the peer does not time out.
    pub async fn wait_for<T>(&mut self, busy: impl Future<Output = T>) -> Result<T, ZmtpError> {
        tokio::pin!(busy);
        loop {
            tokio::select! {
                biased;
                done = &mut busy => {
                    // Nothing was read during the wait, so the peer was not necessarily silent.
                    self.received_at = Instant::now();
                    return Ok(done);
                }
                () = sleep_until(self.next_heartbeat) => {
                    self.ping();
                    self.flush().await?;
                }
            }
        }
    }

    /// Queues a heartbeat and schedules the next one. Returns whether the peer supports heartbeats.
    fn ping(&mut self) -> bool {
        self.next_heartbeat = Instant::now() + self.timing.heartbeat;
        self.session.ping()
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        let written = timeout(self.timing.idle_timeout, async {
            while !self.session.output().is_empty() {
                if self.stream.write_buf(self.session.output()).await? == 0 {
                    return Err(ZmtpError::Closed);
                }
            }
            Ok(self.stream.flush().await?)
        });
        written
            .await
            .map_err(|_| ZmtpError::HeartbeatTimeout(self.timing.idle_timeout))?
    }
}

#[cfg(test)]
mod tests;
