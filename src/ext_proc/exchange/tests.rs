//! Transcripts: what Envoy sends, line by line, and what it gets. Each line of a transcript is one effect in short form,
//! so that a whole exchange can be read at a glance.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{CommonResponse, HeaderMutation};

mod any_order;
mod contract;

use super::*;
use crate::ext_proc::headers;
use crate::ext_proc::message::BodyMode;
use crate::ext_proc::wire::Piece;
use crate::router::{Destination, Mode};
use crate::worker::{DpRank, WorkerId, WorkerRank};

const CHAT: &str = "/v1/chat/completions";

fn options() -> Options {
    let answers = Answers {
        mode: true,
        ..Answers::default()
    };
    Options {
        body_limit: 200_000,
        answers,
        ..Options::default()
    }
}

fn exchange(request: BodyMode, response: BodyMode) -> Exchange {
    exchange_with(options(), Start::default(), Modes { request, response })
}

fn exchange_with(options: Options, start: Start, modes: Modes) -> Exchange {
    let mut exchange = Exchange::new(Arc::new(options), start);
    exchange.configure(modes);
    exchange
}

fn headers(path: &str, end: bool) -> Message {
    let head = RequestHead {
        method: "POST".into(),
        path: path.into(),
        ..RequestHead::default()
    };
    Message::RequestHeaders { head, end }
}

fn forged(path: &str) -> Message {
    let header = |name: &str| HeaderValue {
        key: name.into(),
        value: "1".into(),
        ..HeaderValue::default()
    };
    let sent = [headers::WORKER_ID, headers::MODE, "x-other"].map(header);
    let all = Arc::new(HeaderMap {
        headers: sent.to_vec(),
    });
    Message::RequestHeaders {
        head: RequestHead {
            path: path.into(),
            all,
            ..Default::default()
        },
        end: false,
    }
}

fn body(bytes: &[u8], end: bool) -> Message {
    Message::RequestBody(Piece::new(bytes.to_vec(), end))
}

fn response(event_stream: bool, end: bool) -> Message {
    Message::ResponseHeaders {
        head: ResponseHead {
            status: 200,
            event_stream,
            ..ResponseHead::default()
        },
        end,
    }
}

fn answer(bytes: &[u8], end: bool) -> Message {
    Message::ResponseBody(Piece::new(bytes.to_vec(), end))
}

fn to_worker() -> Steer {
    let rank = WorkerRank {
        worker: WorkerId(u64::MAX),
        rank: DpRank(3),
    };
    let endpoint = "10.0.0.1:8000".parse().unwrap();
    Steer {
        to: Some(Destination {
            rank,
            endpoint,
            several_ranks: false,
        }),
        predicted_cached_tokens: Some(32),
        mode: Mode::Exact,
        ..Steer::PASSTHROUGH
    }
}

fn to_nobody() -> Steer {
    Steer::PASSTHROUGH
}

fn short(effects: Vec<Effect>) -> Vec<String> {
    effects.into_iter().map(short_one).collect()
}

fn short_one(effect: Effect) -> String {
    match effect {
        Effect::Route(Inbound { body, .. }) => match body {
            Body::Absent => "route absent".into(),
            Body::Unseen => "route unseen".into(),
            Body::Streamed => "route streamed".into(),
            Body::Cut { shown, length } => format!("route cut {} of {length:?}", shown.len()),
            Body::Whole(bytes) => format!("route whole {}", bytes.len()),
            Body::TooLarge { shown, .. } => format!("route too large {}", shown.len()),
            Body::Shed { bytes: len, .. } => format!("route shed {len}"),
        },
        Effect::FirstToken { .. } => "first token".into(),
        Effect::Answer(bytes) => format!("answer {}", bytes.len()),
        Effect::Answered(head) => format!("status {}", head.status),
        Effect::Finished => "finished".into(),
        Effect::Reply(reply) if reply.override_message_timeout.is_some() => {
            assert_eq!(reply.response, None, "Envoy takes the wish only alone");
            let wait = reply.override_message_timeout.unwrap();
            format!("hold {}.{:03}", wait.seconds, wait.nanos / 1_000_000)
        }
        Effect::Reply(reply) => {
            let (name, common) = match reply.response.clone().unwrap() {
                Response::RequestHeaders(headers) => ("request headers", headers.response),
                Response::RequestBody(body) => ("request body", body.response),
                Response::ResponseHeaders(headers) => ("response headers", headers.response),
                Response::ResponseBody(body) => ("response body", body.response),
                Response::RequestTrailers(_) => ("request trailers", None),
                Response::ResponseTrailers(_) => ("response trailers", None),
                Response::ImmediateResponse(own) => {
                    let status = own.status.unwrap().code;
                    let headers = changes(CommonResponse {
                        header_mutation: own.headers,
                        ..Default::default()
                    });
                    return format!(
                        "own {status}{headers} {}",
                        String::from_utf8(own.body).unwrap()
                    );
                }
                other => panic!("unexpected {other:?}"),
            };
            let mut line = name.to_owned();
            line += &common.map(changes).unwrap_or_default();
            if reply.dynamic_metadata.is_some() {
                line += " +metadata";
            }
            if let Some(mode) = reply.mode_override {
                line += &format!(
                    " mode {}/{}",
                    mode.request_body_mode, mode.response_body_mode
                );
            }
            line
        }
    }
}

