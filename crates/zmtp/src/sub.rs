//! SUB sockets. A connected socket receives from one publisher, and a bound socket from every
//! publisher that connects to it.

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::SocketConfig;
use crate::connection::ZmtpConnection;
use crate::endpoint::ZmtpEndpoint;
use crate::error::ZmtpError;
use crate::listener::PublisherListener;
use crate::publisher::{PublisherId, SubEvent, forward_messages, report_end, session};
use crate::transport::{self, TransportListener};

/// Most events that wait for the consumer. Further messages wait in the connections, the kernel
/// and the publishers.
const QUEUE_CAPACITY: usize = 1;

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
