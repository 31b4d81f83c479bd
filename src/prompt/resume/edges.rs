//! The added tokens behind which a text may be cut, and where they stand in it.

use memchr::{memchr, memchr2, memchr3};
use tokenizers::Tokenizer;

/// Least bytes between two points. It makes what is kept of a point small against the piece before it, whatever a prompt
/// consists of.
const SPACING: usize = 256;

/// Different first bytes of edges that are looked for.
const FIRST_BYTES: usize = 3;

/// An added token that is taken for what it is wherever it stands.
pub(super) struct Edge {
    pub(super) content: Box<str>,
    pub(super) id: u32,
}

/// The edges of a tokenizer, in the order of their bytes. None begins with another.
pub(super) struct Edges {
    edges: Vec<Edge>,
    first: Vec<u8>,
    longest: usize,
}

/// A place in a text behind an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    /// How many bytes are before it.
    pub(super) end: usize,
    /// The edge that ends there.
    pub(super) edge: usize,
    /// The name of all that is before it.
    pub(super) key: u128,
}

impl Edges {
    /// The edges of a tokenizer, or why it has none.
    pub(super) fn of(tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        let added = tokenizer.get_added_tokens_decoder();
        // The others are looked for later, in the pieces between these.
        let raw: Vec<_> = added
            .iter()
            .filter(|(_, token)| !token.normalized && !token.content.is_empty())
            .collect();
        let ignored = tokenizer.get_encode_special_tokens();
        let alone = |content: &str, id: u32| {
            let alone = tokenizer.encode_fast(content, false);
            alone.is_ok_and(|encoding| encoding.get_ids() == [id])
        };
        let mut edges: Vec<Edge> = raw
            .iter()
            .filter(|(_, token)| !(token.single_word || ignored && token.special))
            .filter(|(_, token)| {
                raw.iter()
                    .all(|(_, other)| is_left_alone(&token.content, &other.content))
            })
            .filter(|(id, token)| alone(&token.content, **id))
            .map(|(id, token)| Edge {
                content: token.content.as_str().into(),
                id: **id,
            })
            .collect();
        let first = commonest_first_bytes(&edges);
        edges.retain(|edge| first.contains(&edge.content.as_bytes()[0]));
        edges.sort_unstable_by(|a, b| a.content.cmp(&b.content));
        let longest = edges
            .iter()
            .map(|edge| edge.content.len())
            .max()
            .ok_or("no added token of it is an edge")?;
        Ok(Self {
            edges,
            first,
            longest,
        })
    }

    /// One of them.
    pub(super) fn get(&self, edge: usize) -> &Edge {
        &self.edges[edge]
    }

    /// Where a text may be cut; the names are still to be given. The points of a text that begins with this one begin with
    /// these, because each depends on nothing but what is before it.
    pub(super) fn points(&self, text: &str) -> Vec<Point> {
        let (mut points, mut at, mut least) = (Vec::new(), 0, SPACING);
        while let Some(place) = text
            .as_bytes()
            .get(at..)
            .and_then(|rest| self.next_first_byte(rest))
        {
            at += place;
            match self.at(&text.as_bytes()[at..]) {
                Some(edge) if at + self.edges[edge].content.len() >= least => {
                    let end = at + self.edges[edge].content.len();
                    points.push(Point { end, edge, key: 0 });
                    least = end + SPACING;
                    // An edge is one wherever it stands, so nothing is lost by not looking at those in between.
                    at = end.max(least.saturating_sub(self.longest));
                }
                _ => at += 1,
            }
        }
        points
    }

    /// The edge that a text begins with. As none begins with another, it is the last that is not behind the text in order.
    fn at(&self, text: &[u8]) -> Option<usize> {
        let edge = self
            .edges
            .partition_point(|edge| edge.content.as_bytes() <= text)
            .checked_sub(1)?;
        text.starts_with(self.edges[edge].content.as_bytes())
            .then_some(edge)
    }

    fn next_first_byte(&self, text: &[u8]) -> Option<usize> {
        match *self.first.as_slice() {
            [a] => memchr(a, text),
            [a, b] => memchr2(a, b, text),
            [a, b, c] => memchr3(a, b, c, text),
            _ => None,
        }
    }
}

/// The first bytes of most edges; mostly there is only `<` or `[`.
fn commonest_first_bytes(edges: &[Edge]) -> Vec<u8> {
    let mut counts = [0u32; 256];
    for edge in edges {
        counts[usize::from(edge.content.as_bytes()[0])] += 1;
    }
    let mut bytes: Vec<u8> = (0..=u8::MAX)
        .filter(|byte| counts[usize::from(*byte)] > 0)
        .collect();
    bytes.sort_by_key(|byte| std::cmp::Reverse(counts[usize::from(*byte)]));
    bytes.truncate(FIRST_BYTES);
    bytes
}

/// Whether another added token (or the same) cannot take a part of this one where both might begin in a text: it does not
/// contain it, and does not end in what it begins with.
fn is_left_alone(edge: &str, other: &str) -> bool {
    let (edge, other) = (edge.as_bytes(), other.as_bytes());
    let same = edge == other;
    let contains = !same && other.windows(edge.len()).any(|window| window == edge);
    let most = edge.len().min(other.len()) - 1;
    let overlaps = (1..=most).any(|length| other.ends_with(&edge[..length]));
    !contains && !overlaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_is_not_taken_in_part_by_others() {
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
            assert_eq!(is_left_alone(edge, other), alone, "{edge} {other}");
        }
    }
}
