//! Checks the result of the canary prompt: whether its blocks arrived as KV events with the
//! expected topic, rank, block size and tokens, and whether the second request found them cached.

use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt, LocalHash, PromptContent};
use warmroute_core::index::KvEvent;
use warmroute_core::worker::BlockSize;
use warmroute_engines::engine_client::EngineError;
use warmroute_engines::kv_events::event_probe::ProbedBatch;
use warmroute_engines::kv_events::wire::{AttentionKind, EngineEvent, StoredEvent};
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, MediaTokens};

use super::cache::{compare_block_size, engine_block_tokens};
use super::facts::{AttachOutcome, CanaryReply, RankFacts, WorkerFacts, describe_error};
use super::sources::{kv_events_flag, publishes_nothing};
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings about the canary of one rank.
pub(super) fn check(facts: &WorkerFacts, rank: &RankFacts) -> Vec<Finding> {
    let canary = match &rank.canary {
        None => return Vec::new(),
        Some(Err(error)) => {
            let fix = match error {
                EngineError::Timeout => {
                    "set a longer timeout for a busy engine (`--timeout 60s`), and check its log"
                }
                _ => {
                    "send the engine a request by hand (POST /v1/completions, max_tokens 1), and \
                    check its log"
                }
            };
            let message = format!("the canary got no response: {}", describe_error(error));
            return vec![
                FindingBuilder::new("canary.answered", facts.rank_subject(rank.rank))
                    .error(message, fix),
            ];
        }
        Some(Ok(canary)) => canary,
    };
    let mut findings = check_usage(facts, rank, canary);
    findings.extend(check_token_count(facts, rank, canary));
    let listened = matches!(
        rank.attachment,
        Some(
            AttachOutcome::Attached(_)
                | AttachOutcome::EngineMayBind(_)
                | AttachOutcome::EngineBinds(_)
        )
    );
    if listened && !publishes_nothing(facts, rank) {
        findings.extend(check_events(facts, rank, canary));
    }
    findings
}

/// Checks the number of cached tokens that the engine reports.
fn check_usage(facts: &WorkerFacts, rank: &RankFacts, canary: &CanaryReply) -> Vec<Finding> {
    let details = FindingBuilder::new("engine.prompt_tokens_details", facts.subject());
    let Some(cached) = canary.cached else {
        return vec![details.warning(
            "usage.prompt_tokens_details has no cached tokens: predictions cannot be audited or corrected",
            "start the engine with `--enable-prompt-tokens-details`",
        )];
    };
    let details = details.ok("usage reports the cached tokens");
    let Some(tokens) = canary
        .prompt_tokens
        .or(canary.tokens.as_ref().map(Vec::len))
    else {
        return vec![details];
    };
    let block = engine_block_tokens(facts);
    // Even on a full hit, the engine computes the last token.
    let expected = tokens.saturating_sub(1) / block * block;
    let at = FindingBuilder::new("canary.reused", facts.rank_subject(rank.rank));
    let message = format!(
        "the canary of {tokens} tokens, sent twice, found {cached} cached; {expected} expected"
    );
    let reused = match cached {
        _ if cached == expected => at.ok(message),
        // The block is dropped after the match, so the events and the index are right.
        _ if cached > 0 && cached + block == expected => at.ok(format!(
            "{message}. The engine recomputes the last matched block, as vLLM up to 0.32 does with \
            EAGLE or MTP speculative decoding. This is normal: `warmroute serve` learns it from \
            responses"
        )),
        0 => at.error(
            message,
            "start the engine with `--enable-prefix-caching`, and with more KV blocks if its \
            cache is full",
        ),
        _ => at.warning(
            message,
            format!(
                "check whether the cache of the engine of {} is full, or retains only a part of \
                each prefix",
                facts.subject()
            ),
        ),
    };
    vec![details, reused]
}

