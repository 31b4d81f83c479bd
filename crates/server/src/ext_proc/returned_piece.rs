//! Replies to Envoy. A returned piece of a body refers to the received buffer, where the generated
//! type would hold a copy.

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use prost::Message as _;
use tonic::Status;
use tonic::codec::{BufferSettings, EncodeBuf, Encoder};

use super::mutation::MessageKind;
use super::wire::BodyPiece;

/// A reply to Envoy.
#[derive(Clone, Debug, PartialEq)]
pub enum ExtProcReply {
    /// A message of Envoy's own type.
    Message(Box<ProcessingResponse>),
    /// A piece of a body.
    Piece(ReturnedPiece),
}

/// A piece of a body that is returned to Envoy in full-duplex or gRPC mode. It is encoded like a
/// [`ProcessingResponse`] that contains only a `StreamedBodyResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReturnedPiece {
    #[prost(oneof = "PieceBody", tags = "3, 4")]
    body: Option<PieceBody>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum PieceBody {
    #[prost(message, tag = "3")]
    Request(PieceBodyResponse),
    #[prost(message, tag = "4")]
    Response(PieceBodyResponse),
}

/// The fields of `BodyResponse` that a piece needs.
#[derive(Clone, PartialEq, prost::Message)]
struct PieceBodyResponse {
    #[prost(message, optional, tag = "1")]
    response: Option<PieceCommonResponse>,
}

/// The fields of `CommonResponse` that a piece needs.
#[derive(Clone, PartialEq, prost::Message)]
struct PieceCommonResponse {
    #[prost(message, optional, tag = "3")]
    body_mutation: Option<PieceMutation>,
}

/// The fields of `BodyMutation` that a piece needs.
#[derive(Clone, PartialEq, prost::Message)]
struct PieceMutation {
    #[prost(message, optional, tag = "3")]
    streamed_response: Option<BodyPiece>,
}

impl ReturnedPiece {
    /// Creates a reply that returns a piece of the request or response body.
    pub(super) fn new(to: MessageKind, piece: BodyPiece) -> Self {
        let body_mutation = Some(PieceMutation {
            streamed_response: Some(piece),
        });
        let response = PieceBodyResponse {
            response: Some(PieceCommonResponse { body_mutation }),
        };
        let body = match to {
            MessageKind::RequestHeaders | MessageKind::RequestBody => PieceBody::Request(response),
            MessageKind::ResponseHeaders | MessageKind::ResponseBody => {
                PieceBody::Response(response)
            }
        };
        Self { body: Some(body) }
    }
}

impl From<ProcessingResponse> for ExtProcReply {
    fn from(message: ProcessingResponse) -> Self {
        Self::Message(Box::new(message))
    }
}

impl ExtProcReply {
    /// Encodes the reply as a `ProcessingResponse`.
    pub fn encode_to_vec(&self) -> Vec<u8> {
        match self {
            Self::Message(message) => message.encode_to_vec(),
            Self::Piece(piece) => piece.encode_to_vec(),
        }
    }

    /// Returns the message that Envoy decodes.
    #[cfg(test)]
    pub(super) fn into_message(self) -> ProcessingResponse {
        ProcessingResponse::decode(&self.encode_to_vec()[..]).unwrap()
    }
}

/// Encodes replies.
pub(super) struct ReplyEncoder(pub(super) BufferSettings);

impl Encoder for ReplyEncoder {
    type Item = ExtProcReply;
    type Error = Status;

    fn encode(&mut self, reply: ExtProcReply, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let encoded = match reply {
            ExtProcReply::Message(message) => message.encode(buffer),
            ExtProcReply::Piece(piece) => piece.encode(buffer),
        };
        // The buffer grows, so it always has room.
        encoded.map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
    use envoy_types::pb::envoy::service::ext_proc::v3::{
        BodyMutation, BodyResponse, CommonResponse, StreamedBodyResponse,
    };
    use proptest::prelude::*;

    use super::*;

    fn generated(is_request: bool, piece: &BodyPiece) -> ProcessingResponse {
        let streamed = StreamedBodyResponse {
            body: piece.body.to_vec(),
            end_of_stream: piece.end_of_stream,
            end_of_stream_without_message: piece.end_of_stream_without_message,
            grpc_message_compressed: piece.grpc_message_compressed,
            ..StreamedBodyResponse::default()
        };
        let common = CommonResponse {
            body_mutation: Some(BodyMutation {
                mutation: Some(Mutation::StreamedResponse(streamed)),
            }),
            ..CommonResponse::default()
        };
        let body = BodyResponse {
            response: Some(common),
        };
        ProcessingResponse {
            response: Some(match is_request {
                true => Response::RequestBody(body),
                false => Response::ResponseBody(body),
            }),
            ..ProcessingResponse::default()
        }
    }

    proptest! {
        #[test]
        fn piece_is_encoded_like_generated_type(
            body in proptest::collection::vec(any::<u8>(), 0..300),
            flags in any::<[bool; 3]>(),
            is_request in any::<bool>(),
        ) {
            let [end_of_stream, end_of_stream_without_message, grpc_message_compressed] = flags;
            let piece = BodyPiece {
                body: body.into(),
                end_of_stream,
                end_of_stream_without_message,
                grpc_message_compressed,
            };
            let expected = generated(is_request, &piece).encode_to_vec();
            let to = if is_request { MessageKind::RequestBody } else { MessageKind::ResponseBody };
            prop_assert_eq!(ReturnedPiece::new(to, piece).encode_to_vec(), expected);
        }
    }
}
