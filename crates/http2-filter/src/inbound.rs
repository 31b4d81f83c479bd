//! Frames of the client. Octets are final as soon as no header block that began before them is incomplete.

use std::borrow::Cow;

use crate::activity::OpenStreams;
use crate::frame::{
    CONTINUATION, DATA, END_HEADERS, FrameHeader, HEADER, HEADERS, PADDED, PRIORITY, RST_STREAM,
    length_octets,
};
use crate::hpack::DynamicTable;

/// The first octets of every HTTP/2 connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Frames of a header block at most.
const BLOCK_FRAMES: usize = 128;

/// The position of the reader in the frames of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadPosition {
    /// This many octets of the preface were received.
    Preface(usize),
    /// At the beginning of a frame.
    Frame,
    /// This many octets of a frame are missing.
    Payload(usize),
    /// This many octets of a frame are missing, whose header block is beyond the limits of the filter.
    OversizedFrame(usize),
    /// A header block was beyond the limits of the filter. What comes after it cannot be read, so the connection ends.
    Oversized,
    /// The rest passes unread: `h2` ends the connection.
    Unread,
}

/// The part of a header block that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockExtent {
    /// All of it, with its length in octets.
    Complete(usize),
    /// The frames up to this many octets are needed.
    Incomplete(usize),
    /// It is beyond the limits of the filter.
    Oversized,
    /// `h2` refuses it.
    Unreadable,
}

/// A reader of the frames that a client sends.
pub(crate) struct InboundReader {
    position: ReadPosition,
    table: DynamicTable,
    /// Octets of a header block with its frames, at most.
    block_limit: usize,
    /// The beginning of an incomplete frame or header block.
    held: Vec<u8>,
    /// Frames and header blocks that were held back and are complete.
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

    /// Whether octets are held back.
    pub(crate) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// The number of frames and header blocks that were held back and are complete.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Whether the preface was received.
    pub(crate) fn has_preface(&self) -> bool {
        !matches!(self.position, ReadPosition::Preface(_))
    }

    /// Whether the connection has to end because a header block was beyond the limits.
    pub(crate) fn is_oversized(&self) -> bool {
        self.position == ReadPosition::Oversized
    }

    /// Octets that are needed before those held back can pass.
    pub(crate) fn missing(&self) -> usize {
        let wanted = match FrameHeader::parse(&self.held) {
            None => HEADER,
            Some(_) => match self.extent(&self.held) {
                BlockExtent::Incomplete(wanted) => wanted,
                BlockExtent::Complete(_) | BlockExtent::Oversized | BlockExtent::Unreadable => 0,
            },
        };
        wanted.saturating_sub(self.held.len())
    }

    /// The octets held back, when the client has closed the connection.
    pub(crate) fn release_held(&mut self) -> Vec<u8> {
        self.position = ReadPosition::Unread;
        std::mem::take(&mut self.held)
    }

    /// Takes octets that were read while others are held back, at most as many as are [`missing`](Self::missing). Returns what may pass.
    pub(crate) fn read_held(&mut self, octets: &[u8], streams: &mut OpenStreams) -> Vec<u8> {
        let mut all = std::mem::take(&mut self.held);
        all.extend_from_slice(octets);
        let passed = self.read(&mut all, streams);
        // Nothing passes before the frame or header block at the beginning is complete.
        self.completed += u64::from(passed > 0);
        all.truncate(passed);
        all
    }

    /// Reads octets, changes those that have to be changed, and holds back the end that is not final. The first octets, as many as are
    /// returned, may pass.
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

