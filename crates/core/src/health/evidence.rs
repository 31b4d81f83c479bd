//! Evidence that a worker rank fails where the other ranks of its model deliver. A sequential
//! probability ratio test (Wald 1945) compares two hypotheses: the rank fails [`FAULTY_SHARE`] of
//! its requests, or it fails the share that its peers fail in the same time.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::outcome::{FailureCounts, RequestOutcome};
use super::peer_group::{BASE_SHARE, OutcomeHistory};
use crate::block::SequenceHash;

/// Share of failed requests of a faulty rank.
const FAULTY_SHARE: f64 = 0.9;

/// Weight of the assumed share of failed requests, in outcomes of the peers.
const BASE_WEIGHT: f64 = 4.0;

/// Weight of a failure whose prompt continues one that failed on the rank before. It may be the
/// fault of that conversation.
const REPEATED_WEIGHT: f64 = 0.5;

/// Weight of the failures of a prompt that another rank delivered: the prompt is not at fault.
const PROVEN_WEIGHT: f64 = 1.0;

/// Evidence expires this long after the last failure.
const LIFETIME: Duration = Duration::from_secs(60);

/// Maximum number of failed prompts that are remembered per rank.
const MAX_PROMPTS: usize = 64;

/// Outcomes of a rank and of its peers since the first failure.
#[derive(Clone, Debug)]
pub(super) struct FailureEvidence {
    last_failure: Instant,
    /// Share of failed requests of healthy ranks, without the outcomes of the peers.
    base_share: f64,
    /// Weighted failures of the rank.
    failed: f64,
    delivered: f64,
    peers_failed: f64,
    peers_delivered: f64,
    kinds: FailureCounts,
    prompts: Vec<FailedPrompt>,
}

/// Failures of one prompt.
#[derive(Clone, Copy, Debug)]
struct FailedPrompt {
    end: PromptEnd,
    weight: f64,
    /// Whether the rank reported overload, which passes and says nothing about the prompt.
    is_overload: bool,
    /// Time of the last failure.
    failed_at: Instant,
}

/// Last block of a prompt, which identifies the prompt and its position in continuations of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptEnd {
    last_block: SequenceHash,
    blocks: usize,
}

impl PromptEnd {
    /// Returns the end of a prompt; `None` if the prompt has no complete block.
    pub(super) fn new(prompt: &[SequenceHash]) -> Option<Self> {
        Some(Self {
            last_block: *prompt.last()?,
            blocks: prompt.len(),
        })
    }

    /// Returns whether a prompt begins with the prompt of this end.
    pub(super) fn is_continued_by(self, prompt: &[SequenceHash]) -> bool {
        prompt.get(self.blocks - 1) == Some(&self.last_block)
    }
}

/// Evidence, for logs and pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EvidenceSummary {
    /// Number of failures of the rank by kind.
    pub failures: FailureCounts,
    /// Requests that its peers delivered in the same time.
    pub peers_delivered: u32,
    /// Requests that its peers failed in the same time.
    pub peers_failed: u32,
}

impl fmt::Display for EvidenceSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} peers_delivered={} peers_failed={}",
            self.failures, self.peers_delivered, self.peers_failed
        )
    }
}

impl FailureEvidence {
    pub(super) fn new(history: OutcomeHistory, now: Instant) -> Self {
        Self {
            last_failure: now,
            base_share: history.base_share(),
            failed: 0.0,
            delivered: 0.0,
            peers_failed: 0.0,
            peers_delivered: 0.0,
            kinds: FailureCounts::default(),
            prompts: Vec::new(),
        }
    }

    /// Adds a failure of the rank. `prompt` are the sequence hashes of its blocks.
    pub(super) fn add_failure(
        &mut self,
        outcome: RequestOutcome,
        prompt: &[SequenceHash],
        now: Instant,
    ) {
        let mut weight = outcome.weight();
        if let Some(end) = PromptEnd::new(prompt) {
            let mut prompts = self.prompts.iter_mut();
            let continued = prompts.find(|failed| failed.end.is_continued_by(prompt));
            if let Some(failed) = continued {
                weight *= REPEATED_WEIGHT;
                failed.weight += weight;
                failed.end = end;
                failed.failed_at = now;
            } else {
                self.store_failed_prompt(FailedPrompt {
                    end,
                    weight,
                    is_overload: outcome == RequestOutcome::Overloaded,
                    failed_at: now,
                });
            }
        }
        self.failed += weight;
        self.last_failure = now;
        self.kinds.add(outcome);
    }

