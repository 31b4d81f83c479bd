//! KV cache groups of one worker rank. A model with several kinds of attention has one cache group
//! per kind (hybrid KV cache). Store events carry the group's number and define its kind. The first
//! group that holds whole prefixes is the main group.

use std::num::NonZeroU32;

use hashbrown::HashMap;

use super::wire::{AttentionKind, PartialPrefix};
use warmroute_core::index::{GroupNeed, ReaderGroup, ReaderState};

/// Maximum number of groups, as in the index.
const MAX_GROUPS: usize = 64;

/// Groups as defined by store events.
#[derive(Debug, Default)]
pub(super) struct CacheGroups {
    kinds: HashMap<u32, (AttentionKind, Option<u32>)>,
    main: Option<u32>,
}

impl CacheGroups {
    pub(super) fn record(&mut self, group: u32, kind: AttentionKind, window: Option<u32>) {
        if self.kinds.len() >= MAX_GROUPS && !self.kinds.contains_key(&group) {
            return;
        }
        let entry = self.kinds.entry(group).or_insert((kind, window));
        // Engines may omit the window in later events.
        let window = window.or(entry.1.filter(|_| entry.0 == kind));
        *entry = (kind, window);
        if kind == AttentionKind::Main {
            self.main.get_or_insert(group);
        } else if self.main == Some(group) {
            self.main = None;
        }
    }

    /// Exports the groups for a reader that resumes from this one.
    pub(super) fn export(&self, state: &mut ReaderState) {
        let groups = self.kinds.iter().map(|(&id, &(kind, window))| ReaderGroup {
            id,
            kind: kind_number(kind),
            window,
        });
        state.groups = groups.collect();
        state.groups.sort_unstable_by_key(|group| group.id);
        state.main_group = self.main;
    }

    /// Imports the groups of the reader that this one resumes from.
    pub(super) fn import(state: &ReaderState) -> Self {
        let kinds = state
            .groups
            .iter()
            .take(MAX_GROUPS)
            .map(|group| (group.id, (kind_from_number(group.kind), group.window)));
        Self {
            kinds: kinds.collect(),
            main: state.main_group,
        }
    }

    pub(super) fn kind(&self, group: u32) -> Option<AttentionKind> {
        self.kinds.get(&group).map(|(kind, _)| *kind)
    }

    /// Returns true if another group is the main group.
    pub(super) fn is_secondary(&self, group: u32) -> bool {
        self.main.is_some_and(|main| main != group)
    }

    /// Returns the blocks of this group that an engine needs to reuse a prefix. A sliding window
    /// needs the blocks of its window. A recurrent state needs the last block. A group with an
    /// unknown window is assumed to need all blocks.
    pub(super) fn reuse_need(&self, group: u32, block_size: u32, stride: NonZeroU32) -> GroupNeed {
        match self.kinds.get(&group) {
            Some((AttentionKind::Partial(PartialPrefix::Window), Some(window))) => {
                // The window includes the token that is computed next.
                GroupNeed::Trailing {
                    blocks: window.saturating_sub(1).div_ceil(block_size),
                    stride,
                }
            }
            Some((AttentionKind::Partial(PartialPrefix::State), _)) => {
                GroupNeed::Trailing { blocks: 1, stride }
            }
            _ => GroupNeed::full(stride),
        }
    }
}

/// Kinds by their number in exports. New kinds are appended.
const KINDS: [AttentionKind; 5] = [
    AttentionKind::Unknown,
    AttentionKind::Main,
    AttentionKind::Partial(PartialPrefix::Window),
    AttentionKind::Partial(PartialPrefix::State),
    AttentionKind::Partial(PartialPrefix::Other),
];

fn kind_number(kind: AttentionKind) -> u8 {
    KINDS
        .iter()
        .position(|known| *known == kind)
        .unwrap_or_default() as u8
}

fn kind_from_number(number: u8) -> AttentionKind {
    KINDS
        .get(usize::from(number))
        .copied()
        .unwrap_or(AttentionKind::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_window_persists_and_groups_are_bounded() {
        let mut groups = CacheGroups::default();
        let window = AttentionKind::Partial(PartialPrefix::Window);
        let stride = NonZeroU32::MIN;
        groups.record(1, window, Some(33));
        groups.record(1, window, None);
        assert_eq!(
            groups.reuse_need(1, 16, stride),
            GroupNeed::Trailing { blocks: 2, stride }
        );
        groups.record(1, window, Some(17));
        assert_eq!(
            groups.reuse_need(1, 16, stride),
            GroupNeed::Trailing { blocks: 1, stride }
        );
        groups.record(1, AttentionKind::Main, None);
        groups.record(1, window, None);
        assert_eq!(
            groups.reuse_need(1, 16, stride),
            GroupNeed::full(stride),
            "a change of the kind clears the window"
        );
        (0..1000).for_each(|group| groups.record(group, window, None));
        assert_eq!(groups.kinds.len(), MAX_GROUPS);
    }
}
