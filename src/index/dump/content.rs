//! What one rank holds, as a value: the blocks that its prefixes consist of, parents first, and who bears which name.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::num::NonZeroU32;
use std::sync::Arc;

use super::frame::{FrameReader, FrameWriter, Kind, Row, rows};
use super::{DumpError, position};
use crate::block::{EngineHash, LocalHash};
use crate::index::Position;
use crate::index::event::GroupNeed;
use crate::index::salts::{SaltRow, Salted, SaltsDump};
use crate::tier::Tier;
use crate::worker::{DpRank, WorkerId, WorkerRank};

/// No parent: the first block of a prompt.
const ROOT: u32 = u32::MAX;

/// Groups that a writer tells apart.
const MOST_GROUPS: usize = 64;

/// What one worker rank holds. `RankWriter::restore` takes it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankDump {
    pub(in crate::index) rank: WorkerRank,
    pub(in crate::index) position: Option<Position>,
    pub(in crate::index) blocks: Vec<BlockRow>,
    /// By block.
    pub(in crate::index) names: Vec<PlacedName>,
    pub(in crate::index) waiting: Vec<ApartName>,
    pub(in crate::index) groups: Vec<(u32, GroupNeed)>,
    pub(in crate::index) shares: Vec<Share>,
    /// Whether there are more groups than can be followed.
    pub(in crate::index) more_groups: bool,
    /// While the engine may hold blocks that were never told: how many of those that were have been evicted since.
    pub(in crate::index) untold: Option<u64>,
    pub(in crate::index) salts: SaltsDump,
}

/// One block of a prefix; held if a name stands for it, otherwise a gap in front of one that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct BlockRow {
    pub(in crate::index) parent: Option<u32>,
    pub(in crate::index) local: LocalHash,
}

/// A name with its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct PlacedName {
    pub(in crate::index) engine: EngineHash,
    pub(in crate::index) block: u32,
    pub(in crate::index) copies: Copies,
}

/// A name without a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct ApartName {
    pub(in crate::index) engine: EngineHash,
    pub(in crate::index) parent: EngineHash,
    pub(in crate::index) local: LocalHash,
    pub(in crate::index) copies: Copies,
}

/// Copies of a name by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::index) struct Copies {
    pub(in crate::index) counts: [u32; 4],
    pub(in crate::index) doubted: [bool; 4],
}

/// What a cache group holds of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Share {
    pub(in crate::index) engine: EngineHash,
    /// Place in the list of groups.
    pub(in crate::index) group: u32,
    pub(in crate::index) copies: u32,
    pub(in crate::index) doubted: bool,
}

impl Copies {
    /// The tiers with copies, and how many.
    pub(in crate::index) fn held(self) -> impl Iterator<Item = (Tier, u32)> {
        Tier::ALL
            .into_iter()
            .zip(self.counts)
            .filter(|(_, count)| *count > 0)
    }

    pub(in crate::index) fn has(self, tier: Tier) -> bool {
        self.counts[tier as usize] > 0
    }
}

impl RankDump {
    /// Whether anything may be gone.
    pub(in crate::index) fn is_doubted(&self) -> bool {
        let copies = self
            .names
            .iter()
            .map(|name| &name.copies)
            .chain(self.waiting.iter().map(|name| &name.copies));
        copies
            .into_iter()
            .any(|copies| copies.doubted.contains(&true))
            || self.shares.iter().any(|share| share.doubted)
    }

