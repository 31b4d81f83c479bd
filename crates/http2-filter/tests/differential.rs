//! Compares `h2` behind the filter with `h2` alone. Each connection is generated at random from a
//! seed, in two versions. One has arbitrary authorities and goes through the filter. The other one,
//! the twin, has normalized authorities and does not. `h2` must respond to both in the same way.
//!
//! `WARMROUTE_HTTP2_CASES` sets the number of connections (default 20,000), and
//! `WARMROUTE_HTTP2_SEED` sets the first seed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use h2::server;
use http::Response;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use warmroute_http2_filter::{Http2Filter, Http2Limits, normalize_authority};

const FRAME_LIMIT: u32 = 1 << 15;
const HEADER_LIST: u32 = 1 << 13;
/// Larger than any generated block, and than any block that `h2` accepts.
const BLOCK_LIMIT: usize = 1 << 16;

/// A connection with fixed input.
struct Script {
    input: Vec<u8>,
    at: usize,
    /// Octets of each read. The last element applies to all further reads.
    pieces: Vec<usize>,
    reads: usize,
    /// Whether the connection ends after the input. Otherwise it stays open without further input,
    /// because `h2` drops unsent octets when the connection ends.
    ends: bool,
    output: Vec<u8>,
}

impl Script {
    fn new(input: &[u8], pieces: Vec<usize>, ends: bool) -> Self {
        Self {
            input: input.to_vec(),
            at: 0,
            pieces,
            reads: 0,
            ends,
            output: Vec::new(),
        }
    }
}

impl AsyncRead for Script {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.at == self.input.len() && !self.ends {
            return Poll::Pending;
        }
        let piece = self.pieces[self.reads.min(self.pieces.len() - 1)];
        let length = piece.min(buf.remaining()).min(self.input.len() - self.at);
        buf.put_slice(&self.input[self.at..self.at + length]);
        self.at += length;
        self.reads += 1;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.output.extend_from_slice(octets);
        Poll::Ready(Ok(octets.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Result of a connection in `h2`.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    requests: Vec<String>,
    /// Type, stream and code of RST_STREAM and GOAWAY frames. A set, because their order depends on
    /// the sizes of the reads.
    errors: BTreeSet<(u8, u32, u32)>,
}

impl Outcome {
    fn has_errors(&self) -> bool {
        self.errors.iter().any(|(_, _, code)| *code != 0)
    }

    fn closes_connection(&self) -> bool {
        self.errors
            .iter()
            .any(|(kind, _, code)| *kind == 7 && *code != 0)
    }
}

/// Runs `h2` on a connection until all input is processed.
fn serve<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    io: S,
    output: impl FnOnce(S) -> Vec<u8>,
) -> Outcome {
    let mut context = Context::from_waker(Waker::noop());
    let mut requests = Vec::new();
    let shared = Shared(std::rc::Rc::new(std::cell::RefCell::new(io)));
    {
        let mut builder = server::Builder::new();
        builder
            .max_frame_size(FRAME_LIMIT)
            .max_header_list_size(HEADER_LIST);
        let mut handshake = pin!(builder.handshake::<_, Bytes>(shared.clone()));
        if let Poll::Ready(Ok(mut connection)) = handshake.as_mut().poll(&mut context) {
            for _ in 0..10_000 {
                match connection.poll_accept(&mut context) {
                    Poll::Ready(Some(Ok((request, mut respond)))) => {
                        let headers: BTreeSet<_> = request
                            .headers()
                            .iter()
                            .map(|(name, value)| format!("{name}={value:?}"))
                            .collect();
                        requests.push(format!(
                            "{} {} {headers:?}",
                            request.method(),
                            request.uri()
                        ));
                        let _sent = respond.send_response(Response::new(()), true);
                    }
                    Poll::Ready(Some(Err(_)) | None) => break,
                    // All input is processed, and all output has been sent.
                    Poll::Pending => break,
                }
            }
        }
    }
    let io = std::rc::Rc::into_inner(shared.0).unwrap().into_inner();
    Outcome {
        requests,
        errors: errors(&output(io)),
    }
}

/// A connection that remains accessible after `h2` has dropped its handle.
struct Shared<S>(std::rc::Rc<std::cell::RefCell<S>>);

impl<S> Clone for Shared<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Shared<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Shared<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_write(cx, octets)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_shutdown(cx)
    }
}

fn errors(mut output: &[u8]) -> BTreeSet<(u8, u32, u32)> {
    let mut errors = BTreeSet::new();
    while let [l0, l1, l2, kind, _, s0, s1, s2, s3, rest @ ..] = output {
        let (payload, next) =
            rest.split_at((u32::from_be_bytes([0, *l0, *l1, *l2]) as usize).min(rest.len()));
        let code_at = match kind {
            3 => Some(0),
            7 => Some(4),
            _ => None,
        };
        if let Some(code) = code_at.and_then(|at| payload.get(at..at + 4)) {
            let stream = u32::from_be_bytes([*s0, *s1, *s2, *s3]);
            errors.insert((*kind, stream, u32::from_be_bytes(code.try_into().unwrap())));
        }
        output = next;
    }
    errors
}

