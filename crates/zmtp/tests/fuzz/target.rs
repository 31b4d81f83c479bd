//! The fuzz target: a peer sends its bytes in pieces through a socket pair. The connection must
//! report the same events as a reference parser that has all bytes at once. The reported frames
//! must not exceed the received bytes.

use std::cell::RefCell;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::runtime::{Builder, Runtime};
use warmroute_zmtp::{
    ConnectionTiming, ExceededLimit, MessageLimits, SessionEvent, SocketRole, ZmtpConnection,
    ZmtpSession,
};

/// Small limits, so that inputs of a few hundred bytes reach them.
pub(crate) const LIMITS: MessageLimits = MessageLimits {
    max_bytes: 96,
    max_frames: 4,
};
const SKIP_FACTOR: u64 = 16;
const MAX_COMMAND: u64 = 8 * 1024;

/// The result of processing a peer's bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) ready: bool,
    pub(crate) events: Vec<SessionEvent>,
    /// The connection failed before the peer closed it.
    pub(crate) violation: bool,
}

thread_local! {
    static RUNTIME: RefCell<Runtime> =
        RefCell::new(Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime"));
}

/// Runs one input: the role, the size of the pieces, and the peer's bytes.
pub(crate) fn run(input: &[u8]) {
    let [role, piece, bytes @ ..] = input else {
        return;
    };
    let dealer = role & 1 == 1;
    let expected = parse(bytes, dealer);
    let received = RUNTIME
        .with_borrow(|runtime| runtime.block_on(receive(bytes, dealer, usize::from(*piece) + 1)));
    assert_eq!(
        received,
        expected,
        "dealer: {dealer}, in pieces of {}",
        usize::from(*piece) + 1
    );
    let payload: usize = received.events.iter().map(size).sum();
    assert!(payload <= bytes.len());
}

fn size(event: &SessionEvent) -> usize {
    match event {
        SessionEvent::Message(frames) => {
            let size = frames.iter().map(Bytes::len).sum();
            assert!(size <= LIMITS.max_bytes && frames.len() <= LIMITS.max_frames);
            size
        }
        SessionEvent::Ready | SessionEvent::Oversize(_) => 0,
    }
}

/// Returns the outcome of sending the bytes to a connection through a socket pair.
async fn receive(bytes: &[u8], dealer: bool, piece: usize) -> Outcome {
    let (ours, theirs) = duplex(512);
    let (mut read, mut write) = tokio::io::split(theirs);
    let peer = async {
        for piece in bytes.chunks(piece) {
            if write.write_all(piece).await.is_err() {
                return;
            }
        }
        let _ = write.shutdown().await;
    };
    // The peer reads all the time, so that replies to its heartbeats never block.
    let drain = async {
        let mut sink = [0; 256];
        while matches!(read.read(&mut sink).await, Ok(count) if count > 0) {}
    };
    let (outcome, (), ()) = tokio::join!(consume(ours, dealer), peer, drain);
    outcome
}

async fn consume(stream: tokio::io::DuplexStream, dealer: bool) -> Outcome {
    let role = if dealer {
        SocketRole::Dealer
    } else {
        SocketRole::Sub {
            topic: Bytes::from_static(b"kv"),
        }
    };
    let mut outcome = Outcome::default();
    let mut connection = match ZmtpConnection::handshake(
        stream,
        ZmtpSession::new(role, LIMITS),
        ConnectionTiming::default(),
    )
    .await
    {
        Ok(connection) => connection,
        Err(error) => {
            return Outcome {
                violation: error.reason() != "closed_in_handshake",
                ..outcome
            };
        }
    };
    outcome.ready = true;
    loop {
        match connection.next_event().await {
            Ok(event) => outcome.events.push(event),
            Err(error) => {
                outcome.violation = error.reason() != "closed";
                return outcome;
            }
        }
    }
}

/// Returns the outcome according to the reference parser.
fn parse(bytes: &[u8], dealer: bool) -> Outcome {
    let mut outcome = Outcome::default();
    outcome.violation = parse_into(bytes, dealer, &mut outcome).is_err();
    outcome
}

struct Violation;

/// Flags and body of a frame, and the bytes after it.
struct ParsedFrame<'a> {
    flags: u8,
    body: &'a [u8],
    rest: &'a [u8],
}

