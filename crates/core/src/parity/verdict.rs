//! Verdict on one model, per worker: from its responses to canaries and from its events.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use strum::IntoStaticStr;

use super::check::BlockEvidence;
use crate::worker::WorkerId;

/// Consecutive requests with missing blocks that prove a difference. Blocks may be evicted at once,
/// or a request may be aborted, but not eight times in a row while the engine reports other blocks.
const MISSES_TO_DIFFER: u32 = 8;

/// Consecutive requests with all blocks that refute a proven difference.
const HITS_TO_AGREE: u32 = 3;

/// Subject of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparedItem {
    /// Tokens of a canary.
    Tokens,
    /// Length of a canary: one side ends early.
    Length,
    /// Blocks of real requests in the events.
    Events,
}

/// A proven difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenDifference {
    /// Subject of the comparison.
    pub compared: ComparedItem,
    /// Name of the canary, if it was one.
    pub canary: Option<String>,
    /// Index of the first token that differs, or of the first missing block of real requests.
    pub position: usize,
    /// Block that contains it.
    pub block: usize,
    /// Warmroute's token at that index.
    pub warmroute_token: Option<u32>,
    /// The engine's token at that index.
    pub engine_token: Option<u32>,
    /// Warmroute's text around it. Only canaries have a text, because requests of clients are
    /// confidential.
    pub warmroute_text: Option<String>,
    /// The engine's text around it.
    pub engine_text: Option<String>,
    /// Settings of the model with which the tokens of all canaries are equal, if they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matching_settings: Option<String>,
}

/// Result of the canaries on one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, IntoStaticStr)]
#[serde(rename_all = "snake_case", tag = "verdict")]
#[strum(serialize_all = "snake_case")]
pub enum CanaryVerdict {
    /// Not tested yet.
    #[default]
    Untested,
    /// The worker's tokens equal warmroute's.
    Agrees {
        /// Number of compared canaries.
        compared: usize,
        /// Canaries that were skipped, with the reason.
        skipped: BTreeMap<String, String>,
    },
    /// The worker's tokens differ from warmroute's.
    Differs {
        /// First difference.
        difference: Box<TokenDifference>,
    },
    /// Only the tokens after the last message differ: those of the generation prompt.
    GenerationPromptDiffers {
        /// First difference.
        difference: Box<TokenDifference>,
        /// Tokens at the end of warmroute's prompts that may differ.
        end_tokens: usize,
    },
    /// The worker cannot be tested.
    CannotTest {
        /// Reason.
        reason: String,
        /// True if a later test may succeed.
        #[serde(skip)]
        is_transient: bool,
    },
}

impl CanaryVerdict {
    /// Returns the label in metrics.
    pub fn label(&self) -> &'static str {
        self.into()
    }
}

/// Result of a worker's events of real requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventsVerdict {
    /// The difference, while it is proven.
    pub differs: Option<TokenDifference>,
    /// True while agreement is proven.
    pub agrees: bool,
    /// Requests whose blocks were missing while the events were incomplete. They prove nothing.
    /// While only this number grows, a tokenizer difference would stay unnoticed.
    pub undecided: u64,
    /// Consecutive requests with missing blocks.
    unconfirmed: u32,
    /// Consecutive requests with all blocks.
    confirmed: u32,
}

impl EventsVerdict {
    pub(super) fn record(&mut self, evidence: BlockEvidence) {
        match evidence {
            BlockEvidence::Confirmed => {
                self.unconfirmed = 0;
                self.confirmed = self.confirmed.saturating_add(1);
                if self.confirmed >= HITS_TO_AGREE {
                    self.agrees = true;
                    self.differs = None;
                }
            }
            BlockEvidence::Unconfirmed { block } => {
                self.confirmed = 0;
                self.unconfirmed = self.unconfirmed.saturating_add(1);
                if self.unconfirmed >= MISSES_TO_DIFFER && self.differs.is_none() {
                    self.agrees = false;
                    self.differs = Some(TokenDifference {
                        compared: ComparedItem::Events,
                        canary: None,
                        position: block,
                        block,
                        warmroute_token: None,
                        engine_token: None,
                        warmroute_text: None,
                        engine_text: None,
                        matching_settings: None,
                    });
                }
            }
        }
    }
}

/// Parity of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerParity {
    /// Result of the canaries.
    #[serde(flatten)]
    pub canaries: CanaryVerdict,
    /// Result of the events of real requests.
    pub events: EventsVerdict,
}

