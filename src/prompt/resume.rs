//! The prompt of the next turn begins with the prompt of this one, so what was tokenised once need not be again. A text is
//! cut behind certain added tokens, its *edges*, and the tokens of each piece are kept under a name that only the text from
//! the very beginning to that edge has. The same pieces keep the hashes of the blocks that end in them.
//!
//! # Why it is exact
//! The tokenizer first looks for its added tokens that are not normalized, leftmost and longest first, in the raw text, and
//! takes them out. What is between two of them is normalised, split and tokenised for itself: neither a normalizer nor a
//! pre-tokenizer nor a model sees beyond its piece. One thing is kept of where a piece stands: whether it is the first
//! (`Metaspace` with `first`). So, with `E` an added token,
//!
//! > tokens(`a E b`) = tokens(`a E`), then tokens(`E b`) without their first, which is the token of `E`,
//!
//! if in `a E b` and in `E b` this `E` is taken for what it is whatever `a` and `b` are. It is, if no other of these added
//! tokens contains it, and none (itself included) ends in what `E` begins with: then whatever is taken before `E` ends
//! before it, and at its first byte nothing longer begins. The search goes on behind `E` from nothing, and white space that
//! later tokens strip on their left ends at `E` at the latest. White space that `E` strips on its own right is in `b`, and
//! stripped from `E b` as well. A token that counts only as a word of its own (`single_word`) depends on `b` and is no edge;
//! where others do, they look no further than at the last character of `E`, which `E b` has. `E b` is tokenised with `E` before
//! it so that `b` is not the beginning of a text.
//!
//! Added tokens that are normalized are looked for later, in each piece for itself, and are no edges. Tokenizers with parts
//! of which this is not known, or that choose by chance (dropout, sampling), are not resumed at all ([`known`]).

mod cache;
mod edges;
mod known;
mod tokens;

use std::ops::Range;
use std::sync::Arc;

use highway::{HighwayHash as _, HighwayHasher, Key};
use tokenizers::Tokenizer;

use super::fast::Checked;
use super::pieces::{self, FirstTokens, StopReason, TokenBudget};
pub use cache::PromptCache;
use cache::Value;
use edges::{Edges, Point};
pub(super) use known::{Frame, frame, parts};
pub use tokens::Tokens;
use tokens::Trail;

/// Separates what the key of a tokenizer is used for.
const TEXT: &[u8] = b"text";

/// What names are made with: who does not know it cannot say which texts get equal ones.
#[derive(Clone, Copy)]
struct Secret([u64; 4]);

/// The tokens of a text without what the post-processor adds, and the points where others may go on.
pub(super) struct Bare {
    pub(super) ids: Vec<u32>,
    /// The reason why the text has more; `None` if these are all.
    pub(super) stopped: Option<StopReason>,
    /// The name of each point, and how many tokens are before it.
    points: Vec<(u128, usize)>,
}

/// One tokenizer's way to go on from what is known.
pub(super) struct Resumer {
    edges: Edges,
    frame: Frame,
    key: Secret,
    cache: Arc<PromptCache>,
}

