//! HTTP/2 connections frame by frame, with input that client libraries do not send.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::time::timeout;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::PATIENCE;

use crate::tls::site::{TlsSite, http, until};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the HEADERS frame of a gRPC health call, with all fields as literals.
fn call(stream: u32, authority: &str) -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Check"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let mut block = Vec::new();
    for (name, value) in fields {
        // Literal header field with incremental indexing.
        block.push(0x40);
        for text in [name, value] {
            block.push(text.len() as u8);
            block.extend(text.as_bytes());
        }
    }
    frame(HEADERS, 4, stream, &block)
}

/// An HTTP/2 connection after the exchange of settings.
struct RawConnection<S>(S);

impl<S: AsyncRead + AsyncWrite + Unpin> RawConnection<S> {
    async fn open(mut io: S) -> Self {
        io.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat())
            .await
            .unwrap();
        Self(io)
    }

    /// Returns the kind, stream and payload of the next frame of these kinds, or `None` if the
    /// server has closed the connection.
    async fn next(&mut self, kinds: &[u8]) -> Option<(u8, u32, Vec<u8>)> {
        loop {
            let mut head = [0; 9];
            timeout(PATIENCE, self.0.read_exact(&mut head))
                .await
                .unwrap()
                .ok()?;
            let [l0, l1, l2, kind, _, s0, s1, s2, s3] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, l0, l1, l2]) as usize];
            timeout(PATIENCE, self.0.read_exact(&mut payload))
                .await
                .unwrap()
                .ok()?;
            if kinds.contains(&kind) {
                return Some((kind, u32::from_be_bytes([s0, s1, s2, s3]), payload));
            }
        }
    }

    /// Sends a call with this authority. Returns true if the response is a health status, and false
    /// if it is an error.
    async fn is_answered(&mut self, stream: u32, authority: &str) -> bool {
        let message = frame(0, 1, stream, &[0; 5]);
        self.0
            .write_all(&[call(stream, authority), message].concat())
            .await
            .unwrap();
        loop {
            match self.next(&[HEADERS, RST_STREAM, GOAWAY]).await.unwrap() {
                // The frame ends an earlier call.
                (HEADERS | RST_STREAM, of, _) if of != stream => {}
                (kind, ..) => return kind == HEADERS,
            }
        }
    }

    /// Opens and resets streams. Returns true if the server then closes the connection.
    async fn is_closed_for_resets(&mut self, count: u32) -> bool {
        let reset = |n: u32| {
            [
                call(2 * n + 1, "warmroute"),
                frame(RST_STREAM, 0, 2 * n + 1, &[0, 0, 0, 8]),
            ]
            .concat()
        };
        let mut octets: Vec<u8> = (0..count).flat_map(reset).collect();
        octets.extend(frame(PING, 0, 0, &[7; 8]));
        self.0.write_all(&octets).await.unwrap();
        match self.next(&[PING, GOAWAY]).await {
            Some((GOAWAY, _, payload)) => {
                assert_eq!(payload[4..8], ENHANCE_YOUR_CALM);
                true
            }
            Some(_) => false,
            None => panic!("the connection was closed without a GOAWAY"),
        }
    }
}

async fn start(more: Value) -> TlsSite {
    let mut config = json!({
        "listeners": {
            "ext_proc": {
                "address": "127.0.0.1:0",
                "unix_socket": "ext_proc.sock",
                "health_address": "127.0.0.1:0",
            },
            "api": {"address": "127.0.0.1:0"},
        },
        "envoy": {"xds": {"address": "127.0.0.1:0"}},
    });
    merge_config(&mut config, &more);
    let site = TlsSite::start(config, |_| ()).await;
    until("ready", async || site.page("/readyz", "").await.0 == 200).await;
    site
}

#[tokio::test]
async fn every_grpc_listener_accepts_any_authority() {
    let site = start(json!({})).await;
    let authorities = [
        "outbound|9002||warmroute.inference.svc.cluster.local",
        "extension/ns/name",
        "warmroute:9002",
    ];
    for address in [Some(site.ext_proc), site.health, site.api, site.xds].map(Option::unwrap) {
        let mut connection = RawConnection::open(TcpStream::connect(address).await.unwrap()).await;
        for (stream, authority) in (1..).step_by(2).zip(authorities) {
            assert!(
                connection.is_answered(stream, authority).await,
                "{address} {authority}"
            );
        }
    }
    let mut connection = RawConnection::open(
        UnixStream::connect(site.path("ext_proc.sock"))
            .await
            .unwrap(),
    )
    .await;
    assert!(connection.is_answered(1, authorities[0]).await);
    // The raw connection would not answer the ping of a graceful shutdown.
    drop(connection);
    site.stop().await;
}

#[tokio::test]
async fn http2_errors_are_counted() {
    let site = start(json!({})).await;
    let mut connection =
        RawConnection::open(TcpStream::connect(site.ext_proc).await.unwrap()).await;
    assert!(
        !connection.is_answered(1, "").await,
        "an empty authority stays invalid"
    );
    site.wait_metric(
        "http2_errors_total{listener=\"ext_proc\",scope=\"stream\",reason=\"protocol_error\"}",
        1.0,
    )
    .await;
    connection
        .0
        .write_all(&frame(0, 0, 0, b"data of no stream"))
        .await
        .unwrap();
    assert!(connection.next(&[GOAWAY]).await.is_some());
    site.wait_metric(
        "http2_errors_total{listener=\"ext_proc\",scope=\"connection\",reason=\"protocol_error\"}",
        1.0,
    )
    .await;
    site.stop().await;
}

