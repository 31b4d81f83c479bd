//! Decoding of tokens to text, for reports of token differences.

use super::Encoder;

impl Encoder {
    /// Decodes tokens to text, including special tokens. Ids that the tokenizer does not know are
    /// printed as numbers.
    pub fn decode_tokens(&self, ids: &[u32]) -> String {
        self.tokenizer
            .library()
            .decode(ids, false)
            .unwrap_or_else(|_| format!("{ids:?}"))
    }
}
