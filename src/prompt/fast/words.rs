//! Words and their tokens. Almost every word of a text is a token or was there before, so merging is for words that nobody
//! wrote yet. First come the latest words of this thread, so few that they stay near the processor; then the table of all
//! that are tokens, which never changes and is so large that many are looked up in it at once, which costs hardly more than
//! one; then the latest words of all threads that are more than one token.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use parking_lot::Mutex;

use super::merges::{self, Merges};

/// Bytes of a word that fits into one number together with its length.
const SHORT: usize = 15;

/// Words that are looked up at once.
const AT_ONCE: usize = 32;

/// Latest words of one thread.
const NEAR: usize = 2048;

/// Tokens of a word that is near; one more number says how many.
const NEAR_TOKENS: usize = 3;

/// Bytes and tokens of a word that is kept.
const KEPT_BYTES: usize = 30;
const KEPT_TOKENS: usize = 8;

/// Parts of the table of kept words, each with a lock of its own, and the words of a part.
const PARTS: usize = 64;
const PART: usize = 512;

/// Words by what they are made of.
pub(super) struct Words {
    merges: Merges,
    /// Short words that are a token.
    slots: Box<[Slot]>,
    shift: u32,
    longer: hashbrown::HashMap<Box<[u8]>, u32>,
    /// Nobody outside can say which words meet.
    secret: u64,
    kept: Box<[Mutex<Box<[Kept]>>]>,
}

/// What one thread needs to tokenise a text, to be used again for the next.
pub(super) struct Room {
    waiting: [Waiting; AT_ONCE],
    count: usize,
    latest: Latest,
}

/// The latest words, and room to make others.
struct Latest {
    near: Box<[Near]>,
    merging: merges::Room,
}

/// A short word of a text that is to be looked up.
#[derive(Clone, Copy, Default)]
struct Waiting {
    number: u128,
    hash: u64,
    start: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    low: u64,
    high: u64,
    token: u32,
}

/// A short word as a number, and its tokens.
#[derive(Clone, Copy, Default)]
struct Near {
    word: u128,
    tokens: [u32; NEAR_TOKENS],
    count: u32,
}

/// A word that is more than one token.
#[derive(Clone, Copy, Default)]
struct Kept {
    tokens: [u32; KEPT_TOKENS],
    word: [u8; KEPT_BYTES],
    length: u8,
    count: u8,
}

impl Default for Room {
    fn default() -> Self {
        let waiting = [Waiting::default(); AT_ONCE];
        let latest = Latest { near: vec![Near::default(); NEAR].into(), merging: merges::Room::default() };
        Self { waiting, count: 0, latest }
    }
}

impl Words {
    /// Of all tokens that are bytes. Where merges are not ignored, only those are a word that merges make of it.
    pub(super) fn new(merges: Merges, tokens: &HashMap<u32, Vec<u8>>, ignore_merges: bool) -> Self {
        let size = (tokens.len() * 3 / 2).next_power_of_two().max(2);
        let mut words = Self {
            merges,
            slots: vec![Slot::default(); size].into(),
            shift: 64 - size.trailing_zeros(),
            longer: hashbrown::HashMap::new(),
            secret: RandomState::new().hash_one(0),
            kept: (0..PARTS).map(|_| Mutex::default()).collect(),
        };
        let (mut room, mut made) = (merges::Room::default(), Vec::new());
        for (&token, word) in tokens {
            made.clear();
            if !ignore_merges {
                words.merges.tokens(word, &mut room, &mut made);
            }
            if ignore_merges || made == [token] {
                words.add(word, token);
            }
        }
        words
    }

