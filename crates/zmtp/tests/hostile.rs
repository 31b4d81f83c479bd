//! Peers that violate the protocol, announce huge sizes, or hold connections open. They must not
//! exhaust memory or sockets, and messages of a valid publisher must still arrive.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use warmroute_zmtp::{
    ConnectionTiming, DealerSocket, ExceededLimit, MessageLimits, ProtocolError, PublisherId,
    SessionEvent, SocketConfig, SubEvent, SubSocket, ZmtpEndpoint, ZmtpError,
};

const READY_PUB: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";
const READY_ROUTER: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER";

fn greeting(minor: u8) -> Vec<u8> {
    let mut greeting = vec![0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = minor;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Returns the header of a message frame with an 8-byte length.
fn header(length: u64) -> Vec<u8> {
    [&[2], &length.to_be_bytes()[..]].concat()
}

async fn bind_socket() -> (SubSocket, String) {
    let config = SocketConfig {
        limits: MessageLimits {
            max_bytes: 1 << 20,
            max_frames: 4,
        },
        ..SocketConfig::default()
    };
    bind("kv", config).await
}

/// Binds a socket. Returns it with its address.
async fn bind(topic: &str, config: SocketConfig) -> (SubSocket, String) {
    let any: ZmtpEndpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let socket = SubSocket::bind(&any, topic, config).await.unwrap();
    let endpoint = socket.local_endpoint().unwrap().to_string();
    (socket, endpoint.replace("tcp://", ""))
}

fn with_timing(timing: ConnectionTiming) -> SocketConfig {
    SocketConfig {
        timing,
        ..SocketConfig::default()
    }
}

/// Listens as an engine.
async fn listen(address: &str) -> (TcpListener, ZmtpEndpoint) {
    let listener = TcpListener::bind(address).await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    (listener, endpoint.parse().unwrap())
}

/// Sends the handshake of a publisher.
async fn greet(stream: &mut TcpStream) {
    stream
        .write_all(&[&greeting(0)[..], READY_PUB].concat())
        .await
        .unwrap();
}

/// Connects as a publisher and completes the handshake.
async fn publisher(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    greet(&mut stream).await;
    let mut handshake = [0; 64 + 27 + 5];
    stream.read_exact(&mut handshake).await.unwrap();
    assert_eq!(handshake[91..], *b"\x00\x03\x01kv");
    stream
}

async fn next(socket: &mut SubSocket) -> SubEvent {
    timeout(Duration::from_secs(10), socket.next_event())
        .await
        .expect("an event")
        .expect("the socket is open")
}

async fn expect_connected(socket: &mut SubSocket) {
    let event = next(socket).await;
    assert!(matches!(event, SubEvent::Connected { .. }), "{event:?}");
}

async fn expect_refused(socket: &mut SubSocket, reason: &str) {
    match next(socket).await {
        SubEvent::Refused { error, .. } => assert_eq!(error.reason(), reason),
        other => panic!("{other:?}"),
    }
}

/// Returns the next event that is not about a refused connection.
async fn next_accepted(socket: &mut SubSocket) -> SubEvent {
    loop {
        match next(socket).await {
            SubEvent::Refused { .. } => {}
            event => return event,
        }
    }
}

/// Returns the resident memory of the process in MiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<usize>()
        .unwrap()
        / 1024
}

/// Regression test: nine bytes after the greeting announce a length that cannot be allocated, which
/// aborted the process.
#[tokio::test]
async fn announced_length_does_not_abort_the_process() {
    for length in [1 << 62, 1 << 40, u64::MAX] {
        let (mut socket, address) = bind_socket().await;
        let mut early = TcpStream::connect(&address).await.unwrap();
        early
            .write_all(&[greeting(0), header(length)].concat())
            .await
            .unwrap();
        expect_refused(&mut socket, "protocol").await;
        let mut late = publisher(&address).await;
        expect_connected(&mut socket).await;
        late.write_all(&header(length)).await.unwrap();
        match next(&mut socket).await {
            SubEvent::Disconnected {
                error: ZmtpError::Protocol(ProtocolError::MessageTooLarge(_)),
                ..
            } => {}
            other => panic!("{other:?}"),
        }
        let mut valid = publisher(&address).await;
        valid.write_all(b"\x00\x02kv").await.unwrap();
        expect_connected(&mut socket).await;
        assert!(matches!(next(&mut socket).await, SubEvent::Message(_)));
    }
}

/// Like the previous test, but warmroute connects to the engine: to its event endpoint (SUB) and to
/// its replay endpoint (DEALER).
#[tokio::test]
async fn connected_engine_cannot_abort_the_process() {
    let (listener, endpoint) = listen("127.0.0.1:0").await;
    tokio::spawn(async move {
        for (ready, length) in [(READY_PUB, 1 << 62), (READY_ROUTER, 1 << 62)] {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream
                .write_all(&[&greeting(1), ready, &header(length)].concat())
                .await
                .unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.ok();
        }
    });
    let mut sub = SubSocket::connect(&endpoint, "", SocketConfig::default())
        .await
        .unwrap();
    match next(&mut sub).await {
        SubEvent::Disconnected { error, .. } => assert_eq!(error.reason(), "too_large"),
        other => panic!("{other:?}"),
    }
    assert!(sub.next_event().await.is_none());
    let mut dealer = DealerSocket::connect(&endpoint, SocketConfig::default())
        .await
        .unwrap();
    assert_eq!(dealer.next_event().await.unwrap_err().reason(), "too_large");
}

#[tokio::test]
async fn oversize_message_is_skipped_without_memory() {
    let (mut socket, address) = bind_socket().await;
    let mut stream = publisher(&address).await;
    expect_connected(&mut socket).await;
    let before = resident();
    let sending = tokio::spawn(async move {
        // Sixteen times the limit is the largest message that is skipped.
        stream.write_all(&header(16 << 20)).await.unwrap();
        for _ in 0..16 {
            stream.write_all(&[7; 1 << 20]).await.unwrap();
        }
        stream.write_all(b"\x00\x02kv").await.unwrap();
        stream
    });
    assert!(matches!(
        next(&mut socket).await,
        SubEvent::Oversize(ExceededLimit::Message)
    ));
    assert!(
        matches!(next(&mut socket).await, SubEvent::Message(frames) if frames == [Bytes::from_static(b"kv")])
    );
    assert!(
        resident() < before + 8,
        "{} MiB before, {} MiB after",
        before,
        resident()
    );
    drop(sending.await.unwrap());
}

/// Returns the number of open file descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn held_handshakes_do_not_block_publishers() {
    let (mut socket, address) = bind_socket().await;
    let mut held = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(&greeting(0)[..36]).await.unwrap();
        held.push(stream);
        // The socket drops reports of refused connections when its queue is full, so the test reads
        // events in between.
        while timeout(Duration::from_millis(1), socket.next_event())
            .await
            .is_ok()
        {}
    }
    // 200 descriptors are the peers' ends of the connections. The socket keeps at most 8
    // handshakes open, and 60 allows for all other descriptors.
    let deadline = Instant::now() + Duration::from_secs(10);
    while descriptors() > 200 + 8 + 60 {
        assert!(Instant::now() < deadline, "{} descriptors", descriptors());
        sleep(Duration::from_millis(20)).await;
    }
    let mut valid = publisher(&address).await;
    valid.write_all(b"\x00\x02kv").await.unwrap();
    assert!(matches!(
        next_accepted(&mut socket).await,
        SubEvent::Connected { .. }
    ));
    assert!(matches!(
        next_accepted(&mut socket).await,
        SubEvent::Message(_)
    ));
}

