//! One exchange with messages in any order, valid or invalid, and all other events.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use proto::ProcessingRequest;
use proto::processing_request::Request;
use warmroute_core::policy::EndpointSubset;
use warmroute_core::router::{Mode, RankEndpoint, RouteTarget};
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};
use warmroute_server::ext_proc::config::ObserveMode;
use warmroute_server::ext_proc::exchange::{ExchangeOptions, ExchangeStart, ResponseHeaderOptions};
use warmroute_server::ext_proc::message::{BodyMode, IncomingMessage};
use warmroute_server::ext_proc::reply::{BodyEdit, ImmediateReply, ModelRename, RouteReply};
use warmroute_server::ext_proc::response_content::{ContentReport, MissingContent};
use warmroute_server::ext_proc::routing_headers::{HeaderNames, HeaderProfile, RoutingHeaders};
use warmroute_server::ext_proc::{Effect, Exchange, headers};
use warmroute_server::prefill::MirrorTarget;
use warmroute_server::request::RequestBody;

use super::input::Input;
use super::watch::{ExchangeWatch, message_of};

const MODES: [BodyMode; 6] = [
    BodyMode::None,
    BodyMode::Buffered,
    BodyMode::BufferedPartial,
    BodyMode::Streamed,
    BodyMode::FullDuplex,
    BodyMode::Grpc,
];

const PATHS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/files",
    "/v1/models",
    "/v1/audio/speech",
];

/// Body modes of the protocol, and an undefined one.
const WIRE_MODES: [i32; 7] = [0, 1, 2, 3, 4, 5, 77];

/// Applies messages and other events in input order, and then the events that end the exchange.
pub(crate) fn exchange(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut run = ExchangeRun::new(&mut input);
    while !input.is_empty() {
        run.step(&mut input);
    }
    run.end();
}

struct ExchangeRun {
    exchange: Exchange,
    watch: ExchangeWatch,
    /// Last endpoint subset in the metadata.
    subset: Option<EndpointSubset>,
    /// Body that was passed with the effect `Route`.
    whole: Option<Bytes>,
    first: Option<proto::ProtocolConfiguration>,
}

impl ExchangeRun {
    fn new(input: &mut Input<'_>) -> Self {
        let options = options(input);
        let start = ExchangeStart {
            exchange_key: input.rarely().then(|| "probe".to_owned()),
            is_sampled: input.rarely(),
            request_id: if input.flag() {
                "request".to_owned()
            } else {
                String::new()
            },
            pool: None,
        };
        let first = input.flag().then(|| configuration(input));
        let watch = ExchangeWatch::new(options.assumed_modes);
        let exchange = Exchange::new(Arc::new(options), start);
        Self {
            exchange,
            watch,
            subset: None,
            whole: None,
            first,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let held = self.exchange.buffered_bytes();
        let effects = match input.below(24) {
            0 | 1 => return self.wire(input, request_headers),
            2..=6 => return self.wire(input, |input| Request::RequestBody(body(input))),
            7 => {
                return self.wire(input, |_| {
                    Request::RequestTrailers(proto::HttpTrailers::default())
                });
            }
            8 | 9 => return self.wire(input, response_headers),
            10..=13 => return self.wire(input, |input| Request::ResponseBody(body(input))),
            14 => {
                return self.wire(input, |_| {
                    Request::ResponseTrailers(proto::HttpTrailers::default())
                });
            }
            15..=18 => self.route(input),
            19 => self.exchange.on_immediate(&immediate_reply()),
            20 => {
                let gathering = self.exchange.is_gathering();
                let effects = self.exchange.on_deadline();
                assert_eq!(
                    effects.len(),
                    usize::from(gathering),
                    "a deadline has an effect only while a body is gathered"
                );
                effects
            }
            21 => self.exchange.on_content_report(content_report(input)),
            22 => {
                self.check_timeout_extension();
                assert_eq!(self.exchange.buffered_bytes(), held);
                return;
            }
            _ => return self.raw(input),
        };
        self.record_effects(effects);
    }

    /// Applies a message that is decoded from the wire.
    fn wire(&mut self, input: &mut Input<'_>, message: impl Fn(&mut Input<'_>) -> Request) {
        let mut wire = ProcessingRequest {
            request: Some(message(input)),
            ..ProcessingRequest::default()
        };
        if input.rarely() {
            wire.metadata_context = Some(metadata(input));
        }
        wire.protocol_config = self.first.take();
        self.apply(wire);
    }

    /// Applies any decodable message.
    fn raw(&mut self, input: &mut Input<'_>) {
        use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingRequest as Wire;
        if let Ok(wire) = <Wire as prost::Message>::decode(input.chunk()) {
            self.apply(wire);
        }
    }

