//! Which characters belong to which classes of a pattern. What a class holds is asked of the regex engine itself, character
//! by character, so that its version of Unicode and its reading of `\s` or of the case of letters are ours as well.

use std::collections::HashMap;
use std::iter::once;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tokenizers::utils::SysRegex;
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

/// The classes of one tokenizer: a bit each.
pub(super) type Bit = u32;

/// Bits of classes.
const MOST: usize = 32;

/// Characters of a page.
const PAGE: u32 = 256;

/// Beyond the last character.
const END: u32 = 0x11_0000;

/// First and last character of each stretch of a class.
type Stretches = Arc<[(u32, u32)]>;

/// What the regex engine said of a class, for all tokenizers of the process; only files of models bring new ones.
static ASKED: LazyLock<Mutex<HashMap<String, Stretches>>> = LazyLock::new(Mutex::default);

/// Classes that are still being named.
#[derive(Default)]
pub(super) struct Names {
    members: Vec<Stretches>,
    bits: HashMap<String, Bit>,
}

/// The bits of every character.
pub(super) struct Classes {
    /// Of bytes that are characters; none of others.
    ascii: [Bit; 256],
    /// Classes of which the ASCII characters are the letters.
    letters: Bit,
    pages: Vec<[Bit; PAGE as usize]>,
    places: Vec<u16>,
}

impl Names {
    /// The bit of a class as a pattern writes it.
    pub(super) fn regex(&mut self, class: &str) -> Result<Bit, &'static str> {
        self.name(class, || {
            let regex = SysRegex::new(&format!("{class}+")).map_err(|_| "its pattern has a class that is not one")?;
            let all: String = ('\0'..=char::MAX).collect();
            let char_at = |range: &str, last: bool| if last { range.chars().next_back() } else { range.chars().next() };
            let stretches = regex.find_iter(&all).filter_map(|(start, end)| {
                let range = &all[start..end];
                Some((char_at(range, false)? as u32, char_at(range, true)? as u32))
            });
            Ok(stretches.collect())
        })
    }

    /// The bit of characters that a normal form neither changes nor joins with what is before them.
    pub(super) fn stable(&mut self) -> Result<Bit, &'static str> {
        let stable = |char: char| canonical_combining_class(char) == 0 && is_nfc_quick(once(char)) == IsNormalized::Yes;
        self.name("stable", || Ok(stretches(stable)))
    }

    /// The bit of what is a number to the standard library.
    pub(super) fn numeric(&mut self) -> Result<Bit, &'static str> {
        self.name("numeric", || Ok(stretches(char::is_numeric)))
    }

    fn name(
        &mut self,
        class: &str,
        members: impl FnOnce() -> Result<Stretches, &'static str>,
    ) -> Result<Bit, &'static str> {
        if let Some(bit) = self.bits.get(class) {
            return Ok(*bit);
        }
        if self.members.len() == MOST {
            return Err("its patterns have too many classes");
        }
        let known = ASKED.lock().get(class).cloned();
        let members = match known {
            Some(members) => members,
            None => {
                let members = members()?;
                ASKED.lock().insert(class.to_owned(), members.clone());
                members
            }
        };
        let bit = 1 << self.members.len();
        self.members.push(members);
        self.bits.insert(class.to_owned(), bit);
        Ok(bit)
    }

    /// The bits of all characters.
    pub(super) fn classes(&self) -> Classes {
        let mut whole = vec![0; (END / PAGE) as usize];
        let mut parts: HashMap<u32, [Bit; PAGE as usize]> = HashMap::new();
        for (number, stretches) in self.members.iter().enumerate() {
            let bit = 1 << number;
            for &(first, last) in stretches.iter() {
                for page in first / PAGE..=last / PAGE {
                    let (from, to) = (first.max(page * PAGE), last.min(page * PAGE + PAGE - 1));
                    if to - from == PAGE - 1 {
                        whole[page as usize] |= bit;
                    } else {
                        let part = parts.entry(page).or_insert([0; PAGE as usize]);
                        part[(from % PAGE) as usize..=(to % PAGE) as usize].iter_mut().for_each(|bits| *bits |= bit);
                    }
                }
            }
        }
        let (mut pages, mut known) = (Vec::new(), HashMap::new());
        let places = (0..END / PAGE).map(|page| {
            let mut bits = parts.remove(&page).unwrap_or([0; PAGE as usize]);
            bits.iter_mut().for_each(|bits| *bits |= whole[page as usize]);
            *known.entry(bits).or_insert_with(|| {
                pages.push(bits);
                // There are fewer pages than 2^16.
                pages.len() as u16 - 1
            })
        });
        let places: Vec<u16> = places.collect();
        let first = pages[usize::from(places[0])];
        let ascii = std::array::from_fn(|byte| if byte < 128 { first[byte] } else { 0 });
        let letters = (0..MOST).map(|number| 1 << number).filter(|bit| {
            let of_class = |byte: u8| ascii[usize::from(byte)] & bit != 0;
            (0..128).all(|byte: u8| of_class(byte) == byte.is_ascii_alphabetic())
        });
        Classes { ascii, letters: letters.sum(), pages, places }
    }
}

impl Classes {
    /// The bits of the character at a place, and its length; of no character, nothing.
    #[inline]
    pub(super) fn at(&self, text: &[u8], at: usize) -> (Bit, usize) {
        match text.get(at) {
            None => (0, 0),
            Some(&byte) if byte < 128 => (self.ascii[usize::from(byte)], 1),
            Some(_) => self.beyond_ascii(text, at),
        }
    }

