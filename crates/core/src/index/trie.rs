//! Compressed trie of blocks.
//!
//! A run is a sequence of blocks without a branch, all with the same owners. A run is split where
//! content or ownership diverges, and runs are merged when the difference ends.
//!
//! Each block has an id that survives splits and merges, so writers can refer to it. The id is the
//! position in the arena, and the arena maps it to the run. The depth and the position of a block
//! never change. While readers wait, a change only updates the run ids of the smaller part.

mod change;

use std::ops::Range;

use super::arena::{ArenaExtent, BlockArena, PromptSuffix, common_prefix_len};
use super::children::RunChildren;
use super::extents::ExtentList;
use super::ids::{BlockId, OwnerId};
use super::layers::{BlockLayer, LayerSet};
use super::owners::OwnerSet;
use super::slab::PagedSlab;
use crate::block::{BlockHashes, LocalHash};

/// Maximum number of blocks in a run. Bounds the work of a split or merge while readers wait.
const MAX_RUN_LEN: usize = 4096;
/// Parent of the first runs.
const NO_RUN: u32 = u32::MAX;

/// Run and depth of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RunPosition {
    run: u32,
    depth: u32,
}

/// Sequence of blocks with the same owners.
#[derive(Debug, Default)]
struct TrieRun {
    /// Depth of the first block.
    start: u32,
    parent: u32,
    blocks: ExtentList,
    owners: OwnerSet,
    children: RunChildren,
}

impl TrieRun {
    fn end(&self) -> u32 {
        self.start + self.blocks.len()
    }

    fn is_unused(&self) -> bool {
        self.owners.is_empty() && self.children.is_empty()
    }
}

/// Layer of a block held by an owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerHold {
    owner: OwnerId,
    layer: BlockLayer,
}

impl LayerHold {
    pub(super) fn new(owner: OwnerId, layer: impl Into<BlockLayer>) -> Self {
        Self {
            owner,
            layer: layer.into(),
        }
    }
}

/// Trie of one shard.
#[derive(Debug)]
pub(super) struct BlockTrie {
    max_run_len: usize,
    runs: PagedSlab<TrieRun>,
    arena: BlockArena,
    blocks: usize,
    roots: RunChildren,
}

impl Default for BlockTrie {
    fn default() -> Self {
        Self {
            max_run_len: MAX_RUN_LEN,
            runs: PagedSlab::default(),
            arena: BlockArena::default(),
            blocks: 0,
            roots: RunChildren::default(),
        }
    }
}

impl BlockTrie {
    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of runs.
    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Follows a prompt and calls `visit` with the start, the matching blocks and the owners of
    /// each run. Ends when `visit` returns false: no owner holds the whole prefix.
    pub(super) fn visit_runs(
        &self,
        prompt: &BlockHashes,
        mut visit: impl FnMut(u32, u32, &OwnerSet) -> bool,
    ) {
        let mut rest = PromptSuffix {
            locals: prompt.locals(),
            sequences: prompt.sequences(),
        };
        let mut children = &self.roots;
        while let Some(run) = rest.locals.first().and_then(|first| children.get(*first)) {
            let run = &self.runs[run];
            let matched = self.match_run(run, rest);
            if !visit(run.start, matched as u32, &run.owners) || matched < run.blocks.len() as usize
            {
                return;
            }
            rest = rest.skip(matched);
            children = &run.children;
        }
    }

    /// Appends the ids of the existing blocks along `locals`, after a block or from the root, to
    /// `path`.
    pub(super) fn trace_path(
        &self,
        after: Option<BlockId>,
        locals: &[LocalHash],
        path: &mut Vec<BlockId>,
    ) {
        let mut rest = locals;
        let mut children = &self.roots;
        if let Some((run, depth)) = after.and_then(|after| self.locate(after)) {
            let from = depth + 1 - run.start;
            let matched = self.match_into(run, from, rest, path);
            if from + matched < run.blocks.len() {
                return;
            }
            rest = &rest[matched as usize..];
            children = &run.children;
        }
        while let Some(run) = rest.first().and_then(|first| children.get(*first)) {
            let run = &self.runs[run];
            let matched = self.match_into(run, 0, rest, path);
            if matched < run.blocks.len() {
                return;
            }
            rest = &rest[matched as usize..];
            children = &run.children;
        }
    }

