//! SUB sockets. A connected socket receives from one publisher, and a bound socket from every
//! publisher that connects to it.

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::SocketConfig;
use crate::connection::ZmtpConnection;
use crate::endpoint::ZmtpEndpoint;
use crate::error::ZmtpError;
use crate::listener::PublisherListener;
use crate::session::{ExceededLimit, SessionEvent, SocketRole, ZmtpSession};
use crate::transport::{self, TransportListener, TransportStream};

/// Most events that wait for the consumer. Further messages wait in the connections, the kernel
/// and the publishers.
const QUEUE_CAPACITY: usize = 1;

/// The number of a publisher's connection, unique within its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PublisherId(pub u64);

/// An event of a SUB socket.
#[derive(Debug)]
pub enum SubEvent {
    /// A publisher completed the handshake with a bound socket. A connected socket does not report
    /// this event, because [`SubSocket::connect`] completes the handshake.
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

/// A SUB socket with one subscription. A connected socket does not reconnect:
/// [`SubEvent::Disconnected`] is its last event.
pub struct SubSocket {
    events: mpsc::Receiver<SubEvent>,
    local: Option<ZmtpEndpoint>,
    /// Dropping the socket ends these tasks, and with them the connections.
    _tasks: JoinSet<()>,
}

impl SubSocket {
    /// Connects to a publisher, completes the handshake and sends the subscription.
    pub async fn connect(
        endpoint: &ZmtpEndpoint,
        topic: &str,
        config: SocketConfig,
    ) -> Result<Self, ZmtpError> {
        let stream = transport::connect(endpoint, config.timing.connect).await?;
        let connection =
            ZmtpConnection::handshake(stream, session(topic, config), config.timing).await?;
        let (events_tx, events) = mpsc::channel(QUEUE_CAPACITY);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let error = forward_messages(connection, &events_tx, None).await;
            report_end(PublisherId(0), error, &events_tx).await;
        });
        Ok(Self {
            events,
            local: None,
            _tasks: tasks,
        })
    }

    /// Listens for publishers.
    pub async fn bind(
        endpoint: &ZmtpEndpoint,
        topic: &str,
        config: SocketConfig,
    ) -> Result<Self, ZmtpError> {
        let transport = TransportListener::bind(endpoint).await?;
        let local = transport.local_endpoint(endpoint)?;
        let (events_tx, events) = mpsc::channel(QUEUE_CAPACITY);
        let mut tasks = JoinSet::new();
        tasks.spawn(PublisherListener::new(transport, topic, config, events_tx).run());
        Ok(Self {
            events,
            local: Some(local),
            _tasks: tasks,
        })
    }

    /// Returns the endpoint of a bound socket, with the port that the system chose.
    pub fn local_endpoint(&self) -> Option<&ZmtpEndpoint> {
        self.local.as_ref()
    }

    /// Waits for the next event. Returns `None` after the last one. May be cancelled without loss.
    pub async fn next_event(&mut self) -> Option<SubEvent> {
        self.events.recv().await
    }
}

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
