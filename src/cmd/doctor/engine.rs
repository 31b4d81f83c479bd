//! The engines' side of a deployment: pure, from what was found out about a worker to findings.

mod cache;
mod canary;
pub mod facts;
mod handover;
mod serving;
mod sources;
#[cfg(test)]
mod tests;

use super::finding::{At, Finding};
use cache::denied;
use facts::WorkerFacts;

pub use serving::is_there;

/// Everything that is to be said of one worker.
pub fn examine(facts: &WorkerFacts) -> Vec<Finding> {
    let mut findings = serving::check(facts);
    if !is_there(facts) {
        let at = At::new("engine", facts.subject());
        findings
            .push(at.skipped("its tokens, its cache and its events, because it does not answer"));
        return findings;
    }
    findings.extend(cache::check(facts));
    findings.extend(handover::check(facts));
    for rank in &facts.ranks {
        findings.extend(sources::check(facts, rank));
        if !denied(&facts.models) {
            findings.extend(canary::check(facts, rank));
        }
    }
    // What the events say of the block size was said by the measures already.
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
