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
        let max_chunks = FREE_FLAG as usize / CHUNK - 1;
        Self {
            chunks: Vec::new(),
            free_lists: [LIST_END; FREE_LIST_COUNT],
            free: 0,
            used: 0,
            empty_chunks: Vec::new(),
            max_chunks,
        }
    }
}

impl BlockArena {
    pub(super) fn local(&self, at: u32) -> LocalHash {
        let (chunk, at) = chunk_offset(at);
        self.chunks[chunk].locals[at]
    }

    pub(super) fn locals(&self, extent: ArenaExtent) -> &[LocalHash] {
        let (chunk, at) = chunk_offset(extent.first);
        &self.chunks[chunk].locals[at..at + extent.len as usize]
    }

    /// Counts the blocks of an extent that continue the prompt. All blocks before the extent must
    /// match the prompt.
    pub(super) fn match_extent(&self, extent: ArenaExtent, prompt: PromptSuffix<'_>) -> usize {
        let (chunk, at) = chunk_offset(extent.first);
        let ArenaChunk {
            locals,
            checkpoints,
            ..
        } = &self.chunks[chunk];
        let len = prompt.locals.len().min(extent.len as usize);
        let ours = &locals[at..at + len];
        let theirs = &prompt.locals[..len];
        let mut matched = checkpoints.matching_len(at, &prompt.sequences[..len]);
        while matched < len {
            let to = len.min(
                (at + matched) / CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL + CHECKPOINT_INTERVAL
                    - at,
            );
            matched += common_prefix_len(&ours[matched..to], &theirs[matched..to]);
            if matched < to {
                break;
            }
            checkpoints.record(at + matched - 1, prompt.sequences[matched - 1]);
        }
        matched
    }

    /// Returns the run of the block at a position.
    pub(super) fn run_at(&self, at: u32) -> Option<u32> {
        let (chunk, at) = chunk_offset(at);
        let run_id = *self.chunks.get(chunk)?.run_ids.get(at)?;
        (run_id < FREE_FLAG).then_some(run_id)
    }

    /// Assigns the positions of an extent to a run.
    pub(super) fn assign_run(&mut self, extent: ArenaExtent, run: u32) {
        let (chunk, at) = chunk_offset(extent.first);
        self.chunks[chunk].run_ids[at..at + extent.len as usize].fill(run);
    }

    pub(super) fn write(&mut self, first: u32, locals: &[LocalHash]) {
        let (chunk, at) = chunk_offset(first);
        let chunk = &mut self.chunks[chunk];
        chunk.locals[at..at + locals.len()].copy_from_slice(locals);
        chunk.checkpoints.clear(at..at + locals.len());
    }

    /// Allocates an extent of at most `want` positions. It is shorter than `min_len` only if
    /// free memory is fragmented. Returns `None` if all positions are in use.
    pub(super) fn allocate(&mut self, want: usize, min_len: usize) -> Option<ArenaExtent> {
        let want = want.min(CHUNK);
        let min_len = if self.free > self.used { 1 } else { min_len };
        let extent = self
            .allocate_from_lists(want, min_len)
            .or_else(|| self.allocate_from_chunks(want))
            .or_else(|| self.allocate_from_lists(want, 1))?;
        self.used += extent.len as usize;
        Some(extent)
    }

    /// Allocates free positions that start exactly at `end`. Returns their number.
    pub(super) fn allocate_at(&mut self, end: u32, want: usize) -> u32 {
        let (number, at) = chunk_offset(end);
        let is_last = number + 1 == self.chunks.len();
        let Some(chunk) = self.chunks.get_mut(number).filter(|_| at > 0) else {
            return 0;
        };
        let count = if at == chunk.run_ids.len() && is_last {
            let count = want.min(CHUNK - at);
            chunk.extend(count);
            count
        } else {
            let Some(len) = chunk
                .run_ids
                .get(at)
                .and_then(|run_id| decode_free_len(*run_id))
            else {
                return 0;
            };
            self.remove_free(ArenaExtent { first: end, len });
            let count = want.min(len as usize);
            self.insert_free(ArenaExtent {
                first: end + count as u32,
                len: len - count as u32,
            });
            count
        };
        self.used += count;
        count as u32
    }