/// Returns whether the client resets a stream.
fn has_reset(input: &[u8]) -> bool {
    let mut rest = input.get(24..).unwrap_or_default();
    while let [l0, l1, l2, kind, _, _, _, _, _, payload @ ..] = rest {
        if *kind == 3 {
            return true;
        }
        rest = payload
            .get(u32::from_be_bytes([0, *l0, *l1, *l2]) as usize..)
            .unwrap_or_default();
    }
    false
}

fn unfiltered(input: &[u8], pieces: Vec<usize>) -> Outcome {
    let script = Script::new(input, pieces, false);
    serve(script, |script| script.output)
}

/// Returns the outcome through the filter and the number of errors that the filter reported.
fn filtered(input: &[u8], pieces: Vec<usize>) -> (Outcome, usize) {
    let script = Script::new(input, pieces, false);
    let reported = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = reported.clone();
    let filter = Http2Filter::new(
        script,
        Http2Limits {
            max_header_block_bytes: BLOCK_LIMIT,
        },
        move |_| {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        },
    );
    let outcome = serve(filter, |filter| filter.get_ref().output.clone());
    (outcome, reported.load(std::sync::atomic::Ordering::Relaxed))
}

/// Returns the octets that the filter passes.
fn passed(input: &[u8], pieces: Vec<usize>, ends: bool) -> Vec<u8> {
    let script = Script::new(input, pieces, ends);
    let mut filter = Http2Filter::new(
        script,
        Http2Limits {
            max_header_block_bytes: BLOCK_LIMIT,
        },
        |_| {},
    );
    let mut context = Context::from_waker(Waker::noop());
    let mut octets = Vec::new();
    let mut space = [0; 4096];
    loop {
        let mut buf = ReadBuf::new(&mut space);
        if Pin::new(&mut filter)
            .poll_read(&mut context, &mut buf)
            .is_pending()
            || buf.filled().is_empty()
        {
            return octets;
        }
        octets.extend_from_slice(buf.filled());
    }
}

/// Generator of one connection in both versions.
struct Generator {
    random: SmallRng,
    /// The version with arbitrary authorities.
    input: Vec<u8>,
    /// The version with normalized authorities.
    twin: Vec<u8>,
    /// Whether a stream depends on itself. Neither `h2` nor the filter reads its header block.
    has_unread_block: bool,
}

/// A header block in both versions.
#[derive(Default)]
struct BlockVersions {
    /// The version with an arbitrary authority.
    input: Vec<u8>,
    /// The version with a normalized authority.
    twin: Vec<u8>,
}

impl BlockVersions {
    /// Appends the same octets to both versions.
    fn extend(&mut self, octets: &[u8]) {
        self.input.extend_from_slice(octets);
        self.twin.extend_from_slice(octets);
    }
}

const NAMES: [&str; 12] = [
    ":authority",
    ":authority",
    ":path",
    ":scheme",
    ":method",
    "te",
    "x-a",
    "content-type",
    "x-request-id",
    "grpc-timeout",
    "authority",
    "host",
];
const AUTHORITIES: [&str; 16] = [
    "outbound|9002||warmroute.inference.svc.cluster.local",
    "extension/ns/name",
    "a b",
    "[",
    "a:b:c",
    "{x}",
    "é|",
    "x@",
    "%",
    "",
    "a\nb",
    "warmroute:9002",
    "127.0.0.1:9002",
    "[::1]",
    "user@host",
    "a",
];
const VALUES: [&str; 8] = [
    "a|b",
    "trailers",
    "/x/y",
    "http",
    "application/grpc",
    "",
    "0123456789abcdef0123456789abcdef",
    "GET",
];

impl Generator {
    fn new(seed: u64) -> Self {
        Self {
            random: SmallRng::seed_from_u64(seed),
            input: Vec::new(),
            twin: Vec::new(),
            has_unread_block: false,
        }
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.random.random_range(0..n) == 0
    }

    fn push_both(&mut self, octets: &[u8]) {
        self.input.extend_from_slice(octets);
        self.twin.extend_from_slice(octets);
    }

