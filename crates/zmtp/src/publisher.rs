//! The connection of a SUB socket to one publisher, and the events that it reports.

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::SocketConfig;
use crate::connection::ZmtpConnection;
use crate::error::ZmtpError;
use crate::session::{ExceededLimit, SessionEvent, SocketRole, ZmtpSession};
use crate::transport::TransportStream;

/// The number of a publisher's connection, unique within its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PublisherId(pub u64);

/// An event of a SUB socket.
#[derive(Debug)]
pub enum SubEvent {
    /// A publisher completed the handshake with a bound socket. A connected socket does not report
    /// this event, because [`SubSocket::connect`](crate::SubSocket::connect) completes the handshake.
    Connected {
        /// The connection.
        publisher: PublisherId,
        /// Address of the peer.
        address: String,
    },
    /// A message, as its frames.
    Message(Vec<Bytes>),
    /// A message exceeded a limit and was skipped.
    Oversize(ExceededLimit),
    /// A connection ended.
    Disconnected {
        /// The connection.
        publisher: PublisherId,
        /// The reason.
        error: ZmtpError,
    },
    /// A connection to a bound socket was refused. Reported only while the consumer keeps up.
    Refused {
        /// Address of the peer.
        address: String,
        /// The reason.
        error: ZmtpError,
    },
}

/// Returns a session that subscribes to a topic.
pub(crate) fn session(topic: &str, config: SocketConfig) -> ZmtpSession {
    ZmtpSession::new(
        SocketRole::Sub {
            topic: Bytes::copy_from_slice(topic.as_bytes()),
        },
        config.limits,
    )
}

/// Forwards the messages of a connection one at a time. Nothing is read while a message waits for
/// the consumer. Returns the error of the connection, or `None` if the socket was dropped.
pub(crate) async fn forward_messages(
    mut connection: ZmtpConnection<TransportStream>,
    events: &mpsc::Sender<SubEvent>,
    last_message: Option<&watch::Sender<Instant>>,
) -> Option<ZmtpError> {
    loop {
        let event = match connection.next_event().await {
            Ok(SessionEvent::Message(frames)) => SubEvent::Message(frames),
            Ok(SessionEvent::Oversize(limit)) => SubEvent::Oversize(limit),
            Ok(SessionEvent::Ready) => continue,
            Err(error) => return Some(error),
        };
        match connection.wait_for(events.reserve()).await {
            Ok(permit) => permit.ok()?.send(event),
            Err(error) => {
                // The message was received before the connection failed.
                events.send(event).await.ok()?;
                return Some(error);
            }
        }
        // Set after the wait, because time spent waiting for the consumer is not silence of the
        // publisher.
        if let Some(last_message) = last_message {
            last_message.send_replace(Instant::now());
        }
    }
}

/// Reports the end of a connection, unless the socket was dropped.
pub(crate) async fn report_end(
    publisher: PublisherId,
    error: Option<ZmtpError>,
    events: &mpsc::Sender<SubEvent>,
) {
    if let Some(error) = error {
        // An error means that the socket was dropped.
        let _ = events
            .send(SubEvent::Disconnected { publisher, error })
            .await;
    }
}
