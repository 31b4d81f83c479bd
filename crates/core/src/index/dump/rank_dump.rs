//! Content of one rank as a value: the blocks of its prefixes, parents first, and the engine hashes
//! of each block.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::num::NonZeroU32;
use std::sync::Arc;

use super::format::DumpError;
use super::frame::{DumpFrameKind, FrameReader, FrameRow, FrameWriter, decode_rows};
use super::position;
use crate::block::{EngineHash, LocalHash, StorageTier};
use crate::index::event::GroupNeed;
use crate::index::position::EventPosition;
use crate::index::salts::{SaltRef, SaltRow, SaltTableDump};
use crate::worker::{DpRank, WorkerId, WorkerRank};

/// Encoding of a block without a parent: it starts a prompt.
const ROOT: u32 = u32::MAX;

/// Maximum number of cache groups.
const MAX_GROUPS: usize = 64;

/// Content of one worker rank. `RankWriter::restore` loads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankDump {
    pub(in crate::index) rank: WorkerRank,
    pub(in crate::index) position: Option<EventPosition>,
    pub(in crate::index) blocks: Vec<BlockRow>,
    /// Sorted by block.
    pub(in crate::index) hashes: Vec<HashRow>,
    pub(in crate::index) orphans: Vec<OrphanRow>,
    pub(in crate::index) groups: Vec<(u32, GroupNeed)>,
    pub(in crate::index) shares: Vec<GroupShare>,
    /// Whether there are more groups than can be tracked.
    pub(in crate::index) has_untracked_groups: bool,
    /// Number of evictions since the last gap, while the engine may hold blocks that were never
    /// reported.
    pub(in crate::index) unreported_evictions: Option<u64>,
    pub(in crate::index) salts: SaltTableDump,
}

/// Block of a prefix. It is held if an engine hash refers to it, and otherwise only precedes a
/// block that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct BlockRow {
    pub(in crate::index) parent: Option<u32>,
    pub(in crate::index) local: LocalHash,
}

/// Engine hash with a known block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct HashRow {
    pub(in crate::index) engine: EngineHash,
    pub(in crate::index) block: u32,
    pub(in crate::index) copies: CopyCounts,
}

/// Engine hash whose parent is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct OrphanRow {
    pub(in crate::index) engine: EngineHash,
    pub(in crate::index) parent: EngineHash,
    pub(in crate::index) local: LocalHash,
    pub(in crate::index) copies: CopyCounts,
}

/// Copies of an engine hash, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::index) struct CopyCounts {
    pub(in crate::index) counts: [u32; 4],
    pub(in crate::index) stale: [bool; 4],
}

/// Share of a block that a cache group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct GroupShare {
    pub(in crate::index) engine: EngineHash,
    /// Index in the list of groups.
    pub(in crate::index) group: u32,
    pub(in crate::index) copies: u32,
    pub(in crate::index) is_stale: bool,
}

impl CopyCounts {
    /// Iterates over the tiers with copies, and their number.
    pub(in crate::index) fn held(self) -> impl Iterator<Item = (StorageTier, u32)> {
        StorageTier::ALL
            .into_iter()
            .zip(self.counts)
            .filter(|(_, count)| *count > 0)
    }

    pub(in crate::index) fn has(self, tier: StorageTier) -> bool {
        self.counts[tier as usize] > 0
    }
}

impl RankDump {
    /// Returns whether any block may have been evicted in lost events.
    pub(in crate::index) fn has_stale(&self) -> bool {
        let copies = self
            .hashes
            .iter()
            .map(|row| &row.copies)
            .chain(self.orphans.iter().map(|row| &row.copies));
        copies
            .into_iter()
            .any(|copies| copies.stale.contains(&true))
            || self.shares.iter().any(|share| share.is_stale)
    }

