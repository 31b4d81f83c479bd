//! The subscriber on real ZMQ sockets against an engine that speaks like the captured one: PUB for live batches, ROUTER for
//! the replay, numbers from zero in every life.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use warmroute::index::{KvEvent, PrefixIndex};
use warmroute::kv_events::{
    MediaTokens, RankSink, SharedResync, SourceSpec, SourceState, Witness, run,
};
use warmroute::metrics::{Metrics, OutcomeLabel, ReasonLabel};
use warmroute::trust::{Because, Resync, Trust};
use warmroute::worker::{Attach, BlockSize, DpRank, EventSource, Slot, WorkerId, WorkerRank};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const TOPIC: &str = "kv@engine";
/// Largest message that the subscriber receives.
const MAX_MESSAGE: usize = 1 << 20;

/// Asks until it is so.
async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !so() {
        assert!(Instant::now() < deadline, "never {what}");
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

fn removal(blocks: &[u64]) -> Vec<u8> {
    rmp_serde::to_vec(&(1.5, [("BlockRemoved", blocks)], 0)).unwrap()
}

/// How replies and their end look.
#[derive(Clone, Copy)]
enum Shape {
    /// `[empty, topic, seq, payload]`, ended by number -1.
    WithTopic,
    /// `[empty, seq, payload]`, ended by an empty payload.
    Short,
}

type Log = Arc<Mutex<Vec<Vec<u8>>>>;

/// One life of an engine; dropping it closes its sockets.
struct Engine {
    publisher: PubSocket,
    log: Log,
    replays: Option<JoinHandle<()>>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(replays) = &self.replays {
            replays.abort();
        }
    }
}

/// Binds again and again, as the port of a life that has just ended may still be in use.
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

impl Engine {
    /// Starts with a log that nobody heard live.
    async fn start(site: &Site, log: Vec<Vec<u8>>) -> Self {
        let log: Log = Arc::new(Mutex::new(log));
        let mut replays = None;
        if let Some(endpoint) = &site.replay {
            let mut router = RouterSocket::new();
            bind(&mut router, endpoint).await;
            replays = Some(tokio::spawn(repeat(router, log.clone(), site.shape)));
        }
        let mut publisher = PubSocket::new();
        match site.attach {
            Attach::Connect => drop(bind(&mut publisher, &site.events).await),
            Attach::Bind => publisher.connect(&site.events).await.unwrap(),
        }
        Self {
            publisher,
            log,
            replays,
        }
    }

    /// Numbers a batch and holds it without sending it: a message lost on its way.
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

async fn repeat(mut router: RouterSocket, log: Log, shape: Shape) {
    while let Ok(request) = router.recv().await {
        let [client, empty, from] = &request.into_vec()[..] else {
            panic!("not a request")
        };
        assert!(empty.is_empty());
        let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
        let held = log.lock().clone();
        for (seq, payload) in held.iter().enumerate().skip(from as usize) {
            let seq = (seq as u64).to_be_bytes();
            let reply = match shape {
                Shape::WithTopic => message([client, b"", TOPIC.as_bytes(), &seq, payload]),
                Shape::Short => message([client, b"", &seq, payload]),
            };
            if router.send(reply).await.is_err() {
                break;
            }
        }
        let end = match shape {
            Shape::WithTopic => message([client, b"", b"", &(-1i64).to_be_bytes(), b""]),
            Shape::Short => message([client, b"", b"", b""]),
        };
        let _ = router.send(end).await;
    }
}

/// Where an engine and its subscriber meet.
#[derive(Clone)]
struct Site {
    events: String,
    replay: Option<String>,
    attach: Attach,
    shape: Shape,
}

impl Site {
    /// A site on free ports.
    fn new(attach: Attach, replay: bool) -> Self {
        let free = || {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            format!("tcp://{}", listener.local_addr().unwrap())
        };
        Self {
            events: free(),
            replay: replay.then(free),
            attach,
            shape: Shape::WithTopic,
        }
    }

    fn subscribe(&self) -> Subscriber {
        self.subscribe_with(Resync::Keep)
    }

