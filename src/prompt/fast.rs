//! Byte pair encoding of most tokenizers, many times as fast as the library does it, and the same to the token. What a
//! tokenizer consists of is read from the library's own; one with a part that is not known here is refused and stays with the
//! library. The library remains the judge: by texts that are hard when a tokenizer is loaded, and by a sample of real ones for
//! as long as it is used ([`checked`]).
//!
//! All tables are built when it is loaded, nothing starts threads, and what it keeps has a limit ([`Fast::bytes`]).

mod added;
mod checked;
mod classes;
mod hard;
mod merges;
mod pattern;
mod rows;
mod words;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use parking_lot::Mutex;
use serde::Deserialize;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper as PreTokenizer;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer as _, Tokenizer};

use added::Added;
pub(super) use checked::Checked;
use classes::{Bit, Classes, Names};
use merges::Merges;
use pattern::Pattern;
use words::{Room, Words};

/// Bytes below are of characters that no normal form changes.
const FIRST_MARK: u8 = 0xcc;

/// Bytes that are looked at together.
const CHUNK: usize = 64;

/// The pattern of GPT-2, which a `ByteLevel` with a pattern of its own has.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A tokenizer that is known in all its parts.
pub(super) struct Fast {
    /// Taken out of the text as it is.
    raw: Option<Added>,
    /// NFC, the only one that is known, and the characters that it leaves alone.
    normalizer: Option<(NormalizerWrapper, Bit)>,
    /// Taken out of the text as it is normalized.
    normalized: Option<Added>,
    splits: Vec<Split>,
    classes: Classes,
    words: Words,
    /// One for each thread that ever tokenised at once with others.
    rooms: Mutex<Vec<Room>>,
}

/// One step of cutting a text into words.
struct Split {
    pattern: Pattern,
    /// Whether what is between matches is dropped.
    drops_rest: bool,
}