    /// Writes the record of this rank.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let mut frames = FrameWriter::new(out);
        let mut head = Vec::new();
        self.rank.worker.0.put(&mut head);
        self.rank.rank.0.put(&mut head);
        self.untold.unwrap_or(u64::MAX).put(&mut head);
        let SaltsDump {
            used,
            full,
            names,
            rows: salts,
        } = &self.salts;
        head.push(flags([self.more_groups, *used, *full]));
        frames.write(Kind::Rank, &head)?;
        if let Some(position) = &self.position {
            frames.write(Kind::Position, &position::bytes(position))?;
        }
        frames.rows(Kind::Blocks, &self.blocks)?;
        frames.rows(Kind::Names, &self.names)?;
        frames.rows(Kind::Waiting, &self.waiting)?;
        frames.rows(Kind::Groups, &self.groups)?;
        frames.rows(Kind::Shares, &self.shares)?;
        names
            .iter()
            .try_for_each(|name| frames.write(Kind::SaltName, name.as_bytes()))?;
        frames.rows(Kind::Salts, salts)?;
        frames.write(Kind::RankEnd, &[])
    }

    pub(super) fn read(
        head: &[u8],
        frames: &mut FrameReader<impl Read>,
    ) -> Result<Self, DumpError> {
        let mut dump = Self::of_head(head)?;
        let mut before = Kind::Rank;
        loop {
            let (kind, payload) = frames.read()?;
            if kind < before {
                return Err(DumpError::Malformed("frames in wrong order"));
            }
            before = kind;
            match kind {
                Kind::Position if dump.position.is_none() => {
                    dump.position = Some(position::of(&payload)?)
                }
                Kind::Blocks => rows(&payload, &mut dump.blocks)?,
                Kind::Names => rows(&payload, &mut dump.names)?,
                Kind::Waiting => rows(&payload, &mut dump.waiting)?,
                Kind::Groups => rows(&payload, &mut dump.groups)?,
                Kind::Shares => rows(&payload, &mut dump.shares)?,
                Kind::SaltName => dump.salts.names.push(text(&payload)?),
                Kind::Salts => rows(&payload, &mut dump.salts.rows)?,
                Kind::RankEnd if payload.is_empty() => break,
                Kind::Rank | Kind::Position | Kind::RankEnd | Kind::End => {
                    return Err(DumpError::Malformed("a record has no end"));
                }
            }
        }
        dump.check()?;
        Ok(dump)
    }

    fn of_head(head: &[u8]) -> Result<Self, DumpError> {
        if head.len() != 2 * u64::SIZE + u32::SIZE + 1 {
            return Err(DumpError::Malformed("a rank without a number"));
        }
        let (worker, rest) = head.split_at(u64::SIZE);
        let (number, rest) = rest.split_at(u32::SIZE);
        let rank = WorkerRank {
            worker: WorkerId(u64::get(worker)?),
            rank: DpRank(u32::get(number)?),
        };
        let (untold, more) = rest.split_at(u64::SIZE);
        let is_set = |bit: usize| more.first().is_some_and(|flags| flags & (1 << bit) != 0);
        Ok(Self {
            rank,
            position: None,
            blocks: Vec::new(),
            names: Vec::new(),
            waiting: Vec::new(),
            groups: Vec::new(),
            shares: Vec::new(),
            more_groups: is_set(0),
            salts: SaltsDump {
                used: is_set(1),
                full: is_set(2),
                ..SaltsDump::default()
            },
            untold: Some(u64::get(untold)?).filter(|untold| *untold != u64::MAX),
        })
    }

    fn check(&self) -> Result<(), DumpError> {
        let sound = |yes: bool, problem| {
            if yes {
                Ok(())
            } else {
                Err(DumpError::Malformed(problem))
            }
        };
        let parents = self.blocks.iter().enumerate();
        let parents = parents.filter_map(|(at, block)| Some((at, block.parent?)));
        sound(
            parents
                .into_iter()
                .all(|(at, parent)| (parent as usize) < at),
            "a block in front of its parent",
        )?;
        sound(
            self.names.is_sorted_by_key(|name| name.block),
            "names are not in the order of blocks",
        )?;
        let last = self.names.last().map_or(0, |name| name.block as usize + 1);
        sound(last <= self.blocks.len(), "a name without a block")?;
        let engines = self
            .names
            .iter()
            .map(|name| name.engine)
            .chain(self.waiting.iter().map(|name| name.engine));
        let mut seen = HashSet::with_capacity(self.names.len() + self.waiting.len());
        sound(
            engines.into_iter().all(|engine| seen.insert(engine)),
            "a name that stands twice",
        )?;
        let copies = self
            .names
            .iter()
            .map(|name| name.copies)
            .chain(self.waiting.iter().map(|name| name.copies));
        sound(
            copies.into_iter().all(|copies| copies.held().count() > 0),
            "a name without a copy",
        )?;
        sound(
            self.waiting
                .iter()
                .all(|name| !name.copies.has(Tier::Device)),
            "a device block without a place",
        )?;
        let groups: HashSet<u32> = self.groups.iter().map(|(id, _)| *id).collect();
        sound(
            groups.len() == self.groups.len() && groups.len() <= MOST_GROUPS,
            "groups that cannot be told apart",
        )?;
        let shares = self
            .shares
            .iter()
            .all(|share| (share.group as usize) < self.groups.len() && share.copies > 0);
        sound(shares, "a share of no group")?;
        let SaltsDump { names, rows, .. } = &self.salts;
        let named = |row: &SaltRow| !matches!(row.salt, Salted::By(number) if number as usize >= names.len());
        sound(rows.iter().all(named), "a salt without a name")?;
        sound(
            rows.is_sorted_by(|a, b| a.engine < b.engine),
            "salts are not in the order of names",
        )
    }
}

fn flags<const N: usize>(flags: [bool; N]) -> u8 {
    flags
        .into_iter()
        .rev()
        .fold(0, |bits, flag| bits << 1 | u8::from(flag))
}

fn text(bytes: &[u8]) -> Result<Arc<str>, DumpError> {
    std::str::from_utf8(bytes)
        .map(Arc::from)
        .map_err(|_| DumpError::Malformed("a salt that is no text"))
}

