//! What the engine says of its cache against what is configured: blocks, how many, whether prompts share them, and of how
//! many ranks.

use std::collections::BTreeSet;

use super::facts::{WorkerFacts, WorkerOrigin, why};
use crate::app;
use crate::cmd::doctor::finding::{At, Finding};
use crate::engine_client::{CacheConfig, EngineError};
use crate::parity::Verdict;

/// Every check of it.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    let mut findings: Vec<Finding> = vec![tokens(facts)];
    match &facts.metrics {
        Err(error) => {
            findings.push(
                At::new("engine.metrics", facts.subject())
                    .skipped(format!("/metrics: {}", why(error))),
            );
        }
        Ok(page) => {
            let caches = page.caches();
            if caches.is_empty() {
                let at = At::new("engine.metrics", facts.subject());
                findings.push(at.skipped("/metrics has no vllm:cache_config_info"));
            }
            let checks = [
                block_size(facts, &caches),
                prefix_caching(facts, &caches),
                capacity(facts, &caches),
                ranks(facts, &caches),
            ];
            findings.extend(checks.into_iter().flatten());
        }
    }
    findings
}

/// Ranks may differ: the first that is not as configured is told.
fn block_size(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let sizes: Vec<u32> = caches.iter().filter_map(|cache| cache.block_size).collect();
    let ours = facts.worker.block_size.0.get();
    let theirs = sizes.iter().find(|size| **size != ours).or(sizes.first())?;
    Some(block_size_is(facts, *theirs, "/metrics"))
}

/// The verdict on a block size that somebody told.
pub(super) fn block_size_is(facts: &WorkerFacts, theirs: u32, by: &str) -> Finding {
    let at = At::new("engine.block_size", facts.subject());
    let (ours, model) = (facts.worker.block_size.0.get(), &facts.worker.model);
    if theirs == ours {
        return at.ok(format!("{ours} tokens on both sides, by {by}"));
    }
    let has = format!("the engine's blocks have {theirs} tokens by {by}");
    let write = format!("write `block_size: {theirs}` for the model {model}");
    let (seen, mend) = match facts.configured.block_size {
        Some(_) => (
            format!("{has}, configured are {ours}"),
            format!("{write}, or start the engine with `--block-size {ours}`"),
        ),
        None => (
            format!("{has}, and the model {model} has the default of {ours}"),
            write,
        ),
    };
    if theirs.is_multiple_of(ours) {
        at.warning(
            format!(
                "{seen}: each of its blocks is stored as {} blocks, which takes more memory",
                theirs / ours
            ),
            mend,
        )
    } else if ours.is_multiple_of(theirs) {
        let rounding = ours - theirs;
        at.warning(
            format!("{seen}: it may find up to {rounding} cached tokens more than is predicted"),
            mend,
        )
    } else {
        at.error(
            format!("{seen}, and neither divides the other: nothing of its cache can be used"),
            mend,
        )
    }
}

/// Tokens per block of the engine, as far as it tells.
pub(super) fn blocks_of(facts: &WorkerFacts) -> usize {
    let told = facts
        .metrics
        .as_ref()
        .ok()
        .and_then(|page| page.caches().iter().find_map(|cache| cache.block_size));
    told.map_or(facts.worker.block_size.tokens(), |tokens| tokens as usize)
}

fn prefix_caching(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let at = At::new("engine.prefix_caching", facts.subject());
    let on = caches
        .iter()
        .filter_map(|cache| cache.prefix_caching)
        .reduce(|all, one| all && one)?;
    Some(if on {
        at.ok("on")
    } else {
        at.error(
            "off: every prompt is computed anew, wherever it goes",
            "start the engine with `--enable-prefix-caching`, without `--no-enable-prefix-caching`",
        )
    })
}