/// Compares the number of prompt tokens in warmroute and in the engine.
fn check_token_count(
    facts: &WorkerFacts,
    rank: &RankFacts,
    canary: &CanaryReply,
) -> Option<Finding> {
    let ours = canary.tokens.as_ref()?.len();
    let theirs = canary.prompt_tokens?;
    (ours != theirs).then(|| {
        FindingBuilder::new("canary.counted", facts.rank_subject(rank.rank)).error(
            format!("the canary has {ours} tokens in warmroute and {theirs} in the engine"),
            format!(
                "set `tokenizer` of the model {} to the file that the engine loads",
                facts.worker.model
            ),
        )
    })
}

fn check_events(facts: &WorkerFacts, rank: &RankFacts, canary: &CanaryReply) -> Vec<Finding> {
    let subject = facts.rank_subject(rank.rank);
    let Some(source) = &rank.source else {
        return Vec::new();
    };
    let arrived = FindingBuilder::new("events.arrive", subject.clone());
    let Some((received, stored)) = find_stored_prompt(rank, canary) else {
        if let Some(problem) = rank
            .messages
            .iter()
            .find_map(|received| received.batch.as_ref().err())
        {
            return vec![arrived.error(
                format!("received messages that cannot be decoded: {problem}"),
                "run a supported engine (vLLM 0.16 and later, SGLang), or report the engine's \
                version",
            )];
        }
        let others = rank.messages.len();
        return vec![arrived.error(
            format!(
                "the engine answered the canary, but its blocks did not arrive at {} within {:?} \
                ({others} other messages did)",
                source.endpoint, rank.listen_timeout
            ),
            format!(
                "make the engine of {subject} publish there: start it with `{}`",
                kv_events_flag(source)
            ),
        )];
    };
    let mut findings = Vec::new();
    if !received.topic.starts_with(&source.topic) {
        findings.push(FindingBuilder::new("events.topic", subject.clone()).error(
            format!(
                "events have the topic {:?}, but warmroute subscribes to {:?}: none arrives",
                received.topic, source.topic
            ),
            format!(
                "write `topic: \"{}\"` in the `kv_events` of {}",
                received.topic,
                facts.config_section()
            ),
        ));
    }
    findings.extend(check_rank(facts, rank, received));
    if stored.block_size != 0 && stored.block_size != facts.worker.block_size.0.get() {
        findings.push(compare_block_size(facts, stored.block_size, "its events"));
    }
    findings.extend(
        check_event_tokens(facts, rank, canary, stored)
            .or_else(|| check_event_hashes(facts, rank, canary, stored)),
    );
    if findings.is_empty() {
        let blocks = stored.hashes.len();
        findings.push(arrived.ok(format!(
            "{blocks} blocks of the canary arrived, with the expected tokens"
        )));
    }
    findings
}

fn check_rank(facts: &WorkerFacts, rank: &RankFacts, received: &ProbedBatch) -> Option<Finding> {
    let named = received.batch.as_ref().ok()?.rank?;
    (named != rank.rank.0).then(|| {
        FindingBuilder::new("events.rank", facts.rank_subject(rank.rank)).error(
            format!(
                "the events are from rank {named}, but expected from rank {}: all are \
            dropped",
                rank.rank
            ),
            format!(
                "write `data_parallel: {{start: {named}, size: 1}}` for {}, or the endpoint of \
                rank {} (vLLM adds the rank to \
                 the port)",
                facts.config_section(),
                rank.rank
            ),
        )
    })
}

fn check_event_tokens(
    facts: &WorkerFacts,
    rank: &RankFacts,
    canary: &CanaryReply,
    stored: &StoredEvent,
) -> Option<Finding> {
    let ours = canary.tokens.as_ref()?;
    let at = common_prefix_len(ours, &stored.tokens.ids);
    let ours = ours.get(at);
    let theirs = stored.tokens.ids.get(at)?;
    Some(
        FindingBuilder::new("events.tokens", facts.rank_subject(rank.rank)).error(
            format!(
                "token {at} of the canary is {} in warmroute and {theirs} in the event: no later \
            block is ever found",
                ours.map_or("nothing".to_owned(), ToString::to_string)
            ),
            format!(
                "set `tokenizer` and `tokenizer_config` of the model {} to the files that the \
        engine loads",
                facts.worker.model
            ),
        ),
    )
}

