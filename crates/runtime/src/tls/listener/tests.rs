use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use warmroute_metrics::{ListenerLabel, ListenerOutcomeLabels, ListenerReasonLabels};

use super::super::config::TlsConfig;
use super::super::connection_table::ConnectionLimits;
use super::super::listener_certificate::ListenerCertificate;
use super::super::listener_context::ListenerLimits;
use super::*;
use crate::descriptors::DescriptorReserve;

type Incoming = mpsc::UnboundedSender<io::Result<DuplexStream>>;
type TestListener =
    LimitedListener<UnboundedReceiverStream<io::Result<DuplexStream>>, DuplexStream>;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const LABEL: ListenerLabel = ListenerLabel { listener: "test" };
const HANDSHAKE: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(300);

impl PeerAddress for DuplexStream {
    fn peer_address(&self) -> Option<SocketAddr> {
        None
    }
}

fn listener(
    tls: bool,
    total: usize,
    idle: Option<Duration>,
) -> (Incoming, TestListener, Arc<Metrics>) {
    listener_with_reserve(tls, total, idle, DescriptorReserve::default())
}

/// Returns a listener that accepts connections with the descriptors of a reserve, if it has any.
fn listener_with_reserve(
    tls: bool,
    total: usize,
    idle: Option<Duration>,
    reserve: DescriptorReserve,
) -> (Incoming, TestListener, Arc<Metrics>) {
    let (incoming, sockets) = mpsc::unbounded_channel();
    let metrics = Arc::new(Metrics::new());
    let config = TlsConfig {
        self_signed: true,
        ..TlsConfig::default()
    };
    let tls = tls.then(|| {
        ListenerCertificate::new("test", &config, ListenerProtocol::Grpc, metrics.clone()).unwrap()
    });
    let connections = ConnectionLimits {
        total,
        per_peer: total,
        idle_timeout: IDLE,
    };
    let limits = ListenerLimits {
        connections,
        handshake: HANDSHAKE,
        idle,
        max_header_block_bytes: 1 << 16,
    };
    let profile = ListenerProfile {
        name: "test",
        protocol: ListenerProtocol::Grpc,
        tls,
        limits,
        reserve,
        serves_probes: true,
    };
    let listener = LimitedListener::new(
        profile,
        UnboundedReceiverStream::new(sockets),
        metrics.clone(),
    );
    (incoming, listener, metrics)
}

fn connect(incoming: &Incoming) -> DuplexStream {
    let (client, server) = duplex(1024);
    incoming.send(Ok(server)).unwrap();
    client
}

fn closed(metrics: &Metrics, reason: &'static str) -> u64 {
    metrics
        .listeners
        .connections_closed
        .get_or_create(&ListenerReasonLabels {
            listener: "test",
            reason,
        })
        .get()
}

/// Returns a HEADERS frame of stream 1 with `:method: POST`, complete or not.
fn headers(flags: u8) -> Vec<u8> {
    vec![0, 0, 1, 1, flags, 0, 0, 0, 1, 0x83]
}

async fn read_preface(
    connection: &mut AcceptedConnection<DuplexStream>,
    client: &mut DuplexStream,
) {
    client.write_all(PREFACE).await.unwrap();
    connection
        .read_exact(&mut [0; PREFACE.len()])
        .await
        .unwrap();
}

/// Opens stream 1.
async fn open_stream(connection: &mut AcceptedConnection<DuplexStream>, client: &mut DuplexStream) {
    client.write_all(&headers(4)).await.unwrap();
    connection.read_exact(&mut [0; 10]).await.unwrap();
}

async fn assert_stays_open(connection: &mut AcceptedConnection<DuplexStream>, time: Duration) {
    let read = timeout(time, connection.read_u8()).await;
    assert!(read.is_err(), "the connection stays open");
}

async fn assert_closed(client: &mut DuplexStream) {
    let length = client.read(&mut [0; 1]).await.unwrap();
    assert_eq!(length, 0, "the connection is closed");
}

