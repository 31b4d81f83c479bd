//! The blocks of a run: stretches of the arena, in their order, and the positions behind the last that are kept for what
//! decoding adds. Most runs have one stretch. Splits and joins hand stretches over and move nothing.

use super::arena::{CHUNK, Stretch};

/// Where the blocks of a run lie.
#[derive(Debug, Default)]
pub(super) struct Extents {
    len: u32,
    /// Positions behind the last stretch without a block.
    room: u32,
    head: Stretch,
    more: Vec<Stretch>,
}

impl Extents {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = Stretch> {
        std::iter::once(self.head)
            .filter(|head| head.len > 0)
            .chain(self.more.iter().copied())
    }

    /// The first stretch, and the others.
    pub(super) fn parts(&self) -> (Stretch, &[Stretch]) {
        (self.head, &self.more)
    }

    pub(super) fn last(&self) -> Stretch {
        self.more.last().copied().unwrap_or(self.head)
    }

    /// The first position.
    pub(super) fn first(&self) -> u32 {
        self.head.first
    }

    /// Positions that have no block yet.
    pub(super) fn room(&self) -> Stretch {
        Stretch {
            first: self.last().end(),
            len: self.room,
        }
    }

    /// How many blocks lie before a position, and the stretch it is in.
    pub(super) fn find(&self, at: u32) -> Option<(u32, Stretch)> {
        if self.head.has(at) {
            return Some((at - self.head.first, self.head));
        }
        let mut before = self.head.len;
        for stretch in &self.more {
            if stretch.has(at) {
                return Some((before + at - stretch.first, *stretch));
            }
            before += stretch.len;
        }
        None
    }

    /// The position of the block that so many lie before.
    pub(super) fn at(&self, before: u32) -> Option<u32> {
        let mut before = before;
        for stretch in self.iter() {
            if before < stretch.len {
                return Some(stretch.first + before);
            }
            before -= stretch.len;
        }
        None
    }

    /// What follows so many blocks.
    pub(super) fn skip(&self, blocks: u32) -> impl Iterator<Item = Stretch> {
        let mut before = blocks;
        self.iter().filter_map(move |stretch| {
            let skipped = before.min(stretch.len);
            before -= skipped;
            (skipped < stretch.len).then_some(Stretch {
                first: stretch.first + skipped,
                len: stretch.len - skipped,
            })
        })
    }

    /// Blocks come to positions that were kept.
    pub(super) fn fill(&mut self, blocks: u32) {
        debug_assert!(blocks <= self.room, "more blocks than room");
        self.room -= blocks;
        self.len += blocks;
        self.more.last_mut().unwrap_or(&mut self.head).len += blocks;
    }

    /// Positions directly behind the last stretch are kept for it.
    pub(super) fn widen(&mut self, room: u32) {
        self.room += room;
    }

    /// The positions that were kept, which are so no longer but for some of them.
    pub(super) fn narrow(&mut self, keep: u32) -> Stretch {
        let gone = self.room.saturating_sub(keep);
        self.room -= gone;
        Stretch {
            first: self.last().end() + self.room,
            len: gone,
        }
    }

    /// Goes on in another stretch, whose blocks are yet to come. Nothing may be kept behind the last one.
    pub(super) fn go_on(&mut self, stretch: Stretch) {
        debug_assert!(self.room == 0, "room in the middle");
        let empty = Stretch {
            first: stretch.first,
            len: 0,
        };
        if self.len == 0 {
            self.head = empty;
        } else if !is_next(self.last(), stretch.first) {
            self.more.push(empty);
        }
        self.room = stretch.len;
    }

    /// Whether a position lies directly behind the last stretch, and both in one chunk.
    pub(super) fn leads_to(&self, first: u32) -> bool {
        is_next(self.last(), first)
    }

    /// Those of another run follow. Nothing may be kept behind the last stretch.
    pub(super) fn append(&mut self, other: Extents) {
        debug_assert!(
            self.room == 0 && self.len > 0 && other.len > 0,
            "runs that cannot be joined"
        );
        let last = self.more.last_mut().unwrap_or(&mut self.head);
        let mut head = Some(other.head);
        if is_next(*last, other.head.first) {
            last.len += other.head.len;
            head = None;
        }
        self.more.extend(head.into_iter().chain(other.more));
        self.len += other.len;
        self.room = other.room;
    }

    /// Keeps the first blocks, and hands over the others and the room behind them.
    pub(super) fn split_off(&mut self, keep: u32) -> Extents {
        debug_assert!(0 < keep && keep < self.len, "an empty part");
        let mut lower = Extents {
            len: self.len - keep,
            room: std::mem::take(&mut self.room),
            ..Extents::default()
        };
        self.len = keep;
        if keep < self.head.len {
            lower.head = cut(&mut self.head, keep);
            lower.more = std::mem::take(&mut self.more);
            return lower;
        }
        let mut keep = keep - self.head.len;
        let mut at = 0;
        while keep >= self.more[at].len {
            keep -= self.more[at].len;
            at += 1;
        }
        let mut rest = self.more.split_off(at);
        if keep > 0 {
            let gone = cut(&mut rest[0], keep);
            self.more.push(std::mem::replace(&mut rest[0], gone));
        }
        lower.head = rest.remove(0);
        lower.more = rest;
        self.more.shrink_to(self.more.len() * 2);
        lower
    }
}

/// Shortens a stretch; what follows it.
fn cut(stretch: &mut Stretch, keep: u32) -> Stretch {
    let gone = Stretch {
        first: stretch.first + keep,
        len: stretch.len - keep,
    };
    stretch.len = keep;
    gone
}

/// Whether two stretches make one.
fn is_next(last: Stretch, first: u32) -> bool {
    last.end() == first && !(first as usize).is_multiple_of(CHUNK)
}