impl Fast {
    /// The same as this tokenizer; or why it is not known to be.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
            return Err("it truncates or pads");
        }
        let normalizer = tokenizer.get_normalizer().cloned();
        match &normalizer {
            None | Some(NormalizerWrapper::NFC(_)) => {}
            Some(NormalizerWrapper::Sequence(all)) if all.as_ref().is_empty() => {}
            Some(_) => return Err("its normalizer is not known here"),
        }
        let normalizer = normalizer.filter(|normalizer| matches!(normalizer, NormalizerWrapper::NFC(_)));
        let mut names = Names::default();
        let mut splits = splits(tokenizer.get_pre_tokenizer(), &mut names)?;
        let (raw, normalized) = added(tokenizer, normalizer.as_ref())?;
        let stable = names.stable()?;
        let normalizer = normalizer.map(|normalizer| (normalizer, stable));
        let classes = names.classes();
        splits.iter_mut().for_each(|split| split.pattern.settle(&classes));
        let words = words(tokenizer)?;
        Ok(Self { raw, normalizer, normalized, splits, classes, words, rooms: Mutex::default() })
    }

    /// Most bytes that it takes, whatever is encoded.
    pub(super) fn bytes(&self) -> usize {
        self.words.bytes()
    }

    /// The tokens of a text without what the post-processor adds.
    pub(super) fn ids(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let room = self.rooms.lock().pop();
        let mut room = room.unwrap_or_default();
        each(self.raw.as_ref(), text, |piece| match piece {
            Err(token) => tokens.push(token),
            Ok(piece) => {
                let piece = self.normal(piece);
                each(self.normalized.as_ref(), &piece, |piece| match piece {
                    Err(token) => tokens.push(token),
                    Ok(piece) => {
                        let mut made = Made { room: &mut room, tokens: &mut tokens };
                        self.split(&self.splits, piece.as_bytes(), 0..piece.len(), &mut made);
                        self.words.rest(piece.as_bytes(), &mut room, &mut tokens);
                    }
                });
            }
        });
        self.rooms.lock().push(room);
        tokens
    }

    /// A text as the normalizer makes it. What is stable begins anew, so only what is around the rest is looked at.
    fn normal<'t>(&self, piece: &'t str) -> Cow<'t, str> {
        let Some((normalizer, stable)) = &self.normalizer else { return Cow::Borrowed(piece) };
        let (bytes, mut normal, mut done, mut at) = (piece.as_bytes(), String::new(), 0, 0);
        loop {
            at += plain(&bytes[at..]);
            let end = piece.floor_char_boundary(at + CHUNK);
            at = self.classes.all(&bytes[..end], at, *stable);
            if at == bytes.len() {
                break;
            }
            if at == end {
                continue;
            }
            let start = classes::before(bytes, at).max(done);
            while at < bytes.len() && self.classes.at(bytes, at).0 & stable == 0 {
                at += self.classes.at(bytes, at).1;
            }
            let mut changed = NormalizedString::from(piece.get(start..at).unwrap_or_default());
            // It never fails.
            let _ = normalizer.normalize(&mut changed);
            normal.push_str(piece.get(done..start).unwrap_or_default());
            normal.push_str(changed.get());
            done = at;
        }
        if done == 0 {
            return Cow::Borrowed(piece);
        }
        normal.push_str(piece.get(done..).unwrap_or_default());
        Cow::Owned(normal)
    }

    /// The tokens of a stretch of a text, which each step cuts for itself.
    fn split(&self, splits: &[Split], text: &[u8], stretch: Range<usize>, made: &mut Made<'_>) {
        let Some((split, splits)) = splits.split_first() else {
            return self.words.tokens(text, stretch, made.room, made.tokens);
        };
        let cut = |part: Range<usize>, made: &mut Made<'_>| {
            if splits.is_empty() {
                self.words.tokens(text, part, made.room, made.tokens);
            } else {
                self.split(splits, text, part, made);
            }
        };
        // Nothing behind its end counts as following.
        let seen = &text[..stretch.end];
        let (mut at, mut rest) = (stretch.start, stretch.start);
        while at < stretch.end {
            let Some(found) = split.pattern.match_at(&self.classes, seen, at) else {
                at += self.classes.at(seen, at).1;
                continue;
            };
            if rest < at && !split.drops_rest {
                cut(rest..at, made);
            }
            cut(at..found, made);
            (at, rest) = (found, found);
        }
        if rest < at && !split.drops_rest {
            cut(rest..at, made);
        }
    }
}

/// What comes of a text, and room to make it.
struct Made<'a> {
    room: &'a mut Room,
    tokens: &'a mut Vec<u32>,
}

/// How many bytes at the beginning of a text are of characters that no normal form changes, as far as is quickly seen.
fn plain(bytes: &[u8]) -> usize {
    let marked = |chunk: &[u8; CHUNK]| chunk.iter().fold(false, |found, byte| found | (*byte >= FIRST_MARK));
    let chunks = bytes.as_chunks::<CHUNK>().0;
    let plain = chunks.iter().take_while(|chunk| !marked(chunk)).count() * CHUNK;
    // Not between the bytes of a character.
    if plain == 0 || plain == bytes.len() { plain } else { classes::before(bytes, plain) }
}

/// The pieces of a text, where there is anything to take out of it.
fn each<'t>(added: Option<&Added>, text: &'t str, mut piece: impl FnMut(Result<&'t str, u32>)) {
    match added {
        Some(added) => added.split(text, piece),
        None => piece(Ok(text)),
    }
}

