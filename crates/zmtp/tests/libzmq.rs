//! Interoperability with real libzmq peers: pyzmq, installed once under the target directory.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout};
use warmroute_testbed::programs::{install_once, target_dir};
use warmroute_testbed::pypi::{self, PypiPackages};
use warmroute_zmtp::{
    ConnectionTiming, DealerSocket, ProtocolError, SessionEvent, SocketConfig, SubEvent, SubSocket,
    ZmtpEndpoint, ZmtpError,
};

const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/libzmq");
const CAPTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/kv_events");
const TOPIC: &str = "kv@engine";

/// Returns a Python interpreter that has pyzmq.
fn python() -> PathBuf {
    let requirements = Path::new(HERE).join("requirements.txt");
    let version = fs::read_to_string(&requirements).unwrap();
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("pyzmq=="))
        .unwrap();
    let name = format!("pyzmq-{}", version.trim_end_matches(['\\', ' ']));
    let dir = target_dir().unwrap();
    let python = install_once(&dir, &name, "bin/python3-zmq", |scratch| {
        let packages = scratch.join("packages");
        pypi::install(PypiPackages::Hashed(&requirements), scratch, &packages)?;
        let program = packages.join("bin/python3-zmq");
        fs::create_dir_all(packages.join("bin"))?;
        fs::write(
            &program,
            "#!/bin/sh\nPYTHONPATH=\"$(dirname \"$0\")/..\" exec python3 -B \"$@\"\n",
        )?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        Ok(packages)
    });
    python.unwrap_or_else(|error| panic!("{error:#}"))
}

