//! Subscribes to one worker rank's event source for as long as the process runs. A lost connection ends the socket and a
//! new one is attached after a pause. Every attach is followed by a replay, because a missed batch is visible in
//! numbers only when the next one arrives, and an idle engine sends none. While a replay runs, live messages wait
//! in the kernel's and the publisher's queues, which are bounded and whose overflow shows as a gap.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use warmroute_zmtp::{
    MessageLimits, PublisherId, ReconnectBackoff, SocketConfig, SubEvent, SubSocket, ZmtpEndpoint,
    ZmtpError,
};

use super::dealer::{Dealer, PAUSE as UNANSWERED};
use super::feed::Feed;
use super::replay::{self, BURST};
use super::sequencer::Incomplete;
use super::{RankSink, SourceSpec, SourceState, Witness};
use crate::metrics::{Metrics, ReasonLabel};
use crate::trust::Link;
use crate::worker::{Attach, EventSource, WorkerRank};

/// Pauses between attempts to attach.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A subscription takes effect a little after it was asked for; what fell into that moment is looked for this much later.
const SETTLED: Duration = Duration::from_secs(1);
/// Shortest time between log lines about refused connections.
const REFUSED_LOG: Duration = Duration::from_secs(60);
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

/// The next action of a session.
#[derive(Debug)]
enum ListenerAction {
    /// The next event of the socket; `None` if the socket is closed.
    Event(Option<SubEvent>),
    /// A check is due.
    Check,
    /// Requests succeeded, and their expected events did not arrive.
    Knocked,
    /// The task yielded to other tasks.
    Yielded,
}

/// The settings of a socket that receives messages of up to `max_message` octets.
pub(super) fn socket_config(max_message: usize) -> SocketConfig {
    let limits = MessageLimits {
        message: max_message,
        ..MessageLimits::default()
    };
    SocketConfig {
        limits,
        ..SocketConfig::default()
    }
}

/// Listens to one event source and applies what it says, for ever; ends by being dropped.
pub async fn run(
    spec: SourceSpec,
    sink: RankSink,
    metrics: Arc<Metrics>,
    (state, witness): (watch::Sender<SourceState>, Witness),
) -> Infallible {
    let view = View {
        rank: spec.rank,
        witness: witness.clone(),
        state,
    };
    view.set(SourceState::Connecting);
    let config = socket_config(spec.max_message);
    let mut listener = Listener {
        feed: Feed::new(&spec, sink, metrics.clone(), witness),
        replay: spec
            .source
            .replay
            .as_deref()
            .map(|endpoint| Dealer::new(endpoint, config)),
        view,
        config,
        metrics,
        source: spec.source,
        check: None,
        refused_at: None,
    };
    let mut backoff = ReconnectBackoff::new(PAUSE.0, PAUSE.1);
    let mut complained = String::new();
    loop {
        let attempt = Instant::now();
        let Err(problem) = listener.session().await;
        listener.view.set(SourceState::Connecting);
        let problem = problem.to_string();
        if attempt.elapsed() > PAUSE.1 {
            backoff.reset();
            complained.clear();
        }
        if problem != complained {
            tracing::warn!(rank = %spec.rank, endpoint = listener.source.endpoint, problem, "no KV events");
            complained = problem;
        }
        sleep(backoff.next_pause(rand::random())).await;
    }
}

/// The reason why a socket is closed and attached again.
#[derive(Debug, thiserror::Error)]
pub(super) enum DetachError {
    #[error(
        "the engine published, but nothing arrived; the connection is dead, or the topic {0:?} is not the engine's"
    )]
    Silent(String),
    #[error("answered requests had to store blocks, and no event arrived")]
    Knocked,
    #[error("the socket is closed")]
    SocketClosed,
    #[error(transparent)]
    Socket(#[from] ZmtpError),
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
        let changed = self
            .state
            .send_if_modified(|known| std::mem::replace(known, state) != state);
        if changed {
            tracing::info!(rank = %self.rank, ?state, "KV event source");
        }
    }
}

/// One source and what is known of it across connections.
struct Listener {
    source: EventSource,
    config: SocketConfig,
    metrics: Arc<Metrics>,
    feed: Feed,
    replay: Option<Dealer>,
    view: View,
    check: Option<Check>,
    /// Time of the last log line about a refused connection.
    refused_at: Option<Instant>,
}

