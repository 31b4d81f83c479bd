//! Cost of the protocol: whole exchanges through the state machine. The same run measures the
//! minimum for any implementation: copying the same bytes once, and encoding the same replies.

use std::sync::Arc;

use bytes::Bytes;
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use warmroute_core::router::{Mode, RankEndpoint, RouteTarget};
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};
use warmroute_server::ext_proc::exchange::{Effect, Exchange, ExchangeOptions, ExchangeStart};
use warmroute_server::ext_proc::headers::{RequestHead, ResponseHead};
use warmroute_server::ext_proc::message::{BodyMode, BodyModes, ExchangeMessage};
use warmroute_server::ext_proc::returned_piece::ExtProcReply;
use warmroute_server::ext_proc::wire::BodyPiece;

const MB: usize = 1_000_000;
/// Size of Envoy's chunks in full-duplex mode.
const CHUNK: usize = 16_384;

fn main() {
    divan::main();
}

fn route_target() -> RouteTarget {
    let rank = WorkerRank {
        worker: WorkerId(7),
        rank: DpRank(0),
    };
    let endpoint = std::net::SocketAddr::from(([10, 0, 0, 1], 8000));
    let to = RankEndpoint {
        rank,
        endpoint: warmroute_core::worker::WorkerEndpoint(endpoint),
        via: Default::default(),
        several_ranks: false,
    };
    RouteTarget {
        to: Some(to),
        predicted_cached_tokens: Some(32),
        mode: Mode::Exact,
        ..RouteTarget::PASSTHROUGH
    }
}

/// Returns a streaming chat exchange with a request body of `bytes`.
fn transcript(request: BodyMode, bytes: usize) -> Vec<ExchangeMessage> {
    let head = RequestHead {
        method: "POST".into(),
        path: "/v1/chat/completions".into(),
        ..RequestHead::default()
    };
    let mut messages = vec![ExchangeMessage::RequestHeaders {
        head,
        end_of_stream: false,
    }];
    let body = Bytes::from(vec![b'x'; bytes]);
    let size = if request == BodyMode::FullDuplexStreamed {
        CHUNK
    } else {
        bytes
    };
    for at in (0..bytes).step_by(size) {
        let end = (at + size).min(bytes);
        messages.push(ExchangeMessage::RequestBody(BodyPiece::new(
            body.slice(at..end),
            end == bytes,
        )));
    }
    let head = ResponseHead {
        status: 200,
        is_event_stream: true,
        ..ResponseHead::default()
    };
    messages.push(ExchangeMessage::ResponseHeaders {
        head,
        end_of_stream: false,
    });
    messages
}

fn replies(
    request: BodyMode,
    messages: Vec<ExchangeMessage>,
    target: &RouteTarget,
) -> Vec<ExtProcReply> {
    let options = ExchangeOptions {
        body_limit: 32 << 20,
        ..ExchangeOptions::default()
    };
    let mut exchange = Exchange::new(Arc::new(options), ExchangeStart::default());
    exchange.configure(BodyModes {
        request,
        response: BodyMode::None,
    });
    let mut replies = Vec::new();
    for message in messages {
        let effects = exchange.on_message(message);
        let routes = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Route(_)));
        let routed = if routes {
            exchange.on_route(target.clone())
        } else {
            Vec::new()
        };
        let reply = |effect| {
            if let Effect::Reply(reply) = effect {
                Some(reply)
            } else {
                None
            }
        };
        replies.extend(effects.into_iter().chain(routed).filter_map(reply));
    }
    replies
}

const CASES: [(BodyMode, usize); 2] = [
    (BodyMode::Buffered, 8_000),
    (BodyMode::FullDuplexStreamed, MB),
];

#[divan::bench(args = [0, 1])]
fn exchange(bencher: Bencher<'_, '_>, case: usize) {
    let (mode, bytes) = CASES[case];
    let transcript = transcript(mode, bytes);
    let target = route_target();
    let messages = || transcript.clone();
    bencher
        .counter(BytesCount::new(bytes))
        .with_inputs(messages)
        .bench_values(|messages| replies(mode, messages, black_box(&target)));
}

#[divan::bench(args = [0, 1])]
fn limit_copy_of_bytes(bencher: Bencher<'_, '_>, case: usize) {
    let body = vec![b'x'; CASES[case].1];
    bencher
        .counter(BytesCount::new(body.len()))
        .bench(|| black_box(&body).clone());
}

#[divan::bench(args = [0, 1])]
fn limit_encoding_of_replies(bencher: Bencher<'_, '_>, case: usize) {
    let (mode, bytes) = CASES[case];
    let replies = replies(mode, transcript(mode, bytes), &route_target());
    let encode = || {
        replies
            .iter()
            .map(|reply| black_box(reply).encode_to_vec().len())
            .sum::<usize>()
    };
    bencher.counter(BytesCount::new(bytes)).bench(encode);
}
