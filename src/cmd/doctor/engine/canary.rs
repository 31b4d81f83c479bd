//! What became of the canary: whether its blocks came as events, under which topic, of which rank and size, with our tokens,
//! and whether asking again found them.

use super::cache::{block_size_is, blocks_of};
use super::facts::{Attached, Canary, RankFacts, WorkerFacts, why};
use super::sources::{flag, silent};
use crate::block::{BlockHashes, Content, Salt, Windows};
use crate::cmd::doctor::finding::{At, Finding};
use crate::engine_client::EngineError;
use crate::index::KvEvent;
use crate::kv_events::listen::Heard;
use crate::kv_events::wire::{Event, Kind, Stored};
use crate::kv_events::{Converted, MediaTokens, Normalizer};

/// Every check of one rank's canary.
pub(super) fn check(facts: &WorkerFacts, rank: &RankFacts) -> Vec<Finding> {
    let canary = match &rank.canary {
        None => return Vec::new(),
        Some(Err(error)) => {
            let mend = match error {
                EngineError::Timeout => {
                    "give a busy engine more time (`--patience 60s`), and look in its log"
                }
                _ => {
                    "send the engine a request by hand (POST /v1/completions, max_tokens 1), and look in its log"
                }
            };
            let seen = format!("the canary got no answer: {}", why(error));
            return vec![
                At::new("canary.answered", facts.rank_subject(rank.rank)).error(seen, mend),
            ];
        }
        Some(Ok(canary)) => canary,
    };
    let mut findings = usage(facts, rank, canary);
    findings.extend(counted(facts, rank, canary));
    let listened = matches!(
        rank.attached,
        Some(Attached::As(_) | Attached::Connectable(_) | Attached::Elsewhere(_))
    );
    if listened && !silent(facts, rank) {
        findings.extend(events(facts, rank, canary));
    }
    findings
}

/// What the engine says of reuse.
fn usage(facts: &WorkerFacts, rank: &RankFacts, canary: &Canary) -> Vec<Finding> {
    let told = At::new("engine.prompt_tokens_details", facts.subject());
    let Some(cached) = canary.cached else {
        return vec![told.warning(
            "usage.prompt_tokens_details says nothing of cached tokens: whether predictions come true cannot be audited",
            "start the engine with `--enable-prompt-tokens-details`",
        )];
    };
    let told = told.ok("usage tells the cached tokens");
    let Some(tokens) = canary
        .prompt_tokens
        .or(canary.tokens.as_ref().map(Vec::len))
    else {
        return vec![told];
    };
    let block = blocks_of(facts);
    // The engine computes at least the last token.
    let expected = tokens.saturating_sub(1) / block * block;
    let at = At::new("canary.reused", facts.rank_subject(rank.rank));
    let seen = format!(
        "the canary of {tokens} tokens, sent twice, found {cached} cached; {expected} were to be expected"
    );
    let reused = match cached {
        _ if cached == expected => at.ok(seen),
        0 => at.error(
            seen,
            "start the engine with `--enable-prefix-caching`, and with more KV blocks where its cache is full",
        ),
        _ => at.warning(
            seen,
            format!(
                "see whether the cache of the engine of {} is full, or keeps only a part of each prefix",
                facts.subject()
            ),
        ),
    };
    vec![told, reused]
}

/// Whether the engine saw as many tokens as we.
fn counted(facts: &WorkerFacts, rank: &RankFacts, canary: &Canary) -> Option<Finding> {
    let (ours, theirs) = (canary.tokens.as_ref()?.len(), canary.prompt_tokens?);
    (ours != theirs).then(|| {
        At::new("canary.counted", facts.rank_subject(rank.rank)).error(
            format!("the canary has {ours} tokens for us, and {theirs} for the engine"),
            format!(
                "give the model {} the tokenizer that the engine loads",
                facts.worker.model
            ),
        )
    })
}

fn events(facts: &WorkerFacts, rank: &RankFacts, canary: &Canary) -> Vec<Finding> {
    let subject = facts.rank_subject(rank.rank);
    let Some(source) = &rank.source else {
        return Vec::new();
    };
    let arrived = At::new("events.arrive", subject.clone());
    let Some((heard, stored)) = found(rank, canary) else {
        if let Some(problem) = rank
            .heard
            .iter()
            .find_map(|heard| heard.batch.as_ref().err())
        {
            return vec![arrived.error(
                format!("messages come that cannot be read: {problem}"),
                "run an engine whose events are known (vLLM 0.16 and later, SGLang), or report the engine's version",
            )];
        }
        let others = rank.heard.len();
        return vec![arrived.error(
            format!(
                "the canary was answered, and its blocks did not come to {} within {:?} ({others} other messages did)",
                source.endpoint, rank.patience
            ),
            format!("see that the engine of {subject} publishes there: start it with `{}`", flag(source)),
        )];
    };
    let mut findings = Vec::new();
    if !heard.topic.starts_with(&source.topic) {
        findings.push(At::new("events.topic", subject.clone()).error(
            format!(
                "events come under the topic {:?}, and we ask for {:?}: none reaches us",
                heard.topic, source.topic
            ),
            format!(
                "write `topic: \"{}\"` in the `kv_events` of {}",
                heard.topic,
                facts.section()
            ),
        ));
    }
    findings.extend(of_rank(facts, rank, heard));
    if stored.block_size != 0 && stored.block_size != facts.worker.block_size.0.get() {
        findings.push(block_size_is(facts, stored.block_size, "its events"));
    }
    findings.extend(
        same_tokens(facts, rank, canary, stored)
            .or_else(|| same_hashes(facts, rank, canary, stored)),
    );
    if findings.is_empty() {
        let blocks = stored.hashes.len();
        findings.push(arrived.ok(format!(
            "{blocks} blocks of the canary came, with our tokens"
        )));
    }
    findings
}

