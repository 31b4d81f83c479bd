//! What the protocol costs: whole exchanges through the state machine, each beside what no implementation can avoid in
//! the same run, which is moving the same bytes once and encoding the same replies.

use std::sync::Arc;

use bytes::Bytes;
use divan::{Bencher, black_box, counter::BytesCount};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use prost::Message as _;
use warmroute::ext_proc::exchange::{Answers, Effect, Exchange, Options, Start};
use warmroute::ext_proc::headers::{RequestHead, ResponseHead};
use warmroute::ext_proc::message::{BodyMode, Message, Modes};
use warmroute::ext_proc::wire::Piece;
use warmroute::router::{Destination, Mode, Steer};
use warmroute::worker::{DpRank, WorkerId, WorkerRank};

const MB: usize = 1_000_000;
/// Chunks as Envoy sends them in full duplex.
const CHUNK: usize = 16_384;

fn main() {
    divan::main();
}

fn steer() -> Steer {
    let rank = WorkerRank {
        worker: WorkerId(7),
        rank: DpRank(0),
    };
    let endpoint = std::net::SocketAddr::from(([10, 0, 0, 1], 8000));
    let to = Destination {
        rank,
        endpoint: warmroute::worker::Endpoint(endpoint),
        several_ranks: false,
    };
    Steer {
        to: Some(to),
        predicted_cached_tokens: Some(32),
        mode: Mode::Exact,
        ..Steer::PASSTHROUGH
    }
}

/// A streaming chat exchange with a request body of `bytes`.
fn transcript(request: BodyMode, bytes: usize) -> Vec<Message> {
    let head = RequestHead {
        method: "POST".into(),
        path: "/v1/chat/completions".into(),
        ..RequestHead::default()
    };
    let mut messages = vec![Message::RequestHeaders { head, end: false }];
    let body = Bytes::from(vec![b'x'; bytes]);
    let size = if request == BodyMode::FullDuplex {
        CHUNK
    } else {
        bytes
    };
    for at in (0..bytes).step_by(size) {
        let end = (at + size).min(bytes);
        messages.push(Message::RequestBody(Piece::new(
            body.slice(at..end),
            end == bytes,
        )));
    }
    let head = ResponseHead {
        status: 200,
        event_stream: true,
        ..ResponseHead::default()
    };
    messages.push(Message::ResponseHeaders { head, end: false });
    messages
}

fn replies(request: BodyMode, messages: Vec<Message>, steer: &Steer) -> Vec<ProcessingResponse> {
    let answers = Answers {
        mode: true,
        ..Answers::default()
    };
    let options = Options {
        body_limit: 32 << 20,
        answers,
        ..Options::default()
    };
    let mut exchange = Exchange::new(Arc::new(options), Start::default());
    exchange.configure(Modes {
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
            exchange.on_route(steer.clone())
        } else {
            Vec::new()
        };
        let reply = |effect| {
            if let Effect::Reply(reply) = effect {
                Some(*reply)
            } else {
                None
            }
        };
        replies.extend(effects.into_iter().chain(routed).filter_map(reply));
    }
    replies
}

const CASES: [(BodyMode, usize); 2] = [(BodyMode::Buffered, 8_000), (BodyMode::FullDuplex, MB)];

#[divan::bench(args = [0, 1])]
fn exchange(bencher: Bencher<'_, '_>, case: usize) {
    let (mode, bytes) = CASES[case];
    let (transcript, steer) = (transcript(mode, bytes), steer());
    let messages = || transcript.clone();
    bencher
        .counter(BytesCount::new(bytes))
        .with_inputs(messages)
        .bench_values(|messages| replies(mode, messages, black_box(&steer)));
}

#[divan::bench(args = [0, 1])]
fn limit_copy_of_the_same_bytes(bencher: Bencher<'_, '_>, case: usize) {
    let body = vec![b'x'; CASES[case].1];
    bencher
        .counter(BytesCount::new(body.len()))
        .bench(|| black_box(&body).clone());
}

#[divan::bench(args = [0, 1])]
fn limit_encoding_of_the_replies(bencher: Bencher<'_, '_>, case: usize) {
    let (mode, bytes) = CASES[case];
    let replies = replies(mode, transcript(mode, bytes), &steer());
    let encode = || {
        replies
            .iter()
            .map(|reply| black_box(reply).encode_to_vec().len())
            .sum::<usize>()
    };
    bencher.counter(BytesCount::new(bytes)).bench(encode);
}