#[tokio::test]
async fn handshakes_of_one_host_do_not_replace_others() {
    let (mut socket, address) = bind_socket().await;
    let engine = TcpSocket::new_v4().unwrap();
    engine.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut engine = engine.connect(address.parse().unwrap()).await.unwrap();
    engine.read_exact(&mut [0; 11]).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        // The socket has sent part of its greeting, so the handshake has begun.
        stream.read_exact(&mut [0; 11]).await.unwrap();
        held.push(stream);
    }
    greet(&mut engine).await;
    match next_accepted(&mut socket).await {
        SubEvent::Connected { address, .. } => {
            assert!(address.starts_with("127.0.0.2:"), "{address}")
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn failed_heartbeat_does_not_lose_a_received_message() {
    let (listener, endpoint) = listen("127.0.0.1:0").await;
    let peer = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream
            .write_all(&[&greeting(1)[..], READY_PUB, b"\x00\x01a\x00\x01b"].concat())
            .await
            .unwrap();
        // Leaves time to receive both messages. Dropping the stream then resets the connection,
        // because unread bytes are left.
        sleep(Duration::from_millis(300)).await;
    });
    let timing = ConnectionTiming {
        heartbeat: Duration::from_millis(20),
        ..ConnectionTiming::default()
    };
    let mut socket = SubSocket::connect(&endpoint, "", with_timing(timing))
        .await
        .unwrap();
    peer.await.unwrap();
    // Heartbeats fail while the second message waits for the consumer.
    sleep(Duration::from_millis(300)).await;
    for expected in ["a", "b"] {
        match next(&mut socket).await {
            SubEvent::Message(frames) => assert_eq!(frames, [expected]),
            other => panic!("{expected}: {other:?}"),
        }
    }
    assert!(matches!(
        next(&mut socket).await,
        SubEvent::Disconnected { .. }
    ));
}

