//! What is certain of a rank's contents after events of it were lost. A content is certain again when it is stored once
//! more, when a block that follows it is stored on the device, or when an answer found it cached: an engine says nothing of
//! a cache hit, so those that are used most are never told again. What is left was not used since, and is gone when the
//! engine has evicted as many blocks that were stored since: it evicts what was used longest ago. Nothing here walks over
//! the cache when events are lost, because a bad link loses some with every batch.

use super::children::Mixed;
use super::writer::Place;
use crate::tier::Tier;

/// Certainty of one rank.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Contents with a place, once per tier.
    placed: u64,
    /// While anything is doubted.
    open: Option<Open>,
}

/// Doubts that are not settled.
#[derive(Debug)]
struct Open {
    /// Gaps so far.
    generation: u32,
    /// What was not heard of since this one is forgotten next.
    horizon: u32,
    /// In which generation a content was last heard of, since the horizon.
    heard: Mixed<u64, u32>,
    /// Those of this generation.
    certain: u64,
    /// Blocks evicted that were stored since the horizon.
    evicted: u64,
}

impl Open {
    fn since(generation: u32) -> Self {
        Self { generation, horizon: generation, heard: Mixed::default(), certain: 0, evicted: 0 }
    }
}

/// A forgetting that looks at all blocks is worth it after this share of them was evicted.
const WORTH: u64 = 16;

impl Doubts {
    /// Events were lost: from now on nothing is certain.
    pub(super) fn gap(&mut self, generation: u32) {
        match &mut self.open {
            Some(open) => (open.generation, open.certain) = (generation, 0),
            None if self.placed > 0 => self.open = Some(Open::since(generation)),
            None => {}
        }
    }

    /// Nothing is held.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether anything may be doubted.
    pub(super) fn any(&self) -> bool {
        self.open.is_some()
    }

    /// Contents that may be gone.
    pub(super) fn doubted(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| self.placed - open.certain)
    }

    /// So many contents got into a tier.
    pub(super) fn entered(&mut self, count: u64) {
        self.placed += count;
    }

    /// A content left a tier.
    pub(super) fn left(&mut self, place: Place, tier: Tier) {
        self.placed -= 1;
        let Some(open) = &mut self.open else { return };
        if open.heard.remove(&key(place, tier)) == Some(open.generation) {
            open.certain -= 1;
        }
        self.close();
    }

    /// A content is there; whether that is news.
    pub(super) fn hear(&mut self, place: Place, tier: Tier) -> bool {
        let Some(open) = &mut self.open else { return false };
        let news = open.heard.insert(key(place, tier), open.generation) != Some(open.generation);
        open.certain += u64::from(news);
        news
    }

    /// A block was evicted whose copies were last counted in this generation.
    pub(super) fn evicted(&mut self, counted: u32) {
        if let Some(open) = self.open.as_mut().filter(|open| counted >= open.horizon) {
            open.evicted += 1;
        }
    }

    /// Nothing is left to doubt where all was heard of.
    pub(super) fn close(&mut self) {
        if self.doubted() == 0 {
            self.open = None;
        }
    }

    /// The generation before which contents were last heard of that are gone, where there are some.
    pub(super) fn due(&self) -> Option<u32> {
        let open = self.open.as_ref()?;
        let old = self.placed - open.heard.len() as u64;
        (open.evicted >= old.max(self.placed / WORTH).max(1)).then_some(open.horizon)
    }

    /// Whether a content was not heard of since the horizon.
    pub(super) fn is_old(&self, place: Place, tier: Tier) -> bool {
        self.open.as_ref().is_some_and(|open| !open.heard.contains_key(&key(place, tier)))
    }

    /// Those that were old are forgotten; what was heard of before this generation is looked after next.
    pub(super) fn forgotten(&mut self) {
        if let Some(open) = &mut self.open {
            let generation = open.generation;
            open.heard.retain(|_, heard| *heard == generation);
            (open.horizon, open.evicted) = (generation, 0);
        }
        self.close();
    }
}

#[cfg(test)]
impl Doubts {
    /// Holds the counts against what is held.
    pub(super) fn check(&self, held: &std::collections::HashSet<(Place, Tier)>) {
        assert_eq!(self.placed, held.len() as u64);
        let Some(open) = &self.open else { return };
        let heard = held.iter().filter_map(|(place, tier)| open.heard.get(&key(*place, *tier)));
        assert_eq!(heard.clone().count(), open.heard.len(), "heard of what is not held");
        assert_eq!(heard.filter(|heard| **heard == open.generation).count() as u64, open.certain);
        assert!(self.doubted() > 0, "nothing is left to doubt");
    }
}

fn key(place: Place, tier: Tier) -> u64 {
    u64::from(place.block.0) << 16 | u64::from(place.shard) << 8 | tier as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::trie::BlockId;

    fn place(block: u32) -> Place {
        Place { shard: 3, block: BlockId(block) }
    }

    #[test]
    fn doubts_end_when_all_was_heard_of_or_left_and_losing_events_again_and_again_costs_nothing() {
        let mut doubts = Doubts::default();
        doubts.gap(1);
        assert!(!doubts.any(), "nothing is held");
        doubts.entered(3);
        for generation in 2..1_000_000 {
            doubts.gap(generation);
        }
        assert_eq!(doubts.doubted(), 3);
        assert!(doubts.hear(place(1), Tier::Device) && !doubts.hear(place(1), Tier::Device));
        doubts.left(place(2), Tier::Device);
        assert_eq!(doubts.doubted(), 1);
        doubts.gap(1_000_000);
        assert_eq!(doubts.doubted(), 2, "what was heard of before");
        assert!(doubts.hear(place(1), Tier::Device) && doubts.hear(place(3), Tier::Device));
        doubts.close();
        assert!(!doubts.any());
    }

    #[test]
    fn what_was_not_heard_of_is_gone_after_as_many_evictions_however_many_gaps_there_are() {
        let mut doubts = Doubts::default();
        doubts.entered(10);
        doubts.gap(1);
        for block in 0..4 {
            doubts.hear(place(block), Tier::Device);
        }
        for generation in 2..8 {
            assert_eq!(doubts.due(), None);
            doubts.evicted(0);
            doubts.gap(generation);
            doubts.evicted(generation);
        }
        assert_eq!(doubts.due(), Some(1), "six of six");
        assert!(doubts.is_old(place(4), Tier::Device) && !doubts.is_old(place(3), Tier::Device));
        assert!(doubts.is_old(place(3), Tier::HostPinned), "another tier");
        (4..10).for_each(|block| doubts.left(place(block), Tier::Device));
        doubts.forgotten();
        assert_eq!((doubts.doubted(), doubts.due()), (4, None), "they were heard of before the last gap");
    }
}