    /// Whether a character is in two classes.
    pub(super) fn meet(&self, one: Bit, other: Bit) -> bool {
        self.pages.iter().flatten().any(|bits| bits & one != 0 && bits & other != 0)
    }

    /// Where all characters of a class end that follow one another.
    #[inline]
    pub(super) fn all(&self, text: &[u8], from: usize, bit: Bit) -> usize {
        let mut at = from;
        if self.letters & bit != 0 {
            while let Some(eight) = text.get(at..).and_then(|rest| rest.first_chunk()) {
                let found = leading_letters(u64::from_le_bytes(*eight));
                at += found;
                if found < 8 {
                    if eight[found] < 128 {
                        return at;
                    }
                    break;
                }
            }
        }
        loop {
            while let Some(&byte) = text.get(at)
                && self.ascii[usize::from(byte)] & bit != 0
            {
                at += 1;
            }
            match text.get(at) {
                Some(128..) => {
                    let (bits, length) = self.beyond_ascii(text, at);
                    if bits & bit == 0 {
                        return at;
                    }
                    at += length;
                }
                _ => return at,
            }
        }
    }

    /// Where a run of characters of a class ends, and how many there are.
    #[inline]
    pub(super) fn run(&self, text: &[u8], from: usize, bit: Bit, most: usize) -> (usize, usize) {
        let (mut at, mut count) = (from, 0);
        while count < most {
            match text.get(at) {
                Some(&byte) if self.ascii[usize::from(byte)] & bit != 0 => at += 1,
                Some(&byte) if byte >= 128 => {
                    let (bits, length) = self.beyond_ascii(text, at);
                    if bits & bit == 0 {
                        break;
                    }
                    at += length;
                }
                _ => break,
            }
            count += 1;
        }
        (at, count)
    }

    fn beyond_ascii(&self, text: &[u8], at: usize) -> (Bit, usize) {
        let (code, length) = decode(&text[at..]);
        let page = self.places.get((code / PAGE) as usize).copied().unwrap_or_default();
        (self.pages[usize::from(page)][(code % PAGE) as usize], length)
    }
}

/// How many of eight bytes are ASCII letters before the first that is none.
#[inline]
fn leading_letters(eight: u64) -> usize {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x80 * EACH;
    // Without the high bits, so that no sum carries into the next byte; bytes that have one are none.
    let lower = (eight | 0x20 * EACH) & !HIGH;
    let from_a = lower + (0x80 - u64::from(b'a')) * EACH;
    let beyond_z = lower + (0x7f - u64::from(b'z')) * EACH;
    let letters = from_a & !beyond_z & !eight & HIGH;
    ((letters ^ HIGH).trailing_zeros() / 8) as usize
}

/// The characters that are something.
fn stretches(is: impl Fn(char) -> bool) -> Stretches {
    let mut stretches: Vec<(u32, u32)> = Vec::new();
    for char in ('\0'..=char::MAX).filter(|char| is(*char)) {
        match stretches.last_mut() {
            Some((_, last)) if *last + 1 == char as u32 => *last += 1,
            _ => stretches.push((char as u32, char as u32)),
        }
    }
    stretches.into()
}

/// A character of more than one byte. The text is known to be one.
fn decode(text: &[u8]) -> (u32, usize) {
    let low = |at: usize| text.get(at).map_or(0, |byte| u32::from(byte & 0x3f));
    let first = u32::from(text[0]);
    match first {
        0xf0.. => ((first & 7) << 18 | low(1) << 12 | low(2) << 6 | low(3), 4),
        0xe0.. => ((first & 0xf) << 12 | low(1) << 6 | low(2), 3),
        _ => ((first & 0x1f) << 6 | low(1), 2),
    }
}

/// Where the character before a place begins.
pub(super) fn before(text: &[u8], at: usize) -> usize {
    let mut at = at.saturating_sub(1);
    while at > 0 && text[at] & 0xc0 == 0x80 {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_has_the_classes_that_the_regex_engine_gives_it() {
        let classes = [r"\p{L}", r"\s", r"[^\s\p{L}\p{N}]", r"(?i:s)", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"];
        let mut names = Names::default();
        let bits: Vec<Bit> = classes.iter().map(|class| names.regex(class).unwrap()).collect();
        let table = names.classes();
        let mut buffer = [0; 4];
        // All that are in use, and some of the rest.
        for char in ('\0'..'\u{32000}').chain(('\u{32000}'..=char::MAX).step_by(97)) {
            let text = char.encode_utf8(&mut buffer).as_bytes();
            let (found, length) = table.at(text, 0);
            assert_eq!(length, text.len());
            assert_eq!(before(text, text.len()), 0);
            for (class, bit) in classes.iter().zip(&bits) {
                let end = if found & bit == 0 { 0 } else { length };
                assert_eq!(table.run(text, 0, *bit, usize::MAX).0, end, "{char:?} {class}");
            }
        }
        for (class, bit) in classes.iter().zip(&bits) {
            let regex = SysRegex::new(class).unwrap();
            for char in ('\0'..'\u{3000}').chain('\u{a000}'..'\u{ac00}').chain('\u{1f000}'..'\u{1fb00}') {
                let text = char.encode_utf8(&mut buffer);
                let known = regex.find_iter(text).next().is_some();
                assert_eq!(table.at(text.as_bytes(), 0).0 & bit != 0, known, "{char:?} {class}");
            }
        }
    }
}
