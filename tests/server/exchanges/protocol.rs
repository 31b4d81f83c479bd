//! Requirements of the ext_proc protocol that hold for any client.

use std::io::Write as _;

use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, ProcessingRequest, ProcessingResponse, StreamedBodyResponse,
};
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::TryStreamExt as _;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::codec::CompressionEncoding;
use tonic::transport::Channel;
use warmroute_testbed::ports::PATIENCE;

use crate::exchanges::raw::{self, CallEnd, frame};
use crate::exchanges::site::ExchangeSite;
use crate::exchanges::wire;

fn configuration() -> Value {
    json!({
        "models": [
            {"name": "m", "tokenizer": "${root}/examples/models/qwen2.5/tokenizer.json.gz"},
        ],
        "workers": {"list": [{"id": 1, "endpoint": "192.168.1.1:8000"}]},
        "gateway": {"default_body_mode": "buffered"},
        "requests": {"limits": {"decision_timeout": "60s", "tokenize_inline_size": "0B"}},
        "engines": {"parity_check": {"enabled": false}, "discovery": {"enabled": false}},
    })
}

fn request_headers(extra: &Value) -> ProcessingRequest {
    let mut headers = json!({":method": "POST", ":path": "/v1/completions", "x-request-id": "r-1"});
    headers
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    wire::request(&json!({"request_headers": {"headers": headers}}))
}

fn whole_body(bytes: usize) -> ProcessingRequest {
    let prompt = "some words of a prompt ".repeat(bytes / 23 + 1);
    let body = json!({"model": "m", "prompt": prompt}).to_string();
    wire::request(&json!({"request_body": {"body": body, "end_of_stream": true}}))
}

fn piece(body: &'static [u8], end_of_stream: bool) -> ProcessingRequest {
    let body = HttpBody {
        body: body.into(),
        end_of_stream,
        grpc_message_compressed: true,
        ..HttpBody::default()
    };
    ProcessingRequest {
        request: Some(Part::RequestBody(body)),
        ..ProcessingRequest::default()
    }
}

fn returned_body(response: Option<Response>) -> Option<StreamedBodyResponse> {
    let (Response::RequestBody(body) | Response::ResponseBody(body)) = response? else {
        return None;
    };
    match body.response?.body_mutation?.mutation? {
        Mutation::StreamedResponse(piece) => Some(piece),
        _ => None,
    }
}

/// Sends these messages, ends the stream and returns all replies.
async fn replies(
    mut gateway: ExternalProcessorClient<Channel>,
    messages: [ProcessingRequest; 2],
) -> Vec<ProcessingResponse> {
    let stream = gateway.process(tokio_stream::iter(messages)).await;
    let replies = stream.unwrap().into_inner().try_collect();
    let replies = timeout(PATIENCE, replies).await;
    replies.expect("the stream ends").unwrap()
}

/// Sends these frames, ends the stream and returns all replies and the status.
async fn call(site: &ExchangeSite, encoding: &str, frames: &[&[u8]]) -> CallEnd {
    let ended = raw::call(site.channel.clone(), encoding, frames.concat());
    timeout(PATIENCE, ended).await.expect("the stream ends")
}

fn plain_frame(message: &ProcessingRequest) -> Vec<u8> {
    frame(false, &message.encode_to_vec())
}

/// Expects the number of replies and the status of a call.
fn expect_end(ended: &CallEnd, replies: usize, status: &str) {
    let found = (ended.replies.len(), ended.status.as_str());
    assert_eq!(found, (replies, status), "{ended:?}");
}

