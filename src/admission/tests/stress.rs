//! Many clients at once, of whom some leave at any moment. At the end every seat is free and nobody waits; and nobody
//! waited until a deadline, which would be a wake-up that was lost.

use std::sync::atomic::AtomicUsize;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::worker::{DpRank, WorkerId, WorkerRank};

const TASKS: u64 = 64;
const SEATS: usize = 4;
const REQUESTS: usize = 150;

#[derive(Default)]
struct Count {
    seated: AtomicUsize,
    placed: AtomicUsize,
    left: AtomicUsize,
}

async fn yields(times: u32) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}

async fn client(admission: Arc<Admission<Pool>>, count: Arc<Count>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..REQUESTS {
        let lane = match rng.random_range(0..4) {
            0 => Lane::Pinned(WorkerRank {
                worker: WorkerId(rng.random_range(0..3)),
                rank: DpRank(0),
            }),
            1 => Lane::Among(rng.random_range(0..3)),
            _ => Lane::Shared,
        };
        let class = rng.random_bool(0.5).then(|| "other".to_owned());
        let strict_priority = rng.random_range(0..2);
        let turn = Turn {
            class,
            lane,
            strict_priority,
            ..turn(rng.random_range(1..100))
        };
        let patience = rng.random_bool(0.3).then(|| rng.random_range(0..20));
        let outcome = match (admission.enter("a".into(), turn), patience) {
            (Entered::Done(outcome), _) => outcome,
            (Entered::Waiting(waits), None) => waits.placed().await,
            (Entered::Waiting(waits), Some(patience)) => tokio::select! {
                outcome = waits.placed() => outcome,
                () = yields(patience) => {
                    count.left.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
            },
        };
        let seat = outcome.unwrap_or_else(|rejected| panic!("{rejected}"));
        assert!(count.seated.fetch_add(1, Ordering::SeqCst) < SEATS);
        count.placed.fetch_add(1, Ordering::SeqCst);
        yields(rng.random_range(0..4)).await;
        count.seated.fetch_sub(1, Ordering::SeqCst);
        drop(seat);
    }
}

async fn crowd(with_pump: bool) {
    let class = |name: &str, quantum| -> ClassConfig {
        serde_json::from_value(serde_json::json!({ "name": name, "quantum": quantum })).unwrap()
    };
    let config = QueueConfig {
        deadline: Period::seconds(20),
        classes: vec![class("one", 7), class("other", 100)],
        ..gated()
    };
    let admission = Pool::room(SEATS, &config, Prefill::Steady);
    let pumped = admission.clone();
    let pump = with_pump.then(|| tokio::spawn(async move { pumped.run().await }));
    let count = Arc::new(Count::default());
    let clients: Vec<_> = (0..TASKS)
        .map(|seed| tokio::spawn(client(admission.clone(), count.clone(), seed)))
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    let standing = admission.standing();
    for class in &standing {
        assert_eq!(class.pending, Pending::default(), "{class:?}");
    }
    let left = count.left.load(Ordering::SeqCst);
    let placed = count.placed.load(Ordering::SeqCst);
    let tally =
        |of: fn(&Tally) -> u64| standing.iter().map(|class| of(&class.tally)).sum::<u64>() as usize;
    assert_eq!(admission.placing().free(), SEATS);
    assert_eq!(placed + left, TASKS as usize * REQUESTS);
    // Some were placed at the very moment they left, and do not count as having left the queue.
    assert!(
        tally(|tally| tally.left) <= left && left > 0,
        "{standing:?} {left}"
    );
    assert!(tally(|tally| tally.waited) > REQUESTS, "{standing:?}");
    assert_eq!(tally(|tally| tally.expired), 0);
    pump.into_iter().for_each(|pump| pump.abort());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crowd_with_a_pump_ends_at_zero() {
    crowd(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crowd_without_a_pump_ends_at_zero() {
    crowd(false).await;
}

#[tokio::test]
async fn a_crowd_on_one_thread_ends_at_zero() {
    crowd(false).await;
}
