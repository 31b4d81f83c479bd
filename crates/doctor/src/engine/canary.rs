//! Checks the result of the canary prompt: whether its blocks arrived as KV events with the
//! expected topic, rank, block size and tokens, and whether the second request found them cached.

use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt, LocalHash, PromptContent};
use warmroute_core::index::KvEvent;
use warmroute_core::worker::{BlockSize, EventSource};
use warmroute_engines::engine_client::EngineError;
use warmroute_engines::kv_events::event_probe::ProbedBatch;
use warmroute_engines::kv_events::wire::{AttentionKind, EngineEvent, StoredEvent};
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, MediaTokens};

use super::RankCheck;
use super::cache::{compare_block_size, engine_block_tokens};
use super::facts::{AttachOutcome, CanaryReply, RankFacts, describe_error};
use super::sources::{kv_events_flag, publishes_nothing};
use crate::finding::{CheckFacts, CheckVerdict, Finding, error, ok, row, run_checks, warning};

/// Returns the findings about the canary of one rank.
pub(super) fn check(at: &RankCheck<'_>) -> Vec<Finding> {
    let rows = [
        row("canary.answered", check_answered),
        row("canary.reused", check_reused),
        row("canary.counted", check_token_count),
    ];
    let details = check_details(at);
    let details =
        details.map(|verdict| verdict.about("engine.prompt_tokens_details", at.worker.title()));
    let mut findings: Vec<Finding> = details.into_iter().collect();
    findings.extend(run_checks(at, &rows));
    findings.extend(check_events(at));
    findings
}

impl<'f> RankCheck<'f> {
    /// Returns the responses to the canary.
    fn canary(&self) -> Option<&'f CanaryReply> {
        self.rank.canary.as_ref()?.as_ref().ok()
    }
}

fn check_answered(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    let failure = at.rank.canary.as_ref()?.as_ref().err()?;
    let fix = match failure {
        EngineError::Timeout => {
            "set a longer timeout for a busy engine (`--timeout 60s`), and check its log"
        }
        _ => {
            "send the engine a request by hand (POST /v1/completions, max_tokens 1), \
            and check its log"
        }
    };
    let message = format!("the canary got no response: {}", describe_error(failure));
    Some(error(message, fix))
}

fn check_details(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    Some(match at.canary()?.cached {
        Some(_) => ok("usage reports the cached tokens"),
        None => warning(
            "usage.prompt_tokens_details has no cached tokens: \
            predictions cannot be audited or corrected",
            "start the engine with `--enable-prompt-tokens-details`",
        ),
    })
}

/// Checks the number of cached tokens that the engine reports.
fn check_reused(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    let canary = at.canary()?;
    let cached = canary.cached?;
    let known = canary.tokens.as_ref().map(Vec::len);
    let tokens = canary.prompt_tokens.or(known)?;
    let block = engine_block_tokens(at.worker);
    // Even on a full hit, the engine computes the last token.
    let expected = tokens.saturating_sub(1) / block * block;
    let message = format!(
        "the canary of {tokens} tokens, sent twice, found {cached} cached; {expected} expected"
    );
    Some(match cached {
        _ if cached == expected => ok(message),
        // The block is dropped after the match, so the events and the index are right.
        _ if cached > 0 && cached + block == expected => ok(format!(
            "{message}. The engine recomputes the last matched block, \
            as vLLM up to 0.32 does with EAGLE or MTP speculative decoding. This is normal: \
            `warmroute serve` learns it from responses"
        )),
        0 => error(
            message,
            "start the engine with `--enable-prefix-caching`, \
            and with more KV blocks if its cache is full",
        ),
        _ => warning(
            message,
            format!(
                "check whether the cache of the engine of {} is full, \
                or retains only a part of each prefix",
                at.worker.title()
            ),
        ),
    })
}