/// Expects the reply to a request body, with a route.
fn expect_routed_body(reply: &ProcessingResponse) {
    let is_body = matches!(reply.response, Some(Response::RequestBody(_)));
    assert!(is_body && reply.dynamic_metadata.is_some(), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_and_unknown_body_modes_get_all_replies() {
    let site = ExchangeSite::start(&configuration()).await;
    for mode in [5, 77] {
        let (sender, receiver) = mpsc::unbounded_channel();
        for message in exchange_with_mode(mode) {
            sender.send(message).unwrap();
        }
        let stream = UnboundedReceiverStream::new(receiver);
        let stream = site.gateway.clone().process(stream).await;
        let mut replies = stream.unwrap().into_inner();
        let mut next = async || {
            timeout(PATIENCE, replies.message())
                .await
                .expect("a reply")
                .unwrap()
                .unwrap()
        };
        let head = next().await;
        assert!(
            matches!(head.response, Some(Response::RequestHeaders(_))),
            "{mode}: {head:?}"
        );
        assert!(
            head.dynamic_metadata.is_some(),
            "{mode}: the request is routed"
        );
        for (body, end) in [(&b"one"[..], false), (b"", false), (b"three", true)] {
            let back = returned_body(next().await.response).unwrap();
            let compressed = back.grpc_message_compressed;
            assert_eq!(
                (&back.body[..], back.end_of_stream, compressed),
                (body, end, true),
                "{mode}"
            );
        }
        assert!(
            matches!(next().await.response, Some(Response::ResponseHeaders(_))),
            "{mode}"
        );
        let back = returned_body(next().await.response).unwrap();
        assert_eq!(
            (&back.body[..], back.end_of_stream),
            (&b"answer"[..], true),
            "{mode}"
        );
        drop(sender);
    }
    site.stop().await;
}

/// Returns the messages of an exchange with this body mode.
fn exchange_with_mode(mode: i32) -> [ProcessingRequest; 6] {
    let mut first = request_headers(&json!({}));
    first.protocol_config = Some(
        envoy_types::pb::envoy::service::ext_proc::v3::ProtocolConfiguration {
            request_body_mode: mode,
            response_body_mode: mode,
            ..Default::default()
        },
    );
    let answer = HttpBody {
        body: b"answer".into(),
        end_of_stream: true,
        ..HttpBody::default()
    };
    let answer = ProcessingRequest {
        request: Some(Part::ResponseBody(answer)),
        ..Default::default()
    };
    let response = wire::request(&json!({"response_headers": {"headers": {":status": "200"}}}));
    [
        first,
        piece(b"one", false),
        piece(b"", false),
        piece(b"three", true),
        response,
        answer,
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_closed_stream_gets_replies_that_are_due() {
    let site = ExchangeSite::start(&configuration()).await;
    // The body is long enough that the half-close arrives while it is tokenized.
    let messages = [request_headers(&json!({})), whole_body(1 << 20)];
    let found = replies(site.gateway.clone(), messages).await;
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[1].dynamic_metadata.is_some(),
        "the reply to the body has a route: {:?}",
        found[1]
    );
    let load = site
        .until("debug/load", |page| page[0]["active_requests"] == 0)
        .await;
    assert_eq!(load[0]["active_requests"], 0, "no booking is left: {load}");
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_message_ends_stream_with_error() {
    let site = ExchangeSite::start(&configuration()).await;
    let first = plain_frame(&request_headers(&json!({})));
    let cases = [
        ("invalid Protobuf message", frame(false, &[0xff; 40])),
        ("truncated", frame(false, b"abc")[..6].to_vec()),
        ("invalid gzip data", frame(true, b"abc")),
    ];
    let count = cases.len();
    for (name, bytes) in cases {
        let ended = call(&site, "gzip", &[&first, &bytes]).await;
        assert_eq!(
            ended.replies.len(),
            1,
            "{name}: only the preceding message has a reply: {ended:?}"
        );
        assert_ne!(ended.status, "0", "{name}");
    }
    expect_end(&call(&site, "identity", &[&first]).await, 1, "0");
    let series = "warmroute_invalid_messages_total";
    let page = site.page("metrics").await;
    assert!(
        page.as_str()
            .unwrap()
            .contains(&format!("{series} {count}")),
        "{page}"
    );
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversize_buffered_body_is_routed_by_its_headers() {
    let mut written = configuration();
    written["requests"]["limits"]["max_body_size"] = json!("1MiB");
    let site = ExchangeSite::start(&written).await;
    let first = plain_frame(&request_headers(&json!({"content-length": "3145728"})));
    let body = plain_frame(&whole_body(3 << 20));
    let ended = call(&site, "identity", &[&first, &body]).await;
    expect_end(&ended, 2, "0");
    expect_routed_body(&ended.replies[1]);
    let page = site.page("metrics").await;
    let page = page.as_str().unwrap();
    for series in [
        "invalid_messages_total 1",
        "degradations_total{reason=\"body_too_large\"} 1",
    ] {
        assert!(
            page.contains(&format!("warmroute_{series}")),
            "{series}: {page}"
        );
    }

    // In full-duplex mode, bytes that were not read cannot be returned.
    let mut duplex = request_headers(&json!({}));
    let modes = json!({"protocol_config": {"request_body_mode": "FULL_DUPLEX_STREAMED"}});
    duplex.protocol_config = wire::request(&modes).protocol_config;
    let ended = call(&site, "identity", &[&plain_frame(&duplex), &body]).await;
    // The status is "out of range".
    expect_end(&ended, 0, "11");
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversize_body_waits_in_the_queue() {
    let mut written = configuration();
    written["requests"]["limits"]["max_body_size"] = json!("1MiB");
    written["queue"] =
        json!({"prefill_busy_threshold": 1, "timeout": "60s", "refresh_after": "0s"});
    let site = ExchangeSite::start(&written).await;
    let (busy, messages) = mpsc::unbounded_channel();
    busy.send(request_headers(&json!({}))).unwrap();
    busy.send(whole_body(1000)).unwrap();
    let exchange = site
        .gateway
        .clone()
        .process(UnboundedReceiverStream::new(messages))
        .await;
    let mut replies = exchange.unwrap().into_inner();
    for _ in 0..2 {
        replies.message().await.unwrap().unwrap();
    }
    let first = plain_frame(&request_headers(&json!({"x-request-id": "r-2"})));
    let body = plain_frame(&whole_body(3 << 20));
    let waiting = tokio::spawn(raw::call(
        site.channel.clone(),
        "identity",
        [first, body].concat(),
    ));
    let waits = |page: &Value| {
        page.as_str()
            .is_some_and(|text| text.contains("queue_requests{class=\"default\"} 1"))
    };
    let page = site.until("metrics", waits).await;
    assert!(waits(&page), "the request is not queued: {page}");
    drop((busy, replies));
    let ended = timeout(PATIENCE, waiting)
        .await
        .expect("the stream ends")
        .unwrap();
    assert_eq!(ended.status, "0", "{ended:?}");
    expect_routed_body(ended.replies.last().unwrap());
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gzip_messages_are_limited_by_decompressed_size() {
    let mut written = configuration();
    written["requests"]["limits"]["max_body_size"] = json!("1MiB");
    let site = ExchangeSite::start(&written).await;
    let messages = [request_headers(&json!({})), whole_body(100_000)];
    let gateway = site.gateway.clone();
    let gateway = gateway.send_compressed(CompressionEncoding::Gzip);
    let found = replies(gateway, messages).await;
    assert!(
        found.len() == 2 && found[1].dynamic_metadata.is_some(),
        "{found:?}"
    );
    let bomb = {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder
            .write_all(&whole_body(8 << 20).encode_to_vec())
            .unwrap();
        encoder.finish().unwrap()
    };
    assert!(bomb.len() < 1 << 20);
    let first = plain_frame(&request_headers(&json!({})));
    let ended = call(&site, "gzip", &[&first, &frame(true, &bomb)]).await;
    // The status is "resource exhausted".
    expect_end(&ended, 1, "8");
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subset_header_of_client_is_removed_and_ignored() {
    const SUBSET: &str = "x-gateway-destination-endpoint-subset";
    let mut written = configuration();
    written["workers"]["list"] = json!([{"id": 1, "endpoint": "192.168.1.1:8000"}, {"id": 2, "endpoint": "192.168.1.2:8000"}]);
    let site = ExchangeSite::start(&written).await;
    for mode in ["BUFFERED", "FULL_DUPLEX_STREAMED", "STREAMED"] {
        let mut first = request_headers(&json!({SUBSET: "192.168.1.2:8000"}));
        let only = json!({
            "metadata": {"envoy.lb.subset_hint": {SUBSET: ["192.168.1.1:8000"]}},
            "protocol_config": {"request_body_mode": mode},
        });
        let decoded = wire::request(&only);
        (first.metadata_context, first.protocol_config) =
            (decoded.metadata_context, decoded.protocol_config);
        let mut removed = Vec::new();
        let mut chosen = Value::Null;
        for reply in replies(site.gateway.clone(), [first, whole_body(10)]).await {
            let shown = wire::reply(reply);
            removed.extend(
                shown["request_headers"]["remove_headers"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .cloned(),
            );
            let to = &shown["dynamic_metadata"]["envoy.lb"]["x-gateway-destination-endpoint"];
            chosen = if to.is_null() { chosen } else { to.clone() };
        }
        assert_eq!(removed, [json!(SUBSET)], "{mode}");
        assert_eq!(
            chosen, "192.168.1.1:8000",
            "{mode}: only the metadata of the gateway counts"
        );
    }
    site.stop().await;
}