async fn assert_accepts_nothing(listener: &mut TestListener) {
    let accepted = timeout(Duration::from_secs(1), listener.next()).await;
    assert!(accepted.is_err());
}

#[tokio::test(start_paused = true)]
async fn idle_connection_is_replaced_and_used_ones_stay() {
    let (incoming, mut listener, metrics) = listener(false, 2, None);
    let mut used_client = connect(&incoming);
    let mut idle_client = connect(&incoming);
    let mut used = listener.next().await.unwrap();
    let mut idle = listener.next().await.unwrap();
    read_preface(&mut used, &mut used_client).await;
    read_preface(&mut idle, &mut idle_client).await;
    open_stream(&mut used, &mut used_client).await;
    let reading = tokio::spawn(async move { idle.read_u8().await });
    tokio::task::yield_now().await;

    let _third_client = connect(&incoming);
    let _third = listener.next().await.unwrap();
    assert_eq!(
        reading.await.unwrap().unwrap_err().kind(),
        io::ErrorKind::ConnectionAborted
    );
    assert_eq!(closed(&metrics, "evicted"), 1);
    assert_eq!(metrics.listeners.connections.get_or_create(&LABEL).get(), 2);
    assert_stays_open(&mut used, Duration::from_secs(1)).await;
    // The end of the stream, sent by the server, makes the connection idle.
    used.write_all(&[0, 0, 0, 0, 1, 0, 0, 0, 1]).await.unwrap();
    let _fourth_client = connect(&incoming);
    let _fourth = listener.next().await.unwrap();
    let _fifth_client = connect(&incoming);
    let _fifth = listener.next().await.unwrap();
    assert_eq!(
        used.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionAborted
    );
}

#[tokio::test(start_paused = true)]
async fn connection_used_since_its_eviction_stays() {
    let (incoming, mut listener, metrics) = listener(false, 2, None);
    let mut clients = [connect(&incoming), connect(&incoming)];
    let mut chosen = listener.next().await.unwrap();
    let mut used = listener.next().await.unwrap();
    read_preface(&mut chosen, &mut clients[0]).await;
    read_preface(&mut used, &mut clients[1]).await;
    open_stream(&mut used, &mut clients[1]).await;
    // The first connection is selected for eviction while it has no stream. A stream arrives before
    // its task runs.
    let _third_client = connect(&incoming);
    let mut third = listener.next().await.unwrap();
    open_stream(&mut chosen, &mut clients[0]).await;
    assert_stays_open(&mut chosen, Duration::from_secs(1)).await;
    // The first connection counts as used again, so the next connection replaces the one without
    // streams.
    let _fourth_client = connect(&incoming);
    let _fourth = listener.next().await.unwrap();
    assert_eq!(
        third.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionAborted
    );
    drop((chosen, used, third));
    assert_eq!(closed(&metrics, "evicted"), 1);
}

#[tokio::test(start_paused = true)]
async fn evicted_client_is_counted_when_closed() {
    let (incoming, mut listener, metrics) = listener(false, 1, None);
    let _client = connect(&incoming);
    let mut connection = listener.next().await.unwrap();
    let writing = tokio::spawn(async move { connection.write_all(&[0; 4096]).await });
    tokio::task::yield_now().await;
    let _second_client = connect(&incoming);
    let _second = listener.next().await.unwrap();
    assert_eq!(
        closed(&metrics, "evicted"),
        0,
        "the connection is not closed yet"
    );
    let ended = timeout(Duration::from_secs(1), writing)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    assert_eq!(closed(&metrics, "evicted"), 1);
    assert_eq!(metrics.listeners.connections.get_or_create(&LABEL).get(), 1);
}

#[tokio::test(start_paused = true)]
async fn write_times_out_unless_the_client_reads() {
    let (incoming, mut listener, metrics) = listener(false, 1, None);
    let mut client = connect(&incoming);
    let mut connection = listener.next().await.unwrap();
    let writing = tokio::spawn(async move { connection.write_all(&[0; 4096]).await });
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(50)).await;
        client.read_u8().await.unwrap();
    }
    assert!(!writing.is_finished(), "each read restarts the timeout");
    let ended = timeout(Duration::from_secs(70), writing)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert_eq!(closed(&metrics, "write_timeout"), 1);
}

