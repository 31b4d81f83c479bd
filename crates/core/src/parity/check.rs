//! Checks the blocks of a real request after its response. A check occupies one of a few slots per
//! model, released on drop, so that the work does not grow with the traffic.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{ParityChange, ParityStatus};
use crate::block::BlockHashes;
use crate::index::{EventCursor, PrefixWatch};
use crate::worker::{BlockSize, WorkerRank};

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockEvidence {
    /// The blocks appeared.
    Confirmed,
    /// The blocks did not appear, although the engine reported other blocks.
    Unconfirmed {
        /// First missing block.
        block: usize,
    },
}

/// Completeness of an engine's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventCoverage {
    /// The events report everything that the engine holds.
    Complete,
    /// The engine may hold more: some stored blocks were never reported.
    Partial,
}

/// Prediction of a request's blocks from warmroute's own tokens.
#[derive(Clone, Debug, Default)]
pub enum ParityExpectation {
    /// No prediction: the tokens are from another source, or unknown.
    #[default]
    NotPredicted,
    /// Blocks of a prompt with multimodal objects. Clients and engines choose the identifiers of
    /// objects, so missing blocks prove no tokenizer difference.
    Multimodal,
    /// Blocks of a text prompt.
    Prompt,
    /// Blocks that are not used for routing, because warmroute's tokens are disabled.
    Shadow(Box<BlockHashes>),
}

impl ParityExpectation {
    /// Returns true if routing uses warmroute's own tokens.
    pub fn is_from_own_tokens(&self) -> bool {
        matches!(
            self,
            ParityExpectation::Multimodal | ParityExpectation::Prompt
        )
    }
}

/// A request whose blocks are checked after its answer.
#[derive(Debug)]
pub struct ParityCheck {
    status: Arc<ParityStatus>,
    rank: WorkerRank,
    prompt: WatchedPrompt,
}

/// Blocks that a worker rank is expected to store, watched from the time of the choice.
#[derive(Debug)]
pub struct WatchedPrompt {
    /// Also reports blocks that are evicted before the check.
    pub watch: PrefixWatch,
    /// Whole blocks of the prompt.
    pub blocks: usize,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Position in the rank's event stream at the time of the choice.
    pub since: EventCursor,
}

/// State of a watched prompt in the index at the time of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptObservation {
    /// Maximum number of leading blocks that were held at once.
    pub held: usize,
    /// Blocks that the engine has to store.
    pub expected: usize,
    /// Position in the rank's event stream at the time of the check.
    pub now: EventCursor,
    /// Completeness of the engine's events.
    pub coverage: EventCoverage,
}

impl ParityCheck {
    pub(super) fn new(status: Arc<ParityStatus>, rank: WorkerRank, prompt: WatchedPrompt) -> Self {
        Self {
            status,
            rank,
            prompt,
        }
    }

    /// Returns the worker rank that should store the blocks.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Returns the watched blocks.
    pub fn prompt(&self) -> &WatchedPrompt {
        &self.prompt
    }

    /// Records that this rank answered the request. Only the blocks of the chosen rank are checked.
    pub fn complete(self, by: WorkerRank) {
        if by == self.rank {
            let status = self.status.clone();
            status.ready_checks.lock().push(self);
        }
    }

    /// Evaluates the check and records the result. Returns `None` if it proves nothing: the engine
    /// stored nothing at all, or its events may be incomplete.
    pub fn evaluate(self, observation: PromptObservation) -> Option<(BlockEvidence, ParityChange)> {
        let since = self.prompt.since;
        let evidence = match observation {
            PromptObservation { expected: 0, .. } => return None,
            PromptObservation { held, expected, .. } if held >= expected => {
                BlockEvidence::Confirmed
            }
            // A store may be among the events that were lost since the choice, even if the source
            // is exact again.
            PromptObservation { coverage, now, .. }
                if coverage == EventCoverage::Partial || now.gaps != since.gaps =>
            {
                self.status.record_undecided(self.rank.worker);
                return None;
            }
            PromptObservation { now, .. } if now.stores <= since.stores => return None,
            PromptObservation { held, .. } => BlockEvidence::Unconfirmed { block: held },
        };
        let status = self.status.clone();
        Some((evidence, status.record_evidence(self.rank.worker, evidence)))
    }
}

impl Drop for ParityCheck {
    fn drop(&mut self) {
        self.status.running_checks.fetch_sub(1, Ordering::Relaxed);
    }
}