#[tokio::test]
async fn publishers_of_a_socket_are_bounded() {
    let (mut socket, address) = bind_socket().await;
    let mut publishers = Vec::new();
    for _ in 0..4 {
        publishers.push(publisher(&address).await);
        expect_connected(&mut socket).await;
    }
    let mut fifth = publisher(&address).await;
    expect_refused(&mut socket, "too_many_publishers").await;
    assert_eq!(
        fifth.read(&mut [0; 8]).await.unwrap(),
        0,
        "the connection is closed"
    );
    publishers.pop();
    assert!(matches!(
        next(&mut socket).await,
        SubEvent::Disconnected { .. }
    ));
    publishers.push(publisher(&address).await);
    expect_connected(&mut socket).await;
}

/// Reads events until a publisher was disconnected and a message has arrived. Returns the
/// disconnected publishers.
async fn disconnected_before_message(socket: &mut SubSocket) -> Vec<(PublisherId, &'static str)> {
    let mut disconnected = Vec::new();
    let mut messages = 0;
    while disconnected.is_empty() || messages == 0 {
        match next(socket).await {
            SubEvent::Disconnected { publisher, error } => {
                disconnected.push((publisher, error.reason()))
            }
            SubEvent::Message(_) => messages += 1,
            SubEvent::Connected { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    disconnected
}

#[tokio::test]
async fn silent_publisher_is_replaced_by_a_new_one() {
    let idle_timeout = Duration::from_millis(500);
    let timing = ConnectionTiming {
        idle_timeout,
        ..ConnectionTiming::default()
    };
    let (mut socket, address) = bind("kv", with_timing(timing)).await;
    let mut publishers = Vec::new();
    let mut ids = Vec::new();
    for _ in 0..4 {
        publishers.push(publisher(&address).await);
        match next(&mut socket).await {
            SubEvent::Connected { publisher, .. } => ids.push(publisher),
            other => panic!("{other:?}"),
        }
    }
    sleep(idle_timeout).await;
    // After this message, the second publisher has been silent for longest.
    publishers[0].write_all(b"\x00\x02kv").await.unwrap();
    assert!(matches!(next(&mut socket).await, SubEvent::Message(_)));
    let mut fifth = publisher(&address).await;
    fifth.write_all(b"\x00\x02kv").await.unwrap();
    assert_eq!(
        disconnected_before_message(&mut socket).await,
        [(ids[1], "replaced")]
    );
    assert_eq!(
        publishers[1].read(&mut [0; 8]).await.unwrap(),
        0,
        "the connection is closed"
    );
    // The other publishers stay connected.
    for at in [0, 2, 3] {
        publishers[at].write_all(b"\x00\x02kv").await.unwrap();
        assert!(matches!(next(&mut socket).await, SubEvent::Message(_)));
    }
    // Now no publisher has been silent for long enough to be replaced.
    let _sixth = publisher(&address).await;
    expect_refused(&mut socket, "too_many_publishers").await;
}

#[tokio::test]
async fn slow_peer_is_received_and_stalled_handshake_ends() {
    let timing = ConnectionTiming {
        handshake: Duration::from_millis(300),
        ..ConnectionTiming::default()
    };
    let (mut socket, address) = bind("", with_timing(timing)).await;
    let mut stalled = TcpStream::connect(&address).await.unwrap();
    stalled.write_all(&greeting(0)).await.unwrap();
    expect_refused(&mut socket, "handshake_timeout").await;
    let mut slow = TcpStream::connect(&address).await.unwrap();
    slow.set_nodelay(true).unwrap();
    greet(&mut slow).await;
    expect_connected(&mut socket).await;
    for byte in b"\x01\x02kv\x00\x04body" {
        slow.write_all(&[*byte]).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
    match next(&mut socket).await {
        SubEvent::Message(frames) => assert_eq!(frames, [&b"kv"[..], b"body"]),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn dealer_reports_the_message_before_the_end() {
    let (listener, endpoint) = listen("[::1]:0").await;
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream
            .write_all(&[&greeting(1), READY_ROUTER, b"\x01\x00\x00\x01x"].concat())
            .await
            .unwrap();
        // Closing with unread data would reset the connection.
        stream.read_exact(&mut [0; 64 + 30]).await.unwrap();
    });
    let mut dealer = DealerSocket::connect(&endpoint, SocketConfig::default())
        .await
        .unwrap();
    let reply = SessionEvent::Message(vec![Bytes::new(), Bytes::from_static(b"x")]);
    assert_eq!(dealer.next_event().await.unwrap(), reply);
    assert!(dealer.next_event().await.is_err());
}
