//! Clients of the ext_proc socket that violate the protocol or send messages in an invalid order.

use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use envoy_types::pb::envoy::service::ext_proc::v3::ProtocolConfiguration;
use proto::external_processor_client::ExternalProcessorClient;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use warmroute_testbed::ports::PATIENCE;

use crate::faults::bed::{chat, start};
use crate::routing::bed::RoutingBed;
use crate::support::ext_proc;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Asserts that Envoy's requests are routed exactly, and that no state of other clients remains.
async fn assert_unharmed(bed: &RoutingBed) {
    assert!(
        bed.stack.router().unwrap().is_running(),
        "{}",
        bed.stack.router().unwrap().log_tail()
    );
    bed.wait_unbooked().await;
    for at in 0..3 {
        let answer = bed.send(&chat(&format!("after {at}"), 2)).await;
        assert_eq!(answer.mode(), "exact");
    }
    bed.wait_unbooked().await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn invalid_http2_bytes_are_harmless() {
    let bed = start(1, &[]).await;
    let socket = bed.stack.envoy_setup().ext_proc_socket();
    let mut random = SmallRng::seed_from_u64(3);
    let mut noise = vec![0; 60_000];
    random.fill_bytes(&mut noise);
    // A frame header with a length of 16 MiB, an unknown frame type, and an invalid header block.
    let frames: [&[u8]; 3] = [
        &[255, 255, 255, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 99, 0, 0, 0, 0, 1],
        &[0, 0, 2, 1, 4, 0, 0, 0, 1, 255, 255],
    ];
    let mut cases = vec![
        noise,
        PREFACE[..12].to_vec(),
        PREFACE.to_vec(),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        Vec::new(),
    ];
    cases.extend(frames.map(|frame| [PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0], frame].concat()));
    let mut held = Vec::new();
    for case in &cases {
        let mut left = UnixStream::connect(&socket).await.unwrap();
        // The server may close the connection during the write.
        _ = left.write_all(case).await;
        drop(left);
        let mut stays = UnixStream::connect(&socket).await.unwrap();
        _ = stays.write_all(case).await;
        held.push(stays);
    }
    assert_unharmed(&bed).await;
    // Silent clients stay connected. Connections with invalid bytes are closed by the server.
    let mut answer = Vec::new();
    let disconnected = tokio::time::timeout(PATIENCE, held[0].read_to_end(&mut answer)).await;
    assert!(
        disconnected.is_ok(),
        "the server keeps a connection with invalid bytes open"
    );
    drop(held);
    assert_unharmed(&bed).await;
}

async fn connect(bed: &RoutingBed) -> ExternalProcessorClient<Channel> {
    let endpoint = Endpoint::from_shared(format!(
        "unix://{}",
        bed.stack.envoy_setup().ext_proc_socket().display()
    ));
    ExternalProcessorClient::new(endpoint.unwrap().connect().await.unwrap())
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn lost_peer_leaves_no_booking() {
    let bed = start(1, &[]).await;
    let client = connect(&bed).await;
    let chat = chat("vanishing", 5).to_string();
    let mut open = Vec::new();
    for _ in 0..20 {
        let (sender, messages) = tokio::sync::mpsc::channel(4);
        for mut message in ext_proc::post("/v1/chat/completions", &[], &chat) {
            message.protocol_config = Some(ProtocolConfiguration {
                request_body_mode: 2,
                ..ProtocolConfiguration::default()
            });
            sender.send(message).await.unwrap();
        }
        let messages = tokio_stream::wrappers::ReceiverStream::new(messages);
        open.push((sender, client.clone().process(messages).await.unwrap()));
    }
    bed.wait_total_load("active_requests", 20).await;
    drop((open, client));
    assert_unharmed(&bed).await;
}