    /// Iterates over the runs along a prompt, with the depths that match.
    pub(super) fn matching_runs<'a>(
        &'a self,
        locals: &'a [LocalHash],
    ) -> impl Iterator<Item = (Range<u32>, &'a OwnerSet)> {
        let mut next = Some((locals, &self.roots));
        std::iter::from_fn(move || {
            let (rest, children) = next.take()?;
            let run = &self.runs[children.get(*rest.first()?)?];
            let matched = self.common_prefix(run, rest);
            if matched == run.blocks.len() as usize {
                next = Some((&rest[matched..], &run.children));
            }
            Some((run.start..run.start + matched as u32, &run.owners))
        })
    }

    /// Returns the block before a block, and the block's local hash.
    pub(super) fn origin(&self, block: BlockId) -> (Option<BlockId>, LocalHash) {
        let local = self.arena.local(block.0);
        let Some((run, depth)) = self.locate(block) else {
            return (None, local);
        };
        let before = match (depth - run.start).checked_sub(1) {
            Some(before) => run.blocks.position(before),
            None if run.parent == NO_RUN => None,
            None => Some(self.runs[run.parent].blocks.last().end() - 1),
        };
        (before.map(BlockId), local)
    }

    /// Returns the contiguous blocks that end at this one, at most `max_blocks`: the first of them
    /// and their number.
    pub(super) fn extent_ending_at(&self, last: BlockId, max_blocks: usize) -> (BlockId, usize) {
        let run = self.arena.run_at(last.0).map(|run| &self.runs[run]);
        let extent = run
            .and_then(|run| run.blocks.find(last.0))
            .map(|(_, extent)| extent);
        let count = max_blocks.min(extent.map_or(1, |extent| (last.0 - extent.first) as usize + 1));
        (BlockId(last.0 + 1 - count as u32), count)
    }

    /// Returns the layers of a block that an owner holds.
    pub(super) fn layers_of(&self, block: BlockId, owner: OwnerId) -> LayerSet {
        self.arena
            .run_at(block.0)
            .map_or(LayerSet::NONE, |run| self.runs[run].owners.layers(owner))
    }

    /// Returns the run and depth of a block, for sorting.
    pub(super) fn position_of(&self, block: BlockId) -> RunPosition {
        let run = self.arena.run_at(block.0);
        let depth = run.and_then(|run| self.depth(run, block));
        RunPosition {
            run: run.unwrap_or(NO_RUN),
            depth: depth.unwrap_or(NO_RUN),
        }
    }

    /// Counts the leading blocks that are contiguous and in one extent of a run.
    pub(super) fn contiguous_len(&self, blocks: &[BlockId]) -> usize {
        let Some(first) = blocks.first() else {
            return 0;
        };
        let contiguous = blocks
            .iter()
            .zip(first.0..)
            .take_while(|(block, at)| block.0 == *at)
            .count();
        let run = self.arena.run_at(first.0).map(|run| &self.runs[run]);
        let extent = run
            .and_then(|run| run.blocks.find(first.0))
            .map(|(_, extent)| extent);
        extent.map_or(contiguous, |extent| {
            contiguous.min((extent.end() - first.0) as usize)
        })
    }

    fn depth(&self, run: u32, block: BlockId) -> Option<u32> {
        let run = &self.runs[run];
        Some(run.start + run.blocks.find(block.0)?.0)
    }

    /// Returns the run and the depth of a block.
    fn locate(&self, block: BlockId) -> Option<(&TrieRun, u32)> {
        let run = self.arena.run_at(block.0)?;
        Some((&self.runs[run], self.depth(run, block)?))
    }

    /// Counts the matching blocks of a run. Uses the checkpoints of earlier queries, and records
    /// new ones.
    fn match_run(&self, run: &TrieRun, prompt: PromptSuffix<'_>) -> usize {
        let mut matched = 0;
        for extent in run.blocks.iter() {
            let count = self.arena.match_extent(extent, prompt.skip(matched));
            matched += count;
            if count < extent.len as usize {
                break;
            }
        }
        matched
    }

    /// Returns the length of the common prefix of a run and a prompt.
    fn common_prefix(&self, run: &TrieRun, prompt: &[LocalHash]) -> usize {
        let (head, rest) = run.blocks.split_first();
        let matched = common_prefix_len(self.arena.locals(head), prompt);
        if matched < head.len as usize || rest.is_empty() {
            return matched;
        }
        self.common_prefix_in(rest.iter().copied(), prompt, matched)
    }

    fn common_prefix_in(
        &self,
        extents: impl Iterator<Item = ArenaExtent>,
        prompt: &[LocalHash],
        from: usize,
    ) -> usize {
        let mut matched = from;
        for extent in extents {
            let count = common_prefix_len(self.arena.locals(extent), &prompt[matched..]);
            matched += count;
            if count < extent.len as usize {
                break;
            }
        }
        matched
    }

    /// Appends the ids of the matching blocks of a run, from block `from` on. Returns their number.
    fn match_into(
        &self,
        run: &TrieRun,
        from: u32,
        prompt: &[LocalHash],
        path: &mut Vec<BlockId>,
    ) -> u32 {
        let matched = self.common_prefix_in(run.blocks.skip_blocks(from), prompt, 0) as u32;
        let mut remaining = matched;
        for extent in run.blocks.skip_blocks(from).take_while(|_| matched > 0) {
            let count = remaining.min(extent.len);
            path.extend((extent.first..extent.first + count).map(BlockId));
            remaining -= count;
            if remaining == 0 {
                break;
            }
        }
        matched
    }
}

#[cfg(test)]
pub(super) mod tests;
