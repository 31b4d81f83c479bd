//! Where the blocks of a trie lie. The id of a block is its position, so a run is a few stretches of positions, and what is
//! kept per block is its local hash and the run it is in. Stretches that became free are lists through their own memory,
//! joined with free neighbours at once, and used before the arena grows; it grows by chunks, so nothing is ever moved.

use super::marks::{APART, Marks};
use crate::block::{LocalHash, SequenceHash};

/// Positions in a chunk. A stretch lies within one.
pub(super) const CHUNK: usize = if cfg!(test) { 1 << 7 } else { 1 << 13 };
/// No run: the home of a position that no block is at.
pub(super) const NOWHERE: u32 = u32::MAX;
/// In the home of the first and the last position of a free stretch, beside its length. Runs have lower numbers.
pub(super) const FREE: u32 = 1 << 31;
/// Lists of free stretches, by the power of two that their length reaches.
const LISTS: usize = CHUNK.ilog2() as usize + 1;
/// The end of a list.
const NONE: u32 = u32::MAX;

/// Positions that follow one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) first: u32,
    pub(super) len: u32,
}

impl Stretch {
    pub(super) fn end(self) -> u32 {
        self.first + self.len
    }

    pub(super) fn has(self, at: u32) -> bool {
        at.wrapping_sub(self.first) < self.len
    }
}

/// A part of the arena. All are whole but the last, and those without a block, which have no memory.
#[derive(Debug, Default)]
struct Chunk {
    locals: Vec<LocalHash>,
    homes: Vec<u32>,
    marks: Marks,
}

/// What is left of a prompt that is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) locals: &'a [LocalHash],
    pub(super) names: &'a [SequenceHash],
}

impl Asked<'_> {
    pub(super) fn skip(self, blocks: usize) -> Self {
        Self {
            locals: &self.locals[blocks..],
            names: &self.names[blocks..],
        }
    }
}

/// The positions of a trie.
#[derive(Debug)]
pub(super) struct Arena {
    chunks: Vec<Chunk>,
    lists: [u32; LISTS],
    /// Positions in the lists.
    free: usize,
    /// Positions that are not free.
    used: usize,
    /// Chunks without memory.
    bare: Vec<u32>,
    /// Chunks there may be.
    most: usize,
}

impl Default for Arena {
    fn default() -> Self {
        // So there are never as many runs as would look like free stretches.
        let most = FREE as usize / CHUNK - 1;
        Self {
            chunks: Vec::new(),
            lists: [NONE; LISTS],
            free: 0,
            used: 0,
            bare: Vec::new(),
            most,
        }
    }
}

impl Arena {
    pub(super) fn local(&self, at: u32) -> LocalHash {
        let (chunk, at) = place(at);
        self.chunks[chunk].locals[at]
    }

    pub(super) fn locals(&self, stretch: Stretch) -> &[LocalHash] {
        let (chunk, at) = place(stretch.first);
        &self.chunks[chunk].locals[at..at + stretch.len as usize]
    }

    /// How many blocks of a stretch are the next of a prompt that agrees with all before it.
    pub(super) fn agreed(&self, stretch: Stretch, asked: Asked<'_>) -> usize {
        let (chunk, at) = place(stretch.first);
        let Chunk { locals, marks, .. } = &self.chunks[chunk];
        let len = asked.locals.len().min(stretch.len as usize);
        let (ours, theirs) = (&locals[at..at + len], &asked.locals[..len]);
        let mut agreed = marks.known(at, &asked.names[..len]);
        while agreed < len {
            let to = len.min((at + agreed) / APART * APART + APART - at);
            agreed += common(&ours[agreed..to], &theirs[agreed..to]);
            if agreed < to {
                break;
            }
            marks.leave(at + agreed - 1, asked.names[agreed - 1]);
        }
        agreed
    }

    /// The run of the block at a position.
    pub(super) fn home(&self, at: u32) -> Option<u32> {
        let (chunk, at) = place(at);
        let home = *self.chunks.get(chunk)?.homes.get(at)?;
        (home < FREE).then_some(home)
    }

    /// Blocks come to a stretch, or what is there comes to another run.
    pub(super) fn settle(&mut self, stretch: Stretch, run: u32) {
        let (chunk, at) = place(stretch.first);
        self.chunks[chunk].homes[at..at + stretch.len as usize].fill(run);
    }

    pub(super) fn write(&mut self, first: u32, locals: &[LocalHash]) {
        let (chunk, at) = place(first);
        let chunk = &mut self.chunks[chunk];
        chunk.locals[at..at + locals.len()].copy_from_slice(locals);
        chunk.marks.forget(at..at + locals.len());
    }

