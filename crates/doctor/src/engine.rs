//! Checks of the engines: pure functions from the facts about a worker to findings.

mod cache;
mod canary;
pub mod facts;
mod kv_handoff;
mod serving;
mod sources;
#[cfg(test)]
mod tests;

use super::finding::{Finding, FindingBuilder};
use cache::is_denied;
use facts::WorkerFacts;

pub use serving::is_reachable;

/// Returns all findings about one worker.
pub fn check_worker(facts: &WorkerFacts) -> Vec<Finding> {
    let mut findings = serving::check(facts);
    if !is_reachable(facts) {
        let at = FindingBuilder::new("engine", facts.subject());
        findings.push(at.skipped(
            "tokens, cache and KV events are not checked, because the engine \
            does not respond",
        ));
        return findings;
    }
    findings.extend(cache::check(facts));
    findings.extend(kv_handoff::check(facts));
    for rank in &facts.ranks {
        findings.extend(sources::check(facts, rank));
        if !is_denied(&facts.models) {
            findings.extend(canary::check(facts, rank));
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
