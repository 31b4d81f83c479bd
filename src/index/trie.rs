//! A compressed trie of blocks. A run is a stretch of blocks that follow one another without a branch and have the same
//! owners; where content or ownership diverges a run is split, and where a difference ends two runs are joined again.
//! Each block has an id that survives splits and joins, so that writers can name places; a home leads from the id to the
//! run. The depth of a block never changes, therefore only the part that gets another run id has to be moved.

use std::ops::Range;

use super::children::Children;
use super::overlaps::Overlaps;
use super::owners::{Layer, Layers, Owners};
use super::seats::Seat;
use crate::block::LocalHash;

/// Longest run. Bounds what one split or join copies while readers wait.
const LONGEST_RUN: usize = 1024;
/// No run: the parent of the first runs, and the home of an id that is not in use.
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
    locals: Vec<LocalHash>,
    blocks: Vec<BlockId>,
    owners: Owners,
    children: Children,
}

impl Run {
    fn end(&self) -> u32 {
        self.start + self.locals.len() as u32
    }

    /// Gives memory back after most of a run has gone: a run that is cut short may stay for long.
    fn fit(&mut self) {
        if self.locals.capacity() > 64.max(4 * self.locals.len()) {
            self.locals.shrink_to_fit();
            self.blocks.shrink_to_fit();
        }
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
    runs: Vec<Run>,
    free_runs: Vec<u32>,
    homes: Vec<Home>,
    free_blocks: Vec<BlockId>,
    roots: Children,
}

impl Default for Trie {
    fn default() -> Self {
        Self {
            longest: LONGEST_RUN,
            runs: Vec::new(),
            free_runs: Vec::new(),
            homes: Vec::new(),
            free_blocks: Vec::new(),
            roots: Children::default(),
        }
    }
}

impl Trie {
    /// Blocks in the trie.
    pub(super) fn blocks(&self) -> usize {
        self.homes.len() - self.free_blocks.len()
    }

    /// Runs in the trie.
    pub(super) fn runs(&self) -> usize {
        self.runs.len() - self.free_runs.len()
    }

    /// Follows a prompt and reports the owners of what is found, as long as any owner holds all of it.
    pub(super) fn walk(&self, locals: &[LocalHash], into: &mut Overlaps) {
        let mut rest = locals;
        let mut children = &self.roots;
        while let Some(run) = rest.first().and_then(|first| children.get(*first)) {
            let run = &self.runs[run as usize];
            let matched = common(&run.locals, rest);
            if !into.advance(run.start, matched as u32, &run.owners) || matched < run.locals.len() {
                return;
            }
            rest = &rest[matched..];
            children = &run.children;
        }
    }

    /// Appends to `path` the ids of the blocks that exist along `locals` after a block, or from the root.
    pub(super) fn trace(
        &self,
        after: Option<BlockId>,
        locals: impl IntoIterator<Item = LocalHash>,
        path: &mut Vec<BlockId>,
    ) {
        let mut place = after.map(|block| self.home(block));
        for local in locals {
            let next = match place {
                Some(Home { run, depth }) if depth + 1 < self.runs[run as usize].end() => {
                    let same = self.local_at(run, depth + 1) == local;
                    same.then_some(Home { run, depth: depth + 1 })
                }
                Some(Home { run, depth }) => {
                    self.runs[run as usize].children.get(local).map(|run| Home { run, depth: depth + 1 })
                }
                None => self.roots.get(local).map(|run| Home { run, depth: 0 }),
            };
            let Some(next) = next else { return };
            let run = &self.runs[next.run as usize];
            path.push(run.blocks[(next.depth - run.start) as usize]);
            place = Some(next);
        }
    }

    /// Adds blocks after a block, or at the root, where no such continuation exists yet, and appends their ids.
    pub(super) fn extend(&mut self, after: Option<BlockId>, locals: &[LocalHash], hold: Hold, path: &mut Vec<BlockId>) {
        let mut after = after;
        let mut rest = locals;
        while !rest.is_empty() {
            let run = match after.map(|block| self.home(block)) {
                Some(Home { run, depth }) if self.may_grow(run, depth, hold) => run,
                Some(Home { run, depth }) => {
                    let parent =
                        if depth + 1 < self.runs[run as usize].end() { self.split(run, depth + 1).0 } else { run };
                    self.sprout(parent, depth + 1, rest[0], hold)
                }
                None => self.sprout(NOWHERE, 0, rest[0], hold),
            };
            let room = self.longest - self.runs[run as usize].locals.len();
            let (now, later) = rest.split_at(room.min(rest.len()));
            for &local in now {
                let block = self.settle(run);
                let run = &mut self.runs[run as usize];
                run.locals.push(local);
                run.blocks.push(block);
                path.push(block);
            }
            after = path.last().copied();
            rest = later;
        }
    }

