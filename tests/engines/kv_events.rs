//! The subscriber of KV events on real ZMQ sockets. The test engine follows vLLM's protocol: a PUB
//! socket for live batches, a ROUTER socket for the replay, and sequence numbers from zero after
//! every start.

mod freshness;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use warmroute_core::freshness::{IndexFreshness, SourceLink, StaleReason};
use warmroute_core::index::{KvEvent, PrefixIndex};
use warmroute_core::worker::{
    BlockSize, DpRank, EventSource, RankSlot, SocketAttach, WorkerId, WorkerRank,
};
use warmroute_engines::kv_events::{
    MediaTokens, RankSink, SharedResync, SourceMonitor, SourceSpec, run,
};
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_testbed::ports::FreePort;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const TOPIC: &str = "kv@engine";
/// Maximum message size of the subscriber.
const MAX_MESSAGE: usize = 1 << 20;

/// Waits until a condition holds, or panics after a timeout.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

fn message<const N: usize>(frames: [&[u8]; N]) -> ZmqMessage {
    frames
        .map(Bytes::copy_from_slice)
        .to_vec()
        .try_into()
        .unwrap()
}

fn payload(block: u64) -> Vec<u8> {
    rmp_serde::to_vec(&(
        1.5,
        [("BlockStored", [block], None::<u64>, [1, block], 2u32)],
        0,
    ))
    .unwrap()
}

/// Format of replay replies and of the reply that ends a replay.
#[derive(Clone, Copy)]
enum EventShape {
    /// `[empty, topic, seq, payload]`, ended by sequence number -1.
    WithTopic,
    /// `[empty, seq, payload]`, ended by an empty payload.
    Short,
}

type MessageLog = Arc<Mutex<Vec<Vec<u8>>>>;

/// One engine process. Dropping it closes its sockets.
struct EventEngine {
    publisher: PubSocket,
    log: MessageLog,
    _replay_task: Option<AbortOnDropHandle<()>>,
}

