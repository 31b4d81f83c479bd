//! Input of the router: the prompt, and the demands of client and operator.

use std::ops::Range;
use std::sync::Arc;

use super::{PrefillRoute, Reason, RemoteOverlaps};
use crate::block::{BlockHashes, SequenceHash};
use crate::load::LatencyEstimate;
use crate::parity::ParityExpectation;
use crate::policy::{Constraints, LocalPrefillReason, RouterOverrides, WorkerPin};
use crate::worker::{ModelName, Worker, WorkerId, WorkerRank};

/// Known part of a request's prompt.
#[derive(Clone, Debug)]
pub enum RoutePrompt {
    /// Block hashes; several prompts if the request has several.
    Hashed(Vec<BlockHashes>),
    /// First blocks of one prompt, whose rest is unknown.
    Truncated {
        /// Leading blocks of the prompt.
        known: BlockHashes,
        /// Tokens of the whole prompt, estimated from its bytes.
        tokens: u64,
        /// Reason why the rest is unknown.
        reason: Reason,
    },
    /// Estimated length only.
    Estimated {
        /// Tokens, estimated from bytes.
        tokens: u64,
        /// Reason why the prompt is unknown.
        reason: Reason,
    },
}

impl RoutePrompt {
    /// Returns the length in tokens, possibly estimated.
    pub fn tokens(&self) -> u64 {
        match self {
            RoutePrompt::Hashed(prompts) => {
                prompts.iter().map(|hashes| hashes.tokens() as u64).sum()
            }
            RoutePrompt::Truncated { known, tokens, .. } => (*tokens).max(known.tokens() as u64),
            RoutePrompt::Estimated { tokens, .. } => *tokens,
        }
    }

    /// Returns the known blocks of each prompt; empty for an estimate.
    pub fn blocks(&self) -> &[BlockHashes] {
        match self {
            RoutePrompt::Hashed(prompts) => prompts,
            RoutePrompt::Truncated { known, .. } => std::slice::from_ref(known),
            RoutePrompt::Estimated { .. } => &[],
        }
    }

    /// Returns the number of complete known blocks over all prompts.
    pub fn block_count(&self) -> u64 {
        let prompts = self.blocks().iter();
        prompts.map(|hashes| hashes.len() as u64).sum()
    }

    /// Returns the reason why part of the prompt is unknown.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            RoutePrompt::Hashed(_) => None,
            RoutePrompt::Truncated { reason, .. } | RoutePrompt::Estimated { reason, .. } => {
                Some(*reason)
            }
        }
    }
}

/// Blocks of a prompt in the cache shared by all workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SharedBlocks {
    /// There is no shared cache, or it was not queried.
    #[default]
    NotQueried,
    /// The cache holds these ranges of blocks, sorted and disjoint.
    Held(Vec<Range<u32>>),
    /// The query failed for this reason.
    Failed(&'static str),
}

impl SharedBlocks {
    /// Returns the ranges of blocks that the shared cache holds.
    pub fn ranges(&self) -> &[Range<u32>] {
        match self {
            SharedBlocks::Held(ranges) => ranges,
            SharedBlocks::NotQueried | SharedBlocks::Failed(_) => &[],
        }
    }
}

/// Request to route.
#[derive(Clone, Debug)]
pub struct RouteRequest {
    /// Model name that the engines serve; `None` admits any worker.
    pub model: Option<ModelName>,
    /// Known part of the prompt.
    pub prompt: RoutePrompt,
    /// Expected blocks for the parity check with the engine's events.
    pub parity: ParityExpectation,
    /// Block hashes for load tracking, if they differ from the sequence hashes; one list per
    /// prompt.
    pub tracked_blocks: Option<Vec<Arc<[SequenceHash]>>>,
    /// Blocks of the prompt in the shared cache.
    pub shared: SharedBlocks,
    /// Overlaps from a remote index server.
    pub remote_overlaps: RemoteOverlaps,
    /// Demands on the worker. The router sets the role.
    pub constraints: Constraints,
    /// Only worker that may run the prefill.
    pub prefill_pin: Option<WorkerPin>,
    /// Rank that served the session last. Preferred while it is a candidate (soft affinity).
    pub affinity: Option<WorkerRank>,
    /// Overrides for this request.
    pub overrides: RouterOverrides,
    /// Expected length of the answer, if the client states it.
    pub expected_output_tokens: Option<u64>,
    /// Maximum length of the answer, if the request limits it.
    pub max_output_tokens: Option<u64>,
    /// Whether the answer is known to be a stream, whose first content precedes its end.
    pub is_streamed: bool,
    /// Whether the engine may find the prompt cached. If not, it computes the whole prompt, and only
    /// stores its blocks.
    pub reads_prefix_cache: bool,
    /// Priority in the queue.
    pub priority: RequestPriority,
    /// Phases to decide.
    pub phases: PhaseSelection,
    /// Whether decode workers can compute the prompt.
    pub decode_capability: DecodeCapability,
    /// Whether the engine may compute something, so the response shows its health.
    pub computes: bool,
}

