use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;
use warmroute_settings::DurationSetting;

use super::admission_queue::MAX_PLACED_PER_PASS;
use super::config::{ClassConfig, QueueConfig};
use super::*;

mod limits;
mod placer;
mod stress;

use placer::{PlaceBehavior, TestPlacer, TestRequest, TestSlot};

/// Returns a configuration with one class that has a busy threshold.
fn config_with_threshold() -> QueueConfig {
    QueueConfig {
        prefill_busy_threshold: Some(0),
        ..QueueConfig::default()
    }
}

/// Returns a queue in front of one worker with this number of slots.
fn queue_with_slots(slots: usize, config: &QueueConfig) -> Arc<AdmissionQueue<TestPlacer>> {
    assert_eq!(config.problems(), []);
    TestPlacer::queue(slots, config, PrefillBacklog::Fixed)
}

fn metadata(prompt_tokens: u64) -> QueueMetadata {
    QueueMetadata {
        prompt_tokens,
        ..QueueMetadata::default()
    }
}

fn expect_placed(entered: EnterOutcome<TestPlacer>) -> TestSlot {
    match entered {
        EnterOutcome::Done(outcome) => outcome.unwrap(),
        EnterOutcome::Queued(_) => panic!("the request is queued"),
    }
}

fn expect_rejected(entered: EnterOutcome<TestPlacer>) -> AdmissionError<&'static str> {
    match entered {
        EnterOutcome::Done(outcome) => outcome.unwrap_err(),
        EnterOutcome::Queued(_) => panic!("the request is queued"),
    }
}

fn expect_queued(entered: EnterOutcome<TestPlacer>) -> QueueWait<TestPlacer> {
    match entered {
        EnterOutcome::Queued(wait) => wait,
        EnterOutcome::Done(outcome) => panic!("the request is not queued: {outcome:?}"),
    }
}

/// Polls a future once.
fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

