//! Reuse of the tokens of earlier prompts. Each turn of a conversation begins with the prompt of
//! the previous turn, so the common part need not be tokenized again.
//!
//! A text is split after certain added tokens, its *boundary tokens*. The tokens of each piece are
//! cached under a hash of the text from the beginning to that boundary. The cache also stores the
//! hashes of the blocks that end in the piece.
//!
//! # Correctness
//! The tokenizer first searches the raw text for its added tokens that are not normalized, leftmost
//! and longest first, and removes them. The text between two of them is normalized, split and
//! tokenized independently: normalizer, pre-tokenizer and model depend only on their piece of text.
//! The only position that matters is whether a piece is the first (`Metaspace` with `first`). So,
//! with `E` an added token,
//!
//! > tokens(`a E b`) = tokens(`a E`), then tokens(`E b`) without the first, which is that of `E`,
//!
//! if this `E` is matched in `a E b` and in `E b` for all `a` and `b`. It is matched if no other of
//! these added tokens contains it, and none (itself included) ends with a prefix of `E`. Then any
//! match before `E` ends before it, and no longer match begins at its first byte. The search
//! continues after `E` without state. White space that later tokens strip on their left ends at `E`
//! at the latest. White space that `E` strips on its right is in `b` and is stripped from `E b` as
//! well.
//!
//! A token with `single_word` depends on `b` and is no boundary. Other such tokens inspect at most
//! the last character of `E`, which `E b` contains. `E b` is tokenized with `E` in front so that
//! `b` is not the beginning of a text.
//!
//! Normalized added tokens are matched later, in each piece, and are no boundaries. Tokenizers with
//! unsupported parts or randomness (dropout, sampling) are not resumed ([`tokenizer_parts`]).
//!
//! Decision 0023.

mod boundary_tokens;
pub(super) mod prompt_tokens;
mod rendered_prefix;

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::fast::VerifiedTokenizer;
use super::pieces::{self, LeadingTokens, StopReason, TokenBudget};
use super::tokenizer_parts::{self, SpecialTokenFrame};
use crate::prompt_cache::{HashKey, PromptCache, SharedCachedValue};
use boundary_tokens::{BoundaryTokens, ResumePoint};
pub use prompt_tokens::PromptTokens;
use prompt_tokens::ResumePoints;
pub(super) use rendered_prefix::{CachedPrefix, ConversationCheckpoint, ResumableText};

/// Separates text hashes from other uses of the key.
const TEXT_DOMAIN: &[u8] = b"text";

/// Tokens of the beginning of a text while it is tokenized.
struct TokenizedPrefix<'t> {
    text: &'t str,
    tokens: LeadingTokens,
    /// Pieces that were not cached.
    new_pieces: Vec<(u128, SharedCachedValue)>,
}

impl<'t> TokenizedPrefix<'t> {
    /// Creates a prefix from the cached pieces of the leading resume points. `keys` are the hashes
    /// of all resume points, and `max_tokens` bounds the reserved space.
    fn from_pieces<'p>(
        text: &'t str,
        pieces: impl Iterator<Item = &'p Arc<Vec<u32>>> + Clone,
        keys: &[u128],
        max_tokens: usize,
    ) -> Self {
        let cached: usize = pieces.clone().map(|piece| piece.len()).sum();
        let mut tokens = LeadingTokens {
            ids: Vec::with_capacity((cached + text.len() / 3).min(max_tokens)),
            stopped: None,
            points: Vec::with_capacity(keys.len()),
        };
        for (piece, key) in pieces.zip(keys) {
            tokens.ids.extend_from_slice(piece);
            tokens.points.push((*key, tokens.ids.len()));
        }
        Self {
            text,
            tokens,
            new_pieces: Vec::new(),
        }
    }
}

/// Tokenizes texts of one tokenizer with reuse of cached prefixes.
pub(super) struct ResumingTokenizer {
    boundaries: BoundaryTokens,
    key: HashKey,
    cache: Arc<PromptCache>,
}