/// Compares the number of prompt tokens in warmroute and in the engine.
fn check_token_count(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    let ours = at.canary()?.tokens.as_ref()?.len();
    let theirs = at.canary()?.prompt_tokens?;
    let model = &at.worker.worker.model;
    (ours != theirs).then(|| {
        error(
            format!("the canary has {ours} tokens in warmroute and {theirs} in the engine"),
            format!("set `tokenizer` of the model {model} to the file that the engine loads"),
        )
    })
}

/// Blocks of the canary that arrived as an event.
struct ArrivedPrompt<'f> {
    at: &'f RankCheck<'f>,
    source: &'f EventSource,
    canary: &'f CanaryReply,
    received: &'f ProbedBatch,
    stored: &'f StoredEvent,
}

impl CheckFacts for ArrivedPrompt<'_> {
    fn subject(&self) -> String {
        self.at.subject()
    }
}

fn check_events(at: &RankCheck<'_>) -> Vec<Finding> {
    let (Some(canary), Some(source)) = (at.canary(), &at.rank.source) else {
        return Vec::new();
    };
    let has_listened = matches!(
        at.rank.attachment,
        Some(
            AttachOutcome::Attached(_)
                | AttachOutcome::EngineMayBind(_)
                | AttachOutcome::EngineBinds(_)
        )
    );
    if !has_listened || publishes_nothing(at) {
        return Vec::new();
    }
    let Some((received, stored)) = find_stored_prompt(at.rank, canary) else {
        return vec![judge_silence(at, source).about("events.arrive", at.subject())];
    };
    let arrived = ArrivedPrompt {
        at,
        source,
        canary,
        received,
        stored,
    };
    let rows = [
        row("events.topic", check_topic),
        row("events.rank", check_rank),
    ];
    let mut findings = run_checks(&arrived, &rows);
    let size = stored.block_size;
    if size != 0 && size != at.worker.worker.block_size.0.get() {
        let verdict = compare_block_size(at.worker, size, "its events");
        findings.push(verdict.about("engine.block_size", at.worker.title()));
    }
    let rows = [
        row("events.tokens", check_event_tokens),
        row("events.hashes", check_event_hashes),
    ];
    findings.extend(run_checks(&arrived, &rows).into_iter().take(1));
    if findings.is_empty() {
        let blocks = stored.hashes.len();
        let verdict = ok(format!(
            "{blocks} blocks of the canary arrived, with the expected tokens"
        ));
        findings.push(verdict.about("events.arrive", at.subject()));
    }
    findings
}

/// Judges a canary whose blocks did not arrive.
fn judge_silence(at: &RankCheck<'_>, source: &EventSource) -> CheckVerdict {
    let messages = &at.rank.messages;
    let mut failures = messages
        .iter()
        .filter_map(|received| received.batch.as_ref().err());
    if let Some(problem) = failures.next() {
        return error(
            format!("received messages that cannot be decoded: {problem}"),
            "run a supported engine (vLLM 0.16 and later, SGLang), or report the engine's version",
        );
    }
    error(
        format!(
            "the engine answered the canary, \
            but its blocks did not arrive at {} within {:?} ({} other messages did)",
            source.endpoint,
            at.rank.listen_timeout,
            messages.len()
        ),
        format!(
            "make the engine of {} publish there: start it with `{}`",
            at.subject(),
            kv_events_flag(source)
        ),
    )
}

fn check_topic(arrived: &ArrivedPrompt<'_>) -> Option<CheckVerdict> {
    let theirs = &arrived.received.topic;
    let ours = &arrived.source.topic;
    let section = arrived.at.worker.config_section();
    (!theirs.starts_with(ours)).then(|| {
        error(
            format!(
                "events have the topic {theirs:?}, but warmroute subscribes to {ours:?}: \
                none arrives"
            ),
            format!("write `topic: \"{theirs}\"` in the `kv_events` of {section}"),
        )
    })
}

