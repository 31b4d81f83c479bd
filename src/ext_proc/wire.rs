//! The gRPC side of ext_proc, made by hand where what is generated copies bodies once more: a message as it comes off the
//! wire keeps the body of a request as the bytes that were received. Everything else of it is Envoy's own types.

use std::collections::HashMap;
use std::convert::Infallible;
use std::task::{Context, Poll};

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::SERVICE_NAME;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse,
    ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::Struct;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, CompressionEncoding, EnabledCompressionEncodings};
use tonic::codegen::{Body, BoxFuture, Service as GrpcService, StdError, http};
use tonic::server::{Grpc, NamedService};
use tonic_prost::{ProstDecoder, ProstEncoder};

use super::service::Service;

/// A message of Envoy, of which unknown fields are skipped as those are that say nothing to us.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Asked {
    /// What other filters have left.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// What Envoy is configured to say beside.
    #[prost(map = "string, message", tag = "9")]
    pub attributes: HashMap<String, Struct>,
    /// How Envoy is configured; with the first message only.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
    /// The part of the exchange.
    #[prost(oneof = "Part", tags = "2, 3, 4, 5, 6, 7")]
    pub part: Option<Part>,
}

/// A part of an HTTP exchange.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Part {
    /// Headers of the request.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// Headers of the response.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// A piece of the request's body, or all of it.
    #[prost(message, tag = "4")]
    RequestBody(Piece),
    /// A piece of the response's body.
    #[prost(message, tag = "5")]
    ResponseBody(Piece),
    /// Trailers of the request.
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    /// Trailers of the response.
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// A piece of a body.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Piece {
    /// As it was received.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// Nothing follows.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
    /// Nothing follows, and this message says nothing but that.
    #[prost(bool, tag = "3")]
    pub end_of_stream_without_message: bool,
    /// In mode `GRPC`: the message is compressed.
    #[prost(bool, tag = "4")]
    pub grpc_message_compressed: bool,
}

impl Piece {
    /// A piece with these bytes.
    pub fn new(body: impl Into<Bytes>, end_of_stream: bool) -> Self {
        Self {
            body: body.into(),
            end_of_stream,
            ..Self::default()
        }
    }

    /// Whether it is the last piece of the body.
    pub fn is_last(&self) -> bool {
        self.end_of_stream || self.end_of_stream_without_message
    }
}

impl From<HttpBody> for Piece {
    fn from(body: HttpBody) -> Self {
        let HttpBody {
            body,
            end_of_stream,
            end_of_stream_without_message,
            grpc_message_compressed,
            ..
        } = body;
        Self {
            body: body.into(),
            end_of_stream,
            end_of_stream_without_message,
            grpc_message_compressed,
        }
    }
}

impl From<ProcessingRequest> for Asked {
    fn from(wire: ProcessingRequest) -> Self {
        let part = wire.request.map(|request| match request {
            Request::RequestHeaders(headers) => Part::RequestHeaders(headers),
            Request::ResponseHeaders(headers) => Part::ResponseHeaders(headers),
            Request::RequestBody(body) => Part::RequestBody(body.into()),
            Request::ResponseBody(body) => Part::ResponseBody(body.into()),
            Request::RequestTrailers(trailers) => Part::RequestTrailers(trailers),
            Request::ResponseTrailers(trailers) => Part::ResponseTrailers(trailers),
        });
        let ProcessingRequest {
            metadata_context,
            attributes,
            protocol_config,
            ..
        } = wire;
        Self {
            metadata_context,
            attributes,
            protocol_config,
            part,
        }
    }
}

/// Bytes that a stream's buffers begin with. Most messages are smaller, and an exchange has two of them for as long as its
/// answer takes.
const BUFFER: usize = 1 << 10;
/// Bytes of replies that are sent together.
const TOGETHER: usize = 32 << 10;

/// How messages are read and written.
struct Wire;

impl Codec for Wire {
    type Encode = ProcessingResponse;
    type Decode = Asked;
    type Encoder = ProstEncoder<ProcessingResponse>;
    type Decoder = ProstDecoder<Asked>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::new(BUFFER, TOGETHER))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(BUFFER, TOGETHER))
    }
}

/// The service as a server takes it.
#[derive(Clone)]
pub struct ExtProc {
    service: Service,
    /// Bytes of the longest message.
    most: usize,
}

impl ExtProc {
    /// The service, for messages up to so many bytes.
    pub fn new(service: Service, most: usize) -> Self {
        Self { service, most }
    }
}

impl NamedService for ExtProc {
    const NAME: &'static str = SERVICE_NAME;
}

/// Accepted compression encodings. The message limit applies before and after decompression, and decompression stops at
/// the limit.
fn gzip() -> EnabledCompressionEncodings {
    let mut accepted = EnabledCompressionEncodings::default();
    accepted.enable(CompressionEncoding::Gzip);
    accepted
}

const PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

impl<B> GrpcService<http::Request<B>> for ExtProc
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        if request.uri().path() != PATH {
            return Box::pin(std::future::ready(Ok(Status::unimplemented(
                "no such method",
            )
            .into_http())));
        }
        // tonic does not pass the URI on.
        if let Some(authority) = request.uri().authority().cloned() {
            request.extensions_mut().insert(authority);
        }
        let Self { service, most } = self.clone();
        Box::pin(async move {
            let mut grpc = Grpc::new(Wire)
                .apply_compression_config(gzip(), EnabledCompressionEncodings::default())
                .apply_max_message_size_config(Some(most), Some(usize::MAX));
            Ok(grpc.streaming(service, request).await)
        })
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
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

    proptest! {
        #[test]
        fn what_envoy_sends_is_read_as_the_generated_types_read_it(
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
            let bytes = wire.encode_to_vec();
            let read = Asked::decode(Bytes::from(bytes.clone())).unwrap();
            prop_assert_eq!(read, Asked::from(ProcessingRequest::decode(&bytes[..]).unwrap()));
        }

        #[test]
        fn bytes_that_are_no_message_are_refused_by_both_or_by_none(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
            // Fields that we skip are not looked into: what is wrong inside them is Envoy's affair.
            let (ours, theirs) = (Asked::decode(&bytes[..]), ProcessingRequest::decode(&bytes[..]));
            if let Ok(theirs) = theirs {
                prop_assert_eq!(ours.unwrap(), Asked::from(theirs));
            }
        }
    }

    #[test]
    fn a_body_is_not_copied() {
        let piece = Piece {
            body: Bytes::from(vec![7; 9_000]),
            end_of_stream: true,
            ..Piece::default()
        };
        let wire = Asked {
            part: Some(Part::RequestBody(piece)),
            ..Asked::default()
        };
        let bytes = Bytes::from(wire.encode_to_vec());
        let Some(Part::RequestBody(read)) = Asked::decode(bytes.clone()).unwrap().part else {
            panic!("a body")
        };
        assert!(
            bytes.as_ptr_range().contains(&read.body.as_ptr()),
            "it lies in what was received"
        );
    }
}