/// A Python process with libzmq sockets.
struct Libzmq {
    _process: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Libzmq {
    async fn start() -> Self {
        let python = tokio::task::spawn_blocking(python).await.unwrap();
        let mut command = Command::new(python);
        command
            .arg(Path::new(HERE).join("peer.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let commands = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        Self {
            _process: process,
            commands,
            answers,
        }
    }

    async fn call(&mut self, command: Value) -> Value {
        self.commands
            .write_all(format!("{command}\n").as_bytes())
            .await
            .unwrap();
        let answer = timeout(Duration::from_secs(20), self.answers.next_line())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(answer.get("error").is_none(), "{command}: {answer}");
        answer["ok"].clone()
    }

    async fn bind(&mut self, socket_type: &str, endpoint: &str, options: Value) -> ZmtpEndpoint {
        let command = json!({"op": "open", "socket": "s", "type": socket_type, "bind": endpoint, "options": options});
        self.call(command).await.as_str().unwrap().parse().unwrap()
    }

    async fn connect(&mut self, socket_type: &str, endpoint: &ZmtpEndpoint, options: Value) {
        let endpoint = endpoint.to_string();
        self.call(json!({"op": "open", "socket": "s", "type": socket_type, "connect": endpoint, "options": options}))
            .await;
    }

    async fn send(&mut self, frames: &[&[u8]]) {
        let frames: Vec<_> = frames.iter().map(|frame| hex(frame)).collect();
        self.call(json!({"op": "send", "socket": "s", "frames": frames}))
            .await;
    }

    async fn receive(&mut self) -> Vec<Vec<u8>> {
        let frames = self.call(json!({"op": "receive", "socket": "s"})).await;
        frames
            .as_array()
            .unwrap()
            .iter()
            .map(|frame| bytes(frame.as_str().unwrap()))
            .collect()
    }

    async fn close(&mut self) {
        self.call(json!({"op": "close", "socket": "s"})).await;
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

/// Loads messages that were captured from a real engine: live messages, or replies of its replay
/// endpoint.
fn captured(file: &str, key: &str) -> Vec<Vec<Vec<u8>>> {
    let capture: Value =
        serde_json::from_slice(&fs::read(Path::new(CAPTURES).join(file)).unwrap()).unwrap();
    let frames = |message: &Value| {
        message
            .as_array()
            .unwrap()
            .iter()
            .map(|f| bytes(f.as_str().unwrap()))
            .collect()
    };
    let messages: Vec<_> = capture[key]
        .as_array()
        .unwrap()
        .iter()
        .map(frames)
        .collect();
    assert!(!messages.is_empty());
    messages
}

async fn next(socket: &mut SubSocket) -> SubEvent {
    timeout(Duration::from_secs(20), socket.next_event())
        .await
        .expect("an event")
        .expect("the socket is open")
}

async fn message(socket: &mut SubSocket) -> Vec<Bytes> {
    match next(socket).await {
        SubEvent::Message(frames) => frames,
        other => panic!("{other:?}"),
    }
}

fn fast_heartbeats() -> SocketConfig {
    let millis = Duration::from_millis;
    let timing = ConnectionTiming {
        heartbeat: millis(100),
        idle_timeout: millis(600),
        ..ConnectionTiming::default()
    };
    SocketConfig {
        timing,
        ..SocketConfig::default()
    }
}

/// Waits until the subscription has arrived. An XPUB socket receives it as a message.
async fn wait_for_subscription(peer: &mut Libzmq) {
    assert_eq!(peer.receive().await, [[&[1], TOPIC.as_bytes()].concat()]);
}

/// Sends a capture mixed with messages of another topic. Asserts that only the capture arrives.
async fn assert_capture_is_received(peer: &mut Libzmq, socket: &mut SubSocket) {
    let capture = captured("a09-long-chunked.json", "frames");
    for frames in &capture {
        peer.send(&[b"kv@other", &frames[1], &frames[2]]).await;
        peer.send(&[TOPIC.as_bytes(), &frames[1], &frames[2]]).await;
    }
    for frames in &capture {
        assert_eq!(
            message(socket).await,
            [TOPIC.as_bytes(), &frames[1], &frames[2]]
        );
    }
}

#[tokio::test]
async fn binding_libzmq_publisher_is_received_over_every_transport() {
    let mut peer = Libzmq::start().await;
    assert!(
        peer.call(json!({"op": "version"}))
            .await
            .as_str()
            .unwrap()
            .starts_with("4.")
    );
    let directory = tempfile::tempdir().unwrap();
    let ipc = format!("ipc://{}", directory.path().join("events").display());
    for (endpoint, options) in [
        ("tcp://127.0.0.1:*", json!({})),
        ("tcp://[::1]:*", json!({"IPV6": 1})),
        (&ipc, json!({})),
    ] {
        let endpoint = peer.bind("XPUB", endpoint, options).await;
        let mut socket = SubSocket::connect(&endpoint, TOPIC, SocketConfig::default())
            .await
            .unwrap();
        wait_for_subscription(&mut peer).await;
        assert_capture_is_received(&mut peer, &mut socket).await;
        peer.close().await;
        assert!(
            matches!(next(&mut socket).await, SubEvent::Disconnected { .. }),
            "{endpoint}"
        );
        assert!(socket.next_event().await.is_none());
    }
}

#[tokio::test]
async fn connecting_libzmq_publisher_is_received_over_every_transport() {
    let mut peer = Libzmq::start().await;
    let directory = tempfile::tempdir().unwrap();
    let ipc = format!("ipc://{}", directory.path().join("events").display());
    for (endpoint, options) in [
        ("tcp://127.0.0.1:0", json!({})),
        ("tcp://[::1]:0", json!({"IPV6": 1})),
        (&ipc, json!({})),
    ] {
        let mut socket =
            SubSocket::bind(&endpoint.parse().unwrap(), TOPIC, SocketConfig::default())
                .await
                .unwrap();
        let endpoint = socket.local_endpoint().unwrap().clone();
        // Connects twice: after a publisher has closed, another one can use the same bound socket.
        for _ in 0..2 {
            peer.connect("XPUB", &endpoint, options.clone()).await;
            assert!(
                matches!(next(&mut socket).await, SubEvent::Connected { .. }),
                "{endpoint}"
            );
            wait_for_subscription(&mut peer).await;
            assert_capture_is_received(&mut peer, &mut socket).await;
            peer.close().await;
            assert!(
                matches!(next(&mut socket).await, SubEvent::Disconnected { .. }),
                "{endpoint}"
            );
        }
    }
}

#[tokio::test]
async fn libzmq_publisher_restarts_on_its_port() {
    let mut peer = Libzmq::start().await;
    let endpoint = peer.bind("PUB", "tcp://127.0.0.1:*", json!({})).await;
    for restart in 0..3 {
        let mut socket = SubSocket::connect(&endpoint, TOPIC, SocketConfig::default())
            .await
            .unwrap();
        // A PUB socket does not report when it has processed the subscription.
        let deadline = Instant::now() + Duration::from_secs(10);
        let received = loop {
            assert!(
                Instant::now() < deadline,
                "nothing was received after restart {restart}"
            );
            peer.send(&[TOPIC.as_bytes(), b"x"]).await;
            if let Ok(event) = timeout(Duration::from_millis(50), socket.next_event()).await {
                break event;
            }
        };
        assert!(
            matches!(received, Some(SubEvent::Message(_))),
            "{received:?}"
        );
        peer.close().await;
        while !matches!(next(&mut socket).await, SubEvent::Disconnected { .. }) {}
        assert!(
            SubSocket::connect(&endpoint, TOPIC, SocketConfig::default())
                .await
                .is_err(),
            "nothing listens"
        );
        assert_eq!(
            peer.bind("PUB", &endpoint.to_string(), json!({})).await,
            endpoint
        );
    }
}

#[tokio::test]
async fn libzmq_router_replays_captured_batches() {
    let mut peer = Libzmq::start().await;
    let replies = captured("a15-replay.json", "replies");
    for host in ["127.0.0.1", "[::1]"] {
        let endpoint = peer
            .bind("ROUTER", &format!("tcp://{host}:*"), json!({"IPV6": 1}))
            .await;
        let mut dealer = DealerSocket::connect(&endpoint, SocketConfig::default())
            .await
            .unwrap();
        dealer
            .send(&[Bytes::new(), Bytes::copy_from_slice(&7_u64.to_be_bytes())])
            .await
            .unwrap();
        let request = peer.receive().await;
        assert_eq!(request[1..], [vec![], 7_u64.to_be_bytes().to_vec()]);
        for reply in &replies {
            let reply: Vec<&[u8]> = [&request[0]]
                .into_iter()
                .chain(reply)
                .map(|frame| &frame[..])
                .collect();
            peer.send(&reply).await;
        }
        for reply in &replies {
            let received = timeout(Duration::from_secs(10), dealer.next_event())
                .await
                .unwrap()
                .unwrap();
            assert_eq!(
                received,
                SessionEvent::Message(reply.iter().map(|f| Bytes::copy_from_slice(f)).collect())
            );
        }
        peer.close().await;
        assert!(dealer.next_event().await.is_err());
    }
}

#[tokio::test]
async fn heartbeats_of_both_sides_keep_an_idle_connection() {
    let mut peer = Libzmq::start().await;
    let options = json!({"HEARTBEAT_IVL": 100, "HEARTBEAT_TIMEOUT": 400, "HEARTBEAT_TTL": 400});
    let endpoint = peer.bind("XPUB", "tcp://127.0.0.1:*", options).await;
    let mut socket = SubSocket::connect(&endpoint, TOPIC, fast_heartbeats())
        .await
        .unwrap();
    wait_for_subscription(&mut peer).await;
    let idle = timeout(Duration::from_secs(2), socket.next_event()).await;
    assert!(idle.is_err(), "{idle:?}");
    // The connection also survives while the consumer does not read messages.
    for _ in 0..4 {
        peer.send(&[TOPIC.as_bytes(), b"x"]).await;
    }
    sleep(Duration::from_secs(2)).await;
    for _ in 0..4 {
        assert_eq!(message(&mut socket).await[1], "x");
    }
    peer.send(&[TOPIC.as_bytes(), b"y"]).await;
    assert_eq!(message(&mut socket).await[1], "y");
}

#[tokio::test]
async fn slow_consumer_makes_libzmq_drop_and_recovers() {
    let mut peer = Libzmq::start().await;
    let endpoint = peer
        .bind(
            "XPUB",
            "tcp://127.0.0.1:*",
            json!({"SNDHWM": 4, "SNDBUF": 65536}),
        )
        .await;
    let mut socket = SubSocket::connect(&endpoint, TOPIC, SocketConfig::default())
        .await
        .unwrap();
    wait_for_subscription(&mut peer).await;
    let big = hex(&vec![7; 1 << 20]);
    peer.call(
        json!({"op": "send", "socket": "s", "frames": [hex(TOPIC.as_bytes()), big], "times": 100}),
    )
    .await;
    let mut received = 0;
    while let Ok(event) = timeout(Duration::from_millis(500), socket.next_event()).await {
        assert!(matches!(event, Some(SubEvent::Message(frames)) if frames[1].len() == 1 << 20));
        received += 1;
    }
    assert!(
        (1..100).contains(&received),
        "{received} messages were buffered"
    );
    peer.send(&[TOPIC.as_bytes(), b"after"]).await;
    assert_eq!(message(&mut socket).await[1], "after");
}

#[tokio::test]
async fn libzmq_peer_of_another_kind_is_named() {
    let mut peer = Libzmq::start().await;
    let endpoint = peer.bind("PUSH", "tcp://127.0.0.1:*", json!({})).await;
    let error = SubSocket::connect(&endpoint, TOPIC, SocketConfig::default())
        .await
        .err()
        .unwrap();
    assert!(
        matches!(error, ZmtpError::Protocol(ProtocolError::SocketType { .. })),
        "{error}"
    );
    peer.close().await;
    let endpoint = peer
        .bind("PUB", "tcp://127.0.0.1:*", json!({"PLAIN_SERVER": 1}))
        .await;
    let error = SubSocket::connect(&endpoint, TOPIC, SocketConfig::default())
        .await
        .err()
        .unwrap();
    // Either side may detect the mismatch first.
    let is_named = match &error {
        ZmtpError::Protocol(ProtocolError::Mechanism(name)) => name == "PLAIN",
        other => matches!(other, ZmtpError::ClosedInHandshake),
    };
    assert!(is_named, "{error}");
}
