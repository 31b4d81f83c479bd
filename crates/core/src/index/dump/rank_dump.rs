//! Content of one rank as a value: the blocks of its prefixes, parents first, and the engine hashes
//! of each block.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::block::{EngineHash, LocalHash, StorageTier};
use crate::index::event::GroupNeed;
use crate::index::layers::LayerSet;
use crate::index::position::EventPosition;
use crate::index::salts::{SaltRef, SaltRow, SaltTableDump};
use crate::worker::WorkerRank;

/// Maximum number of cache groups.
const MAX_GROUPS: usize = 64;

/// Content of one worker rank. `RankWriter::restore` loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Whether the engine has evicted device blocks since its cache was last cleared.
    pub(in crate::index) has_evicted: bool,
    pub(in crate::index) salts: SaltTableDump,
}

/// Block of a prefix. It is held if an engine hash refers to it, and otherwise only precedes a
/// block that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::index) struct BlockRow {
    pub(in crate::index) parent: Option<u32>,
    pub(in crate::index) local: LocalHash,
}

/// Engine hash with a known block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::index) struct HashRow {
    pub(in crate::index) engine: EngineHash,
    pub(in crate::index) block: u32,
    pub(in crate::index) copies: CopyCounts,
}

/// Engine hash whose parent is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::index) struct OrphanRow {
    pub(in crate::index) engine: EngineHash,
    pub(in crate::index) parent: EngineHash,
    pub(in crate::index) local: LocalHash,
    pub(in crate::index) copies: CopyCounts,
}

/// Copies of an engine hash, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::index) struct CopyCounts {
    pub(in crate::index) counts: [u32; 4],
    pub(in crate::index) stale: LayerSet,
}

/// Share of a block that a cache group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    fn tiers(self) -> LayerSet {
        let tiers = self.held().map(|(tier, _)| tier);
        tiers.fold(LayerSet::NONE, LayerSet::with)
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
        copies.into_iter().any(|copies| !copies.stale.is_empty())
            || self.shares.iter().any(|share| share.is_stale)
    }

    /// Checks that the parts of the dump agree. Returns the problem otherwise.
    pub(super) fn validate(&self) -> Result<(), &'static str> {
        self.validate_blocks()?;
        self.validate_copies()?;
        self.validate_groups()?;
        self.validate_salts()
    }

    fn validate_blocks(&self) -> Result<(), &'static str> {
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

    fn validate_copies(&self) -> Result<(), &'static str> {
        let hashes = self.hashes.iter().map(|row| (row.engine, row.copies));
        let orphans = self.orphans.iter().map(|row| (row.engine, row.copies));
        let named = hashes.chain(orphans);
        let mut seen = HashSet::with_capacity(self.hashes.len() + self.orphans.len());
        let is_distinct = named.clone().all(|(engine, _)| seen.insert(engine));
        require(is_distinct, "an engine hash occurs twice")?;
        let has_copies = named.clone().all(|(_, copies)| !copies.tiers().is_empty());
        require(has_copies, "an engine hash has no copy")?;
        let mut stale = named.map(|(_, copies)| copies.stale.difference(copies.tiers()));
        require(
            stale.all(LayerSet::is_empty),
            "a tier without copies is marked stale",
        )?;
        let has_device_orphan = self
            .orphans
            .iter()
            .any(|row| row.copies.tiers().has(StorageTier::Device));
        require(!has_device_orphan, "an orphan is stored on the device")
    }

    fn validate_groups(&self) -> Result<(), &'static str> {
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

    fn validate_salts(&self) -> Result<(), &'static str> {
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

fn require(is_valid: bool, problem: &'static str) -> Result<(), &'static str> {
    if is_valid { Ok(()) } else { Err(problem) }
}
