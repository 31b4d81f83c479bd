//! Memory of requests, connections and xDS streams in a warmroute process, and of queries to the
//! shared cache.

use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_client::EndpointDiscoveryServiceClient;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::worker::BlockSize;
use warmroute_engines::shared_cache::{SharedCacheClient, SharedCacheConfig};
use warmroute_settings::DurationSetting;

use crate::support::ext_proc;
use crate::support::process::WarmrouteProcess;
use crate::{MemoryBound, MemoryMeter, measure};

/// Maximum number of clusters in an xDS stream.
const NAMES: usize = 4096;
/// Default of `listeners.limits.max_connections`.
const CONNECTIONS: u64 = 1024;
/// Number of blocks in a query to the shared cache.
const QUERIED: u64 = 1 << 16;

pub(crate) fn meter(process: &WarmrouteProcess) -> MemoryMeter {
    MemoryMeter::start(&process.child.pid().to_string())
}

/// Exchange that has received no reply yet.
pub(crate) type PendingExchange = (
    UnboundedSender<ProcessingRequest>,
    Streaming<ProcessingResponse>,
);

pub(crate) async fn exchange(
    channel: Channel,
    messages: impl IntoIterator<Item = ProcessingRequest>,
) -> PendingExchange {
    let (sender, receiver) = unbounded_channel();
    for message in messages {
        sender.send(message).unwrap();
    }
    let mut client = ExternalProcessorClient::new(channel);
    let replies = client.process(UnboundedReceiverStream::new(receiver)).await;
    (sender, replies.unwrap().into_inner())
}