    /// Writes the record of this rank.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let mut frames = FrameWriter::new(out);
        let mut head = Vec::new();
        self.rank.worker.0.encode(&mut head);
        self.rank.rank.0.encode(&mut head);
        self.unreported_evictions
            .unwrap_or(u64::MAX)
            .encode(&mut head);
        let SaltTableDump {
            has_salts,
            is_full,
            names,
            rows: salts,
        } = &self.salts;
        head.push(pack_flags([
            self.has_untracked_groups,
            *has_salts,
            *is_full,
        ]));
        frames.write(DumpFrameKind::Rank, &head)?;
        if let Some(position) = &self.position {
            frames.write(DumpFrameKind::Position, &position::encode(position))?;
        }
        frames.write_rows(DumpFrameKind::Blocks, &self.blocks)?;
        frames.write_rows(DumpFrameKind::Hashes, &self.hashes)?;
        frames.write_rows(DumpFrameKind::Orphans, &self.orphans)?;
        frames.write_rows(DumpFrameKind::Groups, &self.groups)?;
        frames.write_rows(DumpFrameKind::Shares, &self.shares)?;
        names
            .iter()
            .try_for_each(|name| frames.write(DumpFrameKind::SaltName, name.as_bytes()))?;
        frames.write_rows(DumpFrameKind::Salts, salts)?;
        frames.write(DumpFrameKind::RankEnd, &[])
    }

    pub(super) fn read(
        head: &[u8],
        frames: &mut FrameReader<impl Read>,
    ) -> Result<Self, DumpError> {
        let mut dump = Self::from_header(head)?;
        let mut before = DumpFrameKind::Rank;
        loop {
            let (kind, payload) = frames.read()?;
            if kind < before {
                return Err(DumpError::Malformed(
                    "the frames of a record are in the wrong order",
                ));
            }
            before = kind;
            match kind {
                DumpFrameKind::Position if dump.position.is_none() => {
                    dump.position = Some(position::decode(&payload)?)
                }
                DumpFrameKind::Blocks => decode_rows(&payload, &mut dump.blocks)?,
                DumpFrameKind::Hashes => decode_rows(&payload, &mut dump.hashes)?,
                DumpFrameKind::Orphans => decode_rows(&payload, &mut dump.orphans)?,
                DumpFrameKind::Groups => decode_rows(&payload, &mut dump.groups)?,
                DumpFrameKind::Shares => decode_rows(&payload, &mut dump.shares)?,
                DumpFrameKind::SaltName => dump.salts.names.push(decode_salt(&payload)?),
                DumpFrameKind::Salts => decode_rows(&payload, &mut dump.salts.rows)?,
                DumpFrameKind::RankEnd if payload.is_empty() => break,
                DumpFrameKind::Rank
                | DumpFrameKind::Position
                | DumpFrameKind::RankEnd
                | DumpFrameKind::End => {
                    return Err(DumpError::Malformed("a record has no end frame"));
                }
            }
        }
        dump.validate()?;
        Ok(dump)
    }

    fn from_header(head: &[u8]) -> Result<Self, DumpError> {
        if head.len() != 2 * u64::SIZE + u32::SIZE + 1 {
            return Err(DumpError::Malformed("a rank frame has no rank number"));
        }
        let (worker, rest) = head.split_at(u64::SIZE);
        let (number, rest) = rest.split_at(u32::SIZE);
        let rank = WorkerRank {
            worker: WorkerId(u64::decode(worker)?),
            rank: DpRank(u32::decode(number)?),
        };
        let (evictions, flag_bytes) = rest.split_at(u64::SIZE);
        let is_set = |bit: usize| {
            flag_bytes
                .first()
                .is_some_and(|flags| flags & (1 << bit) != 0)
        };
        Ok(Self {
            rank,
            position: None,
            blocks: Vec::new(),
            hashes: Vec::new(),
            orphans: Vec::new(),
            groups: Vec::new(),
            shares: Vec::new(),
            has_untracked_groups: is_set(0),
            salts: SaltTableDump {
                has_salts: is_set(1),
                is_full: is_set(2),
                ..SaltTableDump::default()
            },
            unreported_evictions: Some(u64::decode(evictions)?).filter(|count| *count != u64::MAX),
        })
    }

    /// Checks that the parts of the dump agree.
    fn validate(&self) -> Result<(), DumpError> {
        self.validate_blocks()?;
        self.validate_copies()?;
        self.validate_groups()?;
        self.validate_salts()
    }

    fn validate_blocks(&self) -> Result<(), DumpError> {
        let mut blocks = self.blocks.iter().enumerate();
        let is_ordered =
            blocks.all(|(at, block)| block.parent.is_none_or(|parent| (parent as usize) < at));
        require(is_ordered, "a block precedes its parent")?;
        let is_sorted = self.hashes.is_sorted_by_key(|row| row.block);
        require(is_sorted, "engine hashes are not in the order of blocks")?;
        let last = self.hashes.last().map_or(0, |row| row.block as usize + 1);
        require(
            last <= self.blocks.len(),
            "an engine hash refers to a missing block",
        )
    }

    fn validate_copies(&self) -> Result<(), DumpError> {
        let hashes = self.hashes.iter().map(|row| (row.engine, row.copies));
        let orphans = self.orphans.iter().map(|row| (row.engine, row.copies));
        let named = hashes.chain(orphans);
        let mut seen = HashSet::with_capacity(self.hashes.len() + self.orphans.len());
        let is_distinct = named.clone().all(|(engine, _)| seen.insert(engine));
        require(is_distinct, "an engine hash occurs twice")?;
        let has_copies = named
            .into_iter()
            .all(|(_, copies)| copies.held().count() > 0);
        require(has_copies, "an engine hash has no copy")?;
        let has_device_orphan = self
            .orphans
            .iter()
            .any(|row| row.copies.has(StorageTier::Device));
        require(!has_device_orphan, "an orphan is stored on the device")
    }

    fn validate_groups(&self) -> Result<(), DumpError> {
        let groups: HashSet<u32> = self.groups.iter().map(|(id, _)| *id).collect();
        require(
            groups.len() == self.groups.len() && groups.len() <= MAX_GROUPS,
            "the cache groups are not distinct, or too many",
        )?;
        let has_group =
            |share: &GroupShare| (share.group as usize) < self.groups.len() && share.copies > 0;
        require(
            self.shares.iter().all(has_group),
            "a group share refers to a missing group or has no copy",
        )
    }

    fn validate_salts(&self) -> Result<(), DumpError> {
        let SaltTableDump { names, rows, .. } = &self.salts;
        let has_name = |row: &SaltRow| match row.salt {
            SaltRef::Named(number) => (number as usize) < names.len(),
            _ => true,
        };
        require(
            rows.iter().all(has_name),
            "a block refers to a missing salt",
        )?;
        require(
            rows.is_sorted_by(|a, b| a.engine < b.engine),
            "salts are not in the order of engine hashes",
        )
    }
}

