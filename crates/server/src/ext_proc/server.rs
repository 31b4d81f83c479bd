//! The gRPC server of ext_proc: one method, with the codec of [`wire`](super::wire).
//!
//! Decision 0008.

use std::convert::Infallible;
use std::task::{Context, Poll};

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::SERVICE_NAME;
use tonic::Status;
use tonic::codec::{CompressionEncoding, EnabledCompressionEncodings};
use tonic::codegen::{Body, BoxFuture, Service as GrpcService, StdError, http};
use tonic::server::{Grpc, NamedService};

use super::service::ExtProcService;
use super::wire::ExtProcCodec;

const PROCESS_PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// The gRPC server of the service.
#[derive(Clone)]
pub struct ExtProcServer {
    service: ExtProcService,
    /// Maximum size of a message, in bytes.
    max_message_bytes: usize,
}

impl ExtProcServer {
    /// Creates a server for messages of up to `max_message_bytes`.
    pub fn new(service: ExtProcService, max_message_bytes: usize) -> Self {
        Self {
            service,
            max_message_bytes,
        }
    }
}

impl NamedService for ExtProcServer {
    const NAME: &'static str = SERVICE_NAME;
}

impl<B> GrpcService<http::Request<B>> for ExtProcServer
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
        if request.uri().path() != PROCESS_PATH {
            return Box::pin(std::future::ready(Ok(Status::unimplemented(
                "no such method",
            )
            .into_http())));
        }
        // tonic does not pass the URI to the service.
        if let Some(authority) = request.uri().authority().cloned() {
            request.extensions_mut().insert(authority);
        }
        let Self {
            service,
            max_message_bytes,
        } = self.clone();
        Box::pin(async move {
            let mut grpc = Grpc::new(ExtProcCodec)
                .apply_compression_config(
                    accepted_encodings(),
                    EnabledCompressionEncodings::default(),
                )
                .apply_max_message_size_config(Some(max_message_bytes), Some(usize::MAX));
            Ok(grpc.streaming(service, request).await)
        })
    }
}

/// Returns the accepted compression encodings. The message limit applies before and after
/// decompression, and decompression stops at the limit.
fn accepted_encodings() -> EnabledCompressionEncodings {
    let mut accepted = EnabledCompressionEncodings::default();
    accepted.enable(CompressionEncoding::Gzip);
    accepted
}
