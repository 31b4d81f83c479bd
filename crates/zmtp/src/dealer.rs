//! DEALER: requests to a ROUTER and its replies.

use bytes::Bytes;

use crate::SocketConfig;
use crate::connection::ZmtpConnection;
use crate::endpoint::ZmtpEndpoint;
use crate::error::ZmtpError;
use crate::session::{SessionEvent, SocketRole, ZmtpSession};
use crate::transport::{self, TransportStream};

/// A connected DEALER socket. It reads only while a caller waits for a reply, and does not
/// reconnect.
pub struct DealerSocket {
    connection: ZmtpConnection<TransportStream>,
}

impl DealerSocket {
    /// Connects and completes the handshake.
    pub async fn connect(endpoint: &ZmtpEndpoint, config: SocketConfig) -> Result<Self, ZmtpError> {
        let stream = transport::connect(endpoint, config.timing.connect).await?;
        let session = ZmtpSession::new(SocketRole::Dealer, config.limits);
        Ok(Self {
            connection: ZmtpConnection::handshake(stream, session, config.timing).await?,
        })
    }

    /// Sends a message.
    pub async fn send(&mut self, frames: &[Bytes]) -> Result<(), ZmtpError> {
        self.connection.send(frames).await
    }

    /// Waits for the next message. May be cancelled without loss.
    pub async fn next_event(&mut self) -> Result<SessionEvent, ZmtpError> {
        self.connection.next_event().await
    }
}
