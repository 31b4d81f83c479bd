//! Compares the cache settings that the engine reports with the configuration: block size,
//! capacity, prefix caching and ranks.

use std::collections::BTreeSet;

use warmroute_core::parity::{CanaryVerdict, TokenDifference};
use warmroute_engines::engine_client::{CacheConfig, EngineError, cache_settings};

use super::facts::{WorkerFacts, WorkerOrigin, describe_error};
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings about the cache of a worker.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    let mut findings: Vec<Finding> = vec![check_tokens(facts)];
    match &facts.metrics {
        Err(error) => {
            findings.push(
                FindingBuilder::new("engine.metrics", facts.subject())
                    .skipped(format!("/metrics: {}", describe_error(error))),
            );
        }
        Ok(page) => {
            let caches = page.caches();
            if caches.is_empty() {
                let at = FindingBuilder::new("engine.metrics", facts.subject());
                findings.push(at.skipped("/metrics has no vllm:cache_config_info"));
            }
            let checks = [
                check_block_size(facts, &caches),
                check_prefix_caching(facts, &caches),
                check_capacity(facts, &caches),
                check_ranks(facts, &caches),
            ];
            findings.extend(checks.into_iter().flatten());
        }
    }
    findings
}

/// Checks the block size. Ranks may differ, so the first mismatch is reported.
fn check_block_size(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let sizes: Vec<u32> = caches.iter().filter_map(|cache| cache.block_size).collect();
    let ours = facts.worker.block_size.0.get();
    let theirs = sizes.iter().find(|size| **size != ours).or(sizes.first())?;
    Some(compare_block_size(facts, *theirs, "/metrics"))
}

/// Compares the configured block size with the one that `source` reports.
pub(super) fn compare_block_size(facts: &WorkerFacts, theirs: u32, source: &str) -> Finding {
    let at = FindingBuilder::new("engine.block_size", facts.subject());
    let ours = facts.worker.block_size.0.get();
    let model = &facts.worker.model;
    if theirs == ours {
        return at.ok(format!("{ours} tokens on both sides, by {source}"));
    }
    let has = format!("the engine's blocks have {theirs} tokens by {source}");
    let write = format!("write `block_size: {theirs}` for the model {model}");
    let (message, fix) = match facts.configured.block_size {
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
                "{message}: each of its blocks is stored as {} blocks, which takes more memory",
                theirs / ours
            ),
            fix,
        )
    } else if ours.is_multiple_of(theirs) {
        let rounding = ours - theirs;
        at.warning(
            format!("{message}: it may find up to {rounding} cached tokens more than predicted"),
            fix,
        )
    } else {
        at.error(
            format!("{message}, and neither divides the other: its cache cannot be used"),
            fix,
        )
    }
}

/// Returns the tokens per block of the engine, or the configured number if unknown.
pub(super) fn engine_block_tokens(facts: &WorkerFacts) -> usize {
    let reported = facts
        .metrics
        .as_ref()
        .ok()
        .and_then(|page| page.caches().iter().find_map(|cache| cache.block_size));
    reported.map_or(facts.worker.block_size.tokens(), |tokens| tokens as usize)
}

fn check_prefix_caching(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let at = FindingBuilder::new("engine.prefix_caching", facts.subject());
    let on = caches
        .iter()
        .filter_map(|cache| cache.prefix_caching)
        .reduce(|all, one| all && one)?;
    Some(if on {
        at.ok("on")
    } else {
        at.error(
            "off: every prompt is computed in full on every worker",
            "start the engine with `--enable-prefix-caching`, without `--no-enable-prefix-caching`",
        )
    })
}

