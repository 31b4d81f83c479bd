//! The messages of Envoy and their gRPC codec. They replace the generated types, which copy each
//! body once more: a decoded body refers to the received buffer. All other parts are Envoy's own
//! types.

use std::collections::HashMap;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpHeaders, HttpTrailers, ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::Struct;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstDecoder;

use super::returned_piece::{ExtProcReply, ReplyEncoder};

/// A message of Envoy. Unknown and unused fields are skipped.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RawProcessingRequest {
    /// Dynamic metadata of other filters.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// Attributes that Envoy is configured to send.
    #[prost(map = "string, message", tag = "9")]
    pub attributes: HashMap<String, Struct>,
    /// Body modes of Envoy's configuration. Set in the first message only.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
    /// The part of the exchange.
    #[prost(oneof = "ProcessingPart", tags = "2, 3, 4, 5, 6, 7")]
    pub part: Option<ProcessingPart>,
}

/// A part of an HTTP exchange.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ProcessingPart {
    /// Headers of the request.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// Headers of the response.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// A piece of the request body, or all of it.
    #[prost(message, tag = "4")]
    RequestBody(BodyPiece),
    /// A piece of the response body.
    #[prost(message, tag = "5")]
    ResponseBody(BodyPiece),
    /// Trailers of the request.
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    /// Trailers of the response.
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// A piece of a body.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct BodyPiece {
    /// The received bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// The piece is the last one.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
    /// The stream ends without a further gRPC message.
    #[prost(bool, tag = "3")]
    pub end_of_stream_without_message: bool,
    /// In mode `GRPC`: the message is compressed.
    #[prost(bool, tag = "4")]
    pub grpc_message_compressed: bool,
}

impl BodyPiece {
    /// Creates a piece with these bytes.
    pub fn new(body: impl Into<Bytes>, end_of_stream: bool) -> Self {
        Self {
            body: body.into(),
            end_of_stream,
            ..Self::default()
        }
    }

    /// Returns whether it is the last piece of the body.
    pub fn is_last(&self) -> bool {
        self.end_of_stream || self.end_of_stream_without_message
    }
}

/// Initial size of a stream's buffers, in bytes. Most messages are smaller, and an exchange holds
/// two buffers until its response ends.
const BUFFER_BYTES: usize = 1 << 10;
/// Bytes of replies to encode before a write.
const YIELD_THRESHOLD: usize = 32 << 10;

/// Codec of ext_proc messages.
pub(super) struct ExtProcCodec;

impl Codec for ExtProcCodec {
    type Encode = ExtProcReply;
    type Decode = RawProcessingRequest;
    type Encoder = ReplyEncoder;
    type Decoder = ProstDecoder<RawProcessingRequest>;

