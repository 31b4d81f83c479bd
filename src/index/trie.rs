//! A compressed trie of blocks. A run is a stretch of blocks that follow one another without a branch and have the same
//! owners; where content or ownership diverges a run is split, and where a difference ends two runs are joined again.
//! Each block has an id that survives splits and joins, so that writers can name places; it is a position in the arena,
//! and a home leads from there to the run. The depth of a block never changes, and its position neither, so what a change
//! costs while readers wait are the homes of the smaller part.

mod change;

use std::ops::Range;

use super::arena::{Arena, Asked, Stretch, common};
use super::children::Children;
use super::extents::Extents;
use super::overlaps::Overlaps;
use super::owners::{Layer, Layers, Owners};
use super::seats::Seat;
use super::slab::Slab;
use crate::block::{BlockHashes, LocalHash};

/// Longest run. Bounds what one split or join changes while readers wait.
const LONGEST_RUN: usize = 4096;
/// No run: the parent of the first runs.
const NOWHERE: u32 = u32::MAX;

/// Name of a block within one trie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockId(pub(super) u32);

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Home {
    run: u32,
    depth: u32,
}

/// A stretch of blocks with the same owners.
#[derive(Debug, Default)]
struct Run {
    /// Depth of the first block.
    start: u32,
    parent: u32,
    blocks: Extents,
    owners: Owners,
    children: Children,
}

impl Run {
    fn end(&self) -> u32 {
        self.start + self.blocks.len()
    }

    fn is_bare(&self) -> bool {
        self.owners.is_empty() && self.children.is_empty()
    }
}

/// A change of who holds what: one seat, one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    pub(super) seat: Seat,
    pub(super) layer: Layer,
}

/// The trie.
#[derive(Debug)]
pub(super) struct Trie {
    longest: usize,
    runs: Slab<Run>,
    arena: Arena,
    blocks: usize,
    roots: Children,
}

impl Default for Trie {
    fn default() -> Self {
        Self {
            longest: LONGEST_RUN,
            runs: Slab::default(),
            arena: Arena::default(),
            blocks: 0,
            roots: Children::default(),
        }
    }
}

impl Trie {
    /// Blocks in the trie.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Runs in the trie.
    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Follows a prompt and reports the owners of what is found, as long as any owner holds all of it.
    pub(super) fn walk(&self, prompt: &BlockHashes, into: &mut Overlaps) {
        let mut rest = Asked {
            locals: prompt.locals(),
            names: prompt.sequences(),
        };
        let mut children = &self.roots;
        while let Some(run) = rest.locals.first().and_then(|first| children.get(*first)) {
            let run = &self.runs[run];
            let matched = self.agreed(run, rest);
            if !into.advance(run.start, matched as u32, &run.owners)
                || matched < run.blocks.len() as usize
            {
                return;
            }
            rest = rest.skip(matched);
            children = &run.children;
        }
    }

    /// Appends to `path` the ids of the blocks that exist along `locals` after a block, or from the root.
    pub(super) fn trace(
        &self,
        after: Option<BlockId>,
        locals: &[LocalHash],
        path: &mut Vec<BlockId>,
    ) {
        let mut rest = locals;
        let mut children = &self.roots;
        if let Some((run, depth)) = after.and_then(|after| self.lodging(after)) {
            let from = depth + 1 - run.start;
            let matched = self.follow(run, from, rest, path);
            if from + matched < run.blocks.len() {
                return;
            }
            rest = &rest[matched as usize..];
            children = &run.children;
        }
        while let Some(run) = rest.first().and_then(|first| children.get(*first)) {
            let run = &self.runs[run];
            let matched = self.follow(run, 0, rest, path);
            if matched < run.blocks.len() {
                return;
            }
            rest = &rest[matched as usize..];
            children = &run.children;
        }
    }

