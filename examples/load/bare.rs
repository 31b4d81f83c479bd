//! The least that an external processor can be: tonic as it comes, every message answered at once with a change of the same
//! kind as warmroute's, workers in turn, and nothing read of any body. Whatever is above it is what deciding costs.

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
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Asked;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ProcessingRequest,
    ProcessingResponse, TrailersResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures_util::stream::BoxStream;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::answers;

/// What the server is told.
#[derive(Debug, Parser)]
pub(crate) struct BareCli {
    /// Where Envoy reaches it.
    #[arg(long)]
    socket: PathBuf,
    /// The first of the workers.
    #[arg(long)]
    first: SocketAddr,
    /// How many there are.
    #[arg(long)]
    workers: usize,
    /// Has the bodies of answers shown.
    #[arg(long)]
    watch: bool,
}

/// Serves until it is ended.
pub(crate) async fn serve(cli: BareCli) -> anyhow::Result<()> {
    let workers = answers::addresses(cli.first, cli.workers)
        .map(|address| address.to_string())
        .collect();
    let bare = Bare {
        workers,
        turn: Arc::default(),
        watch: cli.watch,
    };
    let incoming = UnixListenerStream::new(UnixListener::bind(&cli.socket)?);
    let service = ExternalProcessorServer::new(bare).max_decoding_message_size(usize::MAX);
    Ok(Server::builder()
        .add_service(service)
        .serve_with_incoming(incoming)
        .await?)
}

#[derive(Clone)]
struct Bare {
    workers: Arc<[String]>,
    turn: Arc<AtomicUsize>,
    watch: bool,
}

/// One stream: which filter it speaks for, and what came.
struct Exchange {
    bare: Bare,
    is_probe: bool,
    incoming: Streaming<ProcessingRequest>,
    over: bool,
}

#[tonic::async_trait]
impl ExternalProcessor for Bare {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let is_probe = request
            .metadata()
            .get("x-warmroute-filter")
            .is_some_and(|filter| filter == "probe");
        let exchange = Exchange {
            bare: self.clone(),
            is_probe,
            incoming: request.into_inner(),
            over: false,
        };
        Ok(Response::new(Box::pin(futures_util::stream::unfold(
            exchange,
            Exchange::next,
        ))))
    }
}

impl Exchange {
    async fn next(mut self) -> Option<(Result<ProcessingResponse, Status>, Self)> {
        if self.over {
            return None;
        }
        let asked = self.incoming.message().await.ok()??.request?;
        let answer = self.answer(asked);
        Some((Ok(answer), self))
    }

    fn answer(&mut self, asked: Asked) -> ProcessingResponse {
        let go_on = || Some(CommonResponse::default());
        let bare = |answer| ProcessingResponse {
            response: Some(answer),
            ..ProcessingResponse::default()
        };
        match asked {
            Asked::RequestHeaders(_) => bare(Answer::RequestHeaders(HeadersResponse {
                response: go_on(),
            })),
            Asked::RequestBody(_) => self.bare.steer(),
            Asked::RequestTrailers(_) => bare(Answer::RequestTrailers(TrailersResponse::default())),
            Asked::ResponseHeaders(headers) => {
                let mut answer = changing(
                    Answer::ResponseHeaders,
                    |response| HeadersResponse { response },
                    &[MODE],
                );
                if self.bare.watch && is_event_stream(headers.headers.as_ref()) {
                    answer.mode_override = Some(watching());
                }
                answer
            }
            Asked::ResponseBody(body) => {
                self.over = self.is_probe && !body.body.is_empty();
                bare(Answer::ResponseBody(BodyResponse { response: go_on() }))
            }
            Asked::ResponseTrailers(_) => {
                bare(Answer::ResponseTrailers(TrailersResponse::default()))
            }
        }
    }
}

const MODE: (&str, &str) = ("x-warmroute-mode", "bare");

impl Bare {
    fn steer(&self) -> ProcessingResponse {
        let worker = &self.workers[self.turn.fetch_add(1, Ordering::Relaxed) % self.workers.len()];
        let id = "18446744073709551615";
        let set = [
            ("x-worker-instance-id", id),
            ("x-dp-rank", "0"),
            ("x-gateway-destination-endpoint", worker),
        ];
        let mut answer = changing(
            Answer::RequestBody,
            |response| BodyResponse { response },
            &set,
        );
        if let Some(Answer::RequestBody(BodyResponse {
            response: Some(common),
        })) = &mut answer.response
        {
            common.clear_route_cache = true;
        }
        let to = structure([
            ("x-gateway-destination-endpoint", text(worker)),
            ("worker_id", text(id)),
        ]);
        let ours = structure([("exchange", text("0123456789abcdef"))]);
        let Kind::StructValue(metadata) = structure([("envoy.lb", to), ("warmroute", ours)]) else {
            return answer;
        };
        answer.dynamic_metadata = Some(metadata);
        answer
    }
}

fn changing<R>(
    answer: fn(R) -> Answer,
    wrap: fn(Option<CommonResponse>) -> R,
    set: &[(&str, &str)],
) -> ProcessingResponse {
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
    let common = CommonResponse {
        header_mutation: Some(mutation),
        ..CommonResponse::default()
    };
    ProcessingResponse {
        response: Some(answer(wrap(Some(common)))),
        ..ProcessingResponse::default()
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

/// As the shipped configuration, but with the bodies of answers.
fn watching() -> ProcessingMode {
    ProcessingMode {
        request_header_mode: HeaderSendMode::Send.into(),
        response_header_mode: HeaderSendMode::Send.into(),
        request_body_mode: BodySendMode::Buffered.into(),
        response_body_mode: BodySendMode::Streamed.into(),
        request_trailer_mode: HeaderSendMode::Skip.into(),
        response_trailer_mode: HeaderSendMode::Send.into(),
    }
}