    /// The runs along a prompt, as far as it is known, with the depths they cover of it.
    pub(super) fn path<'a>(&'a self, locals: &'a [LocalHash]) -> impl Iterator<Item = (Range<u32>, &'a Owners)> {
        let mut next = Some((locals, &self.roots));
        std::iter::from_fn(move || {
            let (rest, children) = next.take()?;
            let run = &self.runs[children.get(*rest.first()?)? as usize];
            let matched = common(&run.locals, rest);
            if matched == run.locals.len() {
                next = Some((&rest[matched..], &run.children));
            }
            Some((run.start..run.start + matched as u32, &run.owners))
        })
    }

    /// The block before a block, and the hash of its tokens.
    pub(super) fn origin(&self, block: BlockId) -> (Option<BlockId>, LocalHash) {
        let Home { run, depth } = self.home(block);
        let local = self.local_at(run, depth);
        let run = &self.runs[run as usize];
        let before = if depth > run.start {
            Some(run.blocks[(depth - run.start) as usize - 1])
        } else {
            self.runs.get(run.parent as usize).and_then(|parent| parent.blocks.last().copied())
        };
        (before, local)
    }

    /// The blocks up to this one in its run, at most so many: the first of them, and their number.
    pub(super) fn stretch(&self, last: BlockId, most: usize) -> (BlockId, usize) {
        let Home { run, depth } = self.home(last);
        let run = &self.runs[run as usize];
        let at = (depth - run.start) as usize;
        let count = most.min(at + 1);
        (run.blocks[at + 1 - count], count)
    }

    /// What a seat holds of a block.
    pub(super) fn layers(&self, block: BlockId, seat: Seat) -> Layers {
        self.runs[self.home(block).run as usize].owners.layers(seat)
    }

    /// Where a block is, for sorting.
    pub(super) fn home(&self, block: BlockId) -> Home {
        self.homes[block.0 as usize]
    }

    /// How many of the first blocks follow one another within one run.
    fn span(&self, blocks: &[BlockId]) -> usize {
        let Some(first) = blocks.first().map(|block| self.home(*block)) else { return 0 };
        let follows = |(at, block): &(usize, &BlockId)| {
            self.home(**block) == Home { run: first.run, depth: first.depth + *at as u32 }
        };
        blocks.iter().enumerate().take_while(follows).count()
    }

    /// Enters (`on`) or takes out a hold on `count` blocks from `first`, which must lie within one run.
    pub(super) fn mark(&mut self, first: BlockId, count: usize, hold: Hold, on: bool) {
        let Home { run, depth: from } = self.home(first);
        let to = from + count as u32;
        let before = self.runs[run as usize].owners.layers(hold.seat);
        let after = if on { before.with(hold.layer) } else { before.without(hold.layer) };
        if before == after {
            return;
        }
        if !on && self.is_lone_tail(run, from, to, hold) {
            self.truncate(run, from);
            return;
        }
        let run = if from > self.runs[run as usize].start { self.split(run, from).1 } else { run };
        let run = if to < self.runs[run as usize].end() { self.split(run, to).0 } else { run };
        self.runs[run as usize].owners.set(hold.seat, after);
        self.tidy(run);
    }

