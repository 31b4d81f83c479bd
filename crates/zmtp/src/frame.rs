//! ZMTP frames: flags, length and body. The decoder allocates memory only for received bytes. It
//! skips the body of a frame that exceeds the caller's limit.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use crate::error::ProtocolError;

/// Longest command in bytes. READY with its metadata needs a few hundred bytes.
const MAX_COMMAND: u64 = 8 * 1024;
/// Smallest capacity of a body buffer. From there on, the buffer grows by doubling.
const SMALLEST_GROWTH: usize = 16 * 1024;

const MORE: u8 = 1;
const LONG: u8 = 2;
const IS_COMMAND: u8 = 4;

/// One frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ZmtpFrame {
    /// A part of a message.
    Part { more: bool, body: Bytes },
    /// A part of a message that exceeded the caller's limit. Its body was discarded.
    Skipped { more: bool, length: u64 },
    /// A command.
    Command(Bytes),
}

/// The message frames that the caller accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AcceptedFrames {
    /// None: the handshake consists of commands.
    Commands,
    /// Message frames. A body of up to `store_limit` bytes is stored, one of up to `skip_limit`
    /// bytes is discarded, and a larger one is an error.
    Messages { store_limit: usize, skip_limit: u64 },
}

/// Decodes frames from a byte stream.
#[derive(Debug, Default)]
pub(crate) struct FrameDecoder {
    state: State,
}

#[derive(Debug, Default)]
enum State {
    /// Flags and length.
    #[default]
    Header,
    Body {
        kind: FrameKind,
        length: usize,
        stored: Vec<u8>,
    },
    Skip {
        more: bool,
        length: u64,
        left: u64,
    },
}

#[derive(Clone, Copy, Debug)]
enum FrameKind {
    Part { more: bool },
    Command,
}

impl FrameKind {
    fn frame(self, body: Bytes) -> ZmtpFrame {
        match self {
            FrameKind::Part { more } => ZmtpFrame::Part { more, body },
            FrameKind::Command => ZmtpFrame::Command(body),
        }
    }
}

impl FrameDecoder {
    /// Consumes input up to the end of the next frame. If no frame is complete, returns `None` and
    /// consumes all input except a part of a header.
    pub(crate) fn decode(
        &mut self,
        input: &mut BytesMut,
        accept: AcceptedFrames,
    ) -> Result<Option<ZmtpFrame>, ProtocolError> {
        if matches!(self.state, State::Header) {
            let Some((flags, length)) = take_header(input) else {
                return Ok(None);
            };
            self.state = body_state(flags, length, accept)?;
        }
        match &mut self.state {
            State::Header => Ok(None),
            State::Body {
                kind,
                length,
                stored,
            } => {
                let missing = *length - stored.len();
                if stored.is_empty() && input.len() >= missing {
                    let frame = kind.frame(input.split_to(missing).freeze());
                    self.state = State::Header;
                    return Ok(Some(frame));
                }
                let taken = input.len().min(missing);
                grow(stored, taken, *length);
                stored.extend_from_slice(&input[..taken]);
                input.advance(taken);
                if taken < missing {
                    return Ok(None);
                }
                let frame = kind.frame(Bytes::from(std::mem::take(stored)));
                self.state = State::Header;
                Ok(Some(frame))
            }
            State::Skip { more, length, left } => {
                let taken =
                    usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                input.advance(taken);
                *left -= taken as u64;
                if *left > 0 {
                    return Ok(None);
                }
                let frame = ZmtpFrame::Skipped {
                    more: *more,
                    length: *length,
                };
                self.state = State::Header;
                Ok(Some(frame))
            }
        }
    }
}

/// Takes flags and length from the input. Returns `None` if they are incomplete.
fn take_header(input: &mut BytesMut) -> Option<(u8, u64)> {
    let flags = *input.first()?;
    let is_long = flags & LONG != 0;
    if input.len() < if is_long { 9 } else { 2 } {
        return None;
    }
    input.advance(1);
    let length = if is_long {
        input.get_u64()
    } else {
        u64::from(input.get_u8())
    };
    Some((flags, length))
}

