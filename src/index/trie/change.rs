//! What changes a trie: blocks come, owners come and go, and runs are split and joined by it.

use super::{BlockId, Extents, Hold, Home, NOWHERE, Run, Trie};
use crate::block::LocalHash;
use crate::index::arena::{self, Stretch};
use crate::index::children::Children;
use crate::index::owners::{Layers, Owners};
use crate::index::seats::Seat;

/// A stretch for blocks that came together is not shorter, unless it takes many to find room for them.
const LEAST: usize = 64;
/// Positions that are kept at least for what decoding adds, and at most.
const ROOM: (u32, u32) = (8, 64);

impl Trie {
    /// Adds blocks after a block, or at the root, where no such continuation exists yet, and appends their ids. They are
    /// fewer than asked for where the trie has as many blocks as it can have.
    pub(in crate::index) fn extend(
        &mut self,
        after: Option<BlockId>,
        locals: &[LocalHash],
        hold: Hold,
        path: &mut Vec<BlockId>,
    ) {
        let mut after = after;
        let mut rest = locals;
        while !rest.is_empty() {
            let home = after.map(|block| self.home(block));
            let grown = match home {
                Some(Home { run, depth }) if self.may_grow(run, depth, hold) => {
                    self.grow(run, rest, path)
                }
                Some(Home { run, depth }) => self.branch((run, depth), rest, hold, path),
                None => self.sprout((NOWHERE, 0), rest, hold, path),
            };
            if grown == 0 {
                return;
            }
            after = path.last().copied();
            rest = &rest[grown..];
        }
    }

