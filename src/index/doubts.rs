//! What is certain of a rank's contents after events of it were lost. A content is certain again when it is stored once
//! more, when a block that follows it is stored on the device, or when an answer found it cached: an engine says nothing of
//! a cache hit, so those that are used most are never told again. What is left was not used since, and is gone when the
//! engine has evicted as many blocks that were stored since: it evicts what was used longest ago. Each tier evicts on its
//! own, and so do the cache groups beside the main one, hence each layer has doubts of its own. Nothing here walks over the
//! cache when events are lost, because a bad link loses some with every batch.

use super::children::Mixed;
use super::owners::{Layer, Layers};
use super::writer::Place;
use crate::tier::Tier;

/// Certainty of one rank.
#[derive(Debug, Default)]
pub(super) struct Doubts([OfLayer; Layer::COUNT]);

/// Certainty of one layer.
#[derive(Debug, Default)]
struct OfLayer {
    /// Contents with a place.
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
    /// Contents that left and were stored since the horizon.
    evicted: u64,
}

impl Open {
    fn since(generation: u32) -> Self {
        Self {
            generation,
            horizon: generation,
            heard: Mixed::default(),
            certain: 0,
            evicted: 0,
        }
    }
}

/// A forgetting that looks at all blocks is worth it after this share of them was evicted.
const WORTH: u64 = 16;

impl Doubts {
    /// Events were lost: from now on nothing is certain.
    pub(super) fn gap(&mut self, generation: u32) {
        for layer in &mut self.0 {
            match &mut layer.open {
                Some(open) => (open.generation, open.certain) = (generation, 0),
                None if layer.placed > 0 => layer.open = Some(Open::since(generation)),
                None => {}
            }
        }
    }

    /// Nothing is held.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether anything may be doubted.
    pub(super) fn any(&self) -> bool {
        self.0.iter().any(|layer| layer.open.is_some())
    }

    /// Contents that may be gone of what a prefix on the device takes: blocks there, and the cache groups' shares of them.
    pub(super) fn doubted(&self) -> u64 {
        let of_device = |layer: &Layer| layer.tier().is_none_or(|tier| tier == Tier::Device);
        Layer::all()
            .filter(of_device)
            .map(|layer| self.of(layer).doubted())
            .sum()
    }

    /// Contents of a layer.
    pub(super) fn placed(&self, layer: impl Into<Layer>) -> u64 {
        self.of(layer.into()).placed
    }

    /// So many contents got into a layer.
    pub(super) fn entered(&mut self, layer: impl Into<Layer>, count: u64) {
        self.of_mut(layer.into()).placed += count;
    }

    /// Contents left a layer.
    pub(super) fn left_all(&mut self, places: impl ExactSizeIterator<Item = Place>, layer: Layer) {
        let of = self.of_mut(layer);
        if of.open.is_none() {
            of.placed -= places.len() as u64;
        } else {
            places.for_each(|place| self.left(place, layer));
        }
    }

    /// A content left a layer.
    fn left(&mut self, place: Place, layer: Layer) {
        let of = self.of_mut(layer);
        of.placed -= 1;
        let Some(open) = &mut of.open else { return };
        let heard = open.heard.remove(&key(place));
        open.certain -= u64::from(heard == Some(open.generation));
        // Of blocks the writer knows better which of them were stored.
        open.evicted += u64::from(heard.is_some() && layer.tier().is_none());
        of.close();
    }

    /// A content is there; whether that is news.
    pub(super) fn hear(&mut self, place: Place, layer: impl Into<Layer>) -> bool {
        let Some(open) = &mut self.of_mut(layer.into()).open else {
            return false;
        };
        let news = open.heard.insert(key(place), open.generation) != Some(open.generation);
        open.certain += u64::from(news);
        news
    }

    /// A block was evicted from a tier whose copies there were last counted in this generation.
    pub(super) fn evicted(&mut self, tier: Tier, counted: u32) {
        let open = self.of_mut(tier.into()).open.as_mut();
        if let Some(open) = open.filter(|open| counted >= open.horizon) {
            open.evicted += 1;
        }
    }

    /// Nothing is left to doubt where all was heard of.
    pub(super) fn close(&mut self) {
        self.0.iter_mut().for_each(OfLayer::close);
    }

    /// The layers in which contents are gone that were not heard of, where it takes a look at so many names to find them.
    pub(super) fn due(&self, names: u64) -> Layers {
        Layer::all()
            .filter(|layer| self.of(*layer).is_due(names))
            .fold(Layers::NONE, Layers::with)
    }

