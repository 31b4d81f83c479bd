//! How much of a prefix a model with several cache groups can reuse. An engine of such a model looks for the longest
//! prefix that every group can serve: full attention needs all of it, a sliding window only what lies in front of its end,
//! a state-space layer only the state at its end. Groups with the same need are one class, and the tries know per block
//! whether all groups of a class hold it.

use std::num::NonZeroU32;
use std::ops::Range;

use super::owners::{Layer, Layers};

/// What a cache group must hold so that a prefix can be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupNeed {
    /// The last blocks of the prefix, or all of them where it has fewer.
    Last {
        /// How many of the group's own blocks.
        blocks: u32,
        /// How many blocks of the index one of them covers; it bears the name of the last.
        stride: NonZeroU32,
    },
    /// It cannot be told, so no prefix is believed to be reusable.
    Unknown,
}

impl GroupNeed {
    /// Every block of the prefix.
    pub fn whole(stride: NonZeroU32) -> Self {
        Self::Last {
            blocks: u32::MAX,
            stride,
        }
    }
}

/// One class of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) blocks: u32,
    pub(super) stride: NonZeroU32,
}

/// What the groups of one rank need, by class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) classes: Vec<Class>,
    /// Whether there is a group of which nothing is known.
    pub(super) unknown: bool,
}

impl Class {
    /// The last blocks of the index that the groups of this class use of a prefix of so many.
    pub(super) fn used(self, blocks: usize) -> impl Iterator<Item = usize> {
        let stride = self.stride.get() as usize;
        let all = if blocks.is_multiple_of(stride) {
            blocks / stride
        } else {
            0
        };
        (all.saturating_sub(self.blocks as usize)..all).map(move |own| (own + 1) * stride - 1)
    }
}

/// How far back one class reaches without a gap.
#[derive(Clone, Copy)]
struct Reach {
    blocks: u32,
    /// Whether there was no gap since the first block.
    whole: bool,
}

impl Needs {
    /// The length of the longest prefix of at most `most` blocks that every class can serve, given what it holds along the
    /// path.
    pub(super) fn reusable(
        &self,
        path: impl Iterator<Item = (Range<u32>, Layers)>,
        most: u32,
    ) -> u32 {
        let Some(step) = self.step() else { return 0 };
        let mut reaches = [Reach {
            blocks: 0,
            whole: true,
        }; Layer::CLASSES];
        let mut best = 0;
        for (run, layers) in path.take_while(|(run, _)| run.start < most) {
            let mut first = Some(run.start + 1);
            for ((number, class), reach) in self.classes.iter().enumerate().zip(&mut reaches) {
                let from = class.serves(&run, layers.has(Layer::class(number)), reach);
                first = first.zip(from).map(|(a, b)| a.max(b));
            }
            let end = run.end.min(most);
            let longest = end - end % step;
            if first.is_some_and(|first| first <= longest) {
                best = longest;
            }
        }
        best
    }

    /// Prefixes end where blocks of all groups end.
    fn step(&self) -> Option<u32> {
        let step = self.classes.iter().try_fold(1u32, |step, class| {
            let stride = class.stride.get();
            (step / gcd(step, stride)).checked_mul(stride)
        });
        step.filter(|_| !self.unknown)
    }
}

impl Class {
    /// The shortest prefix ending in a run that this class can serve; every longer one that ends there is served as well.
    fn serves(&self, run: &Range<u32>, held: bool, reach: &mut Reach) -> Option<u32> {
        let stride = self.stride.get();
        let (before, after) = (run.start / stride, run.end / stride);
        if before == after {
            return None;
        }
        if !held {
            *reach = Reach {
                blocks: 0,
                whole: false,
            };
            return (self.blocks == 0).then_some(run.start + 1);
        }
        let missing = if reach.whole {
            1
        } else {
            self.blocks.saturating_sub(reach.blocks).max(1)
        };
        reach.blocks = reach.blocks.saturating_add(after - before);
        before.saturating_add(missing).checked_mul(stride)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, block by block.
    fn naive(needs: &Needs, path: &[(Range<u32>, Layers)], most: u32) -> u32 {
        let holds = |class: usize, block: u32| {
            path.iter()
                .any(|(run, layers)| run.contains(&block) && layers.has(Layer::class(class)))
        };
        let end = path.last().map_or(0, |(run, _)| run.end).min(most);
        let serves = |length: u32, number: usize, class: &Class| {
            let stride = class.stride.get();
            let blocks = length / stride;
            let wanted = blocks.saturating_sub(class.blocks)..blocks;
            length.is_multiple_of(stride)
                && wanted
                    .into_iter()
                    .all(|block| holds(number, (block + 1) * stride - 1))
        };
        let fits = |length: &u32| {
            needs
                .classes
                .iter()
                .enumerate()
                .all(|(number, class)| serves(*length, number, class))
        };
        (0..=end)
            .rev()
            .find(fits)
            .filter(|_| !needs.unknown)
            .unwrap_or(0)
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn the_longest_prefix_is_the_one_the_definition_gives(
            runs in proptest::collection::vec((1..6u32, 0..16u8), 0..12),
            classes in proptest::collection::vec((0..6u32, 1..4u32), 0..4),
            most in 0..40u32,
        ) {
            let mut start = 0;
            let path: Vec<_> = runs.into_iter().map(|(length, bits)| {
                let layers = (0..Layer::CLASSES).filter(|class| bits & (1 << class) != 0);
                let layers = layers.fold(Layers::NONE, |layers, class| layers.with(Layer::class(class)));
                start += length;
                (start - length..start, layers)
            }).collect();
            let class = |(blocks, stride): (u32, u32)| Class {
                blocks: if blocks == 5 { u32::MAX } else { blocks },
                stride: NonZeroU32::new(stride).unwrap(),
            };
            let needs = Needs { classes: classes.into_iter().map(class).collect(), unknown: false };
            let expected = naive(&needs, &path, most);
            proptest::prop_assert_eq!(needs.reusable(path.iter().cloned(), most), expected);
        }
    }
}
