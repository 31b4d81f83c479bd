//! Which salt a stored block carries. Engines name a salt at the first block of a prompt only, so a later store has to
//! inherit it from its parent. While a rank has never named a salt nothing is remembered: then every block has none, and
//! the memory for fleets without tenants stays at zero.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::block::EngineHash;
use crate::tier::Tier;

/// The parent was stored under different salts, so that inheriting would be a guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ambiguous;

/// Blocks that are remembered per rank. Beyond, the salts of further ones cannot be told, and what follows them is dropped.
const MOST: usize = if cfg!(test) { 1 << 12 } else { 1 << 22 };

/// Most bytes of the salts that are remembered per rank, each counted for every block that has it.
const MOST_BYTES: usize = if cfg!(test) { 1 << 16 } else { 1 << 28 };

/// Salts by block.
#[derive(Debug, Default)]
pub(crate) struct Salts {
    blocks: HashMap<EngineHash, Entry>,
    /// Bytes of the salts of all blocks.
    bytes: usize,
    /// Whether this rank has ever named a salt.
    used: bool,
    /// How often events were lost.
    gaps: u32,
    /// Whether a block could not be remembered.
    full: bool,
}

#[derive(Debug)]
struct Entry {
    salt: Result<Option<Arc<str>>, Ambiguous>,
    /// By tier: one hash may be stored several times and then leaves as often.
    copies: [u32; Tier::ALL.len()],
    /// The gap since which the copies were counted, by tier: events were lost since, so some may be gone.
    counted: [u32; Tier::ALL.len()],
}

impl Entry {
    /// Whether nothing is left of it.
    fn is_over(&self) -> bool {
        self.copies.iter().all(|copies| *copies == 0)
    }

    /// Bytes of its salt.
    fn bytes(&self) -> usize {
        self.salt
            .as_ref()
            .map_or(0, |salt| salt.as_deref().map_or(0, str::len))
    }
}

impl Salts {
    /// All of it as a value, by block.
    pub(super) fn dump(&self) -> SaltsDump {
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let mut dump = SaltsDump {
            used: self.used,
            full: self.full,
            ..SaltsDump::default()
        };
        for (&engine, entry) in &self.blocks {
            let salt = match &entry.salt {
                Ok(None) => Salted::Nothing,
                Ok(Some(name)) if name.len() <= LONGEST => {
                    let number = *numbers.entry(name).or_insert_with(|| {
                        dump.names.push(name.clone());
                        dump.names.len() as u32 - 1
                    });
                    Salted::By(number)
                }
                Ok(Some(_)) | Err(Ambiguous) => Salted::Unknown,
            };
            let doubts = entry
                .copies
                .iter()
                .zip(entry.counted)
                .map(|(copies, counted)| *copies > 0 && counted != self.gaps);
            let mut doubted = [false; Tier::ALL.len()];
            doubted
                .iter_mut()
                .zip(doubts)
                .for_each(|(of, doubt)| *of = doubt);
            dump.rows.push(SaltRow {
                engine,
                salt,
                copies: entry.copies,
                doubted,
            });
        }
        dump.rows.sort_unstable_by_key(|row| row.engine);
        dump
    }

    /// The same again.
    pub(super) fn restored(dump: &SaltsDump) -> Self {
        let mut salts = Self {
            used: dump.used,
            full: dump.full || dump.rows.len() > MOST,
            ..Self::default()
        };
        let name = |number: u32| dump.names.get(number as usize).cloned();
        for row in dump.rows.iter().take(MOST) {
            let salt = match row.salt {
                Salted::Nothing => Ok(None),
                Salted::By(number) => name(number).map(Some).ok_or(Ambiguous),
                Salted::Unknown => Err(Ambiguous),
            };
            // A gap that was long ago.
            let counted = row
                .doubted
                .map(|doubted| if doubted { u32::MAX } else { salts.gaps });
            let entry = Entry {
                salt,
                copies: row.copies,
                counted,
            };
            if salts.bytes + entry.bytes() > MOST_BYTES {
                salts.full = true;
                continue;
            }
            salts.bytes += entry.bytes();
            salts.blocks.insert(row.engine, entry);
        }
        salts
    }

    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.bytes = 0;
        self.full = false;
    }

    /// Events were lost for good, so often by now. As in the index, the next store counts the copies of a block from one
    /// again.
    pub(crate) fn doubt(&mut self, gaps: u32) {
        self.gaps = gaps;
    }

    /// These are gone.
    pub(crate) fn forget(&mut self, names: &[(EngineHash, Tier)]) {
        for (block, tier) in names {
            let Some(entry) = self.blocks.get_mut(block) else {
                continue;
            };
            entry.copies[*tier as usize] = 0;
            self.remove_if_over(*block);
        }
    }

    /// Removes a block of which no tier holds a copy.
    fn remove_if_over(&mut self, block: EngineHash) {
        if self.blocks.get(&block).is_some_and(Entry::is_over)
            && let Some(removed) = self.blocks.remove(&block)
        {
            self.bytes -= removed.bytes();
        }
    }

    /// The salt of a block itself, where it is known.
    pub(crate) fn own(&self, block: EngineHash) -> Option<&str> {
        self.blocks.get(&block)?.salt.as_ref().ok()?.as_deref()
    }

    /// Whether the salt of a block is known, so that what follows it is known to have the same.
    pub(crate) fn knows(&self, block: EngineHash) -> bool {
        self.blocks.contains_key(&block)
    }

    /// The salt to inherit from a parent. An unknown parent carries none: it was there before any salt was named, or it is
    /// gone, and then what follows it is dropped.
    pub(crate) fn of(&self, parent: EngineHash) -> Result<Option<&str>, Ambiguous> {
        match self.blocks.get(&parent) {
            None if self.full => Err(Ambiguous),
            None => Ok(None),
            Some(entry) => entry
                .salt
                .as_ref()
                .map(Option::as_deref)
                .map_err(|&ambiguous| ambiguous),
        }
    }

    pub(crate) fn stored(&mut self, blocks: &[EngineHash], tier: Tier, salt: Option<&str>) {
        self.used |= salt.is_some();
        if !self.used {
            return;
        }
        let salt: Option<Arc<str>> = salt.map(Arc::from);
        let bytes = salt.as_deref().map_or(0, str::len);
        for &block in blocks {
            let is_new = !self.blocks.contains_key(&block);
            if is_new && (self.blocks.len() >= MOST || self.bytes + bytes > MOST_BYTES) {
                self.full = true;
                continue;
            }
            self.bytes += if is_new { bytes } else { 0 };
            let fresh = || Entry {
                salt: Ok(salt.clone()),
                copies: Default::default(),
                counted: Default::default(),
            };
            let entry = self.blocks.entry(block).or_insert_with(fresh);
            let copies = &mut entry.copies[tier as usize];
            if std::mem::replace(&mut entry.counted[tier as usize], self.gaps) != self.gaps {
                *copies = 0;
            }
            *copies = copies.saturating_add(1);
            if entry.salt.as_ref().is_ok_and(|known| *known != salt) {
                self.bytes -= entry.bytes();
                entry.salt = Err(Ambiguous);
            }
        }
    }

    /// Forgets blocks whose last copy left.
    pub(crate) fn removed(&mut self, blocks: &[EngineHash], tier: Tier) {
        for block in blocks {
            let Some(entry) = self.blocks.get_mut(block) else {
                continue;
            };
            let copies = &mut entry.copies[tier as usize];
            *copies = copies.saturating_sub(1);
            self.remove_if_over(*block);
        }
    }
}

