//! Reads the frames that the client sends. Octets pass to the server at once, except those of an
//! incomplete header block and after it.

use std::borrow::Cow;

use crate::activity::OpenStreams;
use crate::frame::{
    CONTINUATION, DATA, END_HEADERS, FrameHeader, HEADER_LEN, HEADERS, PADDED, PRIORITY,
    RST_STREAM, length_octets,
};
use crate::hpack::DynamicTable;

/// Connection preface of HTTP/2.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Maximum number of frames of a header block.
const BLOCK_FRAMES: usize = 128;

/// Position of the reader in the frames of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadPosition {
    /// This many octets of the preface were received.
    Preface(usize),
    /// At the start of a frame.
    Frame,
    /// This many octets of a frame are missing.
    Payload(usize),
    /// This many octets are missing of a frame whose header block exceeds the limits of the filter.
    OversizedFrame(usize),
    /// A header block exceeded the limits of the filter. Later blocks cannot be decoded, so the
    /// connection ends.
    Oversized,
    /// The rest of the connection passes unread, because `h2` ends the connection.
    Unread,
}

/// State of the header block at the start of some octets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderBlockExtent {
    /// Complete, with the length of its frames in octets.
    Complete(usize),
    /// Incomplete. At least this many octets are needed from the start of the block.
    Incomplete(usize),
    /// Exceeds the limits of the filter.
    Oversized,
    /// Rejected by `h2`.
    Unreadable,
}

/// Reader of the frames that the client sends.
pub(crate) struct InboundReader {
    position: ReadPosition,
    table: DynamicTable,
    /// Maximum size of a header block with its frames, in octets.
    block_limit: usize,
    /// Received octets of an incomplete frame or header block.
    held: Vec<u8>,
    /// Number of frames and header blocks that were held back and then completed.
    completed: u64,
}

impl InboundReader {
    pub(crate) fn new(block_limit: usize) -> Self {
        let position = ReadPosition::Preface(0);
        Self {
            position,
            table: DynamicTable::new(),
            block_limit,
            held: Vec::new(),
            completed: 0,
        }
    }

    /// Returns whether octets are held back.
    pub(crate) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns the number of frames and header blocks that were held back and then completed.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns whether the preface was received.
    pub(crate) fn has_preface(&self) -> bool {
        !matches!(self.position, ReadPosition::Preface(_))
    }

    /// Returns whether the connection must end because a header block exceeded the limits.
    pub(crate) fn is_oversized(&self) -> bool {
        self.position == ReadPosition::Oversized
    }

    /// Returns the number of octets that must be read before the held octets can pass.
    pub(crate) fn missing(&self) -> usize {
        let wanted = match FrameHeader::parse(&self.held) {
            None => HEADER_LEN,
            Some(_) => match self.extent(&self.held) {
                HeaderBlockExtent::Incomplete(wanted) => wanted,
                HeaderBlockExtent::Complete(_)
                | HeaderBlockExtent::Oversized
                | HeaderBlockExtent::Unreadable => 0,
            },
        };
        wanted.saturating_sub(self.held.len())
    }

    /// Returns the octets that are still held back after the client has closed the connection.
    pub(crate) fn release_held(&mut self) -> Vec<u8> {
        self.position = ReadPosition::Unread;
        std::mem::take(&mut self.held)
    }

    /// Appends octets to the held ones and returns the octets that may pass. The caller reads at
    /// most [`missing`](Self::missing) octets.
    pub(crate) fn read_held(&mut self, octets: &[u8], streams: &mut OpenStreams) -> Vec<u8> {
        let mut all = std::mem::take(&mut self.held);
        all.extend_from_slice(octets);
        let passed = self.read(&mut all, streams);
        // Nothing passes before the held frame or header block is complete.
        self.completed += u64::from(passed > 0);
        all.truncate(passed);
        all
    }