#[tokio::test(start_paused = true)]
async fn each_header_block_has_its_own_timeout() {
    let (incoming, mut listener, metrics) = listener(false, 2, None);
    let mut client = connect(&incoming);
    let mut connection = listener.next().await.unwrap();
    read_preface(&mut connection, &mut client).await;
    let block = headers(4);
    let (first, rest) = block.split_at(5);
    client.write_all(first).await.unwrap();
    for _ in 0..5 {
        assert!(
            timeout(HANDSHAKE * 2 / 3, connection.read_u8())
                .await
                .is_err(),
            "the block is incomplete"
        );
        client.write_all(&[rest, first].concat()).await.unwrap();
        connection.read_exact(&mut [0; 10]).await.unwrap();
    }
    let ended = timeout(HANDSHAKE * 2, connection.read_u8()).await.unwrap();
    assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert_eq!(closed(&metrics, "header_timeout"), 1);
}

#[tokio::test(start_paused = true)]
async fn connection_is_refused_while_all_others_are_used() {
    let (incoming, mut listener, metrics) = listener(false, 1, None);
    let mut client = connect(&incoming);
    let mut connection = listener.next().await.unwrap();
    read_preface(&mut connection, &mut client).await;
    open_stream(&mut connection, &mut client).await;
    let mut second = connect(&incoming);
    assert_accepts_nothing(&mut listener).await;
    assert_closed(&mut second).await;
    assert_eq!(
        metrics
            .listeners
            .connections_refused
            .get_or_create(&LABEL)
            .get(),
        1
    );
    assert_eq!(closed(&metrics, "evicted"), 0);
}

