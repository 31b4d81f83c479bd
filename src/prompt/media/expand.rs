//! Rows of placeholder tokens in the places of items.

use super::{Illustrated, Item, Known, Rules};
use crate::openai::Modality;
use crate::prompt::{EncodeError, Tokens};

/// Most tokens of a prompt that are laid out; no context is larger.
const MOST_TOKENS: usize = 1 << 21;

/// The tokens that two prompts begin with.
pub(in crate::prompt) fn common(mut one: Tokens, other: &[u32]) -> Tokens {
    let same = one
        .iter()
        .zip(other)
        .take_while(|(one, other)| one == other)
        .count();
    one.truncate(same);
    one
}

/// Puts as many tokens in the place of each item as it has. The engine takes the placeholders of a modality in their order
/// for its items, wherever they come from; those beyond stay as they are. Of a prompt of which only the first items are
/// known, nothing is known from the next placeholder on.
pub(in crate::prompt) fn expand(
    tokens: Tokens,
    items: &[(Modality, Known)],
    rules: &Rules,
    all: bool,
) -> Result<Illustrated, EncodeError> {
    let total = tokens.len()
        + items
            .iter()
            .map(|(_, item)| item.tokens.saturating_sub(1))
            .sum::<usize>();
    if total > MOST_TOKENS {
        return Err(EncodeError::uncertain("more tokens than any context has"));
    }
    let mut queues = [Modality::Image, Modality::Audio, Modality::Video].map(|modality| {
        let of = items
            .iter()
            .filter(|(of, _)| *of == modality)
            .map(|(_, item)| item.clone());
        (
            modality,
            rules.of(modality).map(|placed| placed.token),
            of.collect::<Vec<_>>().into_iter(),
        )
    });
    let mut expanded = Vec::with_capacity(total);
    let mut placed = Vec::with_capacity(items.len());
    let mut whole = all;
    for &token in &*tokens {
        let found = queues
            .iter_mut()
            .find(|(_, placeholder, _)| *placeholder == Some(token));
        match found.map(|(modality, _, queue)| (*modality, queue.next())) {
            Some((modality, Some(item))) => {
                let range = expanded.len()..expanded.len() + item.tokens;
                expanded.resize(range.end, token);
                placed.push(Item {
                    modality,
                    id: item.id,
                    range,
                });
            }
            Some((_, None)) if !all => {
                whole = false;
                break;
            }
            _ => expanded.push(token),
        }
    }
    let left = queues.iter().any(|(_, _, queue)| queue.len() > 0);
    if left && all {
        return Err(EncodeError::uncertain(
            "the template shows no placeholder for an item",
        ));
    }
    let first = placed
        .first()
        .map_or(expanded.len(), |item| item.range.start);
    Ok(Illustrated {
        at_least: expanded.len(),
        tokens: tokens.carried_to(expanded, first),
        items: placed,
        whole,
    })
}