    /// Reads and edits octets in place. Holds back an incomplete frame header or header block at
    /// the end. Returns the number of octets that may pass.
    pub(crate) fn read(&mut self, octets: &mut [u8], streams: &mut OpenStreams) -> usize {
        let mut at = 0;
        let mut end = octets.len();
        while at < end {
            match self.position {
                ReadPosition::Unread => return end,
                ReadPosition::Oversized => return at,
                ReadPosition::Preface(matched) => {
                    let length = (PREFACE.len() - matched).min(end - at);
                    let is_preface = octets[at..at + length] == PREFACE[matched..matched + length];
                    at += length;
                    self.position = match matched + length {
                        _ if !is_preface => ReadPosition::Unread,
                        matched if matched == PREFACE.len() => ReadPosition::Frame,
                        matched => ReadPosition::Preface(matched),
                    };
                }
                ReadPosition::Payload(rest) => {
                    let length = rest.min(end - at);
                    at += length;
                    self.position = if rest == length {
                        ReadPosition::Frame
                    } else {
                        ReadPosition::Payload(rest - length)
                    };
                }
                ReadPosition::OversizedFrame(rest) => {
                    let length = rest.min(end - at);
                    at += length;
                    self.position = oversized_after(rest - length);
                }
                ReadPosition::Frame => match self.frame(&mut octets[at..end], streams) {
                    Some(FrameStep { read, passed }) => {
                        octets.copy_within(at + read..end, at + passed);
                        at += passed;
                        end -= read - passed;
                    }
                    None => {
                        self.held.extend_from_slice(&octets[at..end]);
                        return at;
                    }
                },
            }
        }
        end
    }

    /// Reads the header of a frame, or all frames of a header block. Returns `None` if they are
    /// incomplete.
    fn frame(&mut self, octets: &mut [u8], streams: &mut OpenStreams) -> Option<FrameStep> {
        let header = FrameHeader::parse(octets)?;
        if header.kind != HEADERS {
            match header.kind {
                DATA => streams.on_frame(),
                RST_STREAM => streams.close(header.stream),
                _ => {}
            }
            self.position = if header.length == 0 {
                ReadPosition::Frame
            } else {
                ReadPosition::Payload(header.length)
            };
            return Some(FrameStep::HEADER);
        }
        let length = match self.extent(octets) {
            HeaderBlockExtent::Complete(length) => length,
            HeaderBlockExtent::Incomplete(_) => return None,
            HeaderBlockExtent::Oversized => {
                // The frame still passes, because `h2` may refuse it with an error of its own.
                self.position = oversized_after(header.length);
                return Some(FrameStep::HEADER);
            }
            HeaderBlockExtent::Unreadable => {
                self.position = ReadPosition::Unread;
                return Some(FrameStep::HEADER);
            }
        };
        streams.on_frame();
        streams.open(header.stream);
        let passed = match self.edit_block(&octets[..length]) {
            Ok(Some(frames)) => {
                octets[..frames.len()].copy_from_slice(&frames);
                frames.len()
            }
            Ok(None) => length,
            Err(BlockError) => {
                self.position = ReadPosition::Unread;
                length
            }
        };
        Some(FrameStep {
            read: length,
            passed,
        })
    }

    /// Returns the edited frames of a header block, or `None` if they pass unchanged.
    fn edit_block(&mut self, octets: &[u8]) -> Result<Option<Vec<u8>>, BlockError> {
        let Some(block) = HeaderBlock::split(octets)? else {
            return Ok(None);
        };
        let edited = self
            .table
            .apply(&block.fragments())
            .map_err(|_| BlockError)?;
        Ok(edited.map(|edited| block.with_fragments(&edited)))
    }

