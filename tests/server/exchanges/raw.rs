//! A gRPC call made of raw frames, for messages that a generated client cannot send.

use std::future::poll_fn;
use std::pin::Pin;

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use http_body::Body as _;
use prost::Message as _;
use tonic::codegen::{Service as _, http};
use tonic::transport::Channel;

const PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// Returns one gRPC frame.
pub(crate) fn frame(compressed: bool, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[u8::from(compressed)], &length[..], message].concat()
}

/// Replies and final status of a call.
#[derive(Debug)]
pub(crate) struct CallEnd {
    pub(crate) replies: Vec<ProcessingResponse>,
    pub(crate) status: String,
}

/// Sends these frames, half-closes the stream, and reads the replies up to the end.
pub(crate) async fn call(mut channel: Channel, encoding: &str, frames: Vec<u8>) -> CallEnd {
    let request = http::Request::post(PATH)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-encoding", encoding)
        .body(tonic::body::Body::new(axum::body::Body::from(frames)))
        .unwrap();
    poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let response = channel.call(request).await.unwrap();
    let (head, mut body) = response.into_parts();
    let mut received = Vec::new();
    let mut trailers = head.headers;
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        match frame.unwrap().into_data() {
            Ok(data) => received.extend_from_slice(&data),
            Err(frame) => trailers.extend(frame.into_trailers().unwrap()),
        }
    }
    let status = trailers["grpc-status"].to_str().unwrap().to_owned();
    CallEnd {
        replies: replies(&received),
        status,
    }
}

fn replies(mut received: &[u8]) -> Vec<ProcessingResponse> {
    let mut replies = Vec::new();
    while let Some((head, rest)) = received.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let (message, rest) = rest.split_at(length);
        replies.push(ProcessingResponse::decode(message).unwrap());
        received = rest;
    }
    replies
}
