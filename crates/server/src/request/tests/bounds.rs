//! Prompts that exceed the length of the model or the deadline are routed by their first tokens,
//! and do not delay other requests.

use warmroute_core::engine_settings::CommonSettings;

use super::*;

const PATH: &str = "/v1/completions";

/// Returns a text of about this length, in different sentences.
fn words(bytes: usize) -> String {
    (0_u64..)
        .map(|n| format!("sentence {n} of a long prompt, "))
        .take(bytes / 30 + 1)
        .collect()
}

fn body(prompt: &str) -> Bytes {
    serde_json::json!({"model": "m", "prompt": prompt})
        .to_string()
        .into()
}

fn limits_with_long_deadline() -> EncodeLimits {
    EncodeLimits {
        inline: 4096,
        queue: 256,
        deadline: Duration::from_secs(60),
    }
}

/// Returns a preprocessor for a model of this length, with trusted clients.
fn preprocessor_for_length(max_model_len: u64, limits: EncodeLimits) -> Arc<RequestPreprocessor> {
    let mut preprocessor = Arc::into_inner(preprocessor_with_tokenizer(limits)).unwrap();
    preprocessor.parts.nvext = NvExtScope::All;
    let settings = CommonSettings {
        max_model_len: Some(max_model_len),
        ..CommonSettings::default()
    };
    let source = TokenSource {
        parity: Arc::default(),
        engine_tokens: None,
        engine_settings: Arc::new(arc_swap::ArcSwap::from_pointee(
            [("m".into(), settings)].into(),
        )),
    };
    preprocessor.parts.token_sources = TokenSources::from([("m".into(), source)]);
    Arc::new(preprocessor)
}

/// Returns the known blocks of a partial prompt, with the reason.
fn known_prefix(prompt: RoutePrompt) -> (BlockHashes, u64, Reason) {
    match prompt {
        RoutePrompt::Truncated {
            known,
            tokens,
            reason,
        } => (known, tokens, reason),
        prompt => panic!("{:?}", prompt.reason()),
    }
}

fn complete_prompt(prompt: RoutePrompt) -> BlockHashes {
    match prompt {
        RoutePrompt::Hashed(mut prompts) => prompts.pop().unwrap(),
        prompt => panic!("{:?}", prompt.reason()),
    }
}

#[test]
fn prompt_is_known_up_to_model_length() {
    let prompt = words(40_000);
    let exact = complete_prompt(
        preprocessor_with_tokenizer(limits_with_long_deadline())
            .preprocess_blocking(None, PATH, &|_| None, &body(&prompt))
            .route_request
            .prompt,
    );
    let preprocessor = preprocessor_for_length(1000, limits_with_long_deadline());
    let (known, tokens, reason) = known_prefix(
        preprocessor
            .preprocess_blocking(None, PATH, &|_| None, &body(&prompt))
            .route_request
            .prompt,
    );
    assert_eq!((known.len(), reason), (1000 / 16, Reason::PromptTooLong));
    assert_eq!(known.locals(), &exact.locals()[..known.len()]);
    assert!(
        tokens > 5000,
        "the load of the whole prompt is estimated: {tokens}"
    );
    // The engine computes only the part that remains after truncation.
    let cut = serde_json::json!({"model": "m", "prompt": prompt, "truncate_prompt_tokens": 500, "truncation_side": "right"});
    let kept = complete_prompt(
        preprocessor
            .preprocess_blocking(None, PATH, &|_| None, cut.to_string().as_bytes())
            .route_request
            .prompt,
    );
    assert_eq!(kept.locals(), &exact.locals()[..500 / 16]);
    let tokens: Vec<u32> = (1..=2000).collect();
    let token_body = serde_json::json!({"model": "m", "prompt": tokens}).to_string();
    let (known, _, reason) = known_prefix(
        preprocessor
            .preprocess_blocking(None, PATH, &|_| None, token_body.as_bytes())
            .route_request
            .prompt,
    );
    assert_eq!((known.len(), reason), (1000 / 16, Reason::PromptTooLong));
}

