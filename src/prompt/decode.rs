//! From tokens back to text, for people who look where two lists of tokens differ.

use super::Encoder;

impl Encoder {
    /// The text of some tokens, special ones as they are written; tokens that the tokenizer does not have by their numbers.
    pub fn text_of(&self, ids: &[u32]) -> String {
        self.tokenizer
            .library()
            .decode(ids, false)
            .unwrap_or_else(|_| format!("{ids:?}"))
    }
}
