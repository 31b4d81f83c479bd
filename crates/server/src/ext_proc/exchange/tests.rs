//! Transcripts of exchanges. Each line describes one effect, so that a whole exchange is visible at
//! a glance.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use warmroute_core::router::{Mode, RankEndpoint, RouteTarget};
use warmroute_core::worker::WorkerRank;

mod any_order;
mod contract;
mod first_token;
mod transcript;

use super::*;
use crate::ext_proc::headers::{self, RequestHead, ResponseHead};
use crate::ext_proc::message::BodyMode;
use crate::ext_proc::wire::BodyPiece;
use crate::request::{BodyEdit, ModelRename, RequestBody, hint_headers};
use transcript::{describe, describe_one};

const CHAT: &str = "/v1/chat/completions";

fn options() -> ExchangeOptions {
    ExchangeOptions {
        body_limit: 200_000,
        ..ExchangeOptions::default()
    }
}

fn exchange(request: BodyMode, response: BodyMode) -> Exchange {
    exchange_with(
        options(),
        ExchangeStart::default(),
        BodyModes { request, response },
    )
}

fn exchange_with(options: ExchangeOptions, start: ExchangeStart, modes: BodyModes) -> Exchange {
    let mut exchange = Exchange::new(Arc::new(options), start);
    exchange.configure(modes);
    exchange
}

fn headers(path: &str, end: bool) -> ExchangeMessage {
    let head = RequestHead {
        method: "POST".into(),
        path: path.into(),
        ..RequestHead::default()
    };
    ExchangeMessage::RequestHeaders {
        head,
        end_of_stream: end,
    }
}

fn body(bytes: &[u8], end: bool) -> ExchangeMessage {
    ExchangeMessage::RequestBody(BodyPiece::new(bytes.to_vec(), end))
}

fn response(event_stream: bool, end: bool) -> ExchangeMessage {
    ExchangeMessage::ResponseHeaders {
        head: ResponseHead {
            status: 200,
            is_event_stream: event_stream,
            ..ResponseHead::default()
        },
        end_of_stream: end,
    }
}

fn response_body(bytes: &[u8], end: bool) -> ExchangeMessage {
    ExchangeMessage::ResponseBody(BodyPiece::new(bytes.to_vec(), end))
}

fn to_worker() -> RouteTarget {
    let rank = WorkerRank::new(u64::MAX, 3);
    let endpoint = "10.0.0.1:8000".parse().unwrap();
    RouteTarget {
        to: Some(RankEndpoint {
            rank,
            endpoint,
            via: Default::default(),
            several_ranks: false,
        }),
        predicted_cached_tokens: Some(32),
        mode: Mode::Exact,
        ..RouteTarget::PASSTHROUGH
    }
}

fn to_no_worker() -> RouteTarget {
    RouteTarget::PASSTHROUGH
}

const ROUTE_HEADERS: &str = "x-worker-instance-id=18446744073709551615 x-dp-rank=3 \
                       x-gateway-destination-endpoint=10.0.0.1:8000 +metadata";

/// Returns request headers with every routing hint.
fn headers_with_hints(path: &str) -> ExchangeMessage {
    let hint = |name: &str| HeaderValue {
        key: name.to_ascii_uppercase(),
        value: "1".into(),
        ..HeaderValue::default()
    };
    ExchangeMessage::RequestHeaders {
        head: RequestHead {
            path: path.into(),
            headers: Arc::new(HeaderMap {
                headers: hint_headers().chain(["x-other"]).map(hint).collect(),
            }),
            ..RequestHead::default()
        },
        end_of_stream: false,
    }
}

#[test]
fn hints_of_untrusted_clients_are_removed() {
    let modes = [
        BodyMode::None,
        BodyMode::Buffered,
        BodyMode::BufferedPartial,
        BodyMode::Streamed,
        BodyMode::FullDuplexStreamed,
        BodyMode::Grpc,
    ];
    let removed = |trusted: bool, mode, path: &str, route: RouteTarget| {
        let mut options = options();
        if !trusted {
            options.routing_headers = options.routing_headers.without_client_hints();
        }
        let modes = BodyModes {
            request: mode,
            response: BodyMode::None,
        };
        let mut exchange = exchange_with(options, ExchangeStart::default(), modes);
        let mut lines = describe(exchange.on_message(headers_with_hints(path)));
        if !exchange.is_routing() {
            lines.extend(describe(exchange.on_message(body(b"", true))));
        }
        lines.extend(describe(exchange.on_route(route)));
        let changed = lines.join(" ");
        let is_changed = |name: &&str| {
            changed
                .split(' ')
                .any(|word| word == format!("-{name}") || word.starts_with(&format!("{name}=")))
        };
        hint_headers().filter(is_changed).collect::<Vec<_>>()
    };
    for mode in modes {
        for path in [CHAT, "/v1/models", "/unknown"] {
            for route in [to_worker(), to_no_worker()] {
                assert_eq!(
                    removed(false, mode, path, route.clone()),
                    hint_headers().collect::<Vec<_>>(),
                    "{mode:?} {path}"
                );
                let trusted = removed(true, mode, path, route);
                assert!(
                    !trusted.contains(&"x-warmroute-override"),
                    "{mode:?} {path}"
                );
            }
        }
    }
}

#[test]
fn exchange_starting_with_body_passes_through() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    assert_eq!(
        describe(buffered.on_message(body(b"{}", true))),
        ["request body"]
    );
    let mut duplex = exchange(BodyMode::FullDuplexStreamed, BodyMode::None);
    assert_eq!(
        describe(duplex.on_message(body(b"{}", true))),
        ["request body 2 end"]
    );
}

#[test]
fn timeout_is_extended_only_in_modes_with_timeout() {
    let wait = Duration::from_millis(30_500);
    let extension = |exchange: &Exchange| exchange.extend_timeout(wait).map(describe_one);
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert_eq!(extension(&buffered), None);
    buffered.on_message(body(b"{}", true));
    assert_eq!(
        extension(&buffered).as_deref(),
        Some("extend timeout 30.500")
    );
    buffered.on_route(to_worker());
    assert_eq!(extension(&buffered), None);

    let mut duplex = exchange(BodyMode::FullDuplexStreamed, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    duplex.on_message(body(b"{}", true));
    assert_eq!(
        extension(&duplex),
        None,
        "full-duplex mode has no message timeout"
    );
}

#[test]
fn trailers_without_body_get_one_reply() {
    let mut duplex = exchange(BodyMode::FullDuplexStreamed, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    assert_eq!(
        describe(duplex.on_message(ExchangeMessage::RequestTrailers)),
        ["route whole 0"]
    );
    assert_eq!(
        describe(duplex.on_route(to_worker())),
        [
            format!("request headers {ROUTE_HEADERS}"),
            "request trailers".into()
        ]
    );
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert_eq!(
        describe(buffered.on_message(ExchangeMessage::RequestTrailers)),
        ["request trailers"]
    );
}