fn of_rank(facts: &WorkerFacts, rank: &RankFacts, heard: &Heard) -> Option<Finding> {
    let named = heard.batch.as_ref().ok()?.rank?;
    (named != rank.rank.0).then(|| {
        At::new("events.rank", facts.rank_subject(rank.rank)).error(
            format!("the events are those of rank {named}, and are read as those of rank {}: all are dropped", rank.rank),
            format!(
                "write `data_parallel: {{start: {named}, size: 1}}` for {}, or the endpoint of rank {} (vLLM adds the rank to \
                 the port)",
                facts.section(),
                rank.rank
            ),
        )
    })
}

fn same_tokens(
    facts: &WorkerFacts,
    rank: &RankFacts,
    canary: &Canary,
    stored: &Stored,
) -> Option<Finding> {
    let ours = canary.tokens.as_ref()?;
    let at = common(ours, &stored.tokens.ids);
    let (ours, theirs) = (ours.get(at), stored.tokens.ids.get(at)?);
    Some(At::new("events.tokens", facts.rank_subject(rank.rank)).error(
        format!(
            "token {at} of the canary is {} for us and {theirs} in the event: no block behind it is ever found",
            ours.map_or("nothing".to_owned(), ToString::to_string)
        ),
        format!("give the model {} the `tokenizer` and `tokenizer_config` that the engine loads", facts.worker.model),
    ))
}

/// The blocks under the names that the index gives them against those that a request for the canary would look for. What is
/// not in the tokens is in these: pairs of tokens, salts, adapters.
fn same_hashes(
    facts: &WorkerFacts,
    rank: &RankFacts,
    canary: &Canary,
    stored: &Stored,
) -> Option<Finding> {
    let tokens = canary.tokens.as_ref()?;
    let (block_size, salt) = (facts.worker.block_size, Salt::default());
    let content = Content {
        windows: facts.windows,
        ..Content::plain(tokens, &salt)
    };
    let ours = BlockHashes::of_content(&content, block_size);
    let event = Event::Stored(Box::new(stored.clone()));
    let told = match Normalizer::new(block_size, MediaTokens::default()).convert(&event) {
        Converted::Event(event) => vec![event],
        Converted::Regrouped(events, _) => events,
        // Blocks that cannot be brought to ours were spoken of already.
        Converted::Group(..) | Converted::Filtered(_) | Converted::Resized(_) => return None,
    };
    let blocks = told.iter().flat_map(|event| match event {
        KvEvent::Stored { blocks, .. } => blocks.as_slice(),
        _ => &[],
    });
    let theirs: Vec<_> = blocks.map(|block| block.local).collect();
    let equal = theirs
        .iter()
        .zip(ours.locals())
        .take_while(|(theirs, ours)| theirs == ours)
        .count();
    if equal == theirs.len() {
        return None;
    }
    let at = At::new("events.hashes", facts.rank_subject(rank.rank));
    let (model, eagle) = (&facts.worker.model, facts.windows == Windows::Eagle);
    Some(if stored.tokens.bigrams == eagle {
        at.error(
            format!(
                "{equal} of {} blocks of the canary have the names that we would look for, with equal tokens",
                theirs.len()
            ),
            "start the engine without a salt or an adapter of its own for plain requests",
        )
    } else {
        let how = |pairs: bool| {
            if pairs {
                "pairs of tokens"
            } else {
                "single tokens"
            }
        };
        at.error(
            format!(
                "the engine names blocks by {}, we by {}",
                how(stored.tokens.bigrams),
                how(eagle)
            ),
            format!(
                "write `eagle: {}` for the model {model}",
                stored.tokens.bigrams
            ),
        )
    })
}

/// The message that stored the beginning of the canary: by its tokens, or, where none has them, the one that fits best by
/// its length. Others may be busy with the same engine.
fn found<'f>(rank: &'f RankFacts, canary: &Canary) -> Option<(&'f Heard, &'f Stored)> {
    let begins = |event: &'f Event| match event {
        Event::Stored(stored) if stored.parent.is_none() && !stored.hashes.is_empty() => {
            Some(&**stored)
        }
        _ => None,
    };
    let main = |stored: &&Stored| matches!(stored.origin.kind, None | Some(Kind::Main));
    let starts: Vec<(&Heard, &Stored)> = rank
        .heard
        .iter()
        .filter_map(|heard| Some((heard, heard.batch.as_ref().ok()?)))
        .flat_map(|(heard, batch)| {
            batch
                .events
                .iter()
                .filter_map(begins)
                .filter(main)
                .map(move |stored| (heard, stored))
        })
        .collect();
    let likeness = |stored: &Stored| {
        canary
            .tokens
            .as_ref()
            .map_or(0, |tokens| common(tokens, &stored.tokens.ids))
    };
    // All complete blocks of what the engine counted.
    let fits = |stored: &Stored| {
        let block = (stored.block_size as usize).max(1);
        canary
            .prompt_tokens
            .is_some_and(|tokens| stored.tokens.ids.len() == tokens / block * block)
    };
    let best = starts
        .into_iter()
        .max_by_key(|(_, stored)| (likeness(stored), fits(stored)))?;
    (likeness(best.1) > 0 || fits(best.1)).then_some(best)
}

/// How many tokens are equal from the beginning.
fn common(ours: &[u32], theirs: &[u32]) -> usize {
    ours.iter()
        .zip(theirs)
        .take_while(|(ours, theirs)| ours == theirs)
        .count()
}