/// Checks the capacity. Engines count blocks of their own size, and warmroute counts blocks of the
/// configured size. If ranks differ, the smallest capacity counts.
fn check_capacity(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
    let size = facts.worker.block_size;
    let theirs = cache_settings(caches).capacity_in_blocks(size)?;
    let at = FindingBuilder::new("engine.capacity", facts.subject());
    let fix = format!(
        "write `total_kv_blocks: {theirs}` for {}",
        facts.config_section()
    );
    let has = format!(
        "the engine has {theirs} blocks of {} tokens per rank",
        size.0
    );
    let is_discovered = facts.worker.capacity.total_kv_blocks.is_some();
    Some(match facts.configured.total_kv_blocks {
        Some(ours) if ours == theirs => at.ok(format!("{ours} blocks on both sides")),
        Some(ours) => at.warning(format!("{has}, configured are {ours}"), fix),
        None if is_discovered => at.ok(format!("{theirs} blocks per rank, reported by the engine")),
        None if facts.needs_capacity => at.warning(
            format!("{has}, and a setting of warmroute needs this number"),
            fix,
        ),
        None => at.ok(format!(
            "{theirs} blocks per rank; no setting needs this number"
        )),
    })
}

/// Compares the rank numbers, not only their count. An engine with another start rank has none of
/// the configured ranks.
fn check_ranks(facts: &WorkerFacts, caches: &[CacheConfig]) -> Option<Finding> {
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
    let at = FindingBuilder::new("engine.ranks", facts.subject());
    let first = *theirs.first()?;
    let last = *theirs.last()?;
    let ours = facts.worker.ranks;
    let listed = theirs
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if theirs.iter().copied().eq(ours.iter().map(|rank| rank.0)) {
        return Some(at.ok(format!("{listed} on both sides")));
    }
    let message = format!(
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
        message,
        format!(
            "write `{setting}` for {}, or start the engine with `--data-parallel-size {}{begins}`",
            facts.config_section(),
            ours.size
        ),
    ))
}

fn check_tokens(facts: &WorkerFacts) -> Finding {
    let at = FindingBuilder::new("engine.tokenizer", facts.subject());
    let model = &facts.worker.model;
    match &facts.parity {
        CanaryVerdict::Untested if facts.overdue_step.is_some() => {
            at.skipped("not compared before the deadline")
        }
        CanaryVerdict::Untested => {
            at.skipped(format!("the model {model} has no tokenizer in warmroute"))
        }
        CanaryVerdict::CannotTest { reason, .. } => at.skipped(reason.clone()),
        CanaryVerdict::Agrees { compared, skipped } => {
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
            at.ok(format!("tokens agree for {compared} canaries{but}"))
        }
        CanaryVerdict::Differs { difference } => {
            let (message, fix) = describe_difference(difference, facts);
            at.error(format!("{message}: no later block is ever found"), fix)
        }
        CanaryVerdict::GenerationPromptDiffers { difference, .. } => {
            let (message, fix) = describe_difference(difference, facts);
            let effect = "prompts are known only up to the generation prompt";
            at.warning(format!("{message}: {effect}"), fix)
        }
    }
}

/// Returns the message about a token difference, and its fix.
fn describe_difference(difference: &TokenDifference, facts: &WorkerFacts) -> (String, String) {
    let model = &facts.worker.model;
    let token = |token: Option<u32>| token.map_or("nothing".to_owned(), |token| token.to_string());
    let texts = match (&difference.warmroute_text, &difference.engine_text) {
        (Some(ours), Some(theirs)) => {
            format!(" (text around it: {ours:?} in warmroute, {theirs:?} in the engine)")
        }
        _ => String::new(),
    };
    let message = format!(
        "canary {}: token {} is {} in warmroute and {} in the engine{texts}",
        difference.canary.as_deref().unwrap_or("without a name"),
        difference.position,
        token(difference.warmroute_token),
        token(difference.engine_token),
    );
    let fix = match &difference.matching_settings {
        _ if facts.has_agreeing_worker => format!(
            "start all workers of the model {model} with the same options: the tokens of another \
                    worker agree"
        ),
        Some(settings) => format!(
            "set `{settings}` for the model {model}: with it, the tokens of all canaries \
                    are equal"
        ),
        None => format!(
            "set the files that the engine loads for the model {model}: `tokenizer`, \
                    `tokenizer_config`, and `chat_template` if the engine runs with `--chat-template`"
        ),
    };
    (message, fix)
}

/// Returns whether the engine requires credentials.
pub(super) fn is_denied<T>(answer: &Result<T, EngineError>) -> bool {
    answer.as_ref().is_err_and(EngineError::is_unauthorized)
}