    fn connection(&mut self) {
        self.push_both(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        self.push_both(&frame(4, 0, 0, &[]));
        let mut stream = 1;
        for _ in 0..self.random.random_range(1..6) {
            if self.one_in(4) {
                self.other_frame(stream);
            }
            self.headers(stream);
            stream += if self.one_in(12) { 0 } else { 2 };
        }
    }

    fn other_frame(&mut self, stream: u32) {
        let before = stream.saturating_sub(2);
        let octets = match self.random.random_range(0..7) {
            0 => frame(0, 0, before, b"\0\0\0\0\0"),
            1 => frame(3, 0, before, &[0, 0, 0, 8]),
            2 => frame(6, 0, 0, &[7; 8]),
            3 => frame(8, 0, 0, &[0, 0, 1, 0]),
            4 => frame(2, 0, before, &[0, 0, 0, 0, 9]),
            5 => frame(self.random.random_range(10..200), 0xff, before, b"unknown"),
            _ => frame(9, 4, before, b"\x82"),
        };
        self.push_both(&octets);
    }

    /// Generates a random header block.
    fn block(&mut self) -> BlockVersions {
        let mut block = BlockVersions::default();
        if self.one_in(20) {
            let size = [
                &[0x20][..],
                &[0x3f, 0xe1, 0x1f],
                &[0x3f, 0x45],
                &[0x3f, 0xe2, 0x1f],
            ][self.random.random_range(0..4)];
            block.extend(size);
        }
        // Usually adds the required fields, so that most requests are accepted.
        let required: &[u8] = if self.one_in(30) {
            &[0x82]
        } else {
            &[0x83, 0x86, 0x84]
        };
        block.extend(required);
        if !self.one_in(4) {
            let name = if self.one_in(3) { None } else { Some(1) };
            self.field(&mut block, ":authority", name);
        }
        for _ in 0..self.random.random_range(0..4) {
            if self.one_in(3) {
                let index = if self.one_in(3) {
                    62 + self.random.random_range(0..6)
                } else {
                    self.random.random_range(15..62)
                };
                block.extend(&[0x80 | index]);
            } else if self.one_in(6) {
                let index = if self.one_in(2) {
                    62 + self.random.random_range(0..4)
                } else {
                    self.random.random_range(1..62)
                };
                self.field(&mut block, "", Some(index));
            } else {
                let name = NAMES[self.random.random_range(0..NAMES.len())];
                self.field(&mut block, name, None);
            }
        }
        block
    }

    /// Appends a literal field. The generator does not know the name behind an index of the dynamic
    /// table, so such a field has a value that normalization does not change.
    fn field(&mut self, block: &mut BlockVersions, name: &str, index: Option<u8>) {
        let (prefix, first) = [(6, 0x40), (4, 0x00), (4, 0x10)][if self.one_in(2) {
            0
        } else {
            self.random.random_range(0..3)
        }];
        let is_authority = name == ":authority" || index == Some(1);
        let value = match index {
            Some(62..) => "plain",
            _ if is_authority => AUTHORITIES[self.random.random_range(0..AUTHORITIES.len())],
            _ => VALUES[self.random.random_range(0..VALUES.len())],
        };
        let value = if self.one_in(40) {
            value.repeat(self.random.random_range(1..90))
        } else {
            value.to_owned()
        };
        let huffman = (self.one_in(2), self.one_in(2));
        for (block, value) in [
            (&mut block.input, value.as_str()),
            (
                &mut block.twin,
                &*if is_authority {
                    normalize_authority(&value)
                } else {
                    value.as_str().into()
                },
            ),
        ] {
            match index {
                Some(index) => integer(block, first, prefix, usize::from(index)),
                None => {
                    block.push(first);
                    string(block, name, huffman.0);
                }
            }
            string(block, value, huffman.1);
        }
    }

    fn headers(&mut self, stream: u32) {
        let block = self.block();
        let priority = self
            .one_in(6)
            .then(|| [0, 0, 0, if self.one_in(4) { stream as u8 } else { 0 }, 16]);
        self.has_unread_block |= priority.is_some_and(|priority| u32::from(priority[3]) == stream);
        let padding = self.one_in(6).then(|| self.random.random_range(0..40_u8));
        let cuts: Vec<f64> = if self.one_in(4) {
            (0..self.random.random_range(1..4))
                .map(|_| self.random.random())
                .collect()
        } else {
            Vec::new()
        };
        let end_stream = u8::from(self.one_in(2));
        let mut ends: Vec<_> = cuts
            .iter()
            .map(|cut| (cut * block.input.len() as f64) as usize)
            .chain([block.input.len()])
            .collect();
        ends.sort_unstable();
        for (output, block) in [
            (&mut self.input, &block.input),
            (&mut self.twin, &block.twin),
        ] {
            // The twin's block may be shorter. All frames up to its end have the same lengths.
            let ends: Vec<_> = ends.iter().map(|end| block.len().min(*end)).collect();
            let mut payload = Vec::new();
            payload.extend(padding);
            payload.extend(priority.into_iter().flatten());
            payload.extend_from_slice(&block[..ends[0]]);
            payload.extend(vec![0; usize::from(padding.unwrap_or(0))]);
            let flags = end_stream
                | if padding.is_some() { 8 } else { 0 }
                | if priority.is_some() { 0x20 } else { 0 };
            output.extend(frame(
                1,
                flags | if ends.len() == 1 { 4 } else { 0 },
                stream,
                &payload,
            ));
            for (at, pair) in ends.windows(2).enumerate() {
                let flags = if at + 2 == ends.len() { 4 } else { 0 };
                output.extend(frame(9, flags, stream, &block[pair[0]..pair[1]]));
            }
        }
    }

    fn pieces(&mut self) -> Vec<usize> {
        match self.random.random_range(0..4) {
            0 => vec![usize::MAX],
            1 => vec![1],
            2 => vec![24 + 9, self.random.random_range(1..64)],
            _ => (0..40).map(|_| self.random.random_range(1..200)).collect(),
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn integer(block: &mut Vec<u8>, first: u8, prefix: u32, value: usize) {
    let most = (1_usize << prefix) - 1;
    if value < most {
        block.push(first | value as u8);
        return;
    }
    block.push(first | most as u8);
    let mut rest = value - most;
    while rest >= 128 {
        block.push(rest as u8 | 128);
        rest >>= 7;
    }
    block.push(rest as u8);
}

/// Appends a string. The Huffman encoder is from another crate than the filter's.
fn string(block: &mut Vec<u8>, text: &str, huffman: bool) {
    let mut octets = text.as_bytes().to_vec();
    if huffman {
        octets = Vec::new();
        httlib_huffman::encode(text.as_bytes(), &mut octets).unwrap();
    }
    integer(block, if huffman { 0x80 } else { 0 }, 7, octets.len());
    block.extend(octets);
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test is configured by the environment"
)]
fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn filtered_connection_behaves_like_normalized_input() {
    let first = variable("WARMROUTE_HTTP2_SEED", 0);
    let cases = variable("WARMROUTE_HTTP2_CASES", 20_000);
    let mut counts = [0_u64; 4];
    for seed in first..first + cases {
        let mut generator = Generator::new(seed);
        generator.connection();
        let pieces = generator.pieces();
        let (outcome, reported) = filtered(&generator.input, pieces.clone());
        let expected = unfiltered(&generator.twin, pieces.clone());
        assert_eq!(
            outcome, expected,
            "seed {seed}, reads of {pieces:?}:\n{:x?}\n{:x?}",
            generator.input, generator.twin
        );
        assert_eq!(
            reported > 0,
            outcome
                .errors
                .iter()
                .any(|(_, _, code)| ![0, 8].contains(code)),
            "seed {seed}"
        );
        if !expected.has_errors() && !generator.has_unread_block {
            // `h2` and the filter read every block, so the filter passes exactly the twin.
            assert_eq!(
                passed(&generator.input, pieces, true),
                generator.twin,
                "seed {seed}"
            );
        }
        counts[0] += expected.requests.len() as u64;
        counts[1] += u64::from(expected.has_errors());
        counts[2] += u64::from(generator.input != generator.twin);
        if generator.one_in(3) {
            check_mutated(seed, &mut generator, &mut counts[3]);
        }
    }
    println!(
        "{cases} connections: {counts:?} requests, with errors, with replaced authorities, mutated without an error"
    );
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}

/// Changes random octets of a connection. If `h2` alone reports no error, the filter must not
/// change the outcome.
fn check_mutated(seed: u64, generator: &mut Generator, accepted: &mut u64) {
    let mut input = generator.twin.clone();
    for _ in 0..generator.random.random_range(1..4) {
        let at = generator.random.random_range(0..input.len());
        match generator.random.random_range(0..3) {
            0 => input[at] = generator.random.random(),
            1 => input[at] ^= 1 << generator.random.random_range(0..8),
            _ => input.truncate(at.max(1)),
        }
    }
    let pieces = generator.pieces();
    let outcome = unfiltered(&input, pieces.clone());
    let (through, _) = filtered(&input, pieces.clone());
    // A reset by the client suppresses the error that `h2` would send.
    if !outcome.has_errors() && !has_reset(&input) {
        assert_eq!(through, outcome, "seed {seed}: {input:x?}");
        *accepted += 1;
    }
    // The outcomes may differ at an incomplete header block. The filter holds it back, and `h2`
    // alone may respond to its start.
    if passed(&input, pieces, false) == input {
        assert_eq!(through, outcome, "seed {seed}");
    } else if !through.closes_connection() {
        // Behind the filter, `h2` may accept a stream that it resets alone. There may then be more
        // requests, and a later error on that stream may close the connection.
        let mut rest = through.requests.iter();
        let found = outcome
            .requests
            .iter()
            .all(|request| rest.any(|found| found == request));
        assert!(found, "seed {seed}: {outcome:?} {through:?}\n{input:x?}");
    }
}