fn splits(pre_tokenizer: Option<&PreTokenizer>, names: &mut Names) -> Result<Vec<Split>, &'static str> {
    const UNKNOWN: &str = "its pre-tokenizer is not known here";
    let parts = match pre_tokenizer.ok_or(UNKNOWN)? {
        PreTokenizer::Sequence(parts) => parts.as_ref(),
        part => std::slice::from_ref(part),
    };
    let (last, parts) = parts.split_last().ok_or(UNKNOWN)?;
    let mut splits = Vec::new();
    for part in parts {
        let (pattern, drops_rest) = match part {
            PreTokenizer::Split(split) => {
                let SplitPattern::Regex(source) = &split.pattern else { return Err(UNKNOWN) };
                let drops_rest = match (split.behavior, split.invert) {
                    (SplitDelimiterBehavior::Isolated, _) => false,
                    (SplitDelimiterBehavior::Removed, true) => true,
                    _ => return Err(UNKNOWN),
                };
                (Pattern::read(source, names)?, drops_rest)
            }
            PreTokenizer::Digits(digits) => (Pattern::of_class(names.numeric()?, digits.individual_digits), false),
            _ => return Err(UNKNOWN),
        };
        splits.push(Split { pattern, drops_rest });
    }
    match last {
        PreTokenizer::ByteLevel(bytes) if !bytes.add_prefix_space => {
            if bytes.use_regex {
                splits.push(Split { pattern: Pattern::read(GPT2, names)?, drops_rest: false });
            }
            Ok(splits)
        }
        _ => Err(UNKNOWN),
    }
}

/// The added tokens that are looked for before and after the text is normalized.
fn added(
    tokenizer: &Tokenizer,
    normalizer: Option<&NormalizerWrapper>,
) -> Result<(Option<Added>, Option<Added>), &'static str> {
    if tokenizer.get_encode_special_tokens() {
        return Err("special tokens are taken for text");
    }
    let (mut raw, mut normalized) = (Vec::new(), Vec::new());
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        let mut text = token.content.clone();
        if token.normalized {
            if let Some(normalizer) = normalizer {
                let mut normal = NormalizedString::from(text.as_str());
                normalizer.normalize(&mut normal).map_err(|_| "an added token cannot be normalized")?;
                normal.get().clone_into(&mut text);
            }
            normalized.push((id, text, token));
        } else {
            raw.push((id, text, token));
        }
    }
    Ok((Added::new(&raw)?, Added::new(&normalized)?))
}

#[derive(Deserialize)]
struct Written {
    merges: Vec<(String, String)>,
}

fn words(tokenizer: &Tokenizer) -> Result<Words, &'static str> {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return Err("it is no byte pair encoding") };
    let empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
    if model.dropout.is_some_and(|dropout| dropout > 0.0) {
        return Err("it drops merges by chance");
    }
    if !empty(&model.continuing_subword_prefix) || !empty(&model.end_of_word_suffix) {
        return Err("its tokens are marked as parts of words");
    }
    let vocabulary = model.get_vocab();
    let spelling = spelling();
    let spelled: HashMap<u32, Vec<u8>> = vocabulary
        .iter()
        .filter_map(|(token, id)| {
            Some((*id, token.chars().map(|char| spelling.get(&char).copied()).collect::<Option<_>>()?))
        })
        .collect();
    let mut bytes = [0; 256];
    for (char, byte) in &spelling {
        bytes[usize::from(*byte)] =
            *vocabulary.get(char.encode_utf8(&mut [0; 4]) as &str).ok_or("it has not all bytes")?;
    }
    // They are in no other way to be had.
    let written = serde_json::to_vec(model).map_err(|_| "its merges cannot be read")?;
    let written: Written = serde_json::from_slice(&written).map_err(|_| "its merges cannot be read")?;
    let pair = |(left, right): &(String, String)| {
        let product = vocabulary.get(&format!("{left}{right}"))?;
        Some((*vocabulary.get(left)?, *vocabulary.get(right)?, *product))
    };
    let pairs: Option<Vec<_>> = written.merges.iter().map(pair).collect();
    let merges = Merges::new(bytes, &pairs.ok_or("it merges what it has no token for")?, &spelled)?;
    Ok(Words::new(merges, &spelled, model.ignore_merges))
}

/// The characters by which vocabularies write bytes.
fn spelling() -> HashMap<char, u8> {
    let written = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=u8::MAX).filter(|byte| !written(byte));
    let moved = others.zip('\u{100}'..).map(|(byte, char)| (char, byte));
    (0..=u8::MAX).filter(written).map(|byte| (char::from(byte), byte)).chain(moved).collect()
}

#[cfg(test)]
mod tests;
