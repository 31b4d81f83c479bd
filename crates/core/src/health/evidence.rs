//! Evidence that a worker rank fails where the other ranks of its model deliver. A sequential
//! probability ratio test (Wald 1945) compares two hypotheses: the rank fails [`FAULTY_SHARE`] of
//! its requests, or it fails the share that its peers fail in the same time.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::outcome::WorkerOutcome;
use crate::block::SequenceHash;

/// Share of failed requests of a faulty rank.
const FAULTY_SHARE: f64 = 0.9;

/// Share of failed requests that is always assumed for healthy ranks.
const BASE_SHARE: f64 = 0.02;

/// Weight of [`BASE_SHARE`], in outcomes of the peers.
const BASE_WEIGHT: f64 = 4.0;

/// Weight of a failure whose prompt continues one that failed on the rank before. It may be the
/// fault of that conversation.
const REPEATED_WEIGHT: f64 = 0.5;

/// Evidence expires this long after the last failure.
const LIFETIME: Duration = Duration::from_secs(60);

/// Maximum number of failed prompts that are remembered per rank.
const MAX_PROMPTS: usize = 64;

/// Outcomes of a rank and of its peers since the first failure.
#[derive(Clone, Debug)]
pub(super) struct FailureEvidence {
    last_failure: Instant,
    /// Weighted failures of the rank.
    failed: f64,
    delivered: f64,
    peers_failed: f64,
    peers_delivered: f64,
    kinds: BTreeMap<WorkerOutcome, u32>,
    /// Last block of each failed prompt, and the weight of its failures.
    prompts: Vec<FailedPrompt>,
}

#[derive(Clone, Copy, Debug)]
struct FailedPrompt {
    last_block: SequenceHash,
    weight: f64,
}

/// Evidence, for logs and pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EvidenceSummary {
    /// Number of failures of the rank by kind.
    pub failures: BTreeMap<WorkerOutcome, u32>,
    /// Requests that its peers delivered in the same time.
    pub peers_delivered: u32,
    /// Requests that its peers failed in the same time.
    pub peers_failed: u32,
}

impl EvidenceSummary {
    /// Returns the most frequent failure.
    pub fn cause(&self) -> Option<WorkerOutcome> {
        let by_count = |(_, count): &(&WorkerOutcome, &u32)| **count;
        Some(*self.failures.iter().max_by_key(by_count)?.0)
    }
}

impl fmt::Display for EvidenceSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, count) in &self.failures {
            write!(f, "{}={count} ", kind.as_str())?;
        }
        write!(
            f,
            "peers_delivered={} peers_failed={}",
            self.peers_delivered, self.peers_failed
        )
    }
}

impl FailureEvidence {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            last_failure: now,
            failed: 0.0,
            delivered: 0.0,
            peers_failed: 0.0,
            peers_delivered: 0.0,
            kinds: BTreeMap::new(),
            prompts: Vec::new(),
        }
    }

    /// Adds a failure of the rank. `prompt` are the sequence hashes of its blocks.
    pub(super) fn add_failure(
        &mut self,
        outcome: WorkerOutcome,
        prompt: &[SequenceHash],
        now: Instant,
    ) {
        let mut weight = outcome.weight();
        if let Some(last_block) = prompt.last() {
            let mut prompts = self.prompts.iter();
            let continued = prompts.position(|failed| prompt.contains(&failed.last_block));
            if let Some(at) = continued {
                weight *= REPEATED_WEIGHT;
                self.prompts[at].weight += weight;
                self.prompts[at].last_block = *last_block;
            } else if self.prompts.len() < MAX_PROMPTS {
                let last_block = *last_block;
                self.prompts.push(FailedPrompt { last_block, weight });
            }
        }
        self.failed += weight;
        self.last_failure = now;
        *self.kinds.entry(outcome).or_default() += 1;
    }

    /// Removes the failures of a prompt, because it failed on another rank, too. Returns whether
    /// there were any.
    pub(super) fn withdraw_prompt(&mut self, prompt: &[SequenceHash]) -> bool {
        let before = self.failed;
        self.prompts.retain(|failed| {
            let is_other = !prompt.contains(&failed.last_block);
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

    /// Adds an outcome of a peer.
    pub(super) fn add_peer_outcome(&mut self, outcome: WorkerOutcome) {
        if outcome == WorkerOutcome::Delivered {
            self.peers_delivered += 1.0;
        } else {
            self.peers_failed += outcome.weight();
        }
    }

    /// Returns the log-likelihood ratio of the hypotheses. The unit is that of one failure whose
    /// peers fail nothing, so the result is comparable to a number of failures in a row.
    pub(super) fn score(&self) -> f64 {
        let outcomes = self.peers_failed + self.peers_delivered + BASE_WEIGHT;
        let share = (self.peers_failed + BASE_SHARE * BASE_WEIGHT) / outcomes;
        let share = share.max(BASE_SHARE);
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
