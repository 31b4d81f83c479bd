//! The way over NATS: subjects, connection, and sending that never waits for long. The client connects again by itself;
//! what could not be sent meanwhile is lost, which the numbers of the batches tell to whoever missed it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_nats::connection::State;
use async_nats::{Auth, AuthError, Client, ConnectOptions, Event, Message, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::ReplicaId;
use super::config::{NatsConfig, ReplicasConfig};

/// A client that takes nothing for so long is as good as gone.
const SEND: Duration = Duration::from_secs(1);

/// How long the last words may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// A server that says nothing for twice as long is gone.
const PING: Duration = Duration::from_secs(2);

/// Messages of one subscription that wait to be processed. Further ones are dropped. The gap shows in the numbers of the batches, and
/// the peer is asked for a snapshot.
const SUBSCRIPTION_CAPACITY: usize = 4096;

/// The connection.
pub(super) struct Link {
    client: Client,
    events: String,
    group: String,
    inbox: String,
    echo: String,
}

/// What is heard.
pub(super) struct Ears {
    /// Batches of all.
    pub(super) batches: Subscriber,
    /// Questions for us.
    pub(super) asks: Subscriber,
    /// Answers for us.
    pub(super) answers: Subscriber,
    /// What we said to ourselves.
    pub(super) echoes: Subscriber,
    /// What happens to the connection.
    pub(super) states: mpsc::UnboundedReceiver<Event>,
}

/// What was heard; nothing where that has ended.
pub(super) enum Heard {
    Batch(Option<Message>),
    Ask(Option<Message>),
    Answer(Option<Message>),
    Echo(Option<Message>),
    State(Option<Event>),
}

impl Ears {
    /// What comes next. Dropping it loses nothing, so what is to be done about it is done elsewhere.
    pub(super) async fn next(&mut self) -> Heard {
        tokio::select! {
            message = self.batches.next() => Heard::Batch(message),
            message = self.asks.next() => Heard::Ask(message),
            message = self.answers.next() => Heard::Answer(message),
            message = self.echoes.next() => Heard::Echo(message),
            state = self.states.recv() => Heard::State(state),
        }
    }
}

impl Link {
    /// Begins to connect; it need not come about at once.
    pub(super) async fn open(
        settings: &ReplicasConfig,
        own: ReplicaId,
    ) -> anyhow::Result<(Self, Ears)> {
        let (tell, states) = mpsc::unbounded_channel();
        let options = options(&settings.nats)
            .await?
            .name("warmroute")
            .retry_on_initial_connect()
            .ping_interval(PING)
            .connection_timeout(SEND * 2)
            .subscription_capacity(SUBSCRIPTION_CAPACITY)
            .reconnect_delay_callback(|tries| Duration::from_millis(50 << tries.min(5)))
            .event_callback(move |event| {
                tell.send(event).ok();
                std::future::ready(())
            });
        let client = options
            .connect(&settings.nats.servers[..])
            .await
            .context("the NATS client cannot be made")?;
        let (group, inbox) = (settings.group.clone(), client.new_inbox());
        let (events, echo) = (
            format!("warmroute.{group}.events.{own}"),
            format!("warmroute.{group}.echo.{own}"),
        );
        let link = Self {
            events,
            group,
            inbox,
            echo,
            client,
        };
        let ears = Ears {
            batches: link
                .client
                .subscribe(format!("warmroute.{}.events.*", link.group))
                .await?,
            asks: link.client.subscribe(link.ask(own)).await?,
            answers: link.client.subscribe(link.inbox.clone()).await?,
            echoes: link.client.subscribe(link.echo.clone()).await?,
            states,
        };
        Ok((link, ears))
    }

    pub(super) fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Most bytes of a message.
    pub(super) fn most_bytes(&self) -> usize {
        self.client.max_payload()
    }

    /// Tells everybody; whether it is on its way.
    pub(super) async fn tell(&self, message: &impl prost::Message) -> bool {
        self.send(self.events.clone(), None, message.encode_to_vec().into())
            .await
    }

    /// Asks a peer for everything.
    pub(super) async fn ask_all(&self, peer: ReplicaId) -> bool {
        self.send(self.ask(peer), Some(self.inbox.clone()), Bytes::new())
            .await
    }

    /// Whether a message is one that we told everybody.
    pub(super) fn is_own(&self, subject: &str) -> bool {
        subject == self.events
    }

    /// Whether a message that was told everybody is one of this replica.
    pub(super) fn is_of(&self, subject: &str, replica: ReplicaId) -> bool {
        subject.rsplit('.').next() == Some(replica.to_string().as_str())
    }

    /// Says something to ourselves, to see how long that takes.
    pub(super) async fn echo(&self, nanos: u64) -> bool {
        self.send(
            self.echo.clone(),
            None,
            Bytes::copy_from_slice(&nanos.to_be_bytes()),
        )
        .await
    }

    /// Answers whoever asked.
    pub(super) async fn answer(&self, to: String, message: &impl prost::Message) -> bool {
        self.send(to, None, message.encode_to_vec().into()).await
    }

    /// Waits until what was told is with the server, but not for long.
    pub(super) async fn flush(&self) {
        timeout(FAREWELL, self.client.flush()).await.ok();
    }

    async fn send(&self, subject: String, reply: Option<String>, bytes: Bytes) -> bool {
        if !self.is_up() {
            return false;
        }
        let sent = match reply {
            None => timeout(SEND, self.client.publish(subject, bytes)).await,
            Some(reply) => {
                timeout(SEND, self.client.publish_with_reply(subject, reply, bytes)).await
            }
        };
        matches!(sent, Ok(Ok(())))
    }

    fn ask(&self, of: ReplicaId) -> String {
        format!("warmroute.{}.ask.{of}", self.group)
    }
}

async fn options(nats: &NatsConfig) -> anyhow::Result<ConnectOptions> {
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

/// Who we are, as the files say at this moment.
async fn auth(nats: &NatsConfig) -> std::io::Result<Auth> {
    let read = async |file: &Option<std::path::PathBuf>| match file {
        Some(file) => tokio::fs::read_to_string(file)
            .await
            .map(|text| Some(text.trim().to_owned())),
        None => Ok(None),
    };
    let mut auth = Auth::new();
    auth.token = read(&nats.token_file).await?;
    auth.password = read(&nats.password_file).await?;
    auth.username = nats.user.clone();
    Ok(auth)
}
