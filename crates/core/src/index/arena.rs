//! Memory of the blocks of a trie.
//!
//! The id of a block is its position in the arena, so a run is a few extents of positions. Per
//! block, the arena stores the local hash and the run. Free extents form linked lists through their
//! own memory, are merged with free neighbours at once, and are reused before the arena grows. It
//! grows by chunks, so blocks are never moved.

use super::checkpoints::{CHECKPOINT_INTERVAL, PrefixCheckpoints};
pub(super) use super::sizes::CHUNK;
use crate::block::{LocalHash, SequenceHash};

/// Run id of a position without a block.
pub(super) const NO_RUN: u32 = u32::MAX;
/// Marks the first and the last position of a free extent, together with its length. Run ids are
/// smaller.
pub(super) const FREE_FLAG: u32 = 1 << 31;
/// Number of free lists. Extents are listed by the logarithm of their length.
const FREE_LIST_COUNT: usize = CHUNK.ilog2() as usize + 1;
/// End of a free list.
const LIST_END: u32 = u32::MAX;

/// Contiguous positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ArenaExtent {
    pub(super) first: u32,
    pub(super) len: u32,
}

impl ArenaExtent {
    pub(super) fn end(self) -> u32 {
        self.first + self.len
    }

    pub(super) fn contains(self, at: u32) -> bool {
        at.wrapping_sub(self.first) < self.len
    }
}

/// Part of the arena. All chunks are full-sized except the last one, and except empty ones, which
/// have no memory.
#[derive(Debug, Default)]
struct ArenaChunk {
    locals: Vec<LocalHash>,
    run_ids: Vec<u32>,
    checkpoints: PrefixCheckpoints,
}

/// Part of a prompt that has not been matched yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptSuffix<'a> {
    pub(super) locals: &'a [LocalHash],
    pub(super) sequences: &'a [SequenceHash],
}

impl PromptSuffix<'_> {
    pub(super) fn skip(self, blocks: usize) -> Self {
        Self {
            locals: &self.locals[blocks..],
            sequences: &self.sequences[blocks..],
        }
    }
}

/// Positions of a trie.
#[derive(Debug)]
pub(super) struct BlockArena {
    chunks: Vec<ArenaChunk>,
    free_lists: [u32; FREE_LIST_COUNT],
    /// Number of positions in the free lists.
    free: usize,
    /// Number of positions in use.
    used: usize,
    /// Chunks without memory.
    empty_chunks: Vec<u32>,
    /// Maximum number of chunks.
    max_chunks: usize,
}

impl Default for BlockArena {
    fn default() -> Self {
        // Keeps run ids below `FREE_FLAG`.
        let most = FREE_FLAG as usize / CHUNK - 1;
        Self {
            chunks: Vec::new(),
            free_lists: [LIST_END; FREE_LIST_COUNT],
            free: 0,
            used: 0,
            empty_chunks: Vec::new(),
            max_chunks: most,
        }
    }
}

impl BlockArena {
    pub(super) fn local(&self, at: u32) -> LocalHash {
        let (chunk, at) = chunk_offset(at);
        self.chunks[chunk].locals[at]
    }

    pub(super) fn locals(&self, stretch: ArenaExtent) -> &[LocalHash] {
        let (chunk, at) = chunk_offset(stretch.first);
        &self.chunks[chunk].locals[at..at + stretch.len as usize]
    }

    /// Counts the blocks of an extent that continue the prompt. All blocks before the extent must
    /// match the prompt.
    pub(super) fn match_extent(&self, stretch: ArenaExtent, asked: PromptSuffix<'_>) -> usize {
        let (chunk, at) = chunk_offset(stretch.first);
        let ArenaChunk {
            locals,
            checkpoints: marks,
            ..
        } = &self.chunks[chunk];
        let len = asked.locals.len().min(stretch.len as usize);
        let ours = &locals[at..at + len];
        let theirs = &asked.locals[..len];
        let mut agreed = marks.matching_len(at, &asked.sequences[..len]);
        while agreed < len {
            let to = len.min(
                (at + agreed) / CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL + CHECKPOINT_INTERVAL
                    - at,
            );
            agreed += common_prefix_len(&ours[agreed..to], &theirs[agreed..to]);
            if agreed < to {
                break;
            }
            marks.record(at + agreed - 1, asked.sequences[agreed - 1]);
        }
        agreed
    }

