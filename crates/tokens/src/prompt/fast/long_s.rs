//! Texts with the long s (U+017F) that the fast library tokenizes differently. The engines' library
//! folds the long s to `s`, so `'ſ` matches the pattern `(?i:'s)`. The fast library accepts only
//! ASCII letters there. U+1E9B is affected as well, because its NFD form begins with the long s.

use memchr::memmem;
use tokenizers::NormalizerWrapper;

const LONG_S: [&str; 2] = ["\u{17f}", "\u{1e9b}"];
const CONTRACTIONS: [&str; 2] = ["'\u{17f}", "'\u{1e9b}"];

/// Position of the long s that disables the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LongSPosition {
    /// After an apostrophe.
    Contraction,
    /// Anywhere: the normalizer may put an apostrophe before it.
    Anywhere,
}

impl LongSPosition {
    /// Returns the position for a normalizer. Unicode normal forms turn no other character into an
    /// apostrophe before a long s: NFC and NFD create no apostrophe, NFKC and NFKD keep no long s.
    pub(super) fn for_normalizer(normalizer: Option<&NormalizerWrapper>) -> Self {
        if normalizer.is_none_or(is_normal_form) {
            Self::Contraction
        } else {
            Self::Anywhere
        }
    }

    /// Returns true if the fast path does not support `text`.
    pub(super) fn is_in(self, text: &str) -> bool {
        let strings = match self {
            Self::Contraction => CONTRACTIONS,
            Self::Anywhere => LONG_S,
        };
        strings
            .iter()
            .any(|string| memmem::find(text.as_bytes(), string.as_bytes()).is_some())
    }
}

fn is_normal_form(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_) => true,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().all(is_normal_form),
        _ => false,
    }
}
