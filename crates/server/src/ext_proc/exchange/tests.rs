//! Transcripts of exchanges. Each line describes one effect, so that a whole exchange is visible at
//! a glance.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use warmroute_core::policy::EndpointSubset;
use warmroute_core::router::{Mode, RankEndpoint, RouteTarget};
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};

mod any_order;
mod contract;
mod first_token;
mod full_duplex;
mod transcript;

use super::*;
use crate::ext_proc::headers::{self, RequestHead, ResponseHead};
use crate::ext_proc::message::BodyMode;
use crate::ext_proc::reply::{BodyEdit, ModelRename};
use crate::ext_proc::wire::BodyPiece;
use crate::request::{RequestBody, hint_headers};
use transcript::{describe, describe_one};

const CHAT: &str = "/v1/chat/completions";

fn options() -> ExchangeOptions {
    let response_headers = ResponseHeaderOptions {
        mode: true,
        ..ResponseHeaderOptions::default()
    };
    ExchangeOptions {
        body_limit: 200_000,
        response_headers,
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

fn forged_headers(path: &str) -> ExchangeMessage {
    let header = |name: &str| HeaderValue {
        key: name.into(),
        value: "1".into(),
        ..HeaderValue::default()
    };
    let sent = [headers::WORKER_ID, headers::MODE, "x-other"].map(header);
    let all = Arc::new(HeaderMap {
        headers: sent.to_vec(),
    });
    ExchangeMessage::RequestHeaders {
        head: RequestHead {
            path: path.into(),
            headers: all,
            ..Default::default()
        },
        end_of_stream: false,
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
    let rank = WorkerRank {
        worker: WorkerId(u64::MAX),
        rank: DpRank(3),
    };
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

#[test]
fn unary_response_of_buffered_body_ends_prefill() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    assert_eq!(
        describe(exchange.on_message(headers(CHAT, false))),
        ["request headers"]
    );
    assert_eq!(
        describe(exchange.on_message(body(b"{}", true))),
        ["route whole 2"]
    );
    assert_eq!(
        describe(exchange.on_route(to_worker())),
        [format!("request body {ROUTE_HEADERS}")]
    );
    let expected = [
        "response headers x-warmroute-mode=exact",
        "status 200",
        "first token",
    ];
    assert_eq!(
        describe(exchange.on_message(response(false, false))),
        expected
    );
    assert_eq!(
        describe(exchange.on_message(ExchangeMessage::ResponseTrailers)),
        ["response trailers", "finished"]
    );
}

#[test]
fn forged_routing_headers_are_removed_or_overwritten() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    let removed = "request headers -x-warmroute-mode -x-worker-instance-id";
    assert_eq!(
        describe(buffered.on_message(forged_headers(CHAT))),
        [removed]
    );
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(forged_headers(CHAT));
    duplex.on_message(body(b"", true));
    let lines = describe(duplex.on_route(to_worker()));
    let set = ROUTE_HEADERS.strip_suffix(" +metadata").unwrap();
    assert_eq!(
        lines[0],
        format!("request headers content-length=0 {set} -x-warmroute-mode +metadata")
    );
    let mut passed = exchange(BodyMode::FullDuplex, BodyMode::None);
    passed.on_message(forged_headers(CHAT));
    passed.on_message(body(b"", true));
    let removed = removed.replace("headers", "headers content-length=0");
    assert_eq!(describe(passed.on_route(to_no_worker()))[0], removed);
}

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
        BodyMode::FullDuplex,
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
fn request_without_body_is_routed_at_its_headers() {
    let buffered = [
        BodyMode::None,
        BodyMode::Buffered,
        BodyMode::BufferedPartial,
    ];
    for mode in
        buffered
            .into_iter()
            .chain([BodyMode::Streamed, BodyMode::FullDuplex, BodyMode::Grpc])
    {
        let mut exchange = exchange(mode, BodyMode::None);
        assert_eq!(
            describe(exchange.on_message(headers("/v1/models", true))),
            ["route absent"],
            "{mode:?}"
        );
        assert_eq!(
            describe(exchange.on_route(to_worker())),
            [format!("request headers {ROUTE_HEADERS}")],
            "{mode:?}"
        );
        assert!(exchange.on_message(body(b"", true)).is_empty(), "{mode:?}");
    }
}

#[test]
fn body_of_other_path_is_suppressed() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    assert_eq!(
        describe(buffered.on_message(headers("/v1/files", false))),
        ["route body not received"]
    );
    assert_eq!(
        describe(buffered.on_route(to_worker())),
        [format!("request headers {ROUTE_HEADERS} mode 0/0")]
    );
    // With `allow_mode_override: false`, Envoy ignores the mode override silently, and then waits
    // for a reply.
    assert_eq!(
        describe(buffered.on_message(body(b"abc", true))),
        ["request body"]
    );
    // Full-duplex mode cannot be overridden. Every byte is returned.
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    assert_eq!(
        describe(duplex.on_message(headers("/v1/files", false))),
        ["route body not received"]
    );
    duplex.on_route(to_worker());
    assert_eq!(
        describe(duplex.on_message(body(b"abc", false))),
        ["request body 3"]
    );
    assert_eq!(
        describe(duplex.on_message(body(b"", true))),
        ["request body 0 end"]
    );
    assert!(duplex.on_message(body(b"", true)).is_empty());
}

fn tunnel_headers(method: &str, fields: &[(&str, &str)]) -> ExchangeMessage {
    let header = |&(name, value): &(&str, &str)| HeaderValue {
        key: name.into(),
        value: value.into(),
        ..HeaderValue::default()
    };
    let head = RequestHead {
        method: method.into(),
        path: CHAT.into(),
        headers: Arc::new(HeaderMap {
            headers: fields.iter().map(header).collect(),
        }),
        ..RequestHead::default()
    };
    ExchangeMessage::RequestHeaders {
        head,
        end_of_stream: false,
    }
}

#[test]
fn upgrade_is_routed_at_its_headers() {
    let upgrade = [
        ("connection", "keep-alive"),
        ("connection", "x, Upgrade"),
        ("upgrade", "websocket"),
    ];
    let cases: [(&str, &[_], bool); 4] = [
        ("GET", &upgrade, true),
        ("CONNECT", &[(":protocol", "websocket")], true),
        ("GET", &upgrade[..2], false),
        ("POST", &upgrade[2..], false),
    ];
    for mode in [
        BodyMode::Buffered,
        BodyMode::BufferedPartial,
        BodyMode::FullDuplex,
    ] {
        for (method, fields, is_tunnel) in cases {
            let mut exchange = exchange(mode, BodyMode::None);
            let effects = describe(exchange.on_message(tunnel_headers(method, fields)));
            let is_routed = effects == ["route body not received"];
            assert_eq!(is_routed, is_tunnel, "{mode:?} {method} {effects:?}");
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
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    assert_eq!(
        describe(duplex.on_message(body(b"{}", true))),
        ["request body 2 end"]
    );
}

#[test]
fn oversize_body_is_routed_by_load_and_unchanged() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(&[0; 150_000], false));
    assert_eq!(
        describe(exchange.on_message(body(&[0; 60_000], false))),
        ["route too large 210000"]
    );
    assert!(
        exchange.on_message(body(&[0; 1_000], false)).is_empty(),
        "held while the route is chosen"
    );
    let returned_bytes: usize = describe(exchange.on_route(to_worker()))
        .iter()
        .filter_map(|line| line.strip_prefix("request body ")?.parse::<usize>().ok())
        .sum();
    assert_eq!(returned_bytes, 211_000);
    assert_eq!(
        describe(exchange.on_message(body(&[0; 10], true))),
        ["request body 10 end"]
    );
}

#[test]
fn streamed_body_is_routed_by_its_headers() {
    let mut exchange = exchange(BodyMode::Streamed, BodyMode::None);
    assert_eq!(
        describe(exchange.on_message(headers(CHAT, false))),
        ["route streamed"]
    );
    assert_eq!(
        describe(exchange.on_route(to_worker())),
        [format!("request headers {ROUTE_HEADERS}")]
    );
    assert_eq!(
        describe(exchange.on_message(body(b"abc", false))),
        ["request body"]
    );
    assert_eq!(
        describe(exchange.on_message(body(b"", true))),
        ["request body"]
    );
}

#[test]
fn grpc_messages_are_routed_by_headers_and_returned() {
    let mut exchange = exchange(BodyMode::Grpc, BodyMode::Grpc);
    assert_eq!(
        describe(exchange.on_message(headers(CHAT, false))),
        ["route streamed"]
    );
    assert_eq!(
        describe(exchange.on_route(to_worker())),
        [format!("request headers {ROUTE_HEADERS}")]
    );
    assert_eq!(
        describe(exchange.on_message(body(&[1; 70_000], false))),
        ["request body 70000"]
    );
    assert_eq!(
        describe(exchange.on_message(body(b"", true))),
        ["request body 0 end"]
    );
    exchange.on_message(response(false, false));
    assert_eq!(
        describe(exchange.on_message(response_body(&[1; 70_000], false))),
        ["response body 70000"]
    );
    assert_eq!(
        describe(exchange.on_message(ExchangeMessage::ResponseTrailers)),
        ["response trailers", "finished"]
    );
}

#[test]
fn passthrough_is_named_in_response_header() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    assert_eq!(
        describe(exchange.on_route(to_no_worker())),
        ["request body"]
    );
    let expected = [
        "response headers x-warmroute-mode=passthrough",
        "status 200",
        "first token",
    ];
    assert_eq!(
        describe(exchange.on_message(response(true, false))),
        expected
    );
}

