//! Binary format of the index, for operators and for the warm start of peers.
//!
//! Every rank is written by its own writer, which alone knows the engine hashes. A dump consists of
//! a header, one record per rank, and an end record. A record is a length, a value that is encoded
//! with postcard, and a checksum, which is verified before the value is decoded.

mod events;
mod order_free;
mod rank_dump;

use std::io::{Error, ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

pub(in crate::index) use events::CopyReplay;
#[doc(hidden)]
pub use order_free::order_free_content;
pub use rank_dump::RankDump;
pub(in crate::index) use rank_dump::{BlockRow, CopyCounts, GroupShare, HashRow, OrphanRow};

use super::position::EventPosition;
use crate::worker::WorkerRank;

/// First bytes of a dump.
const MAGIC: [u8; 8] = *b"wrmindex";

/// Version of the format.
pub const VERSION: u16 = 4;

/// Maximum length of an encoded record. A block has about 40 bytes.
const MAX_RECORD_BYTES: u64 = 1 << 30;

/// Record of a dump.
#[derive(Serialize, Deserialize)]
enum DumpRecord<R> {
    /// Content of a rank.
    Rank(R),
    /// End of the dump, with its number of ranks.
    End(u32),
}

/// Reasons why a dump cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// Reading the bytes failed.
    #[error("the dump cannot be read: {0}")]
    Io(Error),
    /// The bytes are not a dump.
    #[error("this is not an index dump")]
    Magic,
    /// The dump has another format version.
    #[error("the dump has format version {0}, but only version {VERSION} is supported")]
    Version(u16),
    /// A checksum does not match.
    #[error("the dump is damaged: a checksum does not match")]
    Checksum,
    /// The dump ends early.
    #[error("the dump is truncated")]
    Truncated,
    /// The content is inconsistent, or a record exceeds the maximum length.
    #[error("the dump is inconsistent: {0}")]
    Malformed(&'static str),
}

impl From<Error> for DumpError {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => DumpError::Truncated,
            _ => DumpError::Io(error),
        }
    }
}

/// Writes the header of a dump.
pub fn write_header(out: &mut impl Write) -> std::io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())
}

/// Writes the end of a dump with this number of ranks.
pub fn write_end(out: &mut impl Write, ranks: u32) -> std::io::Result<()> {
    write_record(out, &DumpRecord::End(ranks))
}

fn write_record(out: &mut impl Write, record: &DumpRecord<&RankDump>) -> std::io::Result<()> {
    let bytes = postcard::to_stdvec(record).map_err(Error::other)?;
    if bytes.len() as u64 > MAX_RECORD_BYTES {
        return Err(Error::other(
            "a rank exceeds the maximum length of a record",
        ));
    }
    out.write_all(&(bytes.len() as u64).to_le_bytes())?;
    out.write_all(&bytes)?;
    out.write_all(&xxh3_64(&bytes).to_le_bytes())
}

/// Reads a dump rank by rank.
#[derive(Debug)]
pub struct DumpReader<R> {
    input: R,
    ranks: u32,
    is_done: bool,
}

impl<R: Read> DumpReader<R> {
    /// Reads the header.
    pub fn new(input: R) -> Result<Self, DumpError> {
        let mut reader = Self {
            input,
            ranks: 0,
            is_done: false,
        };
        if reader.read_array()? != MAGIC {
            return Err(DumpError::Magic);
        }
        match u16::from_le_bytes(reader.read_array()?) {
            VERSION => Ok(reader),
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

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], DumpError> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn read_record(&mut self) -> Result<Option<RankDump>, DumpError> {
        let length = u64::from_le_bytes(self.read_array()?);
        if length > MAX_RECORD_BYTES {
            return Err(DumpError::Malformed("a record is too long"));
        }
        // Grows as the bytes arrive, so a claimed length reserves no memory.
        let mut bytes = Vec::new();
        self.input.by_ref().take(length).read_to_end(&mut bytes)?;
        if self.read_array()? != xxh3_64(&bytes).to_le_bytes() {
            return Err(DumpError::Checksum);
        }
        match postcard::take_from_bytes::<DumpRecord<RankDump>>(&bytes) {
            Ok((DumpRecord::Rank(rank), [])) => {
                self.ranks = self.ranks.saturating_add(1);
                rank.validate().map_err(DumpError::Malformed)?;
                Ok(Some(rank))
            }
            Ok((DumpRecord::End(ranks), [])) if ranks == self.ranks => {
                match self.input.read(&mut [0])? {
                    0 => Ok(None),
                    _ => Err(DumpError::Malformed("data follows the end record")),
                }
            }
            Ok((DumpRecord::End(_), [])) => Err(DumpError::Malformed("a rank is missing")),
            _ => Err(DumpError::Malformed("a record cannot be decoded")),
        }
    }
}

impl<R: Read> Iterator for DumpReader<R> {
    type Item = Result<RankDump, DumpError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let record = self.read_record().transpose();
        self.is_done = !matches!(record, Some(Ok(_)));
        record
    }
}

impl RankDump {
    /// Writes the record of this rank.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        write_record(out, &DumpRecord::Rank(self))
    }

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
        if let Some(position) = &mut self.position {
            position.is_live = false;
        }
        self
    }
}

#[cfg(test)]
pub(crate) mod tests;
