//! Listening to one worker rank's event source for as long as the process lives. The ZMQ crate reconnects too, but with
//! pauses of up to half a minute, silently, and without a way to ask what was missed meanwhile; so a lost connection ends
//! the socket here and a new one is attached. Every attach is followed by a replay, because a missed batch is visible in
//! numbers only when the next one arrives, and an idle engine sends none. While a replay runs, live messages wait
//! where they are bounded anyway: in the kernel's and the publisher's queues, whose overflow shows as a gap.

use std::collections::HashSet;
use std::convert::Infallible;
use std::os::unix::fs::FileTypeExt as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use zeromq::util::PeerIdentity;
use zeromq::{Socket, SocketEvent, SocketOptions, SocketRecv, SubSocket, ZmqError, ZmqMessage};

use super::dealer::{Dealer, Events, PAUSE as UNANSWERED};
use super::feed::Feed;
use super::replay::{self, BURST};
use super::sequencer::Incomplete;
use super::{RankSink, SourceSpec, SourceState, Witness};
use crate::metrics::Metrics;
use crate::trust::Link;
use crate::worker::{Attach, EventSource, WorkerRank};

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(3);
/// Pauses between attempts to attach.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A subscription takes effect a little after it was asked for; what fell into that moment is looked for this much later.
const SETTLED: Duration = Duration::from_secs(1);
/// After this much silence the engine is asked whether it really has nothing to say. A connection whose other side
/// vanished without a word looks like an idle one.
const IDLE: Duration = Duration::from_secs(30);

/// When and why to ask an engine for batches that should have arrived.
#[derive(Clone, Copy)]
enum Check {
    /// The subscription has taken effect by now.
    Settled(Instant),
    /// Nothing has come for long.
    Idle(Instant),
}

impl Check {
    fn at(self) -> Instant {
        match self {
            Check::Settled(at) | Check::Idle(at) => at,
        }
    }
}