fn changes(common: CommonResponse) -> String {
    let mut line = String::new();
    let HeaderMutation {
        set_headers,
        remove_headers,
    } = common.header_mutation.unwrap_or_default();
    for header in set_headers.into_iter().map(|option| option.header.unwrap()) {
        line += &format!(
            " {}={}",
            header.key,
            String::from_utf8(header.raw_value).unwrap()
        );
    }
    for name in remove_headers {
        line += &format!(" -{name}");
    }
    match common.body_mutation.and_then(|body| body.mutation) {
        Some(Mutation::StreamedResponse(piece)) => {
            line += &format!(
                " {}{}",
                piece.body.len(),
                if piece.end_of_stream { " end" } else { "" }
            );
        }
        Some(Mutation::Body(body)) => {
            line += &format!(" body {}", String::from_utf8(body).unwrap())
        }
        _ => {}
    }
    if common.clear_route_cache {
        line += " +route";
    }
    line
}

const STEERED: &str = "x-worker-instance-id=18446744073709551615 x-dp-rank=3 \
                       x-gateway-destination-endpoint=10.0.0.1:8000 +metadata";

#[test]
fn a_buffered_body_is_routed_in_its_answer_and_a_unary_answer_ends_the_prefill_with_its_headers() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    assert_eq!(
        short(exchange.on_message(headers(CHAT, false))),
        ["request headers"]
    );
    assert_eq!(
        short(exchange.on_message(body(b"{}", true))),
        ["route whole 2"]
    );
    assert_eq!(
        short(exchange.on_route(to_worker())),
        [format!("request body {STEERED}")]
    );
    let expected = [
        "response headers x-warmroute-mode=exact",
        "status 200",
        "first token",
    ];
    assert_eq!(short(exchange.on_message(response(false, false))), expected);
    assert_eq!(
        short(exchange.on_message(Message::ResponseTrailers)),
        ["response trailers", "finished"]
    );
}

#[test]
fn an_event_stream_is_watched_and_its_first_bytes_are_the_first_token() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange.on_route(to_worker());
    let watched = [
        "response headers x-warmroute-mode=exact mode 2/1",
        "status 200",
    ];
    assert_eq!(short(exchange.on_message(response(true, false))), watched);
    assert_eq!(
        short(exchange.on_message(answer(b"", false))),
        ["response body"]
    );
    assert_eq!(
        short(exchange.on_message(answer(b"data", false))),
        ["response body", "first token"]
    );
    assert_eq!(
        short(exchange.on_message(answer(b"data", false))),
        ["response body"]
    );
    assert_eq!(
        short(exchange.on_message(answer(b"", true))),
        ["response body", "finished"]
    );
    assert_eq!(
        short(exchange.on_message(Message::ResponseTrailers)),
        ["response trailers"]
    );
}

#[test]
fn forged_routing_headers_are_removed_unless_we_set_them() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    let removed = "request headers -x-warmroute-mode -x-worker-instance-id";
    assert_eq!(short(buffered.on_message(forged(CHAT))), [removed]);
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(forged(CHAT));
    duplex.on_message(body(b"", true));
    let lines = short(duplex.on_route(to_worker()));
    let set = STEERED.strip_suffix(" +metadata").unwrap();
    assert_eq!(
        lines[0],
        format!("request headers content-length=0 {set} -x-warmroute-mode +metadata")
    );
    let mut passed = exchange(BodyMode::FullDuplex, BodyMode::None);
    passed.on_message(forged(CHAT));
    passed.on_message(body(b"", true));
    let removed = removed.replace("headers", "headers content-length=0");
    assert_eq!(short(passed.on_route(to_nobody()))[0], removed);
}

#[test]
fn a_request_without_a_body_is_answered_at_its_headers_in_every_mode() {
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
            short(exchange.on_message(headers("/v1/models", true))),
            ["route absent"],
            "{mode:?}"
        );
        assert_eq!(
            short(exchange.on_route(to_worker())),
            [format!("request headers {STEERED}")],
            "{mode:?}"
        );
        assert!(exchange.on_message(body(b"", true)).is_empty(), "{mode:?}");
    }
}