#[tokio::test]
async fn only_ext_proc_tolerates_many_resets() {
    let site = start(json!({})).await;
    let connect =
        async |address| RawConnection::open(TcpStream::connect(address).await.unwrap()).await;
    for address in [site.health, site.api, site.xds].map(Option::unwrap) {
        assert!(
            connect(address).await.is_closed_for_resets(200).await,
            "{address}"
        );
    }
    assert!(!connect(site.ext_proc).await.is_closed_for_resets(200).await);
    site.stop().await;
}

#[tokio::test]
async fn idle_connections_do_not_block_probes() {
    let site = start(json!({
        "listeners": {"limits": {"max_connections": 8, "max_connections_per_peer": 8}},
    }))
    .await;
    let mut held = Vec::new();
    for _ in 0..16 {
        let mut http1 = TcpStream::connect(site.admin).await.unwrap();
        http1
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: y")
            .await
            .unwrap();
        held.push(http1);
        for address in [site.health.unwrap(), site.ext_proc] {
            held.push(
                RawConnection::open(TcpStream::connect(address).await.unwrap())
                    .await
                    .0,
            );
        }
    }
    let page = http(
        TcpStream::connect(site.admin).await.unwrap(),
        "/healthz",
        "",
    )
    .await;
    assert_eq!(page.unwrap().0, 200);
    for address in [site.health.unwrap(), site.ext_proc] {
        let mut connection = RawConnection::open(TcpStream::connect(address).await.unwrap()).await;
        assert!(connection.is_answered(1, "warmroute").await, "{address}");
    }
    for listener in ["admin", "health", "ext_proc"] {
        let series =
            format!("connections_closed_total{{listener=\"{listener}\",reason=\"evicted\"}}");
        until(&series, async || site.metric(&series).await >= 9.0).await;
    }
    let mut closed = 0;
    for held in &mut held {
        let read = timeout(
            Duration::from_millis(100),
            held.read_to_end(&mut Vec::new()),
        )
        .await;
        closed += usize::from(read.is_ok());
    }
    assert!(
        closed >= 27,
        "{closed} clients see the end of their connections"
    );
    drop(held);
    site.stop().await;
}

/// A client that sends requests and reads no responses.
struct StalledClient {
    socket: TcpStream,
    request: Vec<u8>,
}

impl StalledClient {
    /// Sends requests until the server accepts no more.
    async fn open(address: SocketAddr, start: &[u8], request: &[u8]) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        // Small buffers fill quickly.
        socket.set_recv_buffer_size(4096).unwrap();
        socket.set_send_buffer_size(16 << 10).unwrap();
        let mut socket = socket.connect(address).await.unwrap();
        socket.write_all(start).await.unwrap();
        let request = request.repeat(64);
        // A write that blocks this long shows that the server no longer reads.
        while let Ok(sent) = timeout(Duration::from_secs(1), socket.write_all(&request)).await {
            sent.unwrap();
        }
        Self { socket, request }
    }

    /// Returns true if the server resets the connection although this client does not read.
    async fn is_reset(&mut self) -> bool {
        let sending = async { while self.socket.write_all(&self.request).await.is_ok() {} };
        timeout(PATIENCE, sending).await.is_ok()
    }
}

#[tokio::test]
async fn clients_that_do_not_read_are_evicted() {
    let site = start(json!({
        "listeners": {"limits": {"max_connections": 2, "max_connections_per_peer": 2}},
    }))
    .await;
    let http2 = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    let ping = frame(PING, 0, 0, &[7; 8]);
    let page = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
    let listeners = [
        ("ext_proc", site.ext_proc, &*http2, &*ping),
        ("health", site.health.unwrap(), &*http2, &*ping),
        ("admin", site.admin, b"".as_slice(), page.as_slice()),
    ];
    for (listener, address, start, request) in listeners {
        let (mut first, mut second) = tokio::join!(
            StalledClient::open(address, start, request),
            StalledClient::open(address, start, request)
        );
        let replacing = [
            TcpStream::connect(address).await.unwrap(),
            TcpStream::connect(address).await.unwrap(),
        ];
        assert!(
            first.is_reset().await && second.is_reset().await,
            "{listener}"
        );
        let reason =
            format!("connections_closed_total{{listener=\"{listener}\",reason=\"evicted\"}}");
        assert!(site.metric(&reason).await >= 2.0, "{listener}");
        let open = format!("connections{{listener=\"{listener}\"}}");
        until(&open, async || site.metric(&open).await <= 2.0).await;
        drop(replacing);
    }
    site.stop().await;
}

#[tokio::test]
async fn oversized_header_list_fails_only_its_stream() {
    let site = start(json!({})).await;
    let mut connection =
        RawConnection::open(TcpStream::connect(site.ext_proc).await.unwrap()).await;
    // A literal field `x` of 100,000 bytes without indexing. The default of
    // `listeners.limits.max_header_list_size` is 64 KiB.
    let mut block = vec![0x83, 0x86, 0x84, 0x00, 1, b'x', 0x7f, 0xa1, 0x8c, 0x06];
    block.extend([b'y'; 100_000]);
    connection
        .0
        .write_all(&frame(HEADERS, 5, 1, &block))
        .await
        .unwrap();
    let (kind, stream, _) = connection.next(&[HEADERS, GOAWAY]).await.unwrap();
    assert_eq!((kind, stream), (HEADERS, 1), "status 431");
    assert!(
        connection
            .is_answered(3, "outbound|9002||warmroute.inference.svc.cluster.local")
            .await
    );
    drop(connection);
    site.stop().await;
}
