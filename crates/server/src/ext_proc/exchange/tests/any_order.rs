//! Properties that hold for every order of messages, valid or not, parsed from the wire.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProtocolConfiguration,
};
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message as _;
use warmroute_property_tests::property_config;

use super::*;
use crate::ext_proc::config::ResponseConfig;
use crate::ext_proc::message::IncomingMessage;
use crate::ext_proc::response_content::MissingContent;
use crate::ext_proc::wire::RawProcessingRequest;

/// One input of an exchange.
#[derive(Clone, Debug)]
enum Step {
    Wire(Request),
    /// The answer to a route that may never have been requested.
    Routed(bool),
    /// The body is late, or the budget for bodies is exhausted.
    Deadline,
    /// Another filter has observed the response body.
    Content(ContentReport),
}

fn http_headers(pairs: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let header = |&(key, value): &(&str, &str)| HeaderValue {
        key: key.to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = Some(HeaderMap {
        headers: pairs.iter().map(header).collect(),
    });
    HttpHeaders {
        headers,
        end_of_stream,
        ..HttpHeaders::default()
    }
}

fn http_body(body: Vec<u8>, end_of_stream: bool) -> HttpBody {
    HttpBody {
        body,
        end_of_stream,
        ..HttpBody::default()
    }
}

fn request_headers(inference: bool, end: bool) -> Request {
    let path = if inference { CHAT } else { "/v1/files" };
    Request::RequestHeaders(http_headers(
        &[
            (":method", "POST"),
            (":path", path),
            (headers::WORKER_ID, "1"),
        ],
        end,
    ))
}

fn response_headers(stream: bool, end: bool) -> Request {
    let kind = if stream {
        "text/event-stream"
    } else {
        "application/json"
    };
    Request::ResponseHeaders(http_headers(
        &[(":status", "200"), ("content-type", kind)],
        end,
    ))
}

fn content_report() -> impl Strategy<Value = ContentReport> {
    prop::sample::select(vec![
        ContentReport::Content,
        ContentReport::Stopped,
        ContentReport::Ended(MissingContent::Empty),
    ])
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = || vec(any::<u8>(), 0..6);
    prop_oneof![
        3 => any::<(bool, bool)>().prop_map(|(inference, end)| Step::Wire(request_headers(inference, end))),
        6 => (bytes(), prop::bool::weighted(0.2))
            .prop_map(|(body, end)| Step::Wire(Request::RequestBody(http_body(body, end)))),
        1 => Just(Step::Wire(Request::RequestTrailers(HttpTrailers::default()))),
        2 => any::<(bool, bool)>().prop_map(|(stream, end)| Step::Wire(response_headers(stream, end))),
        3 => (bytes(), prop::bool::weighted(0.2))
            .prop_map(|(body, end)| Step::Wire(Request::ResponseBody(http_body(body, end)))),
        1 => Just(Step::Wire(Request::ResponseTrailers(HttpTrailers::default()))),
        4 => any::<bool>().prop_map(Step::Routed),
        1 => Just(Step::Deadline),
        2 => content_report().prop_map(Step::Content),
    ]
}

/// An exchange with its inputs and outputs so far.
struct ExchangeRecord {
    exchange: Exchange,
    duplex: bool,
    config: Option<ProtocolConfiguration>,
    sent: HashMap<&'static str, usize>,
    replied: HashMap<&'static str, usize>,
    names: Vec<&'static str>,
    bytes_in: Vec<u8>,
    bytes_out: Vec<u8>,
    ends_out: usize,
    effects: HashMap<&'static str, usize>,
}

impl ExchangeRecord {
    fn new(request: BodySendMode, response: BodySendMode) -> Self {
        let response_headers = ResponseConfig {
            mode: true,
            worker: true,
            prediction: true,
            why: true,
        };
        let options = ExchangeOptions {
            body_limit: 12,
            response_headers,
            conformance: true,
            ..ExchangeOptions::default()
        };
        let config = ProtocolConfiguration {
            request_body_mode: request.into(),
            response_body_mode: response.into(),
            ..ProtocolConfiguration::default()
        };
        Self {
            exchange: Exchange::new(Arc::new(options), ExchangeStart::default()),
            duplex: request == BodySendMode::FullDuplexStreamed,
            config: Some(config),
            sent: HashMap::new(),
            replied: HashMap::new(),
            names: Vec::new(),
            bytes_in: Vec::new(),
            bytes_out: Vec::new(),
            ends_out: 0,
            effects: HashMap::new(),
        }
    }

    fn apply(&mut self, step: Step) {
        let effects = match step {
            Step::Routed(has_worker) => self.exchange.on_route(if has_worker {
                to_worker()
            } else {
                to_no_worker()
            }),
            Step::Deadline => self.exchange.on_deadline(),
            Step::Content(report) => self.exchange.on_content_report(report),
            Step::Wire(request) => {
                *self.sent.entry(name_of(&request)).or_default() += 1;
                if let Request::RequestBody(body) = &request {
                    self.bytes_in.extend_from_slice(&body.body);
                }
                let protocol_config = self.config.take();
                let wire = ProcessingRequest {
                    request: Some(request),
                    protocol_config,
                    ..ProcessingRequest::default()
                };
                let wire = RawProcessingRequest::decode(&wire.encode_to_vec()[..]).unwrap();
                let incoming = IncomingMessage::parse(wire);
                if let Some(modes) = incoming.modes {
                    self.exchange.configure(modes);
                }
                self.exchange.on_message(incoming.message.unwrap())
            }
        };
        for effect in effects {
            self.record(effect);
        }
    }

    fn record(&mut self, effect: Effect) {
        let name = match effect {
            Effect::Reply(reply) => {
                return self.record_reply(reply.into_message().response.unwrap());
            }
            Effect::Route(_) => "route",
            Effect::ResponseStarted(_) => "status",
            Effect::FirstToken { .. } => "first token",
            Effect::ContentMissing(_) => "content missing",
            Effect::Completed => "finished",
            Effect::ResponseStored(_) => "response stored",
            Effect::ResponseChunk(_) => return,
        };
        *self.effects.entry(name).or_default() += 1;
    }

    fn record_reply(&mut self, response: Response) {
        let name = match response {
            Response::RequestHeaders(_) => "request headers",
            Response::RequestBody(body) => {
                let mutation = body
                    .response
                    .and_then(|common| common.body_mutation)
                    .and_then(|body| body.mutation);
                if let Some(Mutation::StreamedResponse(piece)) = mutation {
                    self.bytes_out.extend_from_slice(&piece.body);
                    self.ends_out += usize::from(piece.end_of_stream);
                }
                "request body"
            }
            Response::RequestTrailers(_) => "request trailers",
            Response::ResponseHeaders(_) => "response headers",
            Response::ResponseBody(_) => "response body",
            Response::ResponseTrailers(_) => "response trailers",
            other => panic!("unexpected {other:?}"),
        };
        *self.replied.entry(name).or_default() += 1;
        self.names.push(name);
    }

    /// Checks that every reply belongs to a message, and that no effect occurs twice.
    fn check(&self) {
        for (name, replied) in &self.replied {
            let sent = self.sent.get(name).copied().unwrap_or(0);
            // In full-duplex mode a body may be returned in other pieces.
            let pieces_differ = self.duplex && *name == "request body" && sent > 0;
            assert!(
                *replied <= sent || pieces_differ,
                "{replied} replies to {sent} {name}"
            );
        }
        let has = |name| self.effects.contains_key(name);
        assert!(
            has("finished") || !has("content missing"),
            "content is missing only at the end"
        );
        for (name, times) in &self.effects {
            assert_eq!(*times, 1, "{name}");
        }
        if self.duplex {
            assert!(
                self.bytes_in.starts_with(&self.bytes_out),
                "{:?} of {:?}",
                self.bytes_out,
                self.bytes_in
            );
        }
    }
}

fn name_of(request: &Request) -> &'static str {
    match request {
        Request::RequestHeaders(_) => "request headers",
        Request::RequestBody(_) => "request body",
        Request::RequestTrailers(_) => "request trailers",
        Request::ResponseHeaders(_) => "response headers",
        Request::ResponseBody(_) => "response body",
        Request::ResponseTrailers(_) => "response trailers",
    }
}

