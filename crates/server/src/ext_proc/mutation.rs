//! Replies to Envoy as wire messages. Headers are always overwritten. The endpoint is also set as
//! dynamic metadata, where `override_host` reads it and clients cannot write it.
//!
//! Decision 0028, Decision 0029.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::HeaderSendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeadersResponse, ImmediateResponse,
    ProcessingResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use warmroute_core::envoy_names::{LB_NAMESPACE, WARMROUTE_NAMESPACE};
use warmroute_core::router::RankEndpoint;

use super::header_changes::HeaderChanges;
use super::headers;
use super::message::BodyMode;
use super::metadata::EXCHANGE_KEY;
use super::reply::{ImmediateReply, RouteReply};
use super::returned_piece::{ExtProcReply, ReturnedPiece};
use super::routing_headers::endpoint_list;
use super::wire::BodyPiece;

/// Key of the candidates' scores.
const SCORES_KEY: &str = "x-gateway-destination-endpoint-scores";

/// Maximum size of a returned piece of a body, in bytes. Envoy accepted every measured size, but
/// small pieces keep its per-stream buffers and flow control effective.
pub const MAX_CHUNK_BYTES: usize = 62_000;

/// The message of Envoy to which a reply belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// The request headers.
    RequestHeaders,
    /// The request body.
    RequestBody,
    /// The response headers.
    ResponseHeaders,
    /// The response body.
    ResponseBody,
}

/// Returns the reply that ends the exchange with an immediate response.
pub fn immediate_response(answer: &ImmediateReply) -> ProcessingResponse {
    let mut changes = HeaderChanges::default();
    changes.set("content-type", "application/json".to_owned());
    for (name, value) in &answer.headers {
        changes.set(*name, value.clone());
    }
    let response = ImmediateResponse {
        status: Some(HttpStatus {
            code: answer.status.into(),
        }),
        headers: changes.into_mutation(),
        body: answer.body.clone(),
        details: answer.details.to_owned(),
        ..ImmediateResponse::default()
    };
    ProcessingResponse {
        response: Some(Response::ImmediateResponse(response)),
        ..ProcessingResponse::default()
    }
}

/// Returns the reply that extends Envoy's message timeout. Envoy accepts it once per message, as a
/// separate reply before the actual one.
pub fn extend_timeout(wait: Duration) -> ProcessingResponse {
    let seconds = i64::try_from(wait.as_secs()).unwrap_or(i64::MAX);
    let timeout = envoy_types::pb::google::protobuf::Duration {
        seconds,
        nanos: wait.subsec_nanos() as i32,
    };
    ProcessingResponse {
        override_message_timeout: Some(timeout),
        ..ProcessingResponse::default()
    }
}

/// Returns the reply that lets a message continue with changed headers.
pub(super) fn continue_with(to: MessageKind, changes: HeaderChanges) -> ProcessingResponse {
    wrap(
        to,
        CommonResponse {
            header_mutation: changes.into_mutation(),
            ..CommonResponse::default()
        },
    )
}

/// Replaces the body of the message.
pub(super) fn with_body(mut reply: ProcessingResponse, body: Vec<u8>) -> ProcessingResponse {
    if let Some(common) = common(&mut reply) {
        common.body_mutation = Some(BodyMutation {
            mutation: Some(Mutation::Body(body)),
        });
    }
    reply
}

/// Lets Envoy select its route again with the changed headers.
pub(super) fn with_route_cache_cleared(mut reply: ProcessingResponse) -> ProcessingResponse {
    if let Some(common) = common(&mut reply) {
        common.clear_route_cache = true;
    }
    reply
}

fn common(reply: &mut ProcessingResponse) -> Option<&mut CommonResponse> {
    match reply.response.as_mut()? {
        Response::RequestHeaders(headers) | Response::ResponseHeaders(headers) => {
            headers.response.as_mut()
        }
        Response::RequestBody(body) | Response::ResponseBody(body) => body.response.as_mut(),
        _ => None,
    }
}

/// Returns a body to Envoy in full-duplex mode, in at least one piece, so that the end of the
/// stream is never lost.
pub(super) fn body_pieces(
    to: MessageKind,
    body: Bytes,
    end: bool,
) -> impl Iterator<Item = ExtProcReply> {
    let count = body.len().div_ceil(MAX_CHUNK_BYTES).max(1);
    (0..count).map(move |piece| {
        let from = piece * MAX_CHUNK_BYTES;
        let part = body.slice(from..body.len().min(from + MAX_CHUNK_BYTES));
        let part = BodyPiece::new(part, end && piece + 1 == count);
        ExtProcReply::Piece(ReturnedPiece::new(to, part))
    })
}

