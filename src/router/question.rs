//! What is asked of the router: a prompt, and what the client or its operator wishes of the choice.

use std::ops::Range;
use std::sync::Arc;

use super::{Prefill, Reason, Remote};
use crate::block::{BlockHashes, SequenceHash};
use crate::disagg::Bypass;
use crate::parity::Foretold;
use crate::schedule::{Constraints, Overrides, Pin};
use crate::worker::{ModelName, Worker, WorkerId, WorkerRank};

/// What is known of a request's prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Its blocks; several prompts where the request holds several.
    Hashed(Vec<BlockHashes>),
    /// The first blocks of one prompt, and how long the whole of it may be: only the beginning of the body was shown.
    Beginning {
        /// Blocks that the whole prompt will begin with.
        known: BlockHashes,
        /// Tokens of the whole prompt, guessed from bytes.
        tokens: u64,
        /// Why no more is known.
        because: Reason,
    },
    /// Only how long it may be.
    Estimated {
        /// Tokens, guessed from bytes.
        tokens: u64,
        /// Why no more is known.
        because: Reason,
    },
}

impl Prompt {
    /// Length in tokens, or the estimate.
    pub fn tokens(&self) -> u64 {
        match self {
            Prompt::Hashed(prompts) => prompts.iter().map(|hashes| hashes.tokens() as u64).sum(),
            Prompt::Beginning { known, tokens, .. } => (*tokens).max(known.tokens() as u64),
            Prompt::Estimated { tokens, .. } => *tokens,
        }
    }

    /// The blocks of each prompt as far as they are known; none where only an estimate is.
    pub fn blocks(&self) -> &[BlockHashes] {
        match self {
            Prompt::Hashed(prompts) => prompts,
            Prompt::Beginning { known, .. } => std::slice::from_ref(known),
            Prompt::Estimated { .. } => &[],
        }
    }

    /// Why not all of it is known.
    pub fn because(&self) -> Option<Reason> {
        match self {
            Prompt::Hashed(_) => None,
            Prompt::Beginning { because, .. } | Prompt::Estimated { because, .. } => Some(*because),
        }
    }
}

/// Blocks of a prompt in the cache that all workers share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SharedBlocks {
    /// There is none, or it was not queried.
    #[default]
    NotAsked,
    /// It holds these ranges of blocks, sorted and disjoint.
    Held(Vec<Range<u32>>),
    /// It gave no information, for this reason.
    Failed(&'static str),
}

impl SharedBlocks {
    /// The ranges of blocks that the shared cache reported.
    pub fn ranges(&self) -> &[Range<u32>] {
        match self {
            SharedBlocks::Held(ranges) => ranges,
            SharedBlocks::NotAsked | SharedBlocks::Failed(_) => &[],
        }
    }
}

/// One request to route.
#[derive(Clone, Debug)]
pub struct RouteRequest {
    /// The model as the engines serve it; `None` takes any worker.
    pub model: Option<ModelName>,
    /// Its prompt.
    pub prompt: Prompt,
    /// What we foretold of its blocks, to be compared with what its engine tells.
    pub foretold: Foretold,
    /// By which names the load tells blocks apart, where not by the sequence hashes; one list per prompt.
    pub tracked: Option<Vec<Arc<[SequenceHash]>>>,
    /// The blocks of the prompt in the cache that all workers share.
    pub shared: SharedBlocks,
    /// What is cached where, as far as somebody else was asked for it.
    pub remote: Remote,
    /// Whom the request may go to. The role is the router's to fill in.
    pub constraints: Constraints,
    /// The only worker that may do the prefill.
    pub prefill_pin: Option<Pin>,
    /// Where the session was served last: taken while it may be chosen, and no further demand.
    pub affinity: Option<WorkerRank>,
    /// Weights for this request alone.
    pub overrides: Overrides,
    /// How long the answer will be, where the client says so.
    pub expected_output_tokens: Option<u64>,
    /// Its place among requests that wait.
    pub priority: Priority,
    /// What of it is to be decided.
    pub step: Step,
    /// What workers can do for it that are there for decodes.
    pub decoders: Decoders,
    /// Whether the engine may compute something for it, and not only its front end answers.
    pub computes: bool,
}

/// What workers can do that are there for decodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decoders {
    /// Compute a prompt, where no prefill worker does.
    #[default]
    Prefill,
    /// Nothing without a prefill worker beside them.
    OnlyDecode,
}

/// What of a request is to be decided, where its prefill may be done elsewhere.
#[derive(Clone, Debug, Default)]
pub enum Step {
    /// Both phases, and both are booked at once.
    #[default]
    Both,
    /// Both phases, but where another worker does the prefill only that is booked: who decodes is decided anew when the
    /// prefill is over, by the load of then.
    PrefillFirst {
        /// Prefill workers that had it and failed.
        failed: Vec<WorkerId>,
    },
    /// Both phases anew, because one of the two workers failed.
    Anew {
        /// Prefill workers that had it and failed.
        failed: Vec<WorkerId>,
    },
    /// Who takes over what was computed elsewhere.
    Decode(Box<Prefilled>),
    /// One worker for both phases, though there are prefill workers.
    Together(Bypass),
}

/// A prefill that was done.
#[derive(Clone, Debug)]
pub struct Prefilled {
    /// By whom, and why.
    pub prefill: Prefill,
    /// The same worker, for what it demands of who takes over.
    pub worker: Arc<Worker>,
}

/// A request's place among others that wait.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Priority {
    /// Before every request of a lower one. With less than 0 it is refused where everybody has too much to do.
    pub strict: i64,
    /// Seconds the request is treated as having come earlier.
    pub jump: f64,
    /// The class or family it asks for.
    pub class: Option<String>,
}

impl Priority {
    /// Whether it gives way where everybody has too much to do, whatever is configured.
    pub fn is_sheddable(&self) -> bool {
        self.strict < 0
    }
}

impl RouteRequest {
    /// The same demands by somebody of whose prompt nothing is known.
    pub fn without_prompt(&self) -> Self {
        let because = self.prompt.because().unwrap_or(Reason::BodyNotShown);
        Self {
            constraints: self.constraints.clone(),
            prefill_pin: self.prefill_pin,
            decoders: self.decoders,
            computes: self.computes,
            ..Self::new(self.model.clone(), Prompt::Estimated { tokens: 0, because })
        }
    }

    /// Whether there is anything to compute: a list of models is no work for anybody, so it waits for nobody.
    pub fn has_prompt(&self) -> bool {
        !matches!(
            self.prompt,
            Prompt::Estimated {
                because: Reason::NotInference | Reason::NoBody,
                ..
            }
        )
    }

    /// A request that wishes nothing.
    pub fn new(model: Option<ModelName>, prompt: Prompt) -> Self {
        Self {
            model,
            prompt,
            computes: true,
            foretold: Foretold::Nothing,
            tracked: None,
            shared: SharedBlocks::NotAsked,
            remote: Remote::NotAsked,
            constraints: Constraints::default(),
            prefill_pin: None,
            affinity: None,
            overrides: Overrides::default(),
            expected_output_tokens: None,
            priority: Priority::default(),
            step: Step::default(),
            decoders: Decoders::default(),
        }
    }
}