    /// Reads the header of a frame, or a whole header block; none if too little of it has come.
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
            return Some(FrameStep {
                read: HEADER,
                passed: HEADER,
            });
        }
        let length = match self.extent(octets) {
            BlockExtent::Complete(length) => length,
            BlockExtent::Incomplete(_) => return None,
            BlockExtent::Oversized => {
                // `h2` may refuse the frame.
                self.position = oversized_after(header.length);
                return Some(FrameStep {
                    read: HEADER,
                    passed: HEADER,
                });
            }
            BlockExtent::Unreadable => {
                self.position = ReadPosition::Unread;
                return Some(FrameStep {
                    read: HEADER,
                    passed: HEADER,
                });
            }
        };
        streams.on_frame();
        streams.open(header.stream);
        let block = HeaderBlock::split(&octets[..length]);
        let edited = match &block {
            Ok(None) => Ok(None),
            Ok(Some(block)) => self.table.apply(&block.fragments()).map_err(|_| BlockError),
            Err(BlockError) => Err(BlockError),
        };
        let passed = match (&block, edited) {
            (Ok(Some(block)), Ok(Some(edited))) => {
                let frames = block.with_fragments(&edited);
                octets[..frames.len()].copy_from_slice(&frames);
                frames.len()
            }
            (Ok(_), Ok(_)) => length,
            (_, Err(BlockError)) | (Err(BlockError), _) => {
                self.position = ReadPosition::Unread;
                length
            }
        };
        Some(FrameStep {
            read: length,
            passed,
        })
    }

    /// The received part of the header block that begins here.
    fn extent(&self, octets: &[u8]) -> BlockExtent {
        let mut at = 0;
        let mut stream = None;
        for _ in 0..BLOCK_FRAMES {
            let Some(header) = FrameHeader::parse(&octets[at..]) else {
                return BlockExtent::Incomplete(at + HEADER);
            };
            let continues =
                stream.is_none_or(|stream| header.kind == CONTINUATION && header.stream == stream);
            at += HEADER + header.length;
            if !continues {
                return BlockExtent::Unreadable;
            }
            if at > self.block_limit {
                return BlockExtent::Oversized;
            }
            if at > octets.len() {
                return BlockExtent::Incomplete(at);
            }
            if header.has(END_HEADERS) {
                return BlockExtent::Complete(at);
            }
            stream = Some(header.stream);
        }
        BlockExtent::Oversized
    }
}

/// The position in a frame of an oversized header block of which `rest` octets are missing.
fn oversized_after(rest: usize) -> ReadPosition {
    if rest == 0 {
        ReadPosition::Oversized
    } else {
        ReadPosition::OversizedFrame(rest)
    }
}

/// Octets that were read, and how many of them pass.
struct FrameStep {
    read: usize,
    passed: usize,
}

/// A header block that `h2` refuses.
struct BlockError;

/// The frames of a complete header block.
struct HeaderBlock<'a> {
    frames: Vec<BlockFrame<'a>>,
}

/// HEADERS or CONTINUATION.
struct BlockFrame<'a> {
    /// The header, with the length of the padding and the priority.
    head: &'a [u8],
    fragment: &'a [u8],
    padding: &'a [u8],
}

impl<'a> HeaderBlock<'a> {
    /// Splits the frames; none if `h2` does not read the block and goes on.
    fn split(mut octets: &'a [u8]) -> Result<Option<Self>, BlockError> {
        let mut frames = Vec::with_capacity(1);
        while let Some(header) = FrameHeader::parse(octets) {
            let (frame, rest) = octets.split_at(HEADER + header.length);
            octets = rest;
            if header.kind == CONTINUATION {
                frames.push(BlockFrame {
                    head: &frame[..HEADER],
                    fragment: &frame[HEADER..],
                    padding: &[],
                });
                continue;
            }
            let mut start = HEADER;
            let mut padding = 0;
            if header.has(PADDED) {
                padding = usize::from(*frame.get(start).ok_or(BlockError)?);
                start += 1;
            }
            if header.has(PRIORITY) {
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

    /// The same frames with a block that is not longer: the last fragments shrink.
    fn with_fragments(&self, mut block: &[u8]) -> Vec<u8> {
        let mut octets = Vec::new();
        for frame in &self.frames {
            let (fragment, rest) = block.split_at(frame.fragment.len().min(block.len()));
            block = rest;
            let length = frame.head.len() - HEADER + fragment.len() + frame.padding.len();
            octets.extend(length_octets(length));
            octets.extend_from_slice(&frame.head[3..]);
            octets.extend_from_slice(fragment);
            octets.extend_from_slice(frame.padding);
        }
        octets
    }
}