impl Listener {
    /// One socket from attach to loss.
    async fn session(&mut self) -> Result<Infallible, DetachError> {
        let mut socket = open(&self.source, self.config)
            .await
            .inspect_err(|error| self.connection_failed(error))?;
        let mut publishers = HashSet::new();
        self.check = None;
        if self.source.attach == Attach::Connect {
            self.attached().await;
        }
        let mut burst = 0;
        loop {
            match self.next_action(socket.next_event(), &mut burst).await {
                ListenerAction::Event(event) => {
                    self.event(event.ok_or(DetachError::SocketClosed)?, &mut publishers)
                        .await?
                }
                ListenerAction::Check => self.check().await?,
                ListenerAction::Knocked => return Err(DetachError::Knocked),
                ListenerAction::Yielded => {}
            }
        }
    }

    /// Waits for the next action. Events come first, because a message makes a check unnecessary; after [`BURST`] events in succession
    /// the other actions and other tasks come first once, because the socket may always have an event.
    async fn next_action(
        &mut self,
        event: impl Future<Output = Option<SubEvent>>,
        burst: &mut usize,
    ) -> ListenerAction {
        let check = self.check;
        let due = async move {
            match check {
                Some(check) => sleep_until(check.at()).await,
                None => std::future::pending().await,
            }
        };
        let is_full = *burst >= BURST;
        let action = tokio::select! {
            biased;
            event = event, if !is_full => {
                *burst += 1;
                return ListenerAction::Event(event);
            }
            () = due => ListenerAction::Check,
            () = self.view.witness.knocked() => ListenerAction::Knocked,
            () = tokio::task::yield_now(), if is_full => ListenerAction::Yielded,
        };
        *burst = 0;
        action
    }

    /// Processes one event of the socket.
    async fn event(
        &mut self,
        event: SubEvent,
        publishers: &mut HashSet<PublisherId>,
    ) -> Result<(), DetachError> {
        match event {
            SubEvent::Message(frames) => self.message(&frames).await,
            SubEvent::Oversize(limit) => self.feed.skipped_message(limit.as_str()),
            SubEvent::Connected { publisher, address } => {
                tracing::debug!(rank = %self.view.rank, address, "KV event publisher connected");
                publishers.insert(publisher);
                self.attached().await;
            }
            SubEvent::Disconnected { publisher, error } => {
                self.connection_failed(&error);
                if self.source.attach == Attach::Connect {
                    return Err(error.into());
                }
                publishers.remove(&publisher);
                if publishers.is_empty() {
                    self.check = None;
                    self.view.set(SourceState::Connecting);
                }
            }
            SubEvent::Refused { address, error } => {
                self.connection_failed(&error);
                let is_first = self.refused_at.is_none_or(|at| at.elapsed() >= REFUSED_LOG);
                if is_first {
                    self.refused_at = Some(Instant::now());
                    tracing::warn!(rank = %self.view.rank, address, %error, "KV event publisher refused");
                }
            }
        }
        Ok(())
    }

    fn connection_failed(&self, error: &ZmtpError) {
        self.metrics
            .kv_event_connection_errors
            .get_or_create(&ReasonLabel {
                reason: error.reason(),
            })
            .inc();
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
                let why = missed
                    .and_then(Result::err)
                    .map_or("no replay endpoint", Incomplete::as_str);
                tracing::warn!(rank = %self.view.rank, why, "what happened while detached is not wholly known");
                if !self.feed.is_fresh() {
                    self.feed.doubt();
                }
            }
        }
        self.check = self
            .replay
            .is_some()
            .then(|| Check::Settled(Instant::now() + SETTLED));
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
    async fn message(&mut self, frames: &[Bytes]) {
        let (seq, payload) = match live_batch(frames) {
            Ok(batch) => batch,
            Err(problem) => return self.feed.malformed(problem),
        };
        if self.replay.is_some() {
            self.check = Some(Check::Idle(Instant::now() + IDLE));
        }
        let Some(gap) = self.feed.live(seq, payload) else {
            return;
        };
        tracing::info!(rank = %self.view.rank, from = gap.from, to = gap.to, "KV event batches are missing");
        if let Some(Err(why)) = self.catch_up().await {
            tracing::warn!(rank = %self.view.rank, why = why.as_str(), "replay of KV events is incomplete");
        }
        self.feed.settle(gap, payload);
    }

    /// Asks a silent engine whether there is anything that should have arrived.
    async fn check(&mut self) -> Result<(), DetachError> {
        let (Some(engine), Some(check)) = (&mut self.replay, self.check) else {
            return Ok(());
        };
        let known = self.feed.expected();
        let outcome = replay::catch_up(engine, &mut self.feed).await;
        self.check = Some(match outcome {
            Err(Incomplete::EndedBeforeTarget) => {
                Check::Settled(Instant::now() + UNANSWERED + SETTLED)
            }
            _ => Check::Idle(Instant::now() + IDLE),
        });
        match check {
            Check::Idle(_) if self.feed.expected() != known => {
                Err(DetachError::Silent(self.source.topic.clone()))
            }
            _ => Ok(()),
        }
    }
}

