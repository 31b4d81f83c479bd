//! Limits of classes, their shares, and requests that fail.

use super::*;

/// Returns a configuration of queue classes with one limit each.
fn limited_classes() -> QueueConfig {
    serde_json::from_value(serde_json::json!({
        "prefill_busy_threshold": 0,
        "retry_after": "4s",
        "default_family": "f",
        "uncached_buckets": [{ "min_tokens": 0, "bucket": "all" }],
        "classes": [
            { "name": "two", "family": "f", "bucket": "all", "max_requests_per_worker": 2 },
            { "name": "tokens", "max_prompt_tokens_per_worker": 100 },
            { "name": "cached", "max_cached_tokens_per_worker": 5 },
            { "name": "never", "max_requests_per_worker": 0 },
        ],
    }))
    .unwrap()
}

fn class_metadata(class: &str) -> QueueMetadata {
    QueueMetadata {
        class: Some(class.into()),
        cached_tokens: 9,
        ..metadata(99)
    }
}

#[tokio::test(start_paused = true)]
async fn overflow_error_names_limit_and_retry_time() {
    let queue = queue_with_slots(0, &limited_classes());
    let cases = [
        ("f", 2, QueueLimitKind::Requests, 2, 2),
        ("tokens", 2, QueueLimitKind::PromptTokens, 198, 100),
        ("cached", 1, QueueLimitKind::CachedTokens, 9, 5),
        ("never", 0, QueueLimitKind::Requests, 0, 0),
    ];
    let mut queued = Vec::new();
    for (name, accepted, kind, current, limit) in cases {
        queued.extend(
            (0..accepted).map(|_| expect_queued(queue.enter("a".into(), class_metadata(name)))),
        );
        let class = if name == "f" { "two" } else { name }.into();
        let retry_after = Duration::from_secs(4);
        let expected = AdmissionError::Overflow {
            class,
            kind,
            current,
            limit,
            retry_after,
        };
        assert_eq!(
            expect_rejected(queue.enter("b".into(), class_metadata(name))),
            expected
        );
    }
    let counters: Vec<_> = queue
        .class_statuses()
        .into_iter()
        .map(|class| class.counters)
        .collect();
    let overflows = |counters: &ClassCounters| {
        (
            counters.waited,
            counters.over_requests,
            counters.over_prompt_tokens,
            counters.over_cached_tokens,
        )
    };
    assert_eq!(
        counters.iter().map(overflows).collect::<Vec<_>>(),
        [(2, 1, 0, 0), (2, 0, 1, 0), (1, 0, 0, 1), (0, 1, 0, 0)]
    );
}

/// More workers allow more queued requests. A request that can be placed is never rejected, even if
/// its class queues none.
#[tokio::test(start_paused = true)]
async fn free_worker_places_request_of_full_class() {
    let queue = queue_with_slots(0, &limited_classes());
    let mut queued: Vec<_> = (0..2)
        .map(|_| expect_queued(queue.enter("a".into(), class_metadata("f"))))
        .collect();
    queue.placer().set_workers(2);
    queued.push(expect_queued(queue.enter("a".into(), class_metadata("f"))));
    queued.clear();
    queue.placer().add(1);
    let slot = expect_placed(queue.enter("a".into(), class_metadata("never")));
    let wait = expect_queued(queue.enter("a".into(), class_metadata("f")));
    drop(slot);
    wait.placement().await.unwrap();
    assert_eq!(queued_requests(&queue), 0);
}

#[tokio::test(start_paused = true)]
async fn placeable_request_is_not_rejected_while_others_wait() {
    let class = |name: &str, requests| -> ClassConfig {
        serde_json::from_value(
            serde_json::json!({ "name": name, "max_requests_per_worker": requests }),
        )
        .unwrap()
    };
    let config = QueueConfig {
        classes: vec![class("never", Some(0)), class("queued", None)],
        ..config_with_threshold()
    };
    let queue = TestPlacer::queue(0, &config, PrefillBacklog::Fixed);
    let class_metadata = |class: &str, lane| QueueMetadata {
        class: Some(class.into()),
        lane,
        ..metadata(10)
    };
    let wait = expect_queued(queue.enter(
        "queued".into(),
        class_metadata("queued", QueueLane::AnyWorker),
    ));
    queue.placer().add_silently(1);
    // No wake-up was sent, so the queued request does not compete.
    let slot = expect_placed(queue.enter(
        "never".into(),
        class_metadata("never", QueueLane::AnyWorker),
    ));
    assert_eq!(slot.name, "never");
    drop(slot);
    assert_eq!(wait.placement().await.unwrap().name, "queued");
}

#[tokio::test(start_paused = true)]
async fn panic_fails_one_request_only() {
    let panics = || TestRequest {
        behavior: PlaceBehavior::Panics,
        ..TestRequest::from("panics")
    };
    let queue = queue_with_slots(1, &config_with_threshold());
    assert_eq!(
        expect_rejected(queue.enter(panics(), metadata(10))),
        AdmissionError::Panicked
    );
    let slot = expect_placed(queue.enter("a".into(), metadata(10)));
    let panicking = expect_queued(queue.enter(panics(), metadata(10)));
    let valid = expect_queued(queue.enter("valid".into(), metadata(10)));
    // Long enough for the refresh to panic as well.
    tokio::time::advance(Duration::from_secs(12)).await;
    drop(slot);
    assert_eq!(valid.placement().await.unwrap().name, "valid");
    assert_eq!(
        panicking.placement().await.unwrap_err(),
        AdmissionError::Panicked
    );
    assert_eq!((queued_requests(&queue), queue.placer().free()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn empty_fleet_rejects_waiting_requests() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let wait = expect_queued(queue.enter("a".into(), metadata(10)));
    queue.placer().set_workers(0);
    assert_eq!(
        expect_rejected(queue.enter("b".into(), metadata(10))),
        AdmissionError::Refused("no worker")
    );
    assert_eq!(
        wait.placement().await.unwrap_err(),
        AdmissionError::Refused("no worker")
    );
    assert_eq!(queued_requests(&queue), 0);
}