/// Longest salt that is copied.
const LONGEST: usize = 1 << 16;

/// Salts by block, as a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SaltsDump {
    pub(super) used: bool,
    pub(super) full: bool,
    pub(super) names: Vec<Arc<str>>,
    pub(super) rows: Vec<SaltRow>,
}

/// The salt of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SaltRow {
    pub(super) engine: EngineHash,
    pub(super) salt: Salted,
    /// By tier.
    pub(super) copies: [u32; Tier::ALL.len()],
    pub(super) doubted: [bool; Tier::ALL.len()],
}

/// Which salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Salted {
    /// None.
    Nothing,
    /// The one of this number.
    By(u32),
    /// More than one.
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_lost_events_copies_are_counted_from_one_again() {
        for (doubt, left) in [(false, true), (true, false)] {
            let (mut salts, block) = (Salts::default(), [EngineHash(1)]);
            salts.stored(&block, Tier::Device, Some("a"));
            if doubt {
                // The removal of the first copy was lost.
                salts.doubt(1);
            }
            salts.stored(&block, Tier::Device, Some("a"));
            salts.removed(&block, Tier::Device);
            let salt = if left { Ok(Some("a")) } else { Ok(None) };
            assert_eq!(salts.of(block[0]), salt);
        }
    }

    #[test]
    fn what_another_tier_holds_is_none_of_the_copies_that_left() {
        let (mut salts, block) = (Salts::default(), [EngineHash(1)]);
        salts.stored(&block, Tier::Device, Some("a"));
        salts.stored(&block, Tier::HostPinned, Some("a"));
        salts.doubt(1);
        salts.stored(&block, Tier::Device, Some("a"));
        salts.removed(&block, Tier::Device);
        assert_eq!(salts.of(block[0]), Ok(Some("a")));
        salts.forget(&[(block[0], Tier::Device)]);
        assert_eq!(salts.of(block[0]), Ok(Some("a")));
        salts.forget(&[(block[0], Tier::HostPinned)]);
        assert_eq!(salts.of(block[0]), Ok(None));
    }

    #[test]
    fn bytes_of_salts_are_bounded() {
        let (mut salts, long) = (Salts::default(), |number: u64| {
            format!("{number}").repeat(1000)
        });
        for number in 0..1000 {
            salts.stored(
                &[EngineHash(number)],
                Tier::Device,
                Some(&long(number % 10)),
            );
        }
        assert_eq!(
            (salts.blocks.len(), salts.bytes),
            (MOST_BYTES / 1000, MOST_BYTES / 1000 * 1000)
        );
        assert_eq!(
            salts.of(EngineHash(999)),
            Err(Ambiguous),
            "a block that had no room may have any salt"
        );
        salts.stored(&[EngineHash(0)], Tier::Device, Some(&long(1)));
        assert_eq!(
            (salts.of(EngineHash(0)), salts.bytes),
            (Err(Ambiguous), MOST_BYTES / 1000 * 1000 - 1000)
        );
        let restored = Salts::restored(&salts.dump());
        assert_eq!(
            (restored.blocks.len(), restored.bytes),
            (salts.blocks.len(), salts.bytes)
        );
        (0..1000).for_each(|number| salts.removed(&[EngineHash(number)], Tier::Device));
        // The first block was stored twice.
        assert_eq!((salts.blocks.len(), salts.bytes), (1, 0));
        salts.removed(&[EngineHash(0)], Tier::Device);
        salts.stored(&[EngineHash(5000)], Tier::Device, Some(&long(5)));
        assert_eq!(salts.bytes, 1000);
        salts.clear();
        assert_eq!(salts.bytes, 0);
    }
}
