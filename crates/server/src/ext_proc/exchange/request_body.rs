//! Received parts of a request body.

use bytes::{Bytes, BytesMut};

use crate::ext_proc::headers::RequestHead;

/// Maximum multiple of the received bytes that is allocated for an announced length, so that the
/// announcement alone does not occupy memory.
const MAX_ALLOCATION_RATIO: usize = 8;

/// A body in several pieces. A body in one piece is not copied.
#[derive(Debug, Default)]
pub(super) struct BufferedBody {
    /// Length that the headers announce, or 0.
    announced: u64,
    first: Bytes,
    /// All pieces joined, if there are at least two.
    joined: BytesMut,
}

impl BufferedBody {
    /// Creates an empty body. `length` is the length that the headers announce.
    pub(super) fn with_announced_length(length: Option<u64>) -> Self {
        Self {
            announced: length.unwrap_or(0),
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
            let limit = MAX_ALLOCATION_RATIO * (self.first.len() + piece.len());
            self.joined
                .reserve(self.announced.min(limit as u64) as usize);
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
#[derive(Debug)]
pub(super) struct DuplexBody {
    pub(super) body: Bytes,
    /// Received since the route was requested.
    pub(super) late_body: BytesMut,
    pub(super) end: DuplexEnd,
}

impl DuplexBody {
    pub(super) fn new(body: Bytes, end: DuplexEnd) -> Self {
        Self {
            body,
            late_body: BytesMut::new(),
            end,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.body.len() + self.late_body.len()
    }

    /// Returns the final length of the body, which `edit` may replace; `None` if unknown.
    pub(super) fn content_length(&self, head: &RequestHead, edit: Option<&Bytes>) -> Option<u64> {
        match (self.end, edit) {
            (DuplexEnd::Body, Some(edit)) => Some(edit.len() as u64),
            (DuplexEnd::Body, None) => Some(self.len() as u64),
            // Envoy removes `content-length` in full-duplex mode. It is still correct.
            (DuplexEnd::Open, None) => head.content_length,
            // A message with trailers has no fixed length.
            (DuplexEnd::Open | DuplexEnd::Trailers, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_length_is_allocated_in_proportion() {
        let mut body = BufferedBody::with_announced_length(Some(1 << 30));
        body.push(Bytes::from_static(&[1; 100]));
        body.push(Bytes::from_static(&[2; 100]));
        assert!(body.joined.capacity() < 4_000, "{}", body.joined.capacity());
        let mut body = BufferedBody::with_announced_length(Some(1_000));
        body.push(Bytes::from_static(&[1; 400]));
        body.push(Bytes::from_static(&[2; 300]));
        let allocated = body.joined.as_ptr();
        body.push(Bytes::from_static(&[3; 300]));
        assert_eq!(body.joined.as_ptr(), allocated);
        let expected = [vec![1; 400], vec![2; 300], vec![3; 300]].concat();
        assert_eq!(body.into_bytes(), expected);
    }
}
