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
const MOST: usize = 1 << 22;

/// Salts by block.
#[derive(Debug, Default)]
pub(super) struct Salts {
    blocks: HashMap<EngineHash, Entry>,
    /// Whether this rank has ever named a salt.
    used: bool,
    /// Whether a block could not be remembered.
    full: bool,
}

#[derive(Debug)]
struct Entry {
    salt: Result<Option<Arc<str>>, Ambiguous>,
    /// By tier: one hash may be stored several times and then leaves as often.
    copies: [u32; Tier::ALL.len()],
    /// By tier: events were lost since the copies were counted, so some may be gone.
    doubted: [bool; Tier::ALL.len()],
}

impl Entry {
    /// Whether nothing is left of it. An ambiguous one stays: some copy of it may still be there.
    fn is_over(&self) -> bool {
        self.copies.iter().all(|copies| *copies == 0) && self.salt.is_ok()
    }
}

impl Salts {
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.full = false;
    }

    /// Events were lost for good. As in the index, the next store counts the copies of a block from one again.
    pub(super) fn doubt(&mut self) {
        self.blocks.values_mut().for_each(|entry| entry.doubted = entry.copies.map(|copies| copies > 0));
    }

    /// What is doubted is gone.
    pub(super) fn forget_doubted(&mut self) {
        self.blocks.retain(|_, entry| {
            for (copies, doubted) in entry.copies.iter_mut().zip(&mut entry.doubted) {
                if std::mem::take(doubted) {
                    *copies = 0;
                }
            }
            !entry.is_over()
        });
    }

    /// The salt to inherit from a parent. An unknown parent carries none.
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
            let fresh = || Entry { salt: Ok(salt.clone()), copies: Default::default(), doubted: Default::default() };
            let entry = self.blocks.entry(block).or_insert_with(fresh);
            let copies = &mut entry.copies[tier as usize];
            if std::mem::take(&mut entry.doubted[tier as usize]) {
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
                salts.doubt();
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
        salts.doubt();
        salts.stored(&block, Tier::Device, Some("a"));
        salts.removed(&block, Tier::Device);
        assert_eq!(salts.of(block[0]), Ok(Some("a")));
        salts.forget_doubted();
        assert_eq!(salts.of(block[0]), Ok(None));
    }
}
