//! Cache salts of stored blocks.
//!
//! Engines report a salt only with the first block of a prompt, so later stores inherit it from
//! their parent. While a rank has never reported a salt, no block has one and nothing is stored.
//! Fleets without tenants need no memory for salts.

use std::sync::Arc;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use super::layers::LayerSet;
use super::sizes::{MAX_SALT_BYTES, MAX_SALTED_BLOCKS};
use crate::block::{EngineHash, StorageTier};

/// The parent was stored under different salts, so the inherited salt is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmbiguousSaltError;

/// Salts by engine hash.
#[derive(Debug, Default)]
pub struct SaltTable {
    blocks: HashMap<EngineHash, SaltEntry>,
    /// Salt bytes of all blocks.
    bytes: usize,
    /// Whether the rank has ever reported a salt.
    has_salts: bool,
    /// Number of gaps in the event stream.
    gaps: u32,
    /// Whether a block was not stored because of a limit.
    is_full: bool,
}

/// Salt of one block, with its copies.
#[derive(Debug)]
struct SaltEntry {
    salt: Result<Option<Arc<str>>, AmbiguousSaltError>,
    /// Copies by tier. A hash may be stored several times, and is then removed as often.
    copies: [u32; StorageTier::ALL.len()],
    /// Gap at which the copies were last counted, by tier. After a later gap, some may be gone.
    counted_at: [u32; StorageTier::ALL.len()],
}

impl SaltEntry {
    /// Returns whether no tier holds a copy.
    fn is_empty(&self) -> bool {
        self.copies.iter().all(|copies| *copies == 0)
    }

    /// Returns the length of the salt in bytes.
    fn bytes(&self) -> usize {
        self.salt
            .as_ref()
            .map_or(0, |salt| salt.as_deref().map_or(0, str::len))
    }
}

impl SaltTable {
    /// Returns a copy of the table, sorted by engine hash.
    pub(super) fn dump(&self) -> SaltTableDump {
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let mut dump = SaltTableDump {
            has_salts: self.has_salts,
            is_full: self.is_full,
            ..SaltTableDump::default()
        };
        for (&engine, entry) in &self.blocks {
            let salt = match &entry.salt {
                Ok(None) => SaltRef::None,
                Ok(Some(name)) if name.len() <= MAX_SALT_LEN => {
                    let number = *numbers.entry(name).or_insert_with(|| {
                        dump.names.push(name.clone());
                        dump.names.len() as u32 - 1
                    });
                    SaltRef::Named(number)
                }
                Ok(Some(_)) | Err(AmbiguousSaltError) => SaltRef::Ambiguous,
            };
            let is_stale = |tier: &StorageTier| {
                let at = *tier as usize;
                entry.copies[at] > 0 && entry.counted_at[at] != self.gaps
            };
            let stale = StorageTier::ALL.into_iter().filter(is_stale);
            dump.rows.push(SaltRow {
                engine,
                salt,
                copies: entry.copies,
                stale: stale.fold(LayerSet::NONE, LayerSet::with),
            });
        }
        dump.rows.sort_unstable_by_key(|row| row.engine);
        dump
    }

    /// Restores a dump.
    pub(super) fn from_dump(dump: &SaltTableDump) -> Self {
        let mut salts = Self {
            has_salts: dump.has_salts,
            is_full: dump.is_full || dump.rows.len() > MAX_SALTED_BLOCKS,
            ..Self::default()
        };
        let name = |number: u32| dump.names.get(number as usize).cloned();
        for row in dump.rows.iter().take(MAX_SALTED_BLOCKS) {
            let salt = match row.salt {
                SaltRef::None => Ok(None),
                SaltRef::Named(number) => name(number).map(Some).ok_or(AmbiguousSaltError),
                SaltRef::Ambiguous => Err(AmbiguousSaltError),
            };
            // Never equal to the number of a gap.
            let counted = StorageTier::ALL.map(|tier| {
                if row.stale.has(tier) {
                    u32::MAX
                } else {
                    salts.gaps
                }
            });
            let entry = SaltEntry {
                salt,
                copies: row.copies,
                counted_at: counted,
            };
            if salts.bytes + entry.bytes() > MAX_SALT_BYTES {
                salts.is_full = true;
                continue;
            }
            salts.bytes += entry.bytes();
            salts.blocks.insert(row.engine, entry);
        }
        salts
    }