/// Capability of decode workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecodeCapability {
    /// Decode workers compute the prompt if no prefill worker does.
    #[default]
    CanPrefill,
    /// Decode workers require a prefill worker.
    DecodeOnly,
}

/// Phases of a request to decide when the prefill may run remotely.
#[derive(Clone, Debug, Default)]
pub enum PhaseSelection {
    /// Both phases, booked at once.
    #[default]
    Both,
    /// Both phases, but only a remote prefill is booked. The decode is decided again after the
    /// prefill, by the load at that time.
    PrefillFirst {
        /// Prefill workers that have failed for this request.
        failed: Vec<WorkerId>,
    },
    /// Both phases again, because one of the two workers failed.
    Retry {
        /// Prefill workers that have failed for this request.
        failed: Vec<WorkerId>,
    },
    /// The decode after a completed prefill.
    Decode(Box<CompletedPrefill>),
    /// Both phases on one worker, although prefill workers exist.
    Local(LocalPrefillReason),
}

/// Completed remote prefill.
#[derive(Clone, Debug)]
pub struct CompletedPrefill {
    /// Route of the prefill.
    pub prefill: PrefillRoute,
    /// Prefill worker, whose KV transfer constrains the decode worker.
    pub worker: Arc<Worker>,
}

/// Queue priority of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestPriority {
    /// Higher values go first. Negative values are shed at overload.
    pub strict: i64,
    /// Seconds by which the request counts as earlier.
    pub jump: f64,
    /// Queue class or family.
    pub class: Option<String>,
}

impl RequestPriority {
    /// Returns whether the request is rejected when all workers are overloaded, regardless of the
    /// configuration.
    pub fn is_sheddable(&self) -> bool {
        self.strict < 0
    }
}

impl RouteRequest {
    /// Returns the same demands without a prompt.
    pub fn without_prompt(&self) -> Self {
        let reason = self.prompt.reason().unwrap_or(Reason::BodyNotSent);
        Self {
            constraints: self.constraints.clone(),
            prefill_pin: self.prefill_pin,
            decode_capability: self.decode_capability,
            computes: self.computes,
            ..Self::new(
                self.model.clone(),
                RoutePrompt::Estimated { tokens: 0, reason },
            )
        }
    }

    /// Returns whether there is a prompt to compute. Other requests, such as a list of models, are
    /// never queued.
    pub fn has_prompt(&self) -> bool {
        !matches!(
            self.prompt,
            RoutePrompt::Estimated {
                reason: Reason::NotInference | Reason::NoBody,
                ..
            }
        )
    }

    /// Returns the expected length of the answer, in tokens: as the client states it, or as learned
    /// and limited by the request.
    pub(super) fn output_tokens(&self, estimate: &LatencyEstimate) -> f64 {
        let expected = self
            .expected_output_tokens
            .map_or(estimate.output_tokens, |tokens| tokens as f64);
        let limit = self
            .max_output_tokens
            .map_or(f64::INFINITY, |tokens| tokens as f64);
        expected.min(limit)
    }

    /// Creates a request without constraints.
    pub fn new(model: Option<ModelName>, prompt: RoutePrompt) -> Self {
        Self {
            model,
            prompt,
            computes: true,
            parity: ParityExpectation::NotPredicted,
            tracked_blocks: None,
            shared: SharedBlocks::NotQueried,
            remote_overlaps: RemoteOverlaps::NotQueried,
            constraints: Constraints::default(),
            prefill_pin: None,
            affinity: None,
            overrides: RouterOverrides::default(),
            expected_output_tokens: None,
            max_output_tokens: None,
            is_streamed: false,
            reads_prefix_cache: true,
            priority: RequestPriority::default(),
            phases: PhaseSelection::default(),
            decode_capability: DecodeCapability::default(),
        }
    }
}
