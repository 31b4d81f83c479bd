//! Bloom filter of the hashes that were added recently.

use prefetch_index::prefetch_index;

use super::children::mix;

/// Size of a half, in bits per hash. With `BITS_SET_PER_HASH`, the rate of false positives is about
/// 5 %.
const HALF_BITS_PER_HASH: usize = 8;
const BITS_SET_PER_HASH: u32 = 3;
/// Words of one half per cache line. Both halves share the line, so a lookup costs one cache miss.
const WORDS_PER_LINE: usize = 4;
const BITS_PER_LINE: usize = 64 * WORDS_PER_LINE;

/// Bloom filter of two halves. When the current half is full, the older one is cleared and becomes
/// the current one.
#[derive(Debug)]
pub(crate) struct AgingBloomFilter {
    /// Maximum number of hashes of a half.
    half_capacity: usize,
    /// Bits of both halves. Empty until the first hash.
    lines: Vec<FilterLine>,
    /// Index of the half that receives new hashes.
    current_half: usize,
    /// Number of hashes in the current half.
    count: usize,
}

/// Bits of some hashes, in both halves.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct FilterLine([HalfLine; 2]);

type HalfLine = [u64; WORDS_PER_LINE];

fn has_bits(half: &HalfLine, set: HalfLine) -> bool {
    let missing = |missing, (word, set): (&u64, u64)| missing | (set & !word);
    half.iter().zip(set).fold(0, missing) == 0
}

impl AgingBloomFilter {
    pub(crate) fn new(half_capacity: usize) -> Self {
        Self {
            half_capacity,
            lines: Vec::new(),
            current_half: 0,
            count: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Adds a hash. Returns whether the older half was cleared for it.
    pub(crate) fn insert(&mut self, hash: u64) -> bool {
        let is_full = self.count == self.half_capacity;
        if is_full {
            self.current_half = 1 - self.current_half;
            let half = self.current_half;
            self.lines
                .iter_mut()
                .for_each(|line| line.0[half] = [0; WORDS_PER_LINE]);
            self.count = 0;
        }
        if self.lines.is_empty() {
            let lines = self.half_capacity * HALF_BITS_PER_HASH / BITS_PER_LINE;
            self.lines.resize(lines, FilterLine::default());
        }
        let (line, set) = self.bit_positions(hash);
        let half = &mut self.lines[line].0[self.current_half];
        half.iter_mut()
            .zip(set)
            .for_each(|(word, set)| *word |= set);
        self.count += 1;
        is_full
    }

    /// Returns whether either half contains a hash. False positives are possible.
    pub(crate) fn contains(&self, hash: u64) -> bool {
        if self.lines.is_empty() {
            return false;
        }
        let (line, set) = self.bit_positions(hash);
        self.lines[line].0.iter().any(|half| has_bits(half, set))
    }

    /// Adds a hash, unless the current half has it. Returns whether either half had it.
    pub(crate) fn refresh(&mut self, hash: u64) -> bool {
        if self.lines.is_empty() {
            self.insert(hash);
            return false;
        }
        let (line, set) = self.bit_positions(hash);
        let has = self.lines[line].0.map(|half| has_bits(&half, set));
        if !has[self.current_half] {
            self.insert(hash);
        }
        has[0] || has[1]
    }

    /// Prefetches the cache line of a hash.
    pub(crate) fn prefetch(&self, hash: u64) {
        if !self.lines.is_empty() {
            prefetch_index(&self.lines, self.line_index(mix(hash)));
        }
    }

    /// Returns the line of a hash and its bits in that line.
    fn bit_positions(&self, hash: u64) -> (usize, HalfLine) {
        let mixed = mix(hash);
        let mut set = [0; WORDS_PER_LINE];
        for bit in (0..BITS_SET_PER_HASH).map(|at| (mixed >> (8 * at)) as usize % BITS_PER_LINE) {
            set[bit / 64] |= 1 << (bit % 64);
        }
        (self.line_index(mixed), set)
    }

    fn line_index(&self, mixed: u64) -> usize {
        (mixed >> 40) as usize % self.lines.len()
    }
}