    fn add(&mut self, word: &[u8], token: u32) {
        if word.len() > SHORT {
            self.longer.insert(word.into(), token);
            return;
        }
        let (low, high) = halves(number(word, &(0..word.len())));
        let mut at = (mixed(low, high) >> self.shift) as usize;
        while self.slots[at].high != 0 {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = Slot { low, high, token };
    }

    /// Most bytes that the tables take, with all words that may be kept, beside what each thread needs.
    pub(super) fn bytes(&self) -> usize {
        let longer: usize = self.longer.keys().map(|word| word.len() + size_of::<(Box<[u8]>, u32)>()).sum();
        self.merges.bytes() + size_of_val(&*self.slots) + longer + PARTS * PART * size_of::<Kept>()
    }

    /// The tokens of a word of a text, some words later or at [`Words::rest`].
    #[inline]
    pub(super) fn tokens(&self, text: &[u8], word: Range<usize>, room: &mut Room, tokens: &mut Vec<u32>) {
        if word.len() > SHORT {
            self.rest(text, room, tokens);
            return self.longer_tokens(&text[word], &mut room.latest, tokens);
        }
        if room.count == AT_ONCE {
            self.rest(text, room, tokens);
        }
        let number = number(text, &word);
        let (low, high) = halves(number);
        room.waiting[room.count] = Waiting { number, hash: mixed(low, high), start: word.start };
        room.count += 1;
    }

    /// The tokens of the words of a text that still wait.
    pub(super) fn rest(&self, text: &[u8], room: &mut Room, tokens: &mut Vec<u32>) {
        let Room { waiting, count, latest } = room;
        let waiting = &waiting[..std::mem::take(count)];
        let (mut near, mut far, mut misses) = ([Near::default(); AT_ONCE], [0; AT_ONCE], 0);
        for (at, word) in waiting.iter().enumerate() {
            near[at] = latest.near[word.hash as usize % NEAR];
            // Without a branch, and so without waiting for the memory of one before that of the next is asked for.
            far[misses % AT_ONCE] = (word.hash >> self.shift) as usize;
            misses += usize::from(near[at].word != word.number);
        }
        let mut slots = [Slot::default(); AT_ONCE];
        for (slot, place) in slots.iter_mut().zip(&far[..misses]) {
            *slot = self.slots[*place];
        }
        let mut slots = slots.iter();
        for (near, word) in near.iter().zip(waiting) {
            if near.word != word.number {
                let slot = slots.next().copied().unwrap_or_default();
                self.far(text, (word, &slot), latest, tokens);
            } else if near.count == 1 {
                tokens.push(near.tokens[0]);
            } else {
                tokens.extend_from_slice(&near.tokens[..near.count as usize]);
            }
        }
    }

    /// The tokens of a short word that is not near, and the slot where it is looked for first.
    fn far(&self, text: &[u8], (word, slot): (&Waiting, &Slot), latest: &mut Latest, tokens: &mut Vec<u32>) {
        let (before, (low, high)) = (tokens.len(), halves(word.number));
        if slot.low == low && slot.high == high {
            tokens.push(slot.token);
        } else if let Some(token) = self.token((low, high), word.hash) {
            tokens.push(token);
        } else {
            let length = (word.number >> 120) as usize;
            self.made(&text[word.start..word.start + length], word.hash ^ self.secret, latest, tokens);
        }
        let found = &tokens[before..];
        if found.len() <= NEAR_TOKENS {
            let near = &mut latest.near[word.hash as usize % NEAR];
            (near.word, near.count) = (word.number, found.len() as u32);
            near.tokens[..found.len()].copy_from_slice(found);
        }
    }

    /// The token that a short word is.
    fn token(&self, (low, high): (u64, u64), hash: u64) -> Option<u32> {
        let mut at = (hash >> self.shift) as usize;
        loop {
            let slot = self.slots[at];
            if slot.low == low && slot.high == high {
                return Some(slot.token);
            }
            if slot.high == 0 {
                return None;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    #[cold]
    fn longer_tokens(&self, word: &[u8], latest: &mut Latest, tokens: &mut Vec<u32>) {
        if let Some(token) = self.longer.get(word) {
            return tokens.push(*token);
        }
        if word.len() > KEPT_BYTES {
            return self.merges.tokens(word, &mut latest.merging, tokens);
        }
        let mut buffer = [0; 32];
        buffer[..word.len()].copy_from_slice(word);
        let half = |at: usize| halves(number(&buffer, &(at..at + 15)));
        let ((a, b), (c, d)) = (half(0), half(15));
        self.made(word, mixed(mixed(a, b) ^ self.secret, mixed(c, d)), latest, tokens);
    }

    /// The tokens of a word that is not one, kept or made now.
    fn made(&self, word: &[u8], hash: u64, latest: &mut Latest, tokens: &mut Vec<u32>) {
        let (part, at) = (hash as usize % PARTS, (hash >> 32) as usize % PART);
        if let Some(kept) = self.kept[part].lock().get(at)
            && usize::from(kept.length) == word.len()
            && kept.word[..word.len()] == *word
        {
            return tokens.extend_from_slice(&kept.tokens[..usize::from(kept.count)]);
        }
        let before = tokens.len();
        self.merges.tokens(word, &mut latest.merging, tokens);
        let made = &tokens[before..];
        if made.len() > KEPT_TOKENS {
            return;
        }
        // Neither is more than a byte holds.
        let mut kept = Kept { length: word.len() as u8, count: made.len() as u8, ..Kept::default() };
        kept.word[..word.len()].copy_from_slice(word);
        kept.tokens[..made.len()].copy_from_slice(made);
        let mut part = self.kept[part].lock();
        if part.is_empty() {
            *part = vec![Kept::default(); PART].into();
        }
        part[at] = kept;
    }
}

/// A short word as a number, which is never nothing: its bytes, and its length in the highest.
#[inline]
fn number(text: &[u8], word: &Range<usize>) -> u128 {
    let length = word.len();
    let bytes = match text.get(word.start..).and_then(|rest| rest.first_chunk::<16>()) {
        Some(around) => u128::from_le_bytes(*around) & ((1 << (length * 8)) - 1),
        None => {
            let mut buffer = [0; 16];
            buffer[..length].copy_from_slice(&text[word.clone()]);
            u128::from_le_bytes(buffer)
        }
    };
    bytes | (length as u128) << 120
}

#[inline]
fn halves(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

/// A hash of which the high bits depend on all, and the low ones as well.
#[inline]
fn mixed(low: u64, high: u64) -> u64 {
    let product = u128::from(low ^ 0x9e37_79b9_7f4a_7c15) * u128::from(high ^ 0xff51_afd7_ed55_8ccd);
    let (low, high) = halves(product);
    (low ^ high).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
