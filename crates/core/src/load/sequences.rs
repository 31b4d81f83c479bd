//! Blocks that a request holds: the sequence hashes of the complete blocks of each prompt. A
//! sequence hash covers all blocks before its own, so within one prompt a holder of a block holds
//! all earlier blocks.

use std::collections::HashSet;
use std::slice;
use std::sync::Arc;

use crate::block::SequenceHash;

/// Complete blocks of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptSequences(SequenceList);

/// Most requests have one prompt, which needs no copy and no deduplication.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SequenceList {
    One(Arc<[SequenceHash]>),
    Several {
        prompts: Arc<[Arc<[SequenceHash]>]>,
        distinct: usize,
    },
}

impl PromptSequences {
    /// Returns an empty set of blocks.
    pub fn empty() -> Self {
        Self::from_prompts(Vec::new())
    }

    /// Collects the blocks of several prompts.
    pub fn from_prompts(mut prompts: Vec<Arc<[SequenceHash]>>) -> Self {
        if prompts.len() == 1
            && let Some(only) = prompts.pop()
        {
            return only.into();
        }
        let distinct = prompts
            .iter()
            .flat_map(|prompt| prompt.iter())
            .collect::<HashSet<_>>()
            .len();
        Self(SequenceList::Several {
            prompts: prompts.into(),
            distinct,
        })
    }

    /// Returns the number of distinct blocks over all prompts.
    pub fn block_count(&self) -> usize {
        match &self.0 {
            SequenceList::One(prompt) => prompt.len(),
            SequenceList::Several { distinct, .. } => *distinct,
        }
    }

    /// Returns the sequence hashes of each prompt.
    pub fn prompts(&self) -> &[Arc<[SequenceHash]>] {
        match &self.0 {
            SequenceList::One(prompt) => slice::from_ref(prompt),
            SequenceList::Several { prompts, .. } => prompts,
        }
    }
}

impl From<Arc<[SequenceHash]>> for PromptSequences {
    fn from(prompt: Arc<[SequenceHash]>) -> Self {
        Self(SequenceList::One(prompt))
    }
}

/// Collects the blocks of one prompt.
impl FromIterator<SequenceHash> for PromptSequences {
    fn from_iter<I: IntoIterator<Item = SequenceHash>>(prompt: I) -> Self {
        Arc::<[_]>::from_iter(prompt).into()
    }
}