#[test]
fn a_path_that_is_not_inference_is_spared_its_body() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    assert_eq!(
        short(buffered.on_message(headers("/v1/files", false))),
        ["route unseen"]
    );
    assert_eq!(
        short(buffered.on_route(to_worker())),
        [format!("request headers {STEERED} mode 0/0")]
    );
    // Envoy ignores the wish without a word where `allow_mode_override` is off, and then waits for an answer.
    assert_eq!(
        short(buffered.on_message(body(b"abc", true))),
        ["request body"]
    );
    // Full duplex cannot be switched off: what comes goes back.
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    assert_eq!(
        short(duplex.on_message(headers("/v1/files", false))),
        ["route unseen"]
    );
    duplex.on_route(to_worker());
    assert_eq!(
        short(duplex.on_message(body(b"abc", false))),
        ["request body 3"]
    );
    assert_eq!(
        short(duplex.on_message(body(b"", true))),
        ["request body 0 end"]
    );
    assert!(duplex.on_message(body(b"", true)).is_empty());
}

#[test]
fn full_duplex_holds_the_header_answer_and_sends_every_byte_back() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    assert!(exchange.on_message(headers(CHAT, false)).is_empty());
    assert!(exchange.on_message(body(&[1; 100_000], false)).is_empty());
    assert!(exchange.on_message(body(&[2; 50_000], false)).is_empty());
    assert_eq!(
        short(exchange.on_message(body(b"", true))),
        ["route whole 150000"]
    );
    assert!(
        exchange.on_message(body(b"", true)).is_empty(),
        "a second end of stream is ignored"
    );
    let expected = [
        format!("request headers content-length=150000 {STEERED}"),
        "request body 62000".into(),
        "request body 62000".into(),
        "request body 26000 end".into(),
    ];
    assert_eq!(short(exchange.on_route(to_worker())), expected);
}

#[test]
fn full_duplex_with_trailers_ends_with_the_trailers() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"abc", false));
    assert_eq!(
        short(exchange.on_message(Message::RequestTrailers)),
        ["route whole 3"]
    );
    let expected = [
        format!("request headers {STEERED}"),
        "request body 3".into(),
        "request trailers".into(),
    ];
    assert_eq!(short(exchange.on_route(to_worker())), expected);
}

#[test]
fn trailers_without_a_body_are_answered_and_no_body_is() {
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    assert_eq!(
        short(duplex.on_message(Message::RequestTrailers)),
        ["route whole 0"]
    );
    assert_eq!(
        short(duplex.on_route(to_worker())),
        [
            format!("request headers {STEERED}"),
            "request trailers".into()
        ]
    );
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert_eq!(
        short(buffered.on_message(Message::RequestTrailers)),
        ["request trailers"]
    );
}

#[test]
fn an_exchange_that_begins_with_its_body_is_let_through() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    assert_eq!(
        short(buffered.on_message(body(b"{}", true))),
        ["request body"]
    );
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    assert_eq!(
        short(duplex.on_message(body(b"{}", true))),
        ["request body 2 end"]
    );
}

#[test]
fn a_body_past_the_limit_is_routed_by_load_and_still_passes_whole() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(&[0; 150_000], false));
    assert_eq!(
        short(exchange.on_message(body(&[0; 60_000], false))),
        ["route too large 210000"]
    );
    assert!(
        exchange.on_message(body(&[0; 1_000], false)).is_empty(),
        "came while the route was looked for"
    );
    let back: usize = short(exchange.on_route(to_worker()))
        .iter()
        .filter_map(|line| line.strip_prefix("request body ")?.parse::<usize>().ok())
        .sum();
    assert_eq!(back, 211_000);
    assert_eq!(
        short(exchange.on_message(body(&[0; 10], true))),
        ["request body 10 end"]
    );
}

#[test]
fn a_streamed_body_is_routed_before_it_comes_because_later_is_too_late() {
    let mut exchange = exchange(BodyMode::Streamed, BodyMode::None);
    assert_eq!(
        short(exchange.on_message(headers(CHAT, false))),
        ["route streamed"]
    );
    assert_eq!(
        short(exchange.on_route(to_worker())),
        [format!("request headers {STEERED}")]
    );
    assert_eq!(
        short(exchange.on_message(body(b"abc", false))),
        ["request body"]
    );
    assert_eq!(
        short(exchange.on_message(body(b"", true))),
        ["request body"]
    );
}

