//! How images and the like are shown to a template: not at all, as the engine shows them, or with a mark in the place of
//! one of them, which tells where the text before it ends.

use super::EncodeError;
use super::media::Rules;
use crate::openai::Modality;

/// Stands where an item would; it is in no prompt of a client, because none that holds it is looked at this way.
pub(super) const MARK: &str = "\u{10fffe}MEDIA\u{10fffe}";

/// How items are shown.
pub(super) enum Show<'s> {
    /// Not at all: a conversation with one is refused.
    Nothing,
    /// As the engine shows them.
    As(&'s Rules),
    /// As the engine does, but for the item of this number.
    Marked(&'s Rules, usize),
}

/// How items are shown, and which were shown already.
pub(super) struct Stage<'s> {
    show: Show<'s>,
    seen: usize,
    numbers: [usize; 3],
}

impl<'s> Stage<'s> {
    pub(super) fn new(show: Show<'s>) -> Self {
        Self {
            show,
            seen: 0,
            numbers: [0; 3],
        }
    }

    /// A text in place of the next item in a list of parts, if there is to be one.
    pub(super) fn listed(&mut self, modality: Modality) -> Result<Option<String>, EncodeError> {
        let (at, _) = self.next(modality);
        match self.show {
            Show::Nothing => Err(refused(modality)),
            Show::Marked(_, marked) if marked == at => Ok(Some(MARK.to_owned())),
            Show::As(_) | Show::Marked(..) => Ok(None),
        }
    }

    /// What is written for the next item where the content is one text.
    pub(super) fn placeholder(
        &mut self,
        modality: Modality,
    ) -> Result<Option<String>, EncodeError> {
        let (at, number) = self.next(modality);
        match self.show {
            Show::Nothing => Err(refused(modality)),
            Show::Marked(_, marked) if marked == at => Ok(Some(MARK.to_owned())),
            // What comes after the mark does not matter.
            Show::Marked(_, marked) if marked < at => Ok(None),
            Show::Marked(rules, _) | Show::As(rules) => rules
                .placeholder(modality, number)
                .map(Some)
                .ok_or_else(|| refused(modality)),
        }
    }

    /// The number of the next item among all, from 0, and among those of its kind, from 1.
    fn next(&mut self, modality: Modality) -> (usize, usize) {
        let number = &mut self.numbers[modality as usize];
        *number += 1;
        self.seen += 1;
        (self.seen - 1, *number)
    }
}

fn refused(modality: Modality) -> EncodeError {
    EncodeError::Multimodal(format!("{}_url", modality.as_str()))
}
