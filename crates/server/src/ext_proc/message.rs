//! Envoy's messages, reduced to the parts that a decision needs.

pub use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode as BodyMode;

use super::headers::{self, RequestHead, ResponseHead};
use super::metadata::GatewayMetadata;
use super::wire::{BodyPiece, ProcessingPart, RawProcessingRequest};

/// The modes in which Envoy sends the bodies of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyModes {
    /// Request body.
    pub request: BodyMode,
    /// Response body.
    pub response: BodyMode,
}

impl Default for BodyModes {
    /// Returns the modes that were measured as the fastest, for gateways that do not report theirs.
    fn default() -> Self {
        Self {
            request: BodyMode::Buffered,
            response: BodyMode::None,
        }
    }
}

/// Returns whether a body reaches its destination only through the replies of warmroute.
pub(super) fn is_sent_back(mode: BodyMode) -> bool {
    matches!(mode, BodyMode::FullDuplexStreamed | BodyMode::Grpc)
}

/// One message of Envoy.
#[derive(Clone, Debug, PartialEq)]
pub enum ExchangeMessage {
    /// The request headers.
    RequestHeaders {
        /// The request head.
        head: RequestHead,
        /// No body follows.
        end_of_stream: bool,
    },
    /// A part of the request body, or all of it.
    RequestBody(BodyPiece),
    /// The request ended with trailers.
    RequestTrailers,
    /// The response headers.
    ResponseHeaders {
        /// The response head.
        head: ResponseHead,
        /// No body follows.
        end_of_stream: bool,
    },
    /// A part of the response body.
    ResponseBody(BodyPiece),
    /// The response ended with trailers.
    ResponseTrailers,
}

/// One parsed wire message.
#[derive(Clone, Debug, PartialEq)]
pub struct IncomingMessage {
    /// Body modes of Envoy's configuration. Envoy sends them with the first message.
    pub modes: Option<BodyModes>,
    /// The metadata sent with the message.
    pub metadata: GatewayMetadata,
    /// The message; `None` if it has no known part, for example flow control, or a message type of
    /// a newer Envoy.
    pub message: Option<ExchangeMessage>,
}

impl IncomingMessage {
    /// Parses one wire message.
    pub(super) fn parse(wire: RawProcessingRequest) -> Self {
        let modes = wire.protocol_config.map(|config| BodyModes {
            request: body_mode(config.request_body_mode),
            response: body_mode(config.response_body_mode),
        });
        let to = headers::upstream_endpoint(&wire.attributes)
            .filter(|_| matches!(wire.part, Some(ProcessingPart::RequestHeaders(_))));
        let metadata = GatewayMetadata {
            upstream: to,
            ..GatewayMetadata::parse(wire.metadata_context.as_ref())
        };
        let message = wire.part.map(|part| match part {
            ProcessingPart::RequestHeaders(headers) => ExchangeMessage::RequestHeaders {
                head: RequestHead::parse(headers.headers),
                end_of_stream: headers.end_of_stream,
            },
            ProcessingPart::RequestBody(piece) => ExchangeMessage::RequestBody(piece),
            ProcessingPart::RequestTrailers(_) => ExchangeMessage::RequestTrailers,
            ProcessingPart::ResponseHeaders(headers) => ExchangeMessage::ResponseHeaders {
                head: ResponseHead::parse(headers.headers.as_ref(), &wire.attributes)
                    .with_served_endpoint(metadata.served_endpoint.as_deref()),
                end_of_stream: headers.end_of_stream,
            },
            ProcessingPart::ResponseBody(piece) => ExchangeMessage::ResponseBody(piece),
            ProcessingPart::ResponseTrailers(_) => ExchangeMessage::ResponseTrailers,
        });
        Self {
            modes,
            metadata,
            message,
        }
    }
}

/// Reads a mode. Unknown modes are handled like `GRPC`: the request is routed by its headers, and
/// received body messages are returned.
fn body_mode(wire: i32) -> BodyMode {
    BodyMode::try_from(wire).unwrap_or(BodyMode::Grpc)
}