/// Number and payload of a live message: exactly topic, number and payload.
pub(super) fn live_batch(frames: &[Bytes]) -> Result<(u64, &Bytes), &'static str> {
    let [_topic, seq, payload] = frames else {
        return Err("it does not have three frames");
    };
    let seq: [u8; 8] = seq
        .as_ref()
        .try_into()
        .map_err(|_| "its number does not have eight bytes")?;
    Ok((u64::from_be_bytes(seq), payload))
}

/// Opens a subscribed socket, connected or bound.
pub(super) async fn open(
    source: &EventSource,
    config: SocketConfig,
) -> Result<SubSocket, ZmtpError> {
    let endpoint: ZmtpEndpoint = source.endpoint.parse()?;
    match source.attach {
        Attach::Connect => SubSocket::connect(&endpoint, &source.topic, config).await,
        Attach::Bind => SubSocket::bind(&endpoint, &source.topic, config).await,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use warmroute_zmtp::ExceededLimit;
    use zeromq::{RouterSocket, Socket as _, SocketRecv as _, SocketSend as _};

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
        let rank = WorkerRank {
            worker: WorkerId(1),
            rank: DpRank(0),
        };
        let block_size = BlockSize::new(2).unwrap();
        let (media, resync) = (MediaTokens::default(), SharedResync::default());
        let engine = String::new();
        let max_message = MessageLimits::default().message;
        let spec = SourceSpec {
            rank,
            source,
            engine,
            block_size,
            media,
            resync,
            max_message,
        };
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
            feed: Feed::new(&spec, sink, metrics.clone(), witness.clone()),
            replay: Some(Dealer::new(replay, SocketConfig::default())),
            config: SocketConfig::default(),
            metrics,
            view: View {
                rank,
                witness,
                state,
            },
            source: spec.source,
            check: None,
            refused_at: None,
        }
    }

    /// An engine that holds two batches.
    async fn engine() -> (String, tokio::task::JoinHandle<()>) {
        let mut router = RouterSocket::new();
        let endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let answering = tokio::spawn(async move {
            while let Ok(request) = router.recv().await {
                let [client, _, from] = &request.into_vec()[..] else {
                    panic!("not a request")
                };
                let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
                let batch = Bytes::from_static(&[0x92, 0x01, 0x90]);
                let held = (from..2)
                    .map(|seq| (seq, batch.clone()))
                    .chain([(u64::MAX, Bytes::new())]);
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
        assert!(matches!(
            listener.check().await,
            Err(DetachError::Silent(_))
        ));
        assert_eq!(listener.feed.expected(), 2, "what was found is applied");
        assert!(listener.check().await.is_ok(), "nothing new since");
        answering.abort();
    }

    #[tokio::test]
    async fn due_check_runs_while_events_are_always_ready() {
        let mut listener = listener("tcp://127.0.0.1:1");
        let event = || std::future::ready(Some(SubEvent::Oversize(ExceededLimit::Message)));
        let mut burst = 0;
        listener.check = Some(Check::Idle(Instant::now()));
        let mut events = 0;
        while let ListenerAction::Event(_) = listener.next_action(event(), &mut burst).await {
            events += 1;
            assert!(events <= BURST, "the check does not run");
        }
        listener.check = None;
        listener.view.witness.knock();
        let mut actions = Vec::new();
        while !matches!(actions.last(), Some(ListenerAction::Knocked)) {
            actions.push(listener.next_action(event(), &mut burst).await);
            assert!(actions.len() <= BURST + 1, "{actions:?}");
        }
    }

    #[tokio::test]
    async fn only_batches_postpone_the_check() {
        let mut listener = listener("tcp://127.0.0.1:1");
        let at = Instant::now();
        listener.check = Some(Check::Settled(at));
        listener
            .message(&[
                Bytes::from_static(b"topic"),
                Bytes::from_static(b"no number"),
            ])
            .await;
        assert!(matches!(listener.check, Some(Check::Settled(still)) if still == at));
        let batch = [
            b"topic".as_slice(),
            &0_u64.to_be_bytes(),
            &[0x92, 0x01, 0x90],
        ];
        listener.message(&batch.map(Bytes::copy_from_slice)).await;
        assert!(matches!(listener.check, Some(Check::Idle(_))));
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
}