/// Returns a completion request with a prompt of tokens. Each token except the first one takes two
/// bytes in the body.
pub(crate) fn completion(first: usize, tokens: usize) -> [ProcessingRequest; 2] {
    let tokens = format!("{first}{}", ",1".repeat(tokens - 1));
    let body = format!(r#"{{"model":"m","prompt":"x","nvext":{{"token_data":[{tokens}]}}}}"#);
    ext_proc::post("/v1/completions", &[], &body)
}

/// Asserts the memory per token: 2 bytes in the body, which stays in the receive buffer of the gRPC
/// stream, and 1 byte in the block hashes. The token ids, 4 bytes each, are dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn tokens_of_waiting_requests() {
    const REQUESTS: usize = 32;
    const TOKENS: usize = 400_000;
    let process = WarmrouteProcess::start(
        json!({
            "queue": {"prefill_busy_threshold": 1, "timeout": "600s", "refresh_after": "0s"},
            "requests": {"limits": {"decision_timeout": "60s"}, "clients": {"trusted": true}},
        }),
        &[],
    )
    .await;
    let channel = process.channel(process.grpc).await;
    let _busy = process.open(channel.clone(), "m").await;
    let meter = meter(&process);
    let mut waiting = Vec::new();
    for count in 1..=REQUESTS {
        waiting.push(exchange(channel.clone(), completion(count, TOKENS)).await);
        process
            .wait_metric(
                "queue_prompt_tokens{class=\"default\"}",
                (count * TOKENS) as f64,
            )
            .await;
    }
    let entries = (REQUESTS * TOKENS) as u64;
    meter.compare(
        "messages::tokens_of_waiting_requests",
        MemoryBound { entries, bytes: 6 },
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn connections_of_a_listener() {
    let limits = json!({"max_connections": CONNECTIONS, "max_connections_per_peer": CONNECTIONS, "handshake_timeout": "600s"});
    let process = WarmrouteProcess::start(json!({"listeners": {"limits": limits}}), &[]).await;
    let meter = meter(&process);
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(exchange(process.channel(process.grpc).await, []).await);
    }
    process
        .wait_metric("connections{listener=\"ext_proc\"}", CONNECTIONS as f64)
        .await;
    let mut refused = TcpStream::connect(("127.0.0.1", process.grpc))
        .await
        .unwrap();
    assert_eq!(
        refused.read(&mut [0; 64]).await.unwrap_or(0),
        0,
        "the connection is accepted"
    );
    process
        .wait_metric("connections_refused_total{listener=\"ext_proc\"}", 1.0)
        .await;
    meter.compare(
        "messages::connections_of_a_listener",
        MemoryBound {
            entries: CONNECTIONS,
            bytes: 64 << 10,
        },
    );
}

struct XdsStream {
    sender: UnboundedSender<DiscoveryRequest>,
    responses: Streaming<envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse>,
}

impl XdsStream {
    async fn open(channel: Channel) -> Self {
        let (sender, receiver) = unbounded_channel();
        let mut client = EndpointDiscoveryServiceClient::new(channel);
        let responses = client
            .stream_endpoints(UnboundedReceiverStream::new(receiver))
            .await
            .unwrap()
            .into_inner();
        Self { sender, responses }
    }

    /// Requests `count` clusters with names of `bytes` bytes each, among them the cluster of all
    /// workers.
    fn name(&self, count: usize, bytes: usize) {
        let unknown = (1..count).map(|at| format!("{at:0>bytes$}"));
        let resource_names = unknown.chain(["workers".to_owned()]).collect();
        let type_url =
            "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment".to_owned();
        self.sender
            .send(DiscoveryRequest {
                resource_names,
                type_url,
                ..DiscoveryRequest::default()
            })
            .unwrap();
    }

    /// Requests resources of unknown types with names of `bytes` bytes each.
    fn ask_for_other_types(&self, count: usize, bytes: usize) {
        for at in 0..count {
            let type_url = format!("{at}{}", "x".repeat(bytes));
            self.sender
                .send(DiscoveryRequest {
                    type_url,
                    ..DiscoveryRequest::default()
                })
                .unwrap();
        }
    }

    async fn refusal(mut self) -> Option<Code> {
        self.responses
            .message()
            .await
            .err()
            .map(|status| status.code())
    }
}

/// Counts the names that streams request, the names in responses, and the names on `/debug/envoys`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn names_of_xds_streams() {
    const STREAMS: usize = 16;
    let process = WarmrouteProcess::start(json!({"envoy": {"xds": {}}}), &[]).await;
    let channel = process.channel(process.grpc).await;
    let meter = meter(&process);
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = XdsStream::open(channel.clone()).await;
        stream.ask_for_other_types(64, 100 << 10);
        // Half of the allowed bytes, because the names in responses count as well.
        stream.name(NAMES, 128);
        let response = stream.responses.message().await.unwrap().unwrap();
        assert_eq!(
            response.resources.len(),
            1,
            "the endpoints of the only known cluster"
        );
        streams.push(stream);
    }
    meter.compare(
        "messages::names_of_xds_streams",
        MemoryBound {
            entries: (STREAMS * NAMES) as u64,
            bytes: 1280,
        },
    );
    for (count, bytes) in [(NAMES + 1, 128), (NAMES, 260)] {
        let stream = XdsStream::open(channel.clone()).await;
        stream.name(count, bytes);
        assert_eq!(
            stream.refusal().await,
            Some(Code::ResourceExhausted),
            "{count} names of {bytes} bytes"
        );
    }
    assert_eq!(process.metric("xds_streams").await, STREAMS as f64);
}

/// Runs the maximum number of concurrent queries, each for a prompt three times as long as a query.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn queries_of_the_shared_cache() {
    const QUERIES: usize = 64;
    measure("messages::queries_of_the_shared_cache", 64, || {
        let locals = (0..3 * QUERIED).map(LocalHash).collect();
        let prompt = BlockHashes::from_locals(48 << 16, BlockSize::new(16).unwrap(), locals);
        let runtime = Runtime::new().unwrap();
        let held = runtime.block_on(hold_queries(QUERIES, Arc::new(prompt)));
        (QUERIES as u64 * QUERIED, (held, runtime))
    });
}

/// Sends queries to a server that does not read them completely.
async fn hold_queries(count: usize, prompt: Arc<BlockHashes>) -> (JoinSet<()>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = SharedCacheConfig {
        url: format!("http://{}/lookup", listener.local_addr().unwrap()),
        timeout: DurationSetting::seconds(600),
    };
    let cache = Arc::new(SharedCacheClient::new(&config).unwrap());
    let mut queries = JoinSet::new();
    for _ in 0..count {
        let cache = cache.clone();
        let prompt = prompt.clone();
        queries.spawn(async move { drop(cache.query("m", &prompt).await) });
    }
    let mut connections = Vec::new();
    while connections.len() < count {
        let mut connection = listener.accept().await.unwrap().0;
        connection.read_exact(&mut [0; 1024]).await.unwrap();
        connections.push(connection);
    }
    (queries, connections)
}
