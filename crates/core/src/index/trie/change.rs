//! Changes of a trie: inserts blocks, adds and removes owners, and splits and merges runs.

use super::{BlockId, BlockTrie, ExtentList, LayerHold, NO_RUN, RunPosition, TrieRun};
use crate::block::LocalHash;
use crate::index::arena::{self, ArenaExtent};
use crate::index::children::RunChildren;
use crate::index::ids::OwnerId;
use crate::index::layers::LayerSet;
use crate::index::owners::OwnerSet;

/// Minimum length of an extent for blocks that are stored together, unless free memory is
/// fragmented.
const MIN_EXTENT_LEN: usize = 64;
/// Minimum and maximum number of positions to reserve for decoding.
const RESERVE_RANGE: (u32, u32) = (8, 64);

impl BlockTrie {
    /// Inserts blocks after a block, or at the root, and appends their ids to `path`. The
    /// continuation must not exist yet. Inserts fewer blocks if the trie is full.
    pub(in crate::index) fn insert(
        &mut self,
        after: Option<BlockId>,
        locals: &[LocalHash],
        hold: LayerHold,
        path: &mut Vec<BlockId>,
    ) {
        let mut after = after;
        let mut rest = locals;
        while !rest.is_empty() {
            let position = after.map(|block| self.position_of(block));
            let grown = match position {
                Some(RunPosition { run, depth }) if self.can_grow(run, depth, hold) => {
                    self.grow(run, rest, path)
                }
                Some(RunPosition { run, depth }) => self.branch((run, depth), rest, hold, path),
                None => self.add_leaf((NO_RUN, 0), rest, hold, path),
            };
            if grown == 0 {
                return;
            }
            after = path.last().copied();
            rest = &rest[grown..];
        }
    }

    /// Adds (`on`) or removes a hold on `count` blocks from `first`. They must lie in one extent of
    /// a run.
    pub(in crate::index) fn set_hold(
        &mut self,
        first: BlockId,
        count: usize,
        hold: LayerHold,
        on: bool,
    ) {
        let RunPosition { run, depth: from } = self.position_of(first);
        if run == NO_RUN {
            return;
        }
        let to = from + count as u32;
        let before = self.runs[run].owners.layers(hold.owner);
        let after = if on {
            before.with(hold.layer)
        } else {
            before.without(hold.layer)
        };
        if before == after {
            return;
        }
        if !on && self.is_exclusive_tail(run, from, to, hold) {
            self.truncate(run, from);
            return;
        }
        let run = if from > self.runs[run].start {
            self.split(run, from).1
        } else {
            run
        };
        let run = if to < self.runs[run].end() {
            self.split(run, to).0
        } else {
            run
        };
        self.runs[run].owners.set(hold.owner, after);
        self.compact(run);
    }

