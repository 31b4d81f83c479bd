//! Many concurrent clients, some of which cancel requests at any time. At the end, every slot is
//! free and no request is queued. No request waits until its deadline, which would be a lost
//! wake-up.

use std::sync::atomic::{AtomicUsize, Ordering};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use warmroute_core::worker::WorkerRank;

use super::*;

const TASKS: u64 = 64;
const SLOTS: usize = 4;
const REQUESTS: usize = 150;

/// Request counters.
#[derive(Default)]
struct RequestCounts {
    running: AtomicUsize,
    placed: AtomicUsize,
    cancelled: AtomicUsize,
}

async fn yield_times(times: u32) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}

async fn client(queue: Arc<AdmissionQueue<TestPlacer>>, counts: Arc<RequestCounts>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..REQUESTS {
        let lane = match rng.random_range(0..4) {
            0 => QueueLane::Pinned(WorkerRank::new(rng.random_range(0..3), 0)),
            1 => QueueLane::WorkerSet(rng.random_range(0..3)),
            _ => QueueLane::AnyWorker,
        };
        let class = rng.random_bool(0.5).then(|| "other".to_owned());
        let strict_priority = rng.random_range(0..2);
        let metadata = QueueMetadata {
            class,
            lane,
            strict_priority,
            ..metadata(rng.random_range(1..100))
        };
        let max_yields = rng.random_bool(0.3).then(|| rng.random_range(0..20));
        let outcome = match (queue.enter("a".into(), metadata), max_yields) {
            (EnterOutcome::Done(outcome), _) => outcome,
            (EnterOutcome::Queued(wait), None) => wait.placement().await,
            (EnterOutcome::Queued(wait), Some(max_yields)) => tokio::select! {
                outcome = wait.placement() => outcome,
                () = yield_times(max_yields) => {
                    counts.cancelled.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
            },
        };
        let slot = outcome.unwrap_or_else(|rejected| panic!("{rejected}"));
        assert!(counts.running.fetch_add(1, Ordering::SeqCst) < SLOTS);
        counts.placed.fetch_add(1, Ordering::SeqCst);
        yield_times(rng.random_range(0..4)).await;
        counts.running.fetch_sub(1, Ordering::SeqCst);
        drop(slot);
    }
}

async fn run_clients(with_background_task: bool) {
    let class = |name: &str, quantum| -> ClassConfig {
        serde_json::from_value(serde_json::json!({ "name": name, "quantum": quantum })).unwrap()
    };
    let config = QueueConfig {
        timeout: DurationSetting::seconds(20),
        classes: vec![class("one", 7), class("other", 100)],
        ..config_with_threshold()
    };
    let queue = TestPlacer::queue(SLOTS, &config, PrefillBacklog::Fixed);
    let task_queue = queue.clone();
    let background_task =
        with_background_task.then(|| tokio::spawn(async move { task_queue.run().await }));
    let counts = Arc::new(RequestCounts::default());
    let clients: Vec<_> = (0..TASKS)
        .map(|seed| tokio::spawn(client(queue.clone(), counts.clone(), seed)))
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    let statuses = queue.class_statuses();
    for class in &statuses {
        assert_eq!(class.depth, QueueDepth::default(), "{class:?}");
    }
    let cancelled = counts.cancelled.load(Ordering::SeqCst);
    let placed = counts.placed.load(Ordering::SeqCst);
    let sum = |counter: fn(&ClassCounters) -> u64| {
        statuses
            .iter()
            .map(|class| counter(&class.counters))
            .sum::<u64>() as usize
    };
    assert_eq!(queue.placer().free(), SLOTS);
    assert_eq!(placed + cancelled, TASKS as usize * REQUESTS);
    // Some requests were placed at the time of their cancellation. The queue does not count them as
    // cancelled.
    assert!(
        sum(|counters| counters.cancelled) <= cancelled && cancelled > 0,
        "{statuses:?} {cancelled}"
    );
    assert!(sum(|counters| counters.waited) > REQUESTS, "{statuses:?}");
    assert_eq!(sum(|counters| counters.expired), 0);
    background_task
        .into_iter()
        .for_each(|background_task| background_task.abort());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_clients_with_background_task_leave_nothing() {
    run_clients(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_clients_without_background_task_leave_nothing() {
    run_clients(false).await;
}

#[tokio::test]
async fn concurrent_clients_on_one_thread_leave_nothing() {
    run_clients(false).await;
}