    /// A stretch of at most so many positions, and not of fewer than some unless the rest is in pieces; `None` when all
    /// positions there can be are in use.
    pub(super) fn take(&mut self, want: usize, least: usize) -> Option<Stretch> {
        let want = want.min(CHUNK);
        let least = if self.free > self.used { 1 } else { least };
        let stretch = self
            .take_free(want, least)
            .or_else(|| self.take_fresh(want))
            .or_else(|| self.take_free(want, 1))?;
        self.used += stretch.len as usize;
        Some(stretch)
    }

    /// Takes free positions directly behind a stretch; how many.
    pub(super) fn take_behind(&mut self, end: u32, want: usize) -> u32 {
        let (number, at) = place(end);
        let is_last = number + 1 == self.chunks.len();
        let Some(chunk) = self.chunks.get_mut(number).filter(|_| at > 0) else {
            return 0;
        };
        let got = if at == chunk.homes.len() && is_last {
            let got = want.min(CHUNK - at);
            chunk.extend(got);
            got
        } else {
            let Some(len) = chunk.homes.get(at).and_then(|home| free_length(*home)) else {
                return 0;
            };
            self.unlist(Stretch { first: end, len });
            let got = want.min(len as usize);
            self.list(Stretch {
                first: end + got as u32,
                len: len - got as u32,
            });
            got
        };
        self.used += got;
        got as u32
    }

    /// A stretch is not used any more.
    pub(super) fn give(&mut self, stretch: Stretch) {
        if stretch.len == 0 {
            return;
        }
        self.used -= stretch.len as usize;
        self.settle(stretch, NOWHERE);
        let (number, at) = place(stretch.first);
        let homes = &self.chunks[number].homes;
        let before = at
            .checked_sub(1)
            .and_then(|at| free_length(homes[at]))
            .unwrap_or(0);
        let after = homes
            .get(at + stretch.len as usize)
            .and_then(|home| free_length(*home))
            .unwrap_or(0);
        if before > 0 {
            self.unlist(Stretch {
                first: stretch.first - before,
                len: before,
            });
        }
        if after > 0 {
            self.unlist(Stretch {
                first: stretch.end(),
                len: after,
            });
        }
        let whole = Stretch {
            first: stretch.first - before,
            len: before + stretch.len + after,
        };
        let is_last = number + 1 == self.chunks.len();
        let chunk = &mut self.chunks[number];
        let from = at - before as usize;
        if is_last && from + whole.len as usize == chunk.homes.len() {
            chunk.cut(from);
        } else if whole.len as usize == CHUNK && self.lists[LISTS - 1] != NONE {
            // One is kept: what comes next would ask for it again.
            *chunk = Chunk::default();
            self.bare.push(number as u32);
        } else {
            self.list(whole);
        }
    }

    fn take_free(&mut self, want: usize, least: usize) -> Option<Stretch> {
        let enough = want.next_power_of_two().ilog2() as usize;
        let (small, large) = self.lists.split_at(enough.min(LISTS));
        let large = large.iter().copied().find(|head| *head != NONE);
        // Where it takes several anyway, the largest.
        let mut small = small.iter().rev().copied().filter(|head| *head != NONE);
        let first = large.or_else(|| small.find(|head| self.length(*head) as usize >= least))?;
        let whole = Stretch {
            first,
            len: self.length(first),
        };
        self.unlist(whole);
        let len = whole.len.min(want as u32);
        self.list(Stretch {
            first: first + len,
            len: whole.len - len,
        });
        Some(Stretch { first, len })
    }

    fn take_fresh(&mut self, want: usize) -> Option<Stretch> {
        let number = match self.chunks.len().checked_sub(1) {
            Some(last) if self.chunks[last].homes.len() + want <= CHUNK => last,
            _ => self.begin_chunk()?,
        };
        let is_last = number + 1 == self.chunks.len();
        let chunk = &mut self.chunks[number];
        let at = chunk.homes.len();
        chunk.extend(want);
        let whole = Stretch {
            first: (number * CHUNK + at) as u32,
            len: want as u32,
        };
        if !is_last {
            // Only the last chunk may be shorter.
            chunk.extend(CHUNK - want);
            self.list(Stretch {
                first: whole.end(),
                len: (CHUNK - want) as u32,
            });
        }
        Some(whole)
    }

