//! What the cache groups beside the main one hold. They name blocks as the main group does, but only where the main
//! group has given a name its place is it known where in a prefix the block lies; so what they hold is kept by name.

use std::collections::HashMap;

use crate::block::EngineHash;
use crate::index::children::Mixed;
use crate::index::dump::Share;
use crate::index::needs::{Class, GroupNeed, Needs};
use crate::index::owners::{Layer, Layers};

/// Groups that can be told apart: bits of a word.
const MOST: usize = 64;

/// The groups of one rank.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: Vec<Group>,
    /// Whether there was a group more than that.
    more: bool,
    needs: Needs,
    /// Which groups hold a block.
    holds: Mixed<EngineHash, u64>,
    /// Copies beyond the first, by block and group.
    extra: HashMap<(EngineHash, usize), u32>,
    /// Since events were lost: those whose copies were counted since. The others may be gone.
    sure: Option<Mixed<EngineHash, u64>>,
}

/// One group; its place in the list is its bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// The engine's number.
    pub(super) id: u32,
    pub(super) need: GroupNeed,
    class: Option<usize>,
}

/// What the rank was taught of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lesson {
    /// Nothing new.
    Known,
    /// A new group.
    New,
    /// Another need of a known group.
    Changed,
    /// One group or class more than can be followed; `new` where this was not known before.
    TooMany {
        /// Whether the groups have changed by it.
        new: bool,
    },
}

impl Groups {
    pub(super) fn needs(&self) -> &Needs {
        &self.needs
    }

    pub(super) fn known(&self) -> &[Group] {
        &self.known
    }

    pub(super) fn find(&self, id: u32) -> Option<usize> {
        self.known.iter().position(|group| group.id == id)
    }

    /// Learns of a group.
    pub(super) fn learn(&mut self, id: u32, need: GroupNeed) -> Lesson {
        let at = self.find(id);
        if let Some(at) = at.filter(|&at| self.known[at].need == need) {
            return if self.known[at].class.is_none() && need != GroupNeed::Unknown {
                Lesson::TooMany { new: false }
            } else {
                Lesson::Known
            };
        }
        if at.is_none() && self.known.len() == MOST {
            self.needs.unknown = true;
            return Lesson::TooMany {
                new: !std::mem::replace(&mut self.more, true),
            };
        }
        let known = at.is_some();
        let at = at.unwrap_or_else(|| {
            self.known.push(Group {
                id,
                need,
                class: None,
            });
            self.known.len() - 1
        });
        self.known[at].need = need;
        self.classify();
        match self.known[at].class {
            None if need != GroupNeed::Unknown => Lesson::TooMany { new: true },
            _ if known => Lesson::Changed,
            _ => Lesson::New,
        }
    }

    /// Sorts the groups into classes.
    fn classify(&mut self) {
        self.needs = Needs {
            unknown: self.more,
            ..Needs::default()
        };
        for group in &mut self.known {
            group.class = None;
            let GroupNeed::Last { blocks, stride } = group.need else {
                self.needs.unknown = true;
                continue;
            };
            let class = Class { blocks, stride };
            let at = self
                .needs
                .classes
                .iter()
                .position(|known| *known == class)
                .unwrap_or(self.needs.classes.len());
            if at == Layer::CLASSES {
                self.needs.unknown = true;
                continue;
            }
            if at == self.needs.classes.len() {
                self.needs.classes.push(class);
            }
            group.class = Some(at);
        }
    }

    /// The classes all of whose groups hold a block.
    pub(super) fn layers(&self, engine: EngineHash) -> Layers {
        self.holds
            .get(&engine)
            .map_or(Layers::NONE, |&held| self.complete(held))
    }

    /// Those of them whose copies are all counted since events were lost.
    pub(super) fn sure(&self, engine: EngineHash) -> Layers {
        let Some(sure) = &self.sure else {
            return self.layers(engine);
        };
        sure.get(&engine)
            .map_or(Layers::NONE, |&sure| self.complete(sure))
    }

    fn complete(&self, held: u64) -> Layers {
        let mut layers = Layers::NONE;
        for class in 0..self.needs.classes.len() {
            let members = self
                .known
                .iter()
                .enumerate()
                .filter(|(_, group)| group.class == Some(class));
            if members.into_iter().all(|(at, _)| held & (1 << at) != 0) {
                layers = layers.with(Layer::class(class));
            }
        }
        layers
    }

    /// Enters one copy of a block; whether the group did not hold it before. None where the groups hold `most` blocks, or
    /// count further copies of as many, already.
    pub(super) fn store(&mut self, at: usize, engine: EngineHash, most: usize) -> Option<bool> {
        let is_known = self.holds.contains_key(&engine);
        let room = if is_known {
            self.extra.len() < most
        } else {
            self.holds.len() < most
        };
        room.then(|| self.store_one(at, engine))
    }