impl Row for u64 {
    const SIZE: usize = 8;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        bytes
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|_| DumpError::Truncated)
    }
}

impl Row for u32 {
    const SIZE: usize = 4;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        bytes
            .try_into()
            .map(u32::from_le_bytes)
            .map_err(|_| DumpError::Truncated)
    }
}

impl Row for BlockRow {
    const SIZE: usize = 12;

    fn put(&self, out: &mut Vec<u8>) {
        self.parent.unwrap_or(ROOT).put(out);
        self.local.0.put(out);
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        let parent = u32::get(&bytes[..4])?;
        Ok(Self {
            parent: (parent != ROOT).then_some(parent),
            local: LocalHash(u64::get(&bytes[4..])?),
        })
    }
}

impl Row for Copies {
    const SIZE: usize = 17;

    fn put(&self, out: &mut Vec<u8>) {
        self.counts.iter().for_each(|count| count.put(out));
        out.push(flags(self.doubted));
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        let mut copies = Copies::default();
        for (tier, count) in copies.counts.iter_mut().enumerate() {
            *count = u32::get(&bytes[4 * tier..4 * tier + 4])?;
            copies.doubted[tier] = bytes[16] & (1 << tier) != 0;
            if copies.doubted[tier] && *count == 0 {
                return Err(DumpError::Malformed("doubt of nothing"));
            }
        }
        Ok(copies)
    }
}

impl Row for PlacedName {
    const SIZE: usize = 12 + Copies::SIZE;

    fn put(&self, out: &mut Vec<u8>) {
        self.engine.0.put(out);
        self.block.put(out);
        self.copies.put(out);
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        Ok(Self {
            engine: EngineHash(u64::get(&bytes[..8])?),
            block: u32::get(&bytes[8..12])?,
            copies: Copies::get(&bytes[12..])?,
        })
    }
}

impl Row for ApartName {
    const SIZE: usize = 24 + Copies::SIZE;

    fn put(&self, out: &mut Vec<u8>) {
        self.engine.0.put(out);
        self.parent.0.put(out);
        self.local.0.put(out);
        self.copies.put(out);
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        Ok(Self {
            engine: EngineHash(u64::get(&bytes[..8])?),
            parent: EngineHash(u64::get(&bytes[8..16])?),
            local: LocalHash(u64::get(&bytes[16..24])?),
            copies: Copies::get(&bytes[24..])?,
        })
    }
}

impl Row for (u32, GroupNeed) {
    const SIZE: usize = 12;

    fn put(&self, out: &mut Vec<u8>) {
        let (blocks, stride) = match self.1 {
            GroupNeed::Last { blocks, stride } => (blocks, stride.get()),
            GroupNeed::Unknown => (0, 0),
        };
        self.0.put(out);
        blocks.put(out);
        stride.put(out);
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        let blocks = u32::get(&bytes[4..8])?;
        let need = match NonZeroU32::new(u32::get(&bytes[8..])?) {
            Some(stride) => GroupNeed::Last { blocks, stride },
            None => GroupNeed::Unknown,
        };
        Ok((u32::get(&bytes[..4])?, need))
    }
}

impl Row for Share {
    const SIZE: usize = 17;

    fn put(&self, out: &mut Vec<u8>) {
        self.engine.0.put(out);
        self.group.put(out);
        self.copies.put(out);
        out.push(u8::from(self.doubted));
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        Ok(Self {
            engine: EngineHash(u64::get(&bytes[..8])?),
            group: u32::get(&bytes[8..12])?,
            copies: u32::get(&bytes[12..16])?,
            doubted: bytes[16] != 0,
        })
    }
}

impl Row for SaltRow {
    const SIZE: usize = 12 + Copies::SIZE;

    fn put(&self, out: &mut Vec<u8>) {
        self.engine.0.put(out);
        let salt = match self.salt {
            Salted::Nothing => ROOT,
            Salted::Unknown => ROOT - 1,
            Salted::By(number) => number,
        };
        salt.put(out);
        self.copies.iter().for_each(|count| count.put(out));
        out.push(flags(self.doubted));
    }

    fn get(bytes: &[u8]) -> Result<Self, DumpError> {
        let salt = match u32::get(&bytes[8..12])? {
            ROOT => Salted::Nothing,
            unknown if unknown == ROOT - 1 => Salted::Unknown,
            number => Salted::By(number),
        };
        let (mut copies, mut doubted) = ([0; Tier::ALL.len()], [false; Tier::ALL.len()]);
        for (tier, count) in copies.iter_mut().enumerate() {
            *count = u32::get(&bytes[12 + 4 * tier..16 + 4 * tier])?;
            doubted[tier] = bytes[28] & (1 << tier) != 0;
        }
        Ok(Self {
            engine: EngineHash(u64::get(&bytes[..8])?),
            salt,
            copies,
            doubted,
        })
    }
}
