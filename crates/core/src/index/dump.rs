//! Binary format of the index, for operators and for the warm start of peers.
//!
//! Every rank is written by its own writer, which alone knows the engine hashes. A dump consists of
//! a header, one record per rank, and an end frame. Records are sequences of small frames. The
//! checksum of each frame also covers the preceding frames, so a reader never relies on an
//! unchecked length or on damaged data.

mod events;
mod format;
mod frame;
mod order_free;
mod position;
mod rank_dump;

use std::io::{Read, Write};

pub(in crate::index) use events::CopyReplay;
use format::MAGIC;
pub use format::{DumpError, VERSION};
use frame::{DumpFrameKind, FrameReader, FrameWriter};
#[doc(hidden)]
pub use order_free::order_free_content;
pub use rank_dump::RankDump;
pub(in crate::index) use rank_dump::{BlockRow, CopyCounts, GroupShare, HashRow, OrphanRow};

use super::position::EventPosition;
use crate::worker::WorkerRank;

/// Writes the header of a dump.
pub fn write_header(out: &mut impl Write) -> std::io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())
}

/// Writes the end of a dump with this number of ranks.
pub fn write_end(out: &mut impl Write, ranks: u32) -> std::io::Result<()> {
    FrameWriter::new(out).write(DumpFrameKind::End, &ranks.to_le_bytes())
}

/// Reads a dump rank by rank.
#[derive(Debug)]
pub struct DumpReader<R> {
    input: R,
    ranks: u32,
    done: bool,
}

impl<R: Read> DumpReader<R> {
    /// Reads the header.
    pub fn new(mut input: R) -> Result<Self, DumpError> {
        let mut head = [0; MAGIC.len() + size_of::<u16>()];
        frame::read_exact(&mut input, &mut head)?;
        let (magic, version) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(DumpError::Magic);
        }
        match u16::from_le_bytes([version[0], version[1]]) {
            VERSION => Ok(Self {
                input,
                ranks: 0,
                done: false,
            }),
            other => Err(DumpError::Version(other)),
        }
    }

    /// Reads a dump that contains exactly one rank.
    pub fn read_single(mut self) -> Result<RankDump, DumpError> {
        let rank = self
            .next()
            .transpose()?
            .ok_or(DumpError::Malformed("it contains no rank"))?;
        match self.next().transpose()? {
            None => Ok(rank),
            Some(_) => Err(DumpError::Malformed("it contains more than one rank")),
        }
    }

    fn read_record(&mut self) -> Result<Option<RankDump>, DumpError> {
        let mut frames = FrameReader::new(&mut self.input);
        let (kind, payload) = frames.read()?;
        match kind {
            DumpFrameKind::Rank => {
                self.ranks = self.ranks.saturating_add(1);
                RankDump::read(&payload, &mut frames).map(Some)
            }
            DumpFrameKind::End if payload == self.ranks.to_le_bytes() => {
                let mut extra = [0];
                match self.input.read(&mut extra)? {
                    0 => Ok(None),
                    _ => Err(DumpError::Malformed("data follows the end frame")),
                }
            }
            DumpFrameKind::End => Err(DumpError::Malformed("a rank is missing")),
            _ => Err(DumpError::Malformed(
                "a record does not begin with a rank frame",
            )),
        }
    }
}

impl<R: Read> Iterator for DumpReader<R> {
    type Item = Result<RankDump, DumpError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let record = self.read_record().transpose();
        self.done = !matches!(record, Some(Ok(_)));
        record
    }
}

impl RankDump {
    /// Returns the rank.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Returns the position of the newest applied batch, if another reader can continue from there.
    pub fn position(&self) -> Option<&EventPosition> {
        self.position.as_ref()
    }

    /// Marks the position as detached: events may have been missed since the dump was taken.
    #[must_use]
    pub fn into_detached(mut self) -> Self {
        self.position
            .iter_mut()
            .for_each(|position| position.is_live = false);
        self
    }
}

#[cfg(test)]
pub(crate) mod tests;
