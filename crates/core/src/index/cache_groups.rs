//! Computes the reusable prefix for a model with several KV cache groups (vLLM: hybrid KV cache).
//!
//! The engine reuses the longest prefix that every group can serve. Full attention needs all of it,
//! a sliding window only the blocks before its end, and a state-space layer only the state at its
//! end. Groups with the same requirement share a rule, and the tries record per block whether all
//! groups of a rule hold it.

use std::num::NonZeroU32;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::layers::{BlockLayer, LayerSet};

/// Blocks that a cache group must hold so that a prefix can be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GroupNeed {
    /// The last blocks of the prefix, or all of them if it has fewer.
    Trailing {
        /// Number of the group's own blocks.
        blocks: u32,
        /// Number of index blocks that one of them covers. Its engine hash is that of the last
        /// index block.
        stride: NonZeroU32,
    },
    /// Not known, so no prefix counts as reusable.
    Unknown,
}

impl GroupNeed {
    /// Returns the requirement of full attention: every block of the prefix.
    pub fn full(stride: NonZeroU32) -> Self {
        Self::Trailing {
            blocks: u32::MAX,
            stride,
        }
    }
}

/// Requirement of one or more cache groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReuseRule {
    pub(super) blocks: u32,
    pub(super) stride: NonZeroU32,
}

/// Requirements of all cache groups of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheGroupRules {
    pub(super) rules: Vec<ReuseRule>,
    /// Whether the requirement of some group is unknown.
    pub(super) has_unknown: bool,
}

impl ReuseRule {
    /// Returns the index blocks that this rule requires for a prefix of `blocks` blocks.
    pub(super) fn required_blocks(self, blocks: usize) -> impl Iterator<Item = usize> {
        let stride = self.stride.get() as usize;
        let all = if blocks.is_multiple_of(stride) {
            blocks / stride
        } else {
            0
        };
        (all.saturating_sub(self.blocks as usize)..all).map(move |block| (block + 1) * stride - 1)
    }
}

/// Contiguous blocks before the current run that satisfy one rule.
#[derive(Clone, Copy)]
struct RuleCoverage {
    blocks: u32,
    /// Whether the blocks reach back to the first one.
    is_unbroken: bool,
}

impl CacheGroupRules {
    /// Returns the length of the longest prefix of at most `max_blocks` blocks that satisfies every
    /// rule. `path` contains the runs along the prompt, with the layers held in each.
    pub(super) fn reusable_prefix(
        &self,
        path: impl Iterator<Item = (Range<u32>, LayerSet)>,
        max_blocks: u32,
    ) -> u32 {
        let Some(step) = self.common_stride() else {
            return 0;
        };
        let mut coverages = [RuleCoverage {
            blocks: 0,
            is_unbroken: true,
        }; BlockLayer::MAX_RULES];
        let mut best = 0;
        for (run, layers) in path.take_while(|(run, _)| run.start < max_blocks) {
            let mut first = Some(run.start + 1);
            for ((number, rule), coverage) in self.rules.iter().enumerate().zip(&mut coverages) {
                let from =
                    rule.shortest_served(&run, layers.has(BlockLayer::rule(number)), coverage);
                first = first.zip(from).map(|(a, b)| a.max(b));
            }
            let end = run.end.min(max_blocks);
            let longest = end - end % step;
            if first.is_some_and(|first| first <= longest) {
                best = longest;
            }
        }
        best
    }

    /// Returns the least common multiple of the strides, because a prefix must end at a block
    /// boundary of every group. Returns `None` on overflow, or if a requirement is unknown.
    fn common_stride(&self) -> Option<u32> {
        let step = self.rules.iter().try_fold(1u32, |step, rule| {
            let stride = rule.stride.get();
            (step / gcd(step, stride)).checked_mul(stride)
        });
        step.filter(|_| !self.has_unknown)
    }
}

impl ReuseRule {
    /// Returns the shortest prefix that ends in a run and satisfies this rule. Every longer prefix
    /// that ends in the run satisfies it as well.
    fn shortest_served(
        &self,
        run: &Range<u32>,
        held: bool,
        coverage: &mut RuleCoverage,
    ) -> Option<u32> {
        let stride = self.stride.get();
        let before = run.start / stride;
        let after = run.end / stride;
        if before == after {
            return None;
        }
        if !held {
            *coverage = RuleCoverage {
                blocks: 0,
                is_unbroken: false,
            };
            return (self.blocks == 0).then_some(run.start + 1);
        }
        let missing = if coverage.is_unbroken {
            1
        } else {
            self.blocks.saturating_sub(coverage.blocks).max(1)
        };
        coverage.blocks = coverage.blocks.saturating_add(after - before);
        before.saturating_add(missing).checked_mul(stride)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the reusable prefix by its definition, block by block.
    fn defined_prefix(
        rules: &CacheGroupRules,
        path: &[(Range<u32>, LayerSet)],
        max_blocks: u32,
    ) -> u32 {
        let holds = |rule: usize, block: u32| {
            path.iter()
                .any(|(run, layers)| run.contains(&block) && layers.has(BlockLayer::rule(rule)))
        };
        let end = path.last().map_or(0, |(run, _)| run.end).min(max_blocks);
        let serves = |length: u32, number: usize, rule: &ReuseRule| {
            let stride = rule.stride.get();
            let blocks = length / stride;
            let required = blocks.saturating_sub(rule.blocks)..blocks;
            length.is_multiple_of(stride)
                && required
                    .into_iter()
                    .all(|block| holds(number, (block + 1) * stride - 1))
        };
        let is_reusable = |length: &u32| {
            rules
                .rules
                .iter()
                .enumerate()
                .all(|(number, rule)| serves(*length, number, rule))
        };
        (0..=end)
            .rev()
            .find(is_reusable)
            .filter(|_| !rules.has_unknown)
            .unwrap_or(0)
    }

    proptest::proptest! {
        #![proptest_config(warmroute_property_tests::property_config(10_000))]

        #[test]
        fn reusable_prefix_matches_definition(
            runs in proptest::collection::vec((1..6u32, 0..16u8), 0..12),
            rules in proptest::collection::vec((0..6u32, 1..4u32), 0..4),
            max_blocks in 0..40u32,
        ) {
            let mut start = 0;
            let path: Vec<_> = runs.into_iter().map(|(length, bits)| {
                let layers = (0..BlockLayer::MAX_RULES).filter(|rule| bits & (1 << rule) != 0);
                let layers = layers.fold(LayerSet::NONE, |layers, rule| layers.with(BlockLayer::rule(rule)));
                start += length;
                (start - length..start, layers)
            }).collect();
            let rule = |(blocks, stride): (u32, u32)| ReuseRule {
                blocks: if blocks == 5 { u32::MAX } else { blocks },
                stride: NonZeroU32::new(stride).unwrap(),
            };
            let rules = CacheGroupRules { rules: rules.into_iter().map(rule).collect(), has_unknown: false };
            let expected = defined_prefix(&rules, &path, max_blocks);
            proptest::prop_assert_eq!(rules.reusable_prefix(path.iter().cloned(), max_blocks), expected);
        }
    }
}