impl ResumingTokenizer {
    /// Creates the state for a tokenizer, or returns the reason why it is unsupported.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        cache: Arc<PromptCache>,
    ) -> Result<Self, &'static str> {
        tokenizer_parts::check_parts(tokenizer)?;
        tokenizer_parts::find_frame(tokenizer)?;
        let boundaries = BoundaryTokens::from_tokenizer(tokenizer)?;
        Ok(Self {
            boundaries,
            key: HashKey::random(),
            cache,
        })
    }

    /// Tokenizes a text within a budget. The tokens equal those of the tokenizer alone. Returns
    /// `None` if caching is not worthwhile. Texts with different `cache_namespace` share no tokens.
    pub(super) fn tokenize(
        &self,
        tokenizer: &VerifiedTokenizer,
        input: &ResumableText<'_>,
        cache_namespace: Option<&str>,
        budget: &TokenBudget<'_>,
    ) -> tokenizers::Result<Option<LeadingTokens>> {
        // A found prefix contains its tokens, so it remains usable after a reload disables the cache.
        if self.cache.limit() == 0 && input.prefix().is_none() {
            return Ok(None);
        }
        let text = input.text();
        let uses_library = tokenizer.disabled_reason().is_some();
        // The fast path was disabled since the prefix was found, so its tokens may be wrong.
        let is_outdated = |prefix: &CachedPrefix| prefix.uses_library != uses_library;
        if input.prefix().is_some_and(is_outdated) {
            return Ok(None);
        }
        let points = match input.prefix() {
            Some(prefix) => self.points_after_prefix(text, prefix),
            None => self.points(text, uses_library, cache_namespace),
        };
        if points.is_empty() {
            self.cache.record_outcome("not_resumable");
            return Ok(None);
        }
        let keys: Vec<u128> = points.iter().map(|point| point.key).collect();
        let known = input.prefix().map_or(&[][..], |prefix| &prefix.pieces);
        let found = self.cache.find_leading(&keys[known.len()..]);
        let pieces = known.iter().chain(&found);
        let mut prefix = TokenizedPrefix::from_pieces(text, pieces, &keys, budget.max_tokens);
        let resumed = prefix.tokens.ids.len();
        self.tokenize_rest(tokenizer, &points, budget, &mut prefix)?;
        let TokenizedPrefix {
            mut tokens,
            mut new_pieces,
            ..
        } = prefix;
        // Cached tokens may exceed the budget.
        if tokens.ids.len() > budget.max_tokens {
            tokens.stopped = tokens.stopped.or(Some(StopReason::TooLong));
        }
        tokens.retain_range(0..budget.max_tokens);
        // If the fast path was disabled meanwhile, the tokens may be wrong and are not cached.
        if tokenizer.disabled_reason().is_some() != uses_library {
            new_pieces.clear();
        } else {
            new_pieces.extend(self.new_prefix_entries(input, &points, uses_library));
        }
        let mut used_keys = keys[..known.len() + found.len()].to_vec();
        if let Some(prefix) = input.prefix() {
            used_keys.push(prefix.key);
        }
        self.cache.store(&used_keys, new_pieces);
        let length = tokens.ids.len();
        self.cache.record_lookup(resumed.min(length), length);
        Ok(Some(tokens))
    }

    /// Tokenizes the text after the cached pieces, piece by piece, and appends it to `prefix`.
    fn tokenize_rest(
        &self,
        tokenizer: &VerifiedTokenizer,
        points: &[ResumePoint],
        budget: &TokenBudget<'_>,
        prefix: &mut TokenizedPrefix<'_>,
    ) -> tokenizers::Result<()> {
        let TokenizedPrefix {
            text,
            tokens,
            new_pieces,
        } = prefix;
        let cached = tokens.points.len();
        let mut last = cached.checked_sub(1).map(|at| points[at]);
        for point in &points[cached..] {
            let rest = budget.remaining_after(tokens.ids.len());
            let mut piece = self.tokenize_after(tokenizer, &text[..point.end], last, &rest)?;
            tokens.ids.extend_from_slice(&piece.ids);
            tokens.stopped = piece.stopped;
            if tokens.stopped.is_some() {
                return Ok(());
            }
            tokens.points.push((point.key, tokens.ids.len()));
            piece.ids.shrink_to_fit();
            new_pieces.push((point.key, Arc::new(piece.ids)));
            last = Some(*point);
        }
        let rest = budget.remaining_after(tokens.ids.len());
        let piece = self.tokenize_after(tokenizer, text, last, &rest)?;
        tokens.ids.extend(piece.ids);
        tokens.stopped = piece.stopped;
        Ok(())
    }

    /// Tokenizes the text after a resume point.
    fn tokenize_after(
        &self,
        tokenizer: &VerifiedTokenizer,
        text: &str,
        last: Option<ResumePoint>,
        budget: &TokenBudget<'_>,
    ) -> tokenizers::Result<LeadingTokens> {
        let Some(ResumePoint { end, boundary, .. }) = last else {
            return pieces::tokenize_pieces(tokenizer, text, budget);
        };
        let boundary = self.boundaries.get(boundary);
        // The boundary token is tokenized again and then removed, so the budget is one larger.
        let budget = TokenBudget {
            max_tokens: budget.max_tokens.saturating_add(1),
            ..*budget
        };
        let mut made =
            pieces::tokenize_pieces(tokenizer, &text[end - boundary.content.len()..], &budget)?;
        match made.ids.first() {
            Some(first) if *first == boundary.id => drop(made.ids.remove(0)),
            None if made.stopped.is_some() => {}
            _ => return Err("an added token was not matched at its position".into()),
        }
        Ok(made)
    }

    /// Returns the resume points of a text with their hashes. The hashes differ after the fast path
    /// is disabled, so that tokens cached before are not reused.
    fn points(
        &self,
        text: &str,
        uses_library: bool,
        cache_namespace: Option<&str>,
    ) -> Vec<ResumePoint> {
        let mut points = self.boundaries.points_after(text, 0);
        if points.is_empty() {
            return points;
        }
        let key = self.key.hash_parts(&[
            TEXT_DOMAIN,
            &[uses_library.into()],
            cache_namespace.unwrap_or_default().as_bytes(),
        ]);
        self.hash_points(&mut points, text, key, 0);
        points
    }

    /// Sets the hashes of points that follow a position with a known hash.
    fn hash_points(&self, points: &mut [ResumePoint], text: &str, mut key: u128, mut from: usize) {
        for point in points {
            key = self
                .key
                .hash_parts(&[&key.to_le_bytes(), &text.as_bytes()[from..point.end]]);
            point.key = key;
            from = point.end;
        }
    }

    /// Counts a prompt whose pieces could not be tokenized.
    pub(super) fn record_failure(&self) {
        self.cache.record_outcome("failed");
    }

    /// Attaches the resume points to tokens that begin with those of `frame`.
    pub(super) fn attach_points(
        &self,
        ids: Vec<u32>,
        mut points: Vec<(u128, usize)>,
        frame: Option<&SpecialTokenFrame>,
    ) -> PromptTokens {
        for (_, end) in &mut points {
            *end += frame.map_or(0, |frame| frame.before.len());
        }
        let points = (!points.is_empty())
            .then(|| ResumePoints::new(self.cache.clone(), self.key, frame.is_some(), points));
        PromptTokens::new(ids, points)
    }
}