    /// Returns the run of the block at a position.
    pub(super) fn run_at(&self, at: u32) -> Option<u32> {
        let (chunk, at) = chunk_offset(at);
        let home = *self.chunks.get(chunk)?.run_ids.get(at)?;
        (home < FREE_FLAG).then_some(home)
    }

    /// Assigns the positions of an extent to a run.
    pub(super) fn assign_run(&mut self, stretch: ArenaExtent, run: u32) {
        let (chunk, at) = chunk_offset(stretch.first);
        self.chunks[chunk].run_ids[at..at + stretch.len as usize].fill(run);
    }

    pub(super) fn write(&mut self, first: u32, locals: &[LocalHash]) {
        let (chunk, at) = chunk_offset(first);
        let chunk = &mut self.chunks[chunk];
        chunk.locals[at..at + locals.len()].copy_from_slice(locals);
        chunk.checkpoints.clear(at..at + locals.len());
    }

    /// Allocates an extent of at most `want` positions. It is shorter than `least` only if free
    /// memory is fragmented. Returns `None` if all positions are in use.
    pub(super) fn allocate(&mut self, want: usize, least: usize) -> Option<ArenaExtent> {
        let want = want.min(CHUNK);
        let least = if self.free > self.used { 1 } else { least };
        let stretch = self
            .allocate_from_lists(want, least)
            .or_else(|| self.allocate_from_chunks(want))
            .or_else(|| self.allocate_from_lists(want, 1))?;
        self.used += stretch.len as usize;
        Some(stretch)
    }

    /// Allocates free positions that start exactly at `end`. Returns their number.
    pub(super) fn allocate_at(&mut self, end: u32, want: usize) -> u32 {
        let (number, at) = chunk_offset(end);
        let is_last = number + 1 == self.chunks.len();
        let Some(chunk) = self.chunks.get_mut(number).filter(|_| at > 0) else {
            return 0;
        };
        let got = if at == chunk.run_ids.len() && is_last {
            let got = want.min(CHUNK - at);
            chunk.extend(got);
            got
        } else {
            let Some(len) = chunk
                .run_ids
                .get(at)
                .and_then(|home| decode_free_len(*home))
            else {
                return 0;
            };
            self.remove_free(ArenaExtent { first: end, len });
            let got = want.min(len as usize);
            self.insert_free(ArenaExtent {
                first: end + got as u32,
                len: len - got as u32,
            });
            got
        };
        self.used += got;
        got as u32
    }

    /// Frees an extent.
    pub(super) fn deallocate(&mut self, stretch: ArenaExtent) {
        if stretch.len == 0 {
            return;
        }
        self.used -= stretch.len as usize;
        self.assign_run(stretch, NO_RUN);
        let (number, at) = chunk_offset(stretch.first);
        let homes = &self.chunks[number].run_ids;
        let before = at
            .checked_sub(1)
            .and_then(|at| decode_free_len(homes[at]))
            .unwrap_or(0);
        let after = homes
            .get(at + stretch.len as usize)
            .and_then(|home| decode_free_len(*home))
            .unwrap_or(0);
        if before > 0 {
            self.remove_free(ArenaExtent {
                first: stretch.first - before,
                len: before,
            });
        }
        if after > 0 {
            self.remove_free(ArenaExtent {
                first: stretch.end(),
                len: after,
            });
        }
        let whole = ArenaExtent {
            first: stretch.first - before,
            len: before + stretch.len + after,
        };
        let is_last = number + 1 == self.chunks.len();
        let chunk = &mut self.chunks[number];
        let from = at - before as usize;
        if is_last && from + whole.len as usize == chunk.run_ids.len() {
            chunk.truncate(from);
        } else if whole.len as usize == CHUNK && self.free_lists[FREE_LIST_COUNT - 1] != LIST_END {
            // One free chunk keeps its memory, because the next allocation would request it again.
            *chunk = ArenaChunk::default();
            self.empty_chunks.push(number as u32);
        } else {
            self.insert_free(whole);
        }
    }

