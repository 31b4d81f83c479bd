//! Encoding of an event position.

use super::format::DumpError;
use super::frame::{FrameRow, decode_rows};
use crate::block::BlockWindows;
use crate::index::position::{EventPosition, ReaderGroup, ReaderState};

/// Length of the fixed part: sequence number, digest, reader digest, main group, block sizes,
/// engine block size and flags.
const HEADER_LEN: usize = 3 * u64::SIZE + 6 * u32::SIZE + 1;

/// Encoding of `None`. No engine has as many groups, or as many tokens in a block or a window.
const NONE: u32 = u32::MAX;

pub(super) fn encode(position: &EventPosition) -> Vec<u8> {
    let EventPosition {
        seq,
        digest,
        reader_digest,
        is_live,
        reader_state,
    } = position;
    let mut bytes = Vec::with_capacity(HEADER_LEN + reader_state.groups.len() * ReaderGroup::SIZE);
    [seq, digest, reader_digest]
        .into_iter()
        .for_each(|number| number.encode(&mut bytes));
    let rest = std::iter::once(reader_state.main_group)
        .chain(reader_state.block_sizes)
        .chain([reader_state.engine_block_size]);
    rest.for_each(|number| number.unwrap_or(NONE).encode(&mut bytes));
    let windows = match reader_state.windows {
        None => 0,
        Some(BlockWindows::Plain) => 0b0100,
        Some(BlockWindows::Eagle) => 0b1100,
    };
    bytes.push(u8::from(reader_state.has_dropped_stores) | u8::from(*is_live) << 1 | windows);
    reader_state
        .groups
        .iter()
        .for_each(|group| group.encode(&mut bytes));
    bytes
}

pub(super) fn decode(bytes: &[u8]) -> Result<EventPosition, DumpError> {
    let (head, groups) = bytes
        .split_at_checked(HEADER_LEN)
        .ok_or(DumpError::Malformed("the event position is incomplete"))?;
    let (numbers, rest) = head.split_at(3 * u64::SIZE);
    let number = |at: usize| u64::decode(&numbers[at * u64::SIZE..(at + 1) * u64::SIZE]);
    let (options, flags) = rest.split_at(6 * u32::SIZE);
    let option =
        |at: usize| u32::decode(&options[at * u32::SIZE..(at + 1) * u32::SIZE]).map(decode_option);
    let sizes = [option(1)?, option(2)?, option(3)?, option(4)?];
    let is_set = |bit: usize| flags.first().is_some_and(|flags| flags & (1 << bit) != 0);
    let main_group = option(0)?;
    let engine = option(5)?;
    let mut reader_state = ReaderState {
        main_group,
        groups: Vec::new(),
        block_sizes: sizes,
        engine_block_size: engine,
        windows: is_set(2).then_some(BlockWindows::new(is_set(3))),
        has_dropped_stores: is_set(0),
    };
    decode_rows(groups, &mut reader_state.groups)?;
    Ok(EventPosition {
        seq: number(0)?,
        digest: number(1)?,
        reader_digest: number(2)?,
        is_live: is_set(1),
        reader_state,
    })
}

fn decode_option(number: u32) -> Option<u32> {
    Some(number).filter(|number| *number != NONE)
}

impl FrameRow for ReaderGroup {
    const SIZE: usize = 2 * u32::SIZE + 1;

    fn encode(&self, out: &mut Vec<u8>) {
        self.id.encode(out);
        self.window.unwrap_or(NONE).encode(out);
        out.push(self.kind);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        let id = u32::decode(&bytes[..4])?;
        let window = u32::decode(&bytes[4..8])?;
        Ok(Self {
            id,
            window: decode_option(window),
            kind: bytes[8],
        })
    }
}