/// Returns the decoder state for a body of an announced length.
fn body_state(flags: u8, length: u64, accept: AcceptedFrames) -> Result<State, ProtocolError> {
    if flags & !(MORE | LONG | IS_COMMAND) != 0 || flags & (MORE | IS_COMMAND) == MORE | IS_COMMAND
    {
        return Err(ProtocolError::Flags(flags));
    }
    let more = flags & MORE != 0;
    let (kind, store_limit) = match accept {
        _ if flags & IS_COMMAND != 0 && length > MAX_COMMAND => {
            return Err(ProtocolError::CommandTooLarge(length));
        }
        _ if flags & IS_COMMAND != 0 => (FrameKind::Command, usize::MAX),
        AcceptedFrames::Commands => return Err(ProtocolError::EarlyMessage),
        AcceptedFrames::Messages { skip_limit, .. } if length > skip_limit => {
            return Err(ProtocolError::MessageTooLarge(length));
        }
        AcceptedFrames::Messages { store_limit, .. } => (FrameKind::Part { more }, store_limit),
    };
    Ok(match usize::try_from(length) {
        Ok(length) if length <= store_limit => State::Body {
            kind,
            length,
            stored: Vec::new(),
        },
        _ => State::Skip {
            more,
            length,
            left: length,
        },
    })
}

/// Reserves space for `taken` more bytes. The capacity is at most twice the received bytes, and
/// never more than the announced length.
fn grow(stored: &mut Vec<u8>, taken: usize, length: usize) {
    let needed = stored.len() + taken;
    if needed > stored.capacity() {
        let capacity = needed
            .max(stored.capacity() * 2)
            .max(SMALLEST_GROWTH)
            .min(length);
        stored.reserve_exact(capacity - stored.len());
    }
}

/// Appends a message frame.
pub(crate) fn put_part(output: &mut BytesMut, body: &[u8], more: bool) {
    put_frame(output, if more { MORE } else { 0 }, body);
}

/// Appends a command frame.
pub(crate) fn put_command(output: &mut BytesMut, body: &[u8]) {
    put_frame(output, IS_COMMAND, body);
}