    fn subscribe_with(&self, resync: Resync) -> Subscriber {
        let held = Arc::new(Mutex::new(Held::default()));
        let index = PrefixIndex::new();
        let writer = Arc::new(Mutex::new(index.join(Slot(0))));
        let (told, doubted, settled) = (
            (writer.clone(), held.clone()),
            (writer.clone(), held.clone()),
            writer,
        );
        let settled_of = held.clone();
        let sink = RankSink {
            apply: Box::new(move |event| {
                told.1.lock().apply(event);
                told.0.lock().apply(event)
            }),
            doubt: Box::new(move || {
                doubted.1.lock().doubts += 1;
                doubted.0.lock().doubt()
            }),
            settle: Box::new(move || {
                let settled = settled.lock().settle();
                for (name, _) in settled
                    .forgotten
                    .iter()
                    .flat_map(|forgotten| &forgotten.names)
                {
                    settled_of.lock().blocks.remove(&name.0);
                }
                settled
            }),
            position: Default::default(),
        };
        let shared = SharedResync::default();
        shared.set(resync);
        let spec = SourceSpec {
            engine: String::new(),
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
            resync: shared,
            max_message: MAX_MESSAGE,
        };
        let (sender, state) = watch::channel(SourceState::default());
        let metrics = Arc::new(Metrics::new());
        let witness = Witness::default();
        let listening = run(spec, sink, metrics.clone(), (sender, witness.clone()));
        let task = tokio::spawn(async move {
            let _ = listening.await;
        });
        Subscriber {
            held,
            metrics,
            state,
            witness,
            task,
        }
    }
}

#[derive(Default)]
struct Held {
    blocks: HashSet<u64>,
    doubts: usize,
    clears: usize,
}

impl Held {
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

struct Subscriber {
    held: Arc<Mutex<Held>>,
    metrics: Arc<Metrics>,
    state: watch::Receiver<SourceState>,
    witness: Witness,
    task: JoinHandle<()>,
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Subscriber {
    async fn is(&self, state: SourceState) {
        until(&format!("{state:?}"), || *self.state.borrow() == state).await;
    }

    async fn stands(&self, trust: Trust, because: Option<Because>) {
        let so = || {
            let standing = self.witness.standing();
            (standing.trust, standing.because) == (trust, because)
        };
        until(&format!("{trust:?} because {because:?}"), so).await;
    }

    async fn holds(&self, blocks: impl IntoIterator<Item = u64>) {
        let blocks: HashSet<u64> = blocks.into_iter().collect();
        until(&format!("holds {blocks:?}"), || {
            self.held.lock().blocks == blocks
        })
        .await;
    }

    fn gaps(&self, outcome: &'static str) -> u64 {
        self.metrics
            .kv_event_gaps
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    }

    fn batches(&self, outcome: &'static str) -> u64 {
        self.metrics
            .kv_event_batches
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    }

    fn too_large(&self, limit: &'static str) -> u64 {
        self.metrics
            .kv_event_batches_too_large
            .get_or_create(&ReasonLabel { reason: limit })
            .get()
    }

    fn connection_errors(&self, reason: &'static str) -> u64 {
        self.metrics
            .kv_event_connection_errors
            .get_or_create(&ReasonLabel { reason })
            .get()
    }

    /// Publishes until the subscription has taken effect, and then what is asked for.
    async fn hears(&self, engine: &mut Engine, blocks: impl IntoIterator<Item = u64>) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.held.lock().blocks.contains(&0) {
            assert!(Instant::now() < deadline, "nothing arrives");
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
async fn a_warm_idle_engine_is_known_before_its_next_event() {
    for shape in [Shape::WithTopic, Shape::Short] {
        let site = Site {
            shape,
            ..Site::new(Attach::Connect, true)
        };
        let _engine = Engine::start(&site, log(1..=40)).await;
        let subscriber = site.subscribe();
        subscriber.holds(1..=40).await;
        subscriber.is(SourceState::Live).await;
        assert_eq!(subscriber.held.lock().doubts, 0);
    }
}

#[tokio::test]
async fn malformed_messages_do_not_delay_attach_check() {
    let site = Site::new(Attach::Connect, true);
    let mut engine = Engine::start(&site, log([1])).await;
    let subscriber = site.subscribe();
    subscriber.holds([1]).await;
    engine.lose(payload(2));
    let deadline = Instant::now() + Duration::from_secs(10);
    while !subscriber.held.lock().blocks.contains(&2) {
        assert!(Instant::now() < deadline, "the lost batch is not found");
        engine
            .publisher
            .send(message([TOPIC.as_bytes(), b"no number"]))
            .await
            .unwrap();
        sleep(Duration::from_millis(5)).await;
    }
    assert!(subscriber.batches("malformed_frames") > 0);
}

#[tokio::test]
async fn without_a_replay_endpoint_a_warm_engine_is_known_from_its_next_event_on() {
    let site = Site::new(Attach::Connect, false);
    let mut engine = Engine::start(&site, log(1..=40)).await;
    let subscriber = site.subscribe();
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, [50, 51]).await;
    subscriber.holds([0, 50, 51]).await;
    assert_eq!(
        (subscriber.gaps("lost"), subscriber.held.lock().doubts),
        (1, 1),
        "what came before is not known"
    );
    assert_eq!(subscriber.held.lock().clears, 0);
}

#[tokio::test]
async fn a_publisher_that_appears_late_is_heard_from_its_first_batch() {
    for (attach, replay) in [
        (Attach::Connect, true),
        (Attach::Connect, false),
        (Attach::Bind, true),
        (Attach::Bind, false),
    ] {
        let site = Site::new(attach, replay);
        let subscriber = site.subscribe();
        subscriber.is(SourceState::Connecting).await;
        let mut engine = Engine::start(&site, vec![]).await;
        subscriber.is(SourceState::Live).await;
        subscriber.hears(&mut engine, [1, 2]).await;
        subscriber.holds(0..=2).await;
        assert_eq!(
            subscriber.held.lock().doubts,
            0,
            "{attach:?}, replay {replay}"
        );
    }
}

#[tokio::test]
async fn a_gap_is_replayed() {
    for attach in [Attach::Connect, Attach::Bind] {
        let site = Site::new(attach, true);
        let subscriber = site.subscribe();
        if attach == Attach::Bind {
            subscriber.is(SourceState::Connecting).await;
        }
        let mut engine = Engine::start(&site, vec![]).await;
        subscriber.is(SourceState::Live).await;
        subscriber.hears(&mut engine, [1, 2]).await;
        subscriber.holds(0..=2).await;
        engine.lose(payload(3));
        engine.lose(payload(4));
        engine.publish(payload(5)).await;
        subscriber.holds(0..=5).await;
        assert!(subscriber.gaps("replayed") >= 1);
        assert_eq!(
            (subscriber.gaps("lost"), subscriber.held.lock().doubts),
            (0, 0)
        );
        assert_eq!(subscriber.held.lock().clears, 0);
    }
}

#[tokio::test]
async fn without_a_replay_endpoint_a_gap_is_doubted_and_life_goes_on() {
    for attach in [Attach::Connect, Attach::Bind] {
        let site = Site::new(attach, false);
        let subscriber = site.subscribe();
        let mut engine = Engine::start(&site, vec![]).await;
        subscriber.is(SourceState::Live).await;
        subscriber.hears(&mut engine, [1, 2]).await;
        subscriber.holds(0..=2).await;
        let doubts = subscriber.held.lock().doubts;
        engine.lose(payload(3));
        engine.publish(payload(4)).await;
        engine.publish(payload(5)).await;
        subscriber.holds([0, 1, 2, 4, 5]).await;
        assert!(subscriber.gaps("lost") >= 1);
        assert_eq!(subscriber.held.lock().doubts, doubts + 1);
    }
}

#[tokio::test]
async fn an_engine_back_on_its_port_is_a_new_one_however_far_it_has_come() {
    for attach in [Attach::Connect, Attach::Bind] {
        // The new life has not begun to publish, is behind the old one, or has overtaken it unheard.
        for ahead in [0, 2, 50] {
            let site = Site::new(attach, true);
            let subscriber = site.subscribe();
            let mut engine = Engine::start(&site, log(100..110)).await;
            subscriber.holds(100..110).await;
            subscriber.is(SourceState::Live).await;
            subscriber.hears(&mut engine, [1]).await;
            subscriber.holds((100..110).chain([0, 1])).await;
            drop(engine);
            subscriber.is(SourceState::Connecting).await;
            let mut engine = Engine::start(&site, log(200..200 + ahead)).await;
            subscriber.holds(200..200 + ahead).await;
            subscriber.is(SourceState::Live).await;
            subscriber.hears(&mut engine, [300]).await;
            subscriber.holds((200..200 + ahead).chain([0, 300])).await;
            assert_eq!(subscriber.held.lock().clears, 1, "{attach:?} {ahead}");
            assert_eq!(subscriber.metrics.kv_event_restarts.get(), 1);
            assert_eq!(subscriber.held.lock().doubts, 0);
        }
    }
}

#[tokio::test]
async fn without_a_replay_endpoint_numbers_that_go_back_are_a_restart() {
    let site = Site::new(Attach::Connect, false);
    let subscriber = site.subscribe();
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, 1..=200).await;
    subscriber.holds(0..=200).await;
    drop(engine);
    subscriber.is(SourceState::Connecting).await;
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.is(SourceState::Live).await;
    let deadline = Instant::now() + Duration::from_secs(10);
    while subscriber.held.lock().clears == 0 {
        assert!(Instant::now() < deadline, "no restart was noticed");
        engine.publish(payload(500)).await;
        sleep(Duration::from_millis(20)).await;
    }
    subscriber.holds([500]).await;
}

#[tokio::test]
async fn a_source_over_a_unix_socket_survives_its_publisher_and_stale_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("ipc://{}", folder.path().join(name).display());
    // A socket file that nobody listens on any more, where the subscriber has to bind.
    drop(std::os::unix::net::UnixListener::bind(folder.path().join("bound")).unwrap());
    for (attach, name) in [(Attach::Connect, "connected"), (Attach::Bind, "bound")] {
        let replay = Site::new(attach, true).replay;
        let site = Site {
            events: path(name),
            replay,
            attach,
            shape: Shape::WithTopic,
        };
        let subscriber = site.subscribe();
        let mut engine = Engine::start(&site, log([10])).await;
        subscriber.is(SourceState::Live).await;
        subscriber.hears(&mut engine, [1]).await;
        subscriber.holds([10, 0, 1]).await;
        drop(engine);
        let _ = std::fs::remove_file(folder.path().join("connected"));
        subscriber.is(SourceState::Connecting).await;
        let _engine = Engine::start(&site, log([20])).await;
        subscriber.holds([20]).await;
    }
}

#[tokio::test]
async fn an_unreadable_batch_is_asked_for_again_and_then_given_up() {
    let site = Site::new(Attach::Connect, true);
    let subscriber = site.subscribe();
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, [1]).await;
    subscriber.holds([0, 1]).await;
    engine.publish(vec![0xc1]).await;
    engine.publish(payload(2)).await;
    engine.publish(payload(3)).await;
    subscriber.holds(0..=3).await;
    assert_eq!(subscriber.batches("undecodable"), 2);
    assert_eq!(subscriber.held.lock().doubts, 1);
}

/// A batch that exceeds a limit, by a message too long to be received and by too many extra keys.
fn too_large_payloads() -> [(&'static str, Vec<u8>); 2] {
    let keys = rmp_serde::to_vec(&vec![(); 100_000]).unwrap();
    let head = [
        &b"\x93\x01\x91\x99\xabBlockStored\x91\x09\xc0\x91\x01\x02\xc0\xc0\xc0"[..],
        &keys,
        b"\x00",
    ]
    .concat();
    [("message", vec![0; MAX_MESSAGE + 1]), ("extra_keys", head)]
}

#[tokio::test]
async fn too_large_batch_without_replay_is_counted_lost() {
    for (limit, too_large) in too_large_payloads() {
        let site = Site::new(Attach::Connect, false);
        let subscriber = site.subscribe();
        let mut engine = Engine::start(&site, vec![]).await;
        subscriber.is(SourceState::Live).await;
        subscriber.hears(&mut engine, [1]).await;
        subscriber.holds([0, 1]).await;
        let lost = subscriber.gaps("lost");
        let doubts = subscriber.held.lock().doubts;
        engine.publish(too_large).await;
        subscriber
            .stands(Trust::Stale, Some(Because::Undecodable))
            .await;
        assert_eq!(subscriber.too_large(limit), 1);
        engine.publish(payload(2)).await;
        subscriber.holds(0..=2).await;
        assert_eq!(
            subscriber.gaps("lost"),
            lost + 1,
            "{limit}: the watermark does not pass the batch as applied"
        );
        assert_eq!(subscriber.held.lock().doubts, doubts + 1, "{limit}");
        subscriber
            .stands(Trust::Stale, Some(Because::LostBatches))
            .await;
    }
}

#[tokio::test]
async fn replay_continues_behind_a_too_large_batch() {
    for (limit, too_large) in too_large_payloads() {
        let site = Site::new(Attach::Connect, true);
        let log = vec![payload(0), payload(1), too_large, payload(3), payload(4)];
        let mut engine = Engine::start(&site, log).await;
        let subscriber = site.subscribe();
        subscriber.holds([0, 1, 3, 4]).await;
        subscriber.is(SourceState::Live).await;
        assert!(subscriber.too_large(limit) >= 1, "{limit}");
        assert!(
            subscriber.held.lock().doubts >= 1,
            "{limit}: the batch is lost"
        );
        engine.publish(payload(5)).await;
        subscriber.holds([0, 1, 3, 4, 5]).await;
    }
}

/// Nine bytes from an event publisher aborted the process: the length of a frame that cannot be allocated.
#[tokio::test]
async fn announced_frame_length_does_not_abort_the_process() {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    let hostile = [&greeting[..], &[2], &(1_u64 << 62).to_be_bytes()].concat();

    let site = Site::new(Attach::Bind, false);
    let subscriber = site.subscribe();
    let address = site.events.replace("tcp://", "");
    let mut peer = loop {
        if let Ok(peer) = TcpStream::connect(&address).await {
            break peer;
        }
        sleep(Duration::from_millis(10)).await;
    };
    peer.write_all(&hostile).await.unwrap();
    until("the publisher is refused", || {
        subscriber.connection_errors("protocol") == 1
    })
    .await;
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, [1]).await;
    subscriber.holds([0, 1]).await;

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let events = format!("tcp://{}", listener.local_addr().unwrap());
    let site = Site {
        events,
        replay: None,
        attach: Attach::Connect,
        shape: Shape::Short,
    };
    let subscriber = site.subscribe();
    let (mut peer, _) = listener.accept().await.unwrap();
    peer.write_all(&hostile).await.unwrap();
    until("the connection is closed", || {
        subscriber.connection_errors("protocol") == 1
    })
    .await;
}

#[tokio::test]
async fn messages_of_another_shape_are_counted_and_skipped() {
    let site = Site::new(Attach::Connect, true);
    let subscriber = site.subscribe();
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, []).await;
    let topic = TOPIC.as_bytes();
    for strange in [
        message([topic]),
        message([topic, b"short", b"x"]),
        message([topic, &[0; 8], b"x", b"y"]),
    ] {
        engine.publisher.send(strange).await.unwrap();
    }
    engine.publish(payload(1)).await;
    subscriber.holds([0, 1]).await;
    assert_eq!(subscriber.batches("malformed_frames"), 3);
}