/// Compares the block hashes in the index with those of a request for the canary. Besides the
/// tokens, the hashes depend on salts and adapters. The events show whether they also cover the
/// next token.
fn check_event_hashes(
    facts: &WorkerFacts,
    rank: &RankFacts,
    canary: &CanaryReply,
    stored: &StoredEvent,
) -> Option<Finding> {
    let tokens = canary.tokens.as_ref()?;
    let salt = CacheSalt::default();
    let content = PromptContent {
        windows: BlockWindows::new(stored.tokens.bigrams),
        ..PromptContent::text(tokens, &salt)
    };
    let ours = BlockHashes::from_content(&content, facts.worker.block_size);
    let theirs = indexed_hashes(stored, facts.worker.block_size)?;
    let equal = theirs
        .iter()
        .zip(ours.locals())
        .take_while(|(theirs, ours)| theirs == ours)
        .count();
    if equal == theirs.len() {
        return None;
    }
    Some(
        FindingBuilder::new("events.hashes", facts.rank_subject(rank.rank)).error(
            format!(
                "{equal} of {} blocks of the canary have the expected hashes, although the tokens \
                agree",
                theirs.len()
            ),
            "start the engine without a salt or an adapter of its own for plain requests",
        ),
    )
}

/// Returns the local hashes that the index stores for an event. Returns `None` if the block size
/// differs, which is a separate finding.
fn indexed_hashes(stored: &StoredEvent, block_size: BlockSize) -> Option<Vec<LocalHash>> {
    let event = EngineEvent::Stored(Box::new(stored.clone()));
    let converted = match EventNormalizer::new(block_size, MediaTokens::default()).convert(&event) {
        ConvertedEvent::Event(event) => vec![event],
        ConvertedEvent::IndexEvents(events, _) => events,
        ConvertedEvent::GroupEvent(..)
        | ConvertedEvent::Filtered(_)
        | ConvertedEvent::BlockSizeChanged(_) => return None,
    };
    let blocks = converted.iter().flat_map(|event| match event {
        KvEvent::Stored { blocks, .. } => blocks.as_slice(),
        _ => &[],
    });
    Some(blocks.map(|block| block.local).collect())
}

/// Returns the message that stored the beginning of the canary. It is recognized by its tokens, or
/// by its length if no message has these tokens, because other clients may use the engine at the
/// same time.
fn find_stored_prompt<'f>(
    rank: &'f RankFacts,
    canary: &CanaryReply,
) -> Option<(&'f ProbedBatch, &'f StoredEvent)> {
    let begins = |event: &'f EngineEvent| match event {
        EngineEvent::Stored(stored) if stored.parent.is_none() && !stored.hashes.is_empty() => {
            Some(&**stored)
        }
        _ => None,
    };
    let main =
        |stored: &&StoredEvent| matches!(stored.origin.kind, None | Some(AttentionKind::Main));
    let starts: Vec<(&ProbedBatch, &StoredEvent)> = rank
        .messages
        .iter()
        .filter_map(|received| Some((received, received.batch.as_ref().ok()?)))
        .flat_map(|(received, batch)| {
            batch
                .events
                .iter()
                .filter_map(begins)
                .filter(main)
                .map(move |stored| (received, stored))
        })
        .collect();
    let common_tokens = |stored: &StoredEvent| {
        canary
            .tokens
            .as_ref()
            .map_or(0, |tokens| common_prefix_len(tokens, &stored.tokens.ids))
    };
    // Returns true if the event has all complete blocks of the tokens that the engine counted.
    let fits = |stored: &StoredEvent| {
        let block = (stored.block_size as usize).max(1);
        canary
            .prompt_tokens
            .is_some_and(|tokens| stored.tokens.ids.len() / block == tokens / block)
    };
    let best = starts
        .into_iter()
        .max_by_key(|(_, stored)| (common_tokens(stored), fits(stored)))?;
    (common_tokens(best.1) > 0 || fits(best.1)).then_some(best)
}

/// Returns the length of the common prefix.
fn common_prefix_len(ours: &[u32], theirs: &[u32]) -> usize {
    ours.iter()
        .zip(theirs)
        .take_while(|(ours, theirs)| ours == theirs)
        .count()
}