#[tokio::test(start_paused = true)]
async fn silent_and_incomplete_connections_time_out() {
    let (incoming, mut listener, metrics) = listener(false, 9, None);
    let _silent = connect(&incoming);
    let mut partial = connect(&incoming);
    let mut block = connect(&incoming);
    let mut quiet = connect(&incoming);
    let mut silent_side = listener.next().await.unwrap();
    let mut partial_side = listener.next().await.unwrap();
    let mut block_side = listener.next().await.unwrap();
    let mut quiet_side = listener.next().await.unwrap();
    partial.write_all(b"P").await.unwrap();
    assert_eq!(partial_side.read_u8().await.unwrap(), b'P');
    read_preface(&mut block_side, &mut block).await;
    read_preface(&mut quiet_side, &mut quiet).await;
    block.write_all(&headers(0)).await.unwrap();
    for side in [&mut silent_side, &mut partial_side, &mut block_side] {
        let error = timeout(HANDSHAKE * 2, side.read_u8())
            .await
            .unwrap()
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
    assert_eq!(
        ["greeting_timeout", "header_timeout"].map(|reason| closed(&metrics, reason)),
        [2, 1]
    );
    assert!(
        timeout(Duration::from_secs(36_000), quiet_side.read_u8())
            .await
            .is_err(),
        "no idle limit by default"
    );
}

#[tokio::test(start_paused = true)]
async fn idle_limit_spares_connections_with_open_streams() {
    let (incoming, mut listener, metrics) = listener(false, 9, Some(IDLE));
    let mut clients = [connect(&incoming), connect(&incoming)];
    let mut idle = listener.next().await.unwrap();
    let mut used = listener.next().await.unwrap();
    read_preface(&mut idle, &mut clients[0]).await;
    read_preface(&mut used, &mut clients[1]).await;
    open_stream(&mut used, &mut clients[1]).await;
    let error = timeout(IDLE * 2, idle.read_u8())
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert_eq!(closed(&metrics, "idle"), 1);
    assert_stays_open(&mut used, IDLE * 10).await;
}

#[tokio::test(start_paused = true)]
async fn slow_handshake_expires_and_delays_no_other() {
    let (incoming, mut listener, metrics) = listener(true, 3, None);
    let mut silent: Vec<_> = (0..2).map(|_| connect(&incoming)).collect();
    let mut plain = connect(&incoming);
    plain.write_all(PREFACE).await.unwrap();
    let outcome = |outcome| {
        let labels = ListenerOutcomeLabels {
            listener: "test",
            outcome,
        };
        metrics
            .listeners
            .tls_handshakes
            .get_or_create(&labels)
            .get()
    };
    let error = |reason| {
        let labels = ListenerReasonLabels {
            listener: "test",
            reason,
        };
        metrics
            .listeners
            .tls_handshake_errors
            .get_or_create(&labels)
            .get()
    };
    assert!(
        timeout(Duration::from_secs(5), listener.next())
            .await
            .is_err(),
        "no connection is ready"
    );
    assert_eq!(
        (outcome("failed"), outcome("expired"), error("plaintext")),
        (1, 0, 1)
    );
    let mut alert = Vec::new();
    plain.read_to_end(&mut alert).await.unwrap();
    assert_eq!(alert.first(), Some(&21), "a TLS alert: {alert:?}");
    assert!(
        timeout(Duration::from_secs(6), listener.next())
            .await
            .is_err()
    );
    assert_eq!(
        (outcome("failed"), outcome("expired"), error("timeout")),
        (1, 2, 2)
    );
    assert_closed(&mut silent[0]).await;
    assert_eq!(metrics.listeners.connections.get_or_create(&LABEL).get(), 0);
}

#[tokio::test(start_paused = true)]
async fn full_listener_replaces_pending_handshake() {
    let (incoming, mut listener, metrics) = listener(true, 1, None);
    let mut first = connect(&incoming);
    assert_accepts_nothing(&mut listener).await;
    let _second = connect(&incoming);
    assert_accepts_nothing(&mut listener).await;
    assert_closed(&mut first).await;
    assert_eq!(closed(&metrics, "evicted"), 1);
}

fn no_descriptors() -> io::Error {
    rustix::io::Errno::MFILE.into()
}

#[tokio::test(start_paused = true)]
async fn probe_listener_accepts_with_the_reserve() {
    let reserve = DescriptorReserve::new();
    let (incoming, mut listener, _) = listener_with_reserve(false, 2, None, reserve.clone());
    incoming.send(Err(no_descriptors())).unwrap();
    let _client = connect(&incoming);
    let started = tokio::time::Instant::now();
    let connection = listener.next().await.unwrap();
    assert_eq!(started.elapsed(), Duration::ZERO, "without a pause");
    let count_spare = || std::iter::from_fn(|| reserve.release().then_some(())).count();
    let spare = count_spare();
    // A closed connection refills the reserve.
    drop(connection);
    assert_eq!(count_spare(), spare + 1);
}

#[tokio::test(start_paused = true)]
async fn accept_error_evicts_idle_connections_at_once() {
    let (incoming, mut listener, metrics) = listener(false, 100, None);
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(connect(&incoming));
        let mut connection = listener.next().await.unwrap();
        tokio::spawn(async move { connection.read_u8().await });
    }
    tokio::task::yield_now().await;
    let started = tokio::time::Instant::now();
    // Two failures free as many connections as 64 failures with a pause for each.
    for _ in 0..2 {
        incoming.send(Err(no_descriptors())).unwrap();
    }
    let _client = connect(&incoming);
    let _connection = listener.next().await.unwrap();
    assert!(started.elapsed() <= Duration::from_millis(100));
    timeout(Duration::from_secs(5), async {
        while closed(&metrics, "evicted") < 40 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn listener_survives_accept_errors_until_socket_closes() {
    let (incoming, mut listener, _) = listener(false, 2, None);
    incoming
        .send(Err(io::ErrorKind::ConnectionReset.into()))
        .unwrap();
    incoming
        .send(Err(io::Error::other("no file descriptors")))
        .unwrap();
    let _client = connect(&incoming);
    drop(incoming);
    assert!(listener.next().await.is_some());
    assert!(listener.next().await.is_none());
}