impl Resumer {
    /// A way for this tokenizer, or why there is none.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        cache: Arc<PromptCache>,
    ) -> Result<Self, &'static str> {
        known::parts(tokenizer)?;
        let frame = known::frame(tokenizer)?;
        let edges = Edges::of(tokenizer)?;
        Ok(Self {
            edges,
            frame,
            key: Secret(rand::random()),
            cache,
        })
    }

    /// The tokens of a text, as the tokenizer alone would make them, as far as the budget goes; `None` where it is not worth to
    /// look for the beginning. Texts with different names `apart` share nothing.
    pub(super) fn tokens(
        &self,
        tokenizer: &Checked,
        text: &str,
        apart: Option<&str>,
        budget: &TokenBudget<'_>,
    ) -> tokenizers::Result<Option<Bare>> {
        if self.cache.limit() == 0 {
            return Ok(None);
        }
        let library = tokenizer.because().is_some();
        let points = self.points(text, (library, apart));
        if points.is_empty() {
            self.cache.count_outcome("uncut");
            return Ok(None);
        }
        let keys: Vec<u128> = points.iter().map(|point| point.key).collect();
        let found = self.cache.walk(&keys, Value::tokens);
        let mut known = Vec::with_capacity(points.len());
        let mut all = Vec::with_capacity((text.len() / 3).min(budget.tokens));
        for (piece, key) in found.iter().zip(&keys) {
            all.extend_from_slice(piece);
            known.push((*key, all.len()));
        }
        let resumed = all.len();
        let mut made = Vec::with_capacity(points.len() - found.len());
        let mut last = found.len().checked_sub(1).map(|at| points[at]);
        let mut stopped = None;
        for point in &points[found.len()..] {
            let piece = self.piece(
                tokenizer,
                &text[..point.end],
                last,
                &budget.after(all.len()),
            )?;
            all.extend_from_slice(&piece.ids);
            stopped = piece.stopped;
            if stopped.is_some() {
                break;
            }
            known.push((point.key, all.len()));
            made.push((point.key, Value::Tokens(piece.ids.into())));
            last = Some(*point);
        }
        if stopped.is_none() {
            let piece = self.piece(tokenizer, text, last, &budget.after(all.len()))?;
            all.extend(piece.ids);
            stopped = piece.stopped;
        }
        // The known tokens of earlier prompts may exceed the budget.
        if all.len() > budget.tokens {
            stopped = stopped.or(Some(StopReason::TooLong));
            all.truncate(budget.tokens);
        }
        known.retain(|(_, tokens)| *tokens <= all.len());
        // What was made just before a difference was found is not kept: it may be wrong.
        let made = if tokenizer.because().is_some() == library {
            made
        } else {
            Vec::new()
        };
        self.cache.keep(&keys[..found.len()], made);
        self.cache.count(resumed.min(all.len()), all.len());
        Ok(Some(Bare {
            ids: all,
            stopped,
            points: known,
        }))
    }

    /// The tokens of what follows a point in a text.
    fn piece(
        &self,
        tokenizer: &Checked,
        text: &str,
        last: Option<Point>,
        budget: &TokenBudget<'_>,
    ) -> tokenizers::Result<FirstTokens> {
        let Some(Point { end, edge, .. }) = last else {
            return pieces::tokens(tokenizer, text, budget);
        };
        let edge = self.edges.get(edge);
        // The added token is tokenized once more, and removed again.
        let budget = TokenBudget {
            tokens: budget.tokens.saturating_add(1),
            ..*budget
        };
        let mut made = pieces::tokens(tokenizer, &text[end - edge.content.len()..], &budget)?;
        match made.ids.first() {
            Some(first) if *first == edge.id => drop(made.ids.remove(0)),
            None if made.stopped.is_some() => {}
            _ => return Err("an added token was not found where it stands".into()),
        }
        Ok(made)
    }

    /// Where a text may be cut, and the names of what is before. Once the library alone is believed, nothing of what was
    /// made another way is taken over.
    fn points(&self, text: &str, (library, apart): (bool, Option<&str>)) -> Vec<Point> {
        let mut points = self.edges.points(text);
        if points.is_empty() {
            return points;
        }
        let mut name = self.key.name(&[
            TEXT,
            &[library.into()],
            apart.unwrap_or_default().as_bytes(),
        ]);
        let mut from = 0;
        for point in &mut points {
            name = self
                .key
                .name(&[&name.to_le_bytes(), &text.as_bytes()[from..point.end]]);
            (point.key, from) = (name, point.end);
        }
        points
    }

    /// Counts a prompt that could not be tokenised in pieces.
    pub(super) fn count_failed(&self) {
        self.cache.count_outcome("failed");
    }

    /// What the post-processor makes of the tokens of a text, and where others may go on from them and from their blocks.
    pub(super) fn framed(&self, bare: Bare, special: bool) -> Tokens {
        let Bare {
            ids,
            stopped,
            points,
        } = bare;
        let points = self.trail(
            points,
            special,
            if special { self.frame.before.len() } else { 0 },
        );
        let ids = match stopped {
            _ if !special => ids,
            None => self.frame.around(&ids),
            Some(_) => self.frame.before(&ids),
        };
        Tokens::new(ids, points)
    }

    fn trail(&self, mut points: Vec<(u128, usize)>, special: bool, before: usize) -> Option<Trail> {
        for (_, end) in &mut points {
            *end += before;
        }
        (!points.is_empty()).then(|| Trail::new(self.cache.clone(), self.key, special, points))
    }
}

impl From<FirstTokens> for Bare {
    fn from(FirstTokens { ids, stopped }: FirstTokens) -> Self {
        Self {
            ids,
            stopped,
            points: Vec::new(),
        }
    }
}

impl Bare {
    /// Cuts off what truncation does.
    pub(super) fn keep<E>(
        &mut self,
        range: impl FnOnce(usize) -> Result<Range<usize>, E>,
    ) -> Result<(), E> {
        let Range { start, end } = range(self.ids.len())?;
        if start > 0 {
            self.points.clear();
        }
        self.points.retain(|(_, tokens)| *tokens <= end);
        self.ids.truncate(end);
        self.ids.drain(..start);
        Ok(())
    }
}

impl Secret {
    /// A name that only these parts have, as nobody outside can choose others that have it too. All parts but the last have a
    /// fixed length. A function for keys, and not a plain hash, at the speed of one: it reads every prompt from its beginning.
    fn name(&self, parts: &[&[u8]]) -> u128 {
        let mut hasher = HighwayHasher::new(Key(self.0));
        for part in parts {
            hasher.append(part);
        }
        let [low, high] = hasher.finalize128();
        u128::from(high) << 64 | u128::from(low)
    }
}