#[test]
fn route_after_local_reply_is_not_sent() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    let expected = [
        "response headers",
        "status 200",
        "content missing Empty",
        "finished",
    ];
    assert_eq!(
        describe(exchange.on_message(response(false, true))),
        expected
    );
    assert!(exchange.on_route(to_worker()).is_empty());
}

fn rejection() -> ImmediateReply {
    ImmediateReply {
        status: 429,
        headers: vec![("retry-after", "2".to_owned())],
        body: b"{}".to_vec(),
        details: "test",
    }
}

const IMMEDIATE: &str = "immediate 429 content-type=application/json retry-after=2 {}";

#[test]
fn rejected_request_gets_immediate_response_in_every_mode() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    buffered.on_message(body(b"{}", true));
    assert_eq!(describe(buffered.on_immediate(&rejection())), [IMMEDIATE]);
    assert_eq!(
        describe(buffered.on_route(to_worker())),
        [""; 0],
        "a late route is not sent"
    );
    assert_eq!(
        describe(buffered.on_immediate(&rejection())),
        [""; 0],
        "a second response is not sent"
    );

    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    duplex.on_message(body(b"{}", true));
    assert_eq!(describe(duplex.on_immediate(&rejection())), [IMMEDIATE]);

    let mut bodiless = exchange(BodyMode::Buffered, BodyMode::None);
    bodiless.on_message(headers(CHAT, true));
    assert_eq!(describe(bodiless.on_immediate(&rejection())), [IMMEDIATE]);

    let mut early = exchange(BodyMode::Buffered, BodyMode::None);
    early.on_message(headers(CHAT, false));
    assert_eq!(
        describe(early.on_immediate(&rejection())),
        [""; 0],
        "no route was requested"
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

    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    duplex.on_message(body(b"{}", true));
    assert_eq!(
        extension(&duplex),
        None,
        "full-duplex mode has no message timeout"
    );
}

#[test]
fn prefill_worker_is_named_in_headers() {
    let rank = WorkerRank {
        worker: WorkerId(7),
        rank: DpRank(1),
    };
    let endpoint = "10.0.0.7:8000".parse().unwrap();
    let prefill = Some(RankEndpoint {
        rank,
        endpoint,
        via: Default::default(),
        several_ranks: true,
    });
    let target = RouteTarget {
        prefill,
        why: Some("because".into()),
        ..to_worker()
    };
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    let expected = "request body x-worker-instance-id=18446744073709551615 x-dp-rank=3 \
                    x-prefill-instance-id=7 x-prefill-dp-rank=1 x-gateway-destination-endpoint=10.0.0.1:8000 \
                    x-prefiller-host-port=10.0.0.7:8000 +metadata";
    assert_eq!(describe(exchange.on_route(target)), [expected]);
}