/// Runs other tasks until this number of requests is queued. The clock does not advance.
async fn until_queued(queue: &AdmissionQueue<TestPlacer>, requests: u64) {
    for _ in 0..1000 {
        if queued_requests(queue) == requests {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{} requests are queued", queued_requests(queue));
}

fn queued_requests(queue: &AdmissionQueue<TestPlacer>) -> u64 {
    queue
        .class_statuses()
        .iter()
        .map(|class| class.depth.requests)
        .sum()
}

#[tokio::test(start_paused = true)]
async fn unconfigured_queue_never_waits() {
    let queue = queue_with_slots(0, &QueueConfig::default());
    let slots: Vec<_> = (0..10)
        .map(|_| expect_placed(queue.enter("a".into(), metadata(10))))
        .collect();
    assert_eq!(slots.len(), 10);
    assert_eq!(queued_requests(&queue), 0);
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_are_placed_in_order() {
    let queue = queue_with_slots(1, &config_with_threshold());
    let first = expect_placed(queue.enter("a".into(), metadata(10)));
    let wait = |name: &'static str| expect_queued(queue.enter(name.into(), metadata(10)));
    let b = wait("b");
    let c = wait("c");
    assert_eq!(b.remaining(), Duration::from_secs(30));
    let before = queue.class_statuses().remove(0);
    assert_eq!((&*before.class, before.counters.waited), ("default", 2));
    assert_eq!(
        before.depth,
        QueueDepth {
            requests: 2,
            prompt_tokens: 20,
            cached_tokens: 0
        }
    );
    drop(first);
    // c is polled first and places waiting requests; b still gets the slot.
    let mut c = pin!(c.placement());
    assert!(poll_once(c.as_mut()).is_none());
    let second = b.placement().await.unwrap();
    assert_eq!((second.name, queue.placer().free()), ("b", 0));
    drop(second);
    assert_eq!(c.await.unwrap().name, "c");
    assert_eq!(queued_requests(&queue), 0);
    assert_eq!(queue.placer().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn background_task_places_requests_of_slow_tasks() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let slow = expect_queued(queue.enter("slow".into(), metadata(10)));
    let background_task = queue.clone();
    let background_task = tokio::spawn(async move { background_task.run().await });
    queue.placer().add(1);
    until_queued(&queue, 0).await;
    assert_eq!(slow.placement().await.unwrap().name, "slow");
    background_task.abort();
}

#[tokio::test(start_paused = true)]
async fn background_task_rechecks_without_wake_up() {
    for (prefill, min_ms, max_ms) in [
        (PrefillBacklog::Fixed, 500, 2_001),
        (PrefillBacklog::Decaying, 50, 201),
    ] {
        let config = QueueConfig {
            timeout: DurationSetting::seconds(90),
            ..config_with_threshold()
        };
        let queue = TestPlacer::queue(0, &config, prefill);
        let background_task = queue.clone();
        let background_task = tokio::spawn(async move { background_task.run().await });
        let started = Instant::now();
        let wait = tokio::spawn(expect_queued(queue.enter("a".into(), metadata(10))).placement());
        tokio::task::yield_now().await;
        queue.placer().add_silently(1);
        wait.await.unwrap().unwrap();
        let elapsed = started.elapsed().as_millis();
        assert!(
            (min_ms..max_ms).contains(&elapsed),
            "{prefill:?}: {elapsed} ms"
        );
        background_task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn deadline_removes_the_request() {
    let config = QueueConfig {
        timeout: DurationSetting::seconds(7),
        retry_after: DurationSetting::seconds(3),
        ..config_with_threshold()
    };
    let queue = queue_with_slots(0, &config);
    let wait = expect_queued(queue.enter("a".into(), metadata(10)));
    let rejected = wait.placement().await.unwrap_err();
    let AdmissionError::DeadlineExceeded {
        class,
        waited,
        retry_after,
    } = rejected
    else {
        panic!("{rejected}")
    };
    assert_eq!((&*class, retry_after), ("default", Duration::from_secs(3)));
    assert!(
        (Duration::from_secs(7)..Duration::from_millis(7100)).contains(&waited),
        "{waited:?}"
    );
    let status = queue.class_statuses().remove(0);
    assert_eq!(status.depth, QueueDepth::default());
    assert_eq!(
        status.counters,
        ClassCounters {
            waited: 1,
            expired: 1,
            ..ClassCounters::default()
        }
    );
    queue.placer().add(1);
    assert_eq!(queue.placer().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn cancelled_request_leaves_the_queue() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let first = expect_queued(queue.enter("a".into(), metadata(10)));
    let second = expect_queued(queue.enter("b".into(), metadata(10)));
    let third = expect_queued(queue.enter("c".into(), metadata(10)));
    // The first was never polled, the second was.
    drop(first);
    let mut second = Box::pin(second.placement());
    assert!(poll_once(second.as_mut()).is_none());
    drop(second);
    assert_eq!(queued_requests(&queue), 1);
    queue.placer().add(1);
    assert_eq!(third.placement().await.unwrap().name, "c");
    let status = queue.class_statuses().remove(0);
    assert_eq!(status.depth, QueueDepth::default());
    assert_eq!(
        status.counters,
        ClassCounters {
            waited: 3,
            cancelled: 2,
            ..ClassCounters::default()
        }
    );
    assert_eq!(queue.placer().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn undelivered_placement_is_released() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let abandoned = expect_queued(queue.enter("a".into(), metadata(10)));
    let next = expect_queued(queue.enter("b".into(), metadata(10)));
    queue.placer().add(1);
    queue.place_waiting();
    assert_eq!((queued_requests(&queue), queue.placer().free()), (1, 0));
    // The request was placed, and its result is dropped unread.
    drop(abandoned);
    assert_eq!(next.placement().await.unwrap().name, "b");
    assert_eq!(queue.placer().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn new_request_does_not_overtake_its_lane() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let first = expect_queued(queue.enter("first".into(), metadata(10)));
    queue.placer().add_silently(1);
    // A slot is free, and no wake-up was sent yet.
    let new_request = expect_queued(queue.enter("new".into(), metadata(10)));
    queue.wake();
    let mut new_request = pin!(new_request.placement());
    assert!(poll_once(new_request.as_mut()).is_none());
    let slot = first.placement().await.unwrap();
    assert_eq!(slot.name, "first");
    drop(slot);
    assert_eq!(new_request.await.unwrap().name, "new");
}

#[tokio::test(start_paused = true)]
async fn cached_prefix_is_refreshed_after_long_wait() {
    for (refresh_after, seconds, refreshed) in [(10, 9, 0), (10, 11, 1), (10, 25, 1), (0, 25, 0)] {
        let queue = queue_with_slots(
            0,
            &QueueConfig {
                refresh_after: DurationSetting::seconds(refresh_after),
                ..config_with_threshold()
            },
        );
        let wait = expect_queued(queue.enter("a".into(), metadata(10)));
        tokio::time::advance(Duration::from_secs(seconds)).await;
        queue.placer().add(1);
        assert_eq!(
            wait.placement().await.unwrap().refreshed,
            refreshed,
            "{refresh_after} s, {seconds} s"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn wake_up_alone_does_not_refresh() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let wait = expect_queued(queue.enter("a".into(), metadata(10)));
    for _ in 0..25 {
        tokio::time::advance(Duration::from_secs(1)).await;
        queue.wake();
        queue.place_waiting();
    }
    queue.placer().add(1);
    assert_eq!(wait.placement().await.unwrap().refreshed, 2);
}

#[tokio::test(start_paused = true)]
async fn wake_up_during_attempt_is_not_lost() {
    let busy_at_wake_up = |times| TestRequest {
        behavior: PlaceBehavior::BusyAtWakeUp(times),
        ..TestRequest::from("early")
    };
    let queue = queue_with_slots(1, &config_with_threshold());
    // The first attempt precedes queueing, the second follows it, and wake-ups cause the others.
    drop(expect_placed(queue.enter(busy_at_wake_up(1), metadata(10))));
    for times in 2..6 {
        let wait = expect_queued(queue.enter(busy_at_wake_up(times), metadata(10)));
        assert_eq!(wait.placement().await.unwrap().name, "early", "{times}");
    }
}

#[tokio::test(start_paused = true)]
async fn removed_request_unblocks_its_lane() {
    for is_cancelled in [true, false] {
        let queue = queue_with_slots(
            1,
            &QueueConfig {
                timeout: DurationSetting::seconds(10),
                ..config_with_threshold()
            },
        );
        let wide = expect_queued(queue.enter(
            TestRequest {
                behavior: PlaceBehavior::TakesTwoSlots,
                ..TestRequest::from("wide")
            },
            metadata(10),
        ));
        tokio::time::advance(Duration::from_secs(5)).await;
        let narrow =
            tokio::spawn(expect_queued(queue.enter("narrow".into(), metadata(10))).placement());
        tokio::task::yield_now().await;
        assert_eq!(
            queued_requests(&queue),
            2,
            "the narrow request waits behind the wide one"
        );
        let started = Instant::now();
        if is_cancelled {
            drop(wide);
        } else {
            assert!(matches!(
                wide.placement().await,
                Err(AdmissionError::DeadlineExceeded { .. })
            ));
        }
        assert_eq!(narrow.await.unwrap().unwrap().name, "narrow");
        let max_seconds = if is_cancelled { 0 } else { 5 };
        assert_eq!(started.elapsed().as_secs(), max_seconds, "no other wake-up");
    }
}

#[tokio::test(start_paused = true)]
async fn one_pass_places_a_bounded_number() {
    let queue = queue_with_slots(0, &config_with_threshold());
    let all: Vec<_> = (0..100)
        .map(|_| expect_queued(queue.enter("a".into(), metadata(10))))
        .collect();
    queue.placer().add(100);
    queue.place_waiting();
    assert_eq!(queued_requests(&queue), 100 - MAX_PLACED_PER_PASS as u64);
    let mut slots = Vec::new();
    for wait in all {
        slots.push(wait.placement().await.unwrap());
    }
    assert_eq!((queued_requests(&queue), queue.placer().free()), (0, 0));
}
