//! What we ask Envoy to change, as wire messages. Headers are always set by overwriting, the endpoint goes into dynamic
//! metadata as well: `override_host` reads it there, where no client can put it.

use std::collections::HashMap;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::{
    BodySendMode, HeaderSendMode,
};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse,
    ProcessingResponse, StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};

use super::contract::{Name, endpoints};
use super::exchange::Directions;
use super::headers;
use super::message::BodyMode;
use super::metadata::{EXCHANGE, LB, OURS};
use super::wire::Piece;
use crate::router::Destination;

/// Key of the candidates' scores.
const SCORES: &str = "x-gateway-destination-endpoint-scores";

/// Largest piece of body sent back in one message. Envoy took any size that was measured; small pieces keep its
/// per-stream buffers, and with them the flow control, in charge.
pub const CHUNK: usize = 62_000;

/// Which message of Envoy an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// The request headers.
    RequestHeaders,
    /// The request body.
    RequestBody,
    /// The response headers.
    ResponseHeaders,
    /// The response body.
    ResponseBody,
}

/// Changes of the headers in one answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderChanges {
    set: Vec<(Name, String)>,
    remove: Vec<Name>,
}

impl HeaderChanges {
    /// Removes headers.
    pub fn removing(names: Vec<Name>) -> Self {
        Self {
            set: Vec::new(),
            remove: names,
        }
    }

    /// Removes one header more.
    pub fn remove(&mut self, name: impl Into<Name>) {
        self.remove.push(name.into());
    }

    /// Sets one header, whatever was there before.
    pub fn set(&mut self, name: impl Into<Name>, value: String) {
        let name = name.into();
        self.remove.retain(|removed| *removed != name);
        self.set.push((name, value));
    }

    fn wire(self) -> Option<HeaderMutation> {
        if self.set.is_empty() && self.remove.is_empty() {
            return None;
        }
        let option = |(key, value): (Name, String)| HeaderValueOption {
            header: Some(HeaderValue {
                key: key.to_string(),
                raw_value: value.into_bytes(),
                ..HeaderValue::default()
            }),
            append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
            ..HeaderValueOption::default()
        };
        Some(HeaderMutation {
            set_headers: self.set.into_iter().map(option).collect(),
            remove_headers: self.remove.iter().map(|name| name.to_string()).collect(),
        })
    }
}

/// An answer that we give ourselves, in place of a worker's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// HTTP status.
    pub status: u16,
    /// Headers beside the content type.
    pub headers: Vec<(&'static str, String)>,
    /// JSON.
    pub body: Vec<u8>,
    /// For Envoy's logs.
    pub details: &'static str,
}

/// Ends the exchange with our own answer.
pub fn immediate(answer: &Immediate) -> ProcessingResponse {
    let mut changes = HeaderChanges::default();
    changes.set("content-type", "application/json".to_owned());
    for (name, value) in &answer.headers {
        changes.set(*name, value.clone());
    }
    let response = ImmediateResponse {
        status: Some(HttpStatus {
            code: answer.status.into(),
        }),
        headers: changes.wire(),
        body: answer.body.clone(),
        details: answer.details.to_owned(),
        ..ImmediateResponse::default()
    };
    ProcessingResponse {
        response: Some(Response::ImmediateResponse(response)),
        ..ProcessingResponse::default()
    }
}

