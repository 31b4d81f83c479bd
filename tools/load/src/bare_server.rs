//! A minimal external processor: plain tonic, which answers every message at once with a mutation
//! like warmroute's. It selects workers in rotation and does not parse bodies. The difference to
//! warmroute is the cost of the decision.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::{
    BodySendMode, HeaderSendMode,
};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as RequestMessage;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as ResponseMessage;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpBody,
    ProcessingRequest, ProcessingResponse, StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures_util::stream::BoxStream;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::instant_engines;

/// Arguments of the bare server.
#[derive(Debug, Parser)]
pub(crate) struct BareServerArgs {
    /// Socket at which Envoy connects.
    #[arg(long)]
    socket: PathBuf,
    /// Address of the first worker.
    #[arg(long)]
    first: SocketAddr,
    /// Number of workers.
    #[arg(long)]
    workers: usize,
    /// Subscribes to response bodies.
    #[arg(long)]
    watch: bool,
}

/// Serves until the process ends.
pub(crate) async fn serve(cli: BareServerArgs) -> anyhow::Result<()> {
    let workers = instant_engines::addresses(cli.first, cli.workers)
        .map(|address| address.to_string())
        .collect();
    let processor = BareProcessor {
        workers,
        next_worker: Arc::default(),
        observes_bodies: cli.watch,
    };
    let incoming = UnixListenerStream::new(UnixListener::bind(&cli.socket)?);
    let service = ExternalProcessorServer::new(processor).max_decoding_message_size(usize::MAX);
    Ok(Server::builder()
        .add_service(service)
        .serve_with_incoming(incoming)
        .await?)
}

#[derive(Clone)]
struct BareProcessor {
    workers: Arc<[String]>,
    next_worker: Arc<AtomicUsize>,
    observes_bodies: bool,
}

/// One stream, with the calling filter and the received messages.
struct BareExchange {
    processor: BareProcessor,
    is_probe: bool,
    /// True if Envoy sends request bodies, and then also response bodies, in full duplex.
    is_full_duplex: bool,
    incoming: Streaming<ProcessingRequest>,
    is_closed: bool,
}

#[tonic::async_trait]
impl ExternalProcessor for BareProcessor {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let is_probe = request
            .metadata()
            .get("x-warmroute-filter")
            .is_some_and(|filter| filter == "probe");
        let exchange = BareExchange {
            processor: self.clone(),
            is_probe,
            is_full_duplex: false,
            incoming: request.into_inner(),
            is_closed: false,
        };
        Ok(Response::new(Box::pin(futures_util::stream::unfold(
            exchange,
            BareExchange::next,
        ))))
    }
}

impl BareExchange {
    async fn next(mut self) -> Option<(Result<ProcessingResponse, Status>, Self)> {
        if self.is_closed {
            return None;
        }
        let message = self.incoming.message().await.ok()??;
        if let Some(config) = message.protocol_config {
            self.is_full_duplex = config.request_body_mode() == BodySendMode::FullDuplexStreamed;
        }
        let answer = self.answer(message.request?);
        Some((Ok(answer), self))
    }

    fn answer(&mut self, message: RequestMessage) -> ProcessingResponse {
        let empty = || Some(CommonResponse::default());
        let unchanged = |answer| ProcessingResponse {
            response: Some(answer),
            ..ProcessingResponse::default()
        };
        match message {
            RequestMessage::RequestHeaders(_) if self.is_full_duplex => self
                .processor
                .set_destination(ResponseMessage::RequestHeaders, |response| {
                    HeadersResponse { response }
                }),
            RequestMessage::RequestBody(body) if self.is_full_duplex => {
                unchanged(ResponseMessage::RequestBody(same_piece(body)))
            }
            RequestMessage::ResponseBody(body) if self.is_full_duplex => {
                unchanged(ResponseMessage::ResponseBody(same_piece(body)))
            }
            RequestMessage::RequestHeaders(_) => {
                unchanged(ResponseMessage::RequestHeaders(HeadersResponse {
                    response: empty(),
                }))
            }
            RequestMessage::RequestBody(_) => self
                .processor
                .set_destination(ResponseMessage::RequestBody, |response| BodyResponse {
                    response,
                }),
            RequestMessage::RequestTrailers(_) => {
                unchanged(ResponseMessage::RequestTrailers(TrailersResponse::default()))
            }
            RequestMessage::ResponseHeaders(headers) => {
                let mut answer = unchanged(ResponseMessage::ResponseHeaders(HeadersResponse {
                    response: Some(header_changes(&[MODE])),
                }));
                if self.processor.observes_bodies && is_event_stream(headers.headers.as_ref()) {
                    answer.mode_override = Some(observing_mode());
                }
                answer
            }
            RequestMessage::ResponseBody(body) => {
                self.is_closed = self.is_probe && !body.body.is_empty();
                unchanged(ResponseMessage::ResponseBody(BodyResponse {
                    response: empty(),
                }))
            }
            RequestMessage::ResponseTrailers(_) => unchanged(ResponseMessage::ResponseTrailers(
                TrailersResponse::default(),
            )),
        }
    }
}

