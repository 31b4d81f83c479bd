use std::path::Path;

use bytes::Bytes;
use serde_json::json;
use warmroute_core::worker::{BlockSize, EventSource, SocketAttach, WorkerId};
use warmroute_doctor::engine::check_worker;
use warmroute_doctor::engine::facts::AttachOutcome;
use warmroute_engines::kv_events::event_probe::ProbedBatch;
use warmroute_server::config::WorkerSource;
use warmroute_settings::ByteSize;
use zeromq::{PubSocket, Socket as _, SocketSend as _};

use super::*;

/// Returns the batch that doctor receives from an engine that publishes payloads of 2 MiB.
async fn receive_batch(max_message: ByteSize) -> ProbedBatch {
    let text = json!({
        "models": [{"name": "m"}],
        "workers": {"list": [{"id": 1, "endpoint": "127.0.0.1:1"}]},
        "engines": {"kv_events": {"max_message_size": max_message}},
    });
    let config = Config::parse(Path::new("warmroute.yaml"), text.to_string().as_bytes());
    let config = config.unwrap_or_else(|errors| panic!("{errors:?}"));
    let client = EngineClient::new(&config.engines.http).unwrap();
    let progress = DoctorProgress::default();
    let collector = FactCollector {
        config: &config,
        workers: &[],
        client,
        models: HashMap::new(),
        timeout: Duration::from_secs(5),
        sends_canaries: false,
        progress,
    };
    let mut engine = PubSocket::new();
    let endpoint = engine.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let publishing = tokio::spawn(async move {
        let frames = [
            Bytes::from_static(b"kv"),
            Bytes::from_static(&[0; 8]),
            vec![0; 2 << 20].into(),
        ];
        loop {
            engine
                .send(frames.to_vec().try_into().unwrap())
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let worker = Worker::new(
        WorkerId(1),
        "127.0.0.1:1".parse().unwrap(),
        "m".into(),
        BlockSize::new(16).unwrap(),
    );
    let source = EventSource {
        endpoint,
        topic: String::new(),
        attach: SocketAttach::Connect,
        replay: None,
    };
    let (probe, attached) = collector.attach(&worker, &source).await;
    assert!(matches!(
        attached,
        AttachOutcome::Attached(SocketAttach::Connect)
    ));
    let message = tokio::time::timeout(Duration::from_secs(30), probe.unwrap().next_message())
        .await
        .unwrap()
        .unwrap();
    publishing.abort();
    message
}

/// Starts an engine that responds to `/health`, and begins every other response without completing
/// it. Returns its address.
async fn stalling_engine() -> std::net::SocketAddr {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = vec![0; 65_536];
                let length = socket.read(&mut request).await.unwrap_or(0);
                let length_of_body = if request[..length].starts_with(b"GET /health ") {
                    0
                } else {
                    1000
                };
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length_of_body}\r\n\r\n");
                _ = socket.write_all(head.as_bytes()).await;
                std::future::pending::<()>().await;
            });
        }
    });
    address
}

#[tokio::test]
async fn stalling_engine_leaves_facts_of_complete_steps() {
    let text = json!({
        "models": [{"name": "m"}],
        "workers": {"list": [{"id": 1, "endpoint": stalling_engine().await.to_string()}]},
        "engines": {"http": {"timeout": "100ms"}},
    });
    let config = Config::parse(Path::new("warmroute.yaml"), text.to_string().as_bytes()).unwrap();
    let WorkerSource::Fixed(workers) = config.worker_source() else {
        panic!("the workers are not a fixed list")
    };
    let client = EngineClient::new(&config.engines.http).unwrap();
    let progress = DoctorProgress::default();
    let collector = FactCollector {
        config: &config,
        workers: &workers,
        client,
        models: HashMap::new(),
        timeout: Duration::from_secs(60),
        sends_canaries: true,
        progress,
    };
    let deadline = Duration::from_secs(3);
    let facts = collector.collect_within(&workers[0], deadline).await;
    assert_eq!(
        facts.overdue_step,
        Some(OverdueStep {
            name: "rank 0: KV events and canary".to_owned(),
            deadline
        })
    );
    assert!(facts.health.is_ok(), "{:?}", facts.health);
    let found = check_worker(&facts);
    let finding = found
        .iter()
        .find(|finding| finding.check == "engine.deadline")
        .unwrap();
    assert!(
        finding
            .message
            .starts_with("not complete within 3s: rank 0: KV events and canary"),
        "{}",
        finding.message
    );
}

#[tokio::test]
async fn event_messages_have_the_configured_limit() {
    let limited = receive_batch(ByteSize::mib(1)).await;
    assert_eq!(
        limited.batch,
        Err("a message exceeds the message limit".to_owned())
    );
    let complete = receive_batch(ByteSize::mib(3)).await;
    assert_ne!(complete.batch, limited.batch, "the message is not received");
    assert_eq!(complete.topic, "kv");
}
