//! Frame headers of HTTP/2 (RFC 9113, section 4.1).

/// Length of a frame header in octets.
pub(crate) const HEADER_LEN: usize = 9;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 0x1;
pub(crate) const END_HEADERS: u8 = 0x4;
pub(crate) const PADDED: u8 = 0x8;
pub(crate) const PRIORITY: u8 = 0x20;

/// A parsed frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) length: usize,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
}

impl FrameHeader {
    /// Parses a frame header. Returns `None` if `octets` are too short.
    pub(crate) fn parse(octets: &[u8]) -> Option<Self> {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3, ..] = *octets else {
            return None;
        };
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        // The first bit of the stream identifier is reserved.
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        Some(Self {
            length,
            kind,
            flags,
            stream,
        })
    }

    pub(crate) fn has_flag(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Encodes a length as in a frame header.
pub(crate) fn length_octets(length: usize) -> [u8; 3] {
    let [.., l0, l1, l2] = length.to_be_bytes();
    [l0, l1, l2]
}