/// Asks Envoy to wait so long for the next answer. It has to come before that answer, alone, and Envoy takes it once.
pub fn hold(wait: Duration) -> ProcessingResponse {
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

/// Lets one message go on, with changed headers.
pub fn go_on(to: To, changes: HeaderChanges) -> ProcessingResponse {
    wrap(
        to,
        CommonResponse {
            header_mutation: changes.wire(),
            ..CommonResponse::default()
        },
    )
}

/// The same with another body in place of the one that came.
pub fn with_body(mut reply: ProcessingResponse, body: Vec<u8>) -> ProcessingResponse {
    if let Some(common) = common(&mut reply) {
        common.body_mutation = Some(BodyMutation {
            mutation: Some(Mutation::Body(body)),
        });
    }
    reply
}

/// Lets Envoy look for the route again, now that headers have changed.
pub fn with_new_route(mut reply: ProcessingResponse) -> ProcessingResponse {
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

/// The pieces of a body on their way back in full duplex; at least one, so that the end is never lost.
pub fn pieces(to: To, body: &[u8], end: bool) -> impl Iterator<Item = ProcessingResponse> {
    let count = body.len().div_ceil(CHUNK).max(1);
    (0..count).map(move |piece| {
        let from = piece * CHUNK;
        let streamed = StreamedBodyResponse {
            body: body[from..body.len().min(from + CHUNK)].to_vec(),
            end_of_stream: end && piece + 1 == count,
            ..StreamedBodyResponse::default()
        };
        send_back(to, streamed)
    })
}

/// Returns one body message of mode `GRPC` unchanged, with its flags.
pub fn message(to: To, piece: &Piece) -> ProcessingResponse {
    let streamed = StreamedBodyResponse {
        body: piece.body.to_vec(),
        end_of_stream: piece.end_of_stream,
        end_of_stream_without_message: piece.end_of_stream_without_message,
        grpc_message_compressed: piece.grpc_message_compressed,
        ..StreamedBodyResponse::default()
    };
    send_back(to, streamed)
}

fn send_back(to: To, streamed: StreamedBodyResponse) -> ProcessingResponse {
    let mutation = BodyMutation {
        mutation: Some(Mutation::StreamedResponse(streamed)),
    };
    wrap(
        to,
        CommonResponse {
            body_mutation: Some(mutation),
            ..CommonResponse::default()
        },
    )
}

/// The replies to a part of a body that is not changed.
pub fn unchanged(to: To, mode: BodyMode, piece: &Piece) -> Vec<ProcessingResponse> {
    match mode {
        BodyMode::FullDuplex => pieces(to, &piece.body, piece.is_last()).collect(),
        BodyMode::Grpc => vec![message(to, piece)],
        _ => vec![go_on(to, HeaderChanges::default())],
    }
}

/// Lets request trailers go on.
pub fn request_trailers() -> ProcessingResponse {
    ProcessingResponse {
        response: Some(Response::RequestTrailers(TrailersResponse::default())),
        ..ProcessingResponse::default()
    }
}

/// Lets response trailers go on.
pub fn response_trailers() -> ProcessingResponse {
    ProcessingResponse {
        response: Some(Response::ResponseTrailers(TrailersResponse::default())),
        ..ProcessingResponse::default()
    }
}

/// Adds the chosen endpoints as dynamic metadata, and the key of the exchange where another filter needs it. The worker id
/// travels as text: endpoint metadata that Envoy compares it with is text, and a number would lose ids above 2^53.
pub fn with_destination(
    mut reply: ProcessingResponse,
    to: &Destination,
    directions: &Directions,
    exchange: Option<&str>,
) -> ProcessingResponse {
    let steer = &directions.steer;
    let mut fields = HashMap::from([
        (
            headers::ENDPOINT.to_owned(),
            text(endpoints(to.endpoint, &steer.fallbacks)),
        ),
        ("worker_id".to_owned(), text(to.rank.worker.to_string())),
    ]);
    if let Some(copy) = &directions.copy {
        fields.insert(
            headers::PREFILL_DESTINATION.to_owned(),
            text(copy.to.to_string()),
        );
    }
    if !steer.scores.is_empty() {
        // Gateways take more for better.
        let score = |cost: f64| Value {
            kind: Some(Kind::NumberValue(1.0 / (1.0 + cost.max(0.0)))),
        };
        let scores = steer
            .scores
            .iter()
            .map(|(endpoint, cost)| (endpoint.to_string(), score(*cost)))
            .collect();
        fields.insert(SCORES.to_owned(), structure(scores));
    }
    let mut namespaces = HashMap::from([(LB.to_owned(), structure(fields))]);
    if let Some(exchange) = exchange {
        let fields = HashMap::from([(EXCHANGE.to_owned(), text(exchange.to_owned()))]);
        namespaces.insert(OURS.to_owned(), structure(fields));
    }
    reply.dynamic_metadata = Some(Struct { fields: namespaces });
    reply
}

fn text(value: String) -> Value {
    Value {
        kind: Some(Kind::StringValue(value)),
    }
}

fn structure(fields: HashMap<String, Value>) -> Value {
    Value {
        kind: Some(Kind::StructValue(Struct { fields })),
    }
}

/// Asks Envoy to show us the response body, chunk by chunk, of this exchange only; the request body, which may still be
/// on its way, goes on as it did.
pub fn with_response_body(mut reply: ProcessingResponse, request: BodyMode) -> ProcessingResponse {
    reply.mode_override = Some(modes(request.into(), BodySendMode::Streamed));
    reply
}

/// Asks Envoy not to show us the request body of this exchange.
pub fn without_request_body(mut reply: ProcessingResponse) -> ProcessingResponse {
    reply.mode_override = Some(modes(BodySendMode::None, BodySendMode::None));
    reply
}

fn modes(request: BodySendMode, response: BodySendMode) -> ProcessingMode {
    ProcessingMode {
        request_header_mode: HeaderSendMode::Send.into(),
        response_header_mode: HeaderSendMode::Send.into(),
        request_body_mode: request.into(),
        response_body_mode: response.into(),
        // Full duplex cannot do without.
        request_trailer_mode: match request {
            BodySendMode::FullDuplexStreamed | BodySendMode::Grpc => HeaderSendMode::Send.into(),
            _ => HeaderSendMode::Skip.into(),
        },
        // The trailers' slot keeps the gRPC stream open until the response ends: that is our sign of the end.
        response_trailer_mode: HeaderSendMode::Send.into(),
    }
}

fn wrap(to: To, response: CommonResponse) -> ProcessingResponse {
    let response = Some(response);
    let response = match to {
        To::RequestHeaders => Response::RequestHeaders(HeadersResponse { response }),
        To::RequestBody => Response::RequestBody(BodyResponse { response }),
        To::ResponseHeaders => Response::ResponseHeaders(HeadersResponse { response }),
        To::ResponseBody => Response::ResponseBody(BodyResponse { response }),
    };
    ProcessingResponse {
        response: Some(response),
        ..ProcessingResponse::default()
    }
}

#[cfg(test)]
impl HeaderChanges {
    /// The headers that are set.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.set.iter().map(|(name, value)| (&**name, &**value))
    }
}
