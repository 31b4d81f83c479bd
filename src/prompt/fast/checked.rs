//! A tokenizer of the library, and beside it the fast one for as long as both agree. It takes a second to make, so it is made
//! when asked for, beside the first requests, and used once both agree on hard texts. They are compared by pieces of real ones
//! ever after, away from the requests. One difference, and the model stays with the library for good: a wrong token is worse
//! than a slow one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use tokenizers::Tokenizer;

use super::{Fast, hard};
use crate::prompt::pieces;

/// Most bytes of a text that are compared at once; the library takes some ten milliseconds for them.
const COMPARED: usize = 32 << 10;

/// Why a fast one is not used that panicked.
const BROKE_OFF: &str = "it broke off";

/// A tokenizer and its judge.
pub(in crate::prompt) struct Checked {
    library: Tokenizer,
    /// Whether texts can be cut at joints.
    has_joints: bool,
    /// Nothing until it agreed.
    fast: OnceLock<Fast>,
    /// Why the library does it for good.
    because: OnceLock<&'static str>,
    /// Whether a piece of the next text is to be compared, and that piece with its tokens by the fast one.
    wanted: AtomicBool,
    sample: Mutex<Option<(String, Vec<u32>)>>,
}

impl Checked {
    /// The library's alone.
    pub(in crate::prompt) fn new(library: Tokenizer) -> Self {
        let (fast, because) = (OnceLock::new(), OnceLock::new());
        let has_joints = pieces::are_known(&library);
        Self {
            library,
            has_joints,
            fast,
            because,
            wanted: AtomicBool::new(false),
            sample: Mutex::new(None),
        }
    }

    /// Has the fast one from now on, where its parts are known and the hard texts have the same tokens; or why not.
    pub(in crate::prompt) fn quicken(&self) -> Result<(), &'static str> {
        if self.fast.get().is_none() && self.because.get().is_none() {
            // On a thread of its own, with which goes what the fast one keeps for each.
            let made = thread::scope(|scope| {
                scope
                    .spawn(|| Fast::new(&self.library).and_then(|fast| self.agreed(fast)))
                    .join()
            });
            match made.unwrap_or(Err(BROKE_OFF)) {
                // Another one that came before is as good.
                Ok(fast) => drop(self.fast.set(fast)),
                Err(because) => self.refuse(because),
            }
        }
        self.because().map_or(Ok(()), Err)
    }

    /// The same, once hard texts have the same tokens by it.
    fn agreed(&self, fast: Fast) -> Result<Fast, &'static str> {
        let added = self.library.get_added_tokens_decoder();
        let added: Vec<&str> = added.values().map(|token| token.content.as_str()).collect();
        for text in hard::texts(&added) {
            if tried(&fast, &text)?.is_some_and(|ids| self.differ(&text, &ids) == Some(true)) {
                return Err("on hard texts it differs from the library");
            }
        }
        Ok(fast)
    }

    /// The library's own.
    pub(in crate::prompt) fn library(&self) -> &Tokenizer {
        &self.library
    }

    /// Whether texts can be cut at joints.
    pub(in crate::prompt) fn has_joints(&self) -> bool {
        self.has_joints
    }

    /// Why texts are tokenised by the library for good.
    pub(in crate::prompt) fn because(&self) -> Option<&'static str> {
        self.because.get().copied()
    }

    /// The tokens of a text without what the post-processor adds.
    pub(in crate::prompt) fn ids(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        if let Some(ids) = self.fast_ids(text) {
            self.offer(text);
            return Ok(ids);
        }
        Ok(self.library.encode_fast(text, false)?.get_ids().to_vec())
    }

    /// The same as the fast one makes it, where it may.
    fn fast_ids(&self, text: &str) -> Option<Vec<u32>> {
        let fast = self.fast.get().filter(|_| self.because.get().is_none())?;
        tried(fast, text).unwrap_or_else(|because| {
            self.refuse(because);
            None
        })
    }

    fn refuse(&self, because: &'static str) {
        // The first reason stays.
        let _ = self.because.set(because);
    }

    /// Keeps a piece of a text where one is wanted. Its tokens are made here and not where they are compared, because the
    /// fast one keeps many megabytes for each thread that asks it.
    fn offer(&self, text: &str) {
        if self.wanted.load(Ordering::Relaxed) && self.wanted.swap(false, Ordering::Relaxed) {
            let piece = piece(text, rand::random_range(0..=text.len()));
            *self.sample.lock() = self.fast_ids(piece).map(|ids| (piece.to_owned(), ids));
        }
    }

    /// Compares what was kept since the last time, if anything was, and lets another piece be kept; whether they differ.
    pub(in crate::prompt) fn compare(&self) -> Option<bool> {
        let sample = self.sample.lock().take();
        let differs = sample.and_then(|(text, ids)| self.differ(&text, &ids));
        if differs == Some(true) {
            self.refuse("on a request it differed from the library");
        }
        self.wanted
            .store(self.because.get().is_none(), Ordering::Relaxed);
        differs
    }

    /// Whether the library gives a text other tokens than these.
    fn differ(&self, text: &str, ids: &[u32]) -> Option<bool> {
        let known = catch_unwind(AssertUnwindSafe(|| self.library.encode_fast(text, false)))
            .ok()?
            .ok()?;
        Some(ids != known.get_ids())
    }
}