/// Binds a socket. Retries, because the port of the previous engine may still be in use.
async fn bind(socket: &mut impl Socket, endpoint: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match socket.bind(endpoint).await {
            Ok(endpoint) => return endpoint.to_string(),
            Err(error) => assert!(Instant::now() < deadline, "{endpoint}: {error}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

impl EventEngine {
    /// Starts an engine whose replay log contains batches that were never published live.
    async fn start(site: &EventSite, log: Vec<Vec<u8>>) -> Self {
        let log: MessageLog = Arc::new(Mutex::new(log));
        let mut replay_task = None;
        if let Some(endpoint) = &site.replay {
            let mut router = RouterSocket::new();
            bind(&mut router, endpoint).await;
            let serving = tokio::spawn(serve_replays(router, log.clone(), site.shape));
            replay_task = Some(AbortOnDropHandle::new(serving));
        }
        let mut publisher = PubSocket::new();
        match site.attach {
            SocketAttach::Connect => drop(bind(&mut publisher, &site.events).await),
            SocketAttach::Bind => publisher.connect(&site.events).await.unwrap(),
        }
        Self {
            publisher,
            log,
            _replay_task: replay_task,
        }
    }

    /// Adds a batch to the replay log without publishing it, as if the message had been lost.
    fn lose(&mut self, payload: Vec<u8>) -> u64 {
        let mut log = self.log.lock();
        log.push(payload);
        log.len() as u64 - 1
    }

    async fn publish(&mut self, payload: Vec<u8>) {
        let seq = self.lose(payload.clone()).to_be_bytes();
        self.publisher
            .send(message([TOPIC.as_bytes(), &seq, &payload]))
            .await
            .unwrap();
    }
}

async fn serve_replays(mut router: RouterSocket, log: MessageLog, shape: EventShape) {
    while let Ok(request) = router.recv().await {
        let [client, empty, from] = &request.into_vec()[..] else {
            panic!("not a replay request")
        };
        assert!(empty.is_empty());
        let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
        let held = log.lock().clone();
        for (seq, payload) in held.iter().enumerate().skip(from as usize) {
            let seq = (seq as u64).to_be_bytes();
            let reply = match shape {
                EventShape::WithTopic => message([client, b"", TOPIC.as_bytes(), &seq, payload]),
                EventShape::Short => message([client, b"", &seq, payload]),
            };
            if router.send(reply).await.is_err() {
                break;
            }
        }
        let end = match shape {
            EventShape::WithTopic => message([client, b"", b"", &(-1i64).to_be_bytes(), b""]),
            EventShape::Short => message([client, b"", b"", b""]),
        };
        let _ = router.send(end).await;
    }
}

/// Endpoints of an engine and its subscriber.
#[derive(Clone)]
struct EventSite {
    events: String,
    replay: Option<String>,
    attach: SocketAttach,
    shape: EventShape,
}

/// Returns a sink that records the events and applies them to a new index.
fn recording_sink(held: &Arc<Mutex<ReportedBlocks>>) -> RankSink {
    let index = PrefixIndex::new();
    let writer = Arc::new(Mutex::new(index.create_writer(RankSlot(0))));
    let targets = (writer.clone(), held.clone());
    let loss_targets = (writer.clone(), held.clone());
    let reconciled = writer;
    let reconcile_target = held.clone();
    RankSink {
        apply: Box::new(move |event| {
            targets.1.lock().apply(event);
            targets.0.lock().apply(event)
        }),
        record_loss: Box::new(move || {
            loss_targets.1.lock().losses += 1;
            loss_targets.0.lock().record_gap()
        }),
        reconcile: Box::new(move || {
            let reconciled = reconciled.lock().reconcile();
            for (name, _) in reconciled.purged.iter().flat_map(|purge| &purge.blocks) {
                reconcile_target.lock().blocks.remove(&name.0);
            }
            reconciled
        }),
        position: Default::default(),
    }
}

impl EventSite {
    /// Returns a site with free ports.
    fn new(attach: SocketAttach, replay: bool) -> Self {
        let free = || {
            let port = FreePort::find().unwrap().release();
            format!("tcp://127.0.0.1:{port}")
        };
        Self {
            events: free(),
            replay: replay.then(free),
            attach,
            shape: EventShape::WithTopic,
        }
    }

    fn subscribe(&self) -> EventSubscriber {
        let held = Arc::new(Mutex::new(ReportedBlocks::default()));
        let sink = recording_sink(&held);
        let spec = SourceSpec {
            engine: String::new(),
            worker_name: String::new(),
            rank: WorkerRank {
                worker: WorkerId(7),
                rank: DpRank(0),
            },
            source: EventSource {
                endpoint: self.events.clone(),
                topic: TOPIC.to_owned(),
                attach: self.attach,
                replay: self.replay.clone(),
            },
            block_size: BlockSize::new(2).unwrap(),
            media: MediaTokens::default(),
            resync: SharedResync::default(),
            max_message: MAX_MESSAGE,
        };
        let (sender, state) = watch::channel(SourceLink::default());
        let metrics = Arc::new(Metrics::new());
        let monitor = SourceMonitor::default();
        let subscription = run(spec, sink, metrics.clone(), sender, monitor.clone());
        let task = tokio::spawn(async move {
            let _ = subscription.await;
        });
        EventSubscriber {
            held,
            metrics,
            state,
            monitor,
            _task: AbortOnDropHandle::new(task),
        }
    }
}

#[derive(Default)]
struct ReportedBlocks {
    blocks: HashSet<u64>,
    losses: usize,
    clears: usize,
}

impl ReportedBlocks {
    fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { blocks, .. } => {
                for block in blocks {
                    self.blocks.insert(block.engine.0);
                }
            }
            KvEvent::Removed { blocks, .. } => {
                for block in blocks {
                    self.blocks.remove(&block.0);
                }
            }
            KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => {}
            KvEvent::Cleared => {
                self.blocks.clear();
                self.clears += 1;
            }
        }
    }
}

struct EventSubscriber {
    held: Arc<Mutex<ReportedBlocks>>,
    metrics: Arc<Metrics>,
    state: watch::Receiver<SourceLink>,
    monitor: SourceMonitor,
    _task: AbortOnDropHandle<()>,
}

impl EventSubscriber {
    async fn wait_state(&self, state: SourceLink) {
        until(&format!("{state:?}"), || *self.state.borrow() == state).await;
    }

    async fn expect_freshness(&self, freshness: IndexFreshness, reason: Option<StaleReason>) {
        let condition = || {
            let status = self.monitor.status();
            (status.freshness, status.reason) == (freshness, reason)
        };
        until(&format!("{freshness:?} because {reason:?}"), condition).await;
    }

    async fn wait_blocks(&self, blocks: impl IntoIterator<Item = u64>) {
        let blocks: HashSet<u64> = blocks.into_iter().collect();
        until(&format!("holds {blocks:?}"), || {
            self.held.lock().blocks == blocks
        })
        .await;
    }

    fn gaps(&self, outcome: &'static str) -> u64 {
        self.metrics
            .kv_events
            .gaps
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    }

    /// Publishes block 0 until the subscription has taken effect, and then the given blocks.
    async fn expect_blocks(&self, engine: &mut EventEngine, blocks: impl IntoIterator<Item = u64>) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.held.lock().blocks.contains(&0) {
            assert!(Instant::now() < deadline, "no batch arrives");
            engine.publish(payload(0)).await;
            sleep(Duration::from_millis(20)).await;
        }
        for block in blocks {
            engine.publish(payload(block)).await;
        }
    }
}