    /// A chunk with nothing in it. The rest of the last one becomes free where another comes after it.
    fn begin_chunk(&mut self) -> Option<usize> {
        let number = match self.bare.pop() {
            Some(bare) => bare as usize,
            None => {
                if let Some(last) = self
                    .chunks
                    .last_mut()
                    .filter(|last| last.homes.len() < CHUNK)
                {
                    let at = last.homes.len();
                    last.extend(CHUNK - at);
                    let first = ((self.chunks.len() - 1) * CHUNK + at) as u32;
                    self.list(Stretch {
                        first,
                        len: (CHUNK - at) as u32,
                    });
                }
                if self.chunks.len() == self.most {
                    return None;
                }
                self.chunks.push(Chunk::default());
                self.chunks.len() - 1
            }
        };
        if self.chunks.len() > 1 {
            self.chunks[number].locals.reserve_exact(CHUNK);
            self.chunks[number].homes.reserve_exact(CHUNK);
        }
        Some(number)
    }

    fn length(&self, first: u32) -> u32 {
        let (chunk, at) = place(first);
        free_length(self.chunks[chunk].homes[at]).unwrap_or(0)
    }

    /// Enters a stretch in the list of its length.
    fn list(&mut self, stretch: Stretch) {
        if stretch.len == 0 {
            return;
        }
        self.free += stretch.len as usize;
        let head = &mut self.lists[stretch.len.ilog2() as usize];
        let next = std::mem::replace(head, stretch.first);
        self.link(stretch.first, NONE, next);
        if next != NONE {
            let (_, after) = self.links(next);
            self.link(next, stretch.first, after);
        }
        let (chunk, at) = place(stretch.first);
        let homes = &mut self.chunks[chunk].homes;
        homes[at] = FREE | stretch.len;
        homes[at + stretch.len as usize - 1] = FREE | stretch.len;
    }

    fn unlist(&mut self, stretch: Stretch) {
        self.free -= stretch.len as usize;
        let (before, next) = self.links(stretch.first);
        if before == NONE {
            self.lists[stretch.len.ilog2() as usize] = next;
        } else {
            let (ahead, _) = self.links(before);
            self.link(before, ahead, next);
        }
        if next != NONE {
            let (_, after) = self.links(next);
            self.link(next, before, after);
        }
        let (chunk, at) = place(stretch.first);
        let homes = &mut self.chunks[chunk].homes;
        homes[at] = NOWHERE;
        homes[at + stretch.len as usize - 1] = NOWHERE;
    }

    /// The neighbours in a list lie where the first local hash would.
    fn links(&self, first: u32) -> (u32, u32) {
        let packed = self.local(first).0;
        ((packed >> 32) as u32, packed as u32)
    }

    fn link(&mut self, first: u32, before: u32, next: u32) {
        let (chunk, at) = place(first);
        self.chunks[chunk].locals[at] = LocalHash(u64::from(before) << 32 | u64::from(next));
    }
}

impl Chunk {
    fn extend(&mut self, more: usize) {
        let len = self.homes.len() + more;
        if len > self.homes.capacity() {
            // By doubling, as any list, but not beyond the end.
            let room = (2 * self.homes.capacity()).min(CHUNK).max(len) - self.homes.len();
            self.locals.reserve_exact(room);
            self.homes.reserve_exact(room);
        }
        self.locals.resize(len, LocalHash(0));
        self.homes.resize(len, NOWHERE);
        self.marks.fit(len);
    }

    /// Ends earlier, and gives memory back where most of it is not needed any more.
    fn cut(&mut self, len: usize) {
        self.locals.truncate(len);
        self.homes.truncate(len);
        self.marks.fit(len);
        if self.homes.capacity() > 64.max(4 * len) {
            self.locals.shrink_to(2 * len);
            self.homes.shrink_to(2 * len);
        }
    }
}

/// Hashes that are compared in one step: two lines of the cache, so that many are on their way from memory at once.
const STEP: usize = 16;

/// Length of the common beginning. Agreement is the usual case, so a difference is only looked for where one is.
pub(super) fn common(run: &[LocalHash], prompt: &[LocalHash]) -> usize {
    let (ours, theirs) = (run.chunks_exact(STEP), prompt.chunks_exact(STEP));
    let same = ours
        .zip(theirs)
        .take_while(|(ours, theirs)| is_same(ours, theirs))
        .count()
        * STEP;
    let rest = run[same..].iter().zip(&prompt[same..]);
    same + rest.take(STEP).take_while(|(a, b)| a == b).count()
}

/// Without a branch for each hash.
fn is_same(ours: &[LocalHash], theirs: &[LocalHash]) -> bool {
    ours.iter()
        .zip(theirs)
        .fold(0, |difference, (a, b)| difference | (a.0 ^ b.0))
        == 0
}

fn place(at: u32) -> (usize, usize) {
    (at as usize / CHUNK, at as usize % CHUNK)
}

/// The length of the free stretch that begins or ends at a position with this home.
fn free_length(home: u32) -> Option<u32> {
    (home >= FREE && home != NOWHERE).then_some(home & !FREE)
}

#[cfg(test)]
pub(super) mod tests;