    /// Removes all blocks. The engine cleared its cache.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.bytes = 0;
        self.is_full = false;
    }

    /// Records a gap. As in the index, the next store counts the copies of a block from one again.
    pub fn record_gap(&mut self, gaps: u32) {
        self.gaps = gaps;
    }

    /// Removes all copies of these blocks in these tiers.
    pub fn remove_all(&mut self, copies: &[(EngineHash, StorageTier)]) {
        for (block, tier) in copies {
            let Some(entry) = self.blocks.get_mut(block) else {
                continue;
            };
            entry.copies[*tier as usize] = 0;
            self.remove_if_empty(*block);
        }
    }

    /// Removes a block if no tier holds a copy of it.
    fn remove_if_empty(&mut self, block: EngineHash) {
        if self.blocks.get(&block).is_some_and(SaltEntry::is_empty)
            && let Some(removed) = self.blocks.remove(&block)
        {
            self.bytes -= removed.bytes();
        }
    }

    /// Returns the salt of a block. Returns `None` if it is unknown, or if the block has none.
    pub fn own_salt(&self, block: EngineHash) -> Option<&str> {
        self.blocks.get(&block)?.salt.as_ref().ok()?.as_deref()
    }

    /// Returns whether the block is in the table, so that the salt of its children is known.
    pub fn contains(&self, block: EngineHash) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Returns the salt inherited from a parent. An unknown parent has none: either it was stored
    /// before the rank reported any salt, or it was removed, and stores after it are dropped.
    pub fn inherited_salt(&self, parent: EngineHash) -> Result<Option<&str>, AmbiguousSaltError> {
        match self.blocks.get(&parent) {
            None if self.is_full => Err(AmbiguousSaltError),
            None => Ok(None),
            Some(entry) => entry
                .salt
                .as_ref()
                .map(Option::as_deref)
                .map_err(|&ambiguous| ambiguous),
        }
    }

    /// Adds one copy of each block, with its salt.
    pub fn record_stored(&mut self, blocks: &[EngineHash], tier: StorageTier, salt: Option<&str>) {
        self.has_salts |= salt.is_some();
        if !self.has_salts {
            return;
        }
        let salt: Option<Arc<str>> = salt.map(Arc::from);
        let bytes = salt.as_deref().map_or(0, str::len);
        for &block in blocks {
            let is_new = !self.blocks.contains_key(&block);
            if is_new
                && (self.blocks.len() >= MAX_SALTED_BLOCKS || self.bytes + bytes > MAX_SALT_BYTES)
            {
                self.is_full = true;
                continue;
            }
            self.bytes += if is_new { bytes } else { 0 };
            let new_entry = || SaltEntry {
                salt: Ok(salt.clone()),
                copies: Default::default(),
                counted_at: Default::default(),
            };
            let entry = self.blocks.entry(block).or_insert_with(new_entry);
            let copies = &mut entry.copies[tier as usize];
            if std::mem::replace(&mut entry.counted_at[tier as usize], self.gaps) != self.gaps {
                *copies = 0;
            }
            *copies = copies.saturating_add(1);
            if entry.salt.as_ref().is_ok_and(|known| *known != salt) {
                self.bytes -= entry.bytes();
                entry.salt = Err(AmbiguousSaltError);
            }
        }
    }

    /// Removes one copy of each block.
    pub fn record_removed(&mut self, blocks: &[EngineHash], tier: StorageTier) {
        for block in blocks {
            let Some(entry) = self.blocks.get_mut(block) else {
                continue;
            };
            let copies = &mut entry.copies[tier as usize];
            *copies = copies.saturating_sub(1);
            self.remove_if_empty(*block);
        }
    }
}