    fn encoder(&mut self) -> Self::Encoder {
        ReplyEncoder(BufferSettings::new(BUFFER_BYTES, YIELD_THRESHOLD))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(BUFFER_BYTES, YIELD_THRESHOLD))
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
    use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, ProcessingRequest};
    use envoy_types::pb::google::protobuf::Value;
    use envoy_types::pb::google::protobuf::value::Kind;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    fn headers() -> impl Strategy<Value = HttpHeaders> {
        let pairs = proptest::collection::vec(
            (
                "[a-z:-]{0,12}",
                proptest::collection::vec(any::<u8>(), 0..40),
            ),
            0..6,
        );
        (pairs, any::<bool>()).prop_map(|(pairs, end_of_stream)| {
            let header = |(key, raw_value)| HeaderValue {
                key,
                raw_value,
                ..HeaderValue::default()
            };
            let headers = Some(HeaderMap {
                headers: pairs.into_iter().map(header).collect(),
            });
            HttpHeaders {
                headers,
                end_of_stream,
                ..HttpHeaders::default()
            }
        })
    }

    fn body() -> impl Strategy<Value = HttpBody> {
        let body = proptest::collection::vec(any::<u8>(), 0..3_000);
        (body, any::<[bool; 3]>()).prop_map(
            |(body, [end_of_stream, without_message, compressed])| HttpBody {
                body,
                end_of_stream,
                end_of_stream_without_message: without_message,
                grpc_message_compressed: compressed,
                ..HttpBody::default()
            },
        )
    }

    fn request() -> impl Strategy<Value = Option<Request>> {
        let trailers = |_| HttpTrailers::default();
        proptest::option::of(prop_oneof![
            headers().prop_map(Request::RequestHeaders),
            headers().prop_map(Request::ResponseHeaders),
            body().prop_map(Request::RequestBody),
            body().prop_map(Request::ResponseBody),
            Just(())
                .prop_map(trailers)
                .prop_map(Request::RequestTrailers),
            Just(())
                .prop_map(trailers)
                .prop_map(Request::ResponseTrailers),
        ])
    }

    fn structure() -> impl Strategy<Value = Struct> {
        let value = "[a-z.]{0,9}".prop_map(|text| Value {
            kind: Some(Kind::StringValue(text)),
        });
        proptest::collection::hash_map("[a-z.]{0,9}", value, 0..3)
            .prop_map(|fields| Struct { fields })
    }

    fn known_fields(read: &RawProcessingRequest) -> ProcessingRequest {
        ProcessingRequest::decode(&read.encode_to_vec()[..]).unwrap()
    }

    fn without_skipped_fields(mut wire: ProcessingRequest) -> ProcessingRequest {
        if let Some(Request::RequestBody(body) | Request::ResponseBody(body)) = &mut wire.request {
            body.drain_complete = false;
        }
        ProcessingRequest {
            observability_mode: false,
            flow_control_init: None,
            client_window_update: None,
            ..wire
        }
    }

    proptest! {
        #[test]
        fn messages_decode_like_generated_types(
            request in request(),
            attributes in proptest::collection::hash_map("[a-z.]{0,9}", structure(), 0..3),
            metadata in proptest::option::of(proptest::collection::hash_map("[a-z.]{0,9}", structure(), 0..3)),
            modes in proptest::option::of((0..8i32, 0..8i32)),
            observability_mode in any::<bool>(),
        ) {
            let metadata_context =
                metadata.map(|filter_metadata| Metadata { filter_metadata, ..Metadata::default() });
            let protocol_config = modes.map(|(request_body_mode, response_body_mode)| ProtocolConfiguration {
                request_body_mode,
                response_body_mode,
                ..ProtocolConfiguration::default()
            });
            let wire = ProcessingRequest {
                request, attributes, metadata_context, protocol_config, observability_mode, ..ProcessingRequest::default()
            };
            let read = RawProcessingRequest::decode(&wire.encode_to_vec()[..]).unwrap();
            prop_assert_eq!(known_fields(&read), without_skipped_fields(wire));
        }

        #[test]
        fn any_bytes_decode_like_generated_types(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
            // Skipped fields are not validated, so their errors remain undetected.
            let ours = RawProcessingRequest::decode(&bytes[..]);
            let theirs = ProcessingRequest::decode(&bytes[..]);
            if let Ok(theirs) = theirs {
                prop_assert_eq!(known_fields(&ours.unwrap()), without_skipped_fields(theirs));
            }
        }
    }

    #[test]
    fn body_is_not_copied_by_decoding() {
        let piece = BodyPiece {
            body: Bytes::from(vec![7; 9_000]),
            end_of_stream: true,
            ..BodyPiece::default()
        };
        let wire = RawProcessingRequest {
            part: Some(ProcessingPart::RequestBody(piece)),
            ..RawProcessingRequest::default()
        };
        let bytes = Bytes::from(wire.encode_to_vec());
        let Some(ProcessingPart::RequestBody(read)) =
            RawProcessingRequest::decode(bytes.clone()).unwrap().part
        else {
            panic!("a body")
        };
        assert!(
            bytes.as_ptr_range().contains(&read.body.as_ptr()),
            "the body is a slice of the received buffer"
        );
    }
}
