//! Properties of a gateway besides its messages: response headers identify the source of a 503, and
//! replies may stay unread.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, ProcessingRequest, ProcessingResponse,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;
use warmroute_testbed::ports::PATIENCE;

use crate::exchanges::site::ExchangeSite;
use crate::exchanges::wire;

/// One exchange of a gateway.
struct GatewayExchange {
    sender: mpsc::UnboundedSender<ProcessingRequest>,
    replies: Streaming<ProcessingResponse>,
}

impl GatewayExchange {
    /// Sends a request without a body, and asserts that it is routed.
    async fn start(mut gateway: ExternalProcessorClient<Channel>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let headers = json!({":method": "POST", ":path": "/v1/completions"});
        sender
            .send(wire::request(
                &json!({"request_headers": {"headers": headers, "end_of_stream": true}}),
            ))
            .unwrap();
        let replies = gateway
            .process(UnboundedReceiverStream::new(receiver))
            .await
            .unwrap()
            .into_inner();
        let mut call = Self { sender, replies };
        let reply = call.reply().await;
        let endpoint = &reply["dynamic_metadata"]["envoy.lb"]["x-gateway-destination-endpoint"];
        assert!(endpoint.is_string(), "no route: {reply}");
        call
    }

    async fn reply(&mut self) -> Value {
        let reply = timeout(PATIENCE, self.replies.message())
            .await
            .expect("a reply");
        wire::reply(reply.unwrap().expect("a reply"))
    }

    async fn respond(mut self, headers: &Value) {
        self.sender
            .send(wire::request(
                &json!({"response_headers": {"headers": headers}}),
            ))
            .unwrap();
        self.reply().await;
    }
}

/// Returns a configuration with this number of workers.
fn configuration(workers: u32) -> Value {
    let worker = |id| json!({"id": id, "endpoint": format!("192.168.1.{id}:8000")});
    json!({
        "models": [{"name": "m", "block_size": 16}],
        "workers": {"list": (1..=workers).map(worker).collect::<Vec<_>>()},
        "engines": {"parity_check": {"enabled": false}, "discovery": {"enabled": false}},
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unmarked_503_ejects_no_worker() {
    let mut written = configuration(4);
    written["routing"]["overload"] = json!({"backoff": "1ms"});
    let site = ExchangeSite::start(&written).await;
    let unmarked = json!({":status": "503", "content-type": "text/plain"});
    let respond = async |headers: &Value| {
        let exchange = GatewayExchange::start(site.gateway.clone()).await;
        exchange.respond(headers).await
    };
    let out = async || {
        let page = site.page("metrics").await;
        let line = page
            .as_str()
            .unwrap()
            .lines()
            .find(|line| line.starts_with("warmroute_ejected_workers"))
            .unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    for _ in 0..40 {
        respond(&unmarked).await;
    }
    assert_eq!(out().await, 0, "a gateway that suppresses its headers");

    // This response shows that the gateway marks the responses of workers.
    respond(&json!({":status": "200", "x-envoy-upstream-service-time": "3"})).await;
    for _ in 0..40 {
        respond(&json!({":status": "503", "x-envoy-upstream-service-time": "3"})).await;
    }
    assert_eq!(out().await, 0, "the engines are overloaded");
    for _ in 0..40 {
        respond(&unmarked).await;
    }
    assert!(out().await > 0, "Envoy reaches no worker");
    site.stop().await;
}

/// Number of streams in full duplex whose replies Envoy does not read.
const UNREAD_STREAMS: usize = 20;

/// Size of a piece of their bodies, in bytes.
const PIECE: usize = 64 << 10;

/// Maximum number of other exchanges until the uploads have stopped.
const MAX_EXCHANGES: usize = 500;

/// Starts an exchange with an endless body, and counts the pieces that were sent.
async fn start_endless_upload(
    mut gateway: ExternalProcessorClient<Channel>,
    sent: Arc<AtomicUsize>,
) -> Streaming<ProcessingResponse> {
    let headers = json!({":method": "POST", ":path": "/v1/completions"});
    let first = wire::request(&json!({
        "request_headers": {"headers": headers},
        "protocol_config": {"request_body_mode": "FULL_DUPLEX_STREAMED"},
    }));
    let piece = ProcessingRequest {
        request: Some(Request::RequestBody(HttpBody {
            body: vec![b' '; PIECE],
            ..HttpBody::default()
        })),
        ..ProcessingRequest::default()
    };
    let pieces = std::iter::repeat_with(move || {
        sent.fetch_add(1, Ordering::Relaxed);
        piece.clone()
    });
    let messages = tokio_stream::iter(std::iter::once(first).chain(pieces));
    gateway.process(messages).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_replies_do_not_stop_other_streams() {
    let mut written = configuration(1);
    written["requests"]["limits"]["max_body_size"] = json!("64KiB");
    let site = ExchangeSite::start(&written).await;
    let window = PIECE as u32;
    let gateway = site.gateway_with_windows(window, 64 << 20).await;
    let sent = Arc::new(AtomicUsize::new(0));
    let mut unread = Vec::new();
    for _ in 0..UNREAD_STREAMS {
        unread.push(start_endless_upload(gateway.clone(), sent.clone()).await);
    }
    // The uploads have stopped if no piece was sent during several other exchanges.
    let mut idle_exchanges = 0;
    let mut other = Vec::new();
    while idle_exchanges < 10 {
        let before = sent.load(Ordering::Relaxed);
        other.push(GatewayExchange::start(gateway.clone()).await);
        let after = sent.load(Ordering::Relaxed);
        let is_idle = after == before && after >= UNREAD_STREAMS;
        idle_exchanges = if is_idle { idle_exchanges + 1 } else { 0 };
        assert!(other.len() < MAX_EXCHANGES, "{after} pieces were sent");
    }
    // The process cannot be stopped in order, because the uploads do not end.
}
