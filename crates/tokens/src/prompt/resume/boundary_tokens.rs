//! Added tokens after which a text may be split, and their positions.

use memchr::{memchr, memchr2, memchr3};
use tokenizers::Tokenizer;

/// Minimum distance of two resume points in bytes. It keeps the cache overhead of a point small
/// compared to its piece.
const MIN_SPACING_BYTES: usize = 256;

/// Maximum number of distinct first bytes of boundary tokens.
const MAX_FIRST_BYTES: usize = 3;

/// An added token that is matched in every context.
pub(super) struct BoundaryToken {
    pub(super) content: Box<str>,
    pub(super) id: u32,
}

/// Boundary tokens of a tokenizer in byte order. None is a prefix of another.
pub(super) struct BoundaryTokens {
    tokens: Vec<BoundaryToken>,
    first_bytes: Vec<u8>,
    max_len: usize,
}

/// A position after a boundary token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResumePoint {
    /// Number of bytes before the position.
    pub(super) end: usize,
    /// Index of the boundary token that ends there.
    pub(super) boundary: usize,
    /// Hash of the text before the position.
    pub(super) key: u128,
}

impl BoundaryTokens {
    /// Returns the boundary tokens of a tokenizer, or the reason why it has none.
    pub(super) fn from_tokenizer(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        let added = tokenizer.get_added_tokens_decoder();
        // Normalized added tokens are matched later, in the text between these.
        let raw: Vec<_> = added
            .iter()
            .filter(|(_, token)| !token.normalized && !token.content.is_empty())
            .collect();
        let ignored = tokenizer.get_encode_special_tokens();
        let alone = |content: &str, id: u32| {
            let alone = tokenizer.encode_fast(content, false);
            alone.is_ok_and(|encoding| encoding.get_ids() == [id])
        };
        let mut tokens: Vec<BoundaryToken> = raw
            .iter()
            .filter(|(_, token)| !(token.single_word || ignored && token.special))
            .filter(|(_, token)| {
                raw.iter()
                    .all(|(_, other)| is_unambiguous(&token.content, &other.content))
            })
            .filter(|(id, token)| alone(&token.content, **id))
            .map(|(id, token)| BoundaryToken {
                content: token.content.as_str().into(),
                id: **id,
            })
            .collect();
        let first_bytes = commonest_first_bytes(&tokens);
        tokens.retain(|token| first_bytes.contains(&token.content.as_bytes()[0]));
        tokens.sort_unstable_by(|a, b| a.content.cmp(&b.content));
        let max_len = tokens
            .iter()
            .map(|token| token.content.len())
            .max()
            .ok_or("no added token is a boundary token")?;
        Ok(Self {
            tokens,
            first_bytes,
            max_len,
        })
    }

    /// Returns the boundary token with this index.
    pub(super) fn get(&self, index: usize) -> &BoundaryToken {
        &self.tokens[index]
    }

    /// Returns the resume points of a text after the point at `start`, without hashes. Each point
    /// depends only on the text before it, so texts with a common prefix share the points in it.
    pub(super) fn points_after(&self, text: &str, start: usize) -> Vec<ResumePoint> {
        let mut points = Vec::new();
        let mut at = start;
        let mut min_end = start + MIN_SPACING_BYTES;
        while let Some(offset) = text
            .as_bytes()
            .get(at..)
            .and_then(|rest| self.next_first_byte(rest))
        {
            at += offset;
            match self.token_at(&text.as_bytes()[at..]) {
                Some(boundary) if at + self.tokens[boundary].content.len() >= min_end => {
                    let end = at + self.tokens[boundary].content.len();
                    points.push(ResumePoint {
                        end,
                        boundary,
                        key: 0,
                    });
                    min_end = end + MIN_SPACING_BYTES;
                    // Boundary tokens are matched in every context, so those in between can be
                    // skipped.
                    at = end.max(min_end.saturating_sub(self.max_len));
                }
                _ => at += 1,
            }
        }
        points
    }

    /// Returns the boundary token at the start of `text`. No boundary token is a prefix of another,
    /// so it can only be the last one that is not greater than the text.
    fn token_at(&self, text: &[u8]) -> Option<usize> {
        let index = self
            .tokens
            .partition_point(|token| token.content.as_bytes() <= text)
            .checked_sub(1)?;
        text.starts_with(self.tokens[index].content.as_bytes())
            .then_some(index)
    }

    fn next_first_byte(&self, text: &[u8]) -> Option<usize> {
        match *self.first_bytes.as_slice() {
            [a] => memchr(a, text),
            [a, b] => memchr2(a, b, text),
            [a, b, c] => memchr3(a, b, c, text),
            _ => None,
        }
    }
}

/// Returns the most common first bytes of boundary tokens, usually only `<` or `[`.
fn commonest_first_bytes(tokens: &[BoundaryToken]) -> Vec<u8> {
    let mut counts = [0u32; 256];
    for token in tokens {
        counts[usize::from(token.content.as_bytes()[0])] += 1;
    }
    let mut bytes: Vec<u8> = (0..=u8::MAX)
        .filter(|byte| counts[usize::from(*byte)] > 0)
        .collect();
    bytes.sort_by_key(|byte| std::cmp::Reverse(counts[usize::from(*byte)]));
    bytes.truncate(MAX_FIRST_BYTES);
    bytes
}

/// Returns true if `other` cannot prevent a match of `token`: it does not contain `token` and does
/// not end with a prefix of it. The two may be the same token.
fn is_unambiguous(token: &str, other: &str) -> bool {
    let token = token.as_bytes();
    let other = other.as_bytes();
    let same = token == other;
    let contains = !same && other.windows(token.len()).any(|window| window == token);
    let max_len = token.len().min(other.len()) - 1;
    let overlaps = (1..=max_len).any(|length| other.ends_with(&token[..length]));
    !contains && !overlaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundary_token_is_unambiguous() {
        for (edge, other, alone) in [
            ("<|im_end|>", "<|im_end|>", true),
            ("<|im_end|>", "<|im_start|>", true),
            ("<s>", "</s>", true),
            ("<s>", "<s", true),
            ("<s", "<s>", false),
            ("s>", "<s>", false),
            ("<a><", "<a><", false),
            ("<b>", "x<", false),
            ("<b>", "<", true),
            ("aXa", "aXa", false),
            ("\u{e9}b", "c\u{e9}", false),
        ] {
            assert_eq!(is_unambiguous(edge, other), alone, "{edge} {other}");
        }
    }
}
