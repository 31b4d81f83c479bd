//! CPU time of the HTTP/2 filter per stream, in addition to reading the same octets without it.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, ReadBuf};
use warmroute_http2_filter::{Http2Filter, Http2Limits};

use warmroute_testbed::comparison::{ComparedMeasure, ComparisonTable, thread_cpu_nanos};

/// Streams of one connection.
const STREAMS: u32 = 20_000;
/// Octets that the h2 crate reads at a time.
const READ: usize = 8 << 10;
/// Maximum microseconds for a stream with a valid authority, a hundredth of the time of an
/// exchange.
const VALID: f64 = 0.3;
/// Maximum microseconds for a stream with a replaced authority.
const REPLACED: f64 = 3.0;

/// Measures both kinds of streams.
pub(crate) fn measure(table: &mut ComparisonTable, rounds: usize) {
    let cases = [
        (
            "HTTP/2 filter, stream with a valid authority",
            "warmroute.inference.svc:9002",
            false,
            VALID,
        ),
        (
            "HTTP/2 filter, stream of Istio, authority in the table",
            "outbound|9002||warmroute.inference.svc",
            false,
            VALID,
        ),
        (
            "HTTP/2 filter, stream with an authority to replace",
            "outbound|9002||warmroute.inference.svc",
            true,
            REPLACED,
        ),
    ];
    for (name, authority, literal, limit) in cases {
        let connection = connection(authority, literal);
        let costs: Vec<_> = (0..=rounds).map(|_| cost(&connection)).skip(1).collect();
        table.add(
            ComparedMeasure::new(name, "µs", Some(1.0)),
            &[limit],
            &costs,
        );
    }
}

/// Returns the microseconds per stream.
fn cost(connection: &[u8]) -> f64 {
    let limits = Http2Limits {
        max_header_block_bytes: 64 << 10,
    };
    let filtered = read(Http2Filter::new(connection, limits, |_| {}));
    (filtered - read(connection)).max(0.0) / 1e3 / f64::from(STREAMS)
}

/// Returns the nanoseconds that reading everything takes.
fn read(mut io: impl AsyncRead + Unpin) -> f64 {
    let mut context = Context::from_waker(Waker::noop());
    let mut space = vec![0; READ];
    let start = thread_cpu_nanos();
    loop {
        let mut buf = ReadBuf::new(&mut space);
        let Poll::Ready(Ok(())) = Pin::new(&mut io).poll_read(&mut context, &mut buf) else {
            continue;
        };
        if std::hint::black_box(buf.filled()).is_empty() {
            return thread_cpu_nanos() - start;
        }
    }
}

/// Builds a connection as Envoy does: fields of the first stream enter the HPACK table, and later
/// streams refer to them. If `literal` is true, every stream sends its authority as a literal.
fn connection(authority: &str, literal: bool) -> Vec<u8> {
    let mut octets = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    octets.extend(frame(4, 0, 0, &[]));
    let fixed = [
        (
            ":path",
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        ),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        (":authority", authority),
    ];
    for at in 0..STREAMS {
        let stream = 2 * at + 1;
        let mut block = vec![0x83, 0x86];
        match at {
            0 => fixed
                .iter()
                .for_each(|(name, value)| field(&mut block, 0x40, name, value)),
            _ => block.extend((62..66).rev().map(|index| 0x80 | index)),
        }
        if literal && at > 0 {
            block.retain(|octet| *octet != 0x80 | 62);
            field(&mut block, 0x10, ":authority", authority);
        }
        // This field is sent without indexing, as tracing headers are.
        field(
            &mut block,
            0x00,
            "x-request-id",
            "6c1f0e9a-5d8b-4d53-9b43-1f7a2f0c9d11",
        );
        octets.extend(frame(1, 4, stream, &block));
        octets.extend(frame(0, 1, stream, &[0; 300]));
    }
    octets
}

fn field(block: &mut Vec<u8>, first: u8, name: &str, value: &str) {
    block.push(first);
    for text in [name, value] {
        block.push(text.len() as u8);
        block.extend(text.as_bytes());
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}