    /// Adds the prompt of an overdue request that has ended. Its failure was counted when
    /// the request became overdue.
    pub(super) fn add_overdue_prompt(&mut self, prompt: &[SequenceHash], now: Instant) {
        if let Some(end) = PromptEnd::new(prompt) {
            self.store_failed_prompt(FailedPrompt {
                end,
                weight: RequestOutcome::NoContent.weight(),
                is_overload: false,
                failed_at: now,
            });
        }
    }

    /// Stores a failed prompt, unless [`MAX_PROMPTS`] are stored.
    fn store_failed_prompt(&mut self, prompt: FailedPrompt) {
        if self.prompts.len() < MAX_PROMPTS {
            self.prompts.push(prompt);
        }
    }

    /// Removes the failures of a prompt, because it failed on another rank, too. Returns whether
    /// there were any.
    pub(super) fn withdraw_prompt(&mut self, prompt: &[SequenceHash]) -> bool {
        let before = self.failed;
        self.prompts.retain(|failed| {
            let is_other = !failed.end.is_continued_by(prompt);
            if !is_other {
                self.failed -= failed.weight;
            }
            is_other
        });
        self.failed < before
    }

    pub(super) fn add_delivery(&mut self) {
        self.delivered += 1.0;
    }

    /// Adds an outcome of a peer. If the peer delivered a prompt that failed on the rank, the
    /// failures of the prompt get the weight of failures that certainly are the rank's.
    pub(super) fn add_peer_outcome(&mut self, outcome: RequestOutcome, prompt: &[SequenceHash]) {
        if outcome != RequestOutcome::Delivered {
            self.peers_failed += outcome.weight();
            return;
        }
        self.peers_delivered += 1.0;
        for failed in &mut self.prompts {
            if !failed.is_overload && failed.end.is_continued_by(prompt) {
                let added = (PROVEN_WEIGHT - failed.weight).max(0.0);
                failed.weight += added;
                self.failed += added;
            }
        }
    }

    /// Returns when a prompt, or one that it continues, last failed on the rank. Overload does not
    /// count.
    pub(super) fn last_failure_time(&self, prompt: &[SequenceHash]) -> Option<Instant> {
        let prompts = self.prompts.iter();
        prompts
            .filter(|failed| !failed.is_overload && failed.end.is_continued_by(prompt))
            .map(|failed| failed.failed_at)
            .max()
    }

    /// Returns the log-likelihood ratio of the hypotheses. The unit is that of one failure in a
    /// group without history whose peers fail nothing, so the result is comparable to a number of
    /// failures in a row.
    pub(super) fn score(&self) -> f64 {
        let outcomes = self.peers_failed + self.peers_delivered + BASE_WEIGHT;
        let share = (self.peers_failed + self.base_share * BASE_WEIGHT) / outcomes;
        let share = share.max(self.base_share);
        if share >= FAULTY_SHARE {
            return 0.0;
        }
        let failures = self.failed * (FAULTY_SHARE / share).ln();
        let deliveries = self.delivered * ((1.0 - FAULTY_SHARE) / (1.0 - share)).ln();
        (failures + deliveries) / (FAULTY_SHARE / BASE_SHARE).ln()
    }

    pub(super) fn have_peers_delivered(&self) -> bool {
        self.peers_delivered > 0.0
    }

    pub(super) fn have_peers_failed(&self) -> bool {
        self.peers_failed > 0.0
    }

    pub(super) fn is_expired(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_failure) > LIFETIME
    }

    pub(super) fn summary(&self) -> EvidenceSummary {
        EvidenceSummary {
            failures: self.kinds.clone(),
            peers_delivered: self.peers_delivered as u32,
            peers_failed: self.peers_failed.ceil() as u32,
        }
    }
}