    /// Sets a hold on all blocks, in as few steps as their order allows.
    pub(in crate::index) fn set_hold_all(&mut self, blocks: &[BlockId], hold: LayerHold, on: bool) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let count = self.contiguous_len(rest);
            self.set_hold(first, count, hold, on);
            rest = &rest[count..];
        }
    }

    /// Adds a hold where the owner has none. Appends the blocks that it holds already to `held`.
    pub(in crate::index) fn grant_missing(
        &mut self,
        blocks: &[BlockId],
        hold: LayerHold,
        held: &mut Vec<BlockId>,
    ) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let (head, tail) = rest.split_at(self.contiguous_len(rest));
            if self.layers_of(first, hold.owner).has(hold.layer) {
                held.extend(head);
            } else {
                self.set_hold(first, head.len(), hold, true);
            }
            rest = tail;
        }
    }

    /// Removes a hold from blocks in any order. The owner must hold all of them. Engines report the
    /// end of a prefix first, and each step then shortens a run.
    pub(in crate::index) fn release(&mut self, blocks: &[BlockId], hold: LayerHold) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let down = sequence_len(rest, |at| first.0.wrapping_sub(at));
            let up = sequence_len(rest, |at| first.0.wrapping_add(at));
            let (lowest, count) = if down > up {
                (first.0 + 1 - down as u32, down)
            } else {
                (first.0, up)
            };
            let mut remaining = ArenaExtent {
                first: lowest,
                len: count as u32,
            };
            while remaining.len > 0 {
                let last = remaining.end() - 1;
                let run = self.arena.run_at(last).map(|run| &self.runs[run]);
                let within = run
                    .and_then(|run| run.blocks.find(last))
                    .map_or(last, |(_, extent)| extent.first);
                let from = within.max(remaining.first);
                self.set_hold(BlockId(from), (last + 1 - from) as usize, hold, false);
                remaining.len = from - remaining.first;
            }
            rest = &rest[count..];
        }
    }

    /// Removes an owner from the run of a block. The block may be gone already.
    pub(in crate::index) fn remove_owner(&mut self, block: BlockId, owner: OwnerId) {
        let Some(run) = self.arena.run_at(block.0) else {
            return;
        };
        if !self.runs[run].owners.layers(owner).is_empty() {
            self.runs[run].owners.set(owner, LayerSet::NONE);
            self.compact(run);
        }
    }

    /// Returns whether blocks can be appended to the run: it is a leaf with exactly this hold.
    fn can_grow(&self, run: u32, depth: u32, hold: LayerHold) -> bool {
        let run = &self.runs[run];
        depth + 1 == run.end()
            && run.children.is_empty()
            && (run.blocks.len() as usize) < self.max_run_len
            && run.owners.is_only(hold.owner, hold.layer)
    }

    /// Returns whether the range is the end of a leaf with exactly this hold.
    fn is_exclusive_tail(&self, run: u32, from: u32, to: u32, hold: LayerHold) -> bool {
        let run = &self.runs[run];
        to == run.end()
            && from > run.start
            && run.children.is_empty()
            && run.owners.is_only(hold.owner, hold.layer)
    }

    /// Adds a leaf after a block that has other children or other owners.
    fn branch(
        &mut self,
        at: (u32, u32),
        rest: &[LocalHash],
        hold: LayerHold,
        path: &mut Vec<BlockId>,
    ) -> usize {
        let (run, depth) = at;
        let parent = if depth + 1 < self.runs[run].end() {
            self.split(run, depth + 1).0
        } else {
            run
        };
        let grown = self.add_leaf((parent, depth + 1), rest, hold, path);
        if grown == 0 {
            // The two parts have the same owners again.
            self.join(parent);
        }
        grown
    }

    /// Adds a leaf with as many blocks as a run can have. Returns their number.
    fn add_leaf(
        &mut self,
        at: (u32, u32),
        rest: &[LocalHash],
        hold: LayerHold,
        path: &mut Vec<BlockId>,
    ) -> usize {
        let (parent, start) = at;
        let owners = OwnerSet::single(hold.owner, hold.layer);
        let run = self.runs.insert(TrieRun {
            start,
            parent,
            owners,
            ..TrieRun::default()
        });
        let grown = self.grow(run, rest, path);
        if grown == 0 {
            self.runs.remove(run);
        } else {
            self.children_of(parent).set(rest[0], run);
        }
        grown
    }

    /// Appends as many blocks to a run as fit. Returns their number.
    fn grow(&mut self, run: u32, locals: &[LocalHash], path: &mut Vec<BlockId>) -> usize {
        let max_blocks = self.max_run_len - self.runs[run].blocks.len() as usize;
        let all = &locals[..max_blocks.min(locals.len())];
        let mut rest = all;
        while !rest.is_empty() {
            let blocks = &mut self.runs[run].blocks;
            if blocks.reserved_extent().len == 0 {
                let want =
                    rest.len() + spare_positions(blocks.len(), blocks.last(), rest.len()) as usize;
                let adjacent = if blocks.len() > 0 {
                    self.arena.allocate_at(blocks.last().end(), want)
                } else {
                    0
                };
                if adjacent > 0 {
                    blocks.grow_reserved(adjacent);
                } else if let Some(extent) =
                    self.arena.allocate(want, rest.len().min(MIN_EXTENT_LEN))
                {
                    blocks.push_extent(extent);
                } else {
                    break;
                }
            }
            let ArenaExtent { first, len } = blocks.reserved_extent();
            let (head, tail) = rest.split_at(rest.len().min(len as usize));
            blocks.fill_reserved(head.len() as u32);
            self.arena.write(first, head);
            self.arena.assign_run(
                ArenaExtent {
                    first,
                    len: head.len() as u32,
                },
                run,
            );
            path.extend((first..first + head.len() as u32).map(BlockId));
            rest = tail;
        }
        self.blocks += all.len() - rest.len();
        all.len() - rest.len()
    }

    fn children_of(&mut self, run: u32) -> &mut RunChildren {
        if run == NO_RUN {
            &mut self.roots
        } else {
            &mut self.runs[run].children
        }
    }

    /// Removes the end of a run, but not all of it. A few positions stay reserved for later blocks.
    fn truncate(&mut self, run: u32, depth: u32) {
        let keep = depth - self.runs[run].start;
        let mut tail = self.runs[run].blocks.split_off(keep);
        let blocks = &mut self.runs[run].blocks;
        self.blocks -= tail.len() as usize;
        let (head, rest) = tail.split_first();
        if rest.is_empty() && blocks.is_followed_by(head.first) {
            self.arena.assign_run(head, arena::NO_RUN);
            blocks.grow_reserved(head.len + tail.reserved_extent().len);
        } else {
            self.free_extents(&mut tail);
        }
        let blocks = &mut self.runs[run].blocks;
        if blocks.reserved_extent().len > RESERVE_RANGE.1.max(blocks.len()) {
            let rest = blocks.shrink_reserved(RESERVE_RANGE.0);
            self.arena.deallocate(rest);
        }
    }

    /// Frees the extents and the reserved positions of a run.
    fn free_extents(&mut self, blocks: &mut ExtentList) {
        let reserved = blocks.shrink_reserved(0);
        self.arena.deallocate(reserved);
        for extent in blocks.iter() {
            self.arena.deallocate(extent);
        }
    }

    /// Splits a run at a depth inside it. Returns the ids of the upper and the lower part. The part
    /// that is cheaper to move gets the new id.
    fn split(&mut self, run: u32, depth: u32) -> (u32, u32) {
        let upper = &mut self.runs[run];
        let at = depth - upper.start;
        let lower = TrieRun {
            start: depth,
            parent: run,
            blocks: upper.blocks.split_off(at),
            owners: upper.owners.clone(),
            children: std::mem::take(&mut upper.children),
        };
        let boundary = self.arena.local(lower.blocks.first());
        if (at as usize) < lower.blocks.len() as usize + lower.children.len() {
            let upper = std::mem::replace(&mut self.runs[run], lower);
            let first = self.arena.local(upper.blocks.first());
            let parent = upper.parent;
            let moved = self.runs.insert(upper);
            self.reassign_blocks(moved);
            self.children_of(parent).set(first, moved);
            self.runs[run].parent = moved;
            self.runs[moved].children = RunChildren::single(boundary, run);
            (moved, run)
        } else {
            let moved = self.runs.insert(lower);
            self.reassign_blocks(moved);
            self.reparent(moved);
            self.runs[run].children = RunChildren::single(boundary, moved);
            (run, moved)
        }
    }

    /// Merges a run with its only child if both have the same owners. Returns the id of the result.
    fn join(&mut self, upper: u32) -> u32 {
        let Some(lower) = self.runs[upper].children.only_child() else {
            return upper;
        };
        let above = &self.runs[upper];
        let below = &self.runs[lower];
        if (above.blocks.len() + below.blocks.len()) as usize > self.max_run_len
            || above.owners != below.owners
        {
            return upper;
        }
        let upper_stays =
            above.blocks.len() as usize >= below.blocks.len() as usize + below.children.len();
        let (kept, dropped) = if upper_stays {
            (upper, lower)
        } else {
            (lower, upper)
        };
        let removed = self.runs.remove(dropped);
        for extent in removed.blocks.iter() {
            self.arena.assign_run(extent, kept);
        }
        let kept_run = &mut self.runs[kept];
        if upper_stays {
            let reserved = kept_run.blocks.shrink_reserved(0);
            kept_run.blocks.append(removed.blocks);
            kept_run.children = removed.children;
            self.arena.deallocate(reserved);
            self.reparent(kept);
        } else {
            let mut blocks = removed.blocks;
            let reserved = blocks.shrink_reserved(0);
            blocks.append(std::mem::take(&mut kept_run.blocks));
            let first = self.arena.local(blocks.first());
            kept_run.start = removed.start;
            kept_run.parent = removed.parent;
            kept_run.blocks = blocks;
            self.arena.deallocate(reserved);
            self.children_of(removed.parent).set(first, kept);
        }
        kept
    }

    /// Cleans up after the owners of a run changed: removes leaves without owners and merges equal
    /// runs.
    fn compact(&mut self, run: u32) {
        let mut run = run;
        while self.runs[run].is_unused() {
            let mut removed = self.runs.remove(run);
            let first = self.arena.local(removed.blocks.first());
            self.children_of(removed.parent).remove(first);
            self.blocks -= removed.blocks.len() as usize;
            self.free_extents(&mut removed.blocks);
            if removed.parent == NO_RUN {
                return;
            }
            run = removed.parent;
        }
        let run = self.join(run);
        let parent = self.runs[run].parent;
        if parent != NO_RUN {
            self.join(parent);
        }
    }

    fn reassign_blocks(&mut self, run: u32) {
        for extent in self.runs[run].blocks.iter() {
            self.arena.assign_run(extent, run);
        }
    }

    fn reparent(&mut self, run: u32) {
        let children = std::mem::take(&mut self.runs[run].children);
        for child in children.runs() {
            self.runs[child].parent = run;
        }
        self.runs[run].children = children;
    }
}

/// Counts the leading blocks whose positions follow a rule.
fn sequence_len(blocks: &[BlockId], rule: impl Fn(u32) -> u32) -> usize {
    blocks
        .iter()
        .zip(0..)
        .take_while(|(block, at)| block.0 == rule(*at))
        .count()
}

/// Returns the number of positions to reserve behind new blocks. A run that grows in small steps
/// gets about as many as its last extent has.
fn spare_positions(blocks: u32, last: ArenaExtent, new_blocks: usize) -> u32 {
    let (min, max) = RESERVE_RANGE;
    match new_blocks {
        0..8 if blocks > 0 && last.len <= max => (2 * last.len).max(min),
        0..8 => min,
        _ => 0,
    }
}
