//! The library tokenizer, and the fast tokenizer as long as both agree.
//!
//! The fast tokenizer is used if both agree on difficult texts. Afterwards, pieces of real prompts
//! are compared outside of requests. After one difference, only the library is used, because a
//! wrong token is worse than a slow one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use tokenizers::Tokenizer;

use super::{BaseFastTokenizer, FastTokenizer, hard_texts};
use crate::prompt::pieces;

/// Maximum length of a compared sample in bytes. The library takes about ten milliseconds for it.
const MAX_SAMPLE_BYTES: usize = 32 << 10;

/// Reason for disabling the fast path after a panic.
const PANICKED: &str = "the fast tokenizer panicked";

/// A library tokenizer with a verified fast path.
pub(crate) struct VerifiedTokenizer {
    library: Tokenizer,
    /// True if texts can be split at joints.
    has_joints: bool,
    /// The fast tokenizer. It is set after it agreed with the library on difficult texts.
    fast: OnceLock<FastTokenizer>,
    /// Reason why only the library is used.
    disabled_reason: OnceLock<&'static str>,
    /// True if the next text is to be sampled.
    sample_wanted: AtomicBool,
    /// A piece of a text with its tokens from the fast path.
    sample: Mutex<Option<(String, Vec<u32>)>>,
}

impl VerifiedTokenizer {
    /// Creates the tokenizer without the fast path.
    pub(crate) fn new(library: Tokenizer) -> Self {
        let has_joints = pieces::supports_joints(&library);
        Self {
            library,
            has_joints,
            fast: OnceLock::new(),
            disabled_reason: OnceLock::new(),
            sample_wanted: AtomicBool::new(false),
            sample: Mutex::new(None),
        }
    }

    /// Builds and enables the fast path if it agrees on difficult texts. The error is the reason
    /// why it is disabled.
    pub(crate) fn enable_fast_path(&self) -> Result<(), &'static str> {
        if self.fast.get().is_none() && self.disabled_reason.get().is_none() {
            let enabled = self.verify(FastTokenizer::new);
            if let Err(disabled_reason) = enabled {
                self.disable_fast_path(disabled_reason);
            }
        }
        self.disabled_reason().map_or(Ok(()), Err)
    }

    /// Enables the fast path with a tokenizer that was built together with the library's. If it is
    /// not usable, the fast path is built from the library's tokenizer.
    pub(crate) fn enable_base(&self, fast_base: BaseFastTokenizer) -> Result<(), &'static str> {
        self.verify(|library| fast_base.complete(library))
            .or_else(|_| self.enable_fast_path())
    }

    /// Builds a fast tokenizer, and enables it if it agrees on difficult texts. The error is the
    /// reason why it is not used.
    fn verify(
        &self,
        build: impl FnOnce(&Tokenizer) -> Result<FastTokenizer, &'static str> + Send,
    ) -> Result<(), &'static str> {
        // The fast tokenizer's thread-local memory is freed with the thread.
        let verified = thread::scope(|scope| {
            scope
                .spawn(|| build(&self.library).and_then(|fast| self.verify_hard_texts(fast)))
                .join()
        });
        // A concurrent call may have set an equal tokenizer.
        verified
            .unwrap_or(Err(PANICKED))
            .map(|fast| drop(self.fast.set(fast)))
    }

    /// Returns the fast tokenizer if it agrees on difficult texts.
    fn verify_hard_texts(&self, fast: FastTokenizer) -> Result<FastTokenizer, &'static str> {
        let added = self.library.get_added_tokens_decoder();
        let added: Vec<&str> = added.values().map(|token| token.content.as_str()).collect();
        for text in hard_texts::hard_texts(&added) {
            if try_encode(&fast, &text)?
                .is_some_and(|ids| self.differs_from_library(&text, &ids) == Some(true))
            {
                return Err("tokens differ from the library on difficult texts");
            }
        }
        Ok(fast)
    }

    /// Returns the library tokenizer.
    pub(crate) fn library(&self) -> &Tokenizer {
        &self.library
    }

    /// Returns true if the fast path was built.
    #[cfg(test)]
    pub(crate) fn has_fast_path(&self) -> bool {
        self.fast.get().is_some()
    }

    /// Returns true if texts can be split at joints.
    pub(crate) fn has_joints(&self) -> bool {
        self.has_joints
    }

    /// Returns the reason why only the library is used.
    pub(crate) fn disabled_reason(&self) -> Option<&'static str> {
        self.disabled_reason.get().copied()
    }

    /// Returns the tokens of a text without special tokens.
    pub(crate) fn ids(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        if let Some(ids) = self.fast_ids(text) {
            self.take_sample(text);
            return Ok(ids);
        }
        Ok(self.library.encode_fast(text, false)?.get_ids().to_vec())
    }

    /// Returns the tokens of the fast path, if it is enabled.
    fn fast_ids(&self, text: &str) -> Option<Vec<u32>> {
        let fast = self
            .fast
            .get()
            .filter(|_| self.disabled_reason.get().is_none())?;
        try_encode(fast, text).unwrap_or_else(|disabled_reason| {
            self.disable_fast_path(disabled_reason);
            None
        })
    }

    fn disable_fast_path(&self, disabled_reason: &'static str) {
        // If a reason is set already, it is retained.
        let _ = self.disabled_reason.set(disabled_reason);
    }

    /// Stores a sample of a text if one is requested. Its tokens are computed here instead of
    /// during the comparison, because the fast tokenizer uses many megabytes per calling thread.
    fn take_sample(&self, text: &str) {
        if self.sample_wanted.load(Ordering::Relaxed)
            && self.sample_wanted.swap(false, Ordering::Relaxed)
        {
            let piece = sample_around(text, rand::random_range(0..=text.len()));
            *self.sample.lock() = self.fast_ids(piece).map(|ids| (piece.to_owned(), ids));
        }
    }

    /// Compares the stored sample with the library and requests another one. Returns whether they
    /// differ, or `None` without a sample.
    pub(crate) fn verify_sample(&self) -> Option<bool> {
        let sample = self.sample.lock().take();
        let differs = sample.and_then(|(text, ids)| self.differs_from_library(&text, &ids));
        if differs == Some(true) {
            self.disable_fast_path("tokens differed from the library on a request");
        }
        self.sample_wanted
            .store(self.disabled_reason.get().is_none(), Ordering::Relaxed);
        differs
    }

    /// Returns whether the library produces other tokens for a text, or `None` if it fails.
    fn differs_from_library(&self, text: &str, ids: &[u32]) -> Option<bool> {
        let known = catch_unwind(AssertUnwindSafe(|| self.library.encode_fast(text, false)))
            .ok()?
            .ok()?;
        Some(ids != known.get_ids())
    }
}