#[tokio::test]
async fn batches_of_another_rank_are_dropped() {
    let site = Site::new(Attach::Connect, true);
    let other = rmp_serde::to_vec(&(
        1.5,
        [("BlockStored", [9u64], None::<u64>, [1u32, 2], 2u32)],
        1,
    ))
    .unwrap();
    let _engine = Engine::start(&site, vec![payload(1), other, payload(2)]).await;
    let subscriber = site.subscribe();
    subscriber.holds([1, 2]).await;
    assert!(subscriber.batches("other_rank") >= 1);
}

#[tokio::test]
async fn a_silent_replay_endpoint_does_not_keep_the_live_feed_away() {
    let site = Site::new(Attach::Connect, true);
    let mute = Site {
        replay: None,
        ..site.clone()
    };
    // Nobody answers at the replay endpoint.
    let mut engine = Engine::start(&mute, vec![]).await;
    let subscriber = site.subscribe();
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, [1]).await;
    engine.lose(payload(2));
    engine.publish(payload(3)).await;
    subscriber.holds([0, 1, 3]).await;
    assert!(subscriber.gaps("lost") >= 1);
    assert!(subscriber.held.lock().doubts >= 1);
}

#[tokio::test]
async fn a_replay_endpoint_that_is_not_there_does_not_keep_the_live_feed_away() {
    let heard = Site::new(Attach::Connect, false);
    // As it is where the engine was started without the endpoint that the configuration names.
    let site = Site {
        replay: Site::new(Attach::Connect, true).replay,
        ..heard.clone()
    };
    let mut engine = Engine::start(&heard, vec![]).await;
    let subscriber = site.subscribe();
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, []).await;
    let began = Instant::now();
    let lost = subscriber.gaps("lost");
    for block in 1..=5 {
        engine.lose(payload(100 + block));
        engine.publish(payload(block)).await;
    }
    subscriber.holds(0..=5).await;
    assert_eq!(subscriber.gaps("lost"), lost + 5);
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "each gap waited for a connection: {:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn trust_follows_the_source() {
    let site = Site::new(Attach::Connect, false);
    let subscriber = site.subscribe();
    subscriber
        .stands(Trust::CatchingUp, Some(Because::Connecting))
        .await;
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.stands(Trust::Exact, None).await;
    subscriber.hears(&mut engine, [1]).await;
    let facts = || subscriber.witness.source().lock().facts();
    until("the last batch is told of", || {
        facts().last_number == Some(engine.log.lock().len() as u64 - 1)
    })
    .await;
    // The engine of this test writes 1.5 seconds after 1970.
    assert!(
        facts().lag_seconds.is_some_and(|lag| lag > 1e9) && !facts().clock_skew,
        "{:?}",
        facts()
    );
    engine.publish(b"nonsense".to_vec()).await;
    subscriber
        .stands(Trust::Stale, Some(Because::Undecodable))
        .await;
    assert_eq!(facts().undecodable, 1);
    drop(engine);
    subscriber
        .stands(Trust::Stale, Some(Because::Detached))
        .await;
}

