//! A position as bytes.

use super::DumpError;
use super::frame::{Row, rows};
use crate::index::{Position, Taught, TaughtGroup};

/// Number, digest, reading, main group, sizes, size last told, flags.
const HEAD: usize = 3 * u64::SIZE + 6 * u32::SIZE + 1;

/// Nothing, where a number may be missing. No engine has as many groups, or tokens in a block or a window.
const NONE: u32 = u32::MAX;

pub(super) fn bytes(position: &Position) -> Vec<u8> {
    let Position {
        seq,
        digest,
        reading,
        live,
        taught,
    } = position;
    let mut bytes = Vec::with_capacity(HEAD + taught.groups.len() * TaughtGroup::SIZE);
    [seq, digest, reading]
        .into_iter()
        .for_each(|number| number.put(&mut bytes));
    let rest = std::iter::once(taught.main_group)
        .chain(taught.sizes)
        .chain([taught.engine]);
    rest.for_each(|number| number.unwrap_or(NONE).put(&mut bytes));
    bytes.push(u8::from(taught.dropped) | u8::from(*live) << 1);
    taught.groups.iter().for_each(|group| group.put(&mut bytes));
    bytes
}

pub(super) fn of(bytes: &[u8]) -> Result<Position, DumpError> {
    let (head, groups) = bytes
        .split_at_checked(HEAD)
        .ok_or(DumpError::Malformed("half a position"))?;
    let (numbers, rest) = head.split_at(3 * u64::SIZE);
    let number = |at: usize| u64::get(&numbers[at * u64::SIZE..(at + 1) * u64::SIZE]);
    let (options, flags) = rest.split_at(6 * u32::SIZE);
    let option = |at: usize| u32::get(&options[at * u32::SIZE..(at + 1) * u32::SIZE]).map(some);
    let sizes = [option(1)?, option(2)?, option(3)?, option(4)?];
    let is_set = |bit: usize| flags.first().is_some_and(|flags| flags & (1 << bit) != 0);
    let (main_group, engine) = (option(0)?, option(5)?);
    let mut taught = Taught {
        main_group,
        groups: Vec::new(),
        sizes,
        engine,
        dropped: is_set(0),
    };
    rows(groups, &mut taught.groups)?;
    Ok(Position {
        seq: number(0)?,
        digest: number(1)?,
        reading: number(2)?,
        live: is_set(1),
        taught,
    })
}

fn some(number: u32) -> Option<u32> {
    Some(number).filter(|number| *number != NONE)
}

impl Row for TaughtGroup {
    const SIZE: usize = 2 * u32::SIZE + 1;

    fn put(&self, out: &mut Vec<u8>) {
        self.id.put(out);
        self.window.unwrap_or(NONE).put(out);
        out.push(self.kind);
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        let (id, window) = (u32::get(&bytes[..4])?, u32::get(&bytes[4..8])?);
        Ok(Self {
            id,
            window: some(window),
            kind: bytes[8],
        })
    }
}