/// What the fast one makes of a text; or why it is not used again, where it panics.
fn tried(fast: &Fast, text: &str) -> Result<Option<Vec<u32>>, &'static str> {
    catch_unwind(AssertUnwindSafe(|| fast.ids(text))).map_err(|_| BROKE_OFF)
}

/// As much of a text as is compared, around a place in it.
fn piece(text: &str, around: usize) -> &str {
    let start = around.min(text.len().saturating_sub(COMPARED));
    let start = text.ceil_char_boundary(start);
    let end = text.floor_char_boundary((start + COMPARED).min(text.len()));
    text.get(start..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{other_merges, qwen};
    use super::*;

    #[test]
    fn a_piece_of_a_text_is_a_text() {
        let text = "é中😀".repeat(COMPARED / 4);
        for around in (0..text.len()).step_by(1009) {
            let piece = piece(&text, around);
            assert!(
                piece.len() > COMPARED - 4 && piece.len() <= COMPARED && text.contains(piece),
                "{around}"
            );
        }
        assert_eq!((piece("short", 3), piece("", 0)), ("short", ""));
    }

    #[test]
    fn what_agrees_is_compared_again_and_again() {
        let checked = Checked::new(qwen());
        checked.ids("The library does this one.").unwrap();
        assert_eq!(
            (checked.compare(), checked.compare()),
            (None, None),
            "there is nothing to compare"
        );
        assert_eq!((checked.quicken(), checked.compare()), (Ok(()), None));
        for text in ["A text that was asked for.", "Another one"] {
            let known = checked
                .library()
                .encode_fast(text, false)
                .unwrap()
                .get_ids()
                .to_vec();
            assert_eq!(checked.ids(text).unwrap(), known);
            assert_eq!(checked.compare(), Some(false));
            assert_eq!(checked.compare(), None, "nothing was kept since");
        }
    }

    #[test]
    fn what_differs_on_hard_texts_is_never_used() {
        let checked = Checked::new(qwen());
        assert!(checked.agreed(Fast::new(&other_merges()).unwrap()).is_err());
    }

    #[test]
    fn what_differs_on_a_request_stays_with_the_library() {
        let checked = Checked::new(qwen());
        assert!(
            checked
                .fast
                .set(Fast::new(&other_merges()).unwrap())
                .is_ok()
        );
        let text = "these words have other tokens";
        checked.compare();
        let known = checked
            .library()
            .encode_fast(text, false)
            .unwrap()
            .get_ids()
            .to_vec();
        assert_ne!(
            checked.ids(text).unwrap(),
            known,
            "the difference is found afterwards"
        );
        assert_eq!(checked.compare(), Some(true));
        assert_eq!(
            checked.because(),
            Some("on a request it differed from the library")
        );
        assert_eq!(checked.ids(text).unwrap(), known);
        assert_eq!(checked.compare(), None);
    }
}