#[tokio::test]
async fn lost_batches_are_doubts_until_all_is_told_again_or_as_much_was_evicted_that_came_since() {
    let site = Site::new(Attach::Connect, false);
    let mut engine = Engine::start(&site, vec![]).await;
    let subscriber = site.subscribe();
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, [1]).await;
    subscriber.holds([0, 1]).await;
    engine.lose(payload(50));
    engine.lose(payload(51));
    engine.publish(payload(2)).await;
    subscriber
        .stands(Trust::Stale, Some(Because::LostBatches))
        .await;
    let facts = || subscriber.witness.source().lock().facts();
    assert_eq!(facts().doubted_blocks, 2);
    // Batches 0 of the engine may have been lost before the subscription, too.
    assert!(
        facts().lost_batches >= 2 && facts().gaps >= 1,
        "{:?}",
        facts()
    );
    engine.publish(payload(0)).await;
    engine.publish(payload(1)).await;
    subscriber
        .stands(Trust::Incomplete, Some(Because::UntoldBlocks))
        .await;
    subscriber.holds([0, 1, 2]).await;

    engine.lose(payload(52));
    engine.publish(payload(3)).await;
    subscriber
        .stands(Trust::Stale, Some(Because::LostBatches))
        .await;
    for block in 4..12 {
        engine.publish(payload(block)).await;
    }
    subscriber.holds(0..12).await;
    assert_eq!(
        facts().doubted_blocks,
        3,
        "however much is stored, the cache may have room for it"
    );
    engine.publish(removal(&[3, 4, 5])).await;
    subscriber.holds(6..12).await;
    // What was there before the gap was never told of, and may be in use still.
    subscriber
        .stands(Trust::Incomplete, Some(Because::UntoldBlocks))
        .await;
    engine.publish(removal(&[6, 7, 8])).await;
    subscriber.stands(Trust::Exact, None).await;
    subscriber.holds(9..12).await;
}

#[tokio::test]
async fn where_that_is_wanted_lost_batches_clear_the_rank() {
    let site = Site::new(Attach::Connect, false);
    let mut engine = Engine::start(&site, vec![]).await;
    let subscriber = site.subscribe_with(Resync::Clear);
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, [1]).await;
    subscriber.holds([0, 1]).await;
    engine.lose(payload(50));
    engine.publish(payload(2)).await;
    subscriber.holds([2]).await;
    subscriber
        .stands(Trust::Incomplete, Some(Because::UntoldBlocks))
        .await;
    assert_eq!(subscriber.witness.source().lock().facts().doubted_blocks, 0);
}

#[tokio::test]
async fn a_burst_is_applied_whole_and_in_order() {
    let site = Site::new(Attach::Connect, true);
    let subscriber = site.subscribe();
    let mut engine = Engine::start(&site, vec![]).await;
    subscriber.is(SourceState::Live).await;
    subscriber.hears(&mut engine, 1..=5000).await;
    subscriber.holds(0..=5000).await;
    assert_eq!(subscriber.held.lock().doubts, 0);
}