/// Returns the tokens of the fast path. After a panic, the error is the reason to disable it.
fn try_encode(fast: &FastTokenizer, text: &str) -> Result<Option<Vec<u32>>, &'static str> {
    catch_unwind(AssertUnwindSafe(|| fast.ids(text))).map_err(|_| PANICKED)
}

/// Returns a piece of a text that begins near `around` and has at most the sample length.
fn sample_around(text: &str, around: usize) -> &str {
    let start = around.min(text.len().saturating_sub(MAX_SAMPLE_BYTES));
    let start = text.ceil_char_boundary(start);
    let end = text.floor_char_boundary((start + MAX_SAMPLE_BYTES).min(text.len()));
    text.get(start..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{other_merges, qwen};
    use super::*;

    #[test]
    fn sample_respects_character_boundaries() {
        let text = "é中😀".repeat(MAX_SAMPLE_BYTES / 4);
        for around in (0..text.len()).step_by(1009) {
            let piece = sample_around(&text, around);
            assert!(
                piece.len() > MAX_SAMPLE_BYTES - 4
                    && piece.len() <= MAX_SAMPLE_BYTES
                    && text.contains(piece),
                "{around}"
            );
        }
        assert_eq!(
            (sample_around("short", 3), sample_around("", 0)),
            ("short", "")
        );
    }

    #[test]
    fn agreeing_fast_path_is_compared_repeatedly() {
        let checked = VerifiedTokenizer::new(qwen());
        checked.ids("The library does this one.").unwrap();
        assert_eq!(
            (checked.verify_sample(), checked.verify_sample()),
            (None, None),
            "there is no sample"
        );
        assert_eq!(
            (checked.enable_fast_path(), checked.verify_sample()),
            (Ok(()), None)
        );
        for text in ["A sampled text.", "Another one"] {
            let known = checked
                .library()
                .encode_fast(text, false)
                .unwrap()
                .get_ids()
                .to_vec();
            assert_eq!(checked.ids(text).unwrap(), known);
            assert_eq!(checked.verify_sample(), Some(false));
            assert_eq!(checked.verify_sample(), None, "no new sample");
        }
    }

    #[test]
    fn difference_on_hard_texts_rejects_fast_path() {
        let checked = VerifiedTokenizer::new(qwen());
        assert!(
            checked
                .verify_hard_texts(FastTokenizer::new(&other_merges()).unwrap())
                .is_err()
        );
    }

    #[test]
    fn difference_on_request_disables_fast_path() {
        let checked = VerifiedTokenizer::new(qwen());
        assert!(
            checked
                .fast
                .set(FastTokenizer::new(&other_merges()).unwrap())
                .is_ok()
        );
        let text = "these words have other tokens";
        checked.verify_sample();
        let known = checked
            .library()
            .encode_fast(text, false)
            .unwrap()
            .get_ids()
            .to_vec();
        assert_ne!(
            checked.ids(text).unwrap(),
            known,
            "the difference is not detected yet"
        );
        assert_eq!(checked.verify_sample(), Some(true));
        assert_eq!(
            checked.disabled_reason(),
            Some("tokens differed from the library on a request")
        );
        assert_eq!(checked.ids(text).unwrap(), known);
        assert_eq!(checked.verify_sample(), None);
    }
}
