//! One-line descriptions of effects.

use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeaderMutation, ProcessingResponse,
};

use super::*;

pub(super) fn describe(effects: Vec<Effect>) -> Vec<String> {
    effects.into_iter().map(describe_one).collect()
}

pub(super) fn describe_one(effect: Effect) -> String {
    match effect {
        Effect::Route(InboundRequest { body, .. }) => match body {
            RequestBody::Absent => "route absent".into(),
            RequestBody::NotReceived => "route body not received".into(),
            RequestBody::Streamed => "route streamed".into(),
            RequestBody::Truncated { received, length } => {
                format!("route truncated {} of {length:?}", received.len())
            }
            RequestBody::Whole(bytes) => format!("route whole {}", bytes.len()),
            RequestBody::TooLarge { received, .. } => format!("route too large {}", received.len()),
            RequestBody::OverBudget { bytes: len, .. } => format!("route over budget {len}"),
        },
        Effect::FirstToken { .. } => "first token".into(),
        Effect::ContentMissing(missing) => format!("content missing {missing:?}"),
        Effect::ResponseStored(id) => format!("stored {id}"),
        Effect::ResponseChunk(bytes) => format!("response chunk {}", bytes.len()),
        Effect::ResponseStarted(head) => format!("status {}", head.status),
        Effect::Completed => "finished".into(),
        Effect::Reply(reply) => describe_reply(&reply.into_message()),
    }
}

fn describe_reply(reply: &ProcessingResponse) -> String {
    if let Some(wait) = &reply.override_message_timeout {
        assert_eq!(
            reply.response, None,
            "Envoy accepts an extended timeout only in a separate reply"
        );
        return format!(
            "extend timeout {}.{:03}",
            wait.seconds,
            wait.nanos / 1_000_000
        );
    }
    let (name, common) = match reply.response.clone().unwrap() {
        Response::RequestHeaders(headers) => ("request headers", headers.response),
        Response::RequestBody(body) => ("request body", body.response),
        Response::ResponseHeaders(headers) => ("response headers", headers.response),
        Response::ResponseBody(body) => ("response body", body.response),
        Response::RequestTrailers(_) => ("request trailers", None),
        Response::ResponseTrailers(_) => ("response trailers", None),
        Response::ImmediateResponse(immediate) => {
            let status = immediate.status.unwrap().code;
            let headers = changes(CommonResponse {
                header_mutation: immediate.headers,
                ..Default::default()
            });
            return format!(
                "immediate {status}{headers} {}",
                String::from_utf8(immediate.body).unwrap()
            );
        }
        other => panic!("unexpected {other:?}"),
    };
    let mut line = name.to_owned();
    line += &common.map(changes).unwrap_or_default();
    if reply.dynamic_metadata.is_some() {
        line += " +metadata";
    }
    if let Some(mode) = &reply.mode_override {
        line += &format!(
            " mode {}/{}",
            mode.request_body_mode, mode.response_body_mode
        );
    }
    line
}

fn changes(common: CommonResponse) -> String {
    let mut line = String::new();
    let HeaderMutation {
        set_headers,
        remove_headers,
    } = common.header_mutation.unwrap_or_default();
    for header in set_headers.into_iter().map(|option| option.header.unwrap()) {
        line += &format!(
            " {}={}",
            header.key,
            String::from_utf8(header.raw_value).unwrap()
        );
    }
    for name in remove_headers {
        line += &format!(" -{name}");
    }
    match common.body_mutation.and_then(|body| body.mutation) {
        Some(Mutation::StreamedResponse(piece)) => {
            line += &format!(
                " {}{}",
                piece.body.len(),
                if piece.end_of_stream { " end" } else { "" }
            );
        }
        Some(Mutation::Body(body)) => {
            line += &format!(" body {}", String::from_utf8(body).unwrap())
        }
        _ => {}
    }
    if common.clear_route_cache {
        line += " +route";
    }
    line
}
