//! The added tokens of a tokenizer and how they are taken out of a text: leftmost and longest first, with the white space
//! that some of them take along.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;

/// Added tokens that are looked for together.
pub(super) struct Added {
    finder: AhoCorasick,
    tokens: Vec<Token>,
}

struct Token {
    id: u32,
    strips_left: bool,
    strips_right: bool,
}

impl Added {
    /// Of these, each with its text as it is looked for; or none of none.
    pub(super) fn new(tokens: &[(u32, String, AddedToken)]) -> Result<Option<Self>, &'static str> {
        if tokens.iter().any(|(_, _, token)| token.single_word) {
            return Err("it has added tokens that count as words of their own only");
        }
        let mut texts: Vec<&str> = tokens.iter().map(|(_, text, _)| text.as_str()).collect();
        texts.sort_unstable();
        let ambiguous =
            texts.windows(2).any(|pair| pair[0] == pair[1]) || texts.first().is_some_and(|text| text.is_empty());
        if ambiguous {
            return Err("two of its added tokens are spelled alike, or one is nothing");
        }
        if tokens.is_empty() {
            return Ok(None);
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text, _)| text))
            .map_err(|_| "it has too many added tokens")?;
        let token = |(id, _, token): &(u32, String, AddedToken)| Token {
            id: *id,
            strips_left: token.lstrip,
            strips_right: token.rstrip,
        };
        Ok(Some(Self { finder, tokens: tokens.iter().map(token).collect() }))
    }

    /// Gives the pieces of a text in order: what is between added tokens, and these.
    pub(super) fn split<'t>(&self, text: &'t str, mut piece: impl FnMut(Result<&'t str, u32>)) {
        let mut done = 0;
        // None of them ends within a character, so there is always something between.
        let between = |from: usize, to: usize| text.get(from..to).unwrap_or_default();
        for found in self.finder.find_iter(text) {
            let token = &self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if token.strips_left {
                start = between(0, start).trim_end().len().max(done);
            }
            if token.strips_right {
                let rest = between(end, text.len());
                end += rest.len() - rest.trim_start().len();
            }
            if done < start {
                piece(Ok(between(done, start)));
            }
            piece(Err(token.id));
            done = end;
        }
        if done < text.len() {
            piece(Ok(between(done, text.len())));
        }
    }
}