/// Parses the next frame. Returns `None` if the bytes end before it is complete.
fn frame(
    bytes: &[u8],
    at_most: impl Fn(u8, u64) -> bool,
) -> Result<Option<ParsedFrame<'_>>, Violation> {
    let Some((&flags, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    let (length, rest) = if flags & 2 == 0 {
        let Some((&length, rest)) = rest.split_first() else {
            return Ok(None);
        };
        (u64::from(length), rest)
    } else {
        let Some((length, rest)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        (u64::from_be_bytes(*length), rest)
    };
    if flags > 7 || flags & 5 == 5 || !at_most(flags, length) {
        return Err(Violation);
    }
    let complete = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length));
    Ok(complete.map(|(body, rest)| ParsedFrame { flags, body, rest }))
}

fn parse_into(bytes: &[u8], dealer: bool, outcome: &mut Outcome) -> Result<(), Violation> {
    let is = |at: usize, test: &dyn Fn(u8) -> bool| bytes.get(at).is_none_or(|byte| test(*byte));
    if !is(0, &|byte| byte == 0xff) || !is(9, &|byte| byte & 1 == 1) || !is(10, &|byte| byte >= 3) {
        return Err(Violation);
    }
    let Some((greeting, rest)) = bytes.split_at_checked(64) else {
        return Ok(());
    };
    if !greeting[12..32].starts_with(b"NULL\0") {
        return Err(Violation);
    }
    let Some(handshake) = frame(rest, |flags, length| {
        flags & 4 != 0 && length <= MAX_COMMAND
    })?
    else {
        return Ok(());
    };
    let socket_type = parse_ready(handshake.body).ok_or(Violation)?;
    let accepted: [&[u8]; 3] = if dealer {
        [b"ROUTER", b"DEALER", b"REP"]
    } else {
        [b"PUB", b"XPUB", b"XPUB"]
    };
    if !accepted.contains(&&socket_type[..]) {
        return Err(Violation);
    }
    outcome.ready = true;
    parse_messages(handshake.rest, outcome)
}

/// Parses the frames after the handshake.
fn parse_messages(mut rest: &[u8], outcome: &mut Outcome) -> Result<(), Violation> {
    let limit = LIMITS.max_bytes as u64;
    let mut parts = Vec::new();
    let mut count = 0_usize;
    let mut total = 0_u64;
    loop {
        let is_within_limits = |flags: u8, length: u64| match flags & 4 {
            0 => length.saturating_add(total) <= limit * SKIP_FACTOR,
            _ => length <= MAX_COMMAND,
        };
        let Some(ParsedFrame {
            flags,
            body,
            rest: after,
        }) = frame(rest, is_within_limits)?
        else {
            return Ok(());
        };
        rest = after;
        if flags & 4 != 0 {
            traffic_command(body)?;
            continue;
        }
        parts.push(Bytes::copy_from_slice(body));
        count += 1;
        total += body.len() as u64;
        if count as u64 > LIMITS.max_frames as u64 * SKIP_FACTOR {
            return Err(Violation);
        }
        if flags & 1 == 0 {
            outcome
                .events
                .push(event(std::mem::take(&mut parts), count, total));
            count = 0;
            total = 0;
        }
    }
}

/// Returns the event of a complete message. If both limits are exceeded, the event reports the one
/// that was exceeded first.
fn event(parts: Vec<Bytes>, count: usize, total: u64) -> SessionEvent {
    let limit = LIMITS.max_bytes as u64;
    if total <= limit && count <= LIMITS.max_frames {
        return SessionEvent::Message(parts);
    }
    let mut sum = 0;
    let by_bytes = parts.iter().position(|part| {
        sum += part.len() as u64;
        sum > limit
    });
    match by_bytes {
        Some(at) if at <= LIMITS.max_frames => SessionEvent::Oversize(ExceededLimit::Message),
        _ => SessionEvent::Oversize(ExceededLimit::Frames),
    }
}

/// Returns the socket type of a READY command.
fn parse_ready(body: &[u8]) -> Option<Vec<u8>> {
    let mut rest = body.strip_prefix(b"\x05READY")?;
    let mut socket_type = Vec::new();
    while let Some((&length, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(length))?;
        let (length, after) = after.split_first_chunk()?;
        let (value, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            socket_type = value.to_vec();
        }
        rest = after;
    }
    Some(socket_type)
}

fn traffic_command(body: &[u8]) -> Result<(), Violation> {
    let (&length, rest) = body.split_first().ok_or(Violation)?;
    let (name, data) = rest
        .split_at_checked(usize::from(length))
        .ok_or(Violation)?;
    match name {
        b"ERROR" => Err(Violation),
        b"PING" if !(2..=18).contains(&data.len()) => Err(Violation),
        b"READY" if parse_ready(body).is_none() => Err(Violation),
        _ => Ok(()),
    }
}