/// Returns the replies to a piece of a body that does not change.
pub(super) fn pass_body(to: MessageKind, mode: BodyMode, piece: &BodyPiece) -> Vec<ExtProcReply> {
    match mode {
        BodyMode::FullDuplexStreamed => {
            body_pieces(to, piece.body.clone(), piece.is_last()).collect()
        }
        // A gRPC message is returned with its flags.
        BodyMode::Grpc => vec![ExtProcReply::Piece(ReturnedPiece::new(to, piece.clone()))],
        _ => vec![continue_with(to, HeaderChanges::default()).into()],
    }
}

/// Returns the reply that lets request trailers continue.
pub fn request_trailers() -> ProcessingResponse {
    ProcessingResponse {
        response: Some(Response::RequestTrailers(TrailersResponse::default())),
        ..ProcessingResponse::default()
    }
}

/// Returns the reply that lets response trailers continue.
pub fn response_trailers() -> ProcessingResponse {
    ProcessingResponse {
        response: Some(Response::ResponseTrailers(TrailersResponse::default())),
        ..ProcessingResponse::default()
    }
}

/// Adds the chosen endpoints as dynamic metadata, and the key of the exchange if another filter
/// needs it. The worker id is a string, because Envoy compares it with strings in endpoint
/// metadata, and a number could not represent ids above 2^53.
pub(super) fn with_destination(
    mut reply: ProcessingResponse,
    to: &RankEndpoint,
    route_reply: &RouteReply,
    exchange: Option<&str>,
) -> ProcessingResponse {
    let target = &route_reply.target;
    let mut fields = HashMap::from([
        (
            headers::ENDPOINT.to_owned(),
            text_value(endpoint_list(to.endpoint, &target.fallbacks)),
        ),
        (
            "worker_id".to_owned(),
            text_value(to.rank.worker.to_string()),
        ),
    ]);
    if let Some(copy) = &route_reply.mirror_to {
        fields.insert(
            headers::PREFILL_DESTINATION.to_owned(),
            text_value(copy.endpoint.to_string()),
        );
    }
    if !target.scores.is_empty() {
        // Gateways treat a higher score as better.
        let score = |cost: f64| Value {
            kind: Some(Kind::NumberValue(1.0 / (1.0 + cost.max(0.0)))),
        };
        let scores = target
            .scores
            .iter()
            .map(|(endpoint, cost)| (endpoint.to_string(), score(*cost)))
            .collect();
        fields.insert(SCORES_KEY.to_owned(), struct_value(scores));
    }
    let mut namespaces = HashMap::from([(LB_NAMESPACE.to_owned(), struct_value(fields))]);
    if let Some(exchange) = exchange {
        let fields = HashMap::from([(EXCHANGE_KEY.to_owned(), text_value(exchange.to_owned()))]);
        namespaces.insert(WARMROUTE_NAMESPACE.to_owned(), struct_value(fields));
    }
    reply.dynamic_metadata = Some(Struct { fields: namespaces });
    reply
}

fn text_value(value: String) -> Value {
    Value {
        kind: Some(Kind::StringValue(value)),
    }
}

fn struct_value(fields: HashMap<String, Value>) -> Value {
    Value {
        kind: Some(Kind::StructValue(Struct { fields })),
    }
}

/// Asks Envoy to stream the response body of this exchange. The mode of the request body, which may
/// still be incomplete, does not change.
pub(super) fn with_response_body_sent(
    mut reply: ProcessingResponse,
    request: BodyMode,
) -> ProcessingResponse {
    reply.mode_override = Some(processing_mode(request, BodyMode::Streamed));
    reply
}

/// Asks Envoy not to send the request body of this exchange.
pub(super) fn without_request_body(mut reply: ProcessingResponse) -> ProcessingResponse {
    reply.mode_override = Some(processing_mode(BodyMode::None, BodyMode::None));
    reply
}

fn processing_mode(request: BodyMode, response: BodyMode) -> ProcessingMode {
    ProcessingMode {
        request_header_mode: HeaderSendMode::Send.into(),
        response_header_mode: HeaderSendMode::Send.into(),
        request_body_mode: request.into(),
        response_body_mode: response.into(),
        // Full-duplex mode requires trailers.
        request_trailer_mode: match request {
            BodyMode::FullDuplexStreamed | BodyMode::Grpc => HeaderSendMode::Send.into(),
            _ => HeaderSendMode::Skip.into(),
        },
        // For the trailers, Envoy keeps the gRPC stream open until the response ends, so warmroute
        // can observe its end.
        response_trailer_mode: HeaderSendMode::Send.into(),
    }
}

fn wrap(to: MessageKind, response: CommonResponse) -> ProcessingResponse {
    let response = Some(response);
    let response = match to {
        MessageKind::RequestHeaders => Response::RequestHeaders(HeadersResponse { response }),
        MessageKind::RequestBody => Response::RequestBody(BodyResponse { response }),
        MessageKind::ResponseHeaders => Response::ResponseHeaders(HeadersResponse { response }),
        MessageKind::ResponseBody => Response::ResponseBody(BodyResponse { response }),
    };
    ProcessingResponse {
        response: Some(response),
        ..ProcessingResponse::default()
    }
}
