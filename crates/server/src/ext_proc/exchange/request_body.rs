//! Received parts of a request body.

use bytes::{Bytes, BytesMut};

use crate::ext_proc::headers::RequestHead;

/// Maximum memory that is allocated for an announced length, in bytes. A body that exceeds it grows
/// as it arrives.
const MAX_EXPECTED_BYTES: usize = 1 << 20;

/// A body in several pieces. A body in one piece is not copied.
#[derive(Debug, Default)]
pub(super) struct BufferedBody {
    /// Length that the headers announce, up to [`MAX_EXPECTED_BYTES`].
    expected: usize,
    first: Bytes,
    /// All pieces joined, if there are at least two.
    joined: BytesMut,
}

impl BufferedBody {
    /// Creates an empty body. `length` is the length that the headers announce.
    pub(super) fn with_expected_length(length: Option<u64>) -> Self {
        let expected = length.map_or(0, |length| length.min(MAX_EXPECTED_BYTES as u64));
        Self {
            expected: expected as usize,
            ..Self::default()
        }
    }

    /// Returns the number of received bytes.
    pub(super) fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    /// Appends a piece.
    pub(super) fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
            return;
        }
        if self.joined.is_empty() {
            self.joined.reserve(self.expected);
            self.joined
                .extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&piece);
    }

    /// Returns the whole body.
    pub(super) fn into_bytes(self) -> Bytes {
        if self.joined.is_empty() {
            self.first
        } else {
            self.joined.freeze()
        }
    }
}

/// End of the received part of a full-duplex request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DuplexEnd {
    /// More bytes will follow.
    Open,
    /// The body has ended.
    Body,
    /// The request has ended with trailers.
    Trailers,
}

/// The received part of a full-duplex request.
pub(super) struct DuplexBody {
    pub(super) body: Bytes,
    pub(super) late_body: BytesMut,
    pub(super) end: DuplexEnd,
}

impl DuplexBody {
    /// Returns the final length of the body, which `edit` may replace; `None` if unknown.
    pub(super) fn content_length(&self, head: &RequestHead, edit: Option<&Bytes>) -> Option<u64> {
        match (self.end, edit) {
            (DuplexEnd::Body, Some(edit)) => Some(edit.len() as u64),
            (DuplexEnd::Body, None) => Some((self.body.len() + self.late_body.len()) as u64),
            // Envoy removes `content-length` in full-duplex mode. It is still correct.
            (DuplexEnd::Open, None) => head.content_length,
            // A message with trailers has no fixed length.
            (DuplexEnd::Open | DuplexEnd::Trailers, _) => None,
        }
    }
}
