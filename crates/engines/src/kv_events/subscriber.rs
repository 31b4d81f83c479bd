//! Subscribes to one worker rank's event source for the lifetime of the process. After a lost
//! connection, it pauses and opens a new socket. A replay follows every connection, because only a
//! later batch number reveals a missed batch, and an idle engine sends none. While the engine does
//! not answer, it is unknown whether batches are missing. The replay is requested again at
//! intervals and before the next live batch. During a replay, live messages wait in the bounded
//! queues of the kernel and of the publisher. If these queues overflow, the sequence numbers show a
//! gap.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use warmroute_zmtp::{
    MessageLimits, PublisherId, SocketConfig, SubEvent, SubSocket, ZmtpEndpoint, ZmtpError,
};

use super::applier::{BatchApplier, EventApplier};
use super::replay::{self, BURST};
use super::replay_client::{FIRST_PAUSE as UNANSWERED, ReplayClient};
use super::sequencer::ReplayError;
use super::source::{RankSink, SourceSpec};
use super::source_monitor::SourceMonitor;
use super::source_outage::{OutageReport, SourceOutage};
use warmroute_core::freshness::SourceLink;
use warmroute_core::worker::{EventSource, SocketAttach, WorkerRank};
use warmroute_metrics::{Metrics, ReasonLabel};
use warmroute_runtime::lifecycle::JitteredBackoff;

/// Time after connecting until the subscription has taken effect. Batches published in this time
/// may be missed; a replay after it returns them.
const SUBSCRIPTION_DELAY: Duration = Duration::from_secs(1);
/// Minimum time between log lines about refused connections.
const REFUSED_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Time without messages after which the replay endpoint is queried. A connection that broke
/// without a reset looks idle.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Time and reason of the next check for missed batches.
#[derive(Clone, Copy)]
enum ReplayCheck {
    /// The subscription has taken effect.
    AfterSubscribe(Instant),
    /// No message arrived for a long time.
    Idle(Instant),
}

impl ReplayCheck {
    /// Returns the check after a replay that the engine did not answer.
    fn after_unanswered() -> Self {
        ReplayCheck::AfterSubscribe(Instant::now() + UNANSWERED + SUBSCRIPTION_DELAY)
    }

