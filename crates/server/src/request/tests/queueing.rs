//! Limits of concurrent encoding.

use super::*;

#[tokio::test]
async fn full_queue_and_deadline_have_their_reasons() {
    let limits = EncodeLimits {
        inline: 4096,
        queue: 4,
        deadline: Duration::from_millis(50),
    };
    let preprocessor = preprocessor_with_tokenizer(limits);
    let prompt = "a prompt that takes longer than its deadline ".repeat(100_000);
    let body = RequestBody::Whole(
        serde_json::json!({"model": "m", "prompt": prompt})
            .to_string()
            .into(),
    );
    let reason = async || match preprocessor
        .preprocess("/v1/completions", &|_| None, &body)
        .await
        .route_request
        .prompt
    {
        RoutePrompt::Estimated { reason, .. } | RoutePrompt::Truncated { reason, .. } => reason,
        prompt => panic!("{prompt:?}"),
    };
    // One thread runs all four requests. It stays free while the encoder threads work.
    let reasons = tokio::join!(reason(), reason(), reason(), reason());
    assert_eq!(
        reasons,
        (
            Reason::DecisionTimeout,
            Reason::DecisionTimeout,
            Reason::TokenizerBusy,
            Reason::TokenizerBusy
        )
    );
    assert_eq!(
        (
            Reason::DecisionTimeout.as_str(),
            Reason::TokenizerBusy.as_str()
        ),
        ("decision_timeout", "tokenizer_busy")
    );
    assert_eq!(
        preprocessor.encoders.queue.available_permits(),
        limits.queue,
        "no body waits"
    );
}

#[tokio::test]
async fn late_encoder_keeps_its_permit_until_done() {
    let preprocessor = preprocessor_with_short_deadline();
    let permits = preprocessor.encoders.threads.available_permits();
    // Parsing its JSON takes hundreds of milliseconds. On a busy machine, this thread may wait
    // longer for a core, or the deadline may pass before the encoder starts.
    let prompt = "a prompt that takes longer than a millisecond ".repeat(1_000_000);
    let body: Bytes = serde_json::json!({"model": "m", "prompt": prompt})
        .to_string()
        .into();
    let mut is_running = false;
    for _ in 0..20 {
        let preprocessed = preprocessor
            .preprocess(
                "/v1/completions",
                &|_| None,
                &RequestBody::Whole(body.clone()),
            )
            .await;
        assert!(matches!(
            preprocessed.route_request.prompt,
            RoutePrompt::Estimated {
                reason: Reason::DecisionTimeout,
                ..
            }
        ));
        is_running = preprocessor.encoders.threads.available_permits() == permits - 1;
        if is_running {
            break;
        }
    }
    assert!(is_running, "the encoder still runs after the deadline");
    let done = tokio::time::timeout(
        Duration::from_secs(60),
        preprocessor.encoders.threads.acquire_many(permits as u32),
    )
    .await;
    assert!(done.is_ok(), "the permit is released");
}