const MODE: (&str, &str) = ("x-warmroute-mode", "bare");

impl BareProcessor {
    fn set_destination<R>(
        &self,
        answer: fn(R) -> ResponseMessage,
        wrap: fn(Option<CommonResponse>) -> R,
    ) -> ProcessingResponse {
        let worker =
            &self.workers[self.next_worker.fetch_add(1, Ordering::Relaxed) % self.workers.len()];
        let id = "18446744073709551615";
        let set = [
            ("x-worker-instance-id", id),
            ("x-dp-rank", "0"),
            ("x-gateway-destination-endpoint", worker),
        ];
        let common = CommonResponse {
            clear_route_cache: true,
            ..header_changes(&set)
        };
        let mut answer = ProcessingResponse {
            response: Some(answer(wrap(Some(common)))),
            ..ProcessingResponse::default()
        };
        let endpoint = structure([
            ("x-gateway-destination-endpoint", text(worker)),
            ("worker_id", text(id)),
        ]);
        let exchange = structure([("exchange", text("0123456789abcdef"))]);
        let Kind::StructValue(metadata) =
            structure([("envoy.lb", endpoint), ("warmroute", exchange)])
        else {
            return answer;
        };
        answer.dynamic_metadata = Some(metadata);
        answer
    }
}

/// Returns the answer that passes a piece of a body unchanged.
fn same_piece(body: HttpBody) -> BodyResponse {
    let piece = StreamedBodyResponse {
        body: body.body,
        end_of_stream: body.end_of_stream,
        ..StreamedBodyResponse::default()
    };
    BodyResponse {
        response: Some(CommonResponse {
            body_mutation: Some(BodyMutation {
                mutation: Some(Mutation::StreamedResponse(piece)),
            }),
            ..CommonResponse::default()
        }),
    }
}

fn header_changes(set: &[(&str, &str)]) -> CommonResponse {
    let option = |&(key, value): &(&str, &str)| HeaderValueOption {
        header: Some(HeaderValue {
            key: key.into(),
            raw_value: value.into(),
            ..HeaderValue::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    };
    let mutation = HeaderMutation {
        set_headers: set.iter().map(option).collect(),
        remove_headers: Vec::new(),
    };
    CommonResponse {
        header_mutation: Some(mutation),
        ..CommonResponse::default()
    }
}

fn text(value: &str) -> Kind {
    Kind::StringValue(value.to_owned())
}

fn structure<const N: usize>(fields: [(&str, Kind); N]) -> Kind {
    let field = |(name, kind): (&str, Kind)| (name.to_owned(), Value { kind: Some(kind) });
    Kind::StructValue(Struct {
        fields: fields.into_iter().map(field).collect(),
    })
}

fn is_event_stream(headers: Option<&HeaderMap>) -> bool {
    let mut headers = headers.iter().flat_map(|map| &map.headers);
    headers.any(|header| {
        header.key == "content-type" && header.raw_value.starts_with(b"text/event-stream")
    })
}

/// Returns the processing mode of the shipped configuration, with response bodies added.
fn observing_mode() -> ProcessingMode {
    ProcessingMode {
        request_header_mode: HeaderSendMode::Send.into(),
        response_header_mode: HeaderSendMode::Send.into(),
        request_body_mode: BodySendMode::Buffered.into(),
        response_body_mode: BodySendMode::Streamed.into(),
        request_trailer_mode: HeaderSendMode::Skip.into(),
        response_trailer_mode: HeaderSendMode::Send.into(),
    }
}
