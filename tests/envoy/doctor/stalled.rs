//! Engines and Envoys that accept requests and never complete a response.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

use crate::doctor::bed::{doctor, write};

/// Starts a server that responds to `/health` and never completes any other response.
async fn stalling_engine() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = vec![0; 65_536];
                let length = socket.read(&mut request).await.unwrap_or(0);
                let promised = if request[..length].starts_with(b"GET /health ") {
                    0
                } else {
                    1000
                };
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {promised}\r\n\r\n");
                _ = socket.write_all(head.as_bytes()).await;
                std::future::pending::<()>().await;
            });
        }
    });
    address
}

/// Starts a server that accepts connections and never sends anything.
async fn silent_publisher() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((socket, _)) = listener.accept().await {
            open.push(socket);
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalling_engine_is_named_within_ten_seconds() {
    let engine = stalling_engine().await;
    let publisher = silent_publisher().await;
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "listeners": {"ext_proc": {"unix_socket": dir.path().join("ext_proc.sock")}},
        "models": [{"name": "m"}],
        "workers": {
            "list": [
                {
                    "id": 1,
                    "endpoint": engine.to_string(),
                    "data_parallel": {"start": 0, "size": 8},
                    "kv_events": {"endpoint": format!("tcp://{publisher}")},
                },
            ],
        },
    });
    let file = write(dir.path(), &config);
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command
        .args(["doctor", "--config"])
        .arg(&file)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let started = Instant::now();
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let waiting = async {
        let mut others = Vec::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.starts_with("waiting for ") {
                return line;
            }
            others.push(line);
        }
        panic!("the doctor exited without a progress line: {others:#?}");
    };
    let line = tokio::time::timeout(Duration::from_secs(10), waiting)
        .await
        .expect("a progress line within 10 s");
    assert!(line.contains(&format!("worker 1 at {engine} (")), "{line}");
    assert!(
        started.elapsed() >= Duration::from_secs(4),
        "no progress line within the first seconds"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_envoy_does_not_delay_engines() {
    let silent = silent_publisher().await;
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "listeners": {"ext_proc": {"unix_socket": dir.path().join("ext_proc.sock")}},
        "models": [{"name": "m"}],
        "workers": {"list": [{"id": 1, "endpoint": silent.to_string()}]},
        "engines": {"http": {"timeout": "3s"}},
    });
    let started = Instant::now();
    let admin = format!("http://{silent}");
    let found = doctor(
        &write(dir.path(), &config),
        &["--no-canary", "--envoy-admin", &admin],
    )
    .await;
    // Without concurrency, the two timeouts would take 6 s, and the other pages of the engine 9 s.
    assert!(
        started.elapsed() < Duration::from_millis(5500),
        "{:?}",
        started.elapsed()
    );
    let wrong = found.wrong();
    assert!(
        wrong.contains(&("error", "engine.reachable")) && wrong.contains(&("error", "envoy.admin")),
        "{wrong:?}"
    );
}