fn require(is_valid: bool, problem: &'static str) -> Result<(), DumpError> {
    if is_valid {
        Ok(())
    } else {
        Err(DumpError::Malformed(problem))
    }
}

fn pack_flags<const N: usize>(flags: [bool; N]) -> u8 {
    flags
        .into_iter()
        .rev()
        .fold(0, |bits, flag| bits << 1 | u8::from(flag))
}

fn decode_salt(bytes: &[u8]) -> Result<Arc<str>, DumpError> {
    std::str::from_utf8(bytes)
        .map(Arc::from)
        .map_err(|_| DumpError::Malformed("a salt is not UTF-8"))
}

impl FrameRow for u64 {
    const SIZE: usize = 8;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        bytes
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|_| DumpError::Truncated)
    }
}

impl FrameRow for u32 {
    const SIZE: usize = 4;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        bytes
            .try_into()
            .map(u32::from_le_bytes)
            .map_err(|_| DumpError::Truncated)
    }
}

impl FrameRow for BlockRow {
    const SIZE: usize = 12;

    fn encode(&self, out: &mut Vec<u8>) {
        self.parent.unwrap_or(ROOT).encode(out);
        self.local.0.encode(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        let parent = u32::decode(&bytes[..4])?;
        Ok(Self {
            parent: (parent != ROOT).then_some(parent),
            local: LocalHash(u64::decode(&bytes[4..])?),
        })
    }
}

impl FrameRow for CopyCounts {
    const SIZE: usize = 17;