/// Maximum length of a salt in a dump.
const MAX_SALT_LEN: usize = 1 << 16;

/// Copy of a [`SaltTable`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SaltTableDump {
    pub(super) has_salts: bool,
    pub(super) is_full: bool,
    pub(super) names: Vec<Arc<str>>,
    pub(super) rows: Vec<SaltRow>,
}

/// Salt of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SaltRow {
    pub(super) engine: EngineHash,
    pub(super) salt: SaltRef,
    /// Copies by tier.
    pub(super) copies: [u32; StorageTier::ALL.len()],
    pub(super) stale: LayerSet,
}

/// Reference to a salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SaltRef {
    /// No salt.
    None,
    /// The salt with this index.
    Named(u32),
    /// Several salts, or one that is too long.
    Ambiguous,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_after_gap_counts_copies_from_one() {
        for (has_gap, is_held) in [(false, true), (true, false)] {
            let mut salts = SaltTable::default();
            let block = [EngineHash(1)];
            salts.record_stored(&block, StorageTier::Device, Some("a"));
            if has_gap {
                // The removal of the first copy was lost.
                salts.record_gap(1);
            }
            salts.record_stored(&block, StorageTier::Device, Some("a"));
            salts.record_removed(&block, StorageTier::Device);
            let salt = if is_held { Ok(Some("a")) } else { Ok(None) };
            assert_eq!(salts.inherited_salt(block[0]), salt);
        }
    }

    #[test]
    fn purge_of_one_tier_keeps_other_tiers() {
        let mut salts = SaltTable::default();
        let block = [EngineHash(1)];
        salts.record_stored(&block, StorageTier::Device, Some("a"));
        salts.record_stored(&block, StorageTier::HostPinned, Some("a"));
        salts.record_gap(1);
        salts.record_stored(&block, StorageTier::Device, Some("a"));
        salts.record_removed(&block, StorageTier::Device);
        assert_eq!(salts.inherited_salt(block[0]), Ok(Some("a")));
        salts.remove_all(&[(block[0], StorageTier::Device)]);
        assert_eq!(salts.inherited_salt(block[0]), Ok(Some("a")));
        salts.remove_all(&[(block[0], StorageTier::HostPinned)]);
        assert_eq!(salts.inherited_salt(block[0]), Ok(None));
    }

    #[test]
    fn salt_bytes_are_bounded() {
        let mut salts = SaltTable::default();
        let long = |number: u64| format!("{number}").repeat(1000);
        for number in 0..1000 {
            salts.record_stored(
                &[EngineHash(number)],
                StorageTier::Device,
                Some(&long(number % 10)),
            );
        }
        assert_eq!(
            (salts.blocks.len(), salts.bytes),
            (MAX_SALT_BYTES / 1000, MAX_SALT_BYTES / 1000 * 1000)
        );
        assert_eq!(
            salts.inherited_salt(EngineHash(999)),
            Err(AmbiguousSaltError),
            "a block beyond the limit may have any salt"
        );
        salts.record_stored(&[EngineHash(0)], StorageTier::Device, Some(&long(1)));
        assert_eq!(
            (salts.inherited_salt(EngineHash(0)), salts.bytes),
            (Err(AmbiguousSaltError), MAX_SALT_BYTES / 1000 * 1000 - 1000)
        );
        let restored = SaltTable::from_dump(&salts.dump());
        assert_eq!(
            (restored.blocks.len(), restored.bytes),
            (salts.blocks.len(), salts.bytes)
        );
        (0..1000)
            .for_each(|number| salts.record_removed(&[EngineHash(number)], StorageTier::Device));
        // The first block was stored twice.
        assert_eq!((salts.blocks.len(), salts.bytes), (1, 0));
        salts.record_removed(&[EngineHash(0)], StorageTier::Device);
        salts.record_stored(&[EngineHash(5000)], StorageTier::Device, Some(&long(5)));
        assert_eq!(salts.bytes, 1000);
        salts.clear();
        assert_eq!(salts.bytes, 0);
    }
}
