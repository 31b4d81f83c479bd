//! Rendering of media items for a template. The items are rejected, rendered as in the engine, or
//! rendered with a mark in the place of one item. The text before that item ends at the mark.

use super::error::EncodeError;
use super::media::MediaRules;
use crate::openai::MediaModality;

/// Mark at the position of an item. No client prompt contains it, because such prompts are never
/// rendered with marks.
pub(super) const MARK: &str = "\u{10fffe}MEDIA\u{10fffe}";

/// Rendering mode of media items.
pub(super) enum MediaDisplay<'s> {
    /// Conversations with media items are rejected.
    Rejected,
    /// Items are rendered as in the engine.
    AsEngine(&'s MediaRules),
    /// Items are rendered as in the engine, except the item with this index, which is rendered as
    /// [`MARK`].
    WithMark(&'s MediaRules, usize),
}

/// Renders the media items of a conversation in order.
pub(super) struct MediaRenderer<'s> {
    display: MediaDisplay<'s>,
    item_count: usize,
    modality_counts: [usize; 3],
}

impl<'s> MediaRenderer<'s> {
    pub(super) fn new(display: MediaDisplay<'s>) -> Self {
        Self {
            display,
            item_count: 0,
            modality_counts: [0; 3],
        }
    }

    /// Returns the mark if it replaces the next item in a list of parts.
    pub(super) fn render_part(
        &mut self,
        modality: MediaModality,
    ) -> Result<Option<String>, EncodeError> {
        let (at, _) = self.next_numbers(modality);
        match self.display {
            MediaDisplay::Rejected => Err(multimodal_error(modality)),
            MediaDisplay::WithMark(_, marked) if marked == at => Ok(Some(MARK.to_owned())),
            MediaDisplay::AsEngine(_) | MediaDisplay::WithMark(..) => Ok(None),
        }
    }

    /// Returns the placeholder of the next item for content that is one string.
    pub(super) fn render_placeholder(
        &mut self,
        modality: MediaModality,
    ) -> Result<Option<String>, EncodeError> {
        let (at, number) = self.next_numbers(modality);
        match self.display {
            MediaDisplay::Rejected => Err(multimodal_error(modality)),
            MediaDisplay::WithMark(_, marked) if marked == at => Ok(Some(MARK.to_owned())),
            // Text after the mark is not used.
            MediaDisplay::WithMark(_, marked) if marked < at => Ok(None),
            MediaDisplay::WithMark(rules, _) | MediaDisplay::AsEngine(rules) => rules
                .placeholder(modality, number)
                .map(Some)
                .ok_or_else(|| multimodal_error(modality)),
        }
    }

    /// Returns the index of the next item, and its number among items of its modality, from 1.
    fn next_numbers(&mut self, modality: MediaModality) -> (usize, usize) {
        let number = &mut self.modality_counts[modality as usize];
        *number += 1;
        self.item_count += 1;
        (self.item_count - 1, *number)
    }
}

fn multimodal_error(modality: MediaModality) -> EncodeError {
    EncodeError::Multimodal(format!("{}_url", modality.as_str()))
}