fn check_rank(arrived: &ArrivedPrompt<'_>) -> Option<CheckVerdict> {
    let named = arrived.received.batch.as_ref().ok()?.rank?;
    let rank = arrived.at.rank.rank;
    let section = arrived.at.worker.config_section();
    (named != rank.0).then(|| {
        error(
            format!(
                "the events are from rank {named}, but expected from rank {rank}: all are dropped"
            ),
            format!(
                "write `data_parallel: {{start: {named}, size: 1}}` for {section}, \
                or the endpoint of rank {rank} (vLLM adds the rank to the port)"
            ),
        )
    })
}

fn check_event_tokens(arrived: &ArrivedPrompt<'_>) -> Option<CheckVerdict> {
    let tokens = arrived.canary.tokens.as_ref()?;
    let event_tokens = &arrived.stored.tokens.ids;
    let position = common_prefix_len(tokens, event_tokens);
    let theirs = event_tokens.get(position)?;
    let ours = tokens.get(position);
    let ours = ours.map_or("nothing".to_owned(), ToString::to_string);
    let model = &arrived.at.worker.worker.model;
    Some(error(
        format!(
            "token {position} of the canary is {ours} in warmroute and {theirs} in the event: \
            no later block is ever found"
        ),
        format!(
            "set `tokenizer` and `tokenizer_config` of the model {model} to the files \
            that the engine loads"
        ),
    ))
}

/// Compares the block hashes in the index with those of a request for the canary. Besides the
/// tokens, the hashes depend on salts and adapters. The events show whether they also cover the
/// next token.
fn check_event_hashes(arrived: &ArrivedPrompt<'_>) -> Option<CheckVerdict> {
    let tokens = arrived.canary.tokens.as_ref()?;
    let block_size = arrived.at.worker.worker.block_size;
    let salt = CacheSalt::default();
    let content = PromptContent {
        windows: BlockWindows::new(arrived.stored.tokens.bigrams),
        ..PromptContent::text(tokens, &salt)
    };
    let ours = BlockHashes::from_content(&content, block_size);
    let theirs = indexed_hashes(arrived.stored, block_size)?;
    let equal = theirs
        .iter()
        .zip(ours.locals())
        .take_while(|(theirs, ours)| theirs == ours);
    let equal = equal.count();
    let all = theirs.len();
    (equal < all).then(|| {
        error(
            format!(
                "{equal} of {all} blocks of the canary have the expected hashes, \
                although the tokens agree"
            ),
            "start the engine without a salt or an adapter of its own for plain requests",
        )
    })
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
    let main_start = |event: &'f EngineEvent| match event {
        EngineEvent::Stored(stored)
            if stored.parent.is_none()
                && !stored.hashes.is_empty()
                && matches!(stored.origin.kind, None | Some(AttentionKind::Main)) =>
        {
            Some(&**stored)
        }
        _ => None,
    };
    let starts = rank.messages.iter().flat_map(|received| {
        let events = received.batch.iter().flat_map(|batch| &batch.events);
        events
            .filter_map(main_start)
            .map(move |stored| (received, stored))
    });
    let tokens = canary.tokens.as_deref().unwrap_or_default();
    let common_tokens = |stored: &StoredEvent| common_prefix_len(tokens, &stored.tokens.ids);
    // Returns true if the event has all complete blocks of the tokens that the engine counted.
    let fits = |stored: &StoredEvent| {
        let block = (stored.block_size as usize).max(1);
        let counted = canary.prompt_tokens.map(|tokens| tokens / block);
        counted == Some(stored.tokens.ids.len() / block)
    };
    let (received, stored) =
        starts.max_by_key(|(_, stored)| (common_tokens(stored), fits(stored)))?;
    (common_tokens(stored) > 0 || fits(stored)).then_some((received, stored))
}

/// Returns the length of the common prefix.
fn common_prefix_len(ours: &[u32], theirs: &[u32]) -> usize {
    let pairs = ours.iter().zip(theirs);
    pairs.take_while(|(ours, theirs)| ours == theirs).count()
}
