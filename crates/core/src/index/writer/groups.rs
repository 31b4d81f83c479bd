//! Shares held by the cache groups other than the main one.
//!
//! All groups use the same engine hashes, but only the main group gives a hash its location in a
//! prefix. Shares are therefore stored by hash.

use std::collections::HashMap;

use crate::block::EngineHash;
use crate::index::cache_groups::{CacheGroupRules, GroupNeed, ReuseRule};
use crate::index::children::U64HashMap;
use crate::index::dump::GroupShare;
use crate::index::layers::{BlockLayer, LayerSet};

/// Maximum number of groups. Each group has one bit of a `u64`.
const MAX_GROUPS: usize = 64;

/// Cache groups of one rank.
#[derive(Debug, Default)]
pub(super) struct GroupHoldings {
    definitions: Vec<GroupDefinition>,
    /// Whether there are more groups than can be tracked.
    has_untracked: bool,
    rules: CacheGroupRules,
    /// Groups that hold a block, one bit each.
    held: U64HashMap<EngineHash, u64>,
    /// Copies beyond the first one, by hash and group.
    extra_copies: HashMap<(EngineHash, usize), u32>,
    /// After a gap: the groups whose copies were counted since, one bit each. Other copies may be
    /// gone.
    confirmed: Option<U64HashMap<EngineHash, u64>>,
}

/// Definition of a group. Its index in the list is its bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupDefinition {
    /// Number assigned by the engine.
    pub(super) id: u32,
    pub(super) need: GroupNeed,
    rule: Option<usize>,
}

/// Effect of an event on the definitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupChange {
    /// The group is known.
    Unchanged,
    /// The group is new.
    New,
    /// The requirement of a known group has changed.
    Changed,
    /// There are more groups or reuse rules than can be tracked.
    TooMany {
        /// Whether this changed the definitions.
        new: bool,
    },
}

impl GroupHoldings {
    pub(super) fn rules(&self) -> &CacheGroupRules {
        &self.rules
    }

    pub(super) fn known(&self) -> &[GroupDefinition] {
        &self.definitions
    }

    pub(super) fn find(&self, id: u32) -> Option<usize> {
        self.definitions.iter().position(|group| group.id == id)
    }

    /// Adds or updates the definition of a group.
    pub(super) fn define(&mut self, id: u32, need: GroupNeed) -> GroupChange {
        let at = self.find(id);
        if let Some(at) = at.filter(|&at| self.definitions[at].need == need) {
            return if self.definitions[at].rule.is_none() && need != GroupNeed::Unknown {
                GroupChange::TooMany { new: false }
            } else {
                GroupChange::Unchanged
            };
        }
        if at.is_none() && self.definitions.len() == MAX_GROUPS {
            self.rules.has_unknown = true;
            return GroupChange::TooMany {
                new: !std::mem::replace(&mut self.has_untracked, true),
            };
        }
        let known = at.is_some();
        let at = at.unwrap_or_else(|| {
            self.definitions.push(GroupDefinition {
                id,
                need,
                rule: None,
            });
            self.definitions.len() - 1
        });
        self.definitions[at].need = need;
        self.assign_rules();
        match self.definitions[at].rule {
            None if need != GroupNeed::Unknown => GroupChange::TooMany { new: true },
            _ if known => GroupChange::Changed,
            _ => GroupChange::New,
        }
    }

    /// Assigns a reuse rule to each group.
    fn assign_rules(&mut self) {
        self.rules = CacheGroupRules {
            has_unknown: self.has_untracked,
            ..CacheGroupRules::default()
        };
        for group in &mut self.definitions {
            group.rule = None;
            let GroupNeed::Trailing { blocks, stride } = group.need else {
                self.rules.has_unknown = true;
                continue;
            };
            let rule = ReuseRule { blocks, stride };
            let at = self
                .rules
                .rules
                .iter()
                .position(|known| *known == rule)
                .unwrap_or(self.rules.rules.len());
            if at == BlockLayer::MAX_RULES {
                self.rules.has_unknown = true;
                continue;
            }
            if at == self.rules.rules.len() {
                self.rules.rules.push(rule);
            }
            group.rule = Some(at);
        }
    }

    /// Returns the layers of a block: the rules whose groups all hold it.
    pub(super) fn held_layers(&self, engine: EngineHash) -> LayerSet {
        self.held
            .get(&engine)
            .map_or(LayerSet::NONE, |&held| self.complete_layers(held))
    }

    /// Returns the layers of a block whose copies were all counted since the last gap.
    pub(super) fn counted_layers(&self, engine: EngineHash) -> LayerSet {
        let Some(counted) = &self.confirmed else {
            return self.held_layers(engine);
        };
        counted
            .get(&engine)
            .map_or(LayerSet::NONE, |&counted| self.complete_layers(counted))
    }

    fn complete_layers(&self, held: u64) -> LayerSet {
        let mut layers = LayerSet::NONE;
        for rule in 0..self.rules.rules.len() {
            let members = self
                .definitions
                .iter()
                .enumerate()
                .filter(|(_, group)| group.rule == Some(rule));
            if members.into_iter().all(|(at, _)| held & (1 << at) != 0) {
                layers = layers.with(BlockLayer::rule(rule));
            }
        }
        layers
    }