#[test]
fn token_data_is_truncated_to_model_length() {
    let tokens: Vec<u32> = (1..=2000).collect();
    let prompt_of = |tokens: &[u32]| {
        let body =
            serde_json::json!({"model": "m", "prompt": "x", "nvext": {"token_data": tokens}})
                .to_string();
        preprocessor_for_length(1000, limits_with_long_deadline())
            .preprocess_blocking(None, PATH, &|_| None, body.as_bytes())
            .route_request
            .prompt
    };
    let (known, tokens_estimated, reason) = known_prefix(prompt_of(&tokens));
    assert_eq!((known.len(), reason), (1000 / 16, Reason::PromptTooLong));
    assert!(tokens_estimated >= 1000 / 16 * 16, "{tokens_estimated}");
    let exact = complete_prompt(prompt_of(&tokens[..1000]));
    assert_eq!(known.locals(), exact.locals());
}

#[tokio::test]
async fn prompt_of_20_mb_is_routed_by_prefix() {
    let prompt = words(20_000_000);
    let preprocessor = preprocessor_for_length(16_384, limits_with_long_deadline());
    let exact = complete_prompt(
        preprocessor_with_tokenizer(limits_with_long_deadline())
            .preprocess_blocking(None, PATH, &|_| None, &body(&prompt[..200_000]))
            .route_request
            .prompt,
    );
    let sent = RequestBody::Whole(body(&prompt));
    let (known, _, reason) = known_prefix(
        preprocessor
            .preprocess(PATH, &|_| None, &sent)
            .await
            .route_request
            .prompt,
    );
    assert_eq!((known.len(), reason), (16_384 / 16, Reason::PromptTooLong));
    assert_eq!(known.locals(), &exact.locals()[..known.len()]);
}

#[tokio::test]
async fn maximum_deadline_never_expires() {
    let preprocessor = preprocessor_with_tokenizer(EncodeLimits {
        deadline: Duration::MAX,
        ..limits_with_long_deadline()
    });
    complete_prompt(
        preprocessor
            .preprocess(PATH, &|_| None, &RequestBody::Whole(body("one two three")))
            .await
            .route_request
            .prompt,
    );
}

#[tokio::test]
async fn missed_deadline_keeps_first_tokens() {
    let prompt = words(2_000_000);
    let exact = complete_prompt(
        preprocessor_with_tokenizer(limits_with_long_deadline())
            .preprocess_blocking(None, PATH, &|_| None, &body(&prompt))
            .route_request
            .prompt,
    );
    let sent = RequestBody::Whole(body(&prompt));
    // The parsing time of a body depends on the machine.
    for millis in [50, 100, 200, 400, 800, 1600, 3200, 6400] {
        let preprocessor = preprocessor_with_tokenizer(EncodeLimits {
            deadline: Duration::from_millis(millis),
            ..limits_with_long_deadline()
        });
        let prompt = preprocessor
            .preprocess(PATH, &|_| None, &sent)
            .await
            .route_request
            .prompt;
        assert_eq!(
            prompt.reason(),
            Some(Reason::DecisionTimeout),
            "within {millis} ms"
        );
        if let RoutePrompt::Truncated { known, .. } = prompt {
            assert!(!known.is_empty() && known.len() < exact.len());
            assert_eq!(known.locals(), &exact.locals()[..known.len()]);
            return;
        }
    }
    panic!("no deadline left a known prefix");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_leave_small_ones_exact() {
    let limits = EncodeLimits {
        deadline: Duration::from_secs(4),
        ..limits_with_long_deadline()
    };
    let preprocessor = preprocessor_with_tokenizer(limits);
    let large = RequestBody::Whole(body(&words(12_000_000)));
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let preprocessor = preprocessor.clone();
            let large = large.clone();
            tokio::spawn(async move {
                loop {
                    preprocessor.preprocess(PATH, &|_| None, &large).await;
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    for n in 0..20 {
        let small = RequestBody::Whole(body(&format!("{n} {}", words(20_000))));
        let prompt = preprocessor
            .preprocess(PATH, &|_| None, &small)
            .await
            .route_request
            .prompt;
        assert!(
            matches!(prompt, RoutePrompt::Hashed(_)),
            "{n}: {:?}",
            prompt.reason()
        );
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
}