    fn store_one(&mut self, at: usize, engine: EngineHash) -> bool {
        let held = self.holds.entry(engine).or_insert(0);
        let bit = 1 << at;
        let is_new = *held & bit == 0;
        *held |= bit;
        let was_sure = self.set_sure(at, engine);
        if !is_new && was_sure {
            *self.extra.entry((engine, at)).or_insert(0) += 1;
        } else if !is_new {
            self.extra.remove(&(engine, at));
        }
        is_new
    }

    /// Copies of a block are counted now; whether they were before.
    fn set_sure(&mut self, at: usize, engine: EngineHash) -> bool {
        let Some(sure) = &mut self.sure else {
            return true;
        };
        let sure = sure.entry(engine).or_insert(0);
        let was = *sure & (1 << at) != 0;
        *sure |= 1 << at;
        was
    }

    /// Takes out one copy of a block; false if the group does not hold it.
    pub(super) fn remove(&mut self, at: usize, engine: EngineHash) -> bool {
        let bit = 1 << at;
        let Some(held) = self.holds.get_mut(&engine).filter(|held| **held & bit != 0) else {
            return false;
        };
        if let Some(extra) = self.extra.get_mut(&(engine, at)) {
            *extra -= 1;
            if *extra == 0 {
                self.extra.remove(&(engine, at));
            }
            return true;
        }
        *held &= !bit;
        if *held == 0 {
            self.holds.remove(&engine);
        }
        if let Some(all) = &mut self.sure
            && let Some(sure) = all.get_mut(&engine)
        {
            *sure &= !bit;
            if *sure == 0 {
                all.remove(&engine);
            }
        }
        true
    }

    /// What the groups of a class hold of a block is gone, as far as it was not counted since events were lost.
    pub(super) fn forget(&mut self, engine: EngineHash, class: usize) {
        let members = self
            .known
            .iter()
            .enumerate()
            .filter(|(_, group)| group.class == Some(class));
        self.drop_unsure(
            engine,
            members.fold(0, |members, (at, _)| members | 1 << at),
        );
    }

    /// The same of all groups, for each block that is not among those that have a place.
    pub(super) fn forget_others(&mut self, has_place: impl Fn(EngineHash) -> bool) {
        let others: Vec<_> = self
            .holds
            .keys()
            .copied()
            .filter(|engine| !has_place(*engine))
            .collect();
        others
            .into_iter()
            .for_each(|engine| self.drop_unsure(engine, u64::MAX));
    }

    fn drop_unsure(&mut self, engine: EngineHash, members: u64) {
        let Some(sure) = &self.sure else { return };
        let gone = members & !sure.get(&engine).unwrap_or(&0);
        let Some(held) = self.holds.get_mut(&engine) else {
            return;
        };
        let gone = gone & *held;
        *held &= !gone;
        if *held == 0 {
            self.holds.remove(&engine);
        }
        if !self.extra.is_empty() {
            (0..MOST)
                .filter(|at| gone & (1 << at) != 0)
                .for_each(|at| _ = self.extra.remove(&(engine, at)));
        }
    }

    pub(super) fn doubt(&mut self) {
        self.sure = Some(Mixed::default());
    }

    pub(super) fn shares(&self) -> impl Iterator<Item = Share> {
        let bits = |held: u64| (0..MOST).filter(move |at| held & (1 << at) != 0);
        self.holds.iter().flat_map(move |(&engine, &held)| {
            bits(held).map(move |at| Share {
                engine,
                group: at as u32,
                copies: 1 + self.extra.get(&(engine, at)).copied().unwrap_or(0),
                doubted: self
                    .sure
                    .as_ref()
                    .is_some_and(|sure| sure.get(&engine).unwrap_or(&0) & (1 << at) == 0),
            })
        })
    }

    /// Sets the copies and the doubt of a share. One that exceeded a limit is not held; further copies have the limit `most`.
    pub(super) fn set(&mut self, at: usize, share: &Share, most: usize) {
        if self
            .holds
            .get(&share.engine)
            .is_none_or(|held| held & (1 << at) == 0)
        {
            return;
        }
        if share.copies > 1 && self.extra.len() < most {
            self.extra.insert((share.engine, at), share.copies - 1);
        }
        if !share.doubted {
            self.set_sure(at, share.engine);
        }
    }

    /// Whether there are more groups than can be told apart.
    pub(super) fn more(&self) -> bool {
        self.more
    }

    pub(super) fn set_more(&mut self) {
        self.more = true;
        self.needs.unknown = true;
    }
}