    /// Marks blocks in as few steps as their order allows.
    pub(super) fn mark_all(&mut self, blocks: &[BlockId], hold: Hold, on: bool) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let count = self.span(rest);
            self.mark(first, count, hold, on);
            rest = &rest[count..];
        }
    }

    /// Takes a seat out of the whole run a block is in. The block may be gone already.
    pub(super) fn evict(&mut self, block: BlockId, seat: Seat) {
        let run = self.home(block).run;
        if run != NOWHERE && !self.runs[run as usize].owners.layers(seat).is_empty() {
            self.runs[run as usize].owners.set(seat, Layers::NONE);
            self.tidy(run);
        }
    }

    fn local_at(&self, run: u32, depth: u32) -> LocalHash {
        let run = &self.runs[run as usize];
        run.locals[(depth - run.start) as usize]
    }

    /// Whether blocks after this one can simply be appended to its run: it is a leaf and has just this owner.
    fn may_grow(&self, run: u32, depth: u32, hold: Hold) -> bool {
        let run = &self.runs[run as usize];
        depth + 1 == run.end()
            && run.children.is_empty()
            && run.locals.len() < self.longest
            && run.owners.is_just(hold.seat, hold.layer)
    }

    /// Whether the stretch is the end of a leaf and nobody else holds it.
    fn is_lone_tail(&self, run: u32, from: u32, to: u32, hold: Hold) -> bool {
        let run = &self.runs[run as usize];
        to == run.end() && from > run.start && run.children.is_empty() && run.owners.is_just(hold.seat, hold.layer)
    }

    /// A new leaf, still without blocks.
    fn sprout(&mut self, parent: u32, start: u32, first: LocalHash, hold: Hold) -> u32 {
        let owners = Owners::just(hold.seat, hold.layer);
        let run = self.adopt(Run { start, parent, owners, ..Run::default() });
        self.children_of(parent).set(first, run);
        run
    }

    fn adopt(&mut self, run: Run) -> u32 {
        if let Some(id) = self.free_runs.pop() {
            self.runs[id as usize] = run;
            return id;
        }
        self.runs.push(run);
        self.runs.len() as u32 - 1
    }

    /// A new block id at the end of a run.
    fn settle(&mut self, run: u32) -> BlockId {
        let home = Home { run, depth: self.runs[run as usize].end() };
        if let Some(block) = self.free_blocks.pop() {
            self.homes[block.0 as usize] = home;
            return block;
        }
        self.homes.push(home);
        BlockId(self.homes.len() as u32 - 1)
    }

    fn children_of(&mut self, run: u32) -> &mut Children {
        if run == NOWHERE { &mut self.roots } else { &mut self.runs[run as usize].children }
    }

    fn truncate(&mut self, run: u32, depth: u32) {
        let run = &mut self.runs[run as usize];
        let keep = (depth - run.start) as usize;
        for block in run.blocks.drain(keep..) {
            self.homes[block.0 as usize].run = NOWHERE;
            self.free_blocks.push(block);
        }
        run.locals.truncate(keep);
        run.fit();
    }

    /// Splits a run before a depth inside it; the ids of the part before and the part after. The part that is cheaper
    /// to move gets the new id.
    fn split(&mut self, run: u32, depth: u32) -> (u32, u32) {
        let upper = &mut self.runs[run as usize];
        let at = (depth - upper.start) as usize;
        let lower = Run {
            start: depth,
            parent: run,
            locals: upper.locals.split_off(at),
            blocks: upper.blocks.split_off(at),
            owners: upper.owners.clone(),
            children: std::mem::take(&mut upper.children),
        };
        upper.fit();
        let boundary = lower.locals[0];
        if at < lower.blocks.len() + lower.children.len() {
            let first = upper.locals[0];
            let upper = std::mem::replace(&mut self.runs[run as usize], lower);
            let parent = upper.parent;
            let moved = self.adopt(upper);
            self.rehome(moved);
            self.children_of(parent).set(first, moved);
            self.runs[run as usize].parent = moved;
            self.runs[moved as usize].children = Children::one(boundary, run);
            (moved, run)
        } else {
            let moved = self.adopt(lower);
            self.rehome(moved);
            self.reparent(moved);
            self.runs[run as usize].children = Children::one(boundary, moved);
            (run, moved)
        }
    }

    /// Joins a run with its only child if nothing tells them apart; the id of what is left.
    fn join(&mut self, upper: u32) -> u32 {
        let Some(lower) = self.runs[upper as usize].children.only() else { return upper };
        let (above, below) = (&self.runs[upper as usize], &self.runs[lower as usize]);
        if above.owners != below.owners || above.locals.len() + below.locals.len() > self.longest {
            return upper;
        }
        let upper_stays = above.blocks.len() >= below.blocks.len() + below.children.len();
        let mut head = std::mem::take(&mut self.runs[upper as usize]);
        let tail = std::mem::take(&mut self.runs[lower as usize]);
        let (first, parent) = (head.locals[0], head.parent);
        head.locals.extend_from_slice(&tail.locals);
        head.blocks.extend_from_slice(&tail.blocks);
        head.children = tail.children;
        let (kept, dropped) = if upper_stays { (upper, lower) } else { (lower, upper) };
        let moved: &[BlockId] =
            if upper_stays { &tail.blocks } else { &head.blocks[..head.blocks.len() - tail.blocks.len()] };
        for block in moved {
            self.homes[block.0 as usize].run = kept;
        }
        self.runs[kept as usize] = head;
        self.free_runs.push(dropped);
        if upper_stays {
            self.reparent(kept);
        } else {
            self.children_of(parent).set(first, kept);
        }
        kept
    }

    /// After a run's owners changed: removes what nobody holds and nothing follows, and joins what is alike.
    fn tidy(&mut self, run: u32) {
        let mut run = run;
        while self.runs[run as usize].is_bare() {
            let gone = std::mem::take(&mut self.runs[run as usize]);
            self.children_of(gone.parent).remove(gone.locals[0]);
            for block in gone.blocks {
                self.homes[block.0 as usize].run = NOWHERE;
                self.free_blocks.push(block);
            }
            self.free_runs.push(run);
            if gone.parent == NOWHERE {
                return;
            }
            run = gone.parent;
        }
        let run = self.join(run);
        let parent = self.runs[run as usize].parent;
        if parent != NOWHERE {
            self.join(parent);
        }
    }

    fn rehome(&mut self, run: u32) {
        for block in &self.runs[run as usize].blocks {
            self.homes[block.0 as usize].run = run;
        }
    }

    fn reparent(&mut self, run: u32) {
        let children = std::mem::take(&mut self.runs[run as usize].children);
        for child in children.runs() {
            self.runs[child as usize].parent = run;
        }
        self.runs[run as usize].children = children;
    }
}

/// Length of the common beginning. Whole runs are the usual case, and equality of slices is one comparison of memory.
fn common(run: &[LocalHash], prompt: &[LocalHash]) -> usize {
    if prompt.starts_with(run) {
        return run.len();
    }
    run.iter().zip(prompt).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
pub(super) mod tests;