/// Listens to one event source and applies what it says, for ever; ends by being dropped.
pub async fn run(
    spec: SourceSpec,
    sink: RankSink,
    metrics: Arc<Metrics>,
    (state, witness): (watch::Sender<SourceState>, Witness),
) -> Infallible {
    let view = View { rank: spec.rank, witness: witness.clone(), state };
    view.set(SourceState::Connecting);
    let mut listener = Listener {
        feed: Feed::new(&spec, sink, metrics, witness),
        replay: spec.source.replay.as_deref().map(Dealer::new),
        view,
        source: spec.source,
        check: None,
    };
    let mut pause = PAUSE.0;
    let mut complained = String::new();
    loop {
        let attempt = Instant::now();
        let Err(problem) = listener.session().await;
        listener.view.set(SourceState::Connecting);
        let problem = problem.to_string();
        if attempt.elapsed() > PAUSE.1 {
            pause = PAUSE.0;
            complained.clear();
        }
        if problem != complained {
            tracing::warn!(rank = %spec.rank, endpoint = listener.source.endpoint, problem, "no KV events");
            complained = problem;
        }
        sleep(pause.mul_f64(rand::random_range(0.75..1.25))).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// Why a socket was given up.
#[derive(Debug, thiserror::Error)]
pub(super) enum Detached {
    #[error("the engine closed the connection")]
    Closed,
    #[error(
        "the engine published, but nothing arrived; the connection is dead, or the topic {0:?} is not the engine's"
    )]
    Silent(String),
    #[error("requests were answered that had to store blocks, and nothing was heard of it")]
    Knocked,
    #[error("the endpoint has no fixed path to bind")]
    Wildcard,
    #[error(transparent)]
    Socket(#[from] ZmqError),
}

/// Where others see how far the source is.
struct View {
    rank: WorkerRank,
    witness: Witness,
    state: watch::Sender<SourceState>,
}

impl View {
    fn set(&self, state: SourceState) {
        self.witness.note(|source| {
            source.linked(match state {
                SourceState::Connecting => Link::Connecting,
                SourceState::Replaying => Link::Replaying,
                SourceState::Live => Link::Attached,
            });
        });
        let changed = self.state.send_if_modified(|known| std::mem::replace(known, state) != state);
        if changed {
            tracing::info!(rank = %self.rank, ?state, "KV event source");
        }
    }
}

/// One source and what is known of it across connections.
struct Listener {
    source: EventSource,
    feed: Feed,
    replay: Option<Dealer>,
    view: View,
    check: Option<Check>,
}

impl Listener {
    /// One socket from attach to loss.
    async fn session(&mut self) -> Result<Infallible, Detached> {
        let (mut socket, mut events) = open(&self.source).await?;
        let mut publishers = HashSet::new();
        self.check = None;
        if self.source.attach == Attach::Connect {
            self.attached().await;
        }
        let mut burst = 0;
        let knocks = self.view.witness.clone();
        loop {
            let check = self.check;
            let due = async move {
                match check {
                    Some(check) => sleep_until(check.at()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                event = events.next() => self.connection(event, &mut publishers).await?,
                message = socket.recv() => {
                    match message {
                        Ok(message) => self.message(message).await,
                        Err(error) if self.source.attach == Attach::Connect => return Err(error.into()),
                        // One of the publishers broke off; the bound socket stays.
                        Err(_) => {}
                    }
                    burst += 1;
                    if burst % BURST == 0 {
                        tokio::task::yield_now().await;
                    }
                }
                () = due => self.check().await?,
                () = knocks.knocked() => return Err(Detached::Knocked),
            }
        }
    }

    /// Follows connections come and go.
    async fn connection(
        &mut self,
        event: Option<SocketEvent>,
        publishers: &mut HashSet<PeerIdentity>,
    ) -> Result<(), Detached> {
        match event {
            Some(SocketEvent::Accepted(_, publisher)) => {
                publishers.insert(publisher);
                self.attached().await;
            }
            Some(SocketEvent::Disconnected(publisher)) => match self.source.attach {
                Attach::Connect => return Err(Detached::Closed),
                Attach::Bind => {
                    publishers.remove(&publisher);
                    if publishers.is_empty() {
                        self.check = None;
                        self.view.set(SourceState::Connecting);
                    }
                }
            },
            Some(_) => {}
            None => return Err(Detached::Closed),
        }
        Ok(())
    }

    /// An engine is there: find out what was missed before.
    async fn attached(&mut self) {
        let takes_over = self.feed.takes_over();
        match self.catch_up().await {
            Some(Ok(())) => {}
            // The number of the next batch tells whether one is missing.
            None if takes_over => {}
            // Nothing is known that could be out of date, and an engine without history has nothing to repeat.
            Some(Err(Incomplete::Empty)) | None if self.feed.is_fresh() => {}
            missed => {
                let why = missed.and_then(Result::err).map_or("no replay endpoint", Incomplete::as_str);
                tracing::warn!(rank = %self.view.rank, why, "what happened while detached is not wholly known");
                if !self.feed.is_fresh() {
                    self.feed.doubt();
                }
            }
        }
        self.check = self.replay.is_some().then(|| Check::Settled(Instant::now() + SETTLED));
    }

    /// Replays what the engine still holds; `None` without a replay endpoint.
    async fn catch_up(&mut self) -> Option<Result<(), Incomplete>> {
        let mut outcome = None;
        if let Some(engine) = &mut self.replay {
            self.view.set(SourceState::Replaying);
            outcome = Some(replay::catch_up(engine, &mut self.feed).await);
        }
        self.view.set(SourceState::Live);
        outcome
    }

    /// Takes one live message.
    async fn message(&mut self, message: ZmqMessage) {
        if self.replay.is_some() {
            self.check = Some(Check::Idle(Instant::now() + IDLE));
        }
        let (seq, payload) = match frames(&message) {
            Ok(batch) => batch,
            Err(problem) => return self.feed.malformed(problem),
        };
        let Some(gap) = self.feed.live(seq, payload) else { return };
        tracing::info!(rank = %self.view.rank, from = gap.from, to = gap.to, "KV event batches are missing");
        if let Some(Err(why)) = self.catch_up().await {
            tracing::warn!(rank = %self.view.rank, why = why.as_str(), "replay of KV events is incomplete");
        }
        self.feed.settle(gap, payload);
    }

    /// Asks a silent engine whether there is anything that should have arrived.
    async fn check(&mut self) -> Result<(), Detached> {
        let (Some(engine), Some(check)) = (&mut self.replay, self.check) else { return Ok(()) };
        let known = self.feed.expected();
        let outcome = replay::catch_up(engine, &mut self.feed).await;
        self.check = Some(match outcome {
            Err(Incomplete::EndedBeforeTarget) => Check::Settled(Instant::now() + UNANSWERED + SETTLED),
            _ => Check::Idle(Instant::now() + IDLE),
        });
        match check {
            Check::Idle(_) if self.feed.expected() != known => Err(Detached::Silent(self.source.topic.clone())),
            _ => Ok(()),
        }
    }
}

/// Number and payload of a live message: exactly topic, number and payload.
pub(super) fn frames(message: &ZmqMessage) -> Result<(u64, &Bytes), &'static str> {
    let (3, Some(seq), Some(payload)) = (message.len(), message.get(1), message.get(2)) else {
        return Err("it does not have three frames");
    };
    let seq: [u8; 8] = seq.as_ref().try_into().map_err(|_| "its number does not have eight bytes")?;
    Ok((u64::from_be_bytes(seq), payload))
}

/// A subscribed socket, connected or bound.
pub(super) async fn open(source: &EventSource) -> Result<(SubSocket, Events), Detached> {
    let mut options = SocketOptions::default();
    options.connect_timeout(CONNECT);
    let mut socket = SubSocket::with_options(options);
    let events = socket.monitor().boxed();
    socket.subscribe(&source.topic).await?;
    match source.attach {
        Attach::Connect => socket.connect(&source.endpoint).await?,
        Attach::Bind => {
            let endpoint = bindable(&source.endpoint)?;
            free_stale_path(&endpoint);
            socket.bind(&endpoint).await?;
        }
    }
    Ok((socket, events))
}

/// The endpoint in the form the crate can bind: it takes `*` for a host name, and panics at an unnamed path.
fn bindable(endpoint: &str) -> Result<String, Detached> {
    match endpoint.split_once("://") {
        Some(("ipc", "*")) => Err(Detached::Wildcard),
        Some(("tcp", address)) if address.starts_with("*:") => Ok(format!("tcp://0.0.0.0{}", &address[1..])),
        _ => Ok(endpoint.to_owned()),
    }
}

/// A socket file outlives the process that bound it; one that nobody listens on is in the way. Connecting to any other
/// file is refused as well, and that one is somebody's.
fn free_stale_path(endpoint: &str) {
    let Some(path) = endpoint.strip_prefix("ipc://") else { return };
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refused = is_socket
        && std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused);
    if refused {
        // If it cannot be removed, binding says so.
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use zeromq::{RouterSocket, SocketSend};

    use super::*;
    use crate::index::{Outcome, Settled};
    use crate::kv_events::{MediaTokens, SharedResync};
    use crate::worker::{BlockSize, DpRank, WorkerId};

    fn listener(replay: &str) -> Listener {
        let source = EventSource {
            endpoint: String::new(),
            topic: "topic".to_owned(),
            attach: Attach::Connect,
            replay: Some(replay.to_owned()),
        };
        let rank = WorkerRank { worker: WorkerId(1), rank: DpRank(0) };
        let block_size = BlockSize::new(2).unwrap();
        let (media, resync) = (MediaTokens::default(), SharedResync::default());
        let spec = SourceSpec { rank, source, engine: String::new(), block_size, media, resync };
        let sink = RankSink {
            apply: Box::new(|_| Outcome::Ok),
            doubt: Box::new(|| 0),
            settle: Box::new(Settled::default),
            position: Default::default(),
        };
        let witness = Witness::default();
        let metrics = Arc::new(Metrics::new());
        let (state, _) = watch::channel(SourceState::default());
        Listener {
            feed: Feed::new(&spec, sink, metrics, witness.clone()),
            replay: Some(Dealer::new(replay)),
            view: View { rank, witness, state },
            source: spec.source,
            check: None,
        }
    }

    /// An engine that holds two batches.
    async fn engine() -> (String, tokio::task::JoinHandle<()>) {
        let mut router = RouterSocket::new();
        let endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let answering = tokio::spawn(async move {
            while let Ok(request) = router.recv().await {
                let [client, _, from] = &request.into_vec()[..] else { panic!("not a request") };
                let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
                let batch = Bytes::from_static(&[0x92, 0x01, 0x90]);
                let held = (from..2).map(|seq| (seq, batch.clone())).chain([(u64::MAX, Bytes::new())]);
                for (seq, payload) in held {
                    let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
                    let reply = vec![client.clone(), Bytes::new(), seq, payload];
                    router.send(reply.try_into().unwrap()).await.unwrap();
                }
            }
        });
        (endpoint, answering)
    }

    #[tokio::test]
    async fn a_feed_that_stays_silent_while_the_engine_publishes_is_attached_anew() {
        let (endpoint, answering) = engine().await;
        let mut listener = listener(&endpoint);
        listener.check = Some(Check::Idle(Instant::now()));
        assert!(matches!(listener.check().await, Err(Detached::Silent(_))));
        assert_eq!(listener.feed.expected(), 2, "what was found is applied");
        assert!(listener.check().await.is_ok(), "nothing new since");
        answering.abort();
    }

    #[tokio::test]
    async fn what_fell_between_attach_and_subscription_is_no_reason_to_attach_anew() {
        let (endpoint, answering) = engine().await;
        let mut listener = listener(&endpoint);
        listener.check = Some(Check::Settled(Instant::now()));
        assert!(listener.check().await.is_ok());
        assert_eq!(listener.feed.expected(), 2);
        answering.abort();
    }

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        let endpoint = format!("ipc://{}", path.display());
        std::fs::write(&path, "precious").unwrap();
        free_stale_path(&endpoint);
        assert!(path.exists(), "not a socket");
        std::fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        free_stale_path(&endpoint);
        assert!(path.exists(), "in use");
        drop(listener);
        free_stale_path(&endpoint);
        assert!(!path.exists(), "left behind");
    }

    #[test]
    fn endpoints_are_put_into_the_form_the_crate_can_bind() {
        let cases = [
            ("tcp://*:5557", Some("tcp://0.0.0.0:5557")),
            ("tcp://127.0.0.1:5557", Some("tcp://127.0.0.1:5557")),
            ("ipc:///run/events", Some("ipc:///run/events")),
            ("ipc://*", None),
        ];
        for (given, expected) in cases {
            assert_eq!(bindable(given).ok().as_deref(), expected, "{given}");
        }
    }
}
