//! Upgrades to WebSocket on paths whose requests have a body otherwise.

use std::net::SocketAddr;

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::PATIENCE;

use crate::modes::gateway::{ManagerChange, ModeGateway};
use crate::modes::uploads::EnvoyBodyMode;
use crate::routing::bed::engine;

/// Worker that accepts every upgrade and returns each byte of the tunnel.
struct TunnelWorker {
    address: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

impl TunnelWorker {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(echo_frames(stream));
            }
        };
        let task = AbortOnDropHandle::new(tokio::spawn(serve));
        Self {
            address,
            _task: task,
        }
    }

    fn engine(&self, id: u64) -> EngineSpec {
        engine(id).with_worker_fields(json!({"endpoint": self.address.to_string()}))
    }
}

async fn echo_frames(stream: TcpStream) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    read_head(&mut stream).await?;
    let head =
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let mut frames = [0; 64];
    loop {
        let length = stream.read(&mut frames).await?;
        if length == 0 {
            return Ok(());
        }
        stream.write_all(&frames[..length]).await?;
    }
}

/// Reads to the end of the headers. Returns the first line.
async fn read_head(stream: &mut BufReader<TcpStream>) -> std::io::Result<String> {
    let mut first = String::new();
    stream.read_line(&mut first).await?;
    let mut line = String::new();
    while stream.read_line(&mut line).await? > 2 {
        line.clear();
    }
    Ok(first)
}

/// Opens a tunnel and exchanges two frames.
async fn exchange_frames(port: u16, path: &str) -> std::io::Result<()> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut stream = BufReader::new(stream);
    let head = format!(
        "GET {path} HTTP/1.1\r\nhost: engine\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let first = read_head(&mut stream).await?;
    assert!(first.starts_with("HTTP/1.1 101"), "{path} {first}");
    for frame in [b"first", b"again"] {
        stream.write_all(frame).await?;
        let mut returned = [0; 5];
        stream.read_exact(&mut returned).await?;
        assert_eq!(&returned, frame, "{path}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_is_routed_without_waiting_for_a_body() {
    let worker = TunnelWorker::start().await;
    let modes = [
        EnvoyBodyMode::Buffered,
        EnvoyBodyMode::Partial,
        EnvoyBodyMode::Duplex,
        EnvoyBodyMode::DuplexBothWays,
    ];
    let changes: Vec<ManagerChange> = modes
        .into_iter()
        .map(|mode| -> ManagerChange {
            let change = mode.change();
            Box::new(move |manager| {
                change(manager);
                manager.allow_upgrades();
            })
        })
        .collect();
    // After this timeout, full-duplex mode routes a request without its body.
    let more = json!({"requests": {"limits": {"upload_timeout": "1h"}}});
    let gateway = ModeGateway::start(&[worker.engine(1)], more, &changes).await;
    for (port, mode) in gateway.ports.iter().zip(modes) {
        for path in ["/v1/responses", "/v1/chat/completions", "/v1/realtime"] {
            let exchanged = tokio::time::timeout(PATIENCE, exchange_frames(*port, path)).await;
            assert!(matches!(exchanged, Ok(Ok(()))), "{mode:?} {path}");
        }
    }
    gateway.wait_idle().await;
}
