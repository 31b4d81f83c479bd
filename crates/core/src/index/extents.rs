//! List of the extents of a run, with positions reserved behind the last extent for the blocks that
//! decoding adds. Most runs have one extent. Splitting and merging runs moves extents between
//! lists and copies no blocks.

use super::arena::{ArenaExtent, CHUNK};

/// Extents of a run.
#[derive(Debug, Default)]
pub(super) struct ExtentList {
    len: u32,
    /// Number of positions reserved behind the last extent.
    reserved: u32,
    head: ArenaExtent,
    rest: Vec<ArenaExtent>,
}

impl ExtentList {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = ArenaExtent> {
        std::iter::once(self.head)
            .filter(|head| head.len > 0)
            .chain(self.rest.iter().copied())
    }

    /// Returns the first extent and the others.
    pub(super) fn split_first(&self) -> (ArenaExtent, &[ArenaExtent]) {
        (self.head, &self.rest)
    }

    pub(super) fn last(&self) -> ArenaExtent {
        self.rest.last().copied().unwrap_or(self.head)
    }

    /// Returns the first position.
    pub(super) fn first(&self) -> u32 {
        self.head.first
    }

    /// Returns the positions reserved behind the last extent.
    pub(super) fn reserved_extent(&self) -> ArenaExtent {
        ArenaExtent {
            first: self.last().end(),
            len: self.reserved,
        }
    }

    /// Returns the extent that contains a position, and the number of blocks before the position.
    pub(super) fn find(&self, at: u32) -> Option<(u32, ArenaExtent)> {
        if self.head.contains(at) {
            return Some((at - self.head.first, self.head));
        }
        let mut before = self.head.len;
        for extent in &self.rest {
            if extent.contains(at) {
                return Some((before + at - extent.first, *extent));
            }
            before += extent.len;
        }
        None
    }

    /// Returns the position of the block with this index.
    pub(super) fn position(&self, index: u32) -> Option<u32> {
        let mut index = index;
        for extent in self.iter() {
            if index < extent.len {
                return Some(extent.first + index);
            }
            index -= extent.len;
        }
        None
    }

    /// Iterates over the extents after the first `blocks` blocks.
    pub(super) fn skip_blocks(&self, blocks: u32) -> impl Iterator<Item = ArenaExtent> {
        let mut to_skip = blocks;
        self.iter().filter_map(move |extent| {
            let skipped = to_skip.min(extent.len);
            to_skip -= skipped;
            (skipped < extent.len).then_some(ArenaExtent {
                first: extent.first + skipped,
                len: extent.len - skipped,
            })
        })
    }

    /// Turns reserved positions into blocks.
    pub(super) fn fill_reserved(&mut self, blocks: u32) {
        debug_assert!(
            blocks <= self.reserved,
            "more blocks than reserved positions"
        );
        self.reserved -= blocks;
        self.len += blocks;
        self.rest.last_mut().unwrap_or(&mut self.head).len += blocks;
    }

    /// Adds positions directly behind the last extent to the reserved ones.
    pub(super) fn grow_reserved(&mut self, blocks: u32) {
        self.reserved += blocks;
    }

    /// Reduces the reserved positions to `keep`, and returns the others.
    pub(super) fn shrink_reserved(&mut self, keep: u32) -> ArenaExtent {
        let freed = self.reserved.saturating_sub(keep);
        self.reserved -= freed;
        ArenaExtent {
            first: self.last().end() + self.reserved,
            len: freed,
        }
    }

    /// Adds an extent whose blocks are filled later. No positions may be reserved.
    pub(super) fn push_extent(&mut self, extent: ArenaExtent) {
        debug_assert!(self.reserved == 0, "positions are still reserved");
        let empty = ArenaExtent {
            first: extent.first,
            len: 0,
        };
        if self.len == 0 {
            self.head = empty;
        } else if !are_adjacent(self.last(), extent.first) {
            self.rest.push(empty);
        }
        self.reserved = extent.len;
    }

    /// Returns whether a position follows the last extent directly, in the same chunk.
    pub(super) fn is_followed_by(&self, first: u32) -> bool {
        are_adjacent(self.last(), first)
    }

    /// Appends the extents of another run. No positions may be reserved.
    pub(super) fn append(&mut self, other: ExtentList) {
        debug_assert!(
            self.reserved == 0 && self.len > 0 && other.len > 0,
            "the runs cannot be merged"
        );
        let last = self.rest.last_mut().unwrap_or(&mut self.head);
        let mut head = Some(other.head);
        if are_adjacent(*last, other.head.first) {
            last.len += other.head.len;
            head = None;
        }
        self.rest.extend(head.into_iter().chain(other.rest));
        self.len += other.len;
        self.reserved = other.reserved;
    }

    /// Keeps the first blocks, and returns the others together with the reserved positions.
    pub(super) fn split_off(&mut self, keep: u32) -> ExtentList {
        debug_assert!(0 < keep && keep < self.len, "one part would be empty");
        let mut lower = ExtentList {
            len: self.len - keep,
            reserved: std::mem::take(&mut self.reserved),
            ..ExtentList::default()
        };
        self.len = keep;
        if keep < self.head.len {
            lower.head = split_extent(&mut self.head, keep);
            lower.rest = std::mem::take(&mut self.rest);
            return lower;
        }
        let mut keep = keep - self.head.len;
        let mut at = 0;
        while keep >= self.rest[at].len {
            keep -= self.rest[at].len;
            at += 1;
        }
        let mut rest = self.rest.split_off(at);
        if keep > 0 {
            let tail = split_extent(&mut rest[0], keep);
            self.rest.push(std::mem::replace(&mut rest[0], tail));
        }
        lower.head = rest.remove(0);
        lower.rest = rest;
        self.rest.shrink_to(self.rest.len() * 2);
        lower
    }
}

/// Shortens an extent, and returns the rest.
fn split_extent(extent: &mut ArenaExtent, keep: u32) -> ArenaExtent {
    let tail = ArenaExtent {
        first: extent.first + keep,
        len: extent.len - keep,
    };
    extent.len = keep;
    tail
}

/// Returns whether an extent that starts at `first` can be merged with the one before it.
fn are_adjacent(last: ArenaExtent, first: u32) -> bool {
    last.end() == first && !(first as usize).is_multiple_of(CHUNK)
}
