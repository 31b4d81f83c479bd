//! Findings about the canary and its events.

use super::*;

/// Returns a change that replaces the received messages of the rank.
fn with_message(message: ProbedBatch) -> impl FnOnce(&mut WorkerFacts) {
    move |facts| facts.ranks[0].messages = vec![message]
}

#[test]
fn canary_events_are_compared() {
    let ours = tokens();
    let words = ["have the topic \"other\"", "write `topic: \"other\"`"];
    assert_problem(
        FindingLevel::Error,
        "events.topic",
        &words,
        with_message(message(stored(&ours[..96], 32), "other", Some(0))),
    );
    let words = [
        "from rank 3",
        "write `data_parallel: {start: 3, size: 1}` for worker 1",
    ];
    assert_problem(
        FindingLevel::Error,
        "events.rank",
        &words,
        with_message(message(stored(&ours[..96], 32), "kv@a", Some(3))),
    );
    let mut theirs = ours[..96].to_vec();
    theirs[40] = 7;
    let words = ["token 40 of the canary is 40 in warmroute and 7 in the event"];
    assert_problem(
        FindingLevel::Error,
        "events.tokens",
        &words,
        with_message(message(stored(&theirs, 32), "kv@a", None)),
    );
    let words = ["1 other messages did", "start it with `--kv-events-config"];
    assert_problem(
        FindingLevel::Error,
        "events.arrive",
        &words,
        with_message(message(stored(&[9, 9], 1), "kv@a", None)),
    );
}

#[test]
fn canary_events_with_other_hashes_are_reported() {
    let ours = tokens();
    let mut bigrams = stored(&ours[..96], 32);
    bigrams.tokens = EventTokens {
        ids: ours[..97].to_vec(),
        bigrams: true,
    };
    assert_eq!(problems(with_message(message(bigrams, "kv@a", None))), []);
    let salted = StoredEvent {
        cache_salt: Some("s".to_owned()),
        ..stored(&ours[..96], 32)
    };
    assert_problem(
        FindingLevel::Error,
        "events.hashes",
        &["0 of 3 blocks"],
        with_message(message(salted, "kv@a", None)),
    );
    let garbage = ProbedBatch {
        batch: Err("not a batch".to_owned()),
        ..message(StoredEvent::default(), "kv@a", None)
    };
    assert_problem(
        FindingLevel::Error,
        "events.arrive",
        &["messages that cannot be decoded: not a batch"],
        with_message(garbage),
    );
    // Without a metrics page, the block size is taken from the events.
    assert_problem(
        FindingLevel::Warning,
        "engine.block_size",
        &["16 tokens by its events", "write `block_size: 16`"],
        |facts| {
            facts.metrics = Err(EngineError::NotOffered(404));
            facts.ranks[0].messages = vec![message(stored(&ours[..96], 16), "kv@a", None)];
        },
    );
}

#[test]
fn canary_reuse_is_compared_with_expectation() {
    let cached = |cached: usize| {
        move |facts: &mut WorkerFacts| {
            let Some(Ok(canary)) = &mut facts.ranks[0].canary else {
                panic!("no canary")
            };
            canary.cached = Some(cached);
        }
    };
    assert_problem(
        FindingLevel::Error,
        "canary.reused",
        &["found 0 cached; 96 expected"],
        cached(0),
    );
    assert_problem(
        FindingLevel::Warning,
        "canary.reused",
        &["found 32 cached; 96 expected"],
        cached(32),
    );
    // Speculative decoding drops the last block.
    assert_eq!(problems(cached(64)), []);
    assert_problem(
        FindingLevel::Error,
        "canary.counted",
        &["has 100 tokens in warmroute and 99 in the engine"],
        |facts| {
            let Some(Ok(canary)) = &mut facts.ranks[0].canary else {
                panic!("no canary")
            };
            canary.prompt_tokens = Some(99);
        },
    );
}

fn differing_token() -> TokenDifference {
    TokenDifference {
        compared: ComparedItem::Length,
        canary: Some("tools".to_owned()),
        position: 17,
        block: 1,
        warmroute_token: Some(4),
        engine_token: None,
        warmroute_text: None,
        engine_text: None,
        matching_settings: None,
    }
}

#[test]
fn first_differing_token_is_reported_with_text() {
    let words = [
        "canary tools: token 17 is 4 in warmroute and nothing in the engine",
        "\"b\" in warmroute, \"c\" in the engine",
    ];
    assert_problem(FindingLevel::Error, "engine.tokenizer", &words, |facts| {
        let difference = TokenDifference {
            warmroute_text: Some("b".to_owned()),
            engine_text: Some("c".to_owned()),
            ..differing_token()
        };
        facts.parity = CanaryVerdict::Differs {
            difference: Box::new(difference),
        };
    });
}

/// Sets a difference in the generation prompt, with settings for which it disappears.
fn set_resolvable_difference(facts: &mut WorkerFacts) {
    let difference = TokenDifference {
        matching_settings: Some("exclude_tools_when_tool_choice_none: true".to_owned()),
        ..differing_token()
    };
    facts.parity = CanaryVerdict::GenerationPromptDiffers {
        difference: Box::new(difference),
        end_tokens: 3,
    };
}

#[test]
fn matching_settings_are_the_fix() {
    let words = [
        "known only up to the generation prompt",
        "set `exclude_tools_when_tool_choice_none: true` for the model",
    ];
    assert_problem(
        FindingLevel::Warning,
        "engine.tokenizer",
        &words,
        set_resolvable_difference,
    );
}

#[test]
fn workers_with_different_tokens_need_same_options() {
    let words = ["start all workers of the model m with the same options"];
    assert_problem(FindingLevel::Warning, "engine.tokenizer", &words, |facts| {
        set_resolvable_difference(facts);
        let mut all = [facts.clone(), healthy_worker()];
        record_agreeing_workers(&mut all);
        *facts = all[0].clone();
    });
}

#[test]
fn agreement_counts_only_for_the_same_model() {
    let mut all = [healthy_worker(), healthy_worker()];
    set_resolvable_difference(&mut all[0]);
    all[1].worker.model = "other".into();
    record_agreeing_workers(&mut all);
    let has_agreeing_worker = all.map(|facts| facts.has_agreeing_worker);
    assert_eq!(has_agreeing_worker, [false, true]);
}
