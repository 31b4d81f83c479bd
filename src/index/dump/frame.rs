//! Frames: a kind, a length, the payload, and a checksum that covers them and the checksum before.

use std::io::{ErrorKind, Read, Write};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{DumpError, VERSION};

/// Longest payload. A frame is read whole before its checksum is known.
const LONGEST: usize = 1 << 18;
/// Kind and length.
const HEAD: usize = 5;
const CHECKSUM: usize = size_of::<u64>();

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Kind {
    Rank = 1,
    Position,
    Blocks,
    Names,
    Waiting,
    Groups,
    Shares,
    SaltName,
    Salts,
    RankEnd,
    End,
}

impl Kind {
    const ALL: [Kind; 11] = [
        Kind::Rank,
        Kind::Position,
        Kind::Blocks,
        Kind::Names,
        Kind::Waiting,
        Kind::Groups,
        Kind::Shares,
        Kind::SaltName,
        Kind::Salts,
        Kind::RankEnd,
        Kind::End,
    ];
}

/// Something of fixed size within a frame.
pub(super) trait Row: Sized {
    const SIZE: usize;
    fn put(&self, out: &mut Vec<u8>);
    /// `bytes` is as long as a row.
    fn get(bytes: &[u8]) -> Result<Self, DumpError>;
}

/// Writes the frames of one record.
pub(super) struct FrameWriter<W> {
    out: W,
    last: u64,
    buffer: Vec<u8>,
}

impl<W: Write> FrameWriter<W> {
    pub(super) fn new(out: W) -> Self {
        Self {
            out,
            last: u64::from(VERSION),
            buffer: Vec::new(),
        }
    }

    pub(super) fn write(&mut self, kind: Kind, payload: &[u8]) -> std::io::Result<()> {
        let mut frame = Vec::with_capacity(HEAD + payload.len() + CHECKSUM);
        frame.push(kind as u8);
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(payload);
        self.last = xxh3_64_with_seed(&frame, self.last);
        frame.extend(self.last.to_le_bytes());
        self.out.write_all(&frame)
    }

    pub(super) fn rows<T: Row>(&mut self, kind: Kind, rows: &[T]) -> std::io::Result<()> {
        for some in rows.chunks(LONGEST / T::SIZE) {
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.clear();
            some.iter().for_each(|row| row.put(&mut buffer));
            self.write(kind, &buffer)?;
            self.buffer = buffer;
        }
        Ok(())
    }
}

/// Reads the frames of one record.
pub(super) struct FrameReader<R> {
    input: R,
    last: u64,
}

impl<R: Read> FrameReader<R> {
    pub(super) fn new(input: R) -> Self {
        Self {
            input,
            last: u64::from(VERSION),
        }
    }

    pub(super) fn read(&mut self) -> Result<(Kind, Vec<u8>), DumpError> {
        let mut frame = vec![0; HEAD];
        fill(&mut self.input, &mut frame)?;
        let length = u32::from_le_bytes([frame[1], frame[2], frame[3], frame[4]]) as usize;
        if length > LONGEST {
            return Err(DumpError::Malformed("a frame is too long"));
        }
        frame.resize(HEAD + length, 0);
        fill(&mut self.input, &mut frame[HEAD..])?;
        let mut checksum = [0; CHECKSUM];
        fill(&mut self.input, &mut checksum)?;
        self.last = xxh3_64_with_seed(&frame, self.last);
        if checksum != self.last.to_le_bytes() {
            return Err(DumpError::Checksum);
        }
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == frame[0]);
        frame.drain(..HEAD);
        Ok((
            kind.ok_or(DumpError::Malformed("a frame of unknown kind"))?,
            frame,
        ))
    }
}

/// The rows of a payload.
pub(super) fn rows<T: Row>(payload: &[u8], into: &mut Vec<T>) -> Result<(), DumpError> {
    let rows = payload.chunks_exact(T::SIZE);
    if !rows.remainder().is_empty() {
        return Err(DumpError::Malformed("half a row"));
    }
    rows.map(T::get).try_for_each(|row| {
        into.push(row?);
        Ok(())
    })
}

/// Reads exactly as much as there is room for.
pub(super) fn fill(input: &mut impl Read, room: &mut [u8]) -> Result<(), DumpError> {
    input.read_exact(room).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => DumpError::Truncated,
        _ => DumpError::Io(error),
    })
}
