//! Byte pair encoding of one word: of all neighbours that may be merged, those of the lowest rank first, and of these the
//! leftmost. Short words are searched for them again and again, which is quickest; in long ones every pair waits in the row
//! of its rank, so that a word of a megabyte takes time in proportion to its length.

use std::collections::HashMap;

use super::rows::{KEPT, Rows};

/// Bytes of a word that is searched again and again.
const SHORT: usize = 32;

/// Bits of a token's number and of a rank in a slot of the table.
const TOKEN_BITS: u32 = 21;
const RANK_BITS: u32 = 22;

/// Of a pair that is never merged.
pub(super) const NEVER: u32 = u32::MAX;

/// No symbol, no entry.
const NONE: u32 = u32::MAX;

/// A slot that is free; no pair has this number, because its rank would be one more than the highest.
const FREE: u64 = u64::MAX;

/// What a tokenizer merges.
pub(super) struct Merges {
    /// The tokens of single bytes.
    bytes: [u32; 256],
    /// The rank of each pair of bytes.
    of_bytes: Box<[u32]>,
    /// Pairs of tokens with their rank, by a hash of the pair.
    slots: Box<[u64]>,
    shift: u32,
    /// What each rank makes of its pair, and that pair.
    products: Box<[u32]>,
    pairs: Box<[(u32, u32)]>,
    /// Whether two bytes are neighbours in anything that merges make.
    neighbours: Box<[bool]>,
}

/// Room for long words, to be used again.
#[derive(Default)]
pub(super) struct Room {
    symbols: Vec<Symbol>,
    rows: Rows,
    turn: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Symbol {
    /// Its token; [`NONE`] once it was merged into the one before.
    token: u32,
    before: u32,
    after: u32,
}

impl Room {
    /// Frees what a long word took.
    fn give_back(&mut self) {
        self.symbols.clear();
        self.symbols.shrink_to(KEPT);
        self.turn.shrink_to(KEPT);
        self.rows.give_back();
    }
}

impl Merges {
    /// Of the tokens of all bytes, and the pairs in the order of their ranks with what they make.
    pub(super) fn new(
        bytes: [u32; 256],
        pairs: &[(u32, u32, u32)],
        spelled: &HashMap<u32, Vec<u8>>,
    ) -> Result<Self, &'static str> {
        let most = pairs.iter().flat_map(|(left, right, product)| [left, right, product]).chain(&bytes).max();
        if most.is_some_and(|token| *token >= 1 << TOKEN_BITS) || pairs.len() >= (1 << RANK_BITS) - 1 {
            return Err("its vocabulary is too large");
        }
        let size = (pairs.len() * 3 / 2).next_power_of_two().max(2);
        let mut merges = Self {
            bytes,
            of_bytes: vec![NEVER; 1 << 16].into(),
            slots: vec![FREE; size].into(),
            shift: 64 - size.trailing_zeros(),
            products: pairs.iter().map(|(_, _, product)| *product).collect(),
            pairs: pairs.iter().map(|(left, right, _)| (*left, *right)).collect(),
            neighbours: vec![false; 1 << 16].into(),
        };
        for (rank, (left, right, product)) in pairs.iter().enumerate() {
            let key = key(*left, *right);
            let mut at = merges.place(key);
            while merges.slots[at] != FREE {
                at = (at + 1) & (size - 1);
            }
            merges.slots[at] = key << RANK_BITS | rank as u64;
            for pair in spelled.get(product).ok_or("a merge makes what is not of bytes")?.windows(2) {
                merges.neighbours[two(pair[0], pair[1])] = true;
            }
        }
        for (first, second) in (0..=u8::MAX).flat_map(|first| (0..=u8::MAX).map(move |second| (first, second))) {
            let pair = (bytes[usize::from(first)], bytes[usize::from(second)]);
            merges.of_bytes[two(first, second)] = merges.rank(pair.0, pair.1);
        }
        Ok(merges)
    }

    /// Bytes of its tables.
    pub(super) fn bytes(&self) -> usize {
        let ranks = size_of_val(&*self.products) + size_of_val(&*self.pairs);
        size_of_val(&*self.slots) + size_of_val(&*self.of_bytes) + ranks + self.neighbours.len()
    }

