//! NATS connection: subjects, subscriptions, and sends with a short timeout.
//!
//! The client reconnects automatically. Messages that cannot be sent in the meantime are lost.
//! Peers detect the loss by the batch numbers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::connection::State;
use async_nats::{Auth, AuthError, Client, ConnectOptions, Event, Message, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::timeout;
use warmroute_runtime::files;
use warmroute_settings::MAX_SECRET_FILE;

use super::ReplicaId;
use super::config::{NatsConfig, ReplicasConfig};

/// Timeout of a send.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of the flush at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Ping interval. A server that does not respond for twice this time is considered disconnected.
const PING_INTERVAL: Duration = Duration::from_secs(2);

/// Capacity of the queue of each subscription. Further messages are dropped. The gap in the batch
/// numbers then leads to a snapshot request.
const SUBSCRIPTION_CAPACITY: usize = 4096;

/// Time after which a connection attempt does not count for the pause before the next one.
const ATTEMPT_MEMORY: Duration = Duration::from_secs(10);

/// Pause before the next connection attempt. The client counts from one again after each
/// connection, however short it was. A server that accepts and closes connections would then be
/// connected, and logged, several times a second.
#[derive(Default)]
struct ReconnectPause {
    recent_attempts: u32,
    last_attempt: Option<Instant>,
}

impl ReconnectPause {
    fn next(&mut self, now: Instant) -> Duration {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < ATTEMPT_MEMORY;
        if !self.last_attempt.is_some_and(is_recent) {
            self.recent_attempts = 0;
        }
        self.last_attempt = Some(now);
        self.recent_attempts = self.recent_attempts.saturating_add(1);
        Duration::from_millis(50 << self.recent_attempts.min(5))
    }
}

/// NATS connection of this replica.
pub(super) struct NatsLink {
    client: Client,
    events: String,
    group: String,
    inbox: String,
    echo: String,
}

/// NATS subscriptions of this replica.
pub(super) struct NatsSubscriptions {
    /// Batches of all replicas.
    pub(super) batches: Subscriber,
    /// Requests for a snapshot of this replica.
    pub(super) snapshot_requests: Subscriber,
    /// Snapshot parts sent to this replica.
    pub(super) snapshot_parts: Subscriber,
    /// Echo messages of this replica.
    pub(super) echoes: Subscriber,
    /// Connection events.
    pub(super) connection_events: mpsc::UnboundedReceiver<Event>,
}

/// Received message.
pub(super) enum NatsMessage {
    Batch(Message),
    SnapshotRequest(Message),
    SnapshotPart(Message),
    Echo(Message),
    Connection(Event),
}

impl NatsSubscriptions {
    /// Returns the next message, or `None` if a subscription has ended. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<NatsMessage> {
        Some(tokio::select! {
            message = self.batches.next() => NatsMessage::Batch(message?),
            message = self.snapshot_requests.next() => NatsMessage::SnapshotRequest(message?),
            message = self.snapshot_parts.next() => NatsMessage::SnapshotPart(message?),
            message = self.echoes.next() => NatsMessage::Echo(message?),
            state = self.connection_events.recv() => NatsMessage::Connection(state?),
        })
    }
}

impl NatsLink {
    /// Creates the client and its subscriptions. Returns before the connection is established.
    pub(super) async fn open(
        settings: &ReplicasConfig,
        id: ReplicaId,
    ) -> anyhow::Result<(Self, NatsSubscriptions)> {
        let (events_tx, connection_rx) = mpsc::unbounded_channel();
        let pause = Mutex::new(ReconnectPause::default());
        let options = connect_options(&settings.nats)
            .await?
            .name("warmroute")
            .retry_on_initial_connect()
            .ping_interval(PING_INTERVAL)
            .connection_timeout(SEND_TIMEOUT * 2)
            .subscription_capacity(SUBSCRIPTION_CAPACITY)
            .reconnect_delay_callback(move |_| pause.lock().next(Instant::now()))
            .event_callback(move |event| {
                events_tx.send(event).ok();
                std::future::ready(())
            });
        let client = options
            .connect(&settings.nats.servers[..])
            .await
            .context("the NATS client cannot be created")?;
        let group = settings.group.clone();
        let inbox = client.new_inbox();
        let events = format!("warmroute.{group}.events.{id}");
        let echo = format!("warmroute.{group}.echo.{id}");
        let link = Self {
            events,
            group,
            inbox,
            echo,
            client,
        };
        let subscriptions = NatsSubscriptions {
            batches: link
                .client
                .subscribe(format!("warmroute.{}.events.*", link.group))
                .await?,
            snapshot_requests: link.client.subscribe(link.request_subject(id)).await?,
            snapshot_parts: link.client.subscribe(link.inbox.clone()).await?,
            echoes: link.client.subscribe(link.echo.clone()).await?,
            connection_events: connection_rx,
        };
        Ok((link, subscriptions))
    }

