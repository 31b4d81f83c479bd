//! A session on a stream: reads, writes, heartbeats and timeouts.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, sleep_until, timeout};

use crate::error::ZmtpError;
use crate::session::{SessionEvent, ZmtpSession};

/// Bytes of one read. The session consumes everything before the next read, so the buffer does not
/// grow.
const READ: usize = 16 * 1024;

/// Timeouts and intervals of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTiming {
    /// Longest time to establish the transport connection.
    pub connect: Duration,
    /// Longest time of the ZMTP handshake.
    pub handshake: Duration,
    /// Interval of heartbeats to peers that support them.
    pub heartbeat: Duration,
    /// A peer that supports heartbeats and sends nothing for this long is gone; so is one that
    /// accepts no data.
    pub silence: Duration,
}

impl Default for ConnectionTiming {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            handshake: Duration::from_secs(5),
            heartbeat: Duration::from_secs(10),
            silence: Duration::from_secs(30),
        }
    }
}

/// One connection after its handshake.
pub struct ZmtpConnection<S> {
    stream: S,
    session: ZmtpSession,
    input: BytesMut,
    timing: ConnectionTiming,
    received_at: Instant,
    next_heartbeat: Instant,
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
            // The session has no other event before it is ready.
            connection.next_event().await?;
            // The subscription.
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
            // Replies to heartbeats are sent before more is read, so that a peer that does not read
            // cannot pile them up.
            if !self.session.output().is_empty() && event.is_none() {
                self.flush().await?;
            }
            if let Some(event) = event {
                return Ok(event);
            }
            self.input.reserve(READ);
            tokio::select! {
                biased;
                read = self.stream.read_buf(&mut self.input) => {
                    if read? == 0 {
                        return Err(ZmtpError::Closed);
                    }
                    self.received_at = Instant::now();
                }
                () = sleep_until(self.next_heartbeat) => {
                    if self.ping() && self.received_at.elapsed() >= self.timing.silence {
                        return Err(ZmtpError::HeartbeatTimeout(self.timing.silence));
                    }
                }
            }
        }
    }

    /// Sends a message. May be cancelled; the rest is sent by the next call of any method.
    pub async fn send(&mut self, frames: &[Bytes]) -> Result<(), ZmtpError> {
        self.session.send(frames);
        self.flush().await
    }

    /// Waits for `busy` without reading. Heartbeats are sent meanwhile, so that the peer does not
    /// time out.
    pub async fn wait_for<T>(&mut self, busy: impl Future<Output = T>) -> Result<T, ZmtpError> {
        tokio::pin!(busy);
        loop {
            tokio::select! {
                biased;
                done = &mut busy => {
                    // The peer was not given a chance to be received.
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

    /// Queues a heartbeat and schedules the next one.
    fn ping(&mut self) -> bool {
        self.next_heartbeat = Instant::now() + self.timing.heartbeat;
        self.session.ping()
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        let written = timeout(self.timing.silence, async {
            while !self.session.output().is_empty() {
                if self.stream.write_buf(self.session.output()).await? == 0 {
                    return Err(ZmtpError::Closed);
                }
            }
            Ok(self.stream.flush().await?)
        });
        written
            .await
            .map_err(|_| ZmtpError::HeartbeatTimeout(self.timing.silence))?
    }
}

#[cfg(test)]
mod tests;