impl WorkerParity {
    /// Returns true if the tokens are known to differ. Agreeing canaries do not outweigh a
    /// difference that events proved since the last restart.
    pub fn differs(&self) -> bool {
        matches!(self.canaries, CanaryVerdict::Differs { .. }) || self.events.differs.is_some()
    }

    /// Returns true if the tokens are known to agree, at least before the generation prompt.
    pub fn agrees(&self) -> bool {
        !self.differs() && (self.canaries.is_passed() || self.events.agrees)
    }

    /// Returns the label in metrics.
    pub fn label(&self) -> &'static str {
        match () {
            () if self.differs() => "differs",
            () if matches!(self.canaries, CanaryVerdict::GenerationPromptDiffers { .. }) => {
                "generation_prompt_differs"
            }
            () if self.agrees() => "agrees",
            () => self.canaries.label(),
        }
    }
}

/// Parity of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelParity {
    /// Parity of each worker.
    pub workers: BTreeMap<WorkerId, WorkerParity>,
    /// Workers that may have been replaced by another engine since their test.
    #[serde(skip)]
    pub(super) restarted_workers: BTreeSet<WorkerId>,
}

impl ModelParity {
    pub(super) fn record_canaries(&mut self, worker: WorkerId, verdict: CanaryVerdict) {
        let known = &mut self.workers.entry(worker).or_default().canaries;
        if matches!(verdict, CanaryVerdict::CannotTest { .. }) {
            // A worker that does not respond keeps its verdict, unless it may have been replaced.
            // Even then a difference persists until a test passes.
            let stays = matches!(known, CanaryVerdict::Differs { .. })
                || !self.restarted_workers.contains(&worker);
            if !stays || !known.is_proven() {
                *known = verdict;
            }
            return;
        }
        let was_restarted = self.restarted_workers.remove(&worker);
        *known = verdict;
        // A passed round after a restart outweighs the events before the restart.
        if was_restarted && known.is_passed() {
            self.workers.entry(worker).or_default().events = EventsVerdict::default();
        }
    }

    pub(super) fn record_evidence(&mut self, worker: WorkerId, evidence: BlockEvidence) {
        self.workers
            .entry(worker)
            .or_default()
            .events
            .record(evidence);
    }

    pub(super) fn retain(&mut self, keep: impl Fn(WorkerId) -> bool) {
        self.workers.retain(|worker, _| keep(*worker));
        self.restarted_workers.retain(|worker| keep(*worker));
    }

    /// Returns the workers whose tokens are known to differ from warmroute's.
    pub(super) fn differing_workers(&self) -> BTreeSet<WorkerId> {
        self.workers
            .iter()
            .filter(|(_, known)| known.differs())
            .map(|(worker, _)| *worker)
            .collect()
    }

    /// Returns true if warmroute's tokens are not used: some workers differ, and none is known
    /// to agree.
    pub fn are_tokens_disabled(&self) -> bool {
        self.workers.values().any(WorkerParity::differs)
            && !self.workers.values().any(WorkerParity::agrees)
    }

    /// Returns true if all tokens of some worker agree.
    pub fn has_agreeing_worker(&self) -> bool {
        let mut verdicts = self.workers.values().map(|known| &known.canaries);
        verdicts.any(|verdict| matches!(verdict, CanaryVerdict::Agrees { .. }))
    }

    /// Returns the number of tokens at the end of prompts with a generation prompt that some worker
    /// computes differently.
    pub(super) fn differing_end_tokens(&self) -> usize {
        let ends = self.workers.values().map(|known| match known.canaries {
            CanaryVerdict::GenerationPromptDiffers { end_tokens, .. } => end_tokens,
            _ => 0,
        });
        ends.max().unwrap_or(0)
    }

    /// Returns the state label in metrics.
    pub fn state(&self) -> &'static str {
        let any = |label: &str| self.workers.values().any(|known| known.label() == label);
        match () {
            () if self.are_tokens_disabled() => "differs",
            () if any("differs") => "some_differ",
            () if any("generation_prompt_differs") => "generation_prompt_differs",
            () if any("agrees") => "agrees",
            () if any("cannot_test") => "cannot_test",
            () => "untested",
        }
    }
}

impl CanaryVerdict {
    fn is_proven(&self) -> bool {
        self.is_passed() || matches!(self, CanaryVerdict::Differs { .. })
    }

    /// Returns true if prompts agree, at least before the generation prompt.
    fn is_passed(&self) -> bool {
        matches!(
            self,
            CanaryVerdict::Agrees { .. } | CanaryVerdict::GenerationPromptDiffers { .. }
        )
    }
}
