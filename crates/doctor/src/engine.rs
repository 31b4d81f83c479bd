//! Checks of the engines: pure functions from the facts about a worker to findings.

mod cache;
mod canary;
pub mod facts;
mod serving;
mod sources;
#[cfg(test)]
mod tests;

use warmroute_engines::engine_client::EngineError;

use super::finding::{CheckFacts, Finding, skipped};
use facts::{RankFacts, WorkerFacts};

pub use serving::is_reachable;

impl CheckFacts for WorkerFacts {
    fn subject(&self) -> String {
        self.title()
    }
}

/// Facts about a rank with those about its worker.
struct RankCheck<'f> {
    worker: &'f WorkerFacts,
    rank: &'f RankFacts,
}

impl CheckFacts for RankCheck<'_> {
    fn subject(&self) -> String {
        self.worker.rank_title(self.rank.rank)
    }
}

/// Returns all findings about one worker.
pub fn check_worker(facts: &WorkerFacts) -> Vec<Finding> {
    let mut findings = serving::check(facts);
    if !is_reachable(facts) {
        let verdict = skipped(
            "tokens, cache and KV events are not checked, because the engine does not respond",
        );
        findings.push(verdict.about("engine", facts.title()));
        return findings;
    }
    findings.extend(cache::check(facts));
    findings.extend(serving::check_prefill(facts));
    let is_denied = facts
        .models
        .as_ref()
        .is_err_and(EngineError::is_unauthorized);
    for rank in &facts.ranks {
        let at = RankCheck {
            worker: facts,
            rank,
        };
        findings.extend(sources::check(&at));
        if !is_denied {
            findings.extend(canary::check(&at));
        }
    }
    // The metrics page and the events may report the same block size mismatch, so each finding is
    // kept once.
    let mut once: Vec<Finding> = Vec::new();
    for finding in findings {
        let twice = |known: &Finding| {
            (known.check, &known.subject, known.level)
                == (finding.check, &finding.subject, finding.level)
        };
        if !once.iter().any(twice) {
            once.push(finding);
        }
    }
    once
}