    /// Frees an extent.
    pub(super) fn deallocate(&mut self, extent: ArenaExtent) {
        if extent.len == 0 {
            return;
        }
        self.used -= extent.len as usize;
        self.assign_run(extent, NO_RUN);
        let (number, at) = chunk_offset(extent.first);
        let run_ids = &self.chunks[number].run_ids;
        let before = at
            .checked_sub(1)
            .and_then(|at| decode_free_len(run_ids[at]))
            .unwrap_or(0);
        let after = run_ids
            .get(at + extent.len as usize)
            .and_then(|run_id| decode_free_len(*run_id))
            .unwrap_or(0);
        if before > 0 {
            self.remove_free(ArenaExtent {
                first: extent.first - before,
                len: before,
            });
        }
        if after > 0 {
            self.remove_free(ArenaExtent {
                first: extent.end(),
                len: after,
            });
        }
        let merged = ArenaExtent {
            first: extent.first - before,
            len: before + extent.len + after,
        };
        let is_last = number + 1 == self.chunks.len();
        let chunk = &mut self.chunks[number];
        let from = at - before as usize;
        if is_last && from + merged.len as usize == chunk.run_ids.len() {
            chunk.truncate(from);
        } else if merged.len as usize == CHUNK && self.free_lists[FREE_LIST_COUNT - 1] != LIST_END {
            // One free chunk keeps its memory, because the next allocation would request it again.
            *chunk = ArenaChunk::default();
            self.empty_chunks.push(number as u32);
        } else {
            self.insert_free(merged);
        }
    }

    fn allocate_from_lists(&mut self, want: usize, min_len: usize) -> Option<ArenaExtent> {
        let first_sufficient = want.next_power_of_two().ilog2() as usize;
        let (small, large) = self
            .free_lists
            .split_at(first_sufficient.min(FREE_LIST_COUNT));
        let large = large.iter().copied().find(|head| *head != LIST_END);
        // Several extents are needed in any case, so the largest one comes first.
        let mut small = small.iter().rev().copied().filter(|head| *head != LIST_END);
        let first =
            large.or_else(|| small.find(|head| self.free_len(*head) as usize >= min_len))?;
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
            Some(empty) => empty as usize,
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
    fn insert_free(&mut self, extent: ArenaExtent) {
        if extent.len == 0 {
            return;
        }
        self.free += extent.len as usize;
        let head = &mut self.free_lists[extent.len.ilog2() as usize];
        let next = std::mem::replace(head, extent.first);
        self.set_free_links(extent.first, LIST_END, next);
        if next != LIST_END {
            let (_, after) = self.free_links(next);
            self.set_free_links(next, extent.first, after);
        }
        let (chunk, at) = chunk_offset(extent.first);
        let run_ids = &mut self.chunks[chunk].run_ids;
        run_ids[at] = FREE_FLAG | extent.len;
        run_ids[at + extent.len as usize - 1] = FREE_FLAG | extent.len;
    }

    fn remove_free(&mut self, extent: ArenaExtent) {
        self.free -= extent.len as usize;
        let (before, next) = self.free_links(extent.first);
        if before == LIST_END {
            self.free_lists[extent.len.ilog2() as usize] = next;
        } else {
            let (ahead, _) = self.free_links(before);
            self.set_free_links(before, ahead, next);
        }
        if next != LIST_END {
            let (_, after) = self.free_links(next);
            self.set_free_links(next, before, after);
        }
        let (chunk, at) = chunk_offset(extent.first);
        let run_ids = &mut self.chunks[chunk].run_ids;
        run_ids[at] = NO_RUN;
        run_ids[at + extent.len as usize - 1] = NO_RUN;
    }

    /// Returns the previous and the next extent in the free list. They are stored in place of the
    /// first local hash.
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
    fn extend(&mut self, count: usize) {
        let len = self.run_ids.len() + count;
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

/// Returns whether the hashes are equal. Compares without a branch per hash.
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
fn decode_free_len(run_id: u32) -> Option<u32> {
    (run_id >= FREE_FLAG && run_id != NO_RUN).then_some(run_id & !FREE_FLAG)
}

#[cfg(test)]
pub(super) mod tests;