    fn allocate_from_lists(&mut self, want: usize, least: usize) -> Option<ArenaExtent> {
        let enough = want.next_power_of_two().ilog2() as usize;
        let (small, large) = self.free_lists.split_at(enough.min(FREE_LIST_COUNT));
        let large = large.iter().copied().find(|head| *head != LIST_END);
        // Several extents are needed in any case, so the largest one comes first.
        let mut small = small.iter().rev().copied().filter(|head| *head != LIST_END);
        let first = large.or_else(|| small.find(|head| self.free_len(*head) as usize >= least))?;
        let whole = ArenaExtent {
            first,
            len: self.free_len(first),
        };
        self.remove_free(whole);
        let len = whole.len.min(want as u32);
        self.insert_free(ArenaExtent {
            first: first + len,
            len: whole.len - len,
        });
        Some(ArenaExtent { first, len })
    }

    fn allocate_from_chunks(&mut self, want: usize) -> Option<ArenaExtent> {
        let number = match self.chunks.len().checked_sub(1) {
            Some(last) if self.chunks[last].run_ids.len() + want <= CHUNK => last,
            _ => self.open_chunk()?,
        };
        let is_last = number + 1 == self.chunks.len();
        let chunk = &mut self.chunks[number];
        let at = chunk.run_ids.len();
        chunk.extend(want);
        let whole = ArenaExtent {
            first: (number * CHUNK + at) as u32,
            len: want as u32,
        };
        if !is_last {
            // Only the last chunk may be shorter.
            chunk.extend(CHUNK - want);
            self.insert_free(ArenaExtent {
                first: whole.end(),
                len: (CHUNK - want) as u32,
            });
        }
        Some(whole)
    }

    /// Opens an empty chunk. If it follows the last chunk, the rest of that chunk becomes free.
    fn open_chunk(&mut self) -> Option<usize> {
        let number = match self.empty_chunks.pop() {
            Some(bare) => bare as usize,
            None => {
                if let Some(last) = self
                    .chunks
                    .last_mut()
                    .filter(|last| last.run_ids.len() < CHUNK)
                {
                    let at = last.run_ids.len();
                    last.extend(CHUNK - at);
                    let first = ((self.chunks.len() - 1) * CHUNK + at) as u32;
                    self.insert_free(ArenaExtent {
                        first,
                        len: (CHUNK - at) as u32,
                    });
                }
                if self.chunks.len() == self.max_chunks {
                    return None;
                }
                self.chunks.push(ArenaChunk::default());
                self.chunks.len() - 1
            }
        };
        if self.chunks.len() > 1 {
            self.chunks[number].locals.reserve_exact(CHUNK);
            self.chunks[number].run_ids.reserve_exact(CHUNK);
        }
        Some(number)
    }

    fn free_len(&self, first: u32) -> u32 {
        let (chunk, at) = chunk_offset(first);
        decode_free_len(self.chunks[chunk].run_ids[at]).unwrap_or(0)
    }

    /// Adds an extent to the free list of its length.
    fn insert_free(&mut self, stretch: ArenaExtent) {
        if stretch.len == 0 {
            return;
        }
        self.free += stretch.len as usize;
        let head = &mut self.free_lists[stretch.len.ilog2() as usize];
        let next = std::mem::replace(head, stretch.first);
        self.set_free_links(stretch.first, LIST_END, next);
        if next != LIST_END {
            let (_, after) = self.free_links(next);
            self.set_free_links(next, stretch.first, after);
        }
        let (chunk, at) = chunk_offset(stretch.first);
        let homes = &mut self.chunks[chunk].run_ids;
        homes[at] = FREE_FLAG | stretch.len;
        homes[at + stretch.len as usize - 1] = FREE_FLAG | stretch.len;
    }