    pub(super) fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Returns the maximum message size.
    pub(super) fn max_message_bytes(&self) -> usize {
        self.client.max_payload()
    }

    /// Publishes a message to all replicas. Returns whether it was sent.
    pub(super) async fn publish(&self, message: &impl prost::Message) -> bool {
        self.send(self.events.clone(), None, message.encode_to_vec().into())
            .await
    }

    /// Requests a snapshot from a peer.
    pub(super) async fn request_snapshot(&self, peer: ReplicaId) -> bool {
        self.send(
            self.request_subject(peer),
            Some(self.inbox.clone()),
            Bytes::new(),
        )
        .await
    }

    /// Returns whether the message was published by this replica.
    pub(super) fn is_own(&self, subject: &str) -> bool {
        subject == self.events
    }

    /// Returns whether the message was published by `replica`.
    pub(super) fn is_from(&self, subject: &str, replica: ReplicaId) -> bool {
        subject.rsplit('.').next() == Some(replica.to_string().as_str())
    }

    /// Sends an echo message from this replica to itself, to measure the propagation delay.
    pub(super) async fn send_echo(&self, nanos: u64) -> bool {
        self.send(
            self.echo.clone(),
            None,
            Bytes::copy_from_slice(&nanos.to_be_bytes()),
        )
        .await
    }

    /// Replies to a request.
    pub(super) async fn reply(&self, to: String, message: &impl prost::Message) -> bool {
        self.send(to, None, message.encode_to_vec().into()).await
    }

    /// Flushes the connection, with a timeout.
    pub(super) async fn flush(&self) {
        timeout(FLUSH_TIMEOUT, self.client.flush()).await.ok();
    }

    async fn send(&self, subject: String, reply: Option<String>, bytes: Bytes) -> bool {
        if !self.is_up() {
            return false;
        }
        let sent = match reply {
            None => timeout(SEND_TIMEOUT, self.client.publish(subject, bytes)).await,
            Some(reply) => {
                timeout(
                    SEND_TIMEOUT,
                    self.client.publish_with_reply(subject, reply, bytes),
                )
                .await
            }
        };
        matches!(sent, Ok(Ok(())))
    }

    fn request_subject(&self, peer: ReplicaId) -> String {
        format!("warmroute.{}.snapshot.{peer}", self.group)
    }
}

async fn connect_options(nats: &NatsConfig) -> anyhow::Result<ConnectOptions> {
    let mut options = match &nats.credentials_file {
        Some(file) => ConnectOptions::with_credentials_file(file)
            .await
            .with_context(|| format!("the credentials in {} cannot be used", file.display()))?,
        None if nats.token_file.is_some() || nats.user.is_some() => {
            let nats = Arc::new(nats.clone());
            ConnectOptions::with_auth_callback(move |_| {
                let nats = nats.clone();
                async move { auth(&nats).await.map_err(AuthError::new) }
            })
        }
        None => ConnectOptions::new(),
    };
    if let Some(file) = &nats.ca_file {
        options = options.add_root_certificates(file.clone());
    }
    if let (Some(cert), Some(key)) = (&nats.cert_file, &nats.key_file) {
        options = options.add_client_certificate(cert.clone(), key.clone());
    }
    Ok(options)
}

/// Reads the current credentials.
async fn auth(nats: &NatsConfig) -> std::io::Result<Auth> {
    let read = async |file: &Option<std::path::PathBuf>| match file {
        Some(file) => {
            let text = files::read(file, MAX_SECRET_FILE).await?;
            let text = String::from_utf8(text).map_err(std::io::Error::other)?;
            Ok(Some(text.trim().to_owned()))
        }
        None => Ok::<_, std::io::Error>(None),
    };
    let mut auth = Auth::new();
    auth.token = read(&nats.token_file).await?;
    auth.password = read(&nats.password_file).await?;
    auth.username = nats.user.clone();
    Ok(auth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_reconnects_wait_longer() {
        let mut pause = ReconnectPause::default();
        let start = Instant::now();
        let pauses = [0, 1, 2, 3, 4, 5, 14, 24].map(|seconds| {
            let pause = pause.next(start + Duration::from_secs(seconds));
            pause.as_millis()
        });
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 1600, 1600, 100]);
    }
}