    fn at(self) -> Instant {
        match self {
            ReplayCheck::AfterSubscribe(at) | ReplayCheck::Idle(at) => at,
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
    /// Requests succeeded, but their expected events did not arrive.
    ReconnectRequested,
    /// The task yielded to other tasks.
    Yielded,
}

/// Returns the configuration of a socket that receives messages of up to `max_message` bytes.
pub(super) fn socket_config(max_message: usize) -> SocketConfig {
    let limits = MessageLimits {
        max_bytes: max_message,
        ..MessageLimits::default()
    };
    SocketConfig {
        limits,
        ..SocketConfig::default()
    }
}

/// Receives the events of one source and applies them. Runs until the future is dropped.
pub async fn run(
    spec: SourceSpec,
    sink: RankSink,
    metrics: Arc<Metrics>,
    state: watch::Sender<SourceLink>,
    monitor: SourceMonitor,
) -> Infallible {
    let publisher = StatePublisher {
        rank: spec.rank,
        worker_name: spec.worker_name.clone(),
        monitor: monitor.clone(),
        state,
    };
    publisher.publish(SourceLink::Connecting);
    let config = socket_config(spec.max_message);
    let mut listener = SourceListener {
        applier: EventApplier::new(&spec, sink, metrics.clone(), monitor),
        replay: spec
            .source
            .replay
            .as_deref()
            .map(|endpoint| ReplayClient::new(endpoint, config)),
        publisher,
        config,
        metrics,
        source: spec.source,
        check: None,
        refused_at: None,
        is_connected: false,
        is_unanswered: false,
    };
    let mut backoff = JitteredBackoff::default();
    let mut outage = SourceOutage::default();
    loop {
        let attempt = Instant::now();
        let Err(error) = listener.run_session().await;
        let was_connected = std::mem::take(&mut listener.is_connected);
        listener.publisher.publish(SourceLink::Connecting);
        if attempt.elapsed() > JitteredBackoff::MAX {
            backoff = JitteredBackoff::default();
        }
        listener.log_outage(outage.record(was_connected, &error), &error);
        sleep(backoff.next_delay(rand::random())).await;
    }
}

/// Reason why a socket is closed and connected again.
#[derive(Debug, thiserror::Error)]
pub(super) enum DetachError {
    #[error(
        "the engine published events that did not arrive: the connection is dead, or the topic \
        {0:?} is wrong"
    )]
    MissedEvents(String),
    #[error("requests succeeded, but their events did not arrive")]
    ReconnectRequested,
    #[error("the socket is closed")]
    SocketClosed,
    #[error(transparent)]
    Socket(#[from] ZmtpError),
}

/// Publishes the connection state of the source.
struct StatePublisher {
    rank: WorkerRank,
    worker_name: String,
    monitor: SourceMonitor,
    state: watch::Sender<SourceLink>,
}

impl StatePublisher {
    fn publish(&self, state: SourceLink) {
        self.monitor.update(|source| source.set_link(state));
        let changed = self
            .state
            .send_if_modified(|known| std::mem::replace(known, state) != state);
        if changed {
            // The task of the source logs the resulting freshness.
            tracing::debug!(rank = %self.rank, name = self.worker_name, ?state, "KV event source state changed");
        }
    }
}

/// One source with the state that outlives a connection.
struct SourceListener {
    source: EventSource,
    config: SocketConfig,
    metrics: Arc<Metrics>,
    applier: EventApplier,
    replay: Option<ReplayClient>,
    publisher: StatePublisher,
    check: Option<ReplayCheck>,
    /// Time of the last log line about a refused connection.
    refused_at: Option<Instant>,
    /// Whether the session is or was connected to a publisher.
    is_connected: bool,
    /// Whether the engine has not answered the replay since the last connection. Batches may be
    /// missing.
    is_unanswered: bool,
}

impl SourceListener {
    fn log_outage(&self, report: OutageReport, error: &DetachError) {
        let StatePublisher {
            rank, worker_name, ..
        } = &self.publisher;
        let endpoint = &self.source.endpoint;
        match report {
            OutageReport::Lost => {
                tracing::warn!(%rank, name = worker_name, endpoint, %error, "KV event source lost")
            }
            OutageReport::Unreachable => {
                tracing::warn!(%rank, name = worker_name, endpoint, %error, "KV event source unreachable; trying again")
            }
            OutageReport::Repeated => {
                tracing::debug!(%rank, name = worker_name, endpoint, %error, "KV event source not connected")
            }
        }
    }

    /// Runs one socket until its connection is lost.
    async fn run_session(&mut self) -> Result<Infallible, DetachError> {
        let mut socket = open_socket(&self.source, self.config)
            .await
            .inspect_err(|error| self.count_connection_error(error))?;
        let mut publishers = HashSet::new();
        self.check = None;
        if self.source.attach == SocketAttach::Connect {
            self.is_connected = true;
            self.recover_missed().await;
        }
        let mut burst = 0;
        loop {
            match self.next_action(socket.next_event(), &mut burst).await {
                ListenerAction::Event(event) => {
                    self.handle_event(event.ok_or(DetachError::SocketClosed)?, &mut publishers)
                        .await?
                }
                ListenerAction::Check => self.check().await?,
                ListenerAction::ReconnectRequested => return Err(DetachError::ReconnectRequested),
                ListenerAction::Yielded => {}
            }
        }
    }