const MODES: [BodySendMode; 6] = [
    BodySendMode::None,
    BodySendMode::Buffered,
    BodySendMode::BufferedPartial,
    BodySendMode::Streamed,
    BodySendMode::FullDuplexStreamed,
    BodySendMode::Grpc,
];

fn body_mode() -> impl Strategy<Value = BodySendMode> {
    prop::sample::select(&MODES[..])
}

proptest! {
    #![proptest_config(property_config(2000))]

    #[test]
    fn any_message_order_gets_only_due_replies(
        request in body_mode(), response in body_mode(), steps in vec(step(), 0..24),
    ) {
        let mut record = ExchangeRecord::new(request, response);
        for step in steps {
            record.apply(step);
            record.check();
        }
    }

    #[test]
    fn full_duplex_returns_every_byte_once_in_order(
        inference: bool, has_worker: bool, trailers: bool,
        chunks in vec(vec(any::<u8>(), 0..8), 0..10), route_after in 0..14usize, response_after in 0..14usize,
    ) {
        let mut record = ExchangeRecord::new(BodySendMode::FullDuplexStreamed, BodySendMode::None);
        let mut messages = vec![request_headers(inference, chunks.is_empty() && !trailers)];
        let last = chunks.len().saturating_sub(1);
        let body = |(at, chunk)| Request::RequestBody(http_body(chunk, at == last && !trailers));
        messages.extend(chunks.into_iter().enumerate().map(body));
        if trailers {
            messages.push(Request::RequestTrailers(HttpTrailers::default()));
        }
        let mut waited = 0;
        let mut routed = false;
        let mut steps_since_route = 0;
        let mut after = |record: &mut ExchangeRecord, limit| {
            if record.exchange.is_routing() {
                waited += 1;
                if waited > route_after.min(limit) {
                    record.apply(Step::Routed(has_worker));
                    routed = true;
                }
            } else if routed {
                // A worker may respond before the request has ended.
                steps_since_route += 1;
                if steps_since_route == response_after {
                    record.apply(Step::Wire(response_headers(true, false)));
                }
            }
        };
        for message in messages {
            record.apply(Step::Wire(message));
            after(&mut record, usize::MAX);
        }
        after(&mut record, 0);
        record.check();
        prop_assert_eq!(&record.bytes_out, &record.bytes_in);
        prop_assert_eq!(record.names.first(), Some(&"request headers"));
        prop_assert_eq!(record.replied["request headers"], 1);
        prop_assert_eq!(record.replied.contains_key("request trailers"), trailers);
        let ended_by_body = !trailers && record.sent.contains_key("request body");
        prop_assert_eq!(record.ends_out, usize::from(ended_by_body));
    }
}
