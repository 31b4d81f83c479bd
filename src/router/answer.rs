//! Question and answer of the router, and the words of the degradation ladder: plain values that the protocol side, the
//! metrics and the logs share.

use std::time::Duration;

use serde::Serialize;

use crate::block::BlockHashes;
use crate::index::TierBlocks;
use crate::schedule::Choice;
use crate::worker::{Endpoint, ModelName, WorkerRank};

/// Step of the degradation ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Chosen by the blocks the engine will see, against what the engines said they hold.
    Exact,
    /// Chosen by load alone.
    LoadOnly,
    /// Not chosen: Envoy's own load balancer decides.
    Passthrough,
}

impl Mode {
    /// The name used in the response header and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::LoadOnly => "load_only",
            Mode::Passthrough => "passthrough",
        }
    }
}

/// Why a request took a lower step than exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The request has no body.
    NoBody,
    /// The path is not an inference API that has a prompt.
    NotInference,
    /// Envoy does not show us the body before it routes.
    BodyNotShown,
    /// The body is larger than the limit.
    BodyTooLarge,
    /// The body is not JSON of that API.
    Unreadable,
    /// The request names a model that is not configured.
    UnknownModel,
    /// The model has no tokenizer, or it is still loading.
    NoTokenizer,
    /// The tokenizer or the chat template refused the prompt.
    EncodeFailed,
    /// The prompt holds images, audio or video.
    Multimodal,
    /// Too many prompts are waiting for the tokenizer.
    TokenizerBusy,
    /// The decision took longer than its deadline.
    Deadline,
    /// No event source of any candidate has caught up.
    IndexCold,
    /// No worker is known.
    NoFleet,
    /// No known worker serves the model in that role.
    NoCandidate,
}

impl Reason {
    /// The name used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::NoBody => "no_body",
            Reason::NotInference => "not_inference",
            Reason::BodyNotShown => "body_not_shown",
            Reason::BodyTooLarge => "body_too_large",
            Reason::Unreadable => "unreadable",
            Reason::UnknownModel => "unknown_model",
            Reason::NoTokenizer => "no_tokenizer",
            Reason::EncodeFailed => "encode_failed",
            Reason::Multimodal => "multimodal",
            Reason::TokenizerBusy => "tokenizer_busy",
            Reason::Deadline => "deadline",
            Reason::IndexCold => "index_cold",
            Reason::NoFleet => "no_fleet",
            Reason::NoCandidate => "no_candidate",
        }
    }
}

/// What is known of a request's prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Its blocks; several prompts where the request holds several.
    Hashed(Vec<BlockHashes>),
    /// Only how long it may be.
    Estimated {
        /// Tokens, guessed from bytes.
        tokens: u64,
        /// Why no more is known.
        because: Reason,
    },
}

/// One request to route.
#[derive(Clone, Debug)]
pub struct RouteRequest {
    /// The model as the engines serve it; `None` takes any worker.
    pub model: Option<ModelName>,
    /// Its prompt.
    pub prompt: Prompt,
}

/// Where Envoy has to send a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Destination {
    /// The chosen worker rank.
    pub rank: WorkerRank,
    /// Its endpoint.
    pub endpoint: Endpoint,
    /// Whether the worker has more ranks than this one.
    pub several_ranks: bool,
}

/// What Envoy is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steer {
    /// The destination; `None` leaves the choice to Envoy.
    pub to: Option<Destination>,
    /// The step of the ladder.
    pub mode: Mode,
    /// Cached prompt tokens the engine is expected to report, where that is known.
    pub predicted_cached_tokens: Option<u64>,
}

/// The answer to one request, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Route {
    /// Where to.
    pub to: Destination,
    /// The step of the ladder.
    pub mode: Mode,
    /// Why not a higher step.
    pub reason: Option<Reason>,
    /// The model the candidates serve.
    pub model: ModelName,
    /// Prompt tokens, or the estimate.
    pub prompt_tokens: u64,
    /// Complete blocks of the prompt.
    pub prompt_blocks: u64,
    /// What the chosen worker rank holds of them.
    pub overlap: TierBlocks,
    /// Prompt tokens the engine will report as cached: it always computes at least the last one itself.
    pub predicted_cached_tokens: u64,
    /// The same for the candidate that holds most.
    pub best_cached_tokens: u64,
    /// How many candidates were costed.
    pub candidates: usize,
    /// The choice with its cost.
    pub choice: Choice,
    /// Time for the overlaps.
    #[serde(skip)]
    pub index_time: Duration,
    /// Time for choosing and booking.
    #[serde(skip)]
    pub choose_time: Duration,
}

/// Why there is no route. None of these is an error for the client: Envoy chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// Nobody is known.
    #[error("no worker is known")]
    NoFleet,
    /// Nobody fits.
    #[error("no known worker serves the model in that role")]
    NoCandidate,
}

impl Steer {
    /// The choice is Envoy's.
    pub const PASSTHROUGH: Steer = Steer { to: None, mode: Mode::Passthrough, predicted_cached_tokens: None };
}

impl RouteError {
    /// The reason as metrics name it.
    pub fn reason(self) -> Reason {
        match self {
            RouteError::NoFleet => Reason::NoFleet,
            RouteError::NoCandidate => Reason::NoCandidate,
        }
    }
}

impl Route {
    /// What Envoy is told of it.
    pub fn steer(&self) -> Steer {
        let exact = self.mode == Mode::Exact;
        let predicted_cached_tokens = exact.then_some(self.predicted_cached_tokens);
        Steer { to: Some(self.to), mode: self.mode, predicted_cached_tokens }
    }

    /// Share of the prompt's blocks that the chosen worker rank holds.
    pub fn hit_rate(&self) -> f64 {
        if self.prompt_blocks == 0 { 0.0 } else { f64::from(self.overlap.total()) / self.prompt_blocks as f64 }
    }
}