#[test]
fn grpc_messages_are_routed_by_headers_and_returned() {
    let mut exchange = exchange(BodyMode::Grpc, BodyMode::Grpc);
    assert_eq!(
        short(exchange.on_message(headers(CHAT, false))),
        ["route streamed"]
    );
    assert_eq!(
        short(exchange.on_route(to_worker())),
        [format!("request headers {STEERED}")]
    );
    assert_eq!(
        short(exchange.on_message(body(&[1; 70_000], false))),
        ["request body 70000"]
    );
    assert_eq!(
        short(exchange.on_message(body(b"", true))),
        ["request body 0 end"]
    );
    exchange.on_message(response(false, false));
    assert_eq!(
        short(exchange.on_message(answer(&[1; 70_000], false))),
        ["response body 70000"]
    );
    assert_eq!(
        short(exchange.on_message(Message::ResponseTrailers)),
        ["response trailers", "finished"]
    );
}

#[test]
fn without_a_worker_envoy_chooses_and_the_answer_says_so() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    assert_eq!(short(exchange.on_route(to_nobody())), ["request body"]);
    let expected = [
        "response headers x-warmroute-mode=passthrough",
        "status 200",
        "first token",
    ];
    assert_eq!(short(exchange.on_message(response(true, false))), expected);
}

#[test]
fn a_local_reply_before_the_route_ends_the_exchange_and_a_late_route_is_not_sent() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    let expected = ["response headers", "status 200", "first token", "finished"];
    assert_eq!(short(exchange.on_message(response(false, true))), expected);
    assert!(exchange.on_route(to_worker()).is_empty());
}

#[test]
fn full_duplex_responses_go_back_byte_for_byte() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::FullDuplex);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange.on_route(to_worker());
    let expected = ["response headers x-warmroute-mode=exact", "status 200"];
    assert_eq!(short(exchange.on_message(response(true, false))), expected);
    let first = ["response body 62000", "response body 1000", "first token"];
    assert_eq!(
        short(exchange.on_message(answer(&[7; 63_000], false))),
        first
    );
    assert_eq!(
        short(exchange.on_message(answer(b"", true))),
        ["response body 0 end", "finished"]
    );
}

fn refusal() -> Immediate {
    Immediate {
        status: 429,
        headers: vec![("retry-after", "2".to_owned())],
        body: b"{}".to_vec(),
        details: "test",
    }
}

const OWN: &str = "own 429 content-type=application/json retry-after=2 {}";

#[test]
fn a_request_that_gets_no_worker_is_answered_by_us_in_every_body_mode() {
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    buffered.on_message(body(b"{}", true));
    assert_eq!(short(buffered.on_immediate(&refusal())), [OWN]);
    assert_eq!(
        short(buffered.on_route(to_worker())),
        [""; 0],
        "a late route is not sent"
    );
    assert_eq!(
        short(buffered.on_immediate(&refusal())),
        [""; 0],
        "nor a second answer"
    );

    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    duplex.on_message(body(b"{}", true));
    assert_eq!(short(duplex.on_immediate(&refusal())), [OWN]);

    let mut bodiless = exchange(BodyMode::Buffered, BodyMode::None);
    bodiless.on_message(headers(CHAT, true));
    assert_eq!(short(bodiless.on_immediate(&refusal())), [OWN]);

    let mut early = exchange(BodyMode::Buffered, BodyMode::None);
    early.on_message(headers(CHAT, false));
    assert_eq!(
        short(early.on_immediate(&refusal())),
        [""; 0],
        "nothing was asked"
    );
}

#[test]
fn envoy_is_asked_to_wait_only_while_it_waits_with_a_limit() {
    let wait = Duration::from_millis(30_500);
    let hold = |exchange: &Exchange| exchange.hold(wait).map(short_one);
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert_eq!(hold(&buffered), None);
    buffered.on_message(body(b"{}", true));
    assert_eq!(hold(&buffered).as_deref(), Some("hold 30.500"));
    buffered.on_route(to_worker());
    assert_eq!(hold(&buffered), None);

    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    duplex.on_message(body(b"{}", true));
    assert_eq!(hold(&duplex), None, "there it waits without limit");
}

#[test]
fn the_prefill_worker_is_named_beside_the_one_that_decodes() {
    let rank = WorkerRank {
        worker: WorkerId(7),
        rank: DpRank(1),
    };
    let endpoint = "10.0.0.7:8000".parse().unwrap();
    let prefill = Some(Destination {
        rank,
        endpoint,
        several_ranks: true,
    });
    let steer = Steer {
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
    assert_eq!(short(exchange.on_route(steer)), [expected]);
}