    fn apply(&mut self, wire: ProcessingRequest) {
        self.watch.on_message(&wire, &self.exchange);
        let incoming = IncomingMessage::parse(wire);
        if let Some(modes) = incoming.modes {
            self.exchange.configure(modes);
        }
        self.watch.modes(self.exchange.modes());
        self.subset = incoming.metadata.subset.clone().or(self.subset.take());
        self.exchange.apply_metadata(incoming.metadata);
        if let Some(message) = incoming.message {
            let effects = self.exchange.on_message(message);
            self.record_effects(effects);
        }
    }

    /// Applies a reply to the effect `Route`, even if no route is pending.
    fn route(&mut self, input: &mut Input<'_>) -> Vec<Effect> {
        let edit = match &self.whole {
            // Only a JSON object can be edited.
            Some(body) if !body.is_empty() && input.flag() => Some(BodyEdit {
                body: Bytes::copy_from_slice(input.chunk()),
                model_rename: input.flag().then(|| ModelRename {
                    served: "served".to_owned(),
                    requested: "asked \"so\"".to_owned(),
                }),
            }),
            _ => None,
        };
        let target = if input.below(4) == 0 {
            RouteTarget::PASSTHROUGH
        } else {
            target(input)
        };
        let copy = input.rarely().then(|| MirrorTarget {
            cluster: "prefill".into(),
            endpoint: warmroute_core::worker::WorkerEndpoint(([10, 0, 0, 9], 9).into()),
        });
        let route_reply = RouteReply {
            target,
            body_edit: edit,
            mirror_to: copy,
            first_token_with_headers: input.rarely(),
            may_store_response: input.rarely(),
        };
        self.watch
            .on_route(&route_reply, self.whole.as_ref(), &self.exchange);
        self.exchange.on_route(route_reply)
    }

    fn check_timeout_extension(&self) {
        let Some(effect) = self.exchange.extend_timeout(Duration::from_millis(1500)) else {
            return;
        };
        assert!(
            self.exchange.is_routing(),
            "the timeout is extended although no route is pending"
        );
        let Effect::Reply(reply) = effect else {
            panic!("only a reply can extend the timeout")
        };
        let reply = message_of(&reply);
        assert!(reply.response.is_none() && reply.override_message_timeout.is_some());
    }

    fn record_effects(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            if let Effect::Route(inbound) = &effect {
                assert_eq!(inbound.subset, self.subset, "the endpoint subset is lost");
                if let RequestBody::Whole(body) = &inbound.body {
                    self.whole = Some(body.clone());
                }
            }
            self.watch.on_effect(effect);
        }
        self.watch.check();
    }

    /// Ends the exchange with the last messages of both sides and the pending route.
    fn end(mut self) {
        let message = |request| ProcessingRequest {
            request: Some(request),
            ..ProcessingRequest::default()
        };
        if self.watch.request_open() {
            self.apply(message(Request::RequestBody(proto::HttpBody {
                end_of_stream: true,
                ..Default::default()
            })));
        }
        if self.exchange.is_gathering() {
            self.apply(message(Request::RequestTrailers(
                proto::HttpTrailers::default(),
            )));
        }
        if self.exchange.is_routing() {
            let route_reply = RouteReply::from(RouteTarget::PASSTHROUGH);
            self.watch.on_route(&route_reply, None, &self.exchange);
            let effects = self.exchange.on_route(route_reply);
            self.record_effects(effects);
        }
        self.watch.request_ended();
        self.apply(message(Request::ResponseTrailers(
            proto::HttpTrailers::default(),
        )));
        assert_eq!(
            self.exchange.buffered_bytes(),
            0,
            "bytes are still buffered after the end"
        );
        assert!(
            !self.exchange.is_routing()
                && !self.exchange.is_gathering()
                && !self.exchange.awaits_first_token()
        );
        self.watch.assert_ended();
        for effects in [
            self.exchange.on_deadline(),
            self.exchange.on_content_report(ContentReport::Content),
            self.exchange.on_route(routed_target()),
        ] {
            assert!(effects.is_empty(), "an event has effects after the end");
        }
    }
}

fn content_report(input: &mut Input<'_>) -> ContentReport {
    match input.below(3) {
        0 => ContentReport::Content,
        1 => ContentReport::Stopped,
        _ => ContentReport::Ended(MissingContent::Empty),
    }
}

fn options(input: &mut Input<'_>) -> ExchangeOptions {
    let all = input.flag();
    let answers = ResponseHeaderOptions {
        mode: all,
        worker: all,
        prediction: all,
        why: all,
    };
    let profiles = [
        HeaderProfile::WorkerId,
        HeaderProfile::Dynamo,
        HeaderProfile::GatewayApi,
        HeaderProfile::LlmD,
    ];
    let count = input.below(5);
    ExchangeOptions {
        body_limit: input.below(64) << (input.byte() & 12),
        routing_headers: RoutingHeaders::new(&profiles[..count], &HeaderNames::default()),
        clear_route_cache: input.flag(),
        assumed_modes: warmroute_server::ext_proc::message::BodyModes {
            request: input.pick(&MODES),
            response: input.pick(&MODES),
        },
        observe: input.pick(&[
            ObserveMode::FirstToken,
            ObserveMode::Off,
            ObserveMode::Usage,
            ObserveMode::Sampled(0.5),
        ]),
        output_blocks: input.rarely(),
        conformance: input.rarely(),
        response_headers: answers,
        ..ExchangeOptions::default()
    }
}