    /// The generation before which contents were last heard of that were not heard of since.
    pub(super) fn horizon(&self, layer: impl Into<Layer>) -> Option<u32> {
        Some(self.of(layer.into()).open.as_ref()?.horizon)
    }

    /// Whether a content was not heard of since the horizon.
    pub(super) fn is_old(&self, place: Place, layer: impl Into<Layer>) -> bool {
        self.of(layer.into())
            .open
            .as_ref()
            .is_some_and(|open| !open.heard.contains_key(&key(place)))
    }

    /// Those that were old are forgotten; what was heard of before this generation is looked after next.
    pub(super) fn forgotten(&mut self, layer: Layer) {
        let of = self.of_mut(layer);
        if let Some(open) = &mut of.open {
            let generation = open.generation;
            open.heard.retain(|_, heard| *heard == generation);
            (open.horizon, open.evicted) = (generation, 0);
        }
        of.close();
    }

    fn of(&self, layer: Layer) -> &OfLayer {
        &self.0[layer.at()]
    }

    fn of_mut(&mut self, layer: Layer) -> &mut OfLayer {
        &mut self.0[layer.at()]
    }
}

impl OfLayer {
    fn doubted(&self) -> u64 {
        self.open
            .as_ref()
            .map_or(0, |open| self.placed - open.certain)
    }

    fn close(&mut self) {
        if self.doubted() == 0 {
            self.open = None;
        }
    }

    fn is_due(&self, names: u64) -> bool {
        let Some(open) = &self.open else { return false };
        let old = self.placed - open.heard.len() as u64;
        open.evicted >= old.max(names / WORTH).max(1)
    }
}

#[cfg(test)]
impl Doubts {
    /// Holds the counts against what is held.
    pub(super) fn check(&self, held: &std::collections::HashSet<(Place, Layer)>) {
        for layer in Layer::all() {
            let of = self.of(layer);
            let held: Vec<Place> = held
                .iter()
                .filter(|(_, of)| *of == layer)
                .map(|(place, _)| *place)
                .collect();
            assert_eq!(of.placed, held.len() as u64, "{layer:?}");
            let Some(open) = &of.open else { continue };
            let heard = held.iter().filter_map(|place| open.heard.get(&key(*place)));
            assert_eq!(
                heard.clone().count(),
                open.heard.len(),
                "heard of what is not held"
            );
            assert_eq!(
                heard.filter(|heard| **heard == open.generation).count() as u64,
                open.certain
            );
            assert!(of.doubted() > 0, "nothing is left to doubt");
        }
    }
}

fn key(place: Place) -> u64 {
    u64::from(place.block.0) << 8 | u64::from(place.shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::trie::BlockId;

    fn place(block: u32) -> Place {
        Place {
            shard: 3,
            block: BlockId(block),
        }
    }

    #[test]
    fn doubts_end_when_all_was_heard_of_or_left_and_losing_events_again_and_again_costs_nothing() {
        let mut doubts = Doubts::default();
        doubts.gap(1);
        assert!(!doubts.any(), "nothing is held");
        doubts.entered(Tier::Device, 3);
        for generation in 2..1_000_000 {
            doubts.gap(generation);
        }
        assert_eq!(doubts.doubted(), 3);
        assert!(doubts.hear(place(1), Tier::Device) && !doubts.hear(place(1), Tier::Device));
        doubts.left_all([place(2)].into_iter(), Tier::Device.into());
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
        doubts.entered(Tier::Device, 10);
        doubts.entered(Tier::HostPinned, 10);
        doubts.gap(1);
        for block in 0..4 {
            doubts.hear(place(block), Tier::Device);
        }
        for generation in 2..8 {
            assert_eq!(doubts.due(20), Layers::NONE);
            doubts.evicted(Tier::Device, 0);
            doubts.gap(generation);
            doubts.evicted(Tier::Device, generation);
        }
        assert_eq!(
            doubts.due(20),
            Layers::one(Tier::Device),
            "six of six, and nothing in another tier"
        );
        assert_eq!(doubts.due(200), Layers::NONE, "not worth it");
        assert_eq!(doubts.horizon(Tier::Device), Some(1));
        assert!(doubts.is_old(place(4), Tier::Device) && !doubts.is_old(place(3), Tier::Device));
        assert!(doubts.is_old(place(3), Tier::HostPinned), "another tier");
        doubts.left_all((4..10).map(place), Tier::Device.into());
        doubts.forgotten(Tier::Device.into());
        assert_eq!(
            (doubts.doubted(), doubts.due(20)),
            (4, Layers::NONE),
            "they were heard of before the last gap"
        );
    }
}