    /// The tokens of a word.
    pub(super) fn tokens(&self, word: &[u8], room: &mut Room, tokens: &mut Vec<u32>) {
        if word.len() <= SHORT {
            return self.short(word, tokens);
        }
        // Nothing is merged across neighbours that are none in any token, so what is before and behind does not matter.
        let mut from = 0;
        for at in 1..=word.len() {
            if at == word.len() || !self.neighbours[two(word[at - 1], word[at])] {
                match &word[from..at] {
                    part if part.len() <= SHORT => self.short(part, tokens),
                    part => self.long(part, room, tokens),
                }
                from = at;
            }
        }
    }

    fn short(&self, word: &[u8], tokens: &mut Vec<u32>) {
        let (mut symbols, mut ranks) = ([0; SHORT], [NEVER; SHORT]);
        for (symbol, byte) in symbols.iter_mut().zip(word) {
            *symbol = self.bytes[usize::from(*byte)];
        }
        for (rank, pair) in ranks.iter_mut().zip(word.windows(2)) {
            *rank = self.of_bytes[two(pair[0], pair[1])];
        }
        let mut length = word.len();
        while length > 1 {
            let (mut at, mut lowest) = (0, NEVER);
            for (place, rank) in ranks[..length - 1].iter().enumerate() {
                if *rank < lowest {
                    (at, lowest) = (place, *rank);
                }
            }
            if lowest == NEVER {
                break;
            }
            symbols[at] = self.products[lowest as usize];
            symbols.copy_within(at + 2..length, at + 1);
            ranks.copy_within(at + 1..length, at);
            length -= 1;
            ranks[length - 1] = NEVER;
            if at > 0 {
                ranks[at - 1] = self.rank(symbols[at - 1], symbols[at]);
            }
            if at + 1 < length {
                ranks[at] = self.rank(symbols[at], symbols[at + 1]);
            }
        }
        tokens.extend_from_slice(&symbols[..length]);
    }

    fn long(&self, word: &[u8], room: &mut Room, tokens: &mut Vec<u32>) {
        let Room { symbols, rows, turn } = room;
        rows.begin(self.products.len());
        symbols.clear();
        let last = word.len() as u32 - 1;
        symbols.extend(word.iter().zip(0..).map(|(byte, at): (_, u32)| Symbol {
            token: self.bytes[usize::from(*byte)],
            before: at.wrapping_sub(1),
            after: if at == last { NONE } else { at + 1 },
        }));
        for (pair, at) in word.windows(2).zip(0..) {
            rows.push(self.of_bytes[two(pair[0], pair[1])], at);
        }
        while let Some(rank) = rows.take_lowest(turn) {
            let mut places = turn.iter();
            while let Some(&at) = places.next() {
                if let Some(lower) = self.merge(symbols, rows, rank, at)
                    && lower < rank
                {
                    // What was just made comes before the rest of this row.
                    places.for_each(|at| rows.push(rank, *at));
                    break;
                }
            }
        }
        tokens.extend(symbols.iter().map(|symbol| symbol.token).filter(|token| *token != NONE));
        room.give_back();
    }

    /// Merges a pair if it still has this rank, and lets the new pairs wait; the lowest rank of these.
    fn merge(&self, symbols: &mut [Symbol], rows: &mut Rows, rank: u32, at: u32) -> Option<u32> {
        let left = symbols[at as usize];
        if left.token == NONE || left.after == NONE {
            return None;
        }
        let right = symbols[left.after as usize];
        if (left.token, right.token) != self.pairs[rank as usize] {
            return None;
        }
        let product = self.products[rank as usize];
        symbols[left.after as usize].token = NONE;
        symbols[at as usize] = Symbol { token: product, after: right.after, ..left };
        let mut lowest = NEVER;
        if right.after != NONE {
            let after = &mut symbols[right.after as usize];
            after.before = at;
            let rank = self.rank(product, after.token);
            rows.push(rank, at);
            lowest = rank;
        }
        if left.before != NONE {
            let rank = self.rank(symbols[left.before as usize].token, product);
            rows.push(rank, left.before);
            lowest = lowest.min(rank);
        }
        Some(lowest)
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        let key = key(left, right);
        let mut at = self.place(key);
        loop {
            let slot = self.slots[at];
            if slot >> RANK_BITS == key {
                return (slot & ((1 << RANK_BITS) - 1)) as u32;
            }
            if slot == FREE {
                return NEVER;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    fn place(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << TOKEN_BITS | u64::from(right)
}

fn two(first: u8, second: u8) -> usize {
    usize::from(first) << 8 | usize::from(second)
}
