//! Compares the cache settings that the engine reports with the configuration: block size,
//! capacity, prefix caching and ranks. Compares the tokens of canaries.

use std::collections::BTreeSet;

use warmroute_core::parity::{CanaryVerdict, TokenDifference};
use warmroute_engines::engine_client::{CacheConfig, cache_settings};

use super::facts::{WorkerFacts, describe_error};
use crate::finding::{CheckVerdict, Finding, error, ok, row, run_checks, skipped, warning};

/// Returns the findings about the cache of a worker.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    let rows = [
        row("engine.tokenizer", check_tokens),
        row("engine.metrics", check_metrics),
        row("engine.block_size", check_block_size),
        row("engine.prefix_caching", check_prefix_caching),
        row("engine.capacity", check_capacity),
        row("engine.ranks", check_ranks),
    ];
    run_checks(facts, &rows)
}

/// Returns the caches on the metrics page; `None` without the page.
fn reported_caches(facts: &WorkerFacts) -> Option<Vec<CacheConfig>> {
    Some(facts.metrics.as_ref().ok()?.caches())
}

fn check_metrics(facts: &WorkerFacts) -> Option<CheckVerdict> {
    match &facts.metrics {
        Err(failure) => Some(skipped(format!("/metrics: {}", describe_error(failure)))),
        Ok(page) if page.caches().is_empty() => {
            Some(skipped("/metrics has no vllm:cache_config_info"))
        }
        Ok(_) => None,
    }
}

/// Checks the block size. Ranks may differ, so the first mismatch is reported.
fn check_block_size(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let caches = reported_caches(facts)?;
    let sizes: Vec<u32> = caches.iter().filter_map(|cache| cache.block_size).collect();
    let ours = facts.worker.block_size.0.get();
    let theirs = sizes.iter().find(|size| **size != ours).or(sizes.first())?;
    Some(compare_block_size(facts, *theirs, "/metrics"))
}

/// Compares the configured block size with the one that `source` reports.
pub(super) fn compare_block_size(facts: &WorkerFacts, theirs: u32, source: &str) -> CheckVerdict {
    let ours = facts.worker.block_size.0.get();
    let model = &facts.worker.model;
    if theirs == ours {
        return ok(format!("{ours} tokens on both sides, by {source}"));
    }
    let write = format!("write `block_size: {theirs}` for the model {model}");
    let (configured, fix) = match facts.configured.block_size {
        Some(_) => (
            format!("configured are {ours}"),
            format!("{write}, or start the engine with `--block-size {ours}`"),
        ),
        None => (
            format!("and the model {model} has the default of {ours}"),
            write,
        ),
    };
    let message = format!("the engine's blocks have {theirs} tokens by {source}, {configured}");
    if theirs.is_multiple_of(ours) {
        let blocks = theirs / ours;
        let message = format!(
            "{message}: each of its blocks is stored as {blocks} blocks, which takes more memory"
        );
        warning(message, fix)
    } else if ours.is_multiple_of(theirs) {
        let tokens = ours - theirs;
        let message =
            format!("{message}: it may find up to {tokens} cached tokens more than predicted");
        warning(message, fix)
    } else {
        let message = format!("{message}, and neither divides the other: its cache cannot be used");
        error(message, fix)
    }
}

/// Returns the tokens per block of the engine, or the configured number if unknown.
pub(super) fn engine_block_tokens(facts: &WorkerFacts) -> usize {
    let caches = reported_caches(facts).unwrap_or_default();
    let reported = caches.iter().find_map(|cache| cache.block_size);
    reported.map_or(facts.worker.block_size.tokens(), |tokens| tokens as usize)
}

fn check_prefix_caching(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let caches = reported_caches(facts)?;
    let mut reported = caches
        .iter()
        .filter_map(|cache| cache.prefix_caching)
        .peekable();
    reported.peek()?;
    Some(if reported.all(|is_on| is_on) {
        ok("on")
    } else {
        error(
            "off: every prompt is computed in full on every worker",
            "start the engine with `--enable-prefix-caching`, without `--no-enable-prefix-caching`",
        )
    })
}

/// Checks the capacity. Engines count blocks of their own size, and warmroute counts blocks of the
/// configured size. If ranks differ, the smallest capacity counts.
fn check_capacity(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let size = facts.worker.block_size;
    let theirs = cache_settings(&reported_caches(facts)?).capacity_in_blocks(size)?;
    let section = facts.config_section();
    let fix = format!("write `total_kv_blocks: {theirs}` for {section}");
    let size = size.0;
    let has = format!("the engine has {theirs} blocks of {size} tokens per rank");
    let is_discovered = facts.worker.capacity.total_kv_blocks.is_some();
    let per_rank = format!("{theirs} blocks per rank");
    Some(match facts.configured.total_kv_blocks {
        Some(ours) if ours == theirs => ok(format!("{ours} blocks on both sides")),
        Some(ours) => warning(format!("{has}, configured are {ours}"), fix),
        None if is_discovered => ok(format!("{per_rank}, reported by the engine")),
        None if facts.needs_capacity => warning(
            format!("{has}, and a setting of warmroute needs this number"),
            fix,
        ),
        None => ok(format!("{per_rank}; no setting needs this number")),
    })
}