    /// Adds one copy of a block. Returns whether the group did not hold it before. Returns `None`
    /// if the limit `max` of blocks or of further copies is reached.
    pub(super) fn store(&mut self, at: usize, engine: EngineHash, max: usize) -> Option<bool> {
        let is_known = self.held.contains_key(&engine);
        let room = if is_known {
            self.extra_copies.len() < max
        } else {
            self.held.len() < max
        };
        room.then(|| self.store_one(at, engine))
    }

    fn store_one(&mut self, at: usize, engine: EngineHash) -> bool {
        let held = self.held.entry(engine).or_insert(0);
        let bit = 1 << at;
        let is_new = *held & bit == 0;
        *held |= bit;
        let was_counted = self.confirm_copies(at, engine);
        if !is_new && was_counted {
            *self.extra_copies.entry((engine, at)).or_insert(0) += 1;
        } else if !is_new {
            self.extra_copies.remove(&(engine, at));
        }
        is_new
    }

    /// Marks the copies of a block as counted. Returns whether they were counted before.
    fn confirm_copies(&mut self, at: usize, engine: EngineHash) -> bool {
        let Some(counted) = &mut self.confirmed else {
            return true;
        };
        let counted = counted.entry(engine).or_insert(0);
        let was_counted = *counted & (1 << at) != 0;
        *counted |= 1 << at;
        was_counted
    }

    /// Removes one copy of a block. Returns whether there was one.
    pub(super) fn remove(&mut self, at: usize, engine: EngineHash) -> bool {
        let bit = 1 << at;
        let Some(held) = self.held.get_mut(&engine).filter(|held| **held & bit != 0) else {
            return false;
        };
        if let Some(extra) = self.extra_copies.get_mut(&(engine, at)) {
            *extra -= 1;
            if *extra == 0 {
                self.extra_copies.remove(&(engine, at));
            }
            return true;
        }
        *held &= !bit;
        if *held == 0 {
            self.held.remove(&engine);
        }
        if let Some(all) = &mut self.confirmed
            && let Some(counted) = all.get_mut(&engine)
        {
            *counted &= !bit;
            if *counted == 0 {
                all.remove(&engine);
            }
        }
        true
    }

    /// Removes the copies of a block that were not counted since the last gap, for the groups of
    /// one rule.
    pub(super) fn remove_unconfirmed(&mut self, engine: EngineHash, rule: usize) {
        let members = self
            .definitions
            .iter()
            .enumerate()
            .filter(|(_, group)| group.rule == Some(rule));
        self.drop_unconfirmed(
            engine,
            members.fold(0, |members, (at, _)| members | 1 << at),
        );
    }

    /// Removes the copies that were not counted since the last gap, for all groups and all blocks
    /// without a location.
    pub(super) fn remove_unconfirmed_except(&mut self, has_location: impl Fn(EngineHash) -> bool) {
        let others: Vec<_> = self
            .held
            .keys()
            .copied()
            .filter(|engine| !has_location(*engine))
            .collect();
        others
            .into_iter()
            .for_each(|engine| self.drop_unconfirmed(engine, u64::MAX));
    }

    fn drop_unconfirmed(&mut self, engine: EngineHash, members: u64) {
        let Some(counted) = &self.confirmed else {
            return;
        };
        let dropped = members & !counted.get(&engine).unwrap_or(&0);
        let Some(held) = self.held.get_mut(&engine) else {
            return;
        };
        let dropped = dropped & *held;
        *held &= !dropped;
        if *held == 0 {
            self.held.remove(&engine);
        }
        if !self.extra_copies.is_empty() {
            (0..MAX_GROUPS)
                .filter(|at| dropped & (1 << at) != 0)
                .for_each(|at| _ = self.extra_copies.remove(&(engine, at)));
        }
    }

    pub(super) fn mark_unconfirmed(&mut self) {
        self.confirmed = Some(U64HashMap::default());
    }

    pub(super) fn shares(&self) -> impl Iterator<Item = GroupShare> {
        let bits = |held: u64| (0..MAX_GROUPS).filter(move |at| held & (1 << at) != 0);
        self.held.iter().flat_map(move |(&engine, &held)| {
            bits(held).map(move |at| GroupShare {
                engine,
                group: at as u32,
                copies: 1 + self.extra_copies.get(&(engine, at)).copied().unwrap_or(0),
                is_stale: self
                    .confirmed
                    .as_ref()
                    .is_some_and(|counted| counted.get(&engine).unwrap_or(&0) & (1 << at) == 0),
            })
        })
    }

    /// Restores the copies of a share. A share that exceeded a limit is skipped. `max` limits the
    /// further copies.
    pub(super) fn restore_share(&mut self, at: usize, share: &GroupShare, max: usize) {
        if self
            .held
            .get(&share.engine)
            .is_none_or(|held| held & (1 << at) == 0)
        {
            return;
        }
        if share.copies > 1 && self.extra_copies.len() < max {
            self.extra_copies
                .insert((share.engine, at), share.copies - 1);
        }
        if !share.is_stale {
            self.confirm_copies(at, share.engine);
        }
    }

    /// Returns whether there are more groups than can be tracked.
    pub(super) fn has_untracked(&self) -> bool {
        self.has_untracked
    }

    pub(super) fn set_untracked(&mut self) {
        self.has_untracked = true;
        self.rules.has_unknown = true;
    }
}