    /// Enters (`on`) or takes out a hold on `count` blocks from `first`, which must lie within one stretch of a run.
    pub(in crate::index) fn mark(&mut self, first: BlockId, count: usize, hold: Hold, on: bool) {
        let Home { run, depth: from } = self.home(first);
        if run == NOWHERE {
            return;
        }
        let to = from + count as u32;
        let before = self.runs[run].owners.layers(hold.seat);
        let after = if on {
            before.with(hold.layer)
        } else {
            before.without(hold.layer)
        };
        if before == after {
            return;
        }
        if !on && self.is_lone_tail(run, from, to, hold) {
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
        self.runs[run].owners.set(hold.seat, after);
        self.tidy(run);
    }

    /// Marks blocks in as few steps as their order allows.
    pub(in crate::index) fn mark_all(&mut self, blocks: &[BlockId], hold: Hold, on: bool) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let count = self.span(rest);
            self.mark(first, count, hold, on);
            rest = &rest[count..];
        }
    }

    /// Enters a hold on blocks as far as the seat has none, and says where it has.
    pub(in crate::index) fn grant(
        &mut self,
        blocks: &[BlockId],
        hold: Hold,
        held: &mut Vec<BlockId>,
    ) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let (now, later) = rest.split_at(self.span(rest));
            if self.layers(first, hold.seat).has(hold.layer) {
                held.extend(now);
            } else {
                self.mark(first, now.len(), hold, true);
            }
            rest = later;
        }
    }

    /// Takes a hold out of blocks in any order, of which each has it. Engines tell of the end of a prefix before what it
    /// follows, and then each step cuts the end of a run.
    pub(in crate::index) fn release(&mut self, blocks: &[BlockId], hold: Hold) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let down = row(rest, |at| first.0.wrapping_sub(at));
            let up = row(rest, |at| first.0.wrapping_add(at));
            let (lowest, count) = if down > up {
                (first.0 + 1 - down as u32, down)
            } else {
                (first.0, up)
            };
            let mut left = Stretch {
                first: lowest,
                len: count as u32,
            };
            while left.len > 0 {
                let last = left.end() - 1;
                let run = self.arena.home(last).map(|run| &self.runs[run]);
                let within = run
                    .and_then(|run| run.blocks.find(last))
                    .map_or(last, |(_, stretch)| stretch.first);
                let from = within.max(left.first);
                self.mark(BlockId(from), (last + 1 - from) as usize, hold, false);
                left.len = from - left.first;
            }
            rest = &rest[count..];
        }
    }

    /// Takes a seat out of the whole run a block is in. The block may be gone already.
    pub(in crate::index) fn evict(&mut self, block: BlockId, seat: Seat) {
        let Some(run) = self.arena.home(block.0) else {
            return;
        };
        if !self.runs[run].owners.layers(seat).is_empty() {
            self.runs[run].owners.set(seat, Layers::NONE);
            self.tidy(run);
        }
    }

    /// Whether blocks after this one can simply be appended to its run: it is a leaf and has just this owner.
    fn may_grow(&self, run: u32, depth: u32, hold: Hold) -> bool {
        let run = &self.runs[run];
        depth + 1 == run.end()
            && run.children.is_empty()
            && (run.blocks.len() as usize) < self.longest
            && run.owners.is_just(hold.seat, hold.layer)
    }

    /// Whether the stretch is the end of a leaf and nobody else holds it.
    fn is_lone_tail(&self, run: u32, from: u32, to: u32, hold: Hold) -> bool {
        let run = &self.runs[run];
        to == run.end()
            && from > run.start
            && run.children.is_empty()
            && run.owners.is_just(hold.seat, hold.layer)
    }

    /// A leaf that follows a block which others follow, too, or that others hold.
    fn branch(
        &mut self,
        at: (u32, u32),
        rest: &[LocalHash],
        hold: Hold,
        path: &mut Vec<BlockId>,
    ) -> usize {
        let (run, depth) = at;
        let parent = if depth + 1 < self.runs[run].end() {
            self.split(run, depth + 1).0
        } else {
            run
        };
        let grown = self.sprout((parent, depth + 1), rest, hold, path);
        if grown == 0 {
            // Nothing tells the two parts apart.
            self.join(parent);
        }
        grown
    }

    /// A new leaf with as many blocks as a run can have; how many these are.
    fn sprout(
        &mut self,
        at: (u32, u32),
        rest: &[LocalHash],
        hold: Hold,
        path: &mut Vec<BlockId>,
    ) -> usize {
        let (parent, start) = at;
        let owners = Owners::just(hold.seat, hold.layer);
        let run = self.runs.add(Run {
            start,
            parent,
            owners,
            ..Run::default()
        });
        let grown = self.grow(run, rest, path);
        if grown == 0 {
            self.runs.take(run);
        } else {
            self.children_of(parent).set(rest[0], run);
        }
        grown
    }

    /// Appends blocks to a run as far as it may grow; how many.
    fn grow(&mut self, run: u32, locals: &[LocalHash], path: &mut Vec<BlockId>) -> usize {
        let most = self.longest - self.runs[run].blocks.len() as usize;
        let all = &locals[..most.min(locals.len())];
        let mut rest = all;
        while !rest.is_empty() {
            let blocks = &mut self.runs[run].blocks;
            if blocks.room().len == 0 {
                let want = rest.len() + spare(blocks.len(), blocks.last(), rest.len()) as usize;
                let behind = if blocks.len() > 0 {
                    self.arena.take_behind(blocks.last().end(), want)
                } else {
                    0
                };
                if behind > 0 {
                    blocks.widen(behind);
                } else if let Some(stretch) = self.arena.take(want, rest.len().min(LEAST)) {
                    blocks.go_on(stretch);
                } else {
                    break;
                }
            }
            let Stretch { first, len } = blocks.room();
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            blocks.fill(now.len() as u32);
            self.arena.write(first, now);
            self.arena.settle(
                Stretch {
                    first,
                    len: now.len() as u32,
                },
                run,
            );
            path.extend((first..first + now.len() as u32).map(BlockId));
            rest = later;
        }
        self.blocks += all.len() - rest.len();
        all.len() - rest.len()
    }

    fn children_of(&mut self, run: u32) -> &mut Children {
        if run == NOWHERE {
            &mut self.roots
        } else {
            &mut self.runs[run].children
        }
    }

    /// Takes away the end of a run, of which something is left. The room stays while little is: it may be needed again.
    fn truncate(&mut self, run: u32, depth: u32) {
        let keep = depth - self.runs[run].start;
        let mut gone = self.runs[run].blocks.split_off(keep);
        let blocks = &mut self.runs[run].blocks;
        self.blocks -= gone.len() as usize;
        let (head, more) = gone.parts();
        if more.is_empty() && blocks.leads_to(head.first) {
            self.arena.settle(head, arena::NOWHERE);
            blocks.widen(head.len + gone.room().len);
        } else {
            self.discard(&mut gone);
        }
        let blocks = &mut self.runs[run].blocks;
        if blocks.room().len > ROOM.1.max(blocks.len()) {
            let rest = blocks.narrow(ROOM.0);
            self.arena.give(rest);
        }
    }

    /// Gives back what blocks lay in.
    fn discard(&mut self, blocks: &mut Extents) {
        let room = blocks.narrow(0);
        self.arena.give(room);
        for stretch in blocks.iter() {
            self.arena.give(stretch);
        }
    }

    /// Splits a run before a depth inside it; the ids of the part before and the part after. The part that is cheaper
    /// to move gets the new id.
    fn split(&mut self, run: u32, depth: u32) -> (u32, u32) {
        let upper = &mut self.runs[run];
        let at = depth - upper.start;
        let lower = Run {
            start: depth,
            parent: run,
            blocks: upper.blocks.split_off(at),
            owners: upper.owners.clone(),
            children: std::mem::take(&mut upper.children),
        };
        let boundary = self.arena.local(lower.blocks.first());
        if (at as usize) < lower.blocks.len() as usize + lower.children.len() {
            let upper = std::mem::replace(&mut self.runs[run], lower);
            let (first, parent) = (self.arena.local(upper.blocks.first()), upper.parent);
            let moved = self.runs.add(upper);
            self.rehome(moved);
            self.children_of(parent).set(first, moved);
            self.runs[run].parent = moved;
            self.runs[moved].children = Children::one(boundary, run);
            (moved, run)
        } else {
            let moved = self.runs.add(lower);
            self.rehome(moved);
            self.reparent(moved);
            self.runs[run].children = Children::one(boundary, moved);
            (run, moved)
        }
    }

    /// Joins a run with its only child if nothing tells them apart; the id of what is left.
    fn join(&mut self, upper: u32) -> u32 {
        let Some(lower) = self.runs[upper].children.only() else {
            return upper;
        };
        let (above, below) = (&self.runs[upper], &self.runs[lower]);
        if (above.blocks.len() + below.blocks.len()) as usize > self.longest
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
        let gone = self.runs.take(dropped);
        for stretch in gone.blocks.iter() {
            self.arena.settle(stretch, kept);
        }
        let rest = &mut self.runs[kept];
        if upper_stays {
            let room = rest.blocks.narrow(0);
            rest.blocks.append(gone.blocks);
            rest.children = gone.children;
            self.arena.give(room);
            self.reparent(kept);
        } else {
            let mut blocks = gone.blocks;
            let room = blocks.narrow(0);
            blocks.append(std::mem::take(&mut rest.blocks));
            let first = self.arena.local(blocks.first());
            (rest.start, rest.parent, rest.blocks) = (gone.start, gone.parent, blocks);
            self.arena.give(room);
            self.children_of(gone.parent).set(first, kept);
        }
        kept
    }

    /// After a run's owners changed: removes what nobody holds and nothing follows, and joins what is alike.
    fn tidy(&mut self, run: u32) {
        let mut run = run;
        while self.runs[run].is_bare() {
            let mut gone = self.runs.take(run);
            let first = self.arena.local(gone.blocks.first());
            self.children_of(gone.parent).remove(first);
            self.blocks -= gone.blocks.len() as usize;
            self.discard(&mut gone.blocks);
            if gone.parent == NOWHERE {
                return;
            }
            run = gone.parent;
        }
        let run = self.join(run);
        let parent = self.runs[run].parent;
        if parent != NOWHERE {
            self.join(parent);
        }
    }

    fn rehome(&mut self, run: u32) {
        for stretch in self.runs[run].blocks.iter() {
            self.arena.settle(stretch, run);
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

/// How many of the first blocks lie where a rule says.
fn row(blocks: &[BlockId], rule: impl Fn(u32) -> u32) -> usize {
    blocks
        .iter()
        .zip(0..)
        .take_while(|(block, at)| block.0 == rule(*at))
        .count()
}

/// Positions to keep behind blocks that come: where a run grows by little, about as many as it grew by lately.
fn spare(blocks: u32, last: Stretch, more: usize) -> u32 {
    let (least, most) = ROOM;
    match more {
        0..8 if blocks > 0 && last.len <= most => (2 * last.len).max(least),
        0..8 => least,
        _ => 0,
    }
}
