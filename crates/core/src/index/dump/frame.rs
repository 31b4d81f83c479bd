//! Frames: a kind, a length, the payload, and a checksum that covers them and the previous
//! checksum.

use std::io::{ErrorKind, Read, Write};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::format::{DumpError, VERSION};

/// Maximum length of a payload. A frame is read completely before its checksum is verified.
const MAX_PAYLOAD_LEN: usize = 1 << 18;
/// Length of kind and payload length.
const HEADER_LEN: usize = 5;
const CHECKSUM_LEN: usize = size_of::<u64>();

/// Kind of payload in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum DumpFrameKind {
    Rank = 1,
    Position,
    Blocks,
    Hashes,
    Orphans,
    Groups,
    Shares,
    SaltName,
    Salts,
    RankEnd,
    End,
}

impl DumpFrameKind {
    const ALL: [DumpFrameKind; 11] = [
        DumpFrameKind::Rank,
        DumpFrameKind::Position,
        DumpFrameKind::Blocks,
        DumpFrameKind::Hashes,
        DumpFrameKind::Orphans,
        DumpFrameKind::Groups,
        DumpFrameKind::Shares,
        DumpFrameKind::SaltName,
        DumpFrameKind::Salts,
        DumpFrameKind::RankEnd,
        DumpFrameKind::End,
    ];
}

/// Element of fixed size in a frame.
pub(super) trait FrameRow: Sized {
    const SIZE: usize;
    fn encode(&self, out: &mut Vec<u8>);
    /// Decodes exactly `SIZE` bytes.
    fn decode(bytes: &[u8]) -> Result<Self, DumpError>;
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

    pub(super) fn write(&mut self, kind: DumpFrameKind, payload: &[u8]) -> std::io::Result<()> {
        let mut frame = Vec::with_capacity(HEADER_LEN + payload.len() + CHECKSUM_LEN);
        frame.push(kind as u8);
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(payload);
        self.last = xxh3_64_with_seed(&frame, self.last);
        frame.extend(self.last.to_le_bytes());
        self.out.write_all(&frame)
    }

    pub(super) fn write_rows<T: FrameRow>(
        &mut self,
        kind: DumpFrameKind,
        rows: &[T],
    ) -> std::io::Result<()> {
        for batch in rows.chunks(MAX_PAYLOAD_LEN / T::SIZE) {
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.clear();
            batch.iter().for_each(|row| row.encode(&mut buffer));
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

    pub(super) fn read(&mut self) -> Result<(DumpFrameKind, Vec<u8>), DumpError> {
        let mut frame = vec![0; HEADER_LEN];
        read_exact(&mut self.input, &mut frame)?;
        let length = u32::from_le_bytes([frame[1], frame[2], frame[3], frame[4]]) as usize;
        if length > MAX_PAYLOAD_LEN {
            return Err(DumpError::Malformed("a frame is too long"));
        }
        frame.resize(HEADER_LEN + length, 0);
        read_exact(&mut self.input, &mut frame[HEADER_LEN..])?;
        let mut checksum = [0; CHECKSUM_LEN];
        read_exact(&mut self.input, &mut checksum)?;
        self.last = xxh3_64_with_seed(&frame, self.last);
        if checksum != self.last.to_le_bytes() {
            return Err(DumpError::Checksum);
        }
        let kind = DumpFrameKind::ALL
            .into_iter()
            .find(|kind| *kind as u8 == frame[0]);
        frame.drain(..HEADER_LEN);
        Ok((
            kind.ok_or(DumpError::Malformed("a frame has an unknown kind"))?,
            frame,
        ))
    }
}

/// Decodes the rows of a payload.
pub(super) fn decode_rows<T: FrameRow>(payload: &[u8], into: &mut Vec<T>) -> Result<(), DumpError> {
    let rows = payload.chunks_exact(T::SIZE);
    if !rows.remainder().is_empty() {
        return Err(DumpError::Malformed("a row is incomplete"));
    }
    rows.map(T::decode).try_for_each(|row| {
        into.push(row?);
        Ok(())
    })
}

/// Fills the buffer completely.
pub(super) fn read_exact(input: &mut impl Read, buffer: &mut [u8]) -> Result<(), DumpError> {
    input
        .read_exact(buffer)
        .map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => DumpError::Truncated,
            _ => DumpError::Io(error),
        })
}