fn put_frame(output: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => output.put_slice(&[flags, length]),
        Err(_) => {
            output.put_u8(flags | LONG);
            output.put_u64(body.len() as u64);
        }
    }
    output.put_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMPLE_LIMITS: AcceptedFrames = AcceptedFrames::Messages {
        store_limit: 1 << 20,
        skip_limit: 1 << 24,
    };

    fn decode_all(
        pieces: Vec<BytesMut>,
        accept: AcceptedFrames,
    ) -> Result<Vec<ZmtpFrame>, ProtocolError> {
        let mut decoder = FrameDecoder::default();
        let mut frames = Vec::new();
        let mut input = BytesMut::new();
        for piece in pieces {
            input.unsplit(piece);
            while let Some(frame) = decoder.decode(&mut input, accept)? {
                frames.push(frame);
            }
            assert!(input.len() < 9, "the decoder left a body behind");
        }
        assert!(input.is_empty(), "the decoder left input behind");
        Ok(frames)
    }

    fn part(more: bool, body: &[u8]) -> ZmtpFrame {
        ZmtpFrame::Part {
            more,
            body: Bytes::copy_from_slice(body),
        }
    }

    #[test]
    fn frames_of_every_size_survive_every_split() {
        for length in [0, 1, 255, 256, 70_000] {
            let body: Vec<u8> = (0..length)
                .map(|at| u8::try_from(at % 251).unwrap())
                .collect();
            let mut wire = BytesMut::new();
            put_part(&mut wire, &body, true);
            put_command(&mut wire, b"\x04PONG");
            put_part(&mut wire, b"end", false);
            let expected = || {
                vec![
                    part(true, &body),
                    ZmtpFrame::Command(Bytes::from_static(b"\x04PONG")),
                    part(false, b"end"),
                ]
            };
            for size in [1, 2, 3, 9, 1000, wire.len()] {
                let pieces = wire.chunks(size).map(BytesMut::from).collect();
                assert_eq!(
                    decode_all(pieces, AMPLE_LIMITS),
                    Ok(expected()),
                    "{length} in pieces of {size}"
                );
            }
        }
    }

    #[test]
    fn announced_length_allocates_nothing() {
        let mut decoder = FrameDecoder::default();
        let mut header = BytesMut::from(&[LONG, 0, 0, 0, 0, 0x40, 0, 0, 0, 7][..]);
        let accept = AcceptedFrames::Messages {
            store_limit: 1 << 40,
            skip_limit: 1 << 41,
        };
        assert_eq!(decoder.decode(&mut header, accept), Ok(None));
        let State::Body { stored, length, .. } = decoder.state else {
            panic!("a body is expected")
        };
        assert_eq!((stored.len(), length), (1, 1 << 30));
        assert!(stored.capacity() <= SMALLEST_GROWTH);
    }

    #[test]
    fn body_buffer_stays_below_twice_the_received_bytes() {
        let mut decoder = FrameDecoder::default();
        let length: u64 = 1 << 22;
        let mut header = BytesMut::from(&[LONG][..]);
        header.put_u64(length);
        let accept = AcceptedFrames::Messages {
            store_limit: 1 << 22,
            skip_limit: 1 << 22,
        };
        assert_eq!(decoder.decode(&mut header, accept), Ok(None));
        for _ in 1..(length / 1024) {
            assert_eq!(
                decoder.decode(&mut BytesMut::from(&[7; 1024][..]), accept),
                Ok(None)
            );
            let State::Body { stored, .. } = &decoder.state else {
                panic!("a body is expected")
            };
            assert!(stored.capacity() <= (stored.len() * 2).max(SMALLEST_GROWTH));
        }
        let Ok(Some(ZmtpFrame::Part { body, .. })) =
            decoder.decode(&mut BytesMut::from(&[7; 1024][..]), accept)
        else {
            panic!("the frame is complete")
        };
        assert_eq!(body.len() as u64, length);
    }

    #[test]
    fn frame_beyond_the_limit_is_skipped() {
        let mut wire = BytesMut::new();
        put_part(&mut wire, &[1; 300], true);
        put_part(&mut wire, b"after", false);
        let accept = AcceptedFrames::Messages {
            store_limit: 299,
            skip_limit: 300,
        };
        let expected = vec![
            ZmtpFrame::Skipped {
                more: true,
                length: 300,
            },
            part(false, b"after"),
        ];
        assert_eq!(
            decode_all(wire.chunks(7).map(BytesMut::from).collect(), accept),
            Ok(expected)
        );
    }

    #[test]
    fn invalid_headers_are_refused() {
        let cases: [(&[u8], AcceptedFrames, ProtocolError); 5] = [
            (&[0x08, 0], AMPLE_LIMITS, ProtocolError::Flags(8)),
            (
                &[IS_COMMAND | MORE, 0],
                AMPLE_LIMITS,
                ProtocolError::Flags(5),
            ),
            (
                &[0, 1],
                AcceptedFrames::Commands,
                ProtocolError::EarlyMessage,
            ),
            (
                &[LONG, 0x40, 0, 0, 0, 0, 0, 0, 0],
                AMPLE_LIMITS,
                ProtocolError::MessageTooLarge(1 << 62),
            ),
            (
                &[LONG | IS_COMMAND, 0, 0, 0, 0, 0, 1, 0, 0],
                AMPLE_LIMITS,
                ProtocolError::CommandTooLarge(1 << 16),
            ),
        ];
        for (header, accept, error) in cases {
            assert_eq!(decode_all(vec![BytesMut::from(header)], accept), Err(error));
        }
    }
}