fn configuration(input: &mut Input<'_>) -> proto::ProtocolConfiguration {
    proto::ProtocolConfiguration {
        request_body_mode: input.pick(&WIRE_MODES),
        response_body_mode: input.pick(&WIRE_MODES),
        ..proto::ProtocolConfiguration::default()
    }
}

fn http_headers(pairs: &[(&str, &str)], end_of_stream: bool) -> proto::HttpHeaders {
    let header = |&(key, value): &(&str, &str)| HeaderValue {
        key: key.to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = Some(HeaderMap {
        headers: pairs.iter().map(header).collect(),
    });
    proto::HttpHeaders {
        headers,
        end_of_stream,
        ..proto::HttpHeaders::default()
    }
}

fn request_headers(input: &mut Input<'_>) -> Request {
    let mut pairs = vec![(":method", "POST"), (":path", input.pick(&PATHS))];
    for forged in [
        headers::WORKER_ID,
        headers::ENDPOINT,
        headers::MODE,
        "X-Dp-Rank",
    ] {
        if input.rarely() {
            pairs.push((forged, "1"));
        }
    }
    if input.rarely() {
        pairs.push(("content-length", "7"));
    }
    if input.rarely() {
        pairs.push((headers::REQUEST_ID, "given"));
    }
    Request::RequestHeaders(http_headers(&pairs, input.below(8) == 7))
}

fn response_headers(input: &mut Input<'_>) -> Request {
    let status = input.pick(&["200", "200", "200", "503", "404", "x"]);
    let kind = input.pick(&["text/event-stream", "application/json"]);
    Request::ResponseHeaders(http_headers(
        &[(":status", status), ("content-type", kind)],
        input.below(8) == 7,
    ))
}

fn body(input: &mut Input<'_>) -> proto::HttpBody {
    let how = input.byte();
    let chunk = input.chunk();
    // A body larger than one mutation, without an input of that size.
    let body = if how >> 3 == 31 {
        chunk.repeat(70_000 / chunk.len().max(1))
    } else {
        chunk.to_vec()
    };
    proto::HttpBody {
        body,
        end_of_stream: how & 7 == 7,
        end_of_stream_without_message: how & 7 == 6,
        ..proto::HttpBody::default()
    }
}

fn metadata(input: &mut Input<'_>) -> Metadata {
    let text = |text: &str| Value {
        kind: Some(Kind::StringValue(text.to_owned())),
    };
    let names = [
        "10.0.0.1:8000",
        "10.0.0.2:8000,10.0.0.3:8000",
        "",
        "nonsense",
        "[::1]:1",
    ];
    let list = |values| Value {
        kind: Some(Kind::ListValue(
            envoy_types::pb::google::protobuf::ListValue { values },
        )),
    };
    let value = match input.below(4) {
        0 => list(
            (0..input.below(4))
                .map(|_| text(input.pick(&names)))
                .collect(),
        ),
        1 => Value {
            kind: Some(Kind::BoolValue(true)),
        },
        2 => Value { kind: None },
        _ => text(input.pick(&names)),
    };
    let (namespace, key) = input.pick(&[
        (
            "envoy.lb.subset_hint",
            "x-gateway-destination-endpoint-subset",
        ),
        ("envoy.lb", "x-gateway-destination-endpoint-served"),
        ("warmroute", "exchange"),
        ("other", "key"),
    ]);
    let fields = Struct {
        fields: [(key.to_owned(), value)].into(),
    };
    Metadata {
        filter_metadata: [(namespace.to_owned(), fields)].into(),
        ..Metadata::default()
    }
}

fn routed_target() -> RouteTarget {
    let to = RankEndpoint {
        rank: WorkerRank {
            worker: WorkerId(u64::MAX),
            rank: DpRank(3),
        },
        endpoint: "10.0.0.1:8000".parse().expect("an address"),
        via: Default::default(),
        several_ranks: true,
    };
    RouteTarget {
        to: Some(to),
        mode: Mode::Exact,
        ..RouteTarget::PASSTHROUGH
    }
}

fn target(input: &mut Input<'_>) -> RouteTarget {
    let other = "[2001:db8::1]:8000".parse().expect("an address");
    let mut target = routed_target();
    if input.rarely() {
        target.fallbacks = vec![other];
        target.scores = vec![(other, [0.0, -1.0, f64::NAN, f64::INFINITY][input.below(4)])];
        target.prefill = target.to;
        target.why = Some("because".into());
        target.predicted_cached_tokens = Some(32);
    }
    target
}

fn immediate_reply() -> ImmediateReply {
    ImmediateReply {
        status: 429,
        headers: vec![("retry-after", "2".to_owned())],
        body: b"{}".to_vec(),
        details: "test",
    }
}
