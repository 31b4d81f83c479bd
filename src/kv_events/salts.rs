//! Which salt a stored block carries. Engines name a salt at the first block of a prompt only, so a later store has to
//! inherit it from its parent. While a rank has never named a salt nothing is remembered: then every block has none, and
//! the memory for fleets without tenants stays at zero.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::block::EngineHash;
use crate::tier::Tier;

/// The parent was stored under different salts, so that inheriting would be a guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ambiguous;

/// Blocks that are remembered per rank. Beyond, the salts of further ones cannot be told, and what follows them is dropped.
const MOST: usize = if cfg!(test) { 1 << 12 } else { 1 << 22 };

/// Salts by block.
#[derive(Debug, Default)]
pub(super) struct Salts {
    blocks: HashMap<EngineHash, Entry>,
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
}

impl Salts {
    /// Whether no salt was ever named.
    pub(super) fn is_empty(&self) -> bool {
        !self.used
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.full = false;
    }

    /// Events were lost for good, so often by now. As in the index, the next store counts the copies of a block from one
    /// again.
    pub(super) fn doubt(&mut self, gaps: u32) {
        self.gaps = gaps;
    }

    /// These are gone.
    pub(super) fn forget(&mut self, names: &[(EngineHash, Tier)]) {
        for (block, tier) in names {
            let Some(entry) = self.blocks.get_mut(block) else { continue };
            entry.copies[*tier as usize] = 0;
            if entry.is_over() {
                self.blocks.remove(block);
            }
        }
    }

    /// The salt of a block itself, where it is known.
    pub(super) fn own(&self, block: EngineHash) -> Option<&str> {
        self.blocks.get(&block)?.salt.as_ref().ok()?.as_deref()
    }

    /// Whether the salt of a block is known, so that what follows it is known to have the same.
    pub(super) fn knows(&self, block: EngineHash) -> bool {
        self.blocks.contains_key(&block)
    }

    /// The salt to inherit from a parent. An unknown parent carries none: it was there before any salt was named, or it is
    /// gone, and then what follows it is dropped.
    pub(super) fn of(&self, parent: EngineHash) -> Result<Option<&str>, Ambiguous> {
        match self.blocks.get(&parent) {
            None if self.full => Err(Ambiguous),
            None => Ok(None),
            Some(entry) => entry.salt.as_ref().map(Option::as_deref).map_err(|&ambiguous| ambiguous),
        }
    }

    pub(super) fn stored(&mut self, blocks: &[EngineHash], tier: Tier, salt: Option<&str>) {
        self.used |= salt.is_some();
        if !self.used {
            return;
        }
        let salt: Option<Arc<str>> = salt.map(Arc::from);
        for &block in blocks {
            if self.blocks.len() >= MOST && !self.blocks.contains_key(&block) {
                self.full = true;
                continue;
            }
            let fresh = || Entry { salt: Ok(salt.clone()), copies: Default::default(), counted: Default::default() };
            let entry = self.blocks.entry(block).or_insert_with(fresh);
            let copies = &mut entry.copies[tier as usize];
            if std::mem::replace(&mut entry.counted[tier as usize], self.gaps) != self.gaps {
                *copies = 0;
            }
            *copies = copies.saturating_add(1);
            if entry.salt.as_ref().is_ok_and(|known| *known != salt) {
                entry.salt = Err(Ambiguous);
            }
        }
    }

    /// Forgets blocks whose last copy left.
    pub(super) fn removed(&mut self, blocks: &[EngineHash], tier: Tier) {
        for block in blocks {
            let Some(entry) = self.blocks.get_mut(block) else { continue };
            let copies = &mut entry.copies[tier as usize];
            *copies = copies.saturating_sub(1);
            if entry.is_over() {
                self.blocks.remove(block);
            }
        }
    }
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
}