/// Compares the rank numbers, not only their count. An engine with another start rank has none of
/// the configured ranks.
fn check_ranks(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let caches = reported_caches(facts)?;
    let by_metrics: BTreeSet<u32> = caches.iter().filter_map(CacheConfig::rank).collect();
    let publishers = facts.publishers.iter().flatten();
    let by_sources: BTreeSet<u32> = publishers.map(|publisher| publisher.rank).collect();
    let (theirs, source) = if by_metrics.len() >= by_sources.len() {
        (by_metrics, "/metrics")
    } else {
        (by_sources, "/kv_event_sources")
    };
    let first = *theirs.first()?;
    let last = *theirs.last()?;
    let ours = facts.worker.ranks;
    let listed: Vec<String> = theirs.iter().map(ToString::to_string).collect();
    let listed = listed.join(", ");
    if theirs.iter().copied().eq(ours.iter().map(|rank| rank.0)) {
        return Some(ok(format!("{listed} on both sides")));
    }
    let size = last - first + 1;
    let flag = if ours.start == first {
        String::new()
    } else {
        format!(" --data-parallel-start-rank {}", ours.start)
    };
    let setting = if facts.is_pod() {
        format!("ranks: {size}")
    } else {
        format!("data_parallel: {{start: {first}, size: {size}}}")
    };
    Some(error(
        format!(
            "the engine has the data-parallel ranks {listed} by {source}, \
            configured are {} from {}",
            ours.size, ours.start
        ),
        format!(
            "write `{setting}` for {}, or start the engine with `--data-parallel-size {}{flag}`",
            facts.config_section(),
            ours.size
        ),
    ))
}

fn check_tokens(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let model = &facts.worker.model;
    Some(match &facts.parity {
        CanaryVerdict::Untested if facts.overdue_step.is_some() => {
            skipped("not compared before the deadline")
        }
        CanaryVerdict::Untested => {
            skipped(format!("the model {model} has no tokenizer in warmroute"))
        }
        CanaryVerdict::CannotTest { reason, .. } => skipped(reason.as_str()),
        CanaryVerdict::Agrees { compared, skipped } => {
            let names: Vec<&str> = skipped.keys().map(String::as_str).collect();
            let but = if names.is_empty() {
                String::new()
            } else {
                format!("; not compared: {}", names.join(", "))
            };
            ok(format!("tokens agree for {compared} canaries{but}"))
        }
        CanaryVerdict::Differs { difference } => {
            let message = describe_difference(difference);
            let effect = "no later block is ever found";
            error(
                format!("{message}: {effect}"),
                difference_fix(difference, facts),
            )
        }
        CanaryVerdict::GenerationPromptDiffers { difference, .. } => {
            let message = describe_difference(difference);
            let effect = "prompts are known only up to the generation prompt";
            warning(
                format!("{message}: {effect}"),
                difference_fix(difference, facts),
            )
        }
    })
}

fn describe_difference(difference: &TokenDifference) -> String {
    let token = |token: Option<u32>| token.map_or("nothing".to_owned(), |token| token.to_string());
    let texts = match (&difference.warmroute_text, &difference.engine_text) {
        (Some(ours), Some(theirs)) => {
            format!(" (text around it: {ours:?} in warmroute, {theirs:?} in the engine)")
        }
        _ => String::new(),
    };
    format!(
        "canary {}: token {} is {} in warmroute and {} in the engine{texts}",
        difference.canary.as_deref().unwrap_or("without a name"),
        difference.position,
        token(difference.warmroute_token),
        token(difference.engine_token),
    )
}

fn difference_fix(difference: &TokenDifference, facts: &WorkerFacts) -> String {
    let model = &facts.worker.model;
    match &difference.matching_settings {
        _ if facts.has_agreeing_worker => format!(
            "start all workers of the model {model} with the same options: \
            the tokens of another worker agree"
        ),
        Some(settings) => format!(
            "set `{settings}` for the model {model}: with it, the tokens of all canaries are equal"
        ),
        None => format!(
            "set the files that the engine loads for the model {model}: `tokenizer`, \
            `tokenizer_config`, and `chat_template` if the engine runs with `--chat-template`"
        ),
    }
}