    /// Returns the state of the header block at the start of `octets`.
    fn extent(&self, octets: &[u8]) -> HeaderBlockExtent {
        let mut at = 0;
        let mut stream = None;
        for _ in 0..BLOCK_FRAMES {
            let Some(header) = FrameHeader::parse(&octets[at..]) else {
                return HeaderBlockExtent::Incomplete(at + HEADER_LEN);
            };
            let continues =
                stream.is_none_or(|stream| header.kind == CONTINUATION && header.stream == stream);
            at += HEADER_LEN + header.length;
            if !continues {
                return HeaderBlockExtent::Unreadable;
            }
            if at > self.block_limit {
                return HeaderBlockExtent::Oversized;
            }
            if at > octets.len() {
                return HeaderBlockExtent::Incomplete(at);
            }
            if header.has_flag(END_HEADERS) {
                return HeaderBlockExtent::Complete(at);
            }
            stream = Some(header.stream);
        }
        HeaderBlockExtent::Oversized
    }
}

/// Returns the position in a frame of an oversized header block if `rest` octets are missing.
fn oversized_after(rest: usize) -> ReadPosition {
    if rest == 0 {
        ReadPosition::Oversized
    } else {
        ReadPosition::OversizedFrame(rest)
    }
}

/// Number of octets that were read, and of octets that pass in their place.
struct FrameStep {
    read: usize,
    passed: usize,
}

impl FrameStep {
    /// The header of a frame passes unchanged.
    const HEADER: Self = Self {
        read: HEADER_LEN,
        passed: HEADER_LEN,
    };
}

/// Header block that `h2` rejects.
struct BlockError;

/// Frames of a complete header block.
struct HeaderBlock<'a> {
    frames: Vec<BlockFrame<'a>>,
}

/// HEADERS or CONTINUATION frame.
struct BlockFrame<'a> {
    /// Frame header with padding length and priority.
    head: &'a [u8],
    fragment: &'a [u8],
    padding: &'a [u8],
}

impl<'a> HeaderBlock<'a> {
    /// Splits the frames. Returns `None` if `h2` ignores the block and continues.
    fn split(mut octets: &'a [u8]) -> Result<Option<Self>, BlockError> {
        let mut frames = Vec::with_capacity(1);
        while let Some(header) = FrameHeader::parse(octets) {
            let (frame, rest) = octets.split_at(HEADER_LEN + header.length);
            octets = rest;
            if header.kind == CONTINUATION {
                frames.push(BlockFrame {
                    head: &frame[..HEADER_LEN],
                    fragment: &frame[HEADER_LEN..],
                    padding: &[],
                });
                continue;
            }
            let mut start = HEADER_LEN;
            let mut padding = 0;
            if header.has_flag(PADDED) {
                padding = usize::from(*frame.get(start).ok_or(BlockError)?);
                start += 1;
            }
            if header.has_flag(PRIORITY) {
                let dependency = frame.get(start..start + 5).ok_or(BlockError)?;
                if u32::from_be_bytes([
                    dependency[0] & 0x7f,
                    dependency[1],
                    dependency[2],
                    dependency[3],
                ]) == header.stream
                {
                    return Ok(None);
                }
                start += 5;
            }
            let end = frame
                .len()
                .checked_sub(padding)
                .filter(|&end| end >= start)
                .ok_or(BlockError)?;
            frames.push(BlockFrame {
                head: &frame[..start],
                fragment: &frame[start..end],
                padding: &frame[end..],
            });
        }
        Ok(Some(Self { frames }))
    }

    fn fragments(&self) -> Cow<'a, [u8]> {
        match &*self.frames {
            [frame] => Cow::Borrowed(frame.fragment),
            frames => frames
                .iter()
                .flat_map(|frame| frame.fragment)
                .copied()
                .collect(),
        }
    }

    /// Returns the same frames with another block, which is not longer. If it is shorter, the last
    /// fragments shrink.
    fn with_fragments(&self, mut block: &[u8]) -> Vec<u8> {
        let mut octets = Vec::new();
        for frame in &self.frames {
            let (fragment, rest) = block.split_at(frame.fragment.len().min(block.len()));
            block = rest;
            let length = frame.head.len() - HEADER_LEN + fragment.len() + frame.padding.len();
            octets.extend(length_octets(length));
            octets.extend_from_slice(&frame.head[3..]);
            octets.extend_from_slice(fragment);
            octets.extend_from_slice(frame.padding);
        }
        octets
    }
}