    /// The runs along a prompt, as far as it is known, with the depths they cover of it.
    pub(super) fn path<'a>(
        &'a self,
        locals: &'a [LocalHash],
    ) -> impl Iterator<Item = (Range<u32>, &'a Owners)> {
        let mut next = Some((locals, &self.roots));
        std::iter::from_fn(move || {
            let (rest, children) = next.take()?;
            let run = &self.runs[children.get(*rest.first()?)?];
            let matched = self.common(run, rest);
            if matched == run.blocks.len() as usize {
                next = Some((&rest[matched..], &run.children));
            }
            Some((run.start..run.start + matched as u32, &run.owners))
        })
    }

    /// The block before a block, and the hash of its tokens.
    pub(super) fn origin(&self, block: BlockId) -> (Option<BlockId>, LocalHash) {
        let local = self.arena.local(block.0);
        let Some((run, depth)) = self.lodging(block) else {
            return (None, local);
        };
        let before = match (depth - run.start).checked_sub(1) {
            Some(before) => run.blocks.at(before),
            None if run.parent == NOWHERE => None,
            None => Some(self.runs[run.parent].blocks.last().end() - 1),
        };
        (before.map(BlockId), local)
    }

    /// The blocks up to this one that lie side by side, at most so many: the first of them, and their number.
    pub(super) fn stretch(&self, last: BlockId, most: usize) -> (BlockId, usize) {
        let run = self.arena.home(last.0).map(|run| &self.runs[run]);
        let stretch = run
            .and_then(|run| run.blocks.find(last.0))
            .map(|(_, stretch)| stretch);
        let count = most.min(stretch.map_or(1, |stretch| (last.0 - stretch.first) as usize + 1));
        (BlockId(last.0 + 1 - count as u32), count)
    }

    /// What a seat holds of a block.
    pub(super) fn layers(&self, block: BlockId, seat: Seat) -> Layers {
        self.arena
            .home(block.0)
            .map_or(Layers::NONE, |run| self.runs[run].owners.layers(seat))
    }

    /// Where a block is, for sorting.
    pub(super) fn home(&self, block: BlockId) -> Home {
        let run = self.arena.home(block.0);
        let depth = run.and_then(|run| self.depth(run, block));
        Home {
            run: run.unwrap_or(NOWHERE),
            depth: depth.unwrap_or(NOWHERE),
        }
    }

    /// How many of the first blocks follow one another within one run.
    pub(super) fn span(&self, blocks: &[BlockId]) -> usize {
        let Some(first) = blocks.first() else {
            return 0;
        };
        let in_row = blocks
            .iter()
            .zip(first.0..)
            .take_while(|(block, at)| block.0 == *at)
            .count();
        let run = self.arena.home(first.0).map(|run| &self.runs[run]);
        let stretch = run
            .and_then(|run| run.blocks.find(first.0))
            .map(|(_, stretch)| stretch);
        stretch.map_or(in_row, |stretch| {
            in_row.min((stretch.end() - first.0) as usize)
        })
    }

    fn depth(&self, run: u32, block: BlockId) -> Option<u32> {
        let run = &self.runs[run];
        Some(run.start + run.blocks.find(block.0)?.0)
    }

    /// The run and the depth of a block.
    fn lodging(&self, block: BlockId) -> Option<(&Run, u32)> {
        let run = self.arena.home(block.0)?;
        Some((&self.runs[run], self.depth(run, block)?))
    }

    /// The same by the marks of those who asked before, and leaves some.
    fn agreed(&self, run: &Run, asked: Asked<'_>) -> usize {
        let mut agreed = 0;
        for stretch in run.blocks.iter() {
            let here = self.arena.agreed(stretch, asked.skip(agreed));
            agreed += here;
            if here < stretch.len as usize {
                break;
            }
        }
        agreed
    }

    /// Length of the common beginning.
    fn common(&self, run: &Run, prompt: &[LocalHash]) -> usize {
        let (head, more) = run.blocks.parts();
        let matched = common(self.arena.locals(head), prompt);
        if matched < head.len as usize || more.is_empty() {
            return matched;
        }
        self.common_in(more.iter().copied(), prompt, matched)
    }

    fn common_in(
        &self,
        stretches: impl Iterator<Item = Stretch>,
        prompt: &[LocalHash],
        from: usize,
    ) -> usize {
        let mut matched = from;
        for stretch in stretches {
            let here = common(self.arena.locals(stretch), &prompt[matched..]);
            matched += here;
            if here < stretch.len as usize {
                break;
            }
        }
        matched
    }

    /// Appends the ids of the blocks of a run that agree, from a place in it on; how many.
    fn follow(&self, run: &Run, from: u32, prompt: &[LocalHash], path: &mut Vec<BlockId>) -> u32 {
        let matched = self.common_in(run.blocks.skip(from), prompt, 0) as u32;
        let mut left = matched;
        for stretch in run.blocks.skip(from).take_while(|_| matched > 0) {
            let here = left.min(stretch.len);
            path.extend((stretch.first..stretch.first + here).map(BlockId));
            left -= here;
            if left == 0 {
                break;
            }
        }
        matched
    }
}

#[cfg(test)]
pub(super) mod tests;
