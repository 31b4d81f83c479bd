//! Which blocks a request holds: the sequence hashes of the complete blocks of its prompts, prompt by prompt. A sequence
//! hash names all blocks before its own as well, so within a prompt whoever holds a block holds all before it.

use std::collections::HashSet;
use std::slice;
use std::sync::Arc;

use crate::block::SequenceHash;

/// The complete blocks of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequences(Prompts);

/// Nearly all requests have one prompt, and then nothing is copied or counted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Prompts {
    One(Arc<[SequenceHash]>),
    Several {
        prompts: Arc<[Arc<[SequenceHash]>]>,
        distinct: usize,
    },
}

impl Sequences {
    /// No block.
    pub fn none() -> Self {
        Self::of(Vec::new())
    }

    /// Those of all prompts.
    pub fn of(mut prompts: Vec<Arc<[SequenceHash]>>) -> Self {
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
        Self(Prompts::Several {
            prompts: prompts.into(),
            distinct,
        })
    }

    /// How many blocks, each counted once, however many of the prompts begin with it.
    pub fn blocks(&self) -> usize {
        match &self.0 {
            Prompts::One(prompt) => prompt.len(),
            Prompts::Several { distinct, .. } => *distinct,
        }
    }

    /// Prompt by prompt.
    pub fn prompts(&self) -> &[Arc<[SequenceHash]>] {
        match &self.0 {
            Prompts::One(prompt) => slice::from_ref(prompt),
            Prompts::Several { prompts, .. } => prompts,
        }
    }
}

impl From<Arc<[SequenceHash]>> for Sequences {
    fn from(prompt: Arc<[SequenceHash]>) -> Self {
        Self(Prompts::One(prompt))
    }
}

/// Of one prompt.
impl FromIterator<SequenceHash> for Sequences {
    fn from_iter<I: IntoIterator<Item = SequenceHash>>(prompt: I) -> Self {
        Arc::<[_]>::from_iter(prompt).into()
    }
}
