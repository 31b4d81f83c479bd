//! Expansion of placeholder tokens.

use super::{MediaRules, MultimodalPrompt, PlacedMediaItem, ResolvedMediaItem};
use crate::openai::MediaModality;
use crate::prompt::error::EncodeError;
use crate::prompt::resume::prompt_tokens::PromptTokens;

/// Maximum number of expanded tokens. No model has a larger context.
const MAX_EXPANDED_TOKENS: usize = 1 << 21;

/// Returns the common prefix of the tokens of two prompts.
pub(crate) fn common_prefix(mut one: PromptTokens, other: &[u32]) -> PromptTokens {
    let same = one
        .iter()
        .zip(other)
        .take_while(|(one, other)| one == other)
        .count();
    one.truncate(same);
    one
}

/// The items of one modality that have no position yet.
struct ModalityQueue {
    modality: MediaModality,
    placeholder: Option<u32>,
    items: std::vec::IntoIter<ResolvedMediaItem>,
}

impl ModalityQueue {
    fn all(items: &[(MediaModality, ResolvedMediaItem)], rules: &MediaRules) -> [Self; 3] {
        [
            MediaModality::Image,
            MediaModality::Audio,
            MediaModality::Video,
        ]
        .map(|modality| {
            let items = items
                .iter()
                .filter(|(of, _)| *of == modality)
                .map(|(_, item)| item.clone());
            Self {
                modality,
                placeholder: rules.rule_for(modality).map(|rule| rule.token),
                items: items.collect::<Vec<_>>().into_iter(),
            }
        })
    }
}

/// Repeats the placeholder of each item as often as the item has tokens. The engine assigns the
/// placeholders of a modality to its items in order, even those in the text of the client. It does
/// not repeat surplus placeholders. If `all` is false, only the first items are known, and the
/// result ends before the next placeholder.
pub(crate) fn expand_placeholders(
    tokens: PromptTokens,
    items: &[(MediaModality, ResolvedMediaItem)],
    rules: &MediaRules,
    all: bool,
) -> Result<MultimodalPrompt, EncodeError> {
    let total = tokens.len()
        + items
            .iter()
            .map(|(_, item)| item.tokens.saturating_sub(1))
            .sum::<usize>();
    if total > MAX_EXPANDED_TOKENS {
        return Err(EncodeError::uncertain(
            "more tokens than the longest supported context",
        ));
    }
    let mut queues = ModalityQueue::all(items, rules);
    let mut expanded = Vec::with_capacity(total);
    let mut placed = Vec::with_capacity(items.len());
    let mut is_complete = all;
    for &token in &*tokens {
        let queue = queues
            .iter_mut()
            .find(|queue| queue.placeholder == Some(token));
        match queue.map(|queue| (queue.modality, queue.items.next())) {
            Some((modality, Some(item))) => {
                let range = expanded.len()..expanded.len() + item.tokens;
                expanded.resize(range.end, token);
                placed.push(PlacedMediaItem {
                    modality,
                    id: item.id,
                    range,
                });
            }
            Some((_, None)) if !all => {
                is_complete = false;
                break;
            }
            _ => expanded.push(token),
        }
    }
    if all && queues.iter().any(|queue| queue.items.len() > 0) {
        return Err(EncodeError::uncertain(
            "the template renders no placeholder for an item",
        ));
    }
    let first = placed
        .first()
        .map_or(expanded.len(), |item| item.range.start);
    Ok(MultimodalPrompt {
        min_tokens: expanded.len(),
        tokens: tokens.with_ids(expanded, first),
        items: placed,
        is_complete,
    })
}