    fn remove_free(&mut self, stretch: ArenaExtent) {
        self.free -= stretch.len as usize;
        let (before, next) = self.free_links(stretch.first);
        if before == LIST_END {
            self.free_lists[stretch.len.ilog2() as usize] = next;
        } else {
            let (ahead, _) = self.free_links(before);
            self.set_free_links(before, ahead, next);
        }
        if next != LIST_END {
            let (_, after) = self.free_links(next);
            self.set_free_links(next, before, after);
        }
        let (chunk, at) = chunk_offset(stretch.first);
        let homes = &mut self.chunks[chunk].run_ids;
        homes[at] = NO_RUN;
        homes[at + stretch.len as usize - 1] = NO_RUN;
    }

    /// Previous and next extent in the free list. They are stored in place of the first local hash.
    fn free_links(&self, first: u32) -> (u32, u32) {
        let packed = self.local(first).0;
        ((packed >> 32) as u32, packed as u32)
    }

    fn set_free_links(&mut self, first: u32, before: u32, next: u32) {
        let (chunk, at) = chunk_offset(first);
        self.chunks[chunk].locals[at] = LocalHash(u64::from(before) << 32 | u64::from(next));
    }
}

impl ArenaChunk {
    fn extend(&mut self, more: usize) {
        let len = self.run_ids.len() + more;
        if len > self.run_ids.capacity() {
            // Doubles the capacity, up to the end of the chunk.
            let room = (2 * self.run_ids.capacity()).min(CHUNK).max(len) - self.run_ids.len();
            self.locals.reserve_exact(room);
            self.run_ids.reserve_exact(room);
        }
        self.locals.resize(len, LocalHash(0));
        self.run_ids.resize(len, NO_RUN);
        self.checkpoints.resize(len);
    }

    /// Shortens the chunk, and returns memory if most of it is unused.
    fn truncate(&mut self, len: usize) {
        self.locals.truncate(len);
        self.run_ids.truncate(len);
        self.checkpoints.resize(len);
        if self.run_ids.capacity() > 64.max(4 * len) {
            self.locals.shrink_to(2 * len);
            self.run_ids.shrink_to(2 * len);
        }
    }
}

/// Hashes compared per step: two cache lines, so that several loads are in flight.
const COMPARE_STEP: usize = 16;

/// Returns the length of the common prefix. Equality is the usual case, so the exact position is
/// searched only in a chunk that differs.
pub(super) fn common_prefix_len(run: &[LocalHash], prompt: &[LocalHash]) -> usize {
    let ours = run.chunks_exact(COMPARE_STEP);
    let theirs = prompt.chunks_exact(COMPARE_STEP);
    let same = ours
        .zip(theirs)
        .take_while(|(ours, theirs)| are_equal(ours, theirs))
        .count()
        * COMPARE_STEP;
    let rest = run[same..].iter().zip(&prompt[same..]);
    same + rest.take(COMPARE_STEP).take_while(|(a, b)| a == b).count()
}

/// Compares without a branch per hash.
fn are_equal(ours: &[LocalHash], theirs: &[LocalHash]) -> bool {
    ours.iter()
        .zip(theirs)
        .fold(0, |difference, (a, b)| difference | (a.0 ^ b.0))
        == 0
}

fn chunk_offset(at: u32) -> (usize, usize) {
    (at as usize / CHUNK, at as usize % CHUNK)
}

/// Returns the length of the free extent that begins or ends at a position with this run id.
fn decode_free_len(home: u32) -> Option<u32> {
    (home >= FREE_FLAG && home != NO_RUN).then_some(home & !FREE_FLAG)
}

#[cfg(test)]
pub(super) mod tests;