    fn encode(&self, out: &mut Vec<u8>) {
        self.counts.iter().for_each(|count| count.encode(out));
        out.push(pack_flags(self.stale));
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        let mut copies = CopyCounts::default();
        for (tier, count) in copies.counts.iter_mut().enumerate() {
            *count = u32::decode(&bytes[4 * tier..4 * tier + 4])?;
            copies.stale[tier] = bytes[16] & (1 << tier) != 0;
            if copies.stale[tier] && *count == 0 {
                return Err(DumpError::Malformed(
                    "a tier without copies is marked stale",
                ));
            }
        }
        Ok(copies)
    }
}

impl FrameRow for HashRow {
    const SIZE: usize = 12 + CopyCounts::SIZE;

    fn encode(&self, out: &mut Vec<u8>) {
        self.engine.0.encode(out);
        self.block.encode(out);
        self.copies.encode(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        Ok(Self {
            engine: EngineHash(u64::decode(&bytes[..8])?),
            block: u32::decode(&bytes[8..12])?,
            copies: CopyCounts::decode(&bytes[12..])?,
        })
    }
}

impl FrameRow for OrphanRow {
    const SIZE: usize = 24 + CopyCounts::SIZE;

    fn encode(&self, out: &mut Vec<u8>) {
        self.engine.0.encode(out);
        self.parent.0.encode(out);
        self.local.0.encode(out);
        self.copies.encode(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        Ok(Self {
            engine: EngineHash(u64::decode(&bytes[..8])?),
            parent: EngineHash(u64::decode(&bytes[8..16])?),
            local: LocalHash(u64::decode(&bytes[16..24])?),
            copies: CopyCounts::decode(&bytes[24..])?,
        })
    }
}

impl FrameRow for (u32, GroupNeed) {
    const SIZE: usize = 12;

    fn encode(&self, out: &mut Vec<u8>) {
        let (blocks, stride) = match self.1 {
            GroupNeed::Trailing { blocks, stride } => (blocks, stride.get()),
            GroupNeed::Unknown => (0, 0),
        };
        self.0.encode(out);
        blocks.encode(out);
        stride.encode(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        let blocks = u32::decode(&bytes[4..8])?;
        let need = match NonZeroU32::new(u32::decode(&bytes[8..])?) {
            Some(stride) => GroupNeed::Trailing { blocks, stride },
            None => GroupNeed::Unknown,
        };
        Ok((u32::decode(&bytes[..4])?, need))
    }
}

impl FrameRow for GroupShare {
    const SIZE: usize = 17;

    fn encode(&self, out: &mut Vec<u8>) {
        self.engine.0.encode(out);
        self.group.encode(out);
        self.copies.encode(out);
        out.push(u8::from(self.is_stale));
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        Ok(Self {
            engine: EngineHash(u64::decode(&bytes[..8])?),
            group: u32::decode(&bytes[8..12])?,
            copies: u32::decode(&bytes[12..16])?,
            is_stale: bytes[16] != 0,
        })
    }
}

impl FrameRow for SaltRow {
    const SIZE: usize = 12 + CopyCounts::SIZE;

    fn encode(&self, out: &mut Vec<u8>) {
        self.engine.0.encode(out);
        let salt = match self.salt {
            SaltRef::None => ROOT,
            SaltRef::Ambiguous => ROOT - 1,
            SaltRef::Named(number) => number,
        };
        salt.encode(out);
        self.copies.iter().for_each(|count| count.encode(out));
        out.push(pack_flags(self.stale));
    }

    fn decode(bytes: &[u8]) -> Result<Self, DumpError> {
        let salt = match u32::decode(&bytes[8..12])? {
            ROOT => SaltRef::None,
            unknown if unknown == ROOT - 1 => SaltRef::Ambiguous,
            number => SaltRef::Named(number),
        };
        let mut copies = [0; StorageTier::ALL.len()];
        let mut stale = [false; StorageTier::ALL.len()];
        for (tier, count) in copies.iter_mut().enumerate() {
            *count = u32::decode(&bytes[12 + 4 * tier..16 + 4 * tier])?;
            stale[tier] = bytes[28] & (1 << tier) != 0;
        }
        Ok(Self {
            engine: EngineHash(u64::decode(&bytes[..8])?),
            salt,
            copies,
            stale,
        })
    }
}
