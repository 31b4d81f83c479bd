//! The whole index as bytes, for operators and for peers that start. Every rank is written by its own writer, because only
//! that knows what the engine calls its blocks: a dump is a head, one record per rank and an end. Records are sequences of
//! small frames, each with a checksum that also covers the frames before it, so that a reader never trusts a length and
//! never builds on damaged data.

mod content;
mod events;
mod frame;
mod position;

use std::io::{Read, Write};

pub use content::RankDump;
pub(in crate::index) use content::{ApartName, BlockRow, Copies, PlacedName, Share};
pub(in crate::index) use events::Telling;
use frame::{FrameReader, FrameWriter, Kind};

use super::Position;
use crate::worker::WorkerRank;

/// First bytes of a dump.
const MAGIC: [u8; 8] = *b"wrmindex";
/// Version of the format.
pub const VERSION: u16 = 2;

/// Why a dump cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The bytes could not be had.
    #[error("the dump cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// It is something else.
    #[error("this is no dump of an index")]
    Magic,
    /// It was written by another version.
    #[error("the dump has version {0}, this is version {VERSION}")]
    Version(u16),
    /// Bytes have changed.
    #[error("the dump is damaged: a checksum does not fit")]
    Checksum,
    /// Bytes are missing.
    #[error("the dump is cut short")]
    Truncated,
    /// The bytes are sound, but what they say is impossible.
    #[error("the dump contradicts itself: {0}")]
    Malformed(&'static str),
}

/// Begins a dump.
pub fn begin(out: &mut impl Write) -> std::io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())
}

/// Ends a dump of so many ranks.
pub fn end(out: &mut impl Write, ranks: u32) -> std::io::Result<()> {
    FrameWriter::new(out).write(Kind::End, &ranks.to_le_bytes())
}

/// Reads a dump, rank by rank.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    ranks: u32,
    done: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the head.
    pub fn new(mut input: R) -> Result<Self, DumpError> {
        let mut head = [0; MAGIC.len() + size_of::<u16>()];
        frame::fill(&mut input, &mut head)?;
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

    /// The only rank of a dump that is read to its end.
    pub fn single(mut self) -> Result<RankDump, DumpError> {
        let rank = self
            .next()
            .transpose()?
            .ok_or(DumpError::Malformed("no rank"))?;
        match self.next().transpose()? {
            None => Ok(rank),
            Some(_) => Err(DumpError::Malformed("more than one rank")),
        }
    }

    fn record(&mut self) -> Result<Option<RankDump>, DumpError> {
        let mut frames = FrameReader::new(&mut self.input);
        let (kind, payload) = frames.read()?;
        match kind {
            Kind::Rank => {
                self.ranks = self.ranks.saturating_add(1);
                RankDump::read(&payload, &mut frames).map(Some)
            }
            Kind::End if payload == self.ranks.to_le_bytes() => {
                let mut more = [0];
                match self.input.read(&mut more)? {
                    0 => Ok(None),
                    _ => Err(DumpError::Malformed("it goes on after its end")),
                }
            }
            Kind::End => Err(DumpError::Malformed("a rank is missing")),
            _ => Err(DumpError::Malformed("a record begins in its middle")),
        }
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<RankDump, DumpError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let record = self.record().transpose();
        self.done = !matches!(record, Some(Ok(_)));
        record
    }
}

impl RankDump {
    /// Whose cache it is.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// The newest batch of events that is in it, where somebody else can go on from there.
    pub fn position(&self) -> Option<&Position> {
        self.position.as_ref()
    }

    /// The same as it is after a while in which nobody listened.
    #[must_use]
    pub fn of_the_past(mut self) -> Self {
        self.position
            .iter_mut()
            .for_each(|position| position.live = false);
        self
    }
}

#[cfg(test)]
pub(crate) mod tests;
