//! What a request brings to the queue, and what the queue notes beside it.

use std::time::Instant;

use super::classes::ClassId;
use crate::worker::WorkerRank;

/// What a request may be placed on, as far as that decides who can be in whose way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Any worker.
    #[default]
    Shared,
    /// One worker rank.
    Pinned(WorkerRank),
    /// A set of workers, named by whatever tells sets apart: a hash of model, taints and allow-list for example.
    Among(u64),
}

/// What the queue has to know of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// The class or the family of classes the request names.
    pub class: Option<String>,
    /// Which workers it competes for.
    pub lane: Lane,
    /// More goes first, whatever the policy says.
    pub strict_priority: i64,
    /// How far the policy lets it jump; negative is 0.
    pub priority_jump: f64,
    /// Length of its prompt.
    pub prompt_tokens: u64,
    /// How much of that is cached on the worker that has most.
    pub cached_tokens: u64,
}

impl Turn {
    /// Prompt tokens that nobody has cached.
    pub fn uncached(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }

    /// What it costs its class to let it go.
    pub fn cost(&self) -> u64 {
        self.uncached().max(1)
    }
}

/// One that waits.
#[derive(Clone, Debug)]
pub struct Entry<T> {
    /// What it asked for.
    pub turn: Turn,
    /// Its class.
    pub class: ClassId,
    /// When it came.
    pub arrived: Instant,
    /// What waits.
    pub payload: T,
}
