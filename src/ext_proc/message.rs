//! Envoy's messages in our words: wire types in, the few things a decision needs out.

use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;

use super::headers::{self, RequestHead, ResponseHead};
use super::metadata::Told;
use super::wire::{Asked, Part, Piece};

/// How Envoy shows us a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyMode {
    /// Not at all.
    None,
    /// Whole, in one message, and waits for the answer.
    #[default]
    Buffered,
    /// As far as it fits a buffer, in one message.
    BufferedPartial,
    /// Chunk by chunk, each answered on its own; too late to route on.
    Streamed,
    /// Chunk by chunk, and every byte has to be sent back by us.
    FullDuplex,
    /// Message by message (`GRPC`): each message has to be sent back. Unknown modes are handled in the same way: the request is
    /// routed by its headers, and received body messages are sent back.
    Grpc,
}

impl BodyMode {
    /// Whether the body reaches its destination only through the replies of warmroute.
    pub fn is_sent_back(self) -> bool {
        matches!(self, BodyMode::FullDuplex | BodyMode::Grpc)
    }
}

impl From<BodySendMode> for BodyMode {
    fn from(mode: BodySendMode) -> Self {
        match mode {
            BodySendMode::Buffered => BodyMode::Buffered,
            BodySendMode::BufferedPartial => BodyMode::BufferedPartial,
            BodySendMode::Streamed => BodyMode::Streamed,
            BodySendMode::FullDuplexStreamed => BodyMode::FullDuplex,
            BodySendMode::Grpc => BodyMode::Grpc,
            BodySendMode::None => BodyMode::None,
        }
    }
}

impl From<BodyMode> for BodySendMode {
    fn from(mode: BodyMode) -> Self {
        match mode {
            BodyMode::None => BodySendMode::None,
            BodyMode::Buffered => BodySendMode::Buffered,
            BodyMode::BufferedPartial => BodySendMode::BufferedPartial,
            BodyMode::Streamed => BodySendMode::Streamed,
            BodyMode::FullDuplex => BodySendMode::FullDuplexStreamed,
            BodyMode::Grpc => BodySendMode::Grpc,
        }
    }
}

/// How the bodies of one exchange travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Request body.
    pub request: BodyMode,
    /// Response body.
    pub response: BodyMode,
}

impl Default for Modes {
    /// The measured default configuration, for gateways that do not say how they are configured.
    fn default() -> Self {
        Self {
            request: BodyMode::Buffered,
            response: BodyMode::None,
        }
    }
}

/// One message of Envoy.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The request began.
    RequestHeaders {
        /// Its head.
        head: RequestHead,
        /// No body follows.
        end: bool,
    },
    /// A part of the request body, or all of it.
    RequestBody(Piece),
    /// The request ended with trailers.
    RequestTrailers,
    /// The response began.
    ResponseHeaders {
        /// Its head.
        head: ResponseHead,
        /// No body follows.
        end: bool,
    },
    /// A part of the response body.
    ResponseBody(Piece),
    /// The response ended with trailers.
    ResponseTrailers,
}

/// One wire message, read.
#[derive(Clone, Debug, PartialEq)]
pub struct Incoming {
    /// How Envoy is configured, where it says so.
    pub modes: Option<Modes>,
    /// What it says beside the headers.
    pub told: Told,
    /// The message itself; none for one that carries nothing we know (flow control, later additions).
    pub message: Option<Message>,
}

impl Incoming {
    /// Reads one wire message.
    pub fn read(wire: impl Into<Asked>) -> Self {
        Self::read_asked(wire.into())
    }

    fn read_asked(wire: Asked) -> Self {
        let modes = wire.protocol_config.map(|config| Modes {
            request: mode(config.request_body_mode),
            response: mode(config.response_body_mode),
        });
        let to = headers::upstream(&wire.attributes)
            .filter(|_| matches!(wire.part, Some(Part::RequestHeaders(_))));
        let told = Told {
            to,
            ..Told::read(wire.metadata_context.as_ref())
        };
        let message = wire.part.map(|part| match part {
            Part::RequestHeaders(headers) => Message::RequestHeaders {
                head: RequestHead::read(headers.headers),
                end: headers.end_of_stream,
            },
            Part::RequestBody(piece) => Message::RequestBody(piece),
            Part::RequestTrailers(_) => Message::RequestTrailers,
            Part::ResponseHeaders(headers) => Message::ResponseHeaders {
                head: ResponseHead::read(headers.headers.as_ref(), &wire.attributes)
                    .served_by(told.served.as_deref()),
                end: headers.end_of_stream,
            },
            Part::ResponseBody(piece) => Message::ResponseBody(piece),
            Part::ResponseTrailers(_) => Message::ResponseTrailers,
        });
        Self {
            modes,
            told,
            message,
        }
    }
}

fn mode(wire: i32) -> BodyMode {
    BodySendMode::try_from(wire).map_or(BodyMode::Grpc, BodyMode::from)
}
