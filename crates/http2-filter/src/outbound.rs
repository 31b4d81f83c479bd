//! Reads the frames that the server sends, to detect ended streams and errors.

use crate::activity::OpenStreams;
use crate::frame::{DATA, END_STREAM, FrameHeader, GOAWAY, HEADER_LEN, HEADERS, RST_STREAM};

/// Codes that are not errors: NO_ERROR and CANCEL.
const HARMLESS: [u32; 2] = [0, 8];

/// Scope of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorScope {
    /// Stream error, sent by RST_STREAM.
    Stream,
    /// Connection error, sent by GOAWAY.
    Connection,
}

/// Error that the server sent to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SentError {
    /// Scope.
    pub scope: ErrorScope,
    /// Name of the error code in lower case.
    pub reason: &'static str,
}

/// Reader of the frames that the server sends.
#[derive(Debug, Default)]
pub(crate) struct OutboundReader {
    /// Start of the current frame: its header and, for RST_STREAM and GOAWAY, the error code.
    head: Vec<u8>,
    /// Octets of the frame that are still to be skipped.
    rest: usize,
}

impl OutboundReader {
    /// Reads octets that the server sent. Updates `streams` and calls `on_error` for each error.
    pub(crate) fn read(
        &mut self,
        mut octets: &[u8],
        streams: &mut OpenStreams,
        mut on_error: impl FnMut(SentError),
    ) {
        while !octets.is_empty() {
            let skipped = self.rest.min(octets.len());
            self.rest -= skipped;
            octets = &octets[skipped..];
            let wanted = self.wanted() - self.head.len();
            let taken = wanted.min(octets.len());
            self.head.extend_from_slice(&octets[..taken]);
            octets = &octets[taken..];
            if let Some(header) = FrameHeader::parse(&self.head)
                && self.head.len() == self.wanted()
            {
                self.rest = header.length - (self.head.len() - HEADER_LEN);
                on_frame(header, &self.head[HEADER_LEN..], streams).map(&mut on_error);
                self.head.clear();
            }
        }
    }

    /// Returns the number of octets to store from the start of the frame.
    fn wanted(&self) -> usize {
        match FrameHeader::parse(&self.head) {
            Some(FrameHeader {
                kind: RST_STREAM,
                length,
                ..
            }) => HEADER_LEN + length.min(4),
            Some(FrameHeader {
                kind: GOAWAY,
                length,
                ..
            }) => HEADER_LEN + length.min(8),
            _ => HEADER_LEN,
        }
    }
}

fn on_frame(header: FrameHeader, payload: &[u8], streams: &mut OpenStreams) -> Option<SentError> {
    match header.kind {
        HEADERS | DATA => {
            streams.on_frame();
            if header.has_flag(END_STREAM) {
                streams.close(header.stream);
            }
            None
        }
        RST_STREAM => {
            streams.close(header.stream);
            sent_error(ErrorScope::Stream, payload)
        }
        GOAWAY => sent_error(ErrorScope::Connection, payload),
        _ => None,
    }
}

fn sent_error(scope: ErrorScope, payload: &[u8]) -> Option<SentError> {
    let code = u32::from_be_bytes(*payload.last_chunk()?);
    (!HARMLESS.contains(&code)).then(|| SentError {
        scope,
        reason: reason(code),
    })
}

/// Returns the name of an error code (RFC 9113, section 7).
fn reason(code: u32) -> &'static str {
    match code {
        1 => "protocol_error",
        2 => "internal_error",
        3 => "flow_control_error",
        4 => "settings_timeout",
        5 => "stream_closed",
        6 => "frame_size_error",
        7 => "refused_stream",
        9 => "compression_error",
        10 => "connect_error",
        11 => "enhance_your_calm",
        12 => "inadequate_security",
        13 => "http_1_1_required",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream];
        frame.extend(payload);
        frame
    }

    #[test]
    fn errors_and_ends_are_found_in_any_split() {
        let octets = [
            frame(4, 0, 0, &[0; 6]),
            frame(DATA, 0, 1, b"some data"),
            frame(RST_STREAM, 0, 3, &[0, 0, 0, 1]),
            frame(RST_STREAM, 0, 5, &[0, 0, 0, 8]),
            frame(HEADERS, END_STREAM | 4, 1, b"trailers"),
            frame(
                GOAWAY,
                0,
                0,
                &[0, 0, 0, 7, 0, 0, 0, 11, b'c', b'a', b'l', b'm'],
            ),
            frame(GOAWAY, 0, 0, &[0, 0, 0, 7, 0, 0, 0, 0]),
        ]
        .concat();
        for size in 1..=octets.len() {
            let mut streams = OpenStreams::default();
            let mut errors = Vec::new();
            for stream in [1, 3, 5, 7] {
                streams.open(stream);
            }
            let mut reader = OutboundReader::default();
            for piece in octets.chunks(size) {
                reader.read(piece, &mut streams, |error| errors.push(error));
            }
            let expected = [
                SentError {
                    scope: ErrorScope::Stream,
                    reason: "protocol_error",
                },
                SentError {
                    scope: ErrorScope::Connection,
                    reason: "enhance_your_calm",
                },
            ];
            assert_eq!(errors, expected, "{size}");
            assert_eq!((streams.count(), streams.frames()), (1, 2), "{size}");
        }
    }
}
