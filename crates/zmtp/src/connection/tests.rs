use tokio::io::{DuplexStream, duplex};
use tokio::time::advance;

use super::*;
use crate::error::ProtocolError;
use crate::greeting::greeting;
use crate::session::{MessageLimits, SocketRole};

const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";

fn handshake_with(
    stream: DuplexStream,
) -> impl Future<Output = Result<ZmtpConnection<DuplexStream>, ZmtpError>> {
    let session = ZmtpSession::new(
        SocketRole::Sub {
            topic: Bytes::new(),
        },
        MessageLimits::default(),
    );
    ZmtpConnection::handshake(stream, session, ConnectionTiming::default())
}

/// Connects to a peer of the given minor version. The peer then reads the local handshake.
async fn connected(minor: u8) -> (ZmtpConnection<DuplexStream>, DuplexStream) {
    let (ours, mut peer) = duplex(1 << 16);
    let mut hello = greeting();
    hello[11] = minor;
    peer.write_all(&hello).await.unwrap();
    peer.write_all(READY).await.unwrap();
    let connection = handshake_with(ours).await.unwrap();
    let mut handshake = vec![0; 64 + READY.len() + if minor == 0 { 3 } else { 12 }];
    peer.read_exact(&mut handshake).await.unwrap();
    (connection, peer)
}

#[tokio::test(start_paused = true)]
async fn peer_that_stalls_in_the_handshake_times_out() {
    let greeting = greeting();
    for sent in [
        &b""[..],
        &greeting[..10],
        &greeting,
        &[&greeting[..], &READY[..10]].concat(),
    ] {
        let (ours, mut peer) = duplex(1024);
        peer.write_all(sent).await.unwrap();
        let began = Instant::now();
        assert!(matches!(
            handshake_with(ours).await,
            Err(ZmtpError::HandshakeTimeout(_))
        ));
        assert_eq!(began.elapsed(), ConnectionTiming::default().handshake);
    }
}

#[tokio::test(start_paused = true)]
async fn silent_peer_with_heartbeats_is_disconnected() {
    let (mut connection, mut peer) = connected(1).await;
    let began = Instant::now();
    assert!(matches!(
        connection.next_event().await,
        Err(ZmtpError::HeartbeatTimeout(_))
    ));
    assert_eq!(began.elapsed(), ConnectionTiming::default().idle_timeout);
    let mut pings = [0; 18];
    peer.read_exact(&mut pings).await.unwrap();
    assert_eq!(&pings, b"\x04\x07\x04PING\x00\x00\x04\x07\x04PING\x00\x00");
}

#[tokio::test(start_paused = true)]
async fn peer_that_answers_heartbeats_stays_connected() {
    let (mut connection, mut peer) = connected(1).await;
    tokio::spawn(async move {
        let mut ping = [0; 9];
        for _ in 0..10 {
            peer.read_exact(&mut ping).await.unwrap();
            peer.write_all(b"\x04\x05\x04PONG").await.unwrap();
        }
        peer.write_all(b"\x00\x02ok").await.unwrap();
        std::future::pending::<()>().await;
    });
    let event = connection.next_event().await.unwrap();
    assert_eq!(
        event,
        SessionEvent::Message(vec![Bytes::from_static(b"ok")])
    );
}

#[tokio::test(start_paused = true)]
async fn peer_without_heartbeats_may_be_silent() {
    let (mut connection, mut peer) = connected(0).await;
    let hour = Duration::from_secs(3600);
    assert!(
        timeout(hour, connection.next_event()).await.is_err(),
        "still connected"
    );
    drop(connection);
    let mut sent = Vec::new();
    peer.read_to_end(&mut sent).await.unwrap();
    assert_eq!(sent, b"");
}

#[tokio::test(start_paused = true)]
async fn busy_consumer_neither_times_out_nor_stops_heartbeats() {
    let (mut connection, mut peer) = connected(1).await;
    let minute = Duration::from_secs(60);
    connection
        .wait_for(tokio::time::sleep(minute))
        .await
        .unwrap();
    let mut pings = vec![0; 5 * 9];
    peer.read_exact(&mut pings).await.unwrap();
    peer.write_all(b"\x00\x02ok").await.unwrap();
    assert!(matches!(
        connection.next_event().await,
        Ok(SessionEvent::Message(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn peer_that_pings_and_never_reads_is_disconnected() {
    let (ours, mut peer) = duplex(256);
    peer.write_all(&greeting()).await.unwrap();
    peer.write_all(READY).await.unwrap();
    let mut connection = handshake_with(ours).await.unwrap();
    let flood = tokio::spawn(async move {
        let mut sent = 0_u64;
        while peer.write_all(b"\x04\x07\x04PING\x00\x00").await.is_ok() {
            sent += 1;
        }
        sent
    });
    assert!(matches!(
        connection.next_event().await,
        Err(ZmtpError::HeartbeatTimeout(_))
    ));
    assert!(
        connection.session.output().capacity() <= 4 * READ_SIZE,
        "replies do not accumulate"
    );
    drop(connection);
    assert!(flood.await.unwrap() < 1000);
}

#[tokio::test(start_paused = true)]
async fn cancelled_reads_lose_nothing() {
    let (mut connection, mut peer) = connected(1).await;
    let expected: Vec<Vec<u8>> = (1..=50_u8)
        .map(|length| vec![length; usize::from(length)])
        .collect();
    let wire: Vec<u8> = expected
        .iter()
        .flat_map(|body| [&[0, body[0]], &body[..]].concat())
        .collect();
    tokio::spawn(async move {
        for piece in wire.chunks(3) {
            peer.write_all(piece).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        std::future::pending::<()>().await;
    });
    let mut received = Vec::new();
    while received.len() < expected.len() {
        if let Ok(event) = timeout(Duration::from_micros(500), connection.next_event()).await {
            let SessionEvent::Message(frames) = event.unwrap() else {
                panic!("not a message")
            };
            received.push(frames[0].to_vec());
        }
        advance(Duration::from_micros(100)).await;
    }
    assert_eq!(received, expected);
}

#[tokio::test]
async fn closed_and_wrong_peers_are_reported() {
    let (ours, peer) = duplex(64);
    drop(peer);
    assert!(matches!(
        handshake_with(ours).await,
        Err(ZmtpError::Io(_) | ZmtpError::ClosedInHandshake)
    ));
    let (ours, mut peer) = duplex(1024);
    peer.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        .await
        .unwrap();
    let error = handshake_with(ours).await.err().unwrap();
    assert!(
        matches!(error, ZmtpError::Protocol(ProtocolError::Signature)),
        "{error}"
    );
}