fn log(blocks: impl IntoIterator<Item = u64>) -> Vec<Vec<u8>> {
    blocks.into_iter().map(payload).collect()
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn warm_idle_engine_is_replayed_on_attach() {
    for shape in [EventShape::WithTopic, EventShape::Short] {
        let site = EventSite {
            shape,
            ..EventSite::new(SocketAttach::Connect, true)
        };
        let _engine = EventEngine::start(&site, log(1..=40)).await;
        let subscriber = site.subscribe();
        subscriber.wait_blocks(1..=40).await;
        subscriber.wait_state(SourceLink::Attached).await;
        assert_eq!(subscriber.held.lock().losses, 0);
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn warm_engine_without_replay_starts_at_next_event() {
    let site = EventSite::new(SocketAttach::Connect, false);
    let mut engine = EventEngine::start(&site, log(1..=40)).await;
    let subscriber = site.subscribe();
    subscriber.wait_state(SourceLink::Attached).await;
    subscriber.expect_blocks(&mut engine, [50, 51]).await;
    subscriber.wait_blocks([0, 50, 51]).await;
    assert_eq!(
        (subscriber.gaps("lost"), subscriber.held.lock().losses),
        (1, 1),
        "batches before the subscription are lost"
    );
    assert_eq!(subscriber.held.lock().clears, 0);
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn gap_is_replayed() {
    for attach in [SocketAttach::Connect, SocketAttach::Bind] {
        let site = EventSite::new(attach, true);
        let subscriber = site.subscribe();
        if attach == SocketAttach::Bind {
            subscriber.wait_state(SourceLink::Connecting).await;
        }
        let mut engine = EventEngine::start(&site, vec![]).await;
        subscriber.wait_state(SourceLink::Attached).await;
        subscriber.expect_blocks(&mut engine, [1, 2]).await;
        subscriber.wait_blocks(0..=2).await;
        engine.lose(payload(3));
        engine.lose(payload(4));
        engine.publish(payload(5)).await;
        subscriber.wait_blocks(0..=5).await;
        assert!(subscriber.gaps("replayed") >= 1);
        assert_eq!(
            (subscriber.gaps("lost"), subscriber.held.lock().losses),
            (0, 0)
        );
        assert_eq!(subscriber.held.lock().clears, 0);
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn engine_restart_on_same_port_is_detected() {
    for attach in [SocketAttach::Connect, SocketAttach::Bind] {
        // The restarted engine has published nothing, or fewer batches than the old one, or already
        // more.
        for ahead in [0, 2, 50] {
            let site = EventSite::new(attach, true);
            let subscriber = site.subscribe();
            let mut engine = EventEngine::start(&site, log(100..110)).await;
            subscriber.wait_blocks(100..110).await;
            subscriber.wait_state(SourceLink::Attached).await;
            subscriber.expect_blocks(&mut engine, [1]).await;
            subscriber.wait_blocks((100..110).chain([0, 1])).await;
            drop(engine);
            subscriber.wait_state(SourceLink::Connecting).await;
            let mut engine = EventEngine::start(&site, log(200..200 + ahead)).await;
            subscriber.wait_blocks(200..200 + ahead).await;
            subscriber.wait_state(SourceLink::Attached).await;
            subscriber.expect_blocks(&mut engine, [300]).await;
            subscriber
                .wait_blocks((200..200 + ahead).chain([0, 300]))
                .await;
            assert_eq!(subscriber.held.lock().clears, 1, "{attach:?} {ahead}");
            assert_eq!(subscriber.metrics.kv_events.engine_restarts.get(), 1);
            assert_eq!(subscriber.held.lock().losses, 0);
        }
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn decreasing_numbers_without_replay_are_restart() {
    let site = EventSite::new(SocketAttach::Connect, false);
    let subscriber = site.subscribe();
    let mut engine = EventEngine::start(&site, vec![]).await;
    subscriber.wait_state(SourceLink::Attached).await;
    subscriber.expect_blocks(&mut engine, 1..=200).await;
    subscriber.wait_blocks(0..=200).await;
    drop(engine);
    subscriber.wait_state(SourceLink::Connecting).await;
    let mut engine = EventEngine::start(&site, vec![]).await;
    subscriber.wait_state(SourceLink::Attached).await;
    let deadline = Instant::now() + Duration::from_secs(10);
    while subscriber.held.lock().clears == 0 {
        assert!(Instant::now() < deadline, "no restart was noticed");
        engine.publish(payload(500)).await;
        sleep(Duration::from_millis(20)).await;
    }
    subscriber.wait_blocks([500]).await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn unix_socket_source_survives_publisher_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("ipc://{}", directory.path().join(name).display());
    // A stale socket file exists where the subscriber has to bind.
    drop(std::os::unix::net::UnixListener::bind(directory.path().join("bound")).unwrap());
    for (attach, name) in [
        (SocketAttach::Connect, "connected"),
        (SocketAttach::Bind, "bound"),
    ] {
        let replay = EventSite::new(attach, true).replay;
        let site = EventSite {
            events: path(name),
            replay,
            attach,
            shape: EventShape::WithTopic,
        };
        let subscriber = site.subscribe();
        let mut engine = EventEngine::start(&site, log([10])).await;
        subscriber.wait_state(SourceLink::Attached).await;
        subscriber.expect_blocks(&mut engine, [1]).await;
        subscriber.wait_blocks([10, 0, 1]).await;
        drop(engine);
        let _ = std::fs::remove_file(directory.path().join("connected"));
        subscriber.wait_state(SourceLink::Connecting).await;
        let _engine = EventEngine::start(&site, log([20])).await;
        subscriber.wait_blocks([20]).await;
    }
}