/// Engines count in their own blocks, we in ours; where ranks differ the one that has the fewest counts.
fn capacity(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let size = facts.worker.block_size;
    let theirs = app::learned(facts.worker.endpoint, caches, &[]).blocks_of(size)?;
    let at = At::new("engine.capacity", facts.subject());
    let mend = format!("write `total_kv_blocks: {theirs}` for {}", facts.section());
    let has = format!(
        "the engine has {theirs} blocks of {} tokens per rank",
        size.0
    );
    let is_learned = facts.worker.capacity.total_kv_blocks.is_some();
    Some(match facts.configured.total_kv_blocks {
        Some(ours) if ours == theirs => at.ok(format!("{ours} blocks on both sides")),
        Some(ours) => at.warning(format!("{has}, configured are {ours}"), mend),
        None if is_learned => at.ok(format!("{theirs} blocks per rank, learned from the engine")),
        None if facts.blocks_wanted => {
            at.warning(format!("{has}, and a setting of ours needs to know"), mend)
        }
        None => at.ok(format!("{theirs} blocks per rank, which nothing asks for")),
    })
}

/// Which ranks, not only how many: an engine that starts at another number has none of ours.
fn ranks(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let by_metrics: BTreeSet<u32> = caches.iter().filter_map(CacheConfig::rank).collect();
    let by_sources: BTreeSet<u32> = facts
        .publishers
        .iter()
        .flatten()
        .map(|publisher| publisher.rank)
        .collect();
    let (theirs, by) = if by_metrics.len() >= by_sources.len() {
        (by_metrics, "/metrics")
    } else {
        (by_sources, "/kv_event_sources")
    };
    let at = At::new("engine.ranks", facts.subject());
    let (first, last) = (*theirs.first()?, *theirs.last()?);
    let ours = facts.worker.ranks;
    let listed = theirs
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if theirs.iter().copied().eq(ours.iter().map(|rank| rank.0)) {
        return Some(at.ok(format!("{listed} on both sides")));
    }
    let seen = format!(
        "the engine has the data-parallel ranks {listed} by {by}, configured are {} from {}",
        ours.size, ours.start
    );
    let size = last - first + 1;
    let begins = if ours.start == first {
        String::new()
    } else {
        format!(" --data-parallel-start-rank {}", ours.start)
    };
    let setting = match facts.origin {
        WorkerOrigin::Listed => format!("data_parallel: {{start: {first}, size: {size}}}"),
        WorkerOrigin::Pod { .. } => format!("ranks: {size}"),
    };
    Some(at.error(
        seen,
        format!(
            "write `{setting}` for {}, or start the engine with `--data-parallel-size {}{begins}`",
            facts.section(),
            ours.size
        ),
    ))
}

fn tokens(facts: &WorkerFacts) -> Finding {
    let at = At::new("engine.tokenizer", facts.subject());
    let model = &facts.worker.model;
    match &facts.tokens {
        Verdict::Untested if facts.overdue.is_some() => {
            at.skipped("not compared before the deadline")
        }
        Verdict::Untested => at.skipped(format!("the model {model} has no tokenizer here")),
        Verdict::CannotTest { why, .. } => at.skipped(why.clone()),
        Verdict::Agrees { compared, skipped } => {
            let names = skipped
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ");
            let but = if skipped.is_empty() {
                String::new()
            } else {
                format!("; not compared: {names}")
            };
            at.ok(format!(
                "our tokens are the engine's for {compared} canaries{but}"
            ))
        }
        Verdict::Differs { difference } => {
            let token =
                |token: Option<u32>| token.map_or("nothing".to_owned(), |token| token.to_string());
            let texts = match (&difference.our_text, &difference.their_text) {
                (Some(ours), Some(theirs)) => {
                    format!(" (around it we have {ours:?}, the engine {theirs:?})")
                }
                _ => String::new(),
            };
            let seen = format!(
                "canary {}: token {} is {} for us and {} for the engine{texts}: no block from there on is ever found",
                difference.canary.as_deref().unwrap_or("without a name"),
                difference.at,
                token(difference.ours),
                token(difference.theirs),
            );
            let mend = format!(
                "give the model {model} the files that the engine loads: `tokenizer`, `tokenizer_config`, and `chat_template` \
                 where the engine runs with `--chat-template`"
            );
            at.error(seen, mend)
        }
    }
}

/// Whether the engine wants credentials.
pub(super) fn denied<T>(answer: &Result<T, EngineError>) -> bool {
    answer.as_ref().is_err_and(EngineError::is_denied)
}