    /// Waits for the next action. Events come first, because a message makes a check unnecessary.
    /// After [`BURST`] events in succession, other actions and other tasks get a turn, because the
    /// socket may always have an event ready.
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
            () = self.publisher.monitor.reconnect_requested() => ListenerAction::ReconnectRequested,
            () = tokio::task::yield_now(), if is_full => ListenerAction::Yielded,
        };
        *burst = 0;
        action
    }

    /// Processes one event of the socket.
    async fn handle_event(
        &mut self,
        event: SubEvent,
        publishers: &mut HashSet<PublisherId>,
    ) -> Result<(), DetachError> {
        match event {
            SubEvent::Message(frames) => self.handle_message(&frames).await,
            SubEvent::Oversize(limit) => self
                .applier
                .update(|batches| batches.record_too_large(limit.as_str())),
            SubEvent::Connected { publisher, address } => {
                tracing::debug!(rank = %self.publisher.rank, name = self.publisher.worker_name, address, "KV event publisher connected");
                publishers.insert(publisher);
                self.is_connected = true;
                self.recover_missed().await;
            }
            SubEvent::Disconnected { publisher, error } => {
                self.count_connection_error(&error);
                if self.source.attach == SocketAttach::Connect {
                    return Err(error.into());
                }
                publishers.remove(&publisher);
                if publishers.is_empty() {
                    self.check = None;
                    self.is_connected = false;
                    self.publisher.publish(SourceLink::Connecting);
                    self.log_outage(OutageReport::Lost, &error.into());
                }
            }
            SubEvent::Refused { address, error } => {
                self.count_connection_error(&error);
                let is_first = self
                    .refused_at
                    .is_none_or(|at| at.elapsed() >= REFUSED_LOG_INTERVAL);
                if is_first {
                    self.refused_at = Some(Instant::now());
                    tracing::warn!(rank = %self.publisher.rank, name = self.publisher.worker_name, address, %error, "KV event publisher refused");
                }
            }
        }
        Ok(())
    }

    fn count_connection_error(&self, error: &ZmtpError) {
        self.metrics
            .kv_events
            .connection_errors
            .get_or_create(&ReasonLabel {
                reason: error.reason(),
            })
            .inc();
    }

    /// Replays the batches that were missed before a new connection. A pause in requests ends,
    /// because the engine accepted the connection.
    async fn recover_missed(&mut self) {
        self.replay.iter_mut().for_each(ReplayClient::end_pause);
        self.replay_missed().await;
    }

    /// Replays the batches that were missed before the connection. Records a loss if the engine
    /// answers, but does not have them.
    async fn replay_missed(&mut self) {
        let has_resumed = self.applier.finish_resume();
        let outcome = self.catch_up().await;
        let is_fresh = self.applier.sequencer().is_fresh();
        let was_unanswered = std::mem::take(&mut self.is_unanswered);
        match outcome {
            Some(Ok(())) => {}
            // The next batch number shows whether a batch is missing.
            None if has_resumed => {}
            // The index has no blocks of this rank that could be stale, and an engine without
            // history has nothing to replay.
            Some(Err(ReplayError::Empty)) | None if is_fresh => {}
            Some(Err(ReplayError::EndedBeforeTarget)) if !is_fresh => {
                self.is_unanswered = true;
                if !was_unanswered {
                    tracing::info!(rank = %self.publisher.rank, name = self.publisher.worker_name, "KV event replay unanswered; trying again");
                }
                self.check = Some(ReplayCheck::after_unanswered());
                return;
            }
            missed => self.record_missed(missed.and_then(Result::err)),
        }
        self.publisher.publish(SourceLink::Attached);
        self.check = self
            .replay
            .is_some()
            .then(|| ReplayCheck::AfterSubscribe(Instant::now() + SUBSCRIPTION_DELAY));
    }

    /// Records that batches before the connection may be missing.
    fn record_missed(&mut self, error: Option<ReplayError>) {
        let reason = error.map_or("no replay endpoint", ReplayError::as_str);
        tracing::warn!(rank = %self.publisher.rank, name = self.publisher.worker_name, reason, "KV events before the connection are unknown");
        if !self.applier.sequencer().is_fresh() {
            self.applier.update(BatchApplier::record_loss);
        }
    }

    /// Repeats the replay that the engine has not answered. The engine publishes, so it can answer
    /// now. If it does not, the missed batches are lost.
    async fn resolve_unanswered(&mut self) {
        self.recover_missed().await;
        if std::mem::take(&mut self.is_unanswered) {
            self.record_missed(Some(ReplayError::EndedBeforeTarget));
            self.publisher.publish(SourceLink::Attached);
        }
    }

    /// Replays the batches that the engine still holds. Returns `None` without a replay endpoint.
    async fn catch_up(&mut self) -> Option<Result<(), ReplayError>> {
        let engine = self.replay.as_mut()?;
        self.publisher.publish(SourceLink::Replaying);
        Some(replay::catch_up(engine, &mut self.applier).await)
    }

    /// Applies one live message.
    async fn handle_message(&mut self, frames: &[Bytes]) {
        let (seq, payload) = match parse_live_message(frames) {
            Ok(batch) => batch,
            Err(error) => {
                return self
                    .applier
                    .update(|batches| batches.record_malformed(error));
            }
        };
        if self.is_unanswered {
            self.resolve_unanswered().await;
        }
        if self.replay.is_some() {
            self.check = Some(ReplayCheck::Idle(Instant::now() + IDLE_CHECK_INTERVAL));
        }
        let further_frames = frames.len().saturating_sub(LIVE_FRAMES) as u64;
        let Some(gap) = self.applier.update(|batches| {
            batches.record_unknown_fields(further_frames);
            batches.apply_live(seq, payload)
        }) else {
            return;
        };
        tracing::info!(rank = %self.publisher.rank, name = self.publisher.worker_name, from = gap.from, to = gap.to, "KV event batches missing");
        if let Some(Err(reason)) = self.catch_up().await {
            tracing::warn!(rank = %self.publisher.rank, name = self.publisher.worker_name, reason = reason.as_str(), "KV event replay incomplete");
        }
        self.applier
            .update(|batches| batches.apply_after_replay(gap, payload));
        self.publisher.publish(SourceLink::Attached);
    }

    /// Queries the replay endpoint for batches that should have arrived.
    async fn check(&mut self) -> Result<(), DetachError> {
        if self.is_unanswered {
            self.replay_missed().await;
            return Ok(());
        }
        let (Some(engine), Some(check)) = (&mut self.replay, self.check) else {
            return Ok(());
        };
        let known = self.applier.sequencer().next_seq();
        let outcome = replay::catch_up(engine, &mut self.applier).await;
        self.check = Some(match outcome {
            Err(ReplayError::EndedBeforeTarget) => ReplayCheck::after_unanswered(),
            _ => ReplayCheck::Idle(Instant::now() + IDLE_CHECK_INTERVAL),
        });
        match check {
            ReplayCheck::Idle(_) if self.applier.sequencer().next_seq() != known => {
                Err(DetachError::MissedEvents(self.source.topic.clone()))
            }
            _ => Ok(()),
        }
    }
}

