//! Cache groups of one worker rank. A model that mixes kinds of attention keeps one cache per kind; its engine reports
//! each by number and explains the number when it stores. The first group that keeps whole prefixes is the main one.

use std::num::NonZeroU32;

use hashbrown::HashMap;

use super::wire::{Kind, Part};
use crate::index::{GroupNeed, Taught, TaughtGroup};

/// Groups that are remembered; the index tells no more apart.
const MOST: usize = 64;

/// What store events have taught.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: HashMap<u32, (Kind, Option<u32>)>,
    main: Option<u32>,
}

impl Groups {
    pub(super) fn learn(&mut self, group: u32, kind: Kind, window: Option<u32>) {
        if self.known.len() >= MOST && !self.known.contains_key(&group) {
            return;
        }
        let known = self.known.entry(group).or_insert((kind, window));
        // An engine need not repeat the window in every event.
        let window = window.or(known.1.filter(|_| known.0 == kind));
        *known = (kind, window);
        if kind == Kind::Main {
            self.main.get_or_insert(group);
        } else if self.main == Some(group) {
            self.main = None;
        }
    }

    /// What was learned, for whoever goes on in the place of this reader.
    pub(super) fn teach(&self, taught: &mut Taught) {
        let told = self.known.iter().map(|(&id, &(kind, window))| TaughtGroup {
            id,
            kind: number(kind),
            window,
        });
        taught.groups = told.collect();
        taught.groups.sort_unstable_by_key(|group| group.id);
        taught.main_group = self.main;
    }

    /// The same as another reader has learned it.
    pub(super) fn taught(taught: &Taught) -> Self {
        let known = taught
            .groups
            .iter()
            .take(MOST)
            .map(|group| (group.id, (kind(group.kind), group.window)));
        Self {
            known: known.collect(),
            main: taught.main_group,
        }
    }

    pub(super) fn kind(&self, group: u32) -> Option<Kind> {
        self.known.get(&group).map(|(kind, _)| *kind)
    }

    /// Whether another group is the main one.
    pub(super) fn is_further(&self, group: u32) -> bool {
        self.main.is_some_and(|main| main != group)
    }

    /// What an engine looks for in this group when it reuses a prefix: behind a window nothing is read, a recurrent state
    /// stands for all before it. Where events do not say how far back a group reads, it is taken to need everything.
    pub(super) fn need(&self, group: u32, block_size: u32, stride: NonZeroU32) -> GroupNeed {
        match self.known.get(&group) {
            Some((Kind::Partial(Part::Window), Some(window))) => {
                // The token to be computed lies in the window itself.
                GroupNeed::Last {
                    blocks: window.saturating_sub(1).div_ceil(block_size),
                    stride,
                }
            }
            Some((Kind::Partial(Part::State), _)) => GroupNeed::Last { blocks: 1, stride },
            _ => GroupNeed::whole(stride),
        }
    }
}

/// Kinds with their numbers; a new one gets a new number.
const KINDS: [Kind; 5] = [
    Kind::Unknown,
    Kind::Main,
    Kind::Partial(Part::Window),
    Kind::Partial(Part::State),
    Kind::Partial(Part::Other),
];

fn number(kind: Kind) -> u8 {
    KINDS
        .iter()
        .position(|known| *known == kind)
        .unwrap_or_default() as u8
}

fn kind(number: u8) -> Kind {
    KINDS
        .get(usize::from(number))
        .copied()
        .unwrap_or(Kind::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_was_told_once_stays_known_and_groups_are_bounded() {
        let mut groups = Groups::default();
        let (window, stride) = (Kind::Partial(Part::Window), NonZeroU32::MIN);
        groups.learn(1, window, Some(33));
        groups.learn(1, window, None);
        assert_eq!(
            groups.need(1, 16, stride),
            GroupNeed::Last { blocks: 2, stride }
        );
        groups.learn(1, window, Some(17));
        assert_eq!(
            groups.need(1, 16, stride),
            GroupNeed::Last { blocks: 1, stride }
        );
        groups.learn(1, Kind::Main, None);
        groups.learn(1, window, None);
        assert_eq!(
            groups.need(1, 16, stride),
            GroupNeed::whole(stride),
            "it was another group in between"
        );
        (0..1000).for_each(|group| groups.learn(group, window, None));
        assert_eq!(groups.known.len(), MOST);
    }
}