/// Number of known frames of a live message.
const LIVE_FRAMES: usize = 3;

/// Parses a live message: topic, number and payload. Newer engines may add frames. Returns the number
/// and the payload.
pub(super) fn parse_live_message(frames: &[Bytes]) -> Result<(u64, &Bytes), &'static str> {
    let [_topic, seq, payload, ..] = frames else {
        return Err("fewer than three frames");
    };
    let seq: [u8; 8] = seq
        .as_ref()
        .try_into()
        .map_err(|_| "batch number is not eight bytes")?;
    Ok((u64::from_be_bytes(seq), payload))
}

/// Opens a socket, connected or bound, and subscribes.
pub(super) async fn open_socket(
    source: &EventSource,
    config: SocketConfig,
) -> Result<SubSocket, ZmtpError> {
    let endpoint: ZmtpEndpoint = source.endpoint.parse()?;
    match source.attach {
        SocketAttach::Connect => SubSocket::connect(&endpoint, &source.topic, config).await,
        SocketAttach::Bind => SubSocket::bind(&endpoint, &source.topic, config).await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use bytes::Bytes;
    use warmroute_zmtp::ExceededLimit;
    use zeromq::{RouterSocket, Socket as _, SocketRecv as _, SocketSend as _};

    use super::*;
    use warmroute_core::freshness::{IndexFreshness, StaleReason};
    use warmroute_core::index::{ApplyOutcome, ReconcileReport};

    fn listener(replay: &str) -> SourceListener {
        let spec = SourceSpec {
            source: EventSource {
                endpoint: String::new(),
                topic: "topic".to_owned(),
                attach: SocketAttach::Connect,
                replay: Some(replay.to_owned()),
            },
            ..SourceSpec::for_test(2)
        };
        let has_lost = Arc::new(AtomicBool::new(false));
        let lost = has_lost.clone();
        let sink = RankSink {
            apply: Box::new(|_| ApplyOutcome::Ok),
            record_loss: Box::new(move || u32::from(!lost.swap(true, Ordering::Relaxed))),
            reconcile: Box::new(move || ReconcileReport {
                has_unreported: has_lost.load(Ordering::Relaxed),
                ..ReconcileReport::default()
            }),
            position: Default::default(),
        };
        let monitor = SourceMonitor::default();
        let metrics = Arc::new(Metrics::new());
        let (state, _) = watch::channel(SourceLink::default());
        SourceListener {
            applier: EventApplier::new(&spec, sink, metrics.clone(), monitor.clone()),
            replay: Some(ReplayClient::new(replay, SocketConfig::default())),
            config: SocketConfig::default(),
            metrics,
            publisher: StatePublisher {
                rank: spec.rank,
                worker_name: String::new(),
                monitor,
                state,
            },
            source: spec.source,
            check: None,
            refused_at: None,
            is_connected: false,
            is_unanswered: false,
        }
    }

    /// Sends a live batch without events to a listener.
    async fn deliver(listener: &mut SourceListener, seq: u64) {
        let batch = [b"topic".as_slice(), &seq.to_be_bytes(), &[0x92, 0x01, 0x90]];
        listener
            .handle_message(&batch.map(Bytes::copy_from_slice))
            .await;
    }

    /// Returns a listener that applied one batch and reconnected to an engine that hangs.
    async fn unanswered_listener() -> SourceListener {
        let mut listener = listener("tcp://127.0.0.1:1");
        deliver(&mut listener, 0).await;
        listener.recover_missed().await;
        assert_eq!(
            listener.publisher.monitor.status().reason,
            Some(StaleReason::Replaying)
        );
        listener
    }

    #[tokio::test]
    async fn replay_after_engine_hang_restores_exact_source() {
        let (endpoint, server) = engine().await;
        for is_publishing in [true, false] {
            let mut listener = unanswered_listener().await;
            listener.replay = Some(ReplayClient::new(&endpoint, SocketConfig::default()));
            if is_publishing {
                deliver(&mut listener, 1).await;
            } else {
                assert!(listener.check().await.is_ok());
            }
            assert_eq!(listener.applier.sequencer().next_seq(), 2);
            let status = listener.publisher.monitor.status();
            assert_eq!(status.freshness, IndexFreshness::Exact, "{is_publishing}");
        }
        server.abort();
    }

    #[tokio::test]
    async fn publishing_engine_without_replay_loses_missed_batches() {
        let mut listener = unanswered_listener().await;
        assert!(listener.check().await.is_ok());
        let status = listener.publisher.monitor.status();
        assert_eq!(status.reason, Some(StaleReason::Replaying), "still unknown");
        deliver(&mut listener, 1).await;
        let status = listener.publisher.monitor.status();
        assert_eq!(status.reason, Some(StaleReason::UnreportedBlocks));
    }

    #[tokio::test]
    async fn new_connection_ends_pause_of_replays() {
        let (endpoint, server) = engine().await;
        let mut listener = listener(&endpoint);
        listener.replay.as_mut().unwrap().back_off();
        deliver(&mut listener, 0).await;
        listener.recover_missed().await;
        assert_eq!(listener.applier.sequencer().next_seq(), 2);
        server.abort();
    }

    /// Starts an engine that holds two batches.
    async fn engine() -> (String, tokio::task::JoinHandle<()>) {
        let mut router = RouterSocket::new();
        let endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let server = tokio::spawn(async move {
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
        (endpoint, server)
    }

    #[tokio::test]
    async fn silent_connection_to_publishing_engine_is_reattached() {
        let (endpoint, server) = engine().await;
        let mut listener = listener(&endpoint);
        listener.check = Some(ReplayCheck::Idle(Instant::now()));
        assert!(matches!(
            listener.check().await,
            Err(DetachError::MissedEvents(_))
        ));
        assert_eq!(
            listener.applier.sequencer().next_seq(),
            2,
            "replayed batches are applied"
        );
        assert!(listener.check().await.is_ok(), "no new batches since then");
        server.abort();
    }

    #[tokio::test]
    async fn due_check_runs_while_events_are_always_ready() {
        let mut listener = listener("tcp://127.0.0.1:1");
        let event = || std::future::ready(Some(SubEvent::Oversize(ExceededLimit::Message)));
        let mut burst = 0;
        listener.check = Some(ReplayCheck::Idle(Instant::now()));
        let mut events = 0;
        while let ListenerAction::Event(_) = listener.next_action(event(), &mut burst).await {
            events += 1;
            assert!(events <= BURST, "the check does not run");
        }
        listener.check = None;
        listener.publisher.monitor.request_reconnect();
        let mut actions = Vec::new();
        while !matches!(actions.last(), Some(ListenerAction::ReconnectRequested)) {
            actions.push(listener.next_action(event(), &mut burst).await);
            assert!(actions.len() <= BURST + 1, "{actions:?}");
        }
    }

    #[tokio::test]
    async fn only_batches_postpone_the_check() {
        let mut listener = listener("tcp://127.0.0.1:1");
        let at = Instant::now();
        listener.check = Some(ReplayCheck::AfterSubscribe(at));
        listener
            .handle_message(&[
                Bytes::from_static(b"topic"),
                Bytes::from_static(b"no number"),
            ])
            .await;
        assert!(matches!(listener.check, Some(ReplayCheck::AfterSubscribe(still)) if still == at));
        deliver(&mut listener, 0).await;
        assert!(matches!(listener.check, Some(ReplayCheck::Idle(_))));
    }

    #[tokio::test]
    async fn further_frames_are_counted_and_skipped() {
        let mut listener = listener("tcp://127.0.0.1:1");
        let number = 0_u64.to_be_bytes();
        let batch = [b"topic".as_slice(), &number, &[0x92, 0x01, 0x90], b"new"];
        listener
            .handle_message(&batch.map(Bytes::copy_from_slice))
            .await;
        assert_eq!(listener.applier.sequencer().next_seq(), 1);
        assert_eq!(listener.metrics.kv_events.unknown_fields.get(), 1);
    }

    #[tokio::test]
    async fn batch_before_subscription_does_not_reattach() {
        let (endpoint, server) = engine().await;
        let mut listener = listener(&endpoint);
        listener.check = Some(ReplayCheck::AfterSubscribe(Instant::now()));
        assert!(listener.check().await.is_ok());
        assert_eq!(listener.applier.sequencer().next_seq(), 2);
        server.abort();
    }
}
